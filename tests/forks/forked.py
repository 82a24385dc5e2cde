"""Starts Python as a fork of a process that has imported SGLang (see fork_server.py).

`run` and `Popen` stand in for those of `subprocess` where a process would import SGLang first,
which takes ten seconds. Where nothing can be forked they start a new interpreter: on a machine with
a GPU, and in an environment that imports would have read.
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

FOLDER = "KVPOLICY_TEST_FORKS"  # variable: where the socket is, in the tests that may fork
# Matrices are small here, and nothing is fetched: modules read this when they are imported.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
# What `Popen` forks; everything else that a process starts is started as it says.
MODULES = ("sglang.launch_server", "kvpolicy.evaluation.cli")
SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"
# SGLang's platform as this tree has it: an environment keeps what it was once set up with.
PLATFORM = Path(__file__).resolve().parents[1] / "environment" / "platform" / "src"
PATIENCE = 300  # seconds until SGLang is imported
_NewInterpreter = subprocess.Popen


class NewInterpreter(UserWarning):
    """What should have been forked could not be: its processes import SGLang, for half a minute."""


class Fork:
    """A running fork: what is used of a `subprocess.Popen` without pipes."""

    stdin = stdout = stderr = None

    def __init__(self, args: Sequence[str], pid: int, channel: socket.socket):
        self.args, self.pid, self.channel = args, pid, channel
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status; raises `subprocess.TimeoutExpired` when it runs longer."""
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
        """Waits until it ends."""
        self.wait(timeout)
        return None, None

    def send_signal(self, sign: int) -> None:
        """To the fork alone, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, sign)

    def terminate(self) -> None:
        """Asks it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it."""
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
    """For the time of a `with` block this process and what it starts may fork."""
    with tempfile.TemporaryDirectory(prefix="kvpolicy-forks-") as folder:
        os.environ[FOLDER] = folder
        Path(folder, "owner").write_text(str(os.getpid()))
        try:
            yield
        finally:
            del os.environ[FOLDER]


@contextlib.contextmanager
def new_interpreters() -> Iterator[None]:
    """For the time of a `with` block processes are started as a user starts them."""
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
    """Starts a command line of this Python's, without input.

    Args:
        args, stdout, stderr, env, cwd: as in `subprocess.Popen`, but no pipes.
        options: for a new interpreter; a fork has a session of its own and ends with its client.
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
    """Runs a command line of this Python's; its output is captured as text.

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
    """Has `serving.serve` start servers as forks."""
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
