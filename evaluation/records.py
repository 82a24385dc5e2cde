"""The record of one answered question, written as one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

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
    """
    with path.open(encoding="utf-8") as file:
        lines = file.readlines()  # str.splitlines would also split an answer at U+2028
    for number, text in enumerate(lines, 1):
        try:
            yield Record(**json.loads(text))
        except (ValueError, TypeError):
            if number == len(lines) and not text.endswith("\n"):
                return
            raise ValueError(f"{path}:{number}: not a record of `kvpolicy eval`") from None
