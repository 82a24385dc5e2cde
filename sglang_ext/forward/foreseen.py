"""Prompts that are compressed before the device has said how much stays of them.

By many policies the prompt's length decides how many entries each list keeps. Then the host takes
slots, lays out pages and launches the copy while the device still computes the prompt, goes on to
the next forward, and reads the device's own numbers where SGLang processes the result, for which
the host waits anyway. Until then the prompt stays in its ordinary slots. If the model's tensors
were not finite, nothing should have left, and the request goes back to these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.dsl.execute.arriving import Arriving
from kvpolicy.dsl.execute.decode import Known
from kvpolicy.dsl.execute.layout import Held
from kvpolicy.sglang_ext.face.host import to_device
from kvpolicy.sglang_ext.forward.failures import COMPACTION, serve_in_full
from kvpolicy.sglang_ext.request.propagation import Progress
from kvpolicy.sglang_ext.request.reasons import Reason
from kvpolicy.sglang_ext.request.request import State

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.forward.services import Services


def foreseen(state: State) -> list[int] | None:
    """[L] entries that each list of a layer keeps of a request's prompt; None: the device says it.

    It does where the prompt's own slots are written to, which could not be taken back; where a
    resumed request goes on from the copy at once; where the answer says which positions are kept;
    and where a policy goes on from lists of which only their positions say how wide they are.
    """
    served = state.served
    if state.in_place or state.resumes or state.told.shows_kept or served.in_stages:
        return None
    if state.folds and served.heads_differ:
        return None
    return served.foreseen(state.prompt)


def taken_over(state: State, layers: list[int]) -> Known:
    """What a policy that goes on takes over of these layers' entries, all KV heads' the same."""
    held = [Held(number, alike=True) for number in layers] if state.folds else []
    return Known(held, max(layers) if state.folds else 0)


@dataclass(frozen=True)
class Foreseen:
    """A request whose copy has been launched.

    Attributes:
        progress: of the request then; another one if it has been retracted since.
        counts: int64 [L, g] entries for which there is room, of the KV heads here, on the host.
        numbers: int64 [L * g + 1] of the device: how many are kept, and whether the model's tensors
            were finite.
        arriving: the same, on their way to the host.
    """

    request: Any
    state: State
    progress: Progress
    counts: torch.Tensor
    numbers: torch.Tensor
    arriving: Arriving

    def fitting(self, kept: torch.Tensor) -> torch.Tensor:
        """What is kept, bool [L, g, N]; the first entries if that is not as much as there is room.

        So that a request reads its own entries, and nobody else's, until the device has said it.
        """
        room = to_device(self.counts, torch.int64, kept.device)
        right = (self.numbers[:-1].view_as(room) == room).all()
        first = torch.arange(kept.shape[2], device=kept.device) < room.unsqueeze(2)
        return torch.where(right, kept, first)

    @property
    def goes_on(self) -> bool:
        """Whether the request has been neither aborted nor retracted since."""
        holds: bool = self.request.kv.holds_kv
        return self.state.progress is self.progress and holds

    def confirm(self, services: Services) -> None:
        """The device says what it has kept; the host waits for it."""
        state, request = self.state, self.request
        if state.broken or state.private is None:
            return
        with services.failures.contained(request, COMPACTION):
            *kept, finite = self.arriving.read().tolist()
            if not finite:
                services.forget_rows()
                serve_in_full(services.store, services.reports, request, Reason.NOT_FINITE)
            elif kept != self.counts.flatten().tolist():
                raise RuntimeError(
                    f"request {request.rid}: lists keep {kept} entries, and there is room for "
                    f"{self.counts.flatten().tolist()}"
                )


def launched(
    request: Any, state: State, counts: torch.Tensor, kept: torch.Tensor, finite: torch.Tensor
) -> Foreseen:
    """Asks for the device's numbers of a request.

    Args:
        counts: as the attribute.
        kept: int64 [L, g] entries of each list, and finite: 0-d bool, on the device.
    """
    numbers = torch.cat([kept.flatten(), finite.long()[None]])
    return Foreseen(request, state, state.progress, counts, numbers, Arriving(numbers))
