"""Settings that make the shipped policies comparable."""

from __future__ import annotations

WINDOW = "window=8"


def settings(share: float, tokens: int) -> dict[str, list[str]]:
    """Settings with which each policy holds about `share` of a prompt of `tokens`, by policy.

    Policies without such a share have fixed settings: a threshold that makes all layers lazy, few
    generated tokens, PyramidInfer's shares by layer.
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
        "chunkkv": plain,
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
        "vatp-snapkv": plain,
        "tova": rate,
        "keydiff": rate,
        "d2o": rate,
        "d2o-code": rate,
        "simlayerkv": ["threshold=0", f"window={count}"],
        "cam": ends,
        "cam-original": [f"recent_rate={share / 2}"],
        "roco": ["capacity=16", "newest=4"],
        "minicache": ["start=0"],
    }
