"""A command as a process group with a hard limit, and with everything that it started ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

MARK = "KVPOLICY_GPU_REPORT"  # in the environment of what a command starts
LAST_LINES = 40
GRACE = 5.0  # seconds to end by itself, for what has to be stopped
_MEMORY = re.compile(r"out of memory|OutOfMemoryError|\bMemoryError\b", re.IGNORECASE)


def run(
    words: Sequence[str],
    seconds: float,
    log: Path,
    look: Callable[[], None] = lambda: None,
    every: float = 5.0,
) -> dict:
    """Run a command to its end or its limit.

    Args:
        words: the command.
        seconds: its limit, after which it is stopped.
        log: where its output goes.
        look: is called every so many seconds while it runs.

    Returns:
        `state` (done, failed, out of memory, time limit), `status`, `seconds`; of what is not done
        also `tail`, its last lines.
    """
    started, mark = time.monotonic(), uuid.uuid4().hex
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(words),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, MARK: mark},
        )
        try:
            status = _waited(process, started + seconds, look, every)
        finally:
            _end(process, mark)
    facts = {"state": "done", "status": status, "seconds": time.monotonic() - started}
    if status == 0:
        return facts
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    if status is None:
        state = "time limit"
    else:
        state = "out of memory" if _MEMORY.search("\n".join(lines)) else "failed"
    return {**facts, "state": state, "tail": [line[-400:] for line in lines]}


def _waited(process, until: float, look: Callable[[], None], every: float) -> int | None:
    """Its exit status; None once the time is up."""
    while True:
        left = until - time.monotonic()
        try:
            return process.wait(max(0.0, min(every, left)))
        except subprocess.TimeoutExpired:
            look()
            if left <= every:
                return None


def _end(process, mark: str) -> None:
    """Ends what still runs of a command: first asked, so that it stops its servers, then not."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    for pid in {process.pid, *_started_under(mark)}:
        with contextlib.suppress(ProcessLookupError):
            if pid != process.pid or process.poll() is None:
                os.kill(pid, signal.SIGKILL)
    process.wait()


def _started_under(mark: str) -> set[int]:
    """Processes with the mark in their environment, and all that these have started."""
    wanted = f"{MARK}={mark}".encode()
    found: set[int] = set()
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # After the name, which may hold anything in its parentheses: state, parent.
            rest = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            parents[int(folder.name)] = int(rest[1])
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    size = -1
    while len(found) != size:
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {os.getpid()}
