"""What the layers of B requests remember while they decode, as one layer with B x L x G KV heads.

A list holds the entries of one KV head of a layer of a request. All lists of a block have M
columns, with the newest entry in the last one, and stay on the device from fold to fold.

Dimensions: B requests, L layers, H query heads, G KV heads, M columns, W last queries, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from kvpolicy.dsl.execute.tensors.arriving import Arriving
from kvpolicy.dsl.execute.tensors.heads import Heads
from kvpolicy.dsl.execute.tensors.values import (
    Value,
    as_tensor,
    repeated_along,
    sent,
    sizes_of,
    union,
)
from kvpolicy.dsl.ir.nodes import Node

_Number = TypeVar("_Number", bound=int)
_FIRST = 3  # numbers of a layer before those of its KV heads, see the kernel "tally"


@dataclass(frozen=True)
class FoldNumbers:
    """How many entries of a request there were and how many stay, on the host.

    Attributes:
        counts_before, counts_after: int64 [L, G], numbers of entries before and after, of the KV
            heads of all ranks; equal where nothing leaves.
        finite: whether the model's tensors held neither NaN nor infinity; if not, nothing leaves.
        left: number of entries that leave, over all lists; fewest: of the list that loses fewest.
        dropped: per layer, most entries that one KV head drops.
        positions, alike: per layer, for the KV heads here and if all is finite: number of positions
            that some head keeps; whether all heads keep the same.
        widest: largest number of positions that a layer keeps, on any rank.
    """

    counts_before: torch.Tensor
    counts_after: torch.Tensor
    finite: bool
    left: int
    fewest: int
    dropped: list[int]
    positions: list[int]
    alike: list[bool]
    widest: int


class ArrivingNumbers:
    """How many entries of a block's lists stay, as numbers on their way to the host.

    Args:
        numbers: int64 [B * L, 3 + 2 * G] or more columns, from `tally_gathered_later`.
        requests: B; kv: G, of all ranks.
    """

    def __init__(self, numbers: torch.Tensor, requests: int, kv: int) -> None:
        self.numbers, self._requests, self._kv = numbers, requests, kv
        self._arriving = Arriving(numbers)
        self._read: list[FoldNumbers] | None = None

    def arrived(self) -> bool:
        """Whether the numbers can be read without waiting."""
        return self._arriving.arrived()

    def read(self) -> list[FoldNumbers]:
        """The numbers of each request; the host waits for them."""
        if self._read is None:
            self._read = _fold_numbers(self._arriving.read(), self._requests, self._kv)
        return self._read


Tallied = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def tally_gathered_later(
    heads: Heads,
    numbers: torch.Tensor,
    good: torch.Tensor,
    columns: torch.Tensor | None,
    *,
    alike: bool,
) -> Callable[[], Tallied]:
    """Results of the kernel "tally" for the KV heads of all ranks, which are asked now.

    Args:
        numbers, good: int64 [S, 3 + 2 * g] and bool [S], results for the g KV heads here.
        columns: bool [S, M], where a KV head here keeps an entry, if layers have
            `Steps.columns_of_all_ranks`; else None.
        alike: whether they are the same on all ranks, and for all KV heads of a layer.

    Returns:
        A function that gives int64 [S, 3 + 2 * G] and bool [S]: of all ranks, but for the first two
        columns. Unless `alike`, R more columns hold the first one of each of several ranks. Then
        `columns` of all ranks, which the first two columns count.
    """
    if not heads.divided:
        return lambda: (numbers, good, None)
    kv = (numbers.shape[1] - _FIRST) // 2
    if alike:
        counts = [
            numbers[:, column, None].expand(-1, heads.total(kv)) for column in (_FIRST, _FIRST + kv)
        ]
        return lambda: (torch.cat([numbers[:, :_FIRST], *counts], 1), good, None)
    parts = [(torch.cat([numbers, good[:, None].long()], 1), None)]
    gathered = heads.gathered_later(parts if columns is None else [*parts, (columns, None)])

    def tallied() -> Tallied:
        rank_numbers, *rank_columns = gathered()  # [R, S, 4 + 2 * g]
        finite, all_good = (rank_numbers[:, :, column].amin(0) for column in (_FIRST - 1, -1))
        rank_counts = rank_numbers[:, :, _FIRST:-1].split(kv, 2)
        counts = [x.transpose(0, 1).flatten(1) for x in rank_counts]
        first_two, columns_of_all = numbers[:, : _FIRST - 1], None
        if columns is not None:
            columns_of_all = rank_columns[0].any(0)
            holds_all = (columns == columns_of_all).all(1)
            first_two = torch.stack([columns_of_all.sum(1), first_two[:, 1] * holds_all], 1)
        all_numbers = torch.cat([first_two, finite[:, None], *counts, rank_numbers[:, :, 0].T], 1)
        return all_numbers, all_good.bool(), columns_of_all

    return tallied


def _fold_numbers(numbers: np.ndarray, requests: int, kv: int) -> list[FoldNumbers]:
    """The numbers of each request, from `tally_gathered_later`; computed for all at once."""
    rows, end = numbers.reshape(requests, -1, numbers.shape[1]), _FIRST + 2 * kv
    counts_before, counts_staying = rows[:, :, _FIRST : _FIRST + kv], rows[:, :, _FIRST + kv : end]
    finite = rows[:, :, _FIRST - 1].min(1) > 0
    counts_after = np.where(finite[:, None, None], counts_staying, counts_before)
    leaving = counts_before - counts_after
    widest = np.maximum(rows[:, :, 0], rows[:, :, end:].max(2, initial=0)).max(1)
    fields_of_requests = zip(
        *(
            torch.as_tensor(np.ascontiguousarray(x)).unbind(0)
            for x in (counts_before, counts_after)
        ),
        finite.tolist(), leaving.sum((1, 2)).tolist(), leaving.min((1, 2)).tolist(),
        leaving.max(2).tolist(), rows[:, :, 0].tolist(), rows[:, :, 1].astype(bool).tolist(),
        widest.tolist(), strict=True,
    )  # fmt: skip
    return [FoldNumbers(*fields) for fields in fields_of_requests]


@dataclass(frozen=True)
class LastQueries:
    """The last queries of B requests, where decode steps read queries of earlier steps.

    Attributes:
        queries: [B * L * H, W, D], the newest in the last column.
        positions: int64 [B * L, W], of the queries.
        lengths: [B * L], number of queries, which stand in the last columns.
    """

    queries: torch.Tensor
    positions: torch.Tensor
    lengths: list[int]

    def and_then(self, queries: torch.Tensor, positions: torch.Tensor) -> LastQueries:
        """With queries [B * L * H, T, D] of T more steps, at the last T of [B * L, M] positions."""
        number = queries.shape[1]
        return LastQueries(
            torch.cat([self.queries, queries.to(self.queries.dtype)], 1),
            torch.cat([self.positions, positions[:, -number:]], 1),
            [n + number for n in self.lengths],
        )

    @staticmethod
    def none(queries: torch.Tensor, positions: torch.Tensor) -> LastQueries:
        """No queries yet; arguments as in `and_then`, for their sizes and dtypes."""
        return LastQueries(queries[:, :0], positions[:, :0], [0] * len(positions))

    def last(self, window: int) -> LastQueries:
        """The last `window` queries, as views."""
        return LastQueries(
            self.queries[:, -window:], self.positions[:, -window:],
            [min(n, window) for n in self.lengths],
        )  # fmt: skip

    @staticmethod
    def joined(blocks: list[RequestBlock]) -> LastQueries | None:
        """The queries of several blocks; None if no block has any."""
        sample = next(
            (block.last_queries for block in blocks if block.last_queries is not None), None
        )
        if sample is None:
            return None
        heads = len(sample.queries) // len(sample.lengths)
        parts = [
            block.last_queries or LastQueries.none(
                sample.queries.new_zeros(heads * len(block.lengths), 0, sample.queries.shape[2]),
                block.positions,
            )
            for block in blocks
        ]  # fmt: skip
        width = max(x.queries.shape[1] for x in parts)
        return LastQueries(
            torch.cat([padded(x.queries, 1, width, 0.0) for x in parts]),
            torch.cat([padded(x.positions, 1, width, -1) for x in parts]),
            [n for x in parts for n in x.lengths],
        )


@dataclass
class RequestBlock:
    """What the layers of B requests remember.

    Attributes:
        requests: B; kv: G, of this rank.
        lengths: [B * L], number of positions of a layer that some KV head holds, or, with
            `Steps.columns_of_all_ranks`, one of any rank.
        alike: [B * L], whether each KV head of a layer holds all of these.
        widest: [B], number of positions of a request's longest layer, on any rank.
        positions: int64 [B * L, M], -1 in front of a layer's first.
        held_mask: bool [B * L * G, M], which entries a list holds.
        states: name -> float64 value whose axis `kv` runs over lists, and `token` over columns.
        merge_states: the same for states of the merge; NaN at layers that have not merged.
        decided: name -> the prefill's value of a `let` that decode reads, per list or one number.
        budgets: float64 [B * L * G], the prefill's floored budgets; None where nothing reads them.
        last_queries: the last queries; None where no step reads those of earlier steps.
        finite: bool [B * L * G], whether what was read since the last fold was finite; None:
            nothing was read.
        numbers: int64 [B * L, 3 + 2 * G], kernel "tally" at the last fold; None before the first.
        used: int64 [B * L], `lengths` on the device, if entries that left are gaps; None: no gaps.
        columns: bool [B * L, M], the columns that are in use, with `Steps.columns_of_all_ranks`;
            None: those in which a list holds an entry.
        steps_since_cut: since every list was cut to at most what its rule keeps; None: unknown.
        ends: tensors made so far, which serve all steps: int64 [N, 3] `limits` of the kernel "best"
            by node that selects entries by their place, float64 [N] by number of a `KeepStage`.
    """

    requests: int
    kv: int
    lengths: list[int]
    alike: list[bool]
    widest: list[int]
    positions: torch.Tensor
    held_mask: torch.Tensor
    states: dict[str, Value]
    merge_states: dict[str, Value] = field(default_factory=dict)
    decided: dict[str, Value] = field(default_factory=dict)
    budgets: torch.Tensor | None = None
    last_queries: LastQueries | None = None
    finite: torch.Tensor | None = None
    numbers: torch.Tensor | None = None
    used: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    steps_since_cut: int | None = None
    ends: dict[Node, torch.Tensor] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """L."""
        return len(self.lengths) // self.requests

    @property
    def width(self) -> int:
        """M."""
        return self.held_mask.shape[1]

    def widest_of(self, request: int) -> int:
        """Number of cached positions of a request's longest layer, on any rank."""
        return self.widest[request]

    def rows_of(self, request: int, layer: int) -> tuple[slice, int]:
        """The lists of one layer of a request, and their first column."""
        row = request * self.layers + layer
        heads = slice(row * self.kv, (row + 1) * self.kv)
        return heads, self.width - self.lengths[row]

    def part(self, x: torch.Tensor, request: int, layer: int) -> torch.Tensor:
        """The rows of one layer of a request, without the empty columns in front."""
        heads, first = self.rows_of(request, layer)
        return x[heads, first:]

    def after_leaving(self) -> RequestBlock:
        """As in `Folded`; nothing has left."""
        return self

    @property
    def on_device(self) -> torch.Tensor:
        """`lengths` on the device, int64 [B * L]."""
        if self.used is not None:
            return self.used
        return sent(torch.tensor(self.lengths), self.held_mask.device)

    def select(self, places: Sequence[int]) -> RequestBlock:
        """The requests at `places`, in this order."""
        if list(places) == list(range(self.requests)):
            return self
        index = sent(torch.tensor(places), self.held_mask.device)

        def of(x: torch.Tensor) -> torch.Tensor:
            by_request: torch.Tensor = x.unflatten(0, (self.requests, -1))
            return by_request.index_select(0, index).flatten(0, 1)

        def of_host(per_layer: list[_Number]) -> list[_Number]:
            starts = [place * self.layers for place in places]
            return [x for start in starts for x in per_layer[start : start + self.layers]]

        queries = self.last_queries
        if queries is not None:
            lengths = of_host(queries.lengths)
            queries = LastQueries(of(queries.queries), of(queries.positions), lengths)

        def maybe(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else of(x)

        return RequestBlock(
            len(places), self.kv,
            of_host(self.lengths), of_host(self.alike), [self.widest[place] for place in places],
            of(self.positions), of(self.held_mask),
            _each(self.states, of), _each(self.merge_states, of), _each(self.decided, of),
            budgets=maybe(self.budgets),
            last_queries=queries, finite=maybe(self.finite), numbers=maybe(self.numbers),
            used=maybe(self.used), columns=maybe(self.columns),
            steps_since_cut=self.steps_since_cut,
        )  # fmt: skip


@dataclass(frozen=True)
class Folded:
    """A block after steps at the last of which entries might leave.

    Attributes:
        block: with all entries, those of the steps and those that leave included.
        staying: bool [B * L * G, M], the entries that stay.
        counts: how many stay.
        columns: as in `RequestBlock`, of staying entries.
        whole: the block to go on with if nothing leaves after all.
    """

    block: RequestBlock
    staying: torch.Tensor
    counts: ArrivingNumbers
    columns: torch.Tensor | None
    whole: RequestBlock

    def widest_of(self, request: int) -> int:
        """As in `RequestBlock`; the host waits for the numbers."""
        return self.counts.read()[request].widest

    def after_leaving(self) -> RequestBlock:
        """The block, with gaps for entries that have left; the host waits for the numbers."""
        numbers = self.counts.read()
        return replace(
            self.block,
            lengths=[n for request in numbers for n in request.positions],
            alike=[alike for request in numbers for alike in request.alike],
            widest=[request.widest for request in numbers],
            held_mask=self.staying, used=self.counts.numbers[:, 0], columns=self.columns,
        )  # fmt: skip


Remembered = RequestBlock | Folded


def _each(values: dict[str, Value], of: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Value]:
    """Values per list, their tensors changed."""
    return {name: x.along("kv", lambda tensor, dim: of(tensor)) for name, x in values.items()}


def joined_block(parts: Sequence[tuple[Remembered, int]]) -> RequestBlock:
    """One block of requests, given by block and place, in this order, `after_leaving`."""
    blocks = []
    for _, group in itertools.groupby(parts, lambda part: id(part[0])):
        pairs = list(group)
        blocks.append(pairs[0][0].after_leaving().select([place for _, place in pairs]))
    return blocks[0] if len(blocks) == 1 else _joined(blocks)


def _joined(blocks: list[RequestBlock]) -> RequestBlock:
    """The requests of several blocks, with all newest entries in the last columns."""
    first, width = blocks[0], max(block.width for block in blocks)
    device = first.held_mask.device
    pad = partial(padded, width=width)
    lists = [len(block.held_mask) for block in blocks]

    def joined(parts: list[dict[str, Value]]) -> dict[str, Value]:
        return {name: per_list([part[name] for part in parts], lists, device) for name in parts[0]}

    def concatenated(tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
        present = [x for x in tensors if x is not None]
        return torch.cat(present) if len(present) == len(tensors) else None

    finite = [block.finite for block in blocks]
    if any(x is not None for x in finite):  # where nothing was read, all is finite
        finite = [
            x if x is not None else block.held_mask.new_ones(len(block.held_mask))
            for x, block in zip(finite, blocks, strict=True)
        ]
    used = None
    if any(block.used is not None for block in blocks):
        used = torch.cat([block.on_device for block in blocks])
    columns = [
        None if block.columns is None else pad(block.columns, 1, nothing=False) for block in blocks
    ]
    since = [block.steps_since_cut for block in blocks if block.steps_since_cut is not None]
    return RequestBlock(
        sum(block.requests for block in blocks), first.kv,
        [n for block in blocks for n in block.lengths],
        [n for block in blocks for n in block.alike],
        [n for block in blocks for n in block.widest],
        torch.cat([pad(block.positions, 1, nothing=-1) for block in blocks]),
        torch.cat([pad(block.held_mask, 1, nothing=False) for block in blocks]),
        joined([block.states for block in blocks]),
        joined([block.merge_states for block in blocks]),
        joined([block.decided for block in blocks]),
        budgets=concatenated([block.budgets for block in blocks]),
        last_queries=LastQueries.joined(blocks), finite=concatenated(finite),
        numbers=concatenated([block.numbers for block in blocks]),
        used=used, columns=concatenated(columns),
        steps_since_cut=max(since) if len(since) == len(blocks) else None,
    )  # fmt: skip


def padded(x: torch.Tensor, at: int, width: int, nothing: float) -> torch.Tensor:
    """A tensor filled up to `width` columns in dimension `at`, with `nothing` in front."""
    missing = width - x.shape[at]
    trailing = 2 * (x.dim() - 1 - at)
    return x if not missing else F.pad(x, (*[0] * trailing, missing, 0), value=nothing)


def per_list(parts: Sequence[Value], lists: Sequence[int], device: torch.device) -> Value:
    """Values of layers, or of groups of lists, as one value per list.

    Values per token end in the last column; shorter ones get zeros in front. One number of the host
    that all parts have stays that.

    Args:
        lists: number of lists that each part stands for.
    """
    numbers = [x.data for x in parts if not isinstance(x.data, torch.Tensor) and x.mask is None]
    if len(numbers) == len(parts) and len(set(numbers)) == 1:
        return parts[0]
    axes = union(("kv",), *(x.axes for x in parts))
    sizes = sizes_of(*parts)
    if "token" in axes:
        sizes["token"] = max(sizes_of(x).get("token", 0) for x in parts)
    dtype = torch.float64
    if all(as_tensor(x.data, device).dtype == torch.bool for x in parts):
        dtype = torch.bool

    def widened(
        data: torch.Tensor, data_axes: tuple[str, ...], number: int, x: Value
    ) -> torch.Tensor:
        size = {**sizes, **sizes_of(x), "kv": number}
        data = repeated_along(data, data_axes, axes, size)
        dim = axes.index("token") if "token" in axes else 0
        return padded(data, dim, sizes["token"], 0) if dim else data

    data = torch.cat([
        widened(as_tensor(x.data, device).to(dtype), x.axes, number, x)
        for x, number in zip(parts, lists, strict=True)
    ])  # fmt: skip
    mask = None
    if any(x.mask is not None for x in parts):
        mask = torch.cat([
            widened(as_tensor(True if x.mask is None else x.mask, device), x.mask_axes, number, x)
            for x, number in zip(parts, lists, strict=True)
        ])  # fmt: skip
    finite = all(x.finite for x in parts)
    return Value(data, axes, mask, axes if mask is not None else (), finite=finite)
