"""A server with the endpoints of an experiment, on a real lifecycle and analysis."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.experiments.definition import reading
from kvpolicy.experiments.replica.analysis import Analysis
from kvpolicy.experiments.replica.lifecycle import ENDED
from kvpolicy.experiments.replica.promotion import not_cleared
from made_experiment import Made

PATH = "/kv_policy/experiment"
Reply = tuple[int, Any]


class Endpoints:
    """The endpoints of one replica.

    Attributes:
        made: the running experiment; None answers as a server without one.
        api_key: key that reading requires, if any.
        admin_key: key that changes require; None refuses every change.
        refuses: message with which another version and an end are refused; None refuses neither.
        asked: method, path and key of each request.
    """

    def __init__(
        self, made: Made | None, *, api_key: str | None = None, admin_key: str | None = "admin"
    ) -> None:
        self.made, self.api_key, self.admin_key = made, api_key, admin_key
        self.refuses: str | None = None
        self.asked: list[tuple[str, str, str | None]] = []

    def reply(self, method: str, target: str, key: str | None, body: bytes) -> Reply:
        """Status and JSON body of the answer to a request."""
        url = urlsplit(target)
        self.asked.append((method, url.path, key))
        if method == "GET":
            if self.api_key and key != self.api_key:
                return 401, {"error": "Unauthorized"}
        elif not self.admin_key:
            return 403, {"error": "Forbidden"}
        elif key != self.admin_key:
            return 401, {"error": "Unauthorized"}
        if self.made is None:
            return 404, {"detail": "Not Found"}
        if method == "GET":
            return 200, self.made.document()
        if method == "PUT":
            return self._put(self.made, body.decode(), parse_qs(url.query)["dry_run"] == ["true"])
        action, asked = url.path.removeprefix(f"{PATH}/"), json.loads(body or b"{}")
        return self._act(self.made, action, asked, parse_qs(url.query).get("dry_run") == ["true"])

    def _put(self, made: Made, text: str, dry: bool) -> Reply:
        if self.refuses:
            return 409, {"error": {"message": self.refuses}}
        try:
            experiment = reading.read(text, "request").require()
        except PolicyError as error:
            return 400, {"error": {"message": str(error)}}
        anew = experiment.revision != made.lifecycle.experiment.revision
        coverage = made.lifecycle.covered_by(experiment)
        if not dry:
            made.lifecycle.replace(experiment)
            if anew:
                made.analysis = Analysis(experiment)
        state = made.lifecycle.state.value
        return 200, {
            "revision": experiment.revision, "begins_anew": anew, "dry_run": dry, "state": state,
            "coverage": coverage,
        }  # fmt: skip

    def _act(self, made: Made, action: str, body: dict[str, Any], dry: bool) -> Reply:
        life = made.lifecycle
        if self.refuses:
            return 409, {"error": {"message": self.refuses}}
        if life.state in ENDED:
            return 409, {"error": {"message": f"experiment is {life.state} already"}}
        reason = body.get("reason", "an operator")
        if action == "abort" and "arm" in body:
            new = life.roll_back(body["arm"], reason)
            made.analysis.retire(body["arm"])
        elif action == "abort":
            new = life.abort(reason)
        elif action == "promote":
            why = None if body.get("pooled") else not_cleared(made.analysis, body["arm"])
            if why is not None and body.get("force") is not True:
                return 409, {"error": {"message": why}}
            new = dry or life.promote(body["arm"], reason)
        else:
            new = life.pause() if action == "pause" else life.resume()
        return 200, {"state": life.state.value, "changed": new}


class _Server(ThreadingHTTPServer):
    daemon_threads = True


@contextlib.contextmanager
def serving(endpoints: Endpoints) -> Iterator[str]:
    """Serves the endpoints on loopback; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            key = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            status, found = endpoints.reply(self.command, self.path, key, self.rfile.read(length))
            content = found.encode() if isinstance(found, str) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            if status == 302:
                self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _answer

        def log_message(self, *args: object) -> None:
            """Nothing."""

    server = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
