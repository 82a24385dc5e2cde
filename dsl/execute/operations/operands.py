"""The function that computes a node, and the operands that it takes.

The nodes that `entropy[a](x)` is expanded to are recognized, so that one kernel computes them.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpolicy.dsl.execute.operations.table import TORCH_FORMS, layer_by_layer
from kvpolicy.dsl.execute.tensors.values import Frame, Value, mask_of
from kvpolicy.dsl.ir.nodes import Node

# Axes reduced elsewhere: in generated kernels or blocks, across layers, in merges.
_ELSEWHERE = frozenset("query dim layer past dropped".split())


def operands(node: Node) -> tuple[Node, ...]:
    """Operands of a node: of an entropy its x; of a window none, as `bind` knows its argument."""
    if node.operation.is_window:
        return ()
    x = distribution(node)
    return node.args if x is None else (x,)


def operation(node: Node) -> Callable[..., Value]:
    """The function that computes a node from its frame and operands."""
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
    # Of KV heads alone it is a sum for which ranks meet; with more axes it is one there as well.
    return None if over == ("kv",) or _ELSEWHERE & {*over, *x.type.axes} else x


def entropy(node: Node, frame: Frame, x: Value) -> Value:
    """The entropy of x, which is `distribution(node)`."""
    over = node.args[0].axes

    def compute(frame: Frame, x: Value) -> Value:
        dims = [x.axes.index(axis) for axis in over]
        axes = tuple(axis for axis in x.axes if axis not in over)
        return Value(frame.kernels["entropy"](x.tensor.double(), mask_of(x), dims), axes)

    return layer_by_layer(over, frame, x, compute)
