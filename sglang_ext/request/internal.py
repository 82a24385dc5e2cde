"""Internal requests, which score another request's tokens: clients do not notice them.

SGLang observes no times of them and leaves nothing of them in the radix cache. They are computed in
slots set aside (memory/set_aside.py), and one that cannot be admitted holds up none behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpolicy.sglang_ext.face import asked, compat
from kvpolicy.sglang_ext.memory.set_aside import SetAside


def queue(req: Any) -> None:
    """An internal request enters the queue."""
    compat.leave_out_of_metrics(req)
    req.priority = None  # SGLang makes it the lowest: nobody is preempted for it


def admit(set_aside: SetAside, adder: Any, req: Any, original: Callable[[], Any]) -> Any:
    """Instead of the prefill adder's `add_one_req`: admit in slots set aside, or refuse.

    Args:
        original: SGLang's `add_one_req`, with its arguments.

    Returns:
        The adder's answer.
    """

    def used() -> int:
        kv = req.kv
        return kv.kv_allocated_len - kv.cache_protected_len if kv.holds_kv else 0

    if not set_aside.lend(req.rid, len(req.origin_input_ids) - req.prefix_len, used):
        if req.to_finish is None:
            compat.refuse_unnoticed(req, asked.NO_ROOM)
        return compat.passed_over()
    with compat.uncounted(adder):
        answer = original()
    if adder.can_run_list and adder.can_run_list[-1] is req:
        return answer
    set_aside.ended(req.rid)
    set_aside.take_back(lambda _: None)
    return compat.passed_over()
