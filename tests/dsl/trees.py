"""Random expressions for hypothesis, as the trees of definition.py, and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from definition import COMPARISONS, Tree
from hypothesis import strategies as st

ONE = ("number", "1")
# `x ^ 1` removes the unit of x.
LEAVES = (
    *(("number", text) for text in ("0", "1", "2", "3", "0.5", "0.1", "2.75", "1e2", "7e-1", "13")),
    ("name", "heads"),
    ("name", "kv_heads"),
    ("^", ("name", "layer"), ONE),
    ("^", ("name", "layers"), ONE),
)
_DEEPEST = 4
# Multiples of one half, and values about as far from one as still count as it.
NEAR_HALVES = st.builds(
    lambda half, distance: half / 2 + distance * 2.0**-34 * max(1.0, abs(half / 2)),
    st.integers(-(2**40), 2**40) | st.integers(-20, 20),
    st.integers(-8, 8) | st.floats(-8, 8),
)
_BINARY = ("+", "-", "*", "/", "//", "%", "min", "max")
_UNARY = ("negate", "abs", "floor", "ceil", "round")
_LOOKS = ("sum[layer]", "mean[layer]", "max[layer]", "min[layer]", "var[layer]")
_DIRECTIONS = (("<", "<"), ("<", "<="), ("<=", "<"), (">", ">="), (">=", ">="))


@st.composite
def numbers(
    draw: st.DrawFn,
    leaves: Sequence[Tree] = LEAVES,
    totals: Sequence[Tree] = (),
    *,
    absent: bool = True,
    across: bool = True,
) -> Tree:
    """A tree whose value is a number.

    Args:
        leaves: leaves of the tree.
        totals: numbers that are the same at every layer, for `split` and `cascade` to divide.
        absent: whether its value may be absent.
        across: whether it looks at other layers.
    """
    return _Writer(draw, leaves, totals, absent, across).number(draw(st.integers(0, _DEEPEST)))


class _Writer:
    def __init__(
        self,
        draw: st.DrawFn,
        leaves: Sequence[Tree],
        totals: Sequence[Tree],
        absent: bool,
        across: bool = True,
    ) -> None:
        self.draw, self.leaves, self.totals = draw, leaves, totals
        self.kinds: list[Callable[[int], Tree]] = [
            self.binary, self.binary, self.unary, self.power, self.clamp, self.choose, self.choose,
        ]  # fmt: skip
        self.conditions = [self.comparison, self.comparison, self.chain, self.logic]
        if across:
            self.kinds += [self.look, self.count]
            self.conditions.append(self.any)
        if absent:
            self.kinds.append(self.mask)
            self.conditions.append(self.masked_truth)
        if absent and across:
            self.kinds.append(self.at)
        if totals:
            self.kinds.append(self.divided)

    def one_of(self, options: Sequence):
        return self.draw(st.sampled_from(options))

    def number(self, depth: int) -> Tree:
        return self.one_of(self.kinds)(depth - 1) if depth > 0 else self.one_of(self.leaves)

    def truth(self, depth: int) -> Tree:
        if depth > 0:
            return self.one_of(self.conditions)(depth - 1)
        return ("truth", self.one_of(("true", "false")))

    def binary(self, depth: int) -> Tree:
        return (self.one_of(_BINARY), self.number(depth), self.number(depth))

    def unary(self, depth: int) -> Tree:
        return (self.one_of(_UNARY), self.number(depth))

    def power(self, depth: int) -> Tree:
        exponent = ("number", self.one_of(("0", "1", "2", "3")))
        negative = self.one_of((False, True))
        return ("^", self.number(depth), ("negate", exponent) if negative else exponent)

    def clamp(self, depth: int) -> Tree:
        return ("clamp", self.number(depth), self.number(depth), self.number(depth))

    def choose(self, depth: int) -> Tree:
        return ("choose", self.number(depth), self.truth(depth), self.number(depth))

    def mask(self, depth: int) -> Tree:
        return ("mask", self.number(depth), self.truth(depth))

    def at(self, depth: int) -> Tree:
        return ("at", self.number(depth), self.number(depth))

    def look(self, depth: int) -> Tree:
        return (self.one_of(_LOOKS), self.number(depth))

    def count(self, depth: int) -> Tree:
        counted = self.one_of((self.number, self.truth))
        return ("^", ("count[layer]", counted(depth)), ONE)

    def divided(self, depth: int) -> Tree:
        present = _Writer(self.draw, self.leaves, self.totals, absent=False)
        parts = [self.one_of(self.totals), present.number(depth)]
        if self.one_of((False, True)):
            parts.append(present.number(depth))
        return ("^", (self.one_of(("split", "cascade")), *parts), ONE)

    def comparison(self, depth: int) -> Tree:
        return (self.one_of(sorted(COMPARISONS)), self.number(depth), self.number(depth))

    def chain(self, depth: int) -> Tree:
        first, second = self.one_of(_DIRECTIONS)
        parts = [self.number(depth) for _ in range(3)]
        return ("chain", parts[0], first, parts[1], second, parts[2])

    def logic(self, depth: int) -> Tree:
        op = self.one_of(("and", "or", "not"))
        return (op, *(self.truth(depth) for _ in range(1 if op == "not" else 2)))

    def masked_truth(self, depth: int) -> Tree:
        return ("mask", self.truth(depth), self.truth(depth))

    def any(self, depth: int) -> Tree:
        return ("any[layer]", self.truth(depth))
