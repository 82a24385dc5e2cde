"""Adds noise to the interpreter, to tell whether rounding errors decide what a policy keeps.

Executions add numbers in different orders. If a policy divides by a sum that cancels to nearly 0,
or compares such sums, the last bit of a float64 decides, and executions may rightly differ. The
interpreter is run again with every operand of an inexact operation moved by a few units in the last
place (as in discrete stochastic arithmetic, Vignes 1993). Equal numbers still tie when they are
ordered, as they are rounded to float32 then, so noise hides no defect of ties.

Kernels compute in float32. Its noise breaks ties, so it depends on the value that it moves: equal
operands of equal operations give equal results, in a kernel too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
from kvpolicy.dsl.data import arrays
from kvpolicy.dsl.data.arrays import Array
from kvpolicy.dsl.interpret import along, leaves
from kvpolicy.dsl.interpret.values import Values
from kvpolicy.dsl.ops.forms import form
from kvpolicy.dsl.ops.table import OPERATIONS

SIZE = 2.0**-49
SIZE_OF_FLOAT32 = 2.0**-21
_INEXACT = {
    form(OPERATIONS[name].interpret, "interpret")
    for name in "add subtract multiply divide power exp log sqrt cos sin acos sum mean var".split()
}


@contextmanager
def rounded_otherwise(seed: int) -> Iterator[None]:
    """A block in which the interpreter rounds differently."""
    random = np.random.default_rng(seed)
    with _moved_by(lambda x: x * (1 + SIZE * random.uniform(-1, 1, x.shape))):
        yield


@contextmanager
def rounded_to_float32(seed: int) -> Iterator[None]:
    """A block in which the interpreter rounds like another execution in float32.

    Logits are moved before their exponentials are taken, those of each query by themselves.
    """
    logits = leaves.logits

    def noisy_logits(*given) -> Array:
        x = logits(*given)
        heads, group, queries, _ = x.data.shape
        query = np.arange(heads * group * queries).reshape(heads, group, queries, 1)
        noise = SIZE_OF_FLOAT32 * _of_value(x.data, seed + (query << 8))
        return Array.of(x.axes, x.data + noise * np.maximum(1, abs(x.data)), x.present)

    with (
        patch.object(leaves, "logits", noisy_logits),  # as `attn` reads them
        _moved_by(lambda x: in_float32(x, seed)),
    ):
        yield


def in_float32(x: np.ndarray, seed: int) -> np.ndarray:
    """`x` moved by a few units in the last place of float32, equal numbers alike."""
    return x * (1 + SIZE_OF_FLOAT32 * _of_value(x, seed))


def _of_value(x: np.ndarray, seed: np.ndarray | int) -> np.ndarray:
    """Numbers from -1 to 1 that depend on each value and on the seed (murmur3's finalizer)."""
    bits = (x.astype(np.float32) + np.float32(0)).view(np.uint32).astype(np.uint64)
    bits = bits ^ (np.asarray(seed).astype(np.uint64) << np.uint64(32))
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        bits = (bits ^ bits >> np.uint64(33)) * np.uint64(factor)
    return (bits >> np.uint64(11)) / 2.0**52 - 1


@contextmanager
def _moved_by(move: Callable[[np.ndarray], np.ndarray]) -> Iterator[None]:
    """A block in which operands of the interpreter's inexact operations are moved."""
    elementwise, reduce = arrays.elementwise, arrays.reduce
    gathered, pooled = Values.gathered, along._pooled

    def moved(x: Array) -> Array:
        if x.data.dtype == np.bool_:
            return x
        return Array.of(x.axes, move(x.data), x.present)

    def noisy_elementwise(function, *operands: Array) -> Array:
        if function in _INEXACT:
            operands = tuple(map(moved, operands))
        return elementwise(function, *operands)

    def noisy_reduce(function, x: Array, axes) -> Array:
        return reduce(function, moved(x) if function in _INEXACT else x, axes)

    def noisy_gathered(*given) -> Array:  # of what goes along an axis, as running sums do
        return moved(gathered(*given))

    def noisy_pooled(near: np.ndarray, *given) -> np.ndarray:
        return pooled(move(near), *given)

    with (
        patch.object(arrays, "elementwise", noisy_elementwise),
        patch.object(arrays, "reduce", noisy_reduce),
        patch.object(Values, "gathered", noisy_gathered),
        patch.object(along, "_pooled", noisy_pooled),
    ):
        yield
