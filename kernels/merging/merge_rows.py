"""What dropped entries add to their receivers: weighted sums per receiver, in float64.

A link says that a dropped entry is merged into a receiver, with a weight. The links of a KV head
are listed by receiver: those of receiver c stand at offsets[c] to offsets[c + 1].
"""

from __future__ import annotations

import torch


def merge_rows(
    x: torch.Tensor,
    sources: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    own: torch.Tensor,
    divide: torch.Tensor,
) -> torch.Tensor:
    """Keys or values of a layer after a merge.

    (own * x[c] + sum of weight * x[source] over the links of c) / divide where c has links, its
    divisor is neither 0 nor infinite nor NaN, and no number before the division is infinite or NaN;
    x[c] elsewhere. All reads precede all writes.

    Args:
        x: [G, n, D] any float dtype, not changed.
        sources: [G, K] int64, the dropped entry of each link.
        weights: [G, K] float64.
        offsets: [G, n + 1] int32, ascending from 0; links from offsets[n] on mean nothing.
        own, divide: [G, n] float64.

    Returns:
        [G, n, D] float64.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check_rows(x, sources, weights, offsets, own, divide)
    result = x.double()
    result = result.clone() if result is x else result
    for head, rows in enumerate(result):
        receivers, number = _receivers(offsets[head])
        total = torch.zeros_like(rows)
        added = rows[sources[head, :number]] * weights[head, :number, None]
        total.index_add_(0, receivers, added)
        made = rows * own[head, :, None] + total
        by = divide[head, :, None]
        changed = (offsets[head].diff() > 0)[:, None] & (by != 0) & by.isfinite()
        changed &= made.isfinite().all(-1, keepdim=True)
        result[head] = torch.where(changed, made / by, rows)
    return result


def merge_mass(weights: torch.Tensor, offsets: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Own weight and the weights of its links, of each receiver.

    Args:
        weights, offsets, own: as of `merge_rows`.

    Returns:
        [G, n] float64.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check_mass(weights, offsets, own)
    total = own.clone()
    for head, mass in enumerate(total):
        receivers, number = _receivers(offsets[head])
        mass.index_add_(0, receivers, weights[head, :number])
    return total


def _receivers(offsets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The receiver of each link of a head, and how many links it has."""
    receivers = torch.arange(offsets.numel() - 1, device=offsets.device)
    return receivers.repeat_interleave(offsets.diff()), int(offsets[-1])


def check_rows(
    x: torch.Tensor,
    sources: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    own: torch.Tensor,
    divide: torch.Tensor,
) -> None:
    """Raises ValueError for tensors that do not fit together."""
    if x.ndim != 3 or not x.is_floating_point():
        raise ValueError(f"x: expected floats [G, n, D], got {x.dtype} {list(x.shape)}")
    heads, tokens, _ = x.shape
    check_mass(weights, offsets, own)
    links = [heads, weights.shape[1]]
    _check("sources", sources, torch.int64, links)
    _check("own", own, torch.float64, [heads, tokens])
    _check("divide", divide, torch.float64, [heads, tokens])


def check_mass(weights: torch.Tensor, offsets: torch.Tensor, own: torch.Tensor) -> None:
    """Raises ValueError for tensors that do not fit together."""
    if own.ndim != 2:
        raise ValueError(f"own: expected [G, n], got {list(own.shape)}")
    heads, tokens = own.shape
    _check("own", own, torch.float64, [heads, tokens])
    _check("offsets", offsets, torch.int32, [heads, tokens + 1])
    if weights.ndim != 2:
        raise ValueError(f"weights: expected [{heads}, K], got {list(weights.shape)}")
    _check("weights", weights, torch.float64, [heads, weights.shape[1]])


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: list[int]) -> None:
    if tensor.dtype != dtype or list(tensor.shape) != shape:
        actual = f"{tensor.dtype} {list(tensor.shape)}"
        raise ValueError(f"{name}: expected {dtype} {shape}, got {actual}")
