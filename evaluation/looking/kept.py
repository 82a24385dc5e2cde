"""What a policy kept of one prompt, token by token, and the prompt's text in pieces."""

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
        policy: the name that was asked for.
        settings: values of its parameters that are not the file's.
        tokens: text of each of the N tokens; together they are the prompt.
        held: [L, G, N] bool: the prompt's positions that each list holds after the prefill.
        facts: `meta_info.kv_policy` of the answer, without the mask.
        answer: the text that was generated.
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
        """[N]: the share of lists that hold each position, of all, of a layer's or of one list."""
        held = self.held if layer is None else self.held[layer : layer + 1]
        held = held if head is None else held[:, head : head + 1]
        return held.mean(axis=(0, 1))

    def as_map(self, asked: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
        """What `drawKeptMap` of kept_map.js takes; `asked`: positions [start, stop) to point at."""
        layers, kv_heads, _ = self.held.shape
        bits = base64.b64encode(np.packbits(self.held, axis=-1).tobytes()).decode("ascii")
        return {
            "tokens": list(self.tokens),
            "layers": layers,
            "kv_heads": kv_heads,
            "bits": bits,
            "title": self.title,
            "asked": [list(each) for each in asked],
        }


def unpacked(packed: Mapping[str, Any]) -> np.ndarray:
    """[L, G, N] bool from `{"shape": [L, G, N], "bits": base64}`, as a server sends it.

    Raises:
        ValueError: it is not of this form.
    """
    try:
        layers, kv_heads, tokens = packed["shape"]
        row = (tokens + 7) // 8
        raw = np.frombuffer(base64.b64decode(packed["bits"], validate=True), dtype=np.uint8)
        rows = raw.reshape(layers, kv_heads, row)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the mask of kept entries cannot be read: {error}") from None
    return np.unpackbits(rows, axis=-1, count=tokens).astype(bool)


def pieces(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """The text that each token adds; together they are the text.

    A token alone may decode to less than it adds (a leading space is lost, a character spans
    several tokens), so each is decoded behind the one before it. Of a character in several tokens
    the last one has the text and the others are empty.

    Args:
        decode: from token ids to text, special tokens included.
    """
    found, before, start = [], 0, 0  # ids[before:start] is text that is known already
    for end in range(1, len(ids) + 1):
        known, text = decode(ids[before:start]), decode(ids[before:end])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            found.append("")
            continue
        found.append(text[len(known) :])
        before, start = start, end
    return found
