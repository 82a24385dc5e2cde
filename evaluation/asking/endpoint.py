"""Finds out what serves a URL: SGLang, with policies or without, or an OpenAI-compatible server."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import requests
from kvpolicy.dsl.syntax.diagnostics import PolicyError, listed, refused
from kvpolicy.evaluation import server_answers


@dataclass(frozen=True)
class Endpoint:
    """A server that answered.

    Attributes:
        url: address without a slash or /v1 at its end.
        api: "sglang" or "openai".
        info: answer of SGLang's /server_info; empty for other servers.
        policies: name, path and settings of each policy; None without kvpolicy.
        inspection: whether it allows inspection: requests for kept positions and forced output.
        models: names of the models of an OpenAI-compatible server.
        token_bytes: KV memory of one token in all layers, in bytes; None without kvpolicy.
    """

    url: str
    api: str
    info: Mapping[str, Any] = field(default_factory=dict)
    policies: Sequence[Mapping[str, Any]] | None = None
    inspection: bool = False
    models: tuple[str, ...] = ()
    token_bytes: int | None = None

    def require_inspection(self, what: str) -> None:
        """Refuse a server that has policies but does not allow inspection.

        Args:
            what: what needs inspection, for the message.

        Raises:
            PolicyError: the server does not allow inspection.
        """
        if self.policies is not None and not self.inspection:
            message = f"{what} needs what this server does not answer"
            help_ = "start that server with --kv-policy-allow-inspection"
            raise refused(self.url, "server", message, help_)

    def model(self, name: str | None) -> str:
        """The name of the model to ask: `name`, or that of the only model.

        Raises:
            PolicyError: the server has no model of this name, or `name` is None and it does not
                have exactly one.
        """
        if name is None and len(self.models) == 1:
            return self.models[0]
        if name in self.models:
            return name
        if not self.models:
            message = "the server lists no models"
            raise refused(self.url, "server", message, "start it with a model")
        problem = "has several models" if name is None else f"has no model `{name}`"
        message = f"the server {problem}: {listed(self.models, 'and')}"
        raise refused(self.url, "server", message, "say which with --model-name")


def find(url: str, api: str | None, key: str | None) -> Endpoint:
    """Asks a server what it is.

    Args:
        url: address as the user gave it; without a scheme it is http.
        api: "sglang" or "openai"; None to find out.
        key: key of the API.

    Raises:
        PolicyError: nobody answers, a key is missing or wrong, or the server is of another kind.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if "://" not in base:
        base = f"http://{base}"
    probe = _Probe(base, key)
    attempts: list[str] = []
    for path in () if api == "openai" else ("/server_info", "/get_server_info"):
        info = probe.json(path, attempts)
        if info is not None and isinstance(info.get("internal_states"), list):
            states = probe.checked(path, server_answers.states, info)
            state: Mapping[str, Any] = states[0] if states else {}
            return Endpoint(
                base,
                "sglang",
                info,
                state.get("kv_policy"),
                bool(state.get("kv_policy_inspection")),
                token_bytes=state.get("kv_policy_token_bytes"),
            )
    if api != "sglang":
        models = probe.json("/v1/models", attempts)
        if models is not None and isinstance(models.get("data"), list):
            names = probe.checked("/v1/models", server_answers.models, models)
            return Endpoint(base, "openai", models=tuple(names))
    raise _something_else(url, api, attempts)


def _something_else(url: str, api: str | None, attempts: Sequence[str]) -> PolicyError:
    if any(attempt.endswith("a web page") for attempt in attempts):
        message = "what answers there is a web page, not a model server"
    else:
        kinds = {"sglang": "SGLang", "openai": "an OpenAI-compatible server"}
        expected = kinds.get(api or "", "SGLang or an OpenAI-compatible server")
        message = f"what answers there is not {expected} ({', '.join(attempts)})"
    return refused(f"--url {url}", "server", message, "give the address that the server prints")


class _Probe:
    """Requests to an address whose server is not known yet."""

    def __init__(self, base: str, key: str | None) -> None:
        self._base = base
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def checked(
        self, path: str, check: Callable[[dict[str, Any]], Sequence[Any]], content: dict[str, Any]
    ) -> Sequence[Any]:
        """What `check` makes of the answer at a path.

        Raises:
            PolicyError: it finds the answer to be of another form.
        """
        try:
            return check(content)
        except ValueError as error:
            message = f"its answer to GET {path} cannot be used: {error}"
            raise refused(f"--url {self._base}", "server", message) from None

    def json(self, path: str, attempts: list[str]) -> dict[str, Any] | None:
        """The JSON object at a path; None if there is none, then `attempts` gets what was found.

        Raises:
            PolicyError: nobody answers, or a key is missing or wrong.
        """
        try:
            response = requests.get(self._base + path, headers=self._headers, timeout=20)
        except requests.exceptions.Timeout:
            raise _nobody(self._base, "no answer within 20 s") from None
        except requests.ConnectionError as error:
            raise _nobody(self._base, _reason(error)) from None
        except (requests.RequestException, ValueError):
            message = "this is not the address of a server"
            raise refused(f"--url {self._base}", "arguments", message) from None
        if response.status_code in (401, 403):
            wrong = "does not take this key" if self._headers else "wants a key"
            message = f"the server {wrong} (status {response.status_code})"
            help_ = "name the environment variable that holds it with --api-key-env"
            raise refused(f"--url {self._base}", "server", message, help_)
        content = server_answers.json_of(response.content) if response.ok else None
        if isinstance(content, dict):
            return content
        page = "html" in response.headers.get("Content-Type", "") and response.ok
        attempts.append(f"GET {path}: {'a web page' if page else response.status_code}")
        return None


def _reason(error: BaseException) -> str:
    """Why there is no connection, from the error at the bottom: that of the socket."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    if isinstance(error, ConnectionRefusedError):
        return "the connection is refused"
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    reason = reason[0].lower() + reason[1:]
    is_unknown = isinstance(error, socket.gaierror)
    return f"no address is known for this name ({reason})" if is_unknown else reason


def _nobody(base: str, reason: str) -> PolicyError:
    help_ = "start the server first, or give --model instead and one is started"
    return refused(f"--url {base}", "server", f"nobody answers there: {reason}", help_)
