"""What is cached of a request at a layer while it decodes, and what stays after a step.

Dimensions: L layers, H query heads, G KV heads, M cached positions of a layer, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from kvpolicy.dsl.execute.values import Value, sent


def shift_of(kept: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """How many entries after each kept one are dropped.

    Args:
        kept, there: bool [G, n], in order of position.

    Returns:
        int64 [G, n]; 0 where nothing is kept.
    """
    dropped = (there & ~kept).long()
    after = dropped.flip(-1).cumsum(-1).flip(-1)
    return after * kept


@dataclass(frozen=True)
class Held:
    """What the host knows of a layer's kept entries.

    Attributes:
        positions: M, how many positions some KV head keeps.
        alike: whether all KV heads keep the same.
    """

    positions: int
    alike: bool

    @staticmethod
    def of(kept: torch.Tensor) -> torch.Tensor:
        """int64 [..., 2], positions and alike, on the device of kept: bool [..., G, N]."""
        some = kept.any(-2)
        alike = (kept == some.unsqueeze(-2)).all(-1).all(-1)
        return torch.stack([some.sum(-1), alike.long()], -1)


@dataclass(frozen=True)
class Layout:
    """The cached entries of a layer.

    Entry j of KV head g is at the j-th position that `there[g]` holds.

    Attributes:
        positions: int64 [M], ascending: positions that some KV head holds.
        there: bool [G, M], or None where all KV heads hold all.
    """

    positions: torch.Tensor
    there: torch.Tensor | None


# Keys and values [G, M, D] after a merge; None for those that it leaves alone.
Rows = tuple[torch.Tensor | None, torch.Tensor | None]


class Choice:
    """What stays at a layer after a step.

    Attributes:
        kept: bool [G, M], of the layout before the step's entries left.
        shift: int64 [G, M]: by how many positions each kept key moves forward, for `positions:
            slots`; None otherwise.
        there: bool [G, M], which entries there were; None where all KV heads held all.
    """

    def __init__(
        self,
        kept: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        shift: torch.Tensor | None = None,
        there: torch.Tensor | None = None,
        merged: Callable[[], Rows] | None = None,
    ) -> None:
        """
        Args:
            merged: makes `k` and `v` when one of them is asked for first.
        """
        self.kept, self.shift, self.there = kept, shift, there
        self._rows, self._merged = (k, v), merged

    @property
    def k(self) -> torch.Tensor | None:
        """float64 [G, M, D] keys after a merge, made of what is cached then; None: as cached."""
        return self._made[0]

    @property
    def v(self) -> torch.Tensor | None:
        """float64 [G, M, D] values, the same."""
        return self._made[1]

    @property
    def _made(self) -> Rows:
        if self._merged is not None:
            self._rows, self._merged = self._merged(), None
        return self._rows


@dataclass
class Remembered:
    """What one layer remembers.

    Attributes:
        positions, there: as of `Layout`, without the tokens that came since.
        since: positions of these.
        states, merge_states: values after the last step.
        queries: [H, n, D] last queries, at `query_positions`; None where no step reads them.
        budget: the prefill's whole numbers.
        decided: what the prefill decided of lets that decode reads.
    """

    positions: torch.Tensor
    there: torch.Tensor | None
    since: list[int] = field(default_factory=list)
    states: dict[str, Value] = field(default_factory=dict)
    merge_states: dict[str, Value] = field(default_factory=dict)
    queries: torch.Tensor | None = None
    query_positions: torch.Tensor | None = None
    budget: Value | None = None
    decided: dict[str, Value] = field(default_factory=dict)

    def clone(self) -> Remembered:
        """A copy; tensors are never changed in place."""
        return replace(
            self,
            since=list(self.since),
            states=dict(self.states),
            merge_states=dict(self.merge_states),
        )

    def settle(self) -> None:
        """Takes up the tokens that came since; the host does not wait."""
        if self.since:
            self.extend(sent(torch.tensor(self.since, dtype=torch.int64), self.positions.device))
            self.since.clear()

    def extend(self, new: torch.Tensor) -> None:
        """Appends tokens that all KV heads hold: their positions, int64 [T]."""
        self.positions = torch.cat([self.positions, new])
        if self.there is not None:
            self.there = F.pad(self.there, (0, len(new)), value=True)

    def remember(self, queries: torch.Tensor, places: torch.Tensor, window: int) -> None:
        """Adds to the last queries, of which `window` are kept; a window of one is the step's own.

        Args:
            queries: [H, T, D].
            places: int64 [T], their positions.
            window: how many a step reads.
        """
        if window <= 1:
            return
        if self.queries is None or self.query_positions is None:
            queries = queries.clone()
        else:
            queries = torch.cat([self.queries, queries.to(self.queries.dtype)], 1)
            places = torch.cat([self.query_positions, places])
        self.queries, self.query_positions = queries[:, -window:], places[-window:]

    def leave(self, kept: torch.Tensor, held: Held) -> None:
        """Forgets the entries that are not kept."""
        # In order, the positions that some KV head keeps; `nonzero` would wait for the device.
        some = (~kept.any(0)).to(torch.uint8).argsort(stable=True)[: held.positions]
        self.positions = self.positions[some]
        self.there = None if held.alike else kept[:, some]
        for name, x in self.states.items():
            if "token" in x.axes:
                data = x.tensor.index_select(x.axes.index("token"), some)
                self.states[name] = replace(x, data=data, mask=None, mask_axes=())
