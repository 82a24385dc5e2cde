"""What all layers of B requests remember, as one layer with B x L x G KV heads.

Every list has as many columns, its newest entry in the last; it stays on the device from fold to
fold.

Dimensions: B requests, L layers, G KV heads, M columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from kvpolicy.dsl.execute.evaluate import Evaluation
from kvpolicy.dsl.execute.follow import Landed
from kvpolicy.dsl.execute.layout import Held, Remembered
from kvpolicy.dsl.execute.together import Together, side_by_side
from kvpolicy.dsl.execute.values import Value, sent
from kvpolicy.dsl.ir.nodes import Node

AXES = ("kv", "token")
_FIRST = 3  # of a layer's numbers before those of its KV heads, see the kernel "tally"


class Counts:
    """What stays of the lists of a block, as numbers on their way to the host.

    Args:
        numbers: int64 [B * L, 3 + 2 * G], of the kernel "tally".
        requests: B.
    """

    def __init__(self, numbers: torch.Tensor, requests: int) -> None:
        self.numbers, self._requests = numbers, requests
        self._host, self._event = numbers, None
        self._read: list[Landed] | None = None
        if numbers.device.type == "cuda":
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host = host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def arrived(self) -> bool:
        """Whether the numbers can be read without waiting."""
        return self._event is None or self._event.query()

    def read(self) -> list[Landed]:
        """Those of every request; the host waits for them."""
        if self._read is None:
            if self._event is not None:
                self._event.synchronize()
            rows = self._host.tolist()
            size = len(rows) // self._requests
            self._read = [_landed(rows[i * size : i * size + size]) for i in range(self._requests)]
        return self._read


def _landed(rows: list[list[int]]) -> Landed:
    kv = (len(rows[0]) - _FIRST) // 2
    numbers = torch.tensor([row[_FIRST:] for row in rows], dtype=torch.int64)
    there, kept = numbers.split(kv, 1)
    finite = all(row[2] for row in rows)
    held = [Held(row[0], bool(row[1])) for row in rows]
    return Landed(there, kept if finite else there, finite, held)


@dataclass
class Block:
    """What the layers of B requests remember.

    Attributes:
        lengths: [B * L], positions of each layer that some KV head holds.
        alike: [B * L], whether all its KV heads hold the same.
        positions: int64 [B * L, M], -1 in front of a layer's first.
        there: bool [B * L * G, M].
        states: values per list and column, float64 [B * L * G, M].
        budgets: int64 [B * L * G], the prefill's numbers; None where nothing reads them.
        finite: bool [B * L * G], whether what was read so far was; None: nothing was read.
        numbers: int64 [B * L, 3 + 2 * G] of the last fold, see `Counts`; None before the first.
        kept: of the last follow, if entries may leave at it: bool [B * L * G, M], what stays.
        counts: of that.
        rule: int64 [N, 3], numbers by which entries stay, see the kernel "best"; None: not made.
    """

    requests: int
    kv: int
    lengths: list[int]
    alike: list[bool]
    positions: torch.Tensor
    there: torch.Tensor
    states: dict[str, Value]
    budgets: torch.Tensor | None = None
    finite: torch.Tensor | None = None
    numbers: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    counts: Counts | None = None
    rule: torch.Tensor | None = None

    @property
    def layers(self) -> int:
        """L."""
        return len(self.lengths) // self.requests

    @property
    def staying(self) -> torch.Tensor:
        """bool [B * L * G, M], what stays of the last follow, at which entries might leave."""
        assert self.kept is not None
        return self.kept

    @property
    def width(self) -> int:
        """M."""
        return self.there.shape[1]

    def position(self, node: Node, evaluation: Evaluation) -> Value:
        """The operation `position`; in front of a layer's first entry it is -1."""
        return Value(self.positions.repeat_interleave(self.kv, 0).double(), AXES, finite=True)

    @classmethod
    def of(cls, layers: list[Remembered], kv_heads: int, fresh: Mapping[str, float]) -> Block:
        """What a request remembers layer by layer.

        Args:
            fresh: states with their first values.
        """
        for own in layers:
            own.settle()
        together = Together(layers, kv_heads)
        found = together.states() if layers[0].states else {}
        there = together.there
        states = {
            name: found[name] if name in found
            else Value(torch.full_like(there, first, dtype=torch.float64), AXES, finite=True)
            for name, first in fresh.items()
        }  # fmt: skip
        budgets, given = None, together.budget()
        if given is not None and isinstance(given.data, torch.Tensor):
            budgets = given.data.long()
        elif given is not None:
            budgets = torch.full((len(there),), int(given.data), device=there.device)
        return cls(
            1, together.kv, together.lengths, [x.there is None for x in layers],
            side_by_side([x.positions[None] for x in layers], 1, -1), there, states,
            budgets=budgets,
        )  # fmt: skip

    def remembered(self, request: int, *, whole: bool = False) -> list[Remembered]:
        """What one of the requests remembers, layer by layer.

        Args:
            whole: nothing has left at the last follow.
        """
        made = []
        own = None if self.counts is None or whole else self.counts.read()[request].held
        for layer in range(self.layers):
            each = self._layer(request, layer)
            if own is not None:
                kept = self.part(self.staying, request, layer)
                each.leave(kept, own[layer])
            made.append(each)
        return made

    def _layer(self, request: int, layer: int) -> Remembered:
        number = request * self.layers + layer
        positions = self.positions[number, self.width - self.lengths[number] :]
        there = None if self.alike[number] else self.part(self.there, request, layer)
        states = {
            name: replace(x, data=self.part(x.tensor, request, layer), mask=None, mask_axes=())
            for name, x in self.states.items()
        }
        made = Remembered(positions, there, states=states)
        if self.budgets is not None:
            heads = slice(number * self.kv, (number + 1) * self.kv)
            made.budget = Value(self.budgets[heads].double(), ("kv",), finite=True)
        return made

    def part(self, x: torch.Tensor, request: int, layer: int) -> torch.Tensor:
        """[G, M of the layer] of one layer's lists."""
        heads, first = self.where(request, layer)
        return x[heads, first:]

    def where(self, request: int, layer: int) -> tuple[slice, int]:
        """The lists of one layer, and their first column."""
        number = request * self.layers + layer
        heads = slice(number * self.kv, (number + 1) * self.kv)
        return heads, self.width - self.lengths[number]

    def finite_of(self, request: int) -> torch.Tensor | None:
        """0-d bool, whether what was read of a request so far was finite; None: nothing was."""
        if self.finite is None:
            return None
        size = len(self.there) // self.requests
        return self.finite[request * size : (request + 1) * size].all()

    def carried(self) -> Carried:
        """What goes on of all requests; the host waits for the numbers of the last fold."""
        kept, lengths, alike = self.there, self.lengths, self.alike
        if self.counts is None:
            used = sent(torch.tensor(lengths), kept.device)
        else:
            held = [each for landed in self.counts.read() for each in landed.held]
            lengths, alike = [x.positions for x in held], [x.alike for x in held]
            kept, used = self.staying, self.counts.numbers[:, 0]
        return Carried(
            self.requests, self.kv, lengths, alike, used, kept, self.positions, self.states,
            self.budgets, self.finite, self.numbers, self.rule,
        )  # fmt: skip


