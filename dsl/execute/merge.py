"""Merging in the torch program: what dropped entries add to those that stay.

All reads precede all writes. Receivers are found in tiles, so that no matrix of dropped by kept
entries is held whole. With the kernels of merging nothing waits for the device, if the caller says
how many entries the KV heads drop at most and no data decide how many receivers an entry has.

Dimensions: G KV heads, n candidates of a layer, P dropped and C kept entries of a KV head, D head
size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from kvpolicy.dsl.execute.blocks import block_bytes
from kvpolicy.dsl.execute.combination import Combinations
from kvpolicy.dsl.execute.evaluate import Evaluation, Updates
from kvpolicy.dsl.execute.values import Frame, Value, aligned, as_tensor, filled, sizes_of, union
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Merge, Node
from kvpolicy.dsl.ir.traverse import merge_roots, nodes_of

_DROPPED = ("kv", "dropped")


@dataclass(frozen=True)
class Receivers:
    """One receiver of each dropped entry.

    Attributes:
        index: int64 [G, P], among the n candidates; 0 where there is none.
        there: bool [G, P].
    """

    index: torch.Tensor
    there: torch.Tensor


@dataclass(frozen=True)
class Links:
    """Which dropped entries are merged into which kept ones, by receiver, as kernels take it.

    Attributes:
        sources: int64 [G, K], a dropped entry's place among the candidates.
        weights: float64 [G, K].
        offsets: int32 [G, n + 1]: the links of receiver c are those from offsets[c] to
            offsets[c + 1]; what follows the last one is no link.
    """

    sources: torch.Tensor
    weights: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(
        cls,
        index: torch.Tensor,
        receivers: list[torch.Tensor],
        weights: list[torch.Tensor],
        tokens: int,
    ) -> Links:
        """The links of all receivers of each dropped entry.

        Args:
            index: int64 [G, P] dropped entries.
            receivers: each int64 [G, P], `tokens` where there is none.
            weights: each float64 [G, P].
            tokens: n.
        """
        to, order = torch.cat(receivers, 1).sort(dim=-1, stable=True)
        bounds = torch.arange(tokens + 1, device=index.device)
        offsets = torch.searchsorted(to, bounds.repeat(len(to), 1), out_int32=True)
        sources = index.repeat(1, len(receivers)).gather(-1, order)
        return cls(sources, torch.cat(weights, 1).gather(-1, order), offsets)


@dataclass
class Merging:
    """The merge of one layer.

    Attributes:
        states: states of the merge after it.
    """

    merge: Merge
    evaluation: Evaluation
    kept: torch.Tensor
    states: dict[str, Value] = field(default_factory=dict)
    _index: torch.Tensor | None = None
    _present: torch.Tensor | None = None
    _receivers: list[Receivers] = field(default_factory=list)
    _weights: list[torch.Tensor] = field(default_factory=list)
    _links: Links | None = None
    _own: torch.Tensor | None = None
    _divide: torch.Tensor | None = None
    _members: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        merge: Merge,
        evaluation: Evaluation,
        kept: torch.Tensor,
        updates: Updates,
        before: Mapping[str, Value],
        most: int | None = None,
    ) -> Merging:
        """Finds receivers and weights.

        Args:
            merge: the section.
            evaluation: of the layer, with its keys and values.
            kept: bool [G, n].
            updates: the merge's own states.
            before: their values before this step, as far as there are any.
            most: at least how many entries the KV head drops that drops most; None: the host waits
                for the device to know.
        """
        made = cls(merge, evaluation, kept)
        made.evaluation = replace(
            evaluation,
            updates=Updates({**evaluation.updates.states, **updates.states}),
            before={**evaluation.before, **before},
            after=dict(evaluation.after),
            known=dict(evaluation.known),
            extra={
                "dropped": made._read_dropped,
                "target": made._read_target,
                "special": made._sum,
            },
        )
        made._find(most)
        made.evaluation.dropped = made._present
        made._compare()
        made.states = {name: made.evaluation.state(name) for name in merge.states}
        made._weigh()
        return made

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values after the merge: float64 [G, n, D] from [G, n, D]."""
        if self._links is not None:
            own, links = (self._own, self._divide), self._links
            kernel = self.evaluation.frame.kernels["merge_rows"]
            return kernel(x, links.sources, links.weights, links.offsets, *own)
        result = x.double().clone()
        for head in range(x.shape[0]):
            total = torch.zeros_like(result[head])
            rows = result[head, self._index[head]]
            for each, weights in zip(self._receivers, self._weights, strict=True):
                total.index_add_(0, each.index[head], rows * weights[head, :, None])
            made = result[head] * self._own[head, :, None] + total
            divide = self._divide[head, :, None]
            changed = (self._members[head, :, None] > 1) & (divide != 0) & divide.isfinite()
            changed &= made.isfinite().all(-1, keepdim=True)
            result[head] = torch.where(changed, made / divide, result[head])
        return result

    def keep_links(self) -> None:
        """Lets go of everything but the states and what `rows` needs."""
        self.evaluation = Evaluation(replace(self.evaluation.frame, q=None, k=None, v=None))

    def release(self) -> None:
        """Lets go of everything but the states."""
        self.evaluation = None
        self._receivers, self._weights = [], []
        self._index = self._present = self._links = None
        self._own = self._divide = self._members = None

    # Who receives.

    def _find(self, most: int | None) -> None:
        frame, into = self.evaluation.frame, self.merge.into
        there = torch.ones_like(self.kept) if frame.there is None else frame.there
        dropped = there & ~self.kept
        number = dropped.sum(-1)
        most = int(number.max()) if most is None else most
        self._index = (~dropped).to(torch.uint8).argsort(dim=-1, stable=True)[:, :most]
        self._present = torch.arange(most, device=frame.device) < number[:, None]
        if into.op == "next":
            self._receivers = list(self._following(self.evaluation.number(into.args[0])))
        elif "nearest" in frame.kernels:
            self._receivers = [self._nearest_by_kernel(into.args[0])]
        else:
            self._receivers = [self._nearest(self._vectors(into.args[0]))]

    def _vectors(self, node: Node) -> torch.Tensor:
        """[G, n, D] what is compared."""
        frame = self.evaluation.frame
        x = filled(self.evaluation.value(node), 0.0)
        return x.expand(frame.kv, frame.tokens, -1)

    def _nearest_by_kernel(self, node: Node) -> Receivers:
        """As `_nearest`; keys and values are read in the type of the cache."""
        frame = self.evaluation.frame
        cached = {"key": frame.k, "value": frame.v}
        x = cached[node.op] if node.op in cached else self._vectors(node)
        order = (~self.kept).to(torch.uint8).argsort(dim=-1, stable=True)
        dropped, held = self._present.sum(-1), self.kept.sum(-1)
        place = frame.kernels["nearest"](x, self._index, dropped, order, held)
        there = self._present & (held > 0)[:, None]
        return Receivers(torch.where(there, order.gather(-1, place), 0), there)

    def _nearest(self, x: torch.Tensor) -> Receivers:
        """The kept entry of the highest cosine, of equal ones the first."""
        size = (x * x).sum(-1, keepdim=True).sqrt()
        unit = (x / size).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        index = torch.zeros_like(self._index)
        for head in range(x.shape[0]):
            places = self.kept[head].nonzero()[:, 0]
            if not len(places):
                continue
            among = unit[head, places].T
            tile = max(1, block_bytes(x.device) // (8 * len(places)))
            for start in range(0, index.shape[1], tile):
                rows = self._index[head, start : start + tile]
                match = (unit[head, rows] @ among).float()
                best = match == match.amax(-1, keepdim=True)
                order = torch.arange(len(places), device=x.device)
                first = torch.where(best, order, len(places)).amin(-1)
                index[head, start : start + tile] = places[first]
        return Receivers(index, self._present & self.kept.any(-1, keepdim=True))

    def _following(self, number: counts.Number) -> Iterator[Receivers]:
        """The kept entries that follow, one after the other."""
        first = self.kept.long().cumsum(-1).gather(-1, self._index)
        order = (~self.kept).to(torch.uint8).argsort(dim=-1, stable=True)
        held = self.kept.sum(-1, keepdim=True)
        for step in range(counts.whole(number, self.evaluation.frame.tokens)):
            there = self._present & (first + step < held)
            place = torch.where(there, first + step, 0)
            yield Receivers(torch.where(there, order.gather(-1, place), 0), there)

    # What the expressions of a merge read.

    def _compare(self) -> None:
        """Finds inner products of dropped entries and their receivers in one pass over the cache.

        Torch would hold both as float64 vectors.
        """
        frame = self.evaluation.frame
        if "gram" not in frame.kernels or len(self._receivers) != 1:
            return
        (to,) = self._receivers
        for name, x in (("key", frame.k), ("value", frame.v)):
            combinations = Combinations(
                self.evaluation, partial(_side, name), partial(self._inner, x, to)
            )
            combinations.prepare(nodes_of(merge_roots(self.merge)))

    def _inner(self, x: torch.Tensor, to: Receivers) -> list[Value]:
        made = self.evaluation.frame.kernels["gram"](x, x, (self._index, to.index))
        there = (self._present, to.there, to.there)
        return [
            Value(torch.where(own, each, 0.0), _DROPPED)
            for own, each in zip(there, made, strict=True)
        ]

    def _read(self, x: Value, index: torch.Tensor, there: torch.Tensor) -> Value:
        """A value per token, read at other tokens."""
        frame = self.evaluation.frame
        axes = union(x.axes, ("kv",))
        sizes = {**sizes_of(x), "kv": frame.kv}
        shape = [sizes[axis] for axis in axes]
        at = axes.index("token")
        wide = tuple("dropped" if axis == "token" else axis for axis in axes)
        places = aligned(index, _DROPPED, wide)
        places = places.expand([*shape[:at], index.shape[1], *shape[at + 1 :]])
        data = aligned(as_tensor(x.data, frame), x.axes, axes).expand(shape).gather(at, places)
        if x.mask is None:
            return Value(data, wide, there, _DROPPED, finite=x.finite)
        mask = aligned(x.mask, x.mask_axes, axes).expand(shape).gather(at, places)
        return Value(data, wide, mask & aligned(there, _DROPPED, wide), wide, finite=x.finite)

    def _read_dropped(self, node: Node, evaluation: Evaluation) -> Value:
        x = evaluation.value(node.args[0])
        return self._read(x, self._index, self._present)

    def _read_target(self, node: Node, evaluation: Evaluation) -> Value:
        """The mean over the receivers of each dropped entry."""
        x = evaluation.value(node.args[0])
        total = number = None
        for each in self._receivers:
            part = self._read(x, each.index, each.there)
            data = filled(part, 0.0)
            present = aligned(part.mask, part.mask_axes, part.axes).double()
            total = data if total is None else total + data
            number = present if number is None else number + present
        if total is None:
            empty = self._read(x, self._index, torch.zeros_like(self._present))
            total, number = filled(empty, 0.0), torch.zeros_like(self._present).double()
            number = aligned(number, _DROPPED, empty.axes)
            part = empty
        data = (total / number).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
        return Value(data, part.axes, self._present, _DROPPED, finite=x.finite)

    def _sum(self, node: Node, evaluation: Evaluation) -> Value:
        """`mass` and `members` of the receivers."""
        data = self._mass() if node.value == "mass" else self._members
        return Value(data, ("kv", "token"), finite=True)

    # Weights.

    def _weigh(self) -> None:
        frame, merge = self.evaluation.frame, self.merge
        accepted = self._present
        if merge.accept is not None:
            accepted = accepted & self._spread(self.evaluation.value(merge.accept), _DROPPED, False)
        weight = torch.ones_like(self._present, dtype=torch.float64)
        if merge.weight is not None:
            weight = self._spread(self.evaluation.value(merge.weight), _DROPPED, 0.0)
        joins = [each.there & accepted for each in self._receivers]
        self._weights = [torch.where(each, weight, 0.0) for each in joins]
        self._join(joins)
        places = (frame.kv, frame.tokens)
        self._own = torch.ones(places, dtype=torch.float64, device=frame.device)
        if merge.own is not None:
            self._own = self._spread(self.evaluation.value(merge.own), ("kv", "token"), 0.0)
        if merge.divide is None:
            self._divide = self._mass()
        else:
            self._divide = self._spread(self.evaluation.value(merge.divide), ("kv", "token"), 0.0)

    def _join(self, joins: list[torch.Tensor]) -> None:
        """Finds how many entries each receiver has, itself included.

        Args:
            joins: of each receiver, bool [G, P].
        """
        frame = self.evaluation.frame
        if joins and "merge_rows" in frame.kernels:
            pairs = zip(joins, self._receivers, strict=True)
            to = [torch.where(join, each.index, frame.tokens) for join, each in pairs]
            self._links = Links.of(self._index, to, self._weights, frame.tokens)
            self._members = 1.0 + self._links.offsets.diff().double()
            return
        places = (frame.kv, frame.tokens)
        self._members = torch.ones(places, dtype=torch.float64, device=frame.device)
        for join, each in zip(joins, self._receivers, strict=True):
            self._members.scatter_add_(1, each.index, join.double())

    def _mass(self) -> torch.Tensor:
        if self._links is not None:
            kernel = self.evaluation.frame.kernels["merge_mass"]
            return kernel(self._links.weights, self._links.offsets, self._own)
        total = self._own.clone()
        for each, weights in zip(self._receivers, self._weights, strict=True):
            total.scatter_add_(1, each.index, weights)
        return total

    def _spread(self, x: Value, axes: tuple[str, ...], filler: float | bool) -> torch.Tensor:
        frame = self.evaluation.frame
        sizes = {"kv": frame.kv, "token": frame.tokens, "dropped": self._index.shape[1]}
        data = as_tensor(x.data, frame)
        if x.mask is not None:
            data = filled(replace(x, data=data), filler)
        return aligned(data, x.axes, axes).expand([sizes[axis] for axis in axes]).contiguous()


def _side(name: str, node: Node) -> int | None:
    """Whether a node is the key (or value) of the dropped entries, or that of their receivers."""
    sides = ("dropped", "target")
    return sides.index(node.op) if node.op in sides and node.args[0].op == name else None


def merged_rows(merging: Merging, frame: Frame) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Keys and values after a merge; None for what `apply` leaves alone."""
    apply = merging.merge.apply
    keys = merging.rows(frame.k) if "key" in apply else None
    return keys, merging.rows(frame.v) if "value" in apply else None
