"""The entries that a policy kept, as lines for a terminal, or for a pipe without colours."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
from kvpolicy.dsl.tools.units import share_text, size_text
from kvpolicy.evaluation.looking.kept import Kept

# Levels of the share of lists that hold a token.
NONE, SOME, MOST, ALL = range(4)
_NAMES = ("by none", "by some", "by half or more", "by all")
# Weight instead of colour: readable on light and dark terminals, and by colour-blind people.
_ANSI = ("\x1b[2;9m", "", "\x1b[1m", "\x1b[1;4m")
_RESET = "\x1b[0m"
_MARKS = (("[-", "-]"), ("", ""), ("{", "}"), ("{+", "+}"))

# Longer runs of tokens of one level are cut to their two ends of `_ENDS` tokens.
_LONG = {NONE: 12, SOME: 160, MOST: 160, ALL: 160}
_ENDS = {NONE: 4, SOME: 60, MOST: 60, ALL: 60}


@dataclass(frozen=True)
class Style:
    """How to draw.

    Attributes:
        width: columns of a line.
        ansi: whether the terminal has bold and dim text.
        unicode: whether it shows block characters.
    """

    width: int
    ansi: bool
    unicode: bool

    @property
    def shades(self) -> str:
        """Characters from nothing held to everything held."""
        return " ░▒▓█" if self.unicode else " .:*#"

    @property
    def dots(self) -> str:
        """The mark for text that is left out."""
        return "…" if self.unicode else "..."


class Stretch(NamedTuple):
    """Neighbouring tokens [start, stop) of one level: NONE, SOME, MOST or ALL."""

    level: int
    start: int
    stop: int


def view(
    kept: Kept,
    style: Style,
    *,
    heads: bool = False,
    layer: int | None = None,
    head: int | None = None,
    whole: bool = False,
) -> Iterator[str]:
    """The lines of the whole view.

    Args:
        heads: add a line per KV head.
        layer, head: restrict the text to a layer, or to one KV head of it.
        whole: do not cut long runs of the text.
    """
    yield from summary(kept)
    yield ""
    yield from strips(kept, style, heads)
    yield ""
    shares = kept.shares(layer, head)
    yield _legend(style, layer, head)
    yield ""
    yield from text(kept.tokens, shares, style, whole).split("\n")


def summary(kept: Kept) -> Iterator[str]:
    """Policy, entries and bytes; or why the prompt was served in full."""
    facts, entries = kept.facts, kept.held.size
    held = int(kept.held.sum())
    line = f"{kept.title}: {kept.held.shape[2]:,} tokens, {held:,} of {entries:,} entries held"
    yield f"{line} ({share_text(held / entries, 1)})"
    if facts.get("uncompressed"):
        yield f"served in full: {facts['uncompressed']} ({REASONS.get(facts['uncompressed'], '')})"
        return
    bytes_before, bytes_after = facts["kv_bytes_before"], facts["kv_bytes_after"]
    yield (
        f"KV memory of the prompt: {size_text(bytes_after)} of {size_text(bytes_before)}; "
        f"{facts['slots_freed']:,} of {facts['prompt_tokens']:,} token slots freed"
    )
    if facts.get("selected_layer") is not None:
        reach = f"{facts.get('propagated_tokens', 0):,} tokens went to the last layer"
        yield f"{reach}; the first to leave left after layer {facts['selected_layer']}"


SHOWN = ("kv_bytes_before", "kv_bytes_after", "slots_freed", "prompt_tokens")
"""Facts about a compressed prompt that `summary` shows."""

# Why a prompt was served in full; docs/operators.md has the same table.
REASONS = {
    "short_prompt": "the budget holds the whole prompt",
    "decode_only": "the policy lets nothing leave before the first decode step",
    "nothing_dropped": "the scores kept everything",
    "nothing_saved": "layers stored in pairs would take as many slots as the prompt",
    "no_slots": "there was no room for the compressed copy beside the prompt",
    "not_finite": "the prompt's queries, keys or values hold NaN or infinity",
    "one_token": "nothing is decoded after the prefill",
    "too_long": "data decide the layer, and the prompt is longer than one piece may be",
    "policy_error": "the policy failed in its work for this request; the server's log says where",
    "policy_disabled": "the policy has failed too often and is switched off",
}


def strips(kept: Kept, style: Style, heads: bool) -> Iterator[str]:
    """A line per layer (and per KV head): a bar of the share held, the share, and a map of it."""
    layers, kv_heads, tokens = kept.held.shape
    names = [f"{layer}" for layer in range(layers)]
    names += [f"{layers - 1}.{kv_heads - 1}"] if heads else []
    label = max(len("layer"), *map(len, names))
    margin = label + 1 + 8 + 1 + 7 + 2
    room = max(10, style.width - margin - 1)
    axis = f"positions 0 to {tokens - 1:,}"
    yield f"{'layer':<{label}} {'held':>16}  {axis}"
    for layer in range(layers):
        yield _line(f"{layer}", label, kept.held[layer], room, style)
        for head in range(kv_heads if heads else 0):
            yield _line(f"{layer}.{head}", label, kept.held[layer, head : head + 1], room, style)


def _line(name: str, label: int, held: np.ndarray, room: int, style: Style) -> str:
    """One line for [lists, N] bool."""
    share = float(held.mean())
    first, last = "▏▕" if style.unicode else "||"
    strip = "".join(
        style.shades[level(bin_share, 5)] for bin_share in binned(held.mean(axis=0), room)
    )
    return f"{name:>{label}} {bar(share, 8, style)} {share_text(share, 1):>7} {first}{strip}{last}"


def binned(shares: np.ndarray, room: int) -> np.ndarray:
    """Means of [N] shares over at most `room` ranges of positions of nearly equal length."""
    count = min(room, len(shares))
    edges = np.arange(count) * len(shares) // count
    return np.add.reduceat(shares, edges) / np.diff([*edges, len(shares)])


def level(share: float, levels: int) -> int:
    """Level of a share: 0 for nothing, `levels - 1` for everything, and equal steps between."""
    if share <= 0:
        return 0
    return levels - 1 if share >= 1 else 1 + min(levels - 3, int(share * (levels - 2)))


def bar(share: float, width: int, style: Style) -> str:
    """A share as a bar, padded to `width` columns."""
    if not style.unicode:
        return ("#" * round(share * width)).ljust(width, ".")
    eighths = round(share * width * 8)
    return ("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()).ljust(width)


def text(tokens: Sequence[str], shares: np.ndarray, style: Style, whole: bool = False) -> str:
    """The prompt, each token marked by the share of lists that hold it, with long runs cut."""
    parts = []
    for run in runs(shares):
        pieces, length = tokens[run.start : run.stop], run.stop - run.start
        if whole or length <= _LONG[run.level]:
            parts.append(_marked("".join(pieces), run.level, style))
            continue
        ends = _ENDS[run.level]
        label = "dropped" if run.level == NONE else f"held {_NAMES[run.level]}"
        cut = f" [{style.dots} {length - 2 * ends:,} {label} {style.dots}] "
        first, last = "".join(pieces[:ends]), "".join(pieces[-ends:])
        parts.append(_marked(first, run.level, style) + cut + _marked(last, run.level, style))
    return "".join(parts)


def runs(shares: np.ndarray) -> Iterator[Stretch]:
    """Runs of neighbouring tokens of one level, in order."""
    start = 0
    for run_level, group in groupby(shares.tolist(), _word):
        stop = start + sum(1 for _ in group)
        yield Stretch(run_level, start, stop)
        start = stop


def _word(share: float) -> int:
    if share <= 0:
        return NONE
    return ALL if share >= 1 else MOST if share >= 0.5 else SOME


def _marked(words: str, level: int, style: Style) -> str:
    """A run with its weight or its marks around each line."""
    if not words:
        return ""
    opening, closing = (_ANSI[level], _RESET if level != SOME else "")
    if not style.ansi:
        opening, closing = _MARKS[level]
    lines = printable(words).split("\n")
    return "\n".join(f"{opening}{line}{closing}" if line else line for line in lines)


def printable(words: str) -> str:
    """Text that cannot control the terminal: control characters are escaped."""
    safe = "\n\t"
    return "".join(
        c if c in safe or not unicodedata.category(c).startswith("C") else f"\\x{ord(c):02x}"
        for c in words
    )


def _legend(style: Style, layer: int | None, head: int | None) -> str:
    """The legend of the marks in the text."""
    if head is not None:
        words = {NONE: "dropped", ALL: "held"}
        return f"text, by layer {layer}, KV head {head}: " + _samples(words, style)
    lists = "all lists" if layer is None else f"the lists of layer {layer}"
    return f"text, by {lists}: held " + _samples(dict(enumerate(_NAMES)), style)


def _samples(words: Mapping[int, str], style: Style) -> str:
    return ", ".join(_marked(name, level, style) for level, name in words.items())
