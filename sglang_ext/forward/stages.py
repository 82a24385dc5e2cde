"""What a forward has found on all stages (`--pp`), carried out when its result is processed.

Every stage has a scheduler, a pool and a radix cache of its own, and SGLang has them make the same
decisions by giving them the same requests in the same order. So all that a scheduler can see, above
all the slots of a request, has to change at the same place of that order on all stages. What a
policy keeps, of a prompt or at a fold, is found in the forward, by each stage for its layers. Each
stage then tells the others how many entries that is (of a prompt whose policy compares layers, the
numbers that are compared: parts.py) and whether something has failed, and carries nothing out
before the result is processed, when these messages have arrived. Then all know how many slots a
fold takes; if there are too few, nothing leaves at that step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.sglang_ext.forward.fold import Left
from kvpolicy.sglang_ext.forward.leaving import Leaving, Room
from kvpolicy.sglang_ext.forward.parts import Part, numbers_of_layer
from kvpolicy.sglang_ext.request.request import RequestState, state_of

if TYPE_CHECKING:
    from kvpolicy.dsl.execute.decode.lists import FoldNumbers
    from kvpolicy.sglang_ext.forward.services import Services
    from kvpolicy.sglang_ext.forward.step import ForwardStep


class Outcome:
    """What one forward has found, from its end until its result is processed."""

    def __init__(
        self,
        services: Services,
        batch: Any,
        step: ForwardStep,
        finishing: Sequence[tuple[Any, RequestState | None]],
    ) -> None:
        """
        Args:
            finishing: requests whose prompt ends in it, with their states.
        """
        self._services, self._batch, self._finishing = services, batch, finishing
        self._prefill = step.prefill
        requests = [(req, state_of(req)) for req in batch.reqs]
        # A request that is retracted meanwhile has another `Progress` then.
        self._concerned = [
            (req, state, state.progress) for req, state in requests if state is not None
        ]
        for _, state, _ in self._concerned:
            state.under_way += 1
        self._ending = [] if step.prefill is None else step.prefill.ending
        steps = [substep for substep in (step.resume, step.decode) if substep is not None]
        self._leaving = [leaving for substep in steps for leaving in substep.leaving]
        self._folds = [fold for substep in steps for fold in substep.folds]
        numbers = [self._numbers_of_prompt(req, state) for req, state in self._ending]
        members = [member for fold in self._folds for member in fold.members]
        of_fold = {id(member.request): member.fold_numbers for member in members}
        numbers += [self._lists_of(of_fold.get(id(leaving.request))) for leaving in self._leaving]
        # Read last: what precedes may fail.
        numbers.insert(0, torch.tensor([state.failure_code for _, state, _ in self._concerned]))
        self._sizes = [tensor.numel() for tensor in numbers]
        self._sent = None
        if self._concerned:  # on all stages, or on none
            self._sent = services.stages.send(torch.cat(numbers).to(torch.int64))

    def take_up(self, batch: Any) -> None:
        """Carry out what was found; the result of the forward is about to be processed.

        Raises:
            RuntimeError: `batch` is another forward's.
        """
        if batch is not self._batch:
            raise RuntimeError("results are not processed in the order of their forwards")
        if self._sent is not None:
            codes, *numbers = self._sent.read().split(self._sizes)
            with self._services.streams.forwarding():
                self._take_up_failures(codes.tolist())
                goes_on = {id(req) for req, _ in self._going_on()}
                prompts, steps = numbers[: len(self._ending)], numbers[len(self._ending) :]
                for (req, state), request_numbers in zip(self._ending, prompts, strict=True):
                    if id(req) in goes_on and not state.failed:
                        self._carry_out_prompt(req, state, request_numbers)
                self._fold(goes_on, steps)
            for _, state in self._going_on():
                state.under_way -= 1
        self._services.reports.finished(self._finishing)

    def _numbers_of_prompt(self, req: Any, state: RequestState) -> torch.Tensor:
        """int64 [1 + L * size] of a request whose prompt ends: not finite, then its layers."""
        part = self._part(req)
        not_finite = torch.tensor([part is not None and not part.finite])
        size = numbers_of_layer(state, self._services.store.kv_heads)
        layer_numbers = self._of_model(None if part is None else part.stage_numbers(), size)
        return torch.cat([not_finite, layer_numbers])

    def _lists_of(self, numbers: FoldNumbers | None) -> torch.Tensor:
        """int64 [1 + L * G] of a request that may lose entries: not finite, and what stays."""
        not_finite = torch.tensor([numbers is not None and not numbers.finite])
        kept = None if numbers is None else numbers.counts_after
        return torch.cat([not_finite, self._of_model(kept, self._services.store.kv_heads)])

    def _of_model(self, stage_numbers: torch.Tensor | None, size: int) -> torch.Tensor:
        """int64 [L * size] numbers of the model's layers, 0 for layers of other stages.

        Args:
            stage_numbers: int64 [l, size] of this stage's layers; None if something failed here.
        """
        arena = self._services.arena
        model_numbers = torch.zeros((arena.model_layers, size), dtype=torch.int64)
        if stage_numbers is not None:
            model_numbers[arena.span.start : arena.span.stop] = stage_numbers
        return model_numbers.flatten()

    def _part(self, req: Any) -> Part | None:
        return None if self._prefill is None else self._prefill.parts.get(id(req))

    def _take_up_failures(self, codes: Sequence[int]) -> None:
        codes_by_id = {
            id(req): code for (req, *_), code in zip(self._concerned, codes, strict=True)
        }
        for req, state in self._going_on():
            self._services.failures.take_up_failure(req, state, codes_by_id[id(req)])

    def _going_on(self) -> list[tuple[Any, RequestState]]:
        """Requests that have been neither aborted nor retracted since the forward."""
        return [
            (req, state) for req, state, progress in self._concerned if state.is_at(progress, req)
        ]

    def _carry_out_prompt(self, req: Any, state: RequestState, numbers: torch.Tensor) -> None:
        if self._prefill is None:
            return
        layer_numbers = numbers[1:].view(self._services.arena.model_layers, -1)
        self._prefill.carry_out(req, layer_numbers, finite=not int(numbers[0]))
        if state.published and state.private is not None and state.private.ready:
            self._services.detach([(req, state)])

    def _fold(self, goes_on: Collection[int], steps: Sequence[torch.Tensor]) -> None:
        """Carry out the folds of requests that go on.

        Args:
            goes_on: `id` of these requests.
            steps: for each of `_leaving`, what all stages have sent, as of `_lists_of`.
        """
        if not self._leaving:
            return
        room, agreed = Room(self._services), {}
        for leaving, numbers in zip(self._leaving, steps, strict=True):
            if id(leaving.request) in goes_on and not leaving.state.failed:
                left = self._left(leaving, numbers, room)
                if left is not None:
                    agreed[id(leaving.request)] = left
        room.make()
        for fold in self._folds:
            fold.carry_out(agreed)
        self._services.forget_rows()

    def _left(self, leaving: Leaving, numbers: torch.Tensor, room: Room) -> Left | None:
        """What a fold keeps; None if nothing is to leave after all."""
        store, (request, state, length) = self._services.store, leaving
        if int(numbers[0]):
            state.memory.withdraw(finite=False)
            return None
        kept = numbers[1:].view(-1, store.kv_heads)
        counts = torch.from_numpy(store.entries_with(state.private, length))
        left = Left.between(counts, kept)
        if left.left and not room.reserve(request, state, length, store.slots_for(kept)):
            state.memory.withdraw(finite=True)
            self._services.reports.skipped_fold(request, state, length - state.prompt)
            return None
        return left
