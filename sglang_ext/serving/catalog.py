"""In the front end: the policies that are served, and how they change while the server runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from kvpolicy.dsl.bind.model_config import ModelConfig
from kvpolicy.sglang_ext.face import compat, options
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.face.options import Policy
from kvpolicy.sglang_ext.serving.changes import COMMIT, DONE, FAILED, LOOK, PREPARE, READY, WITHDRAW

LOOK_EVERY = 0.1  # seconds
PATIENCE = 600.0  # seconds for compiling


class Catalog:
    """The policies of one server.

    Attributes:
        policies: by name; the first is the default of requests that name none.
        model: what is served.
        length: tokens of the model's context.
    """

    def __init__(self, policies: Sequence[Policy], model: ModelConfig, length: int) -> None:
        self.policies = {policy.name: policy for policy in policies}
        self.model, self.length = model, length
        self._changing = asyncio.Lock()

    @property
    def default(self) -> str:
        """Name of the policy of requests that name none."""
        return next(iter(self.policies))

    def describe(self) -> list[dict[str, Any]]:
        """The policies, for clients."""
        return [
            {
                "name": policy.name,
                "path": policy.path,
                "settings": dict(policy.settings),
                "default": policy.name == self.default,
            }
            for policy in self.policies.values()
        ]

    async def check(self, name: str, text: str, settings: Mapping[str, str]) -> Policy:
        """A policy as it would be served: checked, bound, reckoned and tried.

        Raises:
            Refused: it cannot be served; the message says why.
        """
        policy = options.policy_of(name, text, dict(settings))
        await asyncio.to_thread(options.check_policies, [policy], self.model, self.length)
        return policy

    async def put(self, manager: Any, name: str, text: str, settings: Mapping[str, str]) -> Policy:
        """Add a policy, or replace the one of this name.

        Args:
            manager: SGLang's tokenizer manager.

        Raises:
            Refused: it cannot be served; everything stays as it was.
        """
        policy = await self.check(name, text, settings)
        async with self._changing:
            ticket = uuid4().hex
            change = {"ticket": ticket, "name": name, "text": text, "settings": dict(settings)}
            found = await compat.change_policies(manager, {"action": PREPARE, **change})
            until = time.monotonic() + PATIENCE
            while found["state"] not in (READY, FAILED):
                if time.monotonic() > until:
                    raise Refused(f"its kernels were not compiled within {PATIENCE:.0f} s")
                await asyncio.sleep(LOOK_EVERY)
                look = {"action": LOOK, "ticket": ticket}
                found = await compat.change_policies(manager, look)
            if found["state"] == READY:
                commit = {"action": COMMIT, "ticket": ticket}
                found = await compat.change_policies(manager, commit)
            if found["state"] != DONE:
                raise Refused(found.get("problem", "the scheduler did not take it up"))
            self.policies[name] = policy
        return policy

    async def withdraw(self, manager: Any, name: str) -> None:
        """Serve a policy no longer; requests that run keep it.

        Raises:
            Refused: there is none of this name, or it is the default.
        """
        if name not in self.policies:
            raise Refused(f"no policy is called `{name}`; there is {', '.join(self.policies)}")
        if name == self.default:
            raise Refused(
                f"`{name}` is the default of requests that name no policy; `POST "
                "/kv_policy/disable` gives all of them full KV"
            )
        async with self._changing:
            del self.policies[name]
            await compat.change_policies(manager, {"action": WITHDRAW, "name": name})
