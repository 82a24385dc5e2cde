"""The files that answers go to while a run goes on: samples.jsonl and errors.jsonl."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from kvpolicy.dsl.syntax.diagnostics import refused, why
from kvpolicy.evaluation import records
from kvpolicy.evaluation.records import Record


class Lines:
    """A file of JSON lines that several threads append to; a killed run loses one line at most."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        with path.open("ab+") as file:
            _cut(file)
        self._file = path.open("a", encoding="utf-8")

    def append(self, line: str) -> bool:
        """Writes a whole line at once; whether the file was still open."""
        with self._lock:
            if self._file.closed:
                return False
            self._file.write(line)
            self._file.flush()
            return True

    def close(self) -> None:
        """Nothing is written from now on."""
        with self._lock:
            self._file.close()


def _cut(file) -> None:
    """Removes a last line that was not written to its end."""
    file.seek(0)
    content = file.read()
    file.truncate(content.rfind(b"\n") + 1)


class Answers:
    """The answered questions of a folder, and those that failed in this run.

    Raises:
        PolicyError: samples.jsonl holds something else.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "samples.jsonl"
        self._errors = folder / "errors.jsonl"
        try:
            self._lines = Lines(path)
            self.keys = {record.key for record in records.read(path)}
            self._errors.unlink(missing_ok=True)  # they are asked again now
        except ValueError as error:
            raise refused(str(path), "file", str(error), "take another --out") from None
        except OSError as error:
            raise refused(str(path), "file", why(error, "it cannot be written")) from None
        self.failed = 0
        self._lock = threading.Lock()

    def add(self, record: Record) -> bool:
        """Writes an answer down; whether the run still goes on."""
        if not self._lines.append(records.line(record)):
            return False
        self.keys.add(record.key)
        return True

    def fail(self, key: tuple, sentence: str) -> None:
        """Notes a question that got no answer; `key` as of a record."""
        names = ("policy", "budget", "task", "length", "index", "turn")
        facts = {**dict(zip(names, key, strict=True)), "error": sentence}
        with self._lock, self._errors.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts, ensure_ascii=False) + "\n")
            self.failed += 1

    def close(self) -> None:
        """Nothing is written from now on."""
        self._lines.close()
