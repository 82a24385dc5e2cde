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
        self._asked: OrderedDict[tuple[Policy, Texts], asyncio.Task[None]] = OrderedDict()

    async def wait(self, manager: Any, policy: Policy, values: Mapping[str, Any]) -> None:
        """Wait until every scheduler has a policy with these values.

        Args:
            manager: SGLang's tokenizer manager.

        Raises:
            ValueError: a scheduler cannot make it; the message is for the client.
        """
        key = (policy, texts_of(values))
        if key not in self._asked:
            task = asyncio.get_running_loop().create_task(_ask(manager, policy.name, values))
            self._asked[key] = task
            task.add_done_callback(partial(self._ended, key))
            while len(self._asked) > MOST_VARIANTS and next(iter(self._asked.values())).done():
                self._asked.popitem(last=False)
        self._asked.move_to_end(key)
        # A client that goes away does not end what others may wait for.
        await asyncio.shield(self._asked[key])

    def _ended(self, key: tuple[Policy, Texts], task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._asked.pop(key, None)  # the next request asks again


async def _ask(manager: Any, name: str, values: Mapping[str, Any]) -> None:
    until = time.monotonic() + PATIENCE
    while True:
        body = {"action": VARY, "name": name, "values": dict(values)}
        answers = await compat.change_policies(manager, body)
        if not any(each["state"] == PREPARING for each in answers):  # else more may fail
            for each in answers:
                if each["state"] == FAILED:
                    raise ValueError(each["problem"])
            return
        if time.monotonic() > until:
            raise ValueError(
                f"custom_params.{SET}: the kernels of `{name}` with these values were not compiled "
                f"within {PATIENCE:.0f} s"
            )
        await asyncio.sleep(LOOK_EVERY)
