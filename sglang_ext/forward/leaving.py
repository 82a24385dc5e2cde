"""Whether entries leave at a decode step: only where there is room for what may stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.request.request import RequestState

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.forward.services import Services


class Leaving(NamedTuple):
    """A request that may lose entries after a forward.

    Attributes:
        length: number of its tokens, the last step's included.
    """

    request: Any
    state: RequestState
    length: int


class Room:
    """Slots that the folds of one forward may take, counted before anything is chosen.

    A policy cannot take back what it let leave, so a fold is begun only if it can be finished.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._reserved = 0
        self._free: int | None = None

    def reserve_all(self, request: Any, state: RequestState, length: int) -> bool:
        """Whether there are slots for a fold even if nothing leaves; if so, they count as taken.

        Args:
            length: number of the request's tokens, the new one included.
        """
        slots = self._services.store.slots_with(state.private, length)
        return self.reserve(request, state, length, slots)

    def reserve(self, request: Any, state: RequestState, length: int, slots: int) -> bool:
        """Whether a request may have `slots` slots after a fold; if so, the missing ones are taken.

        Args:
            length: as of `reserve_all`.
            slots: private slots of the request after the fold.
        """
        store, tree = self._services.store, self._services.tree
        need = slots - (0 if state.private is None else state.private.slots.numel())
        if self._free is None:
            self._free = store.allocator.available_size() + tree.evictable_size()
        free = self._free
        if state.published:
            end = length // tree.page_size * tree.page_size
            need -= max(end - max(request.kv.cache_protected_len, state.prompt), 0)
            free += compat.locked_alone(tree, request)
        need = max(need, 0)
        if self._reserved + need > free:
            return False
        self._reserved += need
        return True

    def make(self) -> None:
        """Have the radix cache give up what the slots that count as taken need, all at once.

        Stages group and order folds each by its own layers. Evicting fold by fold, they would evict
        different prompts, and from then on compute different parts of the prompts to come.
        """
        with self._services.streams.scheduling():  # the list of free slots is the scheduler's
            self._services.evict(self._reserved)


def check_last_fold(services: Services, request: Any, state: RequestState) -> None:
    """Check a fold for whose numbers the host did not wait.

    Raises:
        RuntimeError: it kept other numbers of entries than the host assumed.
    """
    numbers, private, span = state.memory.read_numbers(), state.private, services.arena.span
    if numbers is None or not numbers.finite or private is None or not private.every_list_lost:
        return
    if numbers.counts_after.tolist() != private.laid_out[span.start : span.stop]:
        raise RuntimeError(f"request {request.rid}: a fold kept other numbers of entries")


def may_leave(
    services: Services, room: Room, request: Any, state: RequestState, length: int
) -> bool:
    """Whether entries leave at the decode step of a request's last token.

    If they should, but there is no room for what might stay, the step is noted as skipped. With
    several stages room is looked for later, when all know what stays (stages.py).

    Args:
        room: of this forward.
        length: number of the request's tokens, that one included.
    """
    step = length - state.prompt
    if not state.leaves_at(step):
        return False
    if services.in_stages or room.reserve_all(request, state, length):
        return True
    services.reports.skipped_fold(request, state, step)
    return False
