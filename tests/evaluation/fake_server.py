"""Small HTTP servers that imitate others: good ones, bad ones, and no model servers at all."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Respond = Callable[[BaseHTTPRequestHandler, dict | None], None]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores clients that hang up."""


@contextlib.contextmanager
def listening(respond: Respond) -> Iterator[str]:
    """A server that passes every request and its body to `respond`; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            respond(self, None)

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            respond(self, json.loads(self.rfile.read(length) or b"{}"))

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


def send(handler: BaseHTTPRequestHandler, body: object, status: int = 200) -> None:
    """Sends a JSON answer."""
    text = json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(text)))
    handler.end_headers()
    handler.wfile.write(text)


def stream(handler: BaseHTTPRequestHandler, events: list, *, done: bool = True) -> None:
    """Sends server-sent events; with `done` also the end marker."""
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.end_headers()
    for event in events:
        handler.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        handler.wfile.flush()
    if done:
        handler.wfile.write(b"data: [DONE]\n\n")


def web_page(handler: BaseHTTPRequestHandler, body: dict | None) -> None:
    """Answers any request with a web page."""
    handler.send_response(200)
    handler.send_header("Content-Type", "text/html; charset=utf-8")
    handler.end_headers()
    handler.wfile.write(b"<!doctype html><title>It works</title>")


class Completions:
    """An OpenAI-compatible server that repeats the last word of a prompt, in two pieces.

    Args:
        models: names that it lists.
        key: API key that it requires, if any.
        broken: number of first requests whose answers break off.
    """

    def __init__(self, models=("toy",), key: str | None = None, broken: int = 0) -> None:
        self.models, self.key, self.broken = models, key, broken
        self.asked: list[dict] = []

    def __call__(self, handler: BaseHTTPRequestHandler, body: dict | None) -> None:
        if self.key and handler.headers.get("Authorization") != f"Bearer {self.key}":
            send(handler, {"error": {"message": "no key"}}, 401)
        elif handler.path == "/v1/models":
            send(handler, {"object": "list", "data": [{"id": name} for name in self.models]})
        elif handler.path == "/v1/completions":
            self.asked.append(body)
            word = body["prompt"].split()[-1]
            pieces = [{"choices": [{"text": text}]} for text in (" " + word[:2], word[2:])]
            words = len(body["prompt"].split())
            usage = {"choices": [], "usage": {"prompt_tokens": words, "completion_tokens": 2}}
            if len(self.asked) <= self.broken:
                stream(handler, pieces[:1], done=False)
            else:
                stream(handler, [*pieces, usage])
        else:
            send(handler, {"detail": "Not Found"}, 404)
