"""The memory that a request held, from the server's answer. L layers, G KV heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpolicy.dsl.bind.model_config import read_config


def lists_of(model: str | Path) -> int:
    """L * G of the model in a checkpoint's folder: the number of entries of one token."""
    shape = read_config(model).shape
    return shape.layers * shape.kv_heads


def held(answer: dict[str, Any], lists: int) -> float:
    """Share of all entries held after the last token; of the prompt's bytes if layers share them.

    Args:
        answer: answer of /generate to a request with a policy.
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
    """Share of the prompt's entries that a policy kept; 1 if the prompt was served in full.

    Args:
        facts: `meta_info.kv_policy` of an answer.
    """
    if "entries_kept" not in facts:
        return 1.0
    return facts["entries_kept"] / facts["entries_before"]
