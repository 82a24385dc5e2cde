"""Client of a server with policies, over HTTP."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from kvpolicy.dsl.syntax.diagnostics import PolicyError, refused

PATH, INFO = "/kv_policy/experiment", "/server_info"
PATIENCE = 20  # seconds without an answer
# Path -> message and remedy for a server that lacks it, and the kind of server that has it.
_LACKS = {
    PATH: (
        "the server has no experiment",
        "start it with --kv-policy and --kv-experiment FILE",
        "server with an experiment",
    ),
    INFO: (
        "the server has no /server_info",
        "give the address of an SGLang server",
        "SGLang server",
    ),
}
_API_KEY = "name the environment variable that holds its --api-key with --api-key-env"
_ADMIN_KEY = (
    "the key is the value of the server's --admin-api-key; name the environment variable that "
    "holds it with --admin-key-env"
)


class Declined(Exception):
    """The server understands a request and refuses it; the message is the server's."""


class Replica:
    """One server.

    Attributes:
        url: address without a slash or /v1 at its end.
    """

    def __init__(self, url: str, *, api_key: str | None = None, admin_key: str | None = None):
        """
        Args:
            url: address as the user gave it; without a scheme it is http.
            api_key: key for `document` and `server_info`, if the server has --api-key.
            admin_key: key for `act` and `put`.

        Raises:
            PolicyError: `url` is not the address of a server.
        """
        base = url.strip().rstrip("/").removesuffix("/v1")
        self.url = base if "://" in base else f"http://{base}"
        if not self.url.startswith(("http://", "https://")):
            raise self._refused("this is not the address of a server", code="arguments")
        self._api_key, self._admin_key = api_key, admin_key
        self._opener = urllib.request.build_opener(_NoRedirect)

    def document(self) -> dict[str, Any]:
        """The server's experiment, as `document.document` makes it.

        Raises:
            PolicyError: nobody answers, a key is missing or wrong, or there is no experiment.
        """
        return self._asked("GET", PATH, self._api_key, None)

    def server_info(self) -> dict[str, Any]:
        """The server's answer to `GET /server_info`.

        Raises:
            PolicyError: nobody answers, a key is missing or wrong, or it is no SGLang server.
        """
        info = self._asked("GET", INFO, self._api_key, None)
        states = info.get("internal_states")
        known = isinstance(states, list) and all(isinstance(state, dict) for state in states)
        if not known or not states:
            raise self._refused(
                "what answers there is no SGLang server (it does not say `internal_states`)",
                "give the address that the server prints; a gateway answers for one replica",
            )
        return info

    def act(self, action: str, body: Mapping[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Asks the server to `abort`, `pause`, `resume` or `promote`; returns its answer.

        Args:
            dry_run: only ask whether it would `promote`.

        Raises:
            Declined: the server refuses.
            PolicyError: nobody answers, the key is wrong, or there is no experiment.
        """
        path = f"{PATH}/{action}{'?dry_run=true' if dry_run else ''}"
        return self._asked("POST", path, self._admin_key, json.dumps(body))

    def put(self, text: str, *, dry_run: bool) -> dict[str, Any]:
        """Sends another version of the experiment; returns the server's answer.

        Args:
            text: experiment file, YAML or JSON.
            dry_run: only ask what it would change.

        Raises:
            Declined: the server refuses it.
            PolicyError: nobody answers, the key is wrong, or there is no experiment.
        """
        path = f"{PATH}?dry_run={'true' if dry_run else 'false'}"
        return self._asked("PUT", path, self._admin_key, text)

    def _asked(self, method: str, path: str, key: str | None, body: str | None) -> dict[str, Any]:
        status, content = self._answer(method, path, key, body)
        document = _json(content)
        if status in (401, 403):
            raise self._unwelcome(method, status, key)
        lacks, remedy, meant = _LACKS[INFO if path == INFO else PATH]
        if status == 404:
            raise self._refused(f"{lacks} (status 404)", remedy)
        if status in (400, 409, 413) and isinstance(document, dict):
            raise Declined(_message(document))
        if status != 200 or not isinstance(document, dict):
            what = "a page that is no JSON" if status == 200 else f"status {status}"
            message = f"what answers there is no {meant} ({what})"
            raise self._refused(message, "give the address that the server prints")
        return document

    def _answer(
        self, method: str, path: str, key: str | None, body: str | None
    ) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else body.encode("utf-8")
        try:
            request = urllib.request.Request(self.url + path, data, headers, method=method)
            with self._opener.open(request, timeout=PATIENCE) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except TimeoutError:
            raise self._nobody(f"no answer within {PATIENCE} s") from None
        except urllib.error.URLError as error:
            raise self._nobody(_reason(error.reason)) from None
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, http.client.InvalidURL):
                raise self._refused("this is not the address of a server") from None
            raise self._nobody(_reason(error)) from None
        except ValueError:
            message = "this is not the address of a server, or the key is no text that HTTP carries"
            raise self._refused(message) from None

    def _nobody(self, why: str) -> PolicyError:
        message = f"nobody answers there: {why}"
        return self._refused(message, "start the server first, or give the address that it prints")

    def _unwelcome(self, method: str, status: int, key: str | None) -> PolicyError:
        if method == "GET":
            wrong = "does not take this key" if key else "wants a key"
            return self._refused(f"the server {wrong} (status {status})", _API_KEY)
        if status == 403:
            message = "the server has no admin key, and lets nobody change the experiment (403)"
            return self._refused(message, "start it with --admin-api-key")
        return self._refused(f"the server does not take the admin key ({status})", _ADMIN_KEY)

    def _refused(self, message: str, help: str | None = None, code: str = "server") -> PolicyError:
        return refused(f"--url {self.url}", code, message, help)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, so that keys are sent to the given address only."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _reason(error: object) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {PATIENCE} s"
    if isinstance(error, ConnectionRefusedError):
        return "the connection is refused"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text[0].lower() + text[1:]


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _message(document: Mapping[str, Any]) -> str:
    error = document.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else "it does not say why"
