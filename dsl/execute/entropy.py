"""What computes a node, and of which operands.

An entropy is found in what `entropy[a](x)` is written out to, so that a kernel can give it.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpolicy.dsl.execute.elementwise import kernel_for
from kvpolicy.dsl.execute.ops import TORCH_FORMS
from kvpolicy.dsl.execute.values import Frame, Value
from kvpolicy.dsl.ir.nodes import Node

# Attention and vectors are reduced by generated kernels, or in blocks; layers come one by one.
_ELSEWHERE = frozenset("query dim layer past dropped".split())


def operands(node: Node) -> tuple[Node, ...]:
    """What a node is computed of; a window is a number that `bind` knows, an entropy one step."""
    if node.operation.is_window:
        return ()
    x = distribution(node)
    return node.args if x is None else (x,)


def operation(node: Node) -> Callable[..., Value]:
    """What computes a node of its operands."""
    return TORCH_FORMS[node.op] if distribution(node) is None else entropy


def distribution(node: Node) -> Node | None:
    """The x of `-sum[a](p * log(p))` with p = `x / sum[a](x)`; None: the node is no entropy."""
    if node.op != "negate" or node.args[0].op != "sum" or node.args[0].args[0].op != "multiply":
        return None
    _, share, log, total = _parts(node)
    if log.op != "log" or log.args[0] is not share or share.op != "divide" or total.op != "sum":
        return None
    x, over = share.args[0], node.args[0].axes
    if total.args[0] is not x or total.axes != over:
        return None
    return None if _ELSEWHERE & {*over, *x.type.axes} else x


def _parts(node: Node) -> tuple[Node, Node, Node, Node]:
    """p * log(p), p, its logarithm, and what p was divided by."""
    term = node.args[0].args[0]
    share, log = term.args
    return term, share, log, share.args[1] if share.op == "divide" else share


def entropy(node: Node, frame: Frame, x: Value) -> Value:
    """The entropy of x, which is `distribution(node)`."""
    over = node.args[0].axes
    found = kernel_for("entropy", frame, x)
    if found is not None:
        kernel, there = found
        dims = [x.axes.index(axis) for axis in over]
        axes = tuple(axis for axis in x.axes if axis not in over)
        return Value(kernel(x.data, there, dims), axes)
    term, share, log, total = _parts(node)
    part = TORCH_FORMS["divide"](share, frame, x, TORCH_FORMS["sum"](total, frame, x))
    part = TORCH_FORMS["multiply"](term, frame, part, TORCH_FORMS["log"](log, frame, part))
    return TORCH_FORMS["negate"](node, frame, TORCH_FORMS["sum"](node.args[0], frame, part))
