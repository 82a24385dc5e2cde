"""Which positions of a prompt every list holds, for clients that ask (`kv_policy_kept`)."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from kvpolicy.sglang_ext.face.asked import KEPT, shown

NOT_IN_STAGES = (
    f"custom_params.{KEPT}: with --pp-size a server cannot say which positions `{{}}` keeps, "
    "because it compares layers: each stage knows those of its own layers"
)


def wanted(asked: Mapping[str, Any]) -> bool:
    """Whether a request asks which positions are kept.

    Args:
        asked: what it asks of policies.

    Raises:
        ValueError: the value is neither true nor false; the message is for the client.
    """
    value = asked.get(KEPT, False)
    if not isinstance(value, bool):
        raise ValueError(f"custom_params.{KEPT} is {shown(value)}; expected true or false")
    return value


def described(kept: torch.Tensor, positions: torch.Tensor | None, prompt: int) -> dict[str, Any]:
    """What an answer says of kept positions; the host waits for the device.

    Args:
        kept: [L, G, n] bool of n tokens.
        positions: [n] int64, their positions in the prompt, ascending; None: 0 to N - 1.
        prompt: N.

    Returns:
        `shape` [L, G, N], and `bits`: base64 of the bits, each list's padded to whole bytes.
    """
    if positions is not None:
        prompt_kept = kept.new_zeros((*kept.shape[:2], prompt))
        prompt_kept[:, :, positions] = kept
        kept = prompt_kept
    return _packed(kept.cpu().numpy())


def everything(layers: int, kv_heads: int, prompt: int) -> dict[str, Any]:
    """What an answer says of a prompt of N tokens that is held in full, as `described` does."""
    return _packed(np.ones((layers, kv_heads, prompt), dtype=bool))


def _packed(kept: np.ndarray) -> dict[str, Any]:
    bits = np.packbits(kept, axis=-1)
    return {"shape": list(kept.shape), "bits": b64encode(bits.tobytes()).decode("ascii")}
