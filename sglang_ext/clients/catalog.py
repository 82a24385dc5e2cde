"""In the front end: the policies that are served, and how they change while the server runs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from uuid import uuid4

from kvpolicy.dsl.bind.model_config import ModelConfig
from kvpolicy.sglang_ext.face import compat, policy_files
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.face.policy_files import Policy
from kvpolicy.sglang_ext.serving.messages import (
    COMMIT,
    DONE,
    FAILED,
    LOOK,
    LOOK_EVERY,
    PATIENCE,
    PREPARE,
    PREPARING,
    READY,
    UNDO,
    WITHDRAW,
)

Claim = Callable[[], AbstractContextManager[None]]


class Catalog:
    """The policies of one server.

    Attributes:
        policies: by name; the first is the default of requests that name none.
        model: sizes of the model that is served.
        length: tokens of the model's context.
    """

    def __init__(self, policies: Sequence[Policy], model: ModelConfig, length: int) -> None:
        self.policies = {policy.name: policy for policy in policies}
        self.model, self.length = model, length
        self._changing = asyncio.Lock()

    @property
    def default(self) -> str:
        """Name of the default policy."""
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
        """A policy as it would be served: checked, bound, its cost estimated, tried out.

        Raises:
            Refused: it cannot be served; the message says why.
        """
        policy = policy_files.policy_of(name, text, dict(settings))
        await asyncio.to_thread(policy_files.check_policies, [policy], self.model, self.length)
        return policy

    async def rehearse(
        self, manager: Any, name: str, text: str, settings: Mapping[str, str]
    ) -> Policy:
        """Do all that `put` does but take the policy up; arguments and errors as there."""
        policy = await self.check(name, text, settings)
        async with self._changing, _change(manager) as ask:
            await self._prepare(ask, name, text, settings)
            await ask(UNDO)
        return policy

    async def put(
        self,
        manager: Any,
        name: str,
        text: str,
        settings: Mapping[str, str],
        claim: Claim = nullcontext,
    ) -> Policy:
        """Add a policy, or replace the one of this name.

        Every scheduler prepares it; when all are ready, all take it up. A request that is sent to
        them later finds it, whichever computes it.

        Args:
            manager: SGLang's tokenizer manager.
            claim: held while the schedulers take it up; it may refuse.

        Raises:
            Refused: a scheduler cannot serve it; everything stays as it was.
        """
        policy = await self.check(name, text, settings)
        async with self._changing:
            with ExitStack() as claimed:
                async with _change(manager) as ask:
                    await self._prepare(ask, name, text, settings)
                    claimed.enter_context(claim())
                    if not await ask(COMMIT) <= {DONE}:
                        raise Refused("a scheduler did not take it up")
                    self.policies[name] = policy
        return policy

    @staticmethod
    async def _prepare(
        ask: Callable[..., Awaitable[set[str]]], name: str, text: str, settings: Mapping[str, str]
    ) -> None:
        await ask(PREPARE, name=name, text=text, settings=dict(settings))
        deadline = time.monotonic() + PATIENCE
        while not await ask(LOOK) <= {READY}:
            if time.monotonic() > deadline:
                raise Refused(f"its kernels were not compiled within {PATIENCE:.0f} s")
            await asyncio.sleep(LOOK_EVERY)

    async def withdraw(self, manager: Any, name: str, claim: Claim = nullcontext) -> None:
        """Serve a policy no longer; requests that run keep it.

        Args:
            manager: SGLang's tokenizer manager.
            claim: held meanwhile; it may refuse.

        Raises:
            Refused: no policy has this name, or it is the default, or a scheduler failed.
        """
        async with self._changing:
            if name not in self.policies:
                raise Refused(f"no policy is called `{name}`; there is {', '.join(self.policies)}")
            if name == self.default:
                raise Refused(
                    f"`{name}` is the default of requests that name no policy; `POST "
                    "/kv_policy/disable` gives all of them full KV"
                )
            with claim():
                async with _change(manager) as ask:
                    await ask(WITHDRAW, name=name)
                    del self.policies[name]


@contextlib.asynccontextmanager
async def _change(manager: Any) -> AsyncIterator[Callable[..., Awaitable[set[str]]]]:
    """One change of all schedulers: if the block raises, all are as before.

    Yields:
        A function that asks all schedulers for an action and returns their states.
    """
    ticket = uuid4().hex

    async def ask(action: str, **fields: Any) -> set[str]:
        body = {"action": action, "ticket": ticket, **fields}
        answers = await compat.change_policies(manager, body)
        states = {answer["state"] for answer in answers}
        if FAILED in states and PREPARING not in states:  # else more may fail
            raise Refused(_problem(answers))
        return states

    try:
        yield ask
    except Exception as error:
        try:
            await ask(UNDO)
        except Refused as undo_error:
            raise Refused(f"{error}; the change was not undone: {undo_error}") from error
        raise


def _problem(answers: Sequence[Mapping[str, Any]]) -> str:
    """What failed by the schedulers' answers, and where, unless all failed alike."""
    failed = {
        answer["dp_rank"]: answer["problem"] for answer in answers if answer["state"] == FAILED
    }
    if len(failed) == len(answers) and len(set(failed.values())) == 1:
        return str(answers[0]["problem"])
    return "; ".join(f"scheduler DP{rank}: {failed[rank]}" for rank in sorted(failed))
