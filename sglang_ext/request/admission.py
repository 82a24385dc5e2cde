"""Admission to SGLang's prefill passes: slots that requests need, and prompts that must wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpolicy.sglang_ext.face import asked, compat
from kvpolicy.sglang_ext.request.reasons import Reason
from kvpolicy.sglang_ext.request.request import RequestState, state_of

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.memory.store import Store

IN_FLIGHT = 2  # decode steps that may begin before a prompt is left to the radix cache


def must_wait(adder: Any, req: Any, state: RequestState, most: int) -> bool:
    """Whether a propagating prompt cannot be admitted to a pass.

    A pass may have `most` of them. A prompt that must be prefilled in one piece waits until it fits
    or is alone; alone, it gets a pass as large as it is. Its length was limited when it was queued.

    Args:
        adder: SGLang's prefill adder; the tokens left in its pass may be raised.
    """
    states = (state_of(request) for request in adder.can_run_list)
    if sum(admitted is not None and admitted.propagates for admitted in states) >= most:
        return True
    plan = state.plan
    if plan is None or plan.layer is not None or adder.rem_chunk_tokens is None:
        return False
    needed = adder.ceil_paged_tokens(len(req.full_untruncated_fill_ids) - req.prefix_len)
    if needed <= adder.rem_chunk_tokens:
        return False
    if adder.can_run_list:
        return True
    adder.rem_chunk_tokens = needed
    return False


def reserve(store: Store, adder: Any, req: Any, state: RequestState, extend: int | None) -> int:
    """Slots that a request needs beyond those that SGLang counts; see `Runtime.reserve`."""
    slots = store.whole_pages(state.slots) if state.wanted else 0
    page = adder.per_req_token_overhead
    if req.kv.holds_kv:
        return _reserve_chunk(adder, req, state, 0 if state.in_place else slots, extend)
    max_output: int = req.sampling_params.max_new_tokens
    prefix: int = req.prefix_len
    output = min(max(max_output - len(req.output_ids), 0), compat.longest_estimated_output())
    tokens = len(req.full_untruncated_fill_ids)  # with the output of a retracted request
    if not tokens:  # SGLang asks, before it looks at the request, whether to preempt others for it
        return 0
    most_slots = state.served.growth.most(state.prompt, max_output) if state.folds else None
    growth = tokens - state.prompt + output
    growth = growth if most_slots is None else min(growth, max(most_slots - slots, 0))
    if not slots:  # its prompt stays until its first fold at least
        return growth - (tokens - state.prompt + output)
    # What the prompt has in the radix cache is not its own.
    uncached = max(state.prompt - prefix, 0)
    may_move = state.may_move(store.arena.slot_bytes) and slots + page <= uncached
    peak = _peak_slots(slots, state.prompt, growth, in_place=may_move)
    if peak + 2 * page >= store.dense_capacity:
        # It would wait for ever: even an empty pool has no room for prompt and copy.
        state.uncompressed = Reason.NO_SLOTS
        state.forget()
        return 0
    if compat.ignores_eos_without_cache(adder, req):
        state.in_place = may_move  # there is no radix cache
        return 0 if may_move else slots
    # The copy takes the prompt's place: the request holds both when its prefill ends, and the copy
    # with its output later. Where both have no room, the prompt is compacted within its slots.
    for in_place in (False, True) if may_move else (False,):
        state.in_place, needs = in_place, _peak_slots(slots, uncached, growth, in_place=in_place)
        if needs + page < _room(adder) - _pinned(adder, req):
            break
        prefill_end_slots = _slots_at_prefill_end(slots, uncached, in_place=in_place)
        reserved = _borrowed_reserve(adder, req, prefill_end_slots + page, slots + growth + page)
        if reserved is not None:
            needs = reserved - page
            break
    if extend is not None and prefix + extend < tokens:
        return needs - extend  # SGLang counts this chunk alone
    return needs - (tokens - prefix + output)


def _reserve_chunk(
    adder: Any, req: Any, state: RequestState, slots: int, extend: int | None
) -> int:
    """`reserve` for a further chunk, which cannot wait: where its copy does not fit, none is made.

    Before the last chunk, slots for the rest of the prompt are kept from others in the pass.
    """
    chunk = extend or 0
    room: int = _room(adder) - adder.ceil_paged_tokens(chunk) - adder.per_req_token_overhead
    missing: int = state.prompt - req.prefix_len - chunk
    if missing <= 0:
        return slots if slots <= room else 0
    return max(min(slots + missing, room), 0)


def fits_chunk(adder: Any, req: Any, *, others: bool) -> bool:
    """Whether a prompt's next chunk has room; the pass is cut to the room that there is.

    SGLang goes on with a prompt that it has begun even without room, and the server ends. Running
    requests may have taken the slots that it counted on, for their copies or in batches of other
    stages, which it does not see. The prompt waits for them.

    Args:
        adder: SGLang's prefill adder; the tokens left in its pass may be lowered.
        others: whether requests may run besides those of the adder's batch.
    """
    running = 0 if adder.running_batch is None else len(adder.running_batch.reqs)
    page = adder.per_req_token_overhead
    free = int(adder.memory_budget.remaining_current) // page * page
    needed = min(len(req.full_untruncated_fill_ids) - req.prefix_len, adder.rem_chunk_tokens)
    if needed <= free:
        return True
    free -= adder.ceil_paged_tokens(IN_FLIGHT) * running  # they go on
    if free <= 0:
        return not (running or others)
    adder.rem_chunk_tokens = free
    return True


def _borrowed_reserve(adder: Any, req: Any, prefill_slots: int, output_slots: int) -> int | None:
    """Slots to reserve for the only request of a pass if it can borrow from others' reserves.

    Slots that running requests reserve for output to come are still free, and the new request gives
    up its prompt as soon as its prefill has ended.

    Args:
        prefill_slots, output_slots: slots that it holds until then, and then with all its output.

    Returns:
        The most that SGLang still admits; None where the request does not fit even so.
    """
    is_alone = all(admitted is req for admitted in adder.can_run_list)
    if not is_alone or req.output_ids or asked.is_scoring(req):
        return None
    pinned = _pinned(adder, req)
    total = int(adder.memory_budget.remaining_total) - pinned
    current = int(adder.memory_budget.remaining_current) - pinned
    # Its prefix may leave when its prefill has ended.
    if output_slots >= total + pinned or prefill_slots >= current:
        return None
    tokens = len(req.full_untruncated_fill_ids) - req.prefix_len
    chunk = tokens if adder.rem_chunk_tokens is None else max(adder.rem_chunk_tokens, 1)
    steps = adder.ceil_paged_tokens(IN_FLIGHT + -(-tokens // chunk))
    running = [] if adder.running_batch is None else adder.running_batch.reqs
    # What folds of running requests may take is left to them.
    needs = (compat.running_needs(adder, r) if _folds(r) else steps for r in running)
    return total - 1 if prefill_slots < current - sum(needs) else None


def _folds(req: Any) -> bool:
    state = state_of(req)
    return state is not None and state.folds


def _peak_slots(slots: int, prompt: int, growth: int, *, in_place: bool) -> int:
    """Slots that a request holds at most: when its prefill ends, or with all of its output.

    Args:
        slots: slots of its copy.
        prompt, growth: slots of its prompt that are its own, and slots that its output takes.
        in_place: whether the copy is made within the prompt's slots.
    """
    return max(_slots_at_prefill_end(slots, prompt, in_place=in_place), slots + growth)


def _slots_at_prefill_end(slots: int, prompt: int, *, in_place: bool) -> int:
    """Slots that a request holds when its prefill ends; arguments as in `_peak_slots`."""
    return prompt + IN_FLIGHT + (0 if in_place else slots)


def _pinned(adder: Any, req: Any) -> int:
    """Slots that SGLang keeps from eviction before it looks at its budget: the prefix of a request.

    Those of a request behind others in a pass are not counted; at worst it waits for the next pass.
    """
    prefix: int = req.prefix_len
    return 0 if adder.can_run_list else prefix


def _room(adder: Any) -> int:
    current: int = adder.memory_budget.remaining_current
    total: int = adder.memory_budget.remaining_total
    return min(current, total)


def still_needs(req: Any, state: RequestState, estimate: float) -> float:
    """Slots that a running request may still take; see `Runtime.still_needs`."""
    most_slots = state.served.growth.most(state.prompt, req.sampling_params.max_new_tokens)
    if most_slots is None:
        return estimate
    held_slots: int = req.kv.kv_allocated_len - max(req.kv.cache_protected_len, state.prompt)
    held_slots += 0 if state.private is None else state.private.slots.numel()
    return min(estimate, max(most_slots - held_slots, 0))
