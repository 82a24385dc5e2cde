"""What the plugin does where SGLang talks to clients: the tokenizer's process, or its workers.

Policies are chosen in the scheduler; here requests are completed with what a route of SGLang drops,
and answers with what happened to them.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from kvpolicy.sglang_ext import compat
from kvpolicy.sglang_ext.errors import Refused

KEY = "kv_policy"  # in an answer's meta_info
HEADER = "x-kv-policy"
MOST_CHOICES = 8  # of an answer, whose facts its header holds

Answers = AsyncGenerator[Any, None]  # of one request, as SGLang makes them

_FACTS = "kv_policy_facts"  # of SGLang's state of a request, and of an ASGI scope


def install() -> None:
    """Register the hooks of this process.

    Raises:
        Refused: SGLang did not apply them.
    """
    compat.register(compat.META_INFO, around_meta_info, "around")
    compat.register(compat.GENERATE, _around_generate, "around")
    compat.apply_hooks()
    hooks = (compat.META_INFO, compat.GENERATE)
    missing = [target for target in hooks if not compat.is_applied(target)]
    if missing:
        raise Refused(f"--kv-policy: SGLang did not apply the hooks on {', '.join(missing)}.")
    compat.add_middleware(FactsHeader)


def around_meta_info(
    original: Callable,
    manager: Any,
    meta_info: dict,
    state: Any,
    info: dict,
    index: int,
    *args: Any,
) -> None:
    """Around TokenizerManager.update_request_meta_info.

    SGLang collects such facts per output token; those of a policy are one value per request, of
    which later elements bring what has changed.
    """
    original(manager, meta_info, state, {k: v for k, v in info.items() if k != KEY}, index, *args)
    for facts in info[KEY][index] if KEY in info else ():
        if facts is not None:
            setattr(state, _FACTS, {**getattr(state, _FACTS, {}), **facts})
    if hasattr(state, _FACTS):
        meta_info[KEY] = getattr(state, _FACTS)


def _around_generate(
    original: Callable[..., Answers], manager: Any, obj: Any, request: Any = None
) -> Answers:
    """Around TokenizerManager.generate_request."""
    if request is None:
        return original(manager, obj, request)
    if compat.drops_custom_params(request.scope["path"]):
        return _with_custom_params(original, manager, obj, request)
    return _noted(original(manager, obj, request), obj, request)


async def _with_custom_params(
    original: Callable[..., Answers], manager: Any, obj: Any, request: Any
) -> Answers:
    """Answers to a request whose route has no field for `custom_params`."""
    body = await request.json()  # it has been read already
    custom = body.get("custom_params") if isinstance(body, dict) else None
    if custom is not None:
        obj.sampling_params = {**(obj.sampling_params or {}), "custom_params": custom}
    async with aclosing(_noted(original(manager, obj, request), obj, request)) as answers:
        async for answer in answers:
            yield answer


def _noted(answers: Answers, obj: Any, request: Any) -> Answers:
    """The same answers; what happened is noted for the header of one that is not streamed."""
    # The header of a stream is sent before anything is known.
    return answers if getattr(obj, "stream", False) else _noting(answers, request)


async def _noting(answers: Answers, request: Any) -> Answers:
    async with aclosing(answers):
        async for answer in answers:
            found = answer if isinstance(answer, list) else [answer]
            facts = [each["meta_info"].get(KEY) for each in found[:MOST_CHOICES]]
            if any(facts):
                request.scope.setdefault("state", {})[_FACTS] = facts
            yield answer


class FactsHeader:
    """ASGI middleware: the facts of an answer as its header `x-kv-policy`.

    One JSON object, or a list of them where there are several answers; `kept` is left out.
    """

    def __init__(self, app: Callable) -> None:
        self._app = app

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        """Serves one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sending(message: dict) -> None:
            if message["type"] == "http.response.start":
                facts = scope.get("state", {}).get(_FACTS)
                if facts:
                    header = (HEADER.encode(), _header(facts).encode("ascii"))
                    message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(scope, receive, sending)


def _header(facts: list[Mapping[str, Any] | None]) -> str:
    shown = [
        None if each is None else {name: value for name, value in each.items() if name != "kept"}
        for each in facts
    ]
    return json.dumps(shown[0] if len(shown) == 1 else shown, separators=(",", ":"))