@dataclass
class Carried:
    """What B requests remember of entries that stay, which stand where they stood before.

    Attributes:
        lengths, alike: as of `Block`, of what stays; used: `lengths` on the device.
        kept: bool [B * L * G, M], what stays.
        positions, states, budgets, finite, numbers, rule: as of `Block`.
    """

    requests: int
    kv: int
    lengths: list[int]
    alike: list[bool]
    used: torch.Tensor
    kept: torch.Tensor
    positions: torch.Tensor
    states: dict[str, Value]
    budgets: torch.Tensor | None
    finite: torch.Tensor | None
    numbers: torch.Tensor | None
    rule: torch.Tensor | None = None

    def some(self, places: Sequence[int]) -> Carried:
        """Of some requests, in this order."""
        if list(places) == list(range(self.requests)):
            return self
        layers = len(self.lengths) // self.requests
        index = sent(torch.tensor(places), self.kept.device)

        def of(x: torch.Tensor) -> torch.Tensor:
            apart: torch.Tensor = x.unflatten(0, (self.requests, -1))
            return apart.index_select(0, index).flatten(0, 1)

        own = [range(i * layers, (i + 1) * layers) for i in places]
        return Carried(
            len(places), self.kv,
            [self.lengths[n] for each in own for n in each],
            [self.alike[n] for each in own for n in each],
            of(self.used), of(self.kept), of(self.positions),
            {name: replace(x, data=of(x.tensor)) for name, x in self.states.items()},
            *(None if x is None else of(x) for x in (self.budgets, self.finite, self.numbers)),
        )  # fmt: skip


def carried(parts: Sequence[tuple[Block, int]]) -> Carried:
    """What goes on of requests, each a place in a block, in this order."""
    taken = []
    for _, same in itertools.groupby(parts, lambda part: id(part[0])):
        own = list(same)
        taken.append(own[0][0].carried().some([place for _, place in own]))
    return taken[0] if len(taken) == 1 else _side_by_side(taken)


def _side_by_side(parts: list[Carried]) -> Carried:
    """Requests of several blocks, the newest entries of all in the last columns."""
    first, width = parts[0], max(each.kept.shape[1] for each in parts)

    def wide(own: list[torch.Tensor], nothing: float) -> torch.Tensor:
        return torch.cat([_padded(x, width, nothing) for x in own])

    def known(own: list[torch.Tensor | None]) -> torch.Tensor | None:
        there = [x for x in own if x is not None]
        return torch.cat(there) if len(there) == len(own) else None

    finite = [each.finite for each in parts]
    if any(x is not None for x in finite):  # where nothing was read, all is
        finite = [
            x if x is not None else each.kept.new_ones(len(each.kept))
            for x, each in zip(finite, parts, strict=True)
        ]
    return Carried(
        sum(each.requests for each in parts), first.kv,
        [n for each in parts for n in each.lengths], [n for each in parts for n in each.alike],
        torch.cat([each.used for each in parts]),
        wide([each.kept for each in parts], False),
        wide([each.positions for each in parts], -1),
        {name: _joined([each.states[name] for each in parts], wide) for name in first.states},
        known([each.budgets for each in parts]), known(finite),
        known([each.numbers for each in parts]),
    )  # fmt: skip


def _joined(parts: list[Value], wide: Callable[[list[torch.Tensor], float], torch.Tensor]) -> Value:
    data = wide([x.tensor for x in parts], 0.0)
    return Value(data, AXES, finite=all(x.finite for x in parts))


def _padded(x: torch.Tensor, width: int, nothing: float) -> torch.Tensor:
    missing = width - x.shape[1]
    return x if not missing else F.pad(x, (missing, 0), value=nothing)
