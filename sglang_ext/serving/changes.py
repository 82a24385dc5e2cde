"""In the scheduler: policies that are added, replaced or withdrawn while it runs.

A policy is read, bound and its kernels compiled in the background; then the scheduler takes it up
between two batches. Requests that run keep the policy with which they began. A policy that needs
memory that was not reserved when the server started is refused, with the amount.

With several stages (`--pp`) all handle the same messages in the same order, at different times, and
must not wait for each other there. So at each message every stage sends how far it is, and the
front end hears what all had sent at an earlier one. Each takes the policy up at the same message.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.ir.nodes import ModelShape, Program
from kvpolicy.sglang_ext.face import compat, options
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.face.policy_files import Policy, policy_of
from kvpolicy.sglang_ext.face.ranks import Told
from kvpolicy.sglang_ext.forward.rotary import of_model
from kvpolicy.sglang_ext.forward.services import Services
from kvpolicy.sglang_ext.memory.tables import DeviceTables
from kvpolicy.sglang_ext.request.queries import may_read, most_bytes
from kvpolicy.sglang_ext.request.request import Served
from kvpolicy.sglang_ext.serving.background import Background
from kvpolicy.sglang_ext.serving.messages import (
    COMMIT,
    DONE,
    FAILED,
    PREPARE,
    PREPARING,
    READY,
    UNDO,
    VARY,
    WITHDRAW,
)
from kvpolicy.sglang_ext.serving.reserved import SCRATCH
from kvpolicy.sglang_ext.serving.served import ServedPolicies

logger = logging.getLogger(__name__)


class Changes:
    """The changes of one scheduler, one at a time."""

    def __init__(
        self,
        services: Services,
        policies: ServedPolicies,
        runner: Any,
        shape: ModelShape,
        make: Callable[[Policy, Bound], Served],
        captured: int,
        background: Background,
    ) -> None:
        """
        Args:
            runner: SGLang's model runner.
            shape: of the model.
            make: from a policy and its binding to a `Served`, with its kernels compiled.
            captured: requests of the largest captured decode batch; 0 if none is captured.
            background: where policies are prepared.
        """
        self._services, self._policies = services, policies
        self._runner, self._shape = runner, shape
        self._make, self._captured, self._background = make, captured, background
        self._ticket: str | None = None
        self._begun: Future[Served] | None = None
        self._told = Told(services.ranks, services.stages)  # of the change that has begun
        self._done: tuple[str, str] | None = None  # ticket and policy of the latest change

    def handle(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the front end, between two batches; returns at once.

        Args:
            body: `action`; for `vary` the `name` of a policy, `values` of parameters, by name, and
                the asking `front_end`. For changes `ticket`, by which the front end knows its own;
                for `prepare` also `name`, `text` and `settings` of the policy, for `withdraw` its
                `name`.

        Returns:
            `state`; `problem` if that is `failed`; `dp_rank` of this scheduler.
        """
        try:
            varies = body["action"] == VARY
            answer = self._vary(body) if varies else self._change(body["action"], body)
        except Exception as error:
            logger.exception("A change of the policies failed.")
            answer = {"state": FAILED, "problem": f"{type(error).__name__}: {error}"}
        return {**answer, "dp_rank": compat.dp_rank()}

    def _vary(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make a policy with a request's own parameters, before the request comes."""
        try:
            arguments = (body["name"], body["values"], body["front_end"])
            ready = self._policies.has_variant(*arguments)
        except ValueError as error:
            return {"state": FAILED, "problem": str(error)}
        return {"state": READY if ready else PREPARING}

    def _change(self, action: str, body: Mapping[str, Any]) -> dict[str, Any]:
        ticket = body["ticket"]
        if action == PREPARE:
            self._prepare(body)
        elif action == WITHDRAW:
            return self._withdraw(ticket, body["name"])
        elif action == UNDO:
            return self._undo(ticket)
        elif ticket != self._ticket:
            return {"state": FAILED, "problem": "another change has taken its place"}
        elif action == COMMIT:
            return self._commit(ticket)
        return self._state()

    def _state(self) -> dict[str, Any]:
        future = self._begun
        done = future is not None and future.done()
        error = future.exception() if future is not None and done else None
        # A thread of each rank prepares the policy.
        preparing, failed = self._told.worst([not done, error is not None], [True, False])
        if failed:
            elsewhere = "another rank or stage could not prepare it; its log says why"
            return {"state": FAILED, "problem": elsewhere if error is None else str(error)}
        return {"state": PREPARING if preparing else READY}

    def _prepare(self, body: Mapping[str, Any]) -> None:
        self._ticket = body["ticket"]
        self._told = Told(self._services.ranks, self._services.stages)
        arguments = (body["name"], body["text"], body["settings"])
        self._begun = self._background.begin(partial(self._build, *arguments))

    def _build(self, name: str, text: str, settings: dict[str, str]) -> Served:
        """In the background: read and bind a policy and compile its kernels."""
        started = time.perf_counter()
        try:
            policy = policy_of(name, text, settings)
            self._check(policy.program)
            if policy.program.positions == "slots":
                self._services.rotary = of_model(self._runner.model)
            served = self._make(policy, policy.bind(self._shape))
        except Refused:
            raise
        except Exception as error:
            logger.exception("A policy could not be prepared.")
            what = f"it could not be prepared: {type(error).__name__}: {error}"
            raise Refused(what) from error
        seconds = time.perf_counter() - started
        logger.info("KV-cache policy %s was prepared in %.1f s.", name, seconds)
        return served

    def _check(self, program: Program) -> None:
        """Refuse a policy that needs what was not reserved.

        Raises:
            Refused: says what is missing, and how much.
        """
        services = self._services
        rows, width = compat.slot_table(self._runner).shape
        if program.propagate is not None and not services.layers:
            missing_bytes = SCRATCH * width * 4
            what = f"{SCRATCH} rows of SGLang's table of slots, in which tokens leave the prefill"
            raise _lacking(missing_bytes, what)
        if program.share is not None and not services.shares:
            arena = services.arena
            sizes = (rows, arena.layers, arena.kv_heads, services.store.allocator.size)
            tables = [DeviceTables.empty(*sizes, "meta", pairs=pairs) for pairs in (True, False)]
            raise _lacking(tables[0].bytes - tables[1].bytes, "tables of layers in pairs")
        if may_read(program) and self._captured and not services.queries.needed:
            heads = self._shape.heads // services.ranks.size
            step = services.arena.layers * self._captured * heads * self._shape.head_dim
            query_bytes = most_bytes(step * self._runner.dtype.itemsize, options.fold_interval())
            raise _lacking(query_bytes, "queries of decode steps")

    def _commit(self, ticket: str) -> dict[str, Any]:
        # The front end has heard that all are ready.
        if self._begun is None or not self._begun.done():
            raise RuntimeError("it is not prepared yet")
        served = self._begun.result()
        self._policies.replace(served)
        self._forget()
        self._done = (ticket, served.name)
        logger.info(
            "KV-cache policy %s is served from now on. digest=%s",
            served.name,
            served.bound.digest[:12],
        )
        return {"state": DONE}

    def _forget(self) -> None:
        self._ticket = self._begun = None

    def _undo(self, ticket: str) -> dict[str, Any]:
        """Undo a change that another scheduler did not take up, however far it came here."""
        if ticket == self._ticket:
            self._forget()
        if self._done is not None and ticket == self._done[0]:
            self._policies.undo(self._done[1])
            logger.info("KV-cache policy %s is as before the latest change.", self._done[1])
            self._done = None
        return {"state": DONE}

    def _withdraw(self, ticket: str, name: str) -> dict[str, Any]:
        self._policies.withdraw(name)
        self._done = (ticket, name)
        logger.info("KV-cache policy %s is withdrawn; requests that run keep it.", name)
        return {"state": DONE}


def _lacking(size: int, what: str) -> Refused:
    return Refused(
        f"it needs {size / 2**20:.1f} MiB for {what}, which this server did not reserve; start the "
        "server with a policy that needs them too"
    )
