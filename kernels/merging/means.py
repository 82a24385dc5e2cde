"""Means over the entries that a layer's KV heads drop, the same bits whatever others drop."""

from __future__ import annotations

import torch
from kvpolicy.kernels.launch.arguments import check_axes, check_tensors

LANES = 256  # partial sums, which are added up last, whatever the width


def means(x: torch.Tensor, present: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """For each of R lists, the mean of the numbers of all lists of its layer.

    Args:
        x: float64 [R, P].
        present: bool [R, P], which numbers count; the others are ignored.
        kv_heads: G, consecutive lists of a layer.

    Returns:
        float64 [R], equal for the lists of a layer; 0 of no numbers, and where the mean is NaN. The
        order in which numbers are added depends on their columns only, not on P.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(x, present, kv_heads)
    layers, width = len(x) // kv_heads, x.shape[1]
    numbers = torch.nn.functional.pad(torch.where(present, x, 0.0), (0, -width % LANES))
    total = x.new_zeros(layers, LANES)
    for tile in numbers.view(layers, kv_heads * numbers.shape[1] // LANES, LANES).unbind(1):
        total = total + tile
    count = present.reshape(layers, kv_heads * width).sum(1)
    mean = total.sum(1) / count
    return torch.where(mean.isnan(), 0.0, mean).repeat_interleave(kv_heads)


def means_of_columns(x: torch.Tensor, present: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """For each of R lists and each column, the mean of the numbers of all lists of its layer.

    Args:
        x, present, kv_heads: as of `means`.

    Returns:
        float64 [R, P], equal for the lists of a layer; 0 of no numbers, and where the mean is NaN.
        Numbers are added in the order of the lists.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(x, present, kv_heads)
    shape = (len(x) // kv_heads, kv_heads, x.shape[1])
    total = x.new_zeros(shape[0], shape[2])
    for numbers in torch.where(present, x, 0.0).view(shape).unbind(1):
        total = total + numbers
    mean = total / present.view(shape).sum(1)
    return torch.where(mean.isnan(), 0.0, mean).repeat_interleave(kv_heads, 0)


def check(x: torch.Tensor, present: torch.Tensor, kv_heads: int) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    check_axes("x", x, torch.float64, "[R, P]")
    check_tensors([("present", present, torch.bool, x.shape)])
    if kv_heads < 1 or len(x) % kv_heads:
        raise ValueError(f"kv_heads: expected a part of {len(x)}, got {kv_heads}")
