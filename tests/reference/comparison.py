"""Compares answers of a server with those of the plain model."""

from __future__ import annotations

from base64 import b64decode
from typing import Any

import numpy as np
from eager import Generation, generate
from methods import METHODS, PROPAGATING

# Float32 sums may be added in another order: if the best two logits are closer than this, a server
# may take the second, and the rest of the answer is not compared. In an 8-bit cache, a number near
# the middle of two values may be rounded to either; they are 6 to 25 % apart.
TOLERANCE, OF_8_BITS = 1e-3, 0.06
EXCHANGED = 0.02  # most share of kept positions that may differ with an 8-bit cache


def compare(
    model: str,
    answers: list[dict[str, Any]],
    fold_interval: int,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> tuple[list[Any], int, set[str]]:
    """Differences, the number of answers with a tie, and methods that changed an answer.

    Args:
        model: folder of the checkpoint.
        answers: as `served.py` writes them.
        tolerance: gap of the best two logits below which they tie.
        options: options of `generate`.
    """
    different, ties, changed = [], 0, set()
    for answer in answers:
        policy, tokens, facts = answer["policy"], answer["tokens"], answer["facts"]
        under = policy != "none" and facts.get("uncompressed") != "too_long"
        if not under or policy not in changed:
            expected = generate(model, answer["prompt"], new_tokens=len(tokens), **options)
            if expected.tokens != tokens:
                changed.add(policy)
        if under:
            expected = generate(
                model,
                answer["prompt"],
                policy,
                METHODS[policy],
                new_tokens=len(tokens),
                fold_interval=fold_interval,
                reused=answer["cached"] if policy in PROPAGATING else 0,
                **options,
            )
            share = exchanged(positions(facts["kept"]), kept(policy, answer["prompt"], expected))
            if share > (0.0 if tolerance == TOLERANCE else EXCHANGED):
                different.append((policy, "kept", share, facts))
        pairs = enumerate(zip(tokens, expected.tokens, strict=True))
        first = next((i for i, (got, wanted) in pairs if got != wanted), None)
        if first is not None and expected.gap(first) < tolerance:
            ties += 1
        elif first is not None:
            different.append((policy, first, expected.gap(first), facts))
    return different, ties, changed


def exchanged(one: list[list[list[int]]], other: list[list[list[int]]]) -> float:
    """Share of the kept positions that only one of the two has."""
    pairs = [
        (set(a), set(b))
        for heads in zip(one, other, strict=True)
        for a, b in zip(*heads, strict=True)
    ]
    return sum(len(a ^ b) for a, b in pairs) / max(sum(len(a | b) for a, b in pairs), 1)


def positions(said: dict[str, Any]) -> list[list[list[int]]]:
    """Kept positions of the prompt that an answer reports, by layer and KV head."""
    layers, heads, tokens = said["shape"]
    bits = np.frombuffer(b64decode(said["bits"]), np.uint8).reshape(layers, heads, -1)
    chosen = np.unpackbits(bits, axis=-1)[..., :tokens]
    return [[np.flatnonzero(head).tolist() for head in layer] for layer in chosen]


def kept(policy: str, prompt: list[int], expected: Generation) -> list[list[list[int]]]:
    """Positions of the prompt that the plain model has kept."""
    lists = expected.kept[0]
    if policy == "minicache":  # layers in pairs share the whole prompt
        return [[list(range(len(prompt)))] * len(layer) for layer in lists]
    if expected.restarted is None:
        return lists
    return [[[expected.restarted[i] for i in head] for head in layer] for layer in lists]
