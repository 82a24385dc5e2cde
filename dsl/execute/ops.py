"""The operations of the torch program by name, as the rows of the language name them."""

from __future__ import annotations

from collections.abc import Callable

from kvpolicy.dsl.execute.elementwise import binary, compare, elementwise, logic
from kvpolicy.dsl.execute.values import Value
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ops.forms import LIBRARIES, form
from kvpolicy.dsl.ops.operations import Kind, Operation
from kvpolicy.dsl.ops.table import OPERATIONS

# What makes an operation by name of axes of a function of tensors.
_OF_TENSORS: dict[Kind, Callable[..., Callable[..., Value]]] = {
    Kind.ARITHMETIC: elementwise,
    Kind.COMPARISON: compare,
    Kind.LOGIC: logic,
}


def _form(row: Operation, path: str) -> Callable[..., Value]:
    found, library = form(path, "execute"), path.rpartition(".")[0]
    if library not in LIBRARIES:
        return found
    # Signs of Python take numbers of the host as they are: these need not be sent.
    return _OF_TENSORS[row.kind](binary(found) if library == "torch" and row.most == 2 else found)


TORCH_FORMS = {
    name: _form(row, row.torch) for name, row in OPERATIONS.items() if row.torch is not None
}

# What is computed where its operands are found: other layers, a merge, what is remembered.
_ELSEWHERE = frozenset((Kind.LOOK, Kind.PARTITION, Kind.MERGE, Kind.REMEMBERED))


def is_computed(node: Node) -> bool:
    """Whether the torch program knows an operation."""
    return node.op in TORCH_FORMS or node.operation.kind in _ELSEWHERE
