"""In the front end: variants of policies that schedulers have made (variants.py).

A request that sets parameters is sent to the schedulers when all of them have made its variant, so
that no other request waits for its kernels.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.face.asked import SET
from kvpolicy.sglang_ext.face.options import Policy, Texts, texts_of
from kvpolicy.sglang_ext.serving.messages import (
    FAILED,
    LOOK_EVERY,
    MOST_VARIANTS,
    PATIENCE,
    PREPARING,
    VARY,
)


class Prepared:
    """The variants that schedulers have made, or are making, for this process; the latest ones."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[tuple[Policy, Texts], asyncio.Task[None]] = OrderedDict()

    async def wait(self, manager: Any, policy: Policy, values: Mapping[str, Any]) -> None:
        """Wait until every scheduler has a policy with these values.

        Args:
            manager: SGLang's tokenizer manager.

        Raises:
            ValueError: a scheduler cannot make it; the message is for the client.
        """
        key = (policy, texts_of(values))
        if key not in self._tasks:
            task = asyncio.get_running_loop().create_task(_ask(manager, policy.name, values))
            self._tasks[key] = task
            task.add_done_callback(partial(self._ended, key))
            while len(self._tasks) > MOST_VARIANTS and next(iter(self._tasks.values())).done():
                self._tasks.popitem(last=False)
        self._tasks.move_to_end(key)
        # A client that goes away does not end what others may wait for.
        await asyncio.shield(self._tasks[key])

    def _ended(self, key: tuple[Policy, Texts], task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._tasks.pop(key, None)  # the next request asks again


async def _ask(manager: Any, name: str, values: Mapping[str, Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        body = {"action": VARY, "name": name, "values": dict(values)}
        answers = await compat.change_policies(manager, body)
        if not any(answer["state"] == PREPARING for answer in answers):  # else more may fail
            for answer in answers:
                if answer["state"] == FAILED:
                    raise ValueError(answer["problem"])
            return
        if time.monotonic() > deadline:
            raise ValueError(
                f"custom_params.{SET}: the kernels of `{name}` with these values were not compiled "
                f"within {PATIENCE:.0f} s"
            )
        await asyncio.sleep(LOOK_EVERY)
