"""What one of several stages (`--pp`) has found of a request whose prompt ends.

Either it has chosen what its layers keep, and says how much that is; or its policy compares layers,
and it says the numbers by which: then all stages choose when they have heard these of all layers.

Dimensions: L layers of the model, l those of the stage, G KV heads, N tokens of the prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from kvpolicy.dsl.execute.decode import Known
from kvpolicy.dsl.execute.exchange import PARTS
from kvpolicy.dsl.execute.layout import Held
from kvpolicy.sglang_ext.face.host import to_host
from kvpolicy.sglang_ext.request.request import State


def numbers_of_layer(state: State, kv_heads: int) -> int:
    """How many numbers each layer's stage says of a request."""
    exchanged = state.served.program.exchanged
    if exchanged:
        return len(exchanged) * PARTS
    return kv_heads * (1 + state.prompt * state.told.shows_kept)


@dataclass(frozen=True)
class Part(ABC):
    """What one stage knows after the forward.

    Attributes:
        run: of the policy's program.
        finite: whether the model's tensors were, here.
    """

    state: State
    run: Any
    finite: bool

    @abstractmethod
    def said(self) -> torch.Tensor:
        """int64 [l, `numbers_of_layer`], none negative, on the host."""

    @abstractmethod
    def counts(self, said: torch.Tensor) -> torch.Tensor:
        """int64 [L, G] entries of each list, on the host; once all stages' layers have been said.

        `settle` has told the run whether the model's tensors were finite.

        Args:
            said: [L, `numbers_of_layer`].
        """

    @abstractmethod
    def choose(self) -> tuple[torch.Tensor, Known]:
        """bool [l, g, N] that is kept here, and what is known of it; after `counts`."""

    def positions(self, said: torch.Tensor) -> torch.Tensor | None:
        """bool [L, G, N] that all layers keep, where the answer is to say it."""
        return None


@dataclass(frozen=True)
class Chosen(Part):
    """The stage has chosen.

    Attributes:
        kept: bool [l, g, N] of the layers and KV heads that are here.
        own: int64 [l, G] entries of each list of these layers, on the host.
        known: of its layers, where the policy goes on.
        shown: bool [l, G, N] that all ranks keep of them, where the answer is to say it.
    """

    kept: torch.Tensor
    own: torch.Tensor
    known: Known
    shown: torch.Tensor | None

    def said(self) -> torch.Tensor:
        if self.shown is None:
            return self.own
        return torch.cat([self.own, self.shown.cpu().flatten(1).long()], 1)

    def counts(self, said: torch.Tensor) -> torch.Tensor:
        counts = said[:, : self.own.shape[1]]
        return torch.full_like(counts, self.state.prompt) if self.run.not_finite else counts

    def choose(self) -> tuple[torch.Tensor, Known]:
        return self.kept, self.known

    def positions(self, said: torch.Tensor) -> torch.Tensor | None:
        if self.shown is None:
            return None
        return said[:, self.own.shape[1] :].view(len(said), -1, self.state.prompt).bool()


@dataclass(frozen=True)
class Comparing(Part):
    """The stage has yet to hear of the others' layers.

    Attributes:
        numbers: int64 [l, S, `PARTS`] of its layers, on the host.
        kv_heads: G.
    """

    numbers: torch.Tensor
    kv_heads: int

    def said(self) -> torch.Tensor:
        return self.numbers.flatten(1)

    def counts(self, said: torch.Tensor) -> torch.Tensor:
        run = self.run
        run.hear(said.view(len(said), -1, PARTS))
        return torch.tensor(run.entries_kept())[:, None].expand(-1, self.kv_heads).contiguous()

    def choose(self) -> tuple[torch.Tensor, Known]:
        run = self.run
        kept = torch.stack(run.finish(wait=False))
        entries, held = to_host([kept.sum(2), Held.of(kept)])
        own = run.program.layers
        wanted = torch.tensor(run.entries_kept())[own.start : own.stop, None].expand_as(entries)
        if not torch.equal(entries, wanted):
            raise RuntimeError(
                f"layers {own.start} to {own.stop - 1} keep {entries.tolist()} entries, and other "
                f"stages hold room for {wanted[:, 0].tolist()}"
            )
        layers = [Held(positions, bool(alike)) for positions, alike in held.tolist()]
        widest = held[:, 0].max().to(kept.device)
        (of_ranks,) = to_host([run.program.heads.everyone(widest)])
        return kept, Known(layers, int(of_ranks.max()))
