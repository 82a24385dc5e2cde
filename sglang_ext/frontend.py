"""The plugin where SGLang talks to clients: in the tokenizer's process, or in HTTP workers.

Requests get back the fields that a route of SGLang drops, and the policy that clients/traffic.py
chooses for them; answers get the facts about what their policy did.

Hooks are installed once per process. A program may make several `sgl.Engine`s, each with its own
policies or none, so a hook finds its `FrontEnd` as an attribute of SGLang's tokenizer manager.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any

from kvpolicy.experiments.definition.experiment import NO_POLICY
from kvpolicy.sglang_ext.clients.front_end import FrontEnd, assigned_to, facts_of
from kvpolicy.sglang_ext.clients.traffic import HEADER
from kvpolicy.sglang_ext.experiment.raw import RAW
from kvpolicy.sglang_ext.experiment.shadow import Shadows
from kvpolicy.sglang_ext.face import compat, options
from kvpolicy.sglang_ext.face.compat import Function
from kvpolicy.sglang_ext.face.errors import Refused

KEY = "kv_policy"  # key in SGLang's customized_info and in an answer's meta_info
MOST_CHOICES = 8  # choices of an answer whose facts its header holds

Answers = AsyncGenerator[Any, None]  # answers to one request, as SGLang yields them

_SERVER = "kv_policy_server"  # attribute of SGLang's tokenizer manager
_FACTS = "kv_policy_facts"  # attribute of SGLang's state of a request; key in an ASGI scope's state
_INFO_KEYS = (KEY, RAW)  # the plugin's keys in SGLang's customized_info


_next: FrontEnd | None = None  # for the tokenizer manager that is made next


def install(server: FrontEnd) -> None:
    """Register the hooks of this process, and serve the tokenizer manager that is made next.

    Raises:
        Refused: SGLang did not apply them.
    """
    global _next
    hooks: list[tuple[str, Function, str]] = [
        (compat.MANAGER, _after_manager, "after"),
        (compat.META_INFO, _around_meta_info, "around"),
        (compat.GENERATE, _around_generate, "around"),
        (compat.CRASH_DUMP, before_crash_dump, "before"),
        (compat.ABORT_REQUEST, _before_abort, "before"),
        (compat.FRONT_STATE, _around_state, "around"),
    ]
    if server.live is not None:
        hooks.append((compat.BATCH_OUTPUT, _before_batch_output, "before"))
        hooks.append((compat.ABORTED, before_aborted, "before"))
        hooks.append((compat.RELEASE_MEMORY, _around_release_memory, "around"))
        hooks.append((compat.RESUME_MEMORY, _around_resume_memory, "around"))
        hooks += [(target, around_log, "around") for target in compat.LOG_REQUEST]
        hooks.append((compat.EXPORT_REQUEST, around_export, "around"))
        hooks += [(target, _around_want_idle, "around") for target in compat.WANT_IDLE]
        hooks += [(target, _around_change_weights, "around") for target in compat.CHANGE_WEIGHTS]
    for target, hook, kind in hooks:
        if not compat.is_applied(target):
            compat.register(target, hook, kind)
    compat.apply_hooks()
    compat.add_middleware(FactsHeader)
    missing = [target for target, *_ in hooks if not compat.is_applied(target)]
    if missing:
        raise Refused(f"--kv-policy: SGLang did not apply the hooks on {', '.join(missing)}.")
    _next = server


def _after_manager(result: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """After TokenizerManager.__init__."""
    global _next
    setattr(manager, _SERVER, _next if any(options.requested()) else None)
    _next = None


def _server_of(manager: Any) -> FrontEnd | None:
    """The `FrontEnd` of a tokenizer manager; None for an engine without policies."""
    server: FrontEnd | None = getattr(manager, _SERVER, None)
    return server


def _shadows_of(manager: Any) -> Shadows | None:
    """The samples of a tokenizer manager; None before its first request."""
    server = _server_of(manager)
    return None if server is None else server.shadows


def _before_batch_output(manager: Any, output: Any, *args: Any) -> None:
    """Before TokenizerManager._handle_batch_output."""
    compat.complete_output(output)


def _before_abort(manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """Before TokenizerManager.abort_request: requests that wait for their policy."""
    server = _server_of(manager)
    if server is not None:
        server.traffic.abort(rid, all_requests=abort_all)


def before_aborted(manager: Any, aborted: Any, *args: Any) -> None:
    """Before TokenizerManager._handle_abort_req: aborted answers have no `meta_info`."""
    server, state = _server_of(manager), manager.rid_to_state.get(aborted.rid)
    if server is not None and state is not None:
        meta_info = {"finish_reason": aborted.finished_reason or {"type": "abort"}}
        server.ended(state, meta_info, getattr(state, _FACTS, {}), None)


def around_log(original: Function, log: Any, obj: Any, *args: Any, **options: Any) -> None:
    """Around each of `compat.LOG_REQUEST`: SGLang does not heed `no_logs`."""
    if not compat.is_scoring(obj):
        original(log, obj, *args, **options)


async def around_export(original: Function, exporters: Any, obj: Any, *args: Any) -> None:
    """Around RequestMetricsExporterManager.write_record."""
    if not compat.is_scoring(obj):
        await original(exporters, obj, *args)


def _without_scoring(manager: Any) -> AbstractAsyncContextManager[None]:
    """A context in which no sampled request is scored."""
    shadows = _shadows_of(manager)
    return nullcontext() if shadows is None else shadows.hold()


async def _around_want_idle(original: Function, manager: Any, *args: Any, **options: Any) -> Any:
    """Around each of `compat.WANT_IDLE`."""
    async with _without_scoring(manager):
        return await original(manager, *args, **options)


async def _around_change_weights(
    original: Function, manager: Any, *args: Any, **options: Any
) -> Any:
    """Around each of `compat.CHANGE_WEIGHTS`."""
    server = _server_of(manager)
    async with _without_scoring(manager):
        try:
            return await original(manager, *args, **options)
        finally:  # some may have changed where it fails
            if server is not None and server.live is not None:
                server.live.weights += 1


async def _around_release_memory(original: Function, manager: Any, obj: Any, *args: Any) -> None:
    """Around TokenizerControlMixin.release_memory_occupation."""
    async with _without_scoring(manager):
        await original(manager, obj, *args)
        shadows = _shadows_of(manager)
        if shadows is not None:
            shadows.released |= compat.memory_tags(obj)


async def _around_resume_memory(original: Function, manager: Any, obj: Any, *args: Any) -> None:
    """Around TokenizerControlMixin.resume_memory_occupation."""
    await original(manager, obj, *args)
    shadows = _shadows_of(manager)
    if shadows is not None:
        shadows.released -= compat.memory_tags(obj)


def _around_meta_info(
    original: Function,
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    info: dict[str, Any],
    index: int,
    *args: Any,
) -> None:
    """Around TokenizerManager.update_request_meta_info.

    SGLang collects customized info per output token. A policy's facts are one value per request;
    later elements that are not None update it.
    """
    other_info = {name: values for name, values in info.items() if name not in _INFO_KEYS}
    original(manager, meta_info, state, other_info, index, *args)
    server = _server_of(manager)
    if server is None:
        return
    for facts in info[KEY][index] if KEY in info else ():
        if facts is not None:
            setattr(state, _FACTS, {**getattr(state, _FACTS, {}), **facts})
    facts = getattr(state, _FACTS, {})
    assigned = facts_of(assigned_to(state.obj))
    if facts or "arm" in assigned:
        meta_info[KEY] = {**({} if facts else {"policy": NO_POLICY}), **facts, **assigned}
    if meta_info.get("finish_reason") is not None:
        recorded = [value for value in (info.get(RAW) or {index: ()})[index] if value is not None]
        server.ended(state, meta_info, facts, recorded[-1] if recorded else None)


def _around_generate(
    original: Callable[..., Answers], manager: Any, obj: Any, request: Any = None
) -> Answers:
    """Around TokenizerManager.generate_request."""
    server = _server_of(manager)
    if server is None:
        return original(manager, obj, request)
    return _generate(server, original, manager, obj, request)


async def _generate(
    server: FrontEnd, original: Callable[..., Answers], manager: Any, obj: Any, request: Any
) -> Answers:
    """Answers to a request, after its policy has been chosen."""
    if compat.is_scoring(obj):
        async with aclosing(original(manager, obj, request)) as answers:
            async for answer in answers:
                yield answer
        return
    if request is not None and compat.drops_custom_params(request):
        body = await request.json()  # it has been read already
        body = body if isinstance(body, dict) else {}
        custom = body.get("custom_params")
        if custom is not None:
            obj.sampling_params = {**(obj.sampling_params or {}), "custom_params": custom}
        adapter = compat.ignored_adapter(request, body)
        if adapter is not None and server.traffic.is_policy(adapter) and obj.lora_path is None:
            obj.lora_path = adapter  # as SGLang's other routes have it
    try:
        await server.arrived(manager, obj, request)
    except Exception:
        compat.refused_before_generation(obj)
        raise
    async with aclosing(_noted(original(manager, obj, request), obj, request)) as answers:
        async for answer in answers:
            yield answer


async def _around_state(original: Function, manager: Any) -> list[dict[str, Any]]:
    """Around TokenizerManager.get_internal_state, which GET /server_info shows."""
    states: list[dict[str, Any]] = await original(manager)
    server = _server_of(manager)
    if server is None:
        return states
    for state in states:
        state["kv_policy_applied"] = server.traffic.enabled
        if server.live is not None:
            state["kv_experiment"] = server.live.summary()
    return states


def before_crash_dump(manager: Any, *args: Any, **options: Any) -> None:
    """Before TokenizerManager.dump_requests_before_crash: drop scoring requests."""
    for rid, state in list(manager.rid_to_state.items()):
        if compat.is_scoring(state.obj):
            del manager.rid_to_state[rid]


def _noted(answers: Answers, obj: Any, request: Any) -> Answers:
    """The same answers; those that are not streamed leave their facts for `FactsHeader`."""
    # The header of a stream is sent before its facts are known.
    stream = request is None or getattr(obj, "stream", False)
    return answers if stream else _noting(answers, request)


async def _noting(answers: Answers, request: Any) -> Answers:
    async with aclosing(answers):
        async for answer in answers:
            choices = answer if isinstance(answer, list) else [answer]
            facts = [choice["meta_info"].get(KEY) for choice in choices[:MOST_CHOICES]]
            if any(facts):
                request.scope.setdefault("state", {})[_FACTS] = facts
            yield answer


class FactsHeader:
    """ASGI middleware that writes the facts of an answer into its header `x-kv-policy`.

    The value is a JSON object; for several choices a list of objects or nulls, at most
    `MOST_CHOICES`. `kept` is left out.
    """

    def __init__(self, app: Function) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Function, send: Function) -> None:
        """Serves one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sending(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                facts = scope.get("state", {}).get(_FACTS)
                if facts:
                    header = (HEADER.encode(), _header(facts).encode("ascii"))
                    message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(scope, receive, sending)


def _header(facts: list[Mapping[str, Any] | None]) -> str:
    values = [
        None if item is None else {name: value for name, value in item.items() if name != "kept"}
        for item in facts
    ]
    return json.dumps(values[0] if len(values) == 1 else values, separators=(",", ":"))
