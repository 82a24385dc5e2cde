"""Runs a command under a hard time limit and ends every process that it started."""

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

MARK = "KVPOLICY_GPU_REPORT"  # variable in the environment of a command's processes
LAST_LINES = 40
GRACE = 5.0  # seconds from the interrupt to the kill
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
        seconds: time after which it is stopped.
        log: file for its output.
        look: called every `every` seconds while it runs.

    Returns:
        `state` (done, failed, out of memory, time limit), `status` (None at the limit), `seconds`;
        unless done also `tail`, its last lines.
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
    """Exit status of the process; None if it still runs at `until`."""
    while True:
        left = until - time.monotonic()
        try:
            return process.wait(max(0.0, min(every, left)))
        except subprocess.TimeoutExpired:
            look()
            if left <= every:
                return None


def _end(process, mark: str) -> None:
    """Interrupts a running command, so that it stops its servers; then kills all that is left."""
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
    """Processes with the mark in their environment, and all their descendants."""
    wanted = f"{MARK}={mark}".encode()
    found: set[int] = set()
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # State and parent follow the name, which may hold any character in its parentheses.
            rest = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            parents[int(folder.name)] = int(rest[1])
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    size = -1
    while len(found) != size:
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {os.getpid()}
