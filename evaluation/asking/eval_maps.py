"""Writes kept.jsonl of `kvpolicy eval`: which entries each policy kept of some prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kvpolicy.evaluation.asking.answers import Lines
from kvpolicy.evaluation.asking.asking import in_threads
from kvpolicy.evaluation.asking.client import Client, Failed
from kvpolicy.evaluation.asking.tokens import Tokens
from kvpolicy.evaluation.asking.turns import Request, requests
from kvpolicy.evaluation.asking.variants import Variant
from kvpolicy.evaluation.looking.kept import pieces, unpacked
from kvpolicy.evaluation.questions.sample import Sample


def write_maps(
    folder: Path,
    wanted: Sequence[tuple[Variant, Sample]],
    client: Client,
    tokens: Tokens,
    at_once: int,
) -> None:
    """Appends a line per policy and prompt to kept.jsonl; nothing after an error.

    Args:
        folder: folder of the run.
        wanted: the variants and samples.
        at_once: number of requests in flight.

    Raises:
        Failed: there is no answer, it does not say which entries were kept, or the radix cache
            cannot be emptied.
    """
    texts: dict[int, str] = {}

    def look(number: int) -> None:
        variant, sample = wanted[number]
        request = next(requests(sample, tokens, copy=False))
        # Two tokens, since a prompt is not compressed for an answer without decode steps.
        map_request = Request(0, request.ids, request.text, [], 2)
        facts = client.ask(map_request, variant.alias, kept=True).meta.get("kv_policy") or {}
        try:
            kept = facts["kept"]
            unpacked(kept, len(request.ids))
        except KeyError:
            raise Failed("the server does not say which entries it kept", again=False) from None
        except ValueError as error:
            raise Failed(f"its answer cannot be used: {error}", again=False) from None
        entry = {
            "policy": variant.policy,
            "budget": variant.budget,
            "task": sample.task,
            "length": sample.length,
            "index": sample.index,
            "tokens": pieces(tokens.decode_all, request.ids),
            "asked": tokens.positions(request.text, sample.asked),
            **kept,
        }
        texts[number] = json.dumps(entry, ensure_ascii=False) + "\n"

    client.flush()
    in_threads(range(len(wanted)), look, at_once)
    lines = Lines(folder / "kept.jsonl")
    for number in range(len(wanted)):
        lines.append(texts[number])
    lines.close()
