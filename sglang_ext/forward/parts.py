"""What one of several stages (`--pp`) has found for a request whose prompt ends.

Either the stage has chosen what its layers keep, and tells the others how many entries that is; or
the policy compares layers, and the stage tells the numbers that are compared: all stages choose
when they have those of all layers.

Dimensions: L layers of the model, l of the stage, G KV heads of the model, g of the rank, N tokens
of the prompt, S numbers of a layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from kvpolicy.dsl.execute.decode.memory import Known
from kvpolicy.dsl.execute.layer.choice import Held
from kvpolicy.dsl.execute.layer.exchange import PARTS
from kvpolicy.dsl.execute.prefill.finished import FinishedPrefill
from kvpolicy.dsl.execute.prefill.run import Run
from kvpolicy.sglang_ext.face.host import to_host
from kvpolicy.sglang_ext.request.request import RequestState


def numbers_of_layer(state: RequestState, kv_heads: int) -> int:
    """How many int64 a stage tells of each of its layers, for one request."""
    exchanged = state.served.program.exchanged
    if exchanged:
        return len(exchanged) * PARTS
    return kv_heads * (1 + state.prompt * state.reported.shows_kept)


class StageChoice(NamedTuple):
    """What one stage keeps of a prompt.

    Attributes:
        kept: bool [l, g, N].
        known: what the host knows of `kept`, for a policy that goes on.
    """

    finished: FinishedPrefill
    kept: torch.Tensor
    known: Known


@dataclass(frozen=True)
class Part(ABC):
    """What one stage knows after the forward.

    Attributes:
        finite: whether the model's tensors were finite on this stage.
    """

    state: RequestState
    finite: bool

    @abstractmethod
    def stage_numbers(self) -> torch.Tensor:
        """What other stages are told: int64 [l, `numbers_of_layer`], none negative, on the host."""

    @abstractmethod
    def counts(self, model_numbers: torch.Tensor, *, finite: bool) -> torch.Tensor:
        """int64 [L, G] entries that each list keeps, on the host.

        Args:
            model_numbers: int64 [L, `numbers_of_layer`] of all stages.
            finite: whether the model's tensors were finite on all stages.
        """

    @abstractmethod
    def choose(self) -> StageChoice:
        """What is kept here; called after `counts`."""

    def positions(self, model_numbers: torch.Tensor) -> torch.Tensor | None:
        """bool [L, G, N] kept in all layers; None if the answer does not say it."""
        return None


@dataclass(frozen=True)
class Chosen(Part):
    """A stage that has chosen.

    Attributes:
        choice: what it keeps.
        counts_here: int64 [l, G] entries that each list of the stage keeps, on the host.
        all_kept: bool [l, G, N] kept on all ranks; None if the answer does not say it.
    """

    choice: StageChoice
    counts_here: torch.Tensor
    all_kept: torch.Tensor | None

    def stage_numbers(self) -> torch.Tensor:
        if self.all_kept is None:
            return self.counts_here
        return torch.cat([self.counts_here, self.all_kept.cpu().flatten(1).long()], 1)

    def counts(self, model_numbers: torch.Tensor, *, finite: bool) -> torch.Tensor:
        self.choice.finished.settle(finite=finite)
        counts = model_numbers[:, : self.counts_here.shape[1]]
        return counts if finite else torch.full_like(counts, self.state.prompt)

    def choose(self) -> StageChoice:
        return self.choice

    def positions(self, model_numbers: torch.Tensor) -> torch.Tensor | None:
        if self.all_kept is None:
            return None
        kept = model_numbers[:, self.counts_here.shape[1] :]
        return kept.view(len(kept), -1, self.state.prompt).bool()


@dataclass(frozen=True)
class Comparing(Part):
    """A stage that cannot choose before it knows the numbers of the others' layers.

    Attributes:
        run: the policy's prefill of the prompt.
        numbers: int64 [l, S, `PARTS`] that are compared, of its layers, on the host.
        kv_heads: G.
    """

    run: Run
    numbers: torch.Tensor
    kv_heads: int

    def stage_numbers(self) -> torch.Tensor:
        return self.numbers.flatten(1)

    def counts(self, model_numbers: torch.Tensor, *, finite: bool) -> torch.Tensor:
        run = self.run
        run.settle(finite=finite)
        run.take_layer_numbers(model_numbers.view(len(model_numbers), -1, PARTS))
        return torch.tensor(run.entries_kept())[:, None].expand(-1, self.kv_heads).contiguous()

    def choose(self) -> StageChoice:
        run = self.run
        finished = run.finish(wait=False)
        kept = torch.stack(finished.kept)
        entries, held = to_host([kept.sum(2), Held.of(kept, finished.columns())])
        span = run.program.layers
        expected = torch.tensor(run.entries_kept())[span.start : span.stop, None].expand_as(entries)
        if not torch.equal(entries, expected):
            raise RuntimeError(
                f"layers {span.start} to {span.stop - 1} keep {entries.tolist()} entries, and "
                f"other stages hold room for {expected[:, 0].tolist()}"
            )
        widest = held[:, 0].max().to(kept.device)
        (per_rank,) = to_host([run.program.heads.per_rank(widest)])
        return StageChoice(finished, kept, Known(Held.each(held), int(per_rank.max())))
