"""Admission of propagating prompts to SGLang's prefill passes."""

from __future__ import annotations

from typing import Any

from kvpolicy.sglang_ext.request import State, state_of


def must_wait(adder: Any, req: Any, state: State, most: int) -> bool:
    """Whether a propagating prompt cannot be admitted to a pass.

    There may be `most` of them in a pass. One that must be prefilled in one piece waits until it
    fits or is alone; then the pass is made as large as it is. Its length was limited when it was
    queued.

    Args:
        adder: SGLang's prefill adder; its chunk size may be raised.
    """
    states = (state_of(each) for each in adder.can_run_list)
    if sum(each is not None and each.propagates for each in states) >= most:
        return True
    if state.plan.layer is not None or adder.rem_chunk_tokens is None:
        return False
    needed = adder.ceil_paged_tokens(len(req.full_untruncated_fill_ids) - req.prefix_len)
    if needed <= adder.rem_chunk_tokens:
        return False
    if adder.can_run_list:
        return True
    adder.rem_chunk_tokens = needed
    return False
