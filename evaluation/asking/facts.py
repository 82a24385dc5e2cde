"""What an answer of a server says of the memory that its request held. L layers, G KV heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpolicy.dsl.bind.model_config import read_config


def lists_of(model: str | Path) -> int:
    """L * G of a checkpoint's folder: entries of one token."""
    shape = read_config(model).shape
    return shape.layers * shape.kv_heads


def held(answer: dict[str, Any], lists: int) -> float:
    """Share of the entries (of the bytes, where layers share them) held after the last token.

    Args:
        answer: of /generate, to a request that a policy applied to.
        lists: L * G.
    """
    meta = answer["meta_info"]
    facts = meta["kv_policy"]
    if facts.get("kv_bytes_after") and facts["entries_kept"] == facts["entries_before"]:
        return facts["kv_bytes_after"] / facts["kv_bytes_before"]
    prompt = lists * meta["prompt_tokens"]
    generated = lists * (meta["completion_tokens"] - 1)
    kept = facts.get("entries_kept", prompt) - facts.get("entries_dropped_in_decode", 0)
    return (kept + generated) / (prompt + generated)


def kept_share(facts: dict[str, Any]) -> float:
    """Share of the prompt's entries that a policy left; 1 where it was served in full."""
    if "entries_kept" not in facts:
        return 1.0
    return facts["entries_kept"] / facts["entries_before"]
