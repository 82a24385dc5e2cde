"""Adds noise to the interpreter, to tell whether rounding errors decide what a policy keeps.

Executions add numbers in different orders. If a policy divides by a sum that cancels to nearly 0,
or compares such sums, the last bit of a float64 decides, and executions may rightly differ. The
interpreter is run again with every operand of an inexact operation moved by a few units in the last
place (as in discrete stochastic arithmetic, Vignes 1993). Equal numbers still tie when they are
ordered, as they are rounded to float32 then, so noise hides no defect of ties.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
from kvpolicy.dsl.data import arrays
from kvpolicy.dsl.data.arrays import Array
from kvpolicy.dsl.interpret import along
from kvpolicy.dsl.interpret.values import Values
from kvpolicy.dsl.ops.forms import form
from kvpolicy.dsl.ops.table import OPERATIONS

SIZE = 2.0**-49
_INEXACT = {
    form(OPERATIONS[name].interpret, "interpret")
    for name in "add subtract multiply divide power exp log sqrt cos sin acos sum mean var".split()
}


@contextmanager
def rounded_otherwise(seed: int) -> Iterator[None]:
    """A block in which the interpreter rounds differently."""
    random = np.random.default_rng(seed)
    elementwise, reduce = arrays.elementwise, arrays.reduce
    gathered, pooled = Values.gathered, along._pooled

    def moved(x: Array) -> Array:
        if x.data.dtype == np.bool_:
            return x
        noise = 1 + SIZE * random.uniform(-1, 1, x.data.shape)
        return Array.of(x.axes, x.data * noise, x.present)

    def noisy_elementwise(function, *operands: Array) -> Array:
        if function in _INEXACT:
            operands = tuple(map(moved, operands))
        return elementwise(function, *operands)

    def noisy_reduce(function, x: Array, axes) -> Array:
        return reduce(function, moved(x) if function in _INEXACT else x, axes)

    def noisy_gathered(*given) -> Array:  # of what goes along an axis, as running sums do
        return moved(gathered(*given))

    def noisy_pooled(near: np.ndarray, *given) -> np.ndarray:
        return pooled(near * (1 + SIZE * random.uniform(-1, 1, near.shape)), *given)

    with (
        patch.object(arrays, "elementwise", noisy_elementwise),
        patch.object(arrays, "reduce", noisy_reduce),
        patch.object(Values, "gathered", noisy_gathered),
        patch.object(along, "_pooled", noisy_pooled),
    ):
        yield
