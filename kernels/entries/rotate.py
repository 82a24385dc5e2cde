"""Move rotary-embedded keys to later positions."""

from __future__ import annotations

import torch
from kvpolicy.kernels.entries.rounding import movable, rounded


def rotate(
    k: torch.Tensor, shift: torch.Tensor, inv_freq: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """Keys as if they stood `shift` positions later (RoPE, arXiv:2104.09864, equation 34).

    A pair (a, b) of dimensions becomes (a cos x - b sin x, a sin x + b cos x), where x is
    shift * inv_freq of the pair.

    Args:
        k: [..., M, D] any float dtype, after RoPE.
        shift: [..., M] int64 positions; negative moves back.
        inv_freq: [R / 2] radians per position of each pair; R is at most D and the dimensions from
            R on do not turn.
        interleaved: pairs are (2i, 2i + 1); otherwise (i, i + R / 2).

    Returns:
        [..., M, D], dtype of k, computed in float64 and rounded once; a row of shift 0 is
        unchanged.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    pairs = check(k, shift, inv_freq)
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    angle = shift.unsqueeze(-1).double() * inv_freq.double()
    cos, sin = angle.cos(), angle.sin()
    a, b = k[..., first].double(), k[..., second].double()
    out = k.clone()
    out[..., first] = rounded(a * cos - b * sin, k.dtype)
    out[..., second] = rounded(a * sin + b * cos, k.dtype)
    unshifted = (shift == 0).unsqueeze(-1)
    return torch.where(unshifted, movable(k), movable(out)).view(k.dtype)


def check(k: torch.Tensor, shift: torch.Tensor, inv_freq: torch.Tensor) -> int:
    """Refuse wrong shapes; read no values.

    Returns:
        R / 2.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    if k.dim() < 2:
        raise ValueError(f"k: expected [..., M, D], got {list(k.shape)}")
    if shift.shape != k.shape[:-1]:
        raise ValueError(f"shift: expected {list(k.shape[:-1])}, got {list(shift.shape)}")
    pairs, size = inv_freq.shape[0], k.shape[-1]
    if inv_freq.dim() != 1 or 2 * pairs > size:
        raise ValueError(f"inv_freq: expected [<= {size // 2}], got {list(inv_freq.shape)}")
    return pairs
