"""The requests of a sample's turns; their token ids do not depend on what a later turn finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvpolicy.evaluation.asking.tokens import Tokens
from kvpolicy.evaluation.questions.sample import History, Sample


@dataclass(frozen=True)
class Request:
    """The request of one turn.

    Attributes:
        turn: number of the turn, from 0.
        ids: token ids of the prompt.
        text: text of the prompt, for servers that take no ids.
        forced: token ids that the output is forced to begin with.
        most: largest number of tokens to generate after these.
    """

    turn: int
    ids: list[int]
    text: str
    forced: list[int]
    most: int


def requests(sample: Sample, tokens: Tokens, *, copy: bool) -> Iterator[Request]:
    """The requests of all turns.

    Args:
        copy: whether samples with `History.COPY` go on in the compressed copy of the first turn;
            otherwise their later turns are new prompts.
    """
    first, *later_turns = sample.turns
    text = sample.context + first.prompt
    ids = tokens.encode(text)
    yield Request(0, ids, text, [], first.most_tokens)
    later_ids: list[int] = []
    answer = first.reference
    for number, turn in enumerate(later_turns, 1):
        if sample.history == History.SHARED:
            prompt = sample.context + turn.prompt
            yield Request(number, tokens.encode(prompt), prompt, [], turn.most_tokens)
            continue
        later_ids = [*later_ids, *_piece(tokens, answer), *_piece(tokens, turn.prompt)]
        text += answer + turn.prompt
        answer = turn.reference
        if copy and sample.history == History.COPY:
            yield Request(number, ids, text, later_ids, turn.most_tokens)
        else:
            yield Request(number, ids + later_ids, text, [], turn.most_tokens)


def _piece(tokens: Tokens, text: str) -> list[int]:
    return tokens.encode(text, special=False)
