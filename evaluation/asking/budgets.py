"""Finds the parameter of a policy, and its value, with which it keeps a share of a prompt.

No policy is treated specially: the language's bounds say how many entries a policy keeps at a value
of a parameter, and the value is searched for. L layers, G KV heads, N tokens of the prompt, which
has L x G x N entries.
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

# Largest relative distance from the asked share at which a value is taken. Rounding down to whole
# entries per layer and KV head is always allowed.
TOLERANCE = 0.02
# Where data decide the number of entries, only an upper bound is known. A value is still taken if
# the bound exceeds the tolerance by at most this share of the prompt.
LOOSE = 0.01
# Number of steps of a share from 0 to 1 that are tried.
_FINE = 10_000


@dataclass(frozen=True)
class ParameterValue:
    """A value of a parameter for one share.

    Attributes:
        parameter, value: name of the parameter, and its value as text.
        lengths: prompt lengths for which it keeps the share.
        predicted: length -> largest share that is kept; exact unless data decide the number.
    """

    parameter: str
    value: str
    lengths: tuple[int, ...]
    predicted: dict[int, float]


def kept(bound: Bound, prompt: int) -> tuple[int, bool]:
    """Number of entries that a policy keeps of a prompt of N tokens, and whether it is exact.

    If it is not exact, it is an upper bound. Layers that are thinned only if data say so (`x where
    lazy else all`) count as thinned. If entries leave only during decode, the number is that after
    the first decode step.
    """
    bounds, keep = Bounds(bound, prompt), _keep(bound)
    return _size(bounds, keep), bounds.is_exact(keep)


def thins_some(bound: Bound, prompt: int) -> bool:
    """Whether data decide which layers are thinned, so that `kept` may be exceeded."""
    bounds, keep = Bounds(bound, prompt), _keep(bound)
    return _size(bounds, keep) < bounds.size(keep).total and _data_choose(bounds, keep)


def _keep(bound: Bound) -> Node:
    keep, decode = keep_of(bound.lowered.prefill), bound.lowered.decode
    if keep.op == "all" and decode is not None and decode.keep is not None:
        return decode.keep
    return keep


def _data_choose(bounds: Bounds, keep: Node) -> bool:
    """Whether data of the prompt choose between two selections."""
    return keep.op == "choose" and not bounds.is_known(keep.args[1])


def _size(bounds: Bounds, keep: Node) -> int:
    size = bounds.size(keep).total
    if _data_choose(bounds, keep):
        return min(size, *(_size(bounds, branch) for branch in keep.args[::2]))
    return min(size, bounds.total_budget(keep)) if keep.op == "fill" else size


def solve(
    program: Program,
    shape: ModelShape,
    given: Mapping[str, str],
    shares: Sequence[float],
    lengths: Sequence[int],
) -> tuple[str | None, dict[float, list[ParameterValue]]]:
    """Finds the parameter that sets the share of a prompt that is kept, and its values.

    A parameter that is a share itself is preferred to one that counts tokens, whose value differs
    from length to length.

    Args:
        given: name -> value as text of parameters that are set; the result may be one of them.
        shares: shares of the prompt's entries, above 0 and up to 1.
        lengths: lengths of the prompts in tokens.

    Returns:
        The name of the parameter, None if no parameter sets a share; and share -> values, without
        the shares that no value reaches. Each length is in at most one value of a share.
    """
    best: dict[float, list[ParameterValue]] = {}
    rank: tuple = ()
    parameter = None
    ratios = [param for param in program.params.values() if param.unit == "ratio"]
    counts = [param for param in program.params.values() if param.unit == "tokens"]
    present_values = bind(program, shape, given).params
    for param in [*ratios, *counts]:
        if rank[:2] == (len(shares) * len(lengths), True) and param in counts:
            break
        other_values = {name: value for name, value in given.items() if name != param.name}
        search = _Search(program, shape, other_values, param, float(present_values[param.name]))
        by_share = {share: values for share in shares if (values := search.values(share, lengths))}
        reached = sum(len(value.lengths) for values in by_share.values() for value in values)
        new_rank = (reached, param.unit == "ratio", -search.distance(by_share))
        if by_share and (not rank or new_rank > rank):
            best, rank, parameter = by_share, new_rank, param.name
    return parameter, best


class _Search:
    """Search for values of one parameter.

    Args:
        settings: values of the other parameters that are set.
        present: the parameter's present value, which the policy accepts.
    """

    def __init__(
        self,
        program: Program,
        shape: ModelShape,
        settings: Mapping[str, str],
        param: Param,
        present: float,
    ) -> None:
        self._param, self._present = param, present
        self._lists = shape.layers * shape.kv_heads
        self._ratio = param.unit == "ratio"

        @cache
        def bound_at(value: str) -> Bound | None:
            try:
                return bind(program, shape, {**settings, param.name: value})
            except PolicyError:
                return None

        @cache
        def entries(value: str, length: int) -> tuple[int, bool]:
            bound = bound_at(value)
            return (-1, True) if bound is None else kept(bound, length)

        # As `kept`; (-1, True) for a value that the policy does not accept.
        self._kept: Callable[[str, int], tuple[int, bool]] = entries

    def values(self, share: float, lengths: Sequence[int]) -> list[ParameterValue]:
        """Values that keep a share: one per length, or per group of lengths if it is a ratio."""
        if not self._ratio:
            candidates = [self._value(share, [length]) for length in lengths]
            return [value for value in candidates if value is not None]
        values: list[ParameterValue] = []
        remaining = sorted(lengths, reverse=True)
        while remaining:
            value = self._value(share, remaining)
            covered = remaining[:1] if value is None else value.lengths
            if value is not None:
                values.append(value)
            remaining = [length for length in remaining if length not in covered]
        return values

    def _value(self, share: float, lengths: Sequence[int]) -> ParameterValue | None:
        """The value for the first length, and for the other lengths that it suits."""
        for text in self._proposed(share, lengths[0]):
            if not self._suits(text, share, lengths[0]):
                continue
            suited_lengths = tuple(n for n in lengths if self._suits(text, share, n))
            predicted = {n: self._kept(text, n)[0] / (self._lists * n) for n in suited_lengths}
            return ParameterValue(self._param.name, text, suited_lengths, predicted)
        return None

    def _proposed(self, share: float, length: int) -> Iterator[str]:
        """Values to try, the preferred ones first: a ratio as round as the share asked for."""
        if self._param.choices:
            target = share * self._lists * length
            texts = map(shown, self._param.choices)
            yield from sorted(texts, key=lambda text: abs(self._kept(text, length)[0] - target))
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
        target = share * self._lists * length
        # Where the bound is not exact, the policy may keep less than it.
        slack = 0 if exact else LOOSE * self._lists * length
        room = max(TOLERANCE * target, 0 if exact else self._lists / 2)
        return target - max(room, self._below(length, share)) <= entries <= target + room + slack

    def _below(self, length: int, share: float) -> float:
        """Entries that are lost when the share is rounded down to whole entries per list."""
        return self._lists * (share * length % 1)

    def _nearest(self, share: float, length: int) -> str | None:
        """The value whose entries are nearest to a share, if they grow with it; None if too far."""
        target = share * self._lists * length
        step = 2 if self._param.odd else 1
        indices = range(1, _FINE + 1) if self._ratio else range(1, length + 1, step)
        text_at = (lambda i: _text(i / _FINE)) if self._ratio else str

        def entries(i: int) -> float:
            size = self._kept(text_at(i), length)[0]
            # A refused value counts as too large above the present value, and as too small below.
            return math.inf if size < 0 and float(text_at(i)) > self._present else size

        if entries(indices[-1]) < target * (1 - TOLERANCE):
            return None
        if entries(indices[0]) > target * (1 + TOLERANCE):
            return None
        first_over = bisect_right(indices, target, key=entries)
        neighbours = [text_at(i) for i in indices[max(0, first_over - 1) : first_over + 1]]
        return min(neighbours, key=lambda text: abs(self._kept(text, length)[0] - target))

    def distance(self, by_share: Mapping[float, Sequence[ParameterValue]]) -> float:
        """Sum of the relative distances of values from their shares; 0 if they are the shares."""
        total = 0.0
        for share, values in by_share.items():
            for value in values:
                scale = 1 if self._ratio else value.lengths[0]
                total += abs(float(value.value) / scale - share) / share
        return total


def _text(share: float) -> str:
    """A share as text, with at most six decimals and no exponent."""
    return f"{share:.6f}".rstrip("0").rstrip(".")
