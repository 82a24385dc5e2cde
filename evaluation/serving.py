"""Start and stop a real SGLang server on a free loopback port.

Used by the demo, the tests and the benchmarks; also for scripts:

    from kvpolicy.evaluation.serving import serve
    with serve("examples/model-tiny", policies=["policies/snapkv.yaml"]) as server:
        print(server.generate(text="...", max_new_tokens=8)["text"])
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import requests
from kvpolicy.evaluation import server_answers

# The CPU has no flash kernels and `--dtype auto` would mean float16 there.
CPU_FLAGS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "float32",
    "max_total_tokens": 16384,
    "sleep_on_idle": True,  # otherwise an idle scheduler keeps a core busy
}
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # looked up before the fork that uses it
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_KEPT_PORTS: list[socket.socket] = []  # bound but never listening, until this process ends

GPU_FLAGS = {"attention_backend": "torch_native", "dtype": "float32", "disable_cuda_graph": True}


class ServerFailed(RuntimeError):
    """The server stopped or did not answer; the message ends with the last lines of its log."""


@dataclass
class Server:
    """A running server.

    `generate`, `generate_batch` and `metrics` raise `requests.HTTPError` on an HTTP error status,
    and ValueError on an answer of another form.

    Attributes:
        url: address without a slash at its end.
        process: process of the server.
        log: file with its output.
        session: HTTP session of all requests.
    """

    url: str
    process: subprocess.Popen
    log: Path
    session: requests.Session = field(default_factory=requests.Session)

    def post(self, path: str, body: dict, timeout: float = 600) -> requests.Response:
        """POST a JSON body; return the response whatever its status is.

        Args:
            timeout: seconds.
        """
        return self.session.post(self.url + path, json=body, timeout=timeout)

    def generate(
        self,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        policy: str | None = None,
        max_new_tokens: int = 16,
        **options,
    ) -> dict:
        """One greedy answer from /generate.

        Args:
            text, input_ids: the prompt, as exactly one of the two.
            policy: name of a policy that the server has, or "none"; None for the server's default.
            options: further sampling parameters.
        """
        prompt = {"text": text} if input_ids is None else {"input_ids": list(input_ids)}
        return self._generated(prompt, policy, max_new_tokens, options)

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        policy: str | None = None,
        max_new_tokens: int = 16,
        **options,
    ) -> list[dict]:
        """Greedy answers to prompts that are sent in one request; otherwise as `generate`."""
        batch = {"input_ids": [list(prompt) for prompt in prompts]}
        return self._generated(batch, policy, max_new_tokens, options)

    def _generated(self, prompt: dict, policy: str | None, max_new_tokens: int, options: dict):
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, **options}
        if policy is not None:
            sampling["custom_params"] = {"kv_policy": policy}
        response = self.post("/generate", {**prompt, "sampling_params": sampling})
        response.raise_for_status()
        content = response.json()
        for answer in content if isinstance(content, list) else [content]:
            server_answers.generated(answer, with_text=False)
        return content

    def metrics(self) -> dict[str, float]:
        """Values of /metrics, keyed by name with labels as the server writes them."""
        response = self.session.get(self.url + "/metrics", timeout=60)
        response.raise_for_status()
        lines = (line for line in response.text.splitlines() if line and line[0] != "#")
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def flush(self) -> None:
        """Empty the radix cache, waiting up to a minute for the server to be idle.

        Raises:
            ServerFailed: the server was not idle.
        """
        for _ in range(600):
            if self.post("/flush_cache", {}).ok:
                return
            time.sleep(0.1)
        raise ServerFailed("the server did not flush its cache: it was not idle for a minute")

    def log_text(self) -> str:
        """What the server has printed so far."""
        return self.log.read_text(errors="replace")


def has_gpu() -> bool:
    """Whether the server will run on an NVIDIA GPU."""
    import torch

    return torch.cuda.is_available()


def free_port() -> int:
    """A loopback port that nobody listens on; later searches of this process skip it.

    The port is above SGLang's range (22000 to 29999) and below the range of outgoing connections:
    a server takes half a minute to start, and a port of these ranges may be taken by then.

    Raises:
        ServerFailed: no free port was found.
    """
    # Not from the module's shared generator: forks of a seeded process would try the same ports.
    for port in random.SystemRandom().sample(range(30_000, 32_768), 100):
        probe = socket.socket()
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            probe.close()
            continue
        # Set after the search, so that a server, which sets it too, can listen on this port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _KEPT_PORTS.append(probe)
        return port
    raise ServerFailed("no free loopback port was found between 30000 and 32767")


def command_line(flags: dict[str, object]) -> list[str]:
    """`{"page_size": 1, "x": True, "y": ["a", "b"]}` -> `--page-size 1 --x --y a --y b`."""
    words = []
    for name, value in flags.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif isinstance(value, list | tuple):
            words += [word for item in value for word in (option, str(item))]
        elif value is not None and value is not False:
            words += [option, str(value)]
    return words


@contextlib.contextmanager
def serve(
    model: str | Path,
    policies: Sequence[str | Path] = (),
    settings: Sequence[str] = (),
    *,
    env: dict[str, str] | None = None,
    log: Path | None = None,
    progress: bool = False,
    start_timeout: float = 300,
    arguments: Sequence[str] = (),
    **flags,
) -> Iterator[Server]:
    """Run `python -m sglang.launch_server` for the time of a `with` block.

    The limit on a policy's cost is off (`--kv-policy-max-cost 0`), so that any policy can be
    measured.

    Args:
        model: folder of the checkpoint.
        policies, settings: values of --kv-policy and --kv-policy-set.
        env: additions to the environment of the server.
        log: file for its output; None for a temporary file.
        progress: show a line with the seconds waited.
        start_timeout: seconds to wait for the first answer.
        arguments: words added to the command line as they are, after the flags.
        flags: further options with underscores, as in `max_total_tokens=4096`.

    Raises:
        ServerFailed: it stopped or did not answer in time.
    """
    port = free_port()
    flags = {
        "model_path": str(model),
        "host": "127.0.0.1",
        "port": port,
        "kv_policy": [str(p) for p in policies],
        "kv_policy_set": list(settings),
        "kv_policy_max_cost": 0 if policies else None,
        **(GPU_FLAGS if has_gpu() else CPU_FLAGS),
        **flags,
    }
    # -P keeps the current folder off sys.path: `kernels/` would shadow a package of that name.
    command = [sys.executable, "-P", "-m", "sglang.launch_server", *command_line(flags)]
    command += arguments
    defaults = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    # The warm-up generates already, and a health check that generates takes a second.
    defaults["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    log = log or Path(tempfile.mkstemp(prefix="kvpolicy-server-", suffix=".log")[1])
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**defaults, **os.environ, **(env or {})},
            start_new_session=True,
            preexec_fn=partial(_end_with, os.getpid()),
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait_until_ready(server, start_timeout, progress)
        yield server
    finally:
        _stop(process)


@contextlib.contextmanager
def together(
    starting: Mapping[str, contextlib.AbstractContextManager[Server]],
) -> Iterator[dict[str, Server | ServerFailed]]:
    """Start servers at the same time, for the time of a `with` block.

    Args:
        starting: name -> call of `serve`.

    Returns:
        Name -> server, or the error if it did not start, which `started` raises.
    """
    # A server ends with the thread that started it, so the threads stay until the end.
    with ThreadPoolExecutor(len(starting)) as pool, contextlib.ExitStack() as stack:

        def enter(manager: contextlib.AbstractContextManager[Server]) -> Server | ServerFailed:
            try:
                server = manager.__enter__()
            except ServerFailed as error:
                return error
            stack.push(manager.__exit__)
            return server

        yield dict(zip(starting, pool.map(enter, starting.values()), strict=True))


def started(found: Server | ServerFailed) -> Server:
    """A server of `together`.

    Raises:
        ServerFailed: the server did not start.
    """
    if isinstance(found, ServerFailed):
        raise found
    return found


def _wait_until_ready(server: Server, timeout: float, progress: bool) -> None:
    start_time = time.monotonic()
    while True:
        waited = time.monotonic() - start_time
        # In a file or a pipe, only the last line is written.
        if progress and sys.stderr.isatty():
            print(f"\rstarting SGLang ... {waited:3.0f} s", end="", file=sys.stderr, flush=True)
        if server.process.poll() is not None:
            status = server.process.poll()
            raise ServerFailed(_last_words(server, f"stopped (exit status {status})"))
        if waited > timeout:
            raise ServerFailed(_last_words(server, f"did not answer within {timeout:.0f} s"))
        with contextlib.suppress(requests.RequestException):
            if server.session.get(server.url + "/health", timeout=30).ok:
                break
        time.sleep(0.1)
    if progress:
        start = "\r" if sys.stderr.isatty() else ""
        print(f"{start}starting SGLang ... ready after {waited:.0f} s", file=sys.stderr, flush=True)


def _last_words(server: Server, what: str) -> str:
    lines = [line[:400] for line in server.log_text().splitlines() if line.strip()]
    return "\n".join([f"the SGLang server {what}; its last lines ({server.log}):", *lines[-15:]])


def _end_with(client: int) -> None:
    """Make the server end with its client, even one that is killed (Linux); runs in the server."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != client:  # killed before the signal was asked for
            os._exit(1)


def _stop(process: subprocess.Popen) -> None:
    """Kill the server's process group.

    Not by SIGTERM, which SGLang looks for only every five seconds.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
