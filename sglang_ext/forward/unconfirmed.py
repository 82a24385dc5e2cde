"""Prompts that are compressed before the device has said how many of their entries stay.

With many policies the prompt's length decides how many entries each list keeps. Then the host takes
slots, lays out pages and launches the copy while the device still computes the prompt, goes on to
the next forward, and reads the device's numbers when SGLang processes the result, for which the
host waits anyway. Until then the prompt stays in its ordinary slots. If the model's tensors were
not finite, nothing should have left, and the request reads those slots again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.dsl.execute.decode.memory import Known
from kvpolicy.dsl.execute.layer.choice import Held
from kvpolicy.dsl.execute.tensors.arriving import Arriving
from kvpolicy.sglang_ext.face.host import to_device
from kvpolicy.sglang_ext.forward.failures import COMPACTION, serve_in_full
from kvpolicy.sglang_ext.request.propagation import Progress
from kvpolicy.sglang_ext.request.reasons import Reason
from kvpolicy.sglang_ext.request.request import RequestState

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.forward.services import Services


def known_counts(state: RequestState) -> list[int] | None:
    """[L] entries that each list of a layer keeps of a request's prompt; None: wait for the device.

    None if data decide the numbers; if the prompt's own slots are overwritten, which could not be
    undone; if a resumed request goes on from the copy at once; if the answer says which positions
    are kept; with several stages; and if a policy goes on whose KV heads keep different entries, so
    that only their positions say how wide a layer is.
    """
    served = state.served
    if state.in_place or state.resumes or state.reported.shows_kept or served.in_stages:
        return None
    if state.folds and served.heads_differ:
        return None
    return served.known_counts(state.prompt)


def taken_over(state: RequestState, layers: list[int]) -> Known:
    """What the host knows of [L] kept entries, the same of all KV heads, if the policy goes on."""
    held = [Held(number, alike=True) for number in layers] if state.folds else []
    return Known(held, max(layers) if state.folds else 0)


@dataclass(frozen=True)
class Unconfirmed:
    """A request whose copy was launched before the device has said how many entries stay.

    Attributes:
        progress: its state's at the launch; the state has another one after a retraction.
        counts: int64 [L, g] entries for which each list has room, on the host.
        numbers: int64 [L * g + 1] on the device: entries that each list keeps, and whether the
            model's tensors were finite.
        arriving: `numbers`, on their way to the host.
    """

    request: Any
    state: RequestState
    progress: Progress
    counts: torch.Tensor
    numbers: torch.Tensor
    arriving: Arriving

    def fitting(self, kept: torch.Tensor) -> torch.Tensor:
        """bool [L, g, N], as many entries as there is room for: `kept`, or else the first ones.

        So that the request reads its own entries, and nobody else's, until `confirm`.
        """
        room = to_device(self.counts, torch.int64, kept.device)
        fits = (self.numbers[:-1].view_as(room) == room).all()
        first_entries = torch.arange(kept.shape[2], device=kept.device) < room.unsqueeze(2)
        return torch.where(fits, kept, first_entries)

    @property
    def goes_on(self) -> bool:
        """As `RequestState.is_at`, since the launch."""
        return self.state.is_at(self.progress, self.request)

    def confirm(self, services: Services) -> None:
        """Wait for the device's numbers, and compare them with the room.

        A request whose tensors were not finite is served in full. If the numbers differ, its policy
        has failed.
        """
        state, request = self.state, self.request
        # Not `broken`: what has failed here alone gives its slots back when other ranks do, too.
        if state.failed or state.private is None:
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
    request: Any,
    state: RequestState,
    counts: torch.Tensor,
    kept: torch.Tensor,
    finite: torch.Tensor,
) -> Unconfirmed:
    """Ask the device for a request's numbers.

    Args:
        counts: as the attribute.
        kept: int64 [L, g] entries that each list keeps, on the device.
        finite: 0-d, whether the model's tensors were finite, on the device.
    """
    numbers = torch.cat([kept.flatten(), finite.long()[None]])
    return Unconfirmed(request, state, state.progress, counts, numbers, Arriving(numbers))
