"""In the front end: variants of policies that schedulers have made (variants.py).

A request that sets parameters is sent to the schedulers when all of them have made its variant, so
that no other request waits for its kernels.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any
from uuid import uuid4

from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.face.asked import SET
from kvpolicy.sglang_ext.face.policy_files import Policy, Texts, texts_of
from kvpolicy.sglang_ext.serving.messages import (
    FAILED,
    LOOK_EVERY,
    MOST_PENDING,
    MOST_VARIANTS,
    PATIENCE,
    PREPARING,
    VARY,
)


class Prepared:
    """The variants that schedulers have made, or are making, for this process.

    It asks for a variant anew once it has asked for `MOST_VARIANTS` others; schedulers keep twice
    as many for each front end.
    """

    def __init__(self) -> None:
        self._name = uuid4().hex  # by which schedulers know this front end
        self._tasks: OrderedDict[tuple[Policy, Texts], asyncio.Task[None]] = OrderedDict()
        self._turns = asyncio.Semaphore(MOST_PENDING)
        self._aborts: dict[asyncio.Future[None], Collection[str]] = {}  # -> ids of the requests

    async def wait(
        self, manager: Any, policy: Policy, values: Mapping[str, Any], rids: Collection[str] = ()
    ) -> None:
        """Wait until every scheduler has a policy with these values.

        Args:
            manager: SGLang's tokenizer manager.
            rids: ids of the requests that wait, for `abort`.

        Raises:
            ValueError: a scheduler cannot make it, or the request is aborted; the message is for
                the client.
        """
        loop, key = asyncio.get_running_loop(), (policy, texts_of(values))
        if key not in self._tasks:
            self._tasks[key] = task = loop.create_task(self._ask(manager, policy.name, values))
            task.add_done_callback(partial(self._ended, key))
            self._forget_oldest()
        # What a client does does not end what others may wait for.
        variant, aborted = asyncio.shield(self._tasks[key]), loop.create_future()
        self._aborts[aborted] = rids
        try:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait((variant, aborted), timeout=PATIENCE, return_when=first)
        finally:
            del self._aborts[aborted]
            variant.add_done_callback(_take_error)
        if aborted.done():
            raise ValueError("aborted while the kernels of the request's parameters were compiled")
        if not variant.done():
            raise _late(policy.name)
        variant.result()

    def abort(self, rid: str, *, all_requests: bool) -> None:
        """Let requests that wait end with an error; as SGLang, those whose id begins with `rid`."""
        for aborted, rids in self._aborts.items():
            named = bool(rid and rids) and all(each.startswith(rid) for each in rids)
            if (all_requests or named) and not aborted.done():
                aborted.set_result(None)

    def _forget_oldest(self) -> None:
        surplus = len(self._tasks) - MOST_VARIANTS
        done = [key for key, task in self._tasks.items() if task.done()]
        for key in done[: max(0, surplus)]:
            del self._tasks[key]

    def _ended(self, key: tuple[Policy, Texts], task: asyncio.Task[None]) -> None:
        failed = task.cancelled() or task.exception() is not None
        if failed and self._tasks.get(key) is task:
            del self._tasks[key]  # the next request asks again

    async def _ask(self, manager: Any, name: str, values: Mapping[str, Any]) -> None:
        body = {"action": VARY, "name": name, "values": dict(values), "front_end": self._name}
        async with self._turns:
            deadline = time.monotonic() + PATIENCE
            while True:
                answers = await compat.change_policies(manager, body)
                for answer in answers:
                    if answer["state"] == FAILED:
                        raise ValueError(answer["problem"])
                if not any(answer["state"] == PREPARING for answer in answers):
                    return
                if time.monotonic() > deadline:
                    raise _late(name)
                await asyncio.sleep(LOOK_EVERY)


def _take_error(variant: asyncio.Future[None]) -> None:
    """Look at an error that nobody waits for any more, which asyncio would log."""
    if not variant.cancelled():
        variant.exception()


def _late(name: str) -> ValueError:
    return ValueError(
        f"custom_params.{SET}: the kernels of `{name}` with these values were not compiled within "
        f"{PATIENCE:.0f} s; they are still being made, so send it again later"
    )
