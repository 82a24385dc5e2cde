"""A sample's turns as requests: token ids that are the same whatever a later turn finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvpolicy.evaluation.asking.tokens import Tokens
from kvpolicy.evaluation.questions.sample import History, Sample


@dataclass(frozen=True)
class Request:
    """What a server is asked for one turn.

    Attributes:
        turn: which one, from 0.
        ids: the prompt.
        text: the prompt as text, for servers that take no ids.
        forced: the first tokens of the output, which are given.
        most: tokens to generate at most beside these.
    """

    turn: int
    ids: list[int]
    text: str
    forced: list[int]
    most: int


def requests(sample: Sample, tokens: Tokens, *, copy: bool) -> Iterator[Request]:
    """The requests of all turns.

    Args:
        copy: whether the conversation goes on in the compressed copy, if the sample says so;
            otherwise it is a new prompt.
    """
    first, *later = sample.turns
    text = sample.context + first.prompt
    ids = tokens.encode(text)
    yield Request(0, ids, text, [], first.most_tokens)
    between: list[int] = []
    said = first.reference
    for number, turn in enumerate(later, 1):
        if sample.history == History.SHARED:
            alone = sample.context + turn.prompt
            yield Request(number, tokens.encode(alone), alone, [], turn.most_tokens)
            continue
        between = [*between, *_piece(tokens, said), *_piece(tokens, turn.prompt)]
        text += said + turn.prompt
        said = turn.reference
        if copy and sample.history == History.COPY:
            yield Request(number, ids, text, between, turn.most_tokens)
        else:
            yield Request(number, ids + between, text, [], turn.most_tokens)


def _piece(tokens: Tokens, text: str) -> list[int]:
    return tokens.encode(text, special=False)
