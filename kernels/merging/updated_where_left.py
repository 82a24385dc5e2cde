"""States of a merge, a number per list, which advance in layers whose entries have left."""

from __future__ import annotations

import torch
from kvpolicy.kernels.launch.arguments import check_axes, check_tensors


def updated_where_left(
    new: torch.Tensor, old: torch.Tensor, present: torch.Tensor, kv_heads: int
) -> torch.Tensor:
    """For each of R lists, the new number if an entry has left its layer, else the old one.

    Args:
        new, old: float64 [R].
        present: bool [R, P], entries that have left.
        kv_heads: G, consecutive lists of a layer.

    Returns:
        float64 [R].

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(new, old, present, kv_heads)
    layers, width = len(present) // kv_heads, present.shape[1]
    has_left = present.reshape(layers, kv_heads * width).any(1)
    return torch.where(has_left.repeat_interleave(kv_heads), new, old)


def check(new: torch.Tensor, old: torch.Tensor, present: torch.Tensor, kv_heads: int) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    check_axes("present", present, torch.bool, "[R, P]")
    lists = (len(present),)
    check_tensors([("new", new, torch.float64, lists), ("old", old, torch.float64, lists)])
    if kv_heads < 1 or len(present) % kv_heads:
        raise ValueError(f"kv_heads: expected a part of {len(present)}, got {kv_heads}")
