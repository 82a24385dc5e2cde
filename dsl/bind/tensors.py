"""Tensors that come with the model (`data`): what a policy is given, checked against its axes.

Dimensions: L layers, G KV heads, R query heads per KV head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, TypeGuard

from kvpolicy.dsl.ir.nodes import Data, HeadTable, ModelShape, Program
from kvpolicy.dsl.syntax.diagnostics import refused

_HEADS = ("kv", "group")


def tensor_shape(tensor: Data, shape: ModelShape) -> list[int]:
    """Sizes of a tensor's axes, in the order of its declaration."""
    sizes = {"layer": shape.layers, "kv": shape.kv_heads, "group": shape.group}
    return [sizes[axis] for axis in tensor.axes]


def tensors_of(program: Program, shape: ModelShape) -> dict[str, HeadTable]:
    """The tensors that a policy declares, by name, from what was delivered.

    These are numbers in lists of lists, one level for each declared axis.

    Args:
        program: a checked policy.
        shape: of the model.

    Raises:
        PolicyError: one is missing, of another shape, or holds what is not accepted.
    """
    return {name: _table(program, tensor, shape) for name, tensor in program.data.items()}


def _table(program: Program, tensor: Data, shape: ModelShape) -> HeadTable:
    axes, sizes = f"[{', '.join(tensor.axes)}]", tensor_shape(tensor, shape)
    if tensor.name not in program.delivered:
        message = f"policy `{program.name}` needs the tensor `{tensor.name}`, {axes} of the model"
        numbers_text = f"the file of its {' x '.join(map(str, sizes))} numbers"
        help = (
            f"give {numbers_text} with `--data {tensor.name}=FILE`, to a server with "
            f"`--kv-policy-data {tensor.name}=FILE`"
        )
        raise refused(program.name, "data", message, help)
    value, where = program.delivered[tensor.name]
    uneven = _uneven(value)
    if uneven is not None:
        raise refused(where, "data", f"`{tensor.name}` has lists of {uneven} values side by side")
    if sizes and not _is_list(value):
        message = f"`{tensor.name}` is {value!r:.40}; {axes} takes lists of numbers"
        raise refused(where, "data", message)
    found_sizes = _sizes(value)
    if found_sizes != sizes:
        message = f"`{tensor.name}` has the shape {found_sizes}; {axes} of this model is {sizes}"
        raise refused(where, "data", message, "is it a file for another model?")
    numbers = {}
    for place in product(*map(range, sizes)):
        number = _at(value, place)
        problem = _problem(tensor, number)
        if problem is not None:
            indices = "".join(f"[{i}]" for i in place)
            raise refused(where, "data", f"`{tensor.name}{indices}` is {number!r:.40}; {problem}")
        numbers[place] = float(number)
    heads = [axis for axis in _HEADS if axis in tensor.axes]

    def read(*place: int) -> float:
        by_axis = dict(zip(("layer", *heads), place, strict=True))
        return numbers[tuple(by_axis[axis] for axis in tensor.axes)]

    ranges = [range(sizes[tensor.axes.index(axis)]) for axis in heads]
    layers = range(shape.layers)
    return HeadTable(
        tuple(heads), tuple(tuple(read(i, *place) for place in product(*ranges)) for i in layers)
    )


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _sizes(value: object) -> list[int]:
    """Sizes of lists of lists, by the first of each."""
    if not _is_list(value):
        return []
    return [len(value), *(_sizes(value[0]) if value else [])]


def _uneven(value: object) -> str | None:
    """Two lengths of lists that should have one, in words; None if there are none."""
    if not _is_list(value):
        return None
    lengths = [len(x) if _is_list(x) else 0 for x in value]
    if len(set(lengths)) > 1:
        return f"{min(lengths)} and {max(lengths)}"
    return next((text for x in value if (text := _uneven(x)) is not None), None)


def _at(value: Any, place: tuple[int, ...]) -> Any:
    """What is at a place of lists of lists; None if there is none, or if it is a list."""
    for i in place:
        if not _is_list(value) or i >= len(value):
            return None
        value = value[i]
    return None if _is_list(value) else value


def _problem(tensor: Data, number: object) -> str | None:
    """Why a number is not accepted; None if it is."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not _is_finite(number):
        return "finite numbers are accepted"
    if tensor.minimum is not None and number < tensor.minimum:
        return f"at least {float(tensor.minimum):g} is accepted"
    if tensor.maximum is not None and number > tensor.maximum:
        return f"at most {float(tensor.maximum):g} is accepted"
    return None


def _is_finite(number: int | float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # more digits than a float64 has
        return False
