"""The files to which a run writes its answers: samples.jsonl and errors.jsonl."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from kvpolicy.dsl.syntax.diagnostics import refused, why
from kvpolicy.evaluation import records
from kvpolicy.evaluation.records import Record


class Lines:
    """A file of lines to which several threads append; a killed run loses at most one line."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        with path.open("ab+") as file:
            _cut(file)
        self._file = path.open("a", encoding="utf-8")

    def append(self, line: str) -> bool:
        """Writes a whole line at once; returns whether the file was still open."""
        with self._lock:
            if self._file.closed:
                return False
            self._file.write(line)
            self._file.flush()
            return True

    def close(self) -> None:
        """Closes the file; later lines are not written."""
        with self._lock:
            self._file.close()


def _cut(file) -> None:
    """Removes a last line that was not written to its end."""
    file.seek(0)
    content = file.read()
    file.truncate(content.rfind(b"\n") + 1)


class Answers:
    """The answered questions of a folder, and those that failed in this run.

    Attributes:
        keys: keys of the records in samples.jsonl.
        errors: path of errors.jsonl.
        failed: number of questions without an answer in this run.
        last_error: why the last one of these has none; empty if none failed.

    Raises:
        PolicyError: samples.jsonl holds something else, or cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "samples.jsonl"
        self.errors = folder / "errors.jsonl"
        try:
            self._lines = Lines(path)
            self.keys = {record.key for record in records.read(path)}
            self.errors.unlink(missing_ok=True)  # this run asks these questions again
        except ValueError as error:
            raise refused(str(path), "file", str(error), "take another --out") from None
        except OSError as error:
            raise refused(str(path), "file", why(error, "it cannot be written")) from None
        self.failed, self.last_error = 0, ""
        self._lock = threading.Lock()

    def add(self, record: Record) -> bool:
        """Writes a record; returns False if the file is closed, since the run has ended."""
        if not self._lines.append(records.line(record)):
            return False
        self.keys.add(record.key)
        return True

    def fail(self, key: tuple, sentence: str) -> None:
        """Notes why a question got no answer; `key` as `Record.key`."""
        names = ("policy", "budget", "task", "length", "index", "turn")
        facts = {**dict(zip(names, key, strict=True)), "error": sentence}
        with self._lock, self.errors.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts, ensure_ascii=False) + "\n")
            self.failed += 1
            self.last_error = sentence

    def close(self) -> None:
        """Closes samples.jsonl; later records are not written."""
        self._lines.close()
