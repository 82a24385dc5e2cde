"""The lines of JSON that a run writes: records of answered questions, and maps of what was kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from kvpolicy.evaluation.looking.kept import unpacked

T = TypeVar("T")

FULL = "none"
"""Name of the policy that keeps everything."""


@dataclass(frozen=True)
class Record:
    """One answered question.

    Attributes:
        policy: name of the policy; FULL for full KV.
        budget: share of the prompt's entries asked for with `--budget`; None without one.
        setting: name -> value of the parameters that were set.
        task, length, index, turn: the sample, and the question in it.
        depth: as in `Sample`.
        score: 0 to 1, by the task's judge.
        answer: the model's answer.
        expected: the items that a right answer names.
        prompt_tokens, output_tokens: numbers of tokens, as the server counted them.
        kept: share of the prompt's entries left when its prefill ended; None if not known.
        held: share of all entries (prompt and answer) held after the last token; None if not known.
        kv_bytes: bytes of the prompt's entries that were kept; None if not known.
        ttft: seconds to the first token; None if not measured.
        tpot: seconds per token after the first; None if not measured.
        uncompressed: why the server kept everything although a policy was asked for, else None.
    """

    policy: str
    budget: float | None
    setting: dict[str, str]
    task: str
    length: int
    index: int
    turn: int
    depth: float | None
    score: float
    answer: str
    expected: list[str]
    prompt_tokens: int
    output_tokens: int
    kept: float | None
    held: float | None
    kv_bytes: float | None
    ttft: float | None
    tpot: float | None
    uncompressed: str | None

    @property
    def key(self) -> tuple:
        """The key of the record, unique in a run."""
        return (self.policy, self.budget, self.task, self.length, self.index, self.turn)

    @property
    def question(self) -> tuple:
        """The key of the question; equal for all policies that were asked it."""
        return (self.task, self.length, self.index, self.turn)


def line(record: Record) -> str:
    """The record as one line of JSON, newline included."""
    return json.dumps(asdict(record), ensure_ascii=False) + "\n"


def read(path: Path) -> Iterator[Record]:
    """The records of a file in order; a last line that was cut off is left out.

    Raises:
        ValueError: another line is not a record; the message says which.
        OSError: the file cannot be read.
    """
    return _lines(path, _record, "a record of `kvpolicy eval`")


def read_maps(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of kept.jsonl in order: which entries a policy kept of a prompt.

    Raises:
        ValueError, OSError: as `read`.
    """
    return _lines(path, _map, "a map of what was kept")


def _lines(path: Path, parse: Callable[[dict[str, Any]], T], what: str) -> Iterator[T]:
    # str.splitlines would also split an answer at U+2028.
    *lines, cut = path.read_bytes().split(b"\n")
    for number, line in enumerate([*lines, cut] if cut else lines, 1):
        try:
            yield parse(json.loads(line))
        except (ValueError, TypeError, LookupError, RecursionError):
            if number > len(lines):
                return
            raise ValueError(f"{path}:{number}: not {what}") from None


def _record(given: dict[str, Any]) -> Record:
    record = Record(**given)
    _check(given, _KINDS)
    if not 0 <= record.score <= 1:
        raise ValueError("a score is from 0 to 1")
    return record


def _map(given: dict[str, Any]) -> dict[str, Any]:
    _check(given, _KINDS_OF_MAP)
    unpacked(given, len(given["tokens"]))
    if not all(type(place) is int for pair in given.get("asked") or [] for place in pair):
        raise ValueError("what is asked for is not positions")
    return given


def _check(given: dict[str, Any], kinds: Mapping[str, tuple[type, ...]]) -> None:
    for name, kind in kinds.items():
        value = given[name]
        too_large = type(value) in _NUMBER and not abs(value) < _TOO_LARGE  # NaN is not less
        if type(value) not in kind or too_large:
            raise TypeError(f"`{name}` is of another kind")


_NOTHING = type(None)
_NUMBER = (int, float)
_TOO_LARGE = 2**53  # whole numbers from here on are not exact in float64
_OF_ANNOTATION: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": _NUMBER,
    "str | None": (str, _NOTHING),
    "float | None": (*_NUMBER, _NOTHING),
    "dict[str, str]": (dict,),
    "list[str]": (list,),
}
# Name of a field -> kinds of JSON values that it may have.
_KINDS = {field.name: _OF_ANNOTATION[str(field.type)] for field in fields(Record)}
_KINDS_OF_MAP = {name: _KINDS[name] for name in ("policy", "budget", "task", "length", "index")}
_KINDS_OF_MAP |= {"tokens": (list,), "bits": (str,), "shape": (list,)}
