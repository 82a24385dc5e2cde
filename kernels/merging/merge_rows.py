"""Merging dropped entries into their receivers: weighted sums per receiver, in float64.

A link says that a dropped entry is merged into a receiver, with a weight; see `links`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kvpolicy.kernels.entries.rounding import largest
from kvpolicy.kernels.launch.arguments import check_axes, check_tensors, refused
from kvpolicy.kernels.merging.links import Links


def merge_rows(
    x: torch.Tensor, links: Links, own: torch.Tensor | None, divide: torch.Tensor | None
) -> torch.Tensor:
    """Keys or values of a layer after a merge.

    Receiver c becomes (own * x[c] + sum of weight * x[source] over the links of c) / divide, if c
    has links, its divisor is finite and not 0, and no result is larger than the largest number of
    x's dtype, in which it is stored; else it stays x[c]. Sources are read from x as given.

    Args:
        x: [G, n, D] any float dtype, not changed.
        links: of G lists of n columns; offsets ascend from 0, links from offsets[n] on are ignored.
        own: [G, n] float64, weight of each receiver itself; None: 1.
        divide: [G, n] float64; None: the sum of own and the weights of the links of c.

    Returns:
        [G, n, D] float64.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check_rows(x, links, own, divide)
    sources, weights, offsets = links
    if divide is None:
        divide = merge_mass(links, own)
    result = x.double()
    result = result.clone() if result is x else result
    for head, rows in enumerate(result):
        receivers, number = _receivers(offsets[head])
        total = torch.zeros_like(rows)
        terms = rows[sources[head, :number]] * weights[head, :number, None]
        total.index_add_(0, receivers, terms)
        numerator = (rows if own is None else rows * own[head, :, None]) + total
        divisor = divide[head, :, None]
        merged = numerator / divisor
        changed = (offsets[head].diff() > 0)[:, None] & (divisor != 0) & divisor.isfinite()
        changed &= (merged.abs() <= largest(x.dtype)).all(-1, keepdim=True)
        result[head] = torch.where(changed, merged, rows)
    return result


def merge_mass(links: Links, own: torch.Tensor | None) -> torch.Tensor:
    """The sum of the own weight and the weights of the links, for each receiver.

    Args:
        links, own: as of `merge_rows`.

    Returns:
        [G, n] float64.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check_links(links, own)
    _, weights, offsets = links
    total = weights.new_ones(len(offsets), offsets.shape[1] - 1) if own is None else own.clone()
    for head, mass in enumerate(total):
        receivers, number = _receivers(offsets[head])
        mass.index_add_(0, receivers, weights[head, :number])
    return total


def members(links: Links) -> torch.Tensor:
    """Number of entries merged in each receiver, itself included.

    Args:
        links: as of `merge_rows`.

    Returns:
        [G, n] float64.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check_links(links, None)
    return 1.0 + links[2].diff().double()


def _receivers(offsets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The receiver of each link of a head, and the number of the head's links."""
    receivers = torch.arange(offsets.numel() - 1, device=offsets.device)
    return receivers.repeat_interleave(offsets.diff()), int(offsets[-1])


def check_rows(
    x: torch.Tensor, links: Links, own: torch.Tensor | None, divide: torch.Tensor | None
) -> None:
    """Refuse tensors that do not fit together; read none."""
    if x.ndim != 3 or not x.is_floating_point():
        raise refused("x", x, "floats [G, n, D]")
    check_sums(links, own, divide, x.shape[:2])


def check_sums(
    links: Links, own: torch.Tensor | None, divide: torch.Tensor | None, lists: Sequence[int]
) -> None:
    """Refuse links, weights and divisors that do not fit `lists`, (G, n); read no tensor."""
    heads, tokens = lists
    check_links(links, None)
    check_tensors([
        ("offsets", links[2], torch.int32, (heads, tokens + 1)),
        ("own", own, torch.float64, lists),
        ("divide", divide, torch.float64, lists),
    ])  # fmt: skip


def check_links(links: Links, own: torch.Tensor | None) -> None:
    """Refuse links that do not fit together, or not the own weights; read no tensor."""
    sources, weights, offsets = links
    check_axes("weights", weights, torch.float64, "[G, K]")
    if offsets.dtype != torch.int32 or offsets.ndim != 2 or not offsets.shape[1]:
        raise refused("offsets", offsets, "int32 [G, n + 1]")
    heads, tokens = len(offsets), offsets.shape[1] - 1
    check_tensors([
        ("sources", sources, torch.int64, weights.shape),
        ("weights", weights, torch.float64, (heads, weights.shape[1])),
        ("own", own, torch.float64, (heads, tokens)),
    ])  # fmt: skip
