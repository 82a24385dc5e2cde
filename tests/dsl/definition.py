"""A second definition of numbers as in docs/language.md: exact rationals, nothing of `dsl`.

Expressions are trees of tuples such as `("+", ("name", "heads"), ("number", "0.5"))`. `written`
writes them with the fewest parentheses that the table of operators allows; `Definition` evaluates
them. None is an absent value.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

Tree = tuple
Value = Fraction | bool | None

# "a value within 2^-32 of a multiple of one half, relatively, counts as that multiple"
NEAR = Fraction(1, 2**32)
# Rationals beyond 1,000 bits become float64; trees with values near that are left out.
LONGEST = 900


class OutOfReach(Exception):
    """The value is infinite, or not to be computed exactly."""


def snapped(x: float) -> Fraction:
    """A finite float64, or the multiple of one half that it counts as."""
    exact = Fraction(x)
    half = Fraction(round(exact * 2), 2)
    return half if abs(exact - half) <= NEAR * max(1, abs(exact)) else exact


def single(x: float) -> float:
    """The float32 nearest to a float64; infinite beyond the largest one."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def split(
    total: Fraction, weights: Sequence[Fraction], maxima: Sequence[Fraction] | None = None
) -> list[int]:
    """`split[layer]`, one entry at a time."""
    if not weights:
        return []
    whole = max(0, math.floor(total))
    positive = [max(Fraction(0), weight) for weight in weights]
    if not any(positive):
        positive = [Fraction(1) for _ in weights]
    among = range(len(weights))
    most = [whole if maxima is None else max(0, math.floor(maxima[i])) for i in among]
    parts = [math.floor(whole * weight / sum(positive)) for weight in positive]

    def pour(amount: int) -> None:
        below = [i for i in among if parts[i] < most[i]]
        for number in range(amount if below else 0):
            parts[below[number % len(below)]] += 1

    while sum(parts) != whole or any(parts[i] > most[i] for i in among):
        over = sum(max(0, parts[i] - most[i]) for i in among)
        parts = [min(parts[i], most[i]) for i in among]
        if parts == most:
            break
        pour(over)
        pour(whole - sum(parts))
    return parts


def cascade(
    total: Fraction, weights: Sequence[Fraction], maxima: Sequence[Fraction] | None = None
) -> list[int]:
    """`cascade[layer]`: a layer's least part among the splits of each prefix of layers."""
    ends = range(1, len(weights) + 1)
    splits = [split(total, weights[:end], maxima and maxima[:end]) for end in ends]
    return [min(each[i] for each in splits[i:]) for i in range(len(weights))]


class Definition:
    """Values of trees for one model and prompt.

    Args:
        names: name -> its value by layer.
        layers: number of layers.
        check: raises `OutOfReach` for numbers that are not to be computed.
        data: names whose values are decided by data, layer by layer.
    """

    def __init__(
        self,
        names: Mapping[str, Callable[[int], Fraction]],
        layers: int,
        check: Callable[[Fraction], None] = lambda x: None,
        data: frozenset[str] = frozenset(),
    ) -> None:
        self.names, self.layers, self.check, self.data = names, layers, check, data

    def value(self, tree: Tree, layer: int) -> Value:
        """The value of a tree at a layer."""
        found = self._value(tree, layer)
        if isinstance(found, Fraction):
            if max(found.numerator.bit_length(), found.denominator.bit_length()) > LONGEST:
                raise OutOfReach
            self.check(found)
        return found

    def _value(self, tree: Tree, layer: int) -> Value:
        op, *parts = tree
        if op == "number":
            return Fraction(parts[0])
        if op == "name":
            return self.names[parts[0]](layer)
        if op == "truth":
            return parts[0] == "true"
        if op in ("choose", "mask"):
            x, condition, *other = parts
            if self.value(condition, layer):  # neither false nor absent
                return self.value(x, layer)
            return self.value(other[0], layer) if other else None
        if op in ("and", "or", "not"):
            held = [bool(self.value(part, layer)) for part in parts]
            return {"and": all(held), "or": any(held), "not": not held[0]}[op]
        if op == "chain":
            low, first, middle, second, high = parts
            both = [(first, low, middle), (second, middle, high)]
            return all(self.value(each, layer) for each in both)
        if op == "at":
            which = self.value(parts[0], layer)
            done = self.layers if self._waits(tree) else layer + 1
            there = which is not None and which in range(done)
            return self.value(parts[1], int(which)) if there else None
        if op in ("split", "cascade"):
            return self._divided(op, parts, layer)
        if op.endswith("[layer]"):
            return self._reduced(op.removesuffix("[layer]"), parts[0])
        numbers = [self.value(part, layer) for part in parts]
        if None in numbers:
            return False if op in COMPARISONS else None
        return OPERATIONS[op](*numbers)

    def _waits(self, tree: Tree, across: bool = False) -> bool:
        """Whether data of all layers decide a value, which is then known after the last layer."""
        op, *parts = tree
        if op == "name":
            return across and parts[0] in self.data
        across = across or op in ("split", "cascade") or op.endswith("[layer]")
        return any(self._waits(part, across) for part in parts if isinstance(part, tuple))

    def _divided(self, op: str, parts: Sequence[Tree], layer: int) -> Fraction:
        columns = [[self.value(part, each) for each in range(self.layers)] for part in parts]
        if any(None in column for column in columns):
            raise OutOfReach
        divide = split if op == "split" else cascade
        return Fraction(divide(columns[0][0], *columns[1:])[layer])

    def _reduced(self, op: str, x: Tree) -> Value:
        every = [self.value(x, layer) for layer in range(self.layers)]
        here = [each for each in every if each is not None]
        if op == "any":
            return any(here)
        if op == "count":
            return Fraction(len([each for each in here if each is not False]))
        if op in ("max", "min"):
            if not here:
                raise OutOfReach  # an infinity
            return max(here) if op == "max" else min(here)
        total = sum(here, Fraction(0))
        if op == "sum" or not here:
            return total
        mean = total / len(here)
        if op == "mean":
            return mean
        return sum(((each - mean) ** 2 for each in here), Fraction(0)) / len(here)


