"""For each dropped entry the kept one of the highest cosine, per KV head."""

from __future__ import annotations

import torch

# Cosines of one tile, so that no matrix of dropped by kept entries is held whole.
_TILE = 1 << 20


def nearest(
    x: torch.Tensor,
    dropped: torch.Tensor,
    dropped_count: torch.Tensor,
    kept: torch.Tensor,
    kept_count: torch.Tensor,
) -> torch.Tensor:
    """Which kept vector is most like each dropped one.

    Cosines are of unit vectors in float64, compared as float32; of equal ones the first in the
    list wins. The unit vector of zero, and of a vector with NaN or infinity, is zero.

    Args:
        x: [G, n, D] any float dtype. Rows in neither list are not read.
        dropped: [G, P] int64 places of dropped entries.
        dropped_count: [G] integers, how many of these there are; the rest means nothing.
        kept: [G, C] int64 places of kept entries.
        kept_count: [G] integers, as above.

    Returns:
        [G, P] int64: where in its head's list `kept` the nearest one stands; 0 beyond the dropped
        ones and where nothing is kept.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check(x, dropped, dropped_count, kept, kept_count)
    chosen = torch.zeros_like(dropped)
    numbers = zip(dropped_count.tolist(), kept_count.tolist(), strict=True)
    for head, (number, others) in enumerate(numbers):
        if not others:
            continue
        among = _unit(x[head, kept[head, :others]]).T
        rows = max(1, _TILE // others)
        for start in range(0, number, rows):
            part = slice(start, min(start + rows, number))
            match = (_unit(x[head, dropped[head, part]]) @ among).float()
            best = match == match.amax(-1, keepdim=True)
            order = torch.arange(others, device=x.device)
            chosen[head, part] = torch.where(best, order, others).amin(-1)
    return chosen


def _unit(rows: torch.Tensor) -> torch.Tensor:
    rows = rows.double()
    size = (rows * rows).sum(-1, keepdim=True).sqrt()
    return (rows / size).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def check(
    x: torch.Tensor,
    dropped: torch.Tensor,
    dropped_count: torch.Tensor,
    kept: torch.Tensor,
    kept_count: torch.Tensor,
) -> None:
    """Raises ValueError for tensors that do not fit together."""
    if x.ndim != 3 or not x.is_floating_point():
        raise ValueError(f"x: expected floats [G, n, D], got {x.dtype} {list(x.shape)}")
    heads = x.shape[0]
    for name, places in (("dropped", dropped), ("kept", kept)):
        if places.ndim != 2 or places.shape[0] != heads or places.dtype != torch.int64:
            actual = f"{places.dtype} {list(places.shape)}"
            raise ValueError(f"{name}: expected int64 [{heads}, *], got {actual}")
    for name, number in (("dropped_count", dropped_count), ("kept_count", kept_count)):
        if number.shape != (heads,) or number.is_floating_point():
            actual = f"{number.dtype} {list(number.shape)}"
            raise ValueError(f"{name}: expected integers [{heads}], got {actual}")
