"""States of a merge, a number per list, which advance in layers whose entries have left."""

from __future__ import annotations

import torch
from kvpolicy.kernels.launch.arguments import check_tensors


def updated(new: torch.Tensor, old: torch.Tensor, there: torch.Tensor, group: int) -> torch.Tensor:
    """For each of R lists, the new number if an entry has left its layer, else the old one.

    Args:
        new, old: float64 [R].
        there: bool [R, P], entries that have left.
        group: G, consecutive lists of a layer.

    Returns:
        float64 [R].

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(new, old, there, group)
    left = there.view(-1, group * there.shape[1]).any(1) if there.numel() else there.any(1)[::group]
    return torch.where(left.repeat_interleave(group), new, old)


def check(new: torch.Tensor, old: torch.Tensor, there: torch.Tensor, group: int) -> None:
    """Refuse wrong shapes and dtypes; read no tensor.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    if there.dtype != torch.bool or there.dim() != 2:
        raise ValueError(f"there: expected bool [R, P], got {there.dtype} {list(there.shape)}")
    lists = (len(there),)
    check_tensors([("new", new, torch.float64, lists), ("old", old, torch.float64, lists)])
    if group < 1 or len(there) % group:
        raise ValueError(f"group: expected a part of {len(there)}, got {group}")
