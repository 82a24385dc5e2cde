"""Facts in filler text, in English: the contexts of most tasks in words.

A fact gives a name a number: "The locker number of the gentle amber falcon is 4839201." A prompt
ends with the beginning of its answer, so that a base model answers too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from kvpolicy.evaluation.questions import judge
from kvpolicy.evaluation.questions.order import Order, too_short
from kvpolicy.evaluation.questions.sample import History, Sample, Turn
from kvpolicy.evaluation.questions.words import MOST_NAMES, Filler, largest, listing, names, numbers

INTRODUCTION = "The text below mentions locker numbers. A question about them follows.\n\n"
DIGITS = 7
LEAST_FACT = 8  # lower bound of the tokens of a fact


@dataclass(frozen=True)
class Woven:
    """A text of statements and filler.

    Attributes:
        text: the whole text.
        start: number of characters of the introduction.
        spans: [start, stop) characters of each statement.
    """

    text: str
    start: int
    spans: list[tuple[int, int]]

    def depth(self, i: int) -> float:
        """Depth of a statement in the text after the introduction: 0 at its start, 1 at its end."""
        start, stop = self.spans[i]
        return (start - self.start) / max(1, len(self.text) - self.start - (stop - start))


def weave(
    introduction: str,
    statements: Sequence[str],
    places: Sequence[float],
    sentences: Sequence[str],
) -> Woven:
    """Puts each statement between the sentences at its place, from 0 (start) to 1 (end)."""
    spans = [(0, 0)] * len(statements)
    parts: list[str] = []
    length, last_cut = len(introduction), 0
    for place, i in sorted((place, i) for i, place in enumerate(places)):
        cut = round(place * len(sentences))
        gap = sentences[last_cut:cut]
        length += sum(len(sentence) + 1 for sentence in gap)
        spans[i] = (length, length + len(statements[i]))
        parts += [*gap, statements[i]]
        length += len(statements[i]) + 1
        last_cut = cut
    text = introduction + " ".join([*parts, *sentences[last_cut:]])
    return Woven(text, len(introduction), spans)


def fitted(
    order: Order, compose: Callable[[int, int], Woven], least: int, most: int, prompt: str
) -> Woven:
    """Composes a context of as many statements, and then as much filler, as the length allows.

    Args:
        order: gives the length.
        compose: makes a context of numbers of statements and of filler words.
        least, most: smallest and largest number of statements.
        prompt: the question that follows the context.

    Raises:
        ValueError: `least` statements do not fit.
    """

    @cache
    def size(statements: int, filler: int) -> int:
        return order.count(compose(statements, filler).text + prompt)

    least_size = size(least, 0)
    if least_size > order.length:
        raise too_short(order.task, least_size, order.length)
    span = most - least
    count = least + largest(lambda extra: size(least + extra, 0), order.length, span, span)
    room = order.length - size(count, 0)
    filler = largest(lambda words: size(count, words), order.length, 2 * room, room * 3 // 4)
    return compose(count, filler)


def turn_of(question: str, items: Sequence[str], order: Order) -> Turn:
    """A turn whose answer lists the items."""
    reference = " " + listing(items)
    return Turn(
        prompt=question,
        reference=reference,
        expected=tuple(items),
        most_tokens=room_for(reference, order),
        judge=judge.mentioned(items),
    )


def room_for(reference: str, order: Order) -> int:
    """Largest number of tokens of an answer: more than the reference, for other wordings."""
    return order.count(reference) * 3 // 2 + 16


def locker_question(keys: Sequence[str]) -> str:
    """The question for the number of each key."""
    phrase = listing([f"the {key}" for key in keys])
    if len(keys) == 1:
        return (
            f"\n\nQuestion: Which locker number does the text give for {phrase}?"
            f"\nAnswer: The locker number of {phrase} is"
        )
    return (
        f"\n\nQuestion: Which locker numbers does the text give for {phrase}?"
        f"\nAnswer: The locker numbers of {phrase} are"
    )


def locker_sample(
    order: Order,
    facts: int | None = None,
    asked: int = 1,
    turns: int = 1,
    history: History = History.TREE,
) -> Sample:
    """A sample whose context has facts.

    Args:
        facts: number of facts in the context; None, or more than fit, for as many as fit.
        asked: number of facts in each question.
        turns: number of questions, all about different facts.
        history: what later turns find of the earlier ones.

    Raises:
        ValueError: the length is too short for the facts asked for.
    """
    least = asked * turns
    most = facts or min(MOST_NAMES, least + order.length // LEAST_FACT)
    keys, values = names(most, order.rng), numbers(most, DIGITS, order.rng)
    places = [order.depth, *order.rng.random(most - 1).tolist()]
    filler = Filler(order.rng)
    statements = [
        f"The locker number of the {key} is {value}."
        for key, value in zip(keys, values, strict=True)
    ]

    def compose(count: int, filler_words: int) -> Woven:
        return weave(
            INTRODUCTION, statements[:count], places[:count], filler.sentences(filler_words)
        )

    all_turns = []
    for first in range(0, least, asked):
        span = slice(first, first + asked)
        # A later turn of a conversation follows an answer and closes its sentence.
        prefix = "." if first and history != History.SHARED else ""
        all_turns.append(turn_of(prefix + locker_question(keys[span]), values[span], order))
    opening_turns = all_turns if history == History.SHARED else all_turns[:1]
    longest = max((turn.prompt for turn in opening_turns), key=order.count)
    woven = fitted(order, compose, least, most, longest)
    return order.sample(woven.text, all_turns, woven.depth(0), history, woven.spans[:asked])
