"""The shipped policies with settings that make them comparable, and what their requests hold."""

from __future__ import annotations

import json
from pathlib import Path

WINDOW = "window=8"


def settings(share: float, tokens: int) -> dict[str, list[str]]:
    """Settings with which each policy holds about `share` of a prompt of `tokens`, by policy.

    Policies that decide what to keep by other means have settings of their own: a threshold by
    which all layers are lazy, few generated tokens, PyramidInfer's shares by layer.
    """
    count = int(share * tokens)
    plain = [f"capacity={count}", WINDOW]
    ends = [f"window={count - 4}"]
    rate = [f"rate={share}"]
    return {
        "snapkv": plain,
        "adakv": plain,
        "pyramidkv": plain,
        "ada-pyramidkv": plain,
        "lava": plain,
        "dynamickv": plain,
        "cake": [*rate, WINDOW],
        "sinks-recent": plain[:1],
        "simlayerkv-prefill": ["threshold=0", f"window={count}"],
        "fastkv": [f"kv_rate={share}"],
        "fastkv-adakv": [f"kv_rate={share}"],
        "asl": plain,
        "asl-lava-d2o": plain,
        "gemfilter": plain[:1],
        "pyramidinfer": ["floor_rate=0.3", "recent_rate=0.05"],
        "streamingllm": ends,
        "streamingllm-original": ends,
        "h2o": rate,
        "vatp": [f"rate={share / 2}"],
        "tova": rate,
        "d2o": rate,
        "d2o-code": rate,
        "simlayerkv": ["threshold=0", f"window={count}"],
        "cam": ends,
        "roco": ["capacity=16", "newest=4"],
        "minicache": ["start=0"],
    }


def lists_of(model: str) -> int:
    """L * G of a checkpoint folder: entries of one token."""
    config = json.loads(Path(model, "config.json").read_text())
    return config["num_hidden_layers"] * config["num_key_value_heads"]


def held(answer: dict, lists: int) -> float:
    """Share of the entries (of the bytes, where layers share them) held after the last token."""
    meta = answer["meta_info"]
    facts = meta["kv_policy"]
    if facts.get("kv_bytes_after") and facts["entries_kept"] == facts["entries_before"]:
        return facts["kv_bytes_after"] / facts["kv_bytes_before"]
    prompt = lists * meta["prompt_tokens"]
    generated = lists * (meta["completion_tokens"] - 1)
    kept = facts.get("entries_kept", prompt) - facts.get("entries_dropped_in_decode", 0)
    return (kept + generated) / (prompt + generated)
