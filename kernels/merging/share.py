"""Inner products and weighted sums of two layers' vectors, for layers stored in pairs.

Lengths, angle and cosine of two vectors need three inner products, and a direction between them is
a weighted sum. So a policy's expression reads the vectors twice, however long it is.
"""

from __future__ import annotations

import torch


def gram(below: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Inner products of the vectors of each pair.

    Args:
        below, own: [G, N, D] any float dtype, both the same; the first and second of each pair.

    Returns:
        [3, G, N] float64: `below` with itself, `below` with `own`, `own` with itself.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check(below, own)
    x, y = below.double(), own.double()
    return torch.stack([(x * x).sum(-1), (x * y).sum(-1), (y * y).sum(-1)])


def blend(below: torch.Tensor, own: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a * below + b * own, where a product or sum that is NaN counts as 0.

    Args:
        below, own: [G, N, D] any float dtype, both the same.
        a, b: [G, N] float64.

    Returns:
        [G, N, D] float64.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check(below, own, a, b)
    parts = (below.double() * a[..., None], own.double() * b[..., None])
    x, y = (torch.where(part.isnan(), 0.0, part) for part in parts)
    return torch.where((x + y).isnan(), 0.0, x + y)


def check(below: torch.Tensor, own: torch.Tensor, *weights: torch.Tensor) -> None:
    """Raise ValueError for tensors that do not fit together; read none."""
    if below.ndim != 3 or not below.is_floating_point():
        actual = f"{below.dtype} {list(below.shape)}"
        raise ValueError(f"below: expected floats [G, N, D], got {actual}")
    if own.shape != below.shape or own.dtype != below.dtype:
        expected = f"{below.dtype} {list(below.shape)}"
        raise ValueError(f"own: expected {expected}, got {own.dtype} {list(own.shape)}")
    for name, x in zip("ab", weights, strict=False):
        if x.shape != below.shape[:2] or x.dtype != torch.float64:
            expected = f"torch.float64 {list(below.shape[:2])}"
            raise ValueError(f"{name}: expected {expected}, got {x.dtype} {list(x.shape)}")
