"""What computes a node, and of which operands.

An entropy is found in what `entropy[a](x)` is written out to, so that one kernel gives it.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpolicy.dsl.execute.ops import TORCH_FORMS, layer_by_layer
from kvpolicy.dsl.execute.values import Frame, Value, there_of
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
    share, log = node.args[0].args[0].args
    if log.op != "log" or log.args[0] is not share or share.op != "divide":
        return None
    total = share.args[1]
    x, over = share.args[0], node.args[0].axes
    if total.op != "sum" or total.args[0] is not x or total.axes != over:
        return None
    return None if _ELSEWHERE & {*over, *x.type.axes} else x


def entropy(node: Node, frame: Frame, x: Value) -> Value:
    """The entropy of x, which is `distribution(node)`."""
    over = node.args[0].axes

    def made(frame: Frame, x: Value) -> Value:
        dims = [x.axes.index(axis) for axis in over]
        axes = tuple(axis for axis in x.axes if axis not in over)
        return Value(frame.kernels["entropy"](x.tensor.double(), there_of(x), dims), axes)

    return layer_by_layer(over, frame, x, made)
