"""Asks questions over HTTP: by SGLang's /generate, or by OpenAI's /v1/completions.

Answers are streamed; TTFT and TPOT are measured by the client.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import requests
from kvpolicy.evaluation import server_answers
from kvpolicy.evaluation.asking.tokens import Tokens
from kvpolicy.evaluation.asking.turns import Request
from kvpolicy.evaluation.records import FULL

_PATIENCE = (10, 600)  # seconds to connect, and seconds without a byte of an answer
# More tokens than any answer has, so that the server sends the rest at once after the first token.
_AT_ONCE = 1 << 20


class Failed(Exception):
    """A request got no answer; the message is one sentence.

    Attributes:
        again: whether the same request may succeed later.
    """

    def __init__(self, message: str, *, again: bool = True) -> None:
        super().__init__(message)
        self.again = again


@dataclass(frozen=True)
class Answer:
    """The answer to one request.

    Attributes:
        text: generated text, without forced tokens.
        prompt_tokens, output_tokens: numbers of tokens as the server counted them; forced tokens
            are not in `output_tokens`.
        ttft: seconds to the first token; None if not measured.
        tpot: seconds per token after the first; None if not measured.
        meta: `meta_info` of an answer of SGLang.
    """

    text: str
    prompt_tokens: int
    output_tokens: int
    ttft: float | None
    tpot: float | None
    meta: dict[str, Any] = field(default_factory=dict)


class Client(Protocol):
    """A client of one server; used by several threads at once."""

    copies: bool
    """Whether an answer can go on after tokens that are given."""

    def ask(self, request: Request, policy: str, *, kept: bool = False) -> Answer:
        """Asks a question.

        Args:
            policy: name of the policy at the server; FULL for full KV.
            kept: whether `meta` of the answer shall say which entries were kept.

        Raises:
            Failed: there is no answer.
        """

    def flush(self) -> None:
        """Empties the radix cache.

        Raises:
            Failed: the server did not empty it.
        """

    def alive(self) -> bool:
        """Whether the server still accepts connections."""


class _Http:
    """HTTP sessions with one server, one per thread."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url
        self._key = key
        self._local = threading.local()

    def session(self) -> requests.Session:
        """The session of this thread."""
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
            if self._key:
                self._local.session.headers["Authorization"] = f"Bearer {self._key}"
        return self._local.session

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer.

        Raises:
            Failed: nobody answers, the server refuses, or the stream ends early.
        """
        try:
            with self.session().post(
                self.url + path, json=body, stream=True, timeout=_PATIENCE
            ) as response:
                if not response.ok:
                    again = response.status_code >= 500 or response.status_code == 429
                    words = server_answers.refusal(response.status_code, response.content)
                    raise Failed(words, again=again)
                ended = False
                for line in response.iter_lines():
                    if not line.startswith(b"data:"):
                        continue
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        ended = True
                    else:
                        yield _event(data)
                if not ended:
                    raise Failed("the answer broke off")
        except requests.RequestException as error:
            raise Failed(f"no answer: {type(error).__name__}") from None

    def alive(self) -> bool:
        """Whether a connection is accepted."""
        try:
            self.session().get(self.url + "/v1/models", timeout=30)
        except requests.RequestException:
            return False
        return True


def _event(text: bytes) -> dict[str, Any]:
    event = server_answers.json_of(text)
    if not isinstance(event, dict):
        raise Failed("the answer is not a stream of JSON objects")
    if event.get("error"):
        message = server_answers.message_of(event) or event["error"]
        raise Failed(f"the server says: {message}", again=False)
    return event


def _checked(check: Callable[[object], dict[str, Any]], event: object) -> dict[str, Any]:
    try:
        return check(event)
    except ValueError as error:
        raise Failed(f"its answer cannot be used: {error}", again=False) from None


def _of_sglang(event: dict[str, Any]) -> dict[str, Any]:
    answer = _checked(server_answers.generated, event)
    reason = server_answers.given_up(answer)
    if reason is not None:
        raise Failed(f"the server gave up: {reason}")
    return answer


def _timed(
    events: Iterator[dict], has_token: Callable[[dict], bool]
) -> tuple[list[dict], float | None, float | None]:
    """The events, and the seconds until the first and the last event with a token.

    Raises:
        Failed: there are no events.
    """
    started = time.perf_counter()
    all_events, first, last = [], None, None
    for event in events:
        all_events.append(event)
        if has_token(event):
            last = time.perf_counter() - started
            first = last if first is None else first
    if not all_events:
        raise Failed("the answer is empty")
    return all_events, first, last


def _per_token(first: float | None, last: float | None, generated: int) -> float | None:
    """Seconds per token after the first one; None if there is none, or all came at once."""
    if first is None or last is None or first == last or generated < 2:
        return None
    return (last - first) / (generated - 1)


class SGLang:
    """SGLang's /generate.

    Args:
        url: address of the server.
        tokens: the model's tokenizer, to decode answers whose first tokens were forced.
        named: whether the server has policies, so that requests name one.
        key: key of the API.
        admin_key: key for emptying the cache; None for `key`.
    """

    def __init__(
        self,
        url: str,
        tokens: Tokens,
        *,
        named: bool,
        key: str | None = None,
        admin_key: str | None = None,
    ) -> None:
        self._http, self._tokens, self.copies = _Http(url, key), tokens, named
        self._admin = _Http(url, admin_key or key)

    def ask(self, request: Request, policy: str, *, kept: bool = False) -> Answer:
        """See `Client`."""
        forced_count = len(request.forced)
        sampling: dict[str, Any] = {
            "temperature": 0,
            "max_new_tokens": forced_count + request.most,
            # With forced tokens every token is sent, so that those after them can be timed.
            "stream_interval": 1 if forced_count else _AT_ONCE,
        }
        if self.copies:
            custom: dict[str, Any] = {"kv_policy": policy}
            custom |= {"kv_policy_kept": True} if kept else {}
            custom |= {"kv_policy_force": request.forced} if forced_count else {}
            sampling["custom_params"] = custom
        body = {"input_ids": request.ids, "sampling_params": sampling, "stream": True}
        events, first, last = _timed(
            map(_of_sglang, self._http.events("/generate", body)),
            lambda event: len(event["output_ids"]) > forced_count,
        )
        final = events[-1]
        meta = final["meta_info"]
        generated = meta["completion_tokens"] - forced_count
        text = (
            self._tokens.decode(final["output_ids"][forced_count:])
            if forced_count
            else final["text"]
        )
        ttft = None if forced_count else first
        tpot = _per_token(first, last, generated)
        return Answer(text, meta["prompt_tokens"], generated, ttft, tpot, meta)

    def flush(self) -> None:
        """See `Client`."""
        for _ in range(50):
            try:
                response = self._admin.session().post(self._admin.url + "/flush_cache", timeout=30)
            except requests.RequestException as error:
                raise Failed(f"no answer: {type(error).__name__}") from None
            if response.ok:
                return
            if response.status_code in (401, 403):
                message = "its cache may not be emptied: name its --admin-api-key, --admin-key-env"
                raise Failed(message, again=False)
            time.sleep(0.1)
        message = "its cache was not emptied within 5 s: is somebody else asking it?"
        raise Failed(message, again=False)

    def alive(self) -> bool:
        """See `Client`."""
        return self._http.alive()


class OpenAI:
    """/v1/completions of any server, with full KV.

    Args:
        url: address of the server, without /v1.
        model: name of the model at the server.
        tokens: the model's tokenizer, for a server that does not count tokens.
        key: key of the API.
    """

    copies = False

    def __init__(self, url: str, model: str, tokens: Tokens, key: str | None = None) -> None:
        self._http, self._model, self._tokens = _Http(url, key), model, tokens

    def ask(self, request: Request, policy: str, *, kept: bool = False) -> Answer:
        """See `Client`."""
        if policy != FULL or kept:
            raise ValueError(f"an OpenAI-compatible server has no policy {policy}")
        body = {
            "model": self._model,
            "prompt": request.text,
            "max_tokens": request.most,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        events, first, last = _timed(
            (
                _checked(server_answers.completed, event)
                for event in self._http.events("/v1/completions", body)
            ),
            lambda event: bool(event.get("choices")),
        )
        text = "".join(map(_said, events))
        usages = (event["usage"] for event in reversed(events) if event.get("usage"))
        usage: dict[str, Any] = next(usages, {})
        generated = usage.get("completion_tokens")
        if generated is None:
            generated = len(self._tokens.encode(text, special=False))
        prompt = usage.get("prompt_tokens", len(request.ids))
        return Answer(text, prompt, generated, first, _per_token(first, last, generated))

    def flush(self) -> None:
        """Does nothing: OpenAI-compatible servers have no common route for it."""

    def alive(self) -> bool:
        """See `Client`."""
        return self._http.alive()


def _said(event: dict[str, Any]) -> str:
    """The text of one event; the last event has the usage and no choices."""
    return "".join(choice.get("text") or "" for choice in event.get("choices") or ())
