"""Judges: functions from the text of an answer to a score from 0 to 1.

As in RULER, each of several items has an equal share of the score, a repeated item counts once, and
other text in the answer costs nothing. Listing everything does not pay, because `Turn.most_tokens`
leaves room for little more than a right answer (tests check that an answer that repeats the context
from its start scores only the items in its first tokens).

Embedded models answer in whole words and close with <end>; text after it is not read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

Judge = Callable[[str], float]

_TOKEN = re.compile(r"\w+|[^\w\s]+")


def beginning(item: str) -> Judge:
    """Embedded: 1 if the answer begins with these words, else 0."""
    return partial(_beginning, item)


def parts(items: Sequence[str]) -> Judge:
    """Embedded: share of the items that are among the parts of the answer between commas."""
    return partial(_parts, tuple(items))


def named(items: Sequence[str]) -> Judge:
    """Embedded: share of the items, one word each, among the words of the answer."""
    return partial(_named, tuple(items))


def mentioned(items: Sequence[str]) -> Judge:
    """Share of the items that are in the answer as whole words, in any case."""
    return partial(_mentioned, tuple(items))


def any_of(answers: Sequence[str]) -> Judge:
    """1 if one of the right answers is anywhere in the answer, in any case and spacing, else 0."""
    return partial(_any_of, tuple(answers))


def overlap(answers: Sequence[str]) -> Judge:
    """Best F1 of the answer's words with the words of a right answer, as in SQuAD."""
    return partial(_overlap, tuple(answers))


def one_class(answers: Sequence[str], classes: Sequence[str]) -> Judge:
    """1 / n if the answer names n of the classes and a right one is among them, else 0.

    A class whose name is part of the right class's name is not counted.
    """
    return partial(_one_class, tuple(answers), tuple(classes))


def _said(text: str) -> list[str]:
    """The words of an embedded model's answer, up to <end>."""
    return _TOKEN.findall(text.split("<end>")[0].lower())


def _beginning(item: str, text: str) -> float:
    words = item.split()
    return float(_said(text)[: len(words)] == words)


def _parts(items: tuple[str, ...], text: str) -> float:
    answer_parts = {part.strip() for part in " ".join(_said(text)).split(",")}
    return sum(item in answer_parts for item in items) / len(items)


def _named(items: tuple[str, ...], text: str) -> float:
    words = set(_said(text))
    return sum(item in words for item in items) / len(items)


def _mentioned(items: tuple[str, ...], text: str) -> float:
    return sum(_stands(item, text) for item in items) / len(items)


def _stands(item: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(item)}(?!\w)", text, re.IGNORECASE) is not None


def flat(text: str) -> str:
    """The text with case and spacing normalized, for comparison."""
    return " ".join(text.casefold().split())


def _any_of(answers: tuple[str, ...], text: str) -> float:
    return float(any(flat(answer) in flat(text) for answer in answers))


def _overlap(answers: tuple[str, ...], text: str) -> float:
    return max(_f1(_content(answer), _content(text)) for answer in answers)


def _content(text: str) -> Counter[str]:
    """Counts of the words in lower case, without punctuation and articles."""
    words = re.findall(r"\w+", text.casefold())
    return Counter(word for word in words if word not in ("a", "an", "the"))


def _f1(expected: Counter[str], answer: Counter[str]) -> float:
    common = (expected & answer).total()
    if not common:
        return 0.0
    return 2 * common / (expected.total() + answer.total())


def _one_class(answers: tuple[str, ...], classes: tuple[str, ...], text: str) -> float:
    named_classes = [name for name in map(flat, classes) if name in flat(text)]
    best = 0.0
    for answer in map(flat, answers):
        other_classes = [name for name in named_classes if name not in answer]
        if answer in named_classes:
            best = max(best, 1 / (1 + len(other_classes)))
    return best
