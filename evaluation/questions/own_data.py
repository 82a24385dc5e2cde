"""The task `data:PATH`: questions from a file of the user, in LongBench's format.

The file has one JSON object per line, with these fields:

    context      the text to read
    input        the question; may be empty
    answers      right answers, a list or one text; naming one of them is enough
    all_classes  optional: all names that an answer can be
    metric       optional: contains (default), f1, or classes (default where all_classes is given)
    most_tokens  optional: largest number of tokens to generate; default: 1.5 times the tokens of
                 the longest answer, plus 32

Other fields, such as LongBench's `length`, are ignored. A prompt is the context, an empty line, the
input, and `Answer:` on a new line (for a model with the 512 words: the context, the input and
`answer`). If it has more tokens than ordered, the middle of the context is left out, as in
LongBench's scripts.

Metrics: `contains` is 1 if one of the answers is in the model's answer, in any case and spacing,
else 0; `f1` is the best F1 of the words, as in SQuAD; `classes` is 1 / n if the model names n
classes and a right one is among them, else 0.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kvpolicy.dsl.syntax.diagnostics import why
from kvpolicy.evaluation.questions import judge
from kvpolicy.evaluation.questions.judge import Judge
from kvpolicy.evaluation.questions.order import Order, too_short
from kvpolicy.evaluation.questions.sample import Sample, Turn
from kvpolicy.evaluation.questions.words import largest
from kvpolicy.evaluation.text_files import half_character, read_text

PREFIX = "data:"
METRICS = ("contains", "f1", "classes")
MORE_TOKENS = 32


@dataclass(frozen=True)
class DataLine:
    """A line of the file; `place` is its path and number."""

    place: str
    context: str
    input: str
    answers: tuple[str, ...]
    metric: str
    classes: tuple[str, ...]
    most_tokens: int | None

    def judge(self) -> Judge:
        if self.metric == "classes":
            return judge.one_class(self.answers, self.classes)
        return (judge.overlap if self.metric == "f1" else judge.any_of)(self.answers)


def is_one(task: str) -> bool:
    """Whether a task is a file of the user."""
    return task.startswith(PREFIX)


def title(task: str) -> str:
    """The title of the task: the name of its file."""
    return f"own data: {_path(task).name}"


def count(task: str) -> int:
    """Number of questions in the file.

    Raises:
        ValueError: the file cannot be read, or has a bad line.
    """
    return len(_rows(task))


def sample(order: Order, form: str) -> Sample:
    """The sample of one line; its context is cut if it is too long.

    Raises:
        ValueError: the file cannot be read or has a bad line, there is no such line, or the length
            is too short for its question.
    """
    rows = _rows(order.task)
    if order.index >= len(rows):
        path = _path(order.task)
        raise ValueError(f"{path}: {len(rows)} questions, so none has the index {order.index}")
    row = rows[order.index]
    prompt = f" {row.input} answer" if form == "embedded" else f"\n\n{row.input}\nAnswer:"
    reference = " " + row.answers[0]
    most = max(order.count(answer) for answer in row.answers) * 3 // 2 + MORE_TOKENS
    turn = Turn(prompt, reference, row.answers, row.most_tokens or most, row.judge())
    return order.sample(_cut(row, prompt, order), [turn])


def _cut(row: DataLine, prompt: str, order: Order) -> str:
    """The context; without its middle if the prompt would be longer than ordered."""
    context = row.context
    if order.count(context + prompt) <= order.length:
        return context

    def without_middle(length: int) -> str:
        # By characters: not every language puts spaces between words.
        half = length // 2
        return context[: length - half] + context[len(context) - half :]

    def size(length: int) -> int:
        return order.count(without_middle(length) + prompt)

    if size(0) > order.length:
        raise ValueError(f"{row.place}: {too_short(order.task, size(0), order.length)}")
    return without_middle(largest(size, order.length, len(context), order.length * 3))


def _path(task: str) -> Path:
    return Path(task.removeprefix(PREFIX))


def _rows(task: str) -> tuple[DataLine, ...]:
    path = _path(task)
    if task == PREFIX:
        raise ValueError("data: needs the path of a file, as in data:questions.jsonl")
    try:
        status = path.stat()
        return _read(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise ValueError(f"{path}: {why(error, 'it cannot be read')}") from None


@lru_cache(maxsize=4)
def _read(path: Path, _changed: int, _size: int) -> tuple[DataLine, ...]:
    """The rows of the file; read again if its time or size has changed."""
    try:
        lines = read_text(path).split("\n")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    rows = tuple(
        _row(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()
    )
    if not rows:
        raise ValueError(f"{path}: the file has no questions")
    return rows


def _row(place: str, line: str) -> DataLine:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: it cannot be read: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{place}: a line must be a JSON object")
    classes = _texts(place, fields, "all_classes") if fields.get("all_classes") else ()
    metric = fields.get("metric", "classes" if classes else "contains")
    if metric not in METRICS:
        raise ValueError(f"{place}: metric must be one of {', '.join(METRICS)}, got {metric!r}")
    if metric == "classes" and not classes:
        raise ValueError(f"{place}: metric classes needs the field all_classes")
    answers = _texts(place, fields, "answers")
    if metric == "classes" and not {*map(judge.flat, answers)} & {*map(judge.flat, classes)}:
        raise ValueError(f"{place}: none of answers is one of all_classes")
    context, question = _text(place, fields, "context"), _text(place, fields, "input")
    most = _most_tokens(place, fields)
    return DataLine(place, context, question, answers, metric, classes, most)


def _given(place: str, fields: dict, name: str) -> object:
    if name not in fields:
        raise ValueError(f"{place}: the field {name} is missing")
    return fields[name]


def _text(place: str, fields: dict, name: str) -> str:
    value = _given(place, fields, name)
    if not isinstance(value, str):
        raise ValueError(f"{place}: {name} must be a text")
    return _whole(place, name, value)


def _texts(place: str, fields: dict, name: str) -> tuple[str, ...]:
    value = _given(place, fields, name)
    texts = value if isinstance(value, list) else [value]
    valid_texts = [
        _whole(place, name, text) for text in texts if isinstance(text, str) and text.strip()
    ]
    if not texts or len(valid_texts) < len(texts):
        raise ValueError(f"{place}: {name} must be a list of texts, none empty")
    return tuple(valid_texts)


def _whole(place: str, name: str, text: str) -> str:
    half = half_character(text)
    if half is not None:
        raise ValueError(f"{place}: {name} has {half!r}, which is half of a character")
    return text


def _most_tokens(place: str, fields: dict) -> int | None:
    value = fields.get("most_tokens")
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{place}: most_tokens must be a whole number above 0, got {value!r}")
    return value
