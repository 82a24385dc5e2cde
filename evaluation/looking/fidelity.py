"""`kvpolicy fidelity`: how far a policy moves the model's next-token distributions from full KV.

No labels are needed. The first tokens of a text are the prompt; the next ones are forced, so that
each cache gives the distribution of the same token after the same text. Full KV is asked in the
same way, so that both distributions come from decode steps (the first one of a continuation comes
from the prefill). Both also generate freely.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from kvpolicy.dsl.syntax.diagnostics import refused, why
from kvpolicy.evaluation.asking.asking import in_threads
from kvpolicy.evaluation.asking.facts import kept_share
from kvpolicy.evaluation.asking.tokens import Tokens
from kvpolicy.evaluation.asking.variants import Variant
from kvpolicy.evaluation.looking import fidelity_report
from kvpolicy.evaluation.looking.distributions import Distributions, distance
from kvpolicy.evaluation.looking.fidelity_result import Compared
from kvpolicy.evaluation.looking.kept import pieces
from kvpolicy.evaluation.looking.look import Look, opened, text_of
from kvpolicy.evaluation.records import FULL
from kvpolicy.evaluation.text_files import half_character

_WHOLE = 2048  # vocabularies up to this size are compared as a whole
_AT_ONCE = 4  # requests in flight


@dataclass(frozen=True)
class Text:
    """One text as token ids: the prompt [N] and the continuation [T]."""

    name: str
    prompt: list[int]
    continuation: list[int]


def main(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code.

    Raises:
        PolicyError: an option, a text or the server cannot be used.
    """
    named_texts = [named_text for file in args.text for named_text in _texts(file)]
    if args.out is not None:
        _make(args.out)

    def split(tokens: Tokens) -> list[Text]:
        return [_split(tokens, name, text, args) for name, text in named_texts]

    with opened(args, lambda tokens, _: split(tokens)) as look:
        texts = split(look.tokens)
        top = _top(args.top, look)
        results = list(_compared(look, texts, top))
    print("\n".join(fidelity_report.table(results)))
    if args.out is not None:
        try:
            paths = fidelity_report.write(results, args.out)
        except OSError as error:
            raise refused(str(args.out), "file", why(error, "cannot be written")) from None
        for path in paths:
            print(f"{path}: written", file=sys.stderr)
    return 0


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise refused(str(folder), "file", "this is a file; --out is a folder") from None
    except OSError as error:
        raise refused(str(folder), "file", why(error, "cannot be made")) from None


def _texts(file: str) -> Iterator[tuple[str, str]]:
    """Name and text of each text in a file: one, or one in each line of *.jsonl."""
    content = text_of(file)
    if not file.endswith(".jsonl"):
        yield file, content
        return
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        name = f"{file}:{number}"
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str) or not text.strip():
            raise refused(name, "file", 'this line is not {"text": "..."}')
        if half_character(text) is not None:
            raise refused(name, "file", "the text has half of a character")
        yield name, text


def _split(tokens: Tokens, name: str, text: str, args: argparse.Namespace) -> Text:
    ids = tokens.encode(text)
    prompt = args.prompt_tokens or int(args.prompt_share * len(ids))
    rest = len(ids) - prompt
    if prompt < 1 or rest < 2:
        message = f"it has {len(ids):,} tokens, of which {prompt:,} would be the prompt"
        raise refused(name, "range", message, "a continuation of two tokens or more has to be left")
    return Text(name, ids[:prompt], ids[prompt : prompt + args.continuation])


def _top(limit: int, look: Look) -> int:
    """K, the number of tokens to compare; a server fails if asked for more than its vocabulary."""
    if look.vocabulary is not None and look.vocabulary <= _WHOLE:
        return look.vocabulary
    return min(limit, look.vocabulary or len(look.tokens.tokenizer))


def _compared(look: Look, texts: Sequence[Text], top: int) -> Iterator[Compared]:
    """Every policy on every text, with a progress bar."""
    from tqdm import tqdm

    names = [FULL, *(policy.alias for policy in look.policies)]
    jobs = list(product(range(len(texts)), names, (False, True)))
    answers: dict[tuple[int, str, bool], dict[str, Any]] = {}
    with tqdm(total=len(jobs), unit="request", disable=None, file=sys.stderr) as bar:

        def ask(job: tuple[int, str, bool]) -> None:
            number, name, free = job
            answers[job] = _asked(look, texts[number], name, free, top)
            bar.update()

        in_threads(jobs, ask, _AT_ONCE)
    for number, text in enumerate(texts):
        for policy in look.policies:
            keys = product([number], (FULL, policy.alias), (False, True))
            yield _one(look, text, policy, [answers[key] for key in keys])


def _asked(look: Look, text: Text, policy: str, free: bool, top: int) -> dict[str, Any]:
    """One answer: with the continuation of the text forced, or generated freely."""
    count = len(text.continuation)
    if free:
        return look.ask(text.prompt, policy, count)
    custom = {"kv_policy_force": text.continuation}
    logprobs = {"return_logprob": True, "top_logprobs_num": top}
    return look.ask(text.prompt, policy, count, custom=custom, **logprobs)


def _one(look: Look, text: Text, policy: Variant, answers: Sequence[dict[str, Any]]) -> Compared:
    """One policy on one text, from the answers of full KV and of the policy, forced and free."""
    full, full_free, forced, free = answers
    count = len(text.continuation)
    if any(answer["output_ids"] != text.continuation for answer in (full, forced)):
        raise look.unusable("it generated other tokens than it was given")
    if any(len(answer["output_ids"]) != count for answer in (full_free, free)):
        raise look.unusable(f"it did not generate {count} tokens")
    try:
        distributions = [Distributions.of(answer["meta_info"], count) for answer in (full, forced)]
    except ValueError as error:
        raise look.unusable(str(error)) from None
    pairs = zip(full_free["output_ids"], free["output_ids"], strict=True)
    facts = forced["meta_info"].get("kv_policy") or {}
    ids = [*text.prompt[-1:], *text.continuation]
    return Compared(
        text=text.name,
        policy=policy.alias,
        setting=dict(policy.setting),
        prompt_tokens=len(text.prompt),
        continuation=tuple(text.continuation),
        words=tuple(pieces(look.tokens.decode_all, ids)[1:]),
        full=distributions[0],
        other=distributions[1],
        distance=distance(*distributions),
        greedy_divergence=next((i for i, (a, b) in enumerate(pairs) if a != b), None),
        whole=distributions[0].ids.shape[1] == look.vocabulary,
        kept=kept_share(facts) if facts else None,
        uncompressed=facts.get("uncompressed"),
    )
