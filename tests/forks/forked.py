"""Starts Python as a fork of a process that has imported SGLang (see fork_server.py).

`run` and `Popen` replace those of `subprocess` for processes that import SGLang, which takes ten
seconds. They start a new interpreter if nothing can be forked: on a machine with a GPU, or with an
environment that the imports have already read differently.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

from messages import receive, send

FOLDER = "KVPOLICY_TEST_FORKS"  # environment variable: folder of the socket, if tests may fork
# Matrices are small and nothing is downloaded; modules read these when imported.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
# Modules, and the folder of scripts, that `Popen` forks; all else it starts as `subprocess` does.
MODULES = ("sglang.launch_server", "kvpolicy.evaluation.cli")
SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"
# SGLang's platform from this tree; the one installed in the environment may be older.
PLATFORM = Path(__file__).resolve().parents[1] / "environment" / "platform" / "src"
PATIENCE = 300  # most seconds to import SGLang
_NewInterpreter = subprocess.Popen


class NewInterpreter(UserWarning):
    """A process could not be forked; a new interpreter imports SGLang, for half a minute."""


class Fork:
    """A running fork, with the used part of the interface of `subprocess.Popen`, without pipes."""

    stdin = stdout = stderr = None

    def __init__(self, args: Sequence[str], pid: int, channel: socket.socket):
        self.args, self.pid, self.channel = args, pid, channel
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status; None while the fork runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit status; raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        if self.returncode is None:
            if not select.select([self.channel], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            message = receive(self.channel)
            self.channel.close()
            if message is None:
                raise RuntimeError(_ended())
            self.returncode = message[0]["status"]
        return self.returncode

    def communicate(self, input: None = None, timeout: float | None = None) -> tuple[None, None]:
        """Waits until the fork ends."""
        self.wait(timeout)
        return None, None

    def send_signal(self, sign: int) -> None:
        """Sends a signal to the fork alone, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, sign)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()


class Popen(subprocess.Popen):
    """`subprocess.Popen`, but servers, evaluations and benchmarks are forks."""

    def __new__(cls, args: Any, *more: Any, **options: Any) -> Any:
        words = args if isinstance(args, list) and args[0] == sys.executable else []
        module = words[words.index("-m") + 1] if "-m" in words else None
        script = len(words) > 1 and Path(words[1]).parent == SCRIPTS
        if more or options.get("stdout") == subprocess.PIPE or not (script or module in MODULES):
            return super().__new__(cls)
        return started(words, **options)


@contextlib.contextmanager
def forks() -> Iterator[None]:
    """In a `with` block, this process and those that it starts may fork."""
    with tempfile.TemporaryDirectory(prefix="kvpolicy-forks-") as folder:
        os.environ[FOLDER] = folder
        Path(folder, "owner").write_text(str(os.getpid()))
        try:
            yield
        finally:
            del os.environ[FOLDER]


@contextlib.contextmanager
def new_interpreters() -> Iterator[None]:
    """In a `with` block, processes are new interpreters, as users start them."""
    folder = os.environ.pop(FOLDER, None)
    try:
        yield
    finally:
        if folder is not None:
            os.environ[FOLDER] = folder


def started(
    args: Sequence[str],
    *,
    stdout: IO | None = None,
    stderr: int | IO | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    **options: Any,
) -> Fork | subprocess.Popen:
    """Starts a command line of this Python, without input.

    Args:
        args, stdout, stderr, env, cwd: as in `subprocess.Popen`, but no pipes.
        options: used for a new interpreter; a fork has its own session and ends with its client.
    """
    environment = {**ENVIRONMENT, **(os.environ if env is None else env)}
    if FOLDER in os.environ:
        output = 1 if stdout is None else stdout.fileno()
        errors = output if stderr == subprocess.STDOUT else 2 if stderr is None else stderr.fileno()
        channel = _connect(Path(os.environ[FOLDER]))
        request = {
            "words": list(args),
            "environment": environment,
            "folder": str(cwd or Path.cwd()),
        }
        with open(os.devnull) as nothing:
            send(channel, request, (nothing.fileno(), output, errors))
        message = receive(channel)
        if message is not None and "pid" in message[0]:
            return Fork(args, message[0]["pid"], channel)
        channel.close()
        if message is not None:
            names = ", ".join(message[0]["read too early"])
            text = f"a new interpreter is started: forks have read {names} (fork_server.READ_LATER)"
            warnings.warn(text, NewInterpreter, stacklevel=2)
    streams = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
    return _NewInterpreter(args, **streams, cwd=cwd, env=environment, **options)


def run(args: Sequence[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess:
    """Runs a command line of this Python; its output is captured as text.

    Args:
        options: `env` and `cwd`, as in `subprocess.run`.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = started(args, stdout=output, stderr=errors, start_new_session=True, **options)
        try:
            status = process.wait(timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess(args, status, *texts)


def servers_are_forks(serving: ModuleType) -> None:
    """Makes `serving.serve` start servers as forks."""
    serving.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": Popen})


def _connect(folder: Path) -> socket.socket:
    address = folder / "socket"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            _start(folder, address)
    channel = socket.socket(socket.AF_UNIX)
    try:
        channel.connect(str(address))
    except ConnectionRefusedError:
        raise RuntimeError(_ended()) from None
    return channel


def _ended() -> str:
    log = Path(os.environ[FOLDER], "log").read_text(errors="replace")
    return f"the fork server has ended, and its forks with it:\n{log[-3000:]}"


def _start(folder: Path, address: Path) -> None:
    script = Path(__file__).with_name("fork_server.py")
    owner = (folder / "owner").read_text()
    path = os.pathsep.join([str(script.parent), str(PLATFORM)])
    environment = {**ENVIRONMENT, **os.environ, "PYTHONPATH": path}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-P", str(script), str(address), owner],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    end = time.monotonic() + PATIENCE
    while not address.exists():
        if server.poll() is not None or time.monotonic() > end:
            server.kill()
            raise RuntimeError(_ended())
        time.sleep(0.05)
