"""What is written down of every question: one line of JSON each."""

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
        policy: the policy's name; FULL for full KV.
        budget: share of the prompt's entries that was asked for; None where none was.
        setting: the parameters that were set for it, by name.
        task, length, index, turn: which question of which sample.
        depth: as in `Sample`.
        score: 0 to 1, by the task's judge.
        answer: what the model said.
        expected: the items that were to be named.
        prompt_tokens, output_tokens: as the server counted them.
        kept: share of the prompt's entries left when its prefill ended; None if not known.
        held: share of all entries (prompt and answer) held after the last token; None if not known.
        kv_bytes: KV memory of what was kept of the prompt; None if not known.
        ttft, tpot: seconds to the first token, and per token after it; None where there is none.
        uncompressed: why the server kept everything, where a policy was asked for.
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
        """What no two records of a run share."""
        return (self.policy, self.budget, self.task, self.length, self.index, self.turn)

    @property
    def question(self) -> tuple:
        """The question; equal for all policies that were asked it."""
        return (self.task, self.length, self.index, self.turn)


def line(record: Record) -> str:
    """The record as one line of JSON, with its end."""
    return json.dumps(asdict(record), ensure_ascii=False) + "\n"


def read(path: Path) -> Iterator[Record]:
    """Records of a file in their order; a last line that was cut off is left out.

    Raises:
        ValueError: another line is not a record; the message says which.
    """
    with path.open(encoding="utf-8") as file:
        lines = file.readlines()  # str.splitlines would also part an answer at U+2028
    for number, text in enumerate(lines, 1):
        try:
            yield Record(**json.loads(text))
        except (ValueError, TypeError):
            if number == len(lines) and not text.endswith("\n"):
                return
            raise ValueError(f"{path}:{number}: not a record of `kvpolicy eval`") from None
