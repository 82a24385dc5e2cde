"""The entries that a policy kept of one prompt, and the prompt's text by token."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Kept:
    """One prompt under one policy, as a server answered.

    Attributes:
        policy: name of the policy in the request.
        settings: name -> value of the parameters that are set.
        tokens: text of each of the N tokens; joined they are the prompt.
        held: bool [L, G, N], the prompt's positions that each list holds after the prefill.
        facts: `meta_info.kv_policy` of the answer, without the mask.
        answer: generated text.
    """

    policy: str
    settings: Mapping[str, str]
    tokens: tuple[str, ...]
    held: np.ndarray
    facts: Mapping[str, Any]
    answer: str

    @property
    def title(self) -> str:
        """The policy with its settings."""
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.policy} ({settings})" if settings else self.policy

    def shares(self, layer: int | None = None, head: int | None = None) -> np.ndarray:
        """Share of the lists that hold each position: float64 [N].

        Args:
            layer, head: restrict the lists to a layer, or to one KV head of it.
        """
        held = self.held if layer is None else self.held[layer : layer + 1]
        held = held if head is None else held[:, head : head + 1]
        return held.mean(axis=(0, 1))

    def as_map(self) -> dict[str, Any]:
        """The argument of `drawKeptMap` in kept_map.js."""
        layers, kv_heads, _ = self.held.shape
        bits = base64.b64encode(np.packbits(self.held, axis=-1).tobytes()).decode("ascii")
        return {
            "tokens": list(self.tokens),
            "layers": layers,
            "kv_heads": kv_heads,
            "bits": bits,
            "title": self.title,
        }


def unpacked(packed: Mapping[str, Any], prompt: int) -> np.ndarray:
    """The mask bool [L, G, N] from `{"shape": [L, G, N], "bits": base64}`, as a server sends it.

    Args:
        prompt: N, the number of tokens of the prompt.

    Raises:
        ValueError: `packed` is not of this form, or of another number of tokens.
    """
    try:
        layers, kv_heads, tokens = packed["shape"]
        if tokens != prompt:
            raise ValueError(f"it has {tokens} tokens instead of {prompt}")
        row = (tokens + 7) // 8
        raw = np.frombuffer(base64.b64decode(packed["bits"], validate=True), dtype=np.uint8)
        rows = raw.reshape(layers, kv_heads, row)
        return np.unpackbits(rows, axis=-1, count=tokens).astype(bool)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the mask of kept entries cannot be read: {error}") from None


def pieces(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """The text that each token adds; joined they are the whole text.

    A single token may decode to less than it adds (a leading space is lost, a character spans
    several tokens), so each is decoded after the one before it. If a character spans several
    tokens, its text is with the last one and the others are empty.

    Args:
        decode: function from token ids to text, special tokens included.
    """
    texts, context_start, start = [], 0, 0  # the text of ids[context_start:start] is known already
    for end in range(1, len(ids) + 1):
        context, text = decode(ids[context_start:start]), decode(ids[context_start:end])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(context) :])
        context_start, start = start, end
    return texts