def _divide(a: Fraction, b: Fraction) -> Fraction:
    if b:
        return a / b
    if a:
        raise OutOfReach  # an infinity
    return Fraction(0)


def _power(a: Fraction, b: Fraction) -> Fraction:
    if a == 0 and b < 0:
        raise OutOfReach  # an infinity
    if b.denominator != 1:
        raise OutOfReach  # a float64
    return a ** int(b)


def _rounded(x: Fraction) -> Fraction:
    """The nearest whole number; halves go to the even one."""
    low = math.floor(x)
    if x - low == Fraction(1, 2):
        return Fraction(low + low % 2)
    return Fraction(low if x - low < Fraction(1, 2) else low + 1)


COMPARISONS: dict[str, Callable[[Fraction, Fraction], bool]] = {
    "<": lambda a, b: a - b < 0,
    "<=": lambda a, b: a - b <= 0,
    ">": lambda a, b: a - b > 0,
    ">=": lambda a, b: a - b >= 0,
    "==": lambda a, b: a - b == 0,
    "!=": lambda a, b: a - b != 0,
}
OPERATIONS: dict[str, Callable[..., Value]] = {
    **COMPARISONS,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _divide,
    "//": lambda a, b: Fraction(math.floor(_divide(a, b))),
    "%": lambda a, b: a - b * math.floor(a / b) if b else Fraction(0),
    "^": _power,
    "negate": lambda a: -a,
    "abs": lambda a: a if a > 0 else -a,
    "floor": lambda a: Fraction(math.floor(a)),
    "ceil": lambda a: Fraction(-math.floor(-a)),
    "round": _rounded,
    "min": lambda a, b: a if a < b else b,
    "max": lambda a, b: a if a > b else b,
    "clamp": lambda x, low, high: high if max(x, low) > high else max(x, low),
}

# How tightly operators bind, from the table of the document, loosest first.
_CHOICE, _BELOW_CHOICE, _NEGATE, _ATOM = 0, 1, 8, 10
_BINDS = {"or": 2, "and": 3, "not": 4, "+": 6, "-": 6, "*": 7, "/": 7, "//": 7, "%": 7, "^": 9}


def written(tree: Tree, least: int = _CHOICE) -> str:
    """A tree as an expression, in parentheses if it binds less tightly than `least`."""
    text, binds = _written(tree)
    return text if binds >= least else f"({text})"


def _written(tree: Tree) -> tuple[str, int]:
    op, *parts = tree
    if op in ("number", "name", "truth"):
        return parts[0], _ATOM
    if op in ("choose", "mask"):
        x, condition = (written(part, _BELOW_CHOICE) for part in parts[:2])
        other = f" else {written(parts[2])}" if op == "choose" else ""
        return f"{x} where {condition}{other}", _CHOICE
    if op == "chain":
        low, first, middle, second, high = parts
        a, b, c = (written(part, 6) for part in (low, middle, high))
        return f"{a} {first} {b} {second} {c}", 5
    if op in COMPARISONS:
        return f" {op} ".join(written(part, 6) for part in parts), 5
    if op == "not":
        return f"not {written(parts[0], 4)}", 4
    if op == "negate":
        return f"-{written(parts[0], _NEGATE)}", _NEGATE
    if op == "^":
        return f"{written(parts[0], _ATOM)} ^ {written(parts[1], _NEGATE)}", 9
    if op in _BINDS:
        binds = _BINDS[op]
        return f"{written(parts[0], binds)} {op} {written(parts[1], binds + 1)}", binds
    name = f"{op}[layer]" if op in ("split", "cascade") else op
    return f"{name}({', '.join(map(written, parts))})", _ATOM
