"""The files that keep an experiment over a restart (`--kv-experiment-state`).

Its state is in one file, written at every change. What was seen is in another file beside it, which
grows with the number of keys and is written from time to time. A third one says that a server uses
them: a second server would undo what the first one writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any


def evidence_file(state: Path) -> Path:
    """The file that keeps what was seen, beside the state file."""
    return state.with_name(f"{state.name}.evidence")


class StateFileError(Exception):
    """The file cannot be read or written; the message is one sentence without the path."""


def claim(path: Path) -> IO[str] | None:
    """Claims the files for this process, until the result is closed.

    Returns:
        None if the folder cannot be written to, or holds no locks.

    Raises:
        StateFileError: another process has claimed them.
    """
    try:
        lock = path.with_name(f"{path.name}.lock").open("a")
    except OSError:
        return None
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.close()
        raise StateFileError("another server keeps its experiment there") from None
    except OSError:
        lock.close()
        return None
    return lock


def load(path: Path) -> dict[str, Any] | None:
    """The value that was saved; None if there is no file.

    It may be of an earlier experiment of the server: ends and rollbacks are kept by revision.

    Raises:
        StateFileError: the file cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StateFileError(f"it cannot be read: {error}") from None
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StateFileError(f"it is not JSON: {error}") from None
    if not isinstance(state, dict) or not isinstance(state.get("experiment"), str):
        raise StateFileError("it is not the state of an experiment")
    return state


def save(path: Path, saved: Mapping[str, Any]) -> None:
    """Replaces the file atomically: a server that is killed leaves the old file or the new one.

    Raises:
        StateFileError: the file cannot be written.
    """
    written = None
    try:
        handle, written = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(saved, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, path)
        written = None
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise StateFileError(f"it cannot be written: {error}") from None
    finally:
        if written is not None:
            with contextlib.suppress(OSError):
                os.unlink(written)
