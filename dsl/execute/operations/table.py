"""The operations of the torch program by name, as the rows of the language name them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from kvpolicy.dsl.execute.operations.elementwise import binary, compare, elementwise, logic
from kvpolicy.dsl.execute.tensors.values import Frame, Value, with_layer_axis
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ops.forms import LIBRARIES, form
from kvpolicy.dsl.ops.operations import Kind, Operation
from kvpolicy.dsl.ops.table import OPERATIONS


def reduce(node: Node, frame: Frame, x: Value) -> Value:
    """A reduction over `node.axes` that skips absent values."""
    return layer_by_layer(node.axes, frame, x, partial(_reduce, node))


def layer_by_layer(
    over: tuple[str, ...], frame: Frame, x: Value, made: Callable[[Frame, Value], Value]
) -> Value:
    """What `made` gives; over KV heads of several layers it is applied to each layer apart."""
    if not frame.layered or "kv" not in over:
        return made(frame, x)
    plain, heads = replace(frame, layered=False), frame.bound.shape.kv_heads
    return _for_each_head(made(plain, with_layer_axis(x, heads)), heads)


def _reduce(node: Node, frame: Frame, x: Value) -> Value:
    row, dims = node.operation, [x.axes.index(axis) for axis in node.axes]
    axes = tuple(axis for axis in x.axes if axis not in node.axes)
    function: Callable[..., torch.Tensor] = form(str(row.torch), "execute.operations")
    finite = row.always_finite or (x.finite and not (row.infinite_of_none and x.mask is not None))
    return Value(function(node, frame, x, dims), axes, finite=finite)


def _for_each_head(x: Value, heads: int) -> Value:
    """A value with the axis `layer`, repeated for the `heads` KV heads of each layer."""
    data = torch.as_tensor(x.data).repeat_interleave(heads, 0)
    return Value(data, ("kv", *x.axes[1:]), finite=x.finite)


# What turns a function of tensors into an operation on named axes.
_OF_TENSORS: dict[Kind, Callable[..., Callable[..., Value]]] = {
    Kind.ARITHMETIC: elementwise,
    Kind.COMPARISON: compare,
    Kind.LOGIC: logic,
}


def _form(row: Operation, path: str) -> Callable[..., Value]:
    if row.kind is Kind.REDUCTION:
        return reduce
    function, library = form(path, "execute.operations"), path.rpartition(".")[0]
    if library not in LIBRARIES:
        return function
    # Python's operators take numbers of the host, which need not be sent to the device.
    return _OF_TENSORS[row.kind](
        binary(function) if library == "torch" and row.most == 2 else function
    )


TORCH_FORMS = {
    name: _form(row, row.torch) for name, row in OPERATIONS.items() if row.torch is not None
}

# Kinds that are computed elsewhere: what looks at other layers, merges and states.
_ELSEWHERE = frozenset((Kind.LOOK, Kind.PARTITION, Kind.MERGE, Kind.REMEMBERED))


def is_computed(node: Node) -> bool:
    """Whether the torch program can compute a node's operation."""
    return node.op in TORCH_FORMS or node.operation.kind in _ELSEWHERE
