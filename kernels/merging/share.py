"""Inner products and weighted sums of two layers' vectors, for layers stored in pairs.

Lengths, angle and cosine of two vectors need three inner products, and a direction between them is
a weighted sum. So a policy's expression reads the vectors twice, however long it is.
"""

from __future__ import annotations

import torch
from kvpolicy.kernels.launch.arguments import check_tensors, refused


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
    """Refuse tensors that do not fit together; read none."""
    if below.ndim != 3 or not below.is_floating_point():
        raise refused("below", below, "floats [G, N, D]")
    check_tensors([("own", own, below.dtype, below.shape)])
    pairs = zip("ab", weights, strict=False)
    check_tensors((name, x, torch.float64, below.shape[:2]) for name, x in pairs)
