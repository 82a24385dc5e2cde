"""Which parameter of a policy, at which value, makes it keep a share of a prompt.

Nothing is known here of single policies: the language's own bounds say how many entries a policy
keeps at a value of a parameter, and the value is searched for. L layers, G KV heads, N tokens of
the prompt; everything is L x G x N entries.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.bind.bounds import Bounds
from kvpolicy.dsl.bind.kept import keep_of
from kvpolicy.dsl.ir.nodes import ModelShape, Node, Param, Program
from kvpolicy.dsl.ir.ranges import shown
from kvpolicy.dsl.syntax.diagnostics import PolicyError

# Relative distance from the asked share within which a value is taken; one entry of each layer and
# KV head is always within it, since no policy keeps parts of entries.
TOLERANCE = 0.02
# A budget that data decide is bounded from above only: the plain value of a parameter is taken for
# what it says if the bound exceeds it by no more than this share of the prompt.
LOOSE = 0.01
# Steps of a share that are tried.
_FINE = 10_000


@dataclass(frozen=True)
class Value:
    """A value of a parameter for one share.

    Attributes:
        parameter, value: what to set.
        lengths: prompt lengths for which it keeps the share.
        predicted: by length, the share that is kept at most (exactly, where data decide nothing).
    """

    parameter: str
    value: str
    lengths: tuple[int, ...]
    predicted: dict[int, float]


def kept(bound: Bound, prompt: int) -> tuple[int, bool]:
    """Entries that a policy keeps of a prompt of N tokens, and whether that is exact.

    Otherwise it is an upper bound. Of a layer of which data decide whether it is thinned (`x where
    lazy else all`) what it keeps then; of a policy that lets entries leave only while it decodes,
    what its first decode step leaves.
    """
    bounds, keep = Bounds(bound, prompt), _keep(bound)
    return _size(bounds, keep), bounds.is_exact(keep)


def thins_some(bound: Bound, prompt: int) -> bool:
    """Whether data decide which layers are thinned, so that `kept` is of those alone."""
    bounds, keep = Bounds(bound, prompt), _keep(bound)
    return keep.op == "choose" and _size(bounds, keep) < bounds.size(keep).total


def _keep(bound: Bound) -> Node:
    keep, later = keep_of(bound.lowered.prefill), bound.lowered.decode
    if keep.op == "all" and later is not None and later.keep is not None:
        return later.keep
    return keep


def _size(bounds: Bounds, keep: Node) -> int:
    size = bounds.size(keep).total
    if keep.op == "choose":
        return min(size, *(_size(bounds, branch) for branch in keep.args[::2]))
    return min(size, bounds.granted(keep)) if keep.op == "fill" else size


def solve(
    program: Program,
    shape: ModelShape,
    given: Mapping[str, str],
    shares: Sequence[float],
    lengths: Sequence[int],
) -> tuple[str | None, dict[float, list[Value]]]:
    """The parameter that sets shares of prompts, and its values for them.

    A parameter that is a share itself is preferred to one that counts tokens, whose value differs
    from length to length.

    Args:
        given: parameters that have a value already, as text; the one that is found may be of them.
        shares: of the prompt's entries, above 0 and up to 1.
        lengths: N of the prompts.

    Returns:
        Its name, None if no parameter sets a share; and by share its values, without shares that
        none reaches. Together the values of a share have each length once at most.
    """
    best: dict[float, list[Value]] = {}
    rank: tuple = ()
    chosen = None
    ratios = [param for param in program.params.values() if param.unit == "ratio"]
    counts = [param for param in program.params.values() if param.unit == "tokens"]
    present = bind(program, shape, given).params
    for param in [*ratios, *counts]:
        if rank[:2] == (len(shares) * len(lengths), True) and param in counts:
            break
        others = {name: value for name, value in given.items() if name != param.name}
        search = _Search(program, shape, others, param, float(present[param.name]))
        found = {share: values for share in shares if (values := search.values(share, lengths))}
        reached = sum(len(value.lengths) for values in found.values() for value in values)
        new = (reached, param.unit == "ratio", -search.distance(found))
        if found and (not rank or new > rank):
            best, rank, chosen = found, new, param.name
    return chosen, best


class _Search:
    """Values of one parameter; `present` is the one that it has, which the policy accepts."""

    def __init__(
        self,
        program: Program,
        shape: ModelShape,
        given: Mapping[str, str],
        param: Param,
        present: float,
    ) -> None:
        self._param, self._present = param, present
        self._everything = shape.layers * shape.kv_heads
        self._ratio = param.unit == "ratio"

        @cache
        def at(value: str) -> Bound | None:
            try:
                return bind(program, shape, {**given, param.name: value})
            except PolicyError:
                return None

        @cache
        def entries(value: str, length: int) -> tuple[int, bool]:
            bound = at(value)
            return (-1, True) if bound is None else kept(bound, length)

        # Entries and whether they are exact; -1 for a value that the policy does not accept.
        self._kept: Callable[[str, int], tuple[int, bool]] = entries

    def values(self, share: float, lengths: Sequence[int]) -> list[Value]:
        """Values that keep a share; one for all lengths where the parameter is a share."""
        if not self._ratio:
            each = [self._value(share, [length]) for length in lengths]
            return [value for value in each if value is not None]
        found: list[Value] = []
        left = sorted(lengths, reverse=True)
        while left:
            value = self._value(share, left)
            taken = left[:1] if value is None else value.lengths
            if value is not None:
                found.append(value)
            left = [length for length in left if length not in taken]
        return found

    def _value(self, share: float, lengths: Sequence[int]) -> Value | None:
        """The value for the first of the lengths, and for those of the others that it suits."""
        for text in self._proposed(share, lengths[0]):
            if not self._suits(text, share, lengths[0]):
                continue
            suited = tuple(n for n in lengths if self._suits(text, share, n))
            predicted = {n: self._kept(text, n)[0] / (self._everything * n) for n in suited}
            return Value(self._param.name, text, suited, predicted)
        return None

    def _proposed(self, share: float, length: int) -> Iterator[str]:
        """Values to try, the preferred ones first: a share is best as round as it was asked."""
        if self._param.choices:
            wanted = share * self._everything * length
            texts = map(shown, self._param.choices)
            yield from sorted(texts, key=lambda text: abs(self._kept(text, length)[0] - wanted))
            return
        if self._ratio:
            yield from (_text(share), _text(share / 2))
        nearest = self._nearest(share, length)
        if nearest is not None:
            yield nearest
        if not self._ratio:
            yield str(int(share * length))

    def _suits(self, text: str, share: float, length: int) -> bool:
        entries, exact = self._kept(text, length)
        wanted = share * self._everything * length
        # Where the bound is loose, a plain value says what is meant.
        loose = 0 if exact else LOOSE * self._everything * length
        room = max(TOLERANCE * wanted, 0 if exact else self._everything / 2)
        return wanted - max(room, self._below(length, share)) <= entries <= wanted + room + loose

    def _below(self, length: int, share: float) -> float:
        """A share of a short prompt is rounded down to whole entries."""
        return self._everything * (share * length % 1)

    def _nearest(self, share: float, length: int) -> str | None:
        """The value at which the entries come closest to a share, if they follow it upwards."""
        wanted = share * self._everything * length
        step = 2 if self._param.odd else 1
        tried = range(1, _FINE + 1) if self._ratio else range(1, length + 1, step)
        number = (lambda i: _text(i / _FINE)) if self._ratio else str

        def entries(i: int) -> float:
            size = self._kept(number(i), length)[0]
            # A value that is refused is too large above the present one, and too small below it.
            return math.inf if size < 0 and float(number(i)) > self._present else size

        if entries(tried[-1]) < wanted * (1 - TOLERANCE):
            return None
        if entries(tried[0]) > wanted * (1 + TOLERANCE):
            return None
        over = bisect_right(tried, wanted, key=entries)
        ends = [number(i) for i in tried[max(0, over - 1) : over + 1]]
        return min(ends, key=lambda text: abs(self._kept(text, length)[0] - wanted))

    def distance(self, found: Mapping[float, Sequence[Value]]) -> float:
        """How far values are from the shares that they keep, added up; 0: they are the shares."""
        total = 0.0
        for share, values in found.items():
            for value in values:
                per = 1 if self._ratio else value.lengths[0]
                total += abs(float(value.value) / per - share) / share
        return total


def _text(share: float) -> str:
    """A share as text without an exponent."""
    return f"{share:.6f}".rstrip("0").rstrip(".")
