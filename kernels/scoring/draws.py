"""Pseudo-random numbers of entries by a hash: `uniform` of the language, many layers at once."""

from __future__ import annotations

import torch
from kvpolicy.kernels.launch.arguments import check_axes, refused

BITS = 0xFFFFFFFF
# Constants of the hash, which draws the same numbers in every execution of the language.
GOLDEN, FIRST, SECOND = 0x9E3779B9, 0x21F0AAAD, 0x735A2D97


def draws(
    seed: int, positions: torch.Tensor, generated: torch.Tensor, kv_heads: int, first: int = 0
) -> torch.Tensor:
    """Draw a number in [0, 1) for every entry, by seed, layer, KV head, position and step.

    Args:
        seed: any whole number.
        positions: int64 [S, M], S / N consecutive layers for each of N requests; -1 where there is
            no entry.
        generated: int64 [N], decode steps of each request so far, this one included.
        kv_heads: G, KV heads of a layer.
        first: index of the first of these layers in the model.

    Returns:
        float64 [S * G, M].

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(positions, generated, kv_heads)
    number, device = len(positions), positions.device
    layers = number // max(len(generated), 1)
    layer = torch.arange(number, device=device) % max(layers, 1) + first
    head = torch.arange(kv_heads, device=device)
    step = generated.repeat_interleave(layers)
    state = torch.full((), seed & BITS, dtype=torch.int64, device=device)
    parts = (layer[:, None, None], head[:, None], positions[:, None], step[:, None, None])
    for part in parts:
        # Both factors are below 2**31, so that no product leaves int64.
        state = (state + GOLDEN * (part + 1)) & BITS
        state = ((state ^ (state >> 16)) * FIRST) & BITS
        state = ((state ^ (state >> 15)) * SECOND) & BITS
        state = state ^ (state >> 15)
    return (state.double() / 2.0**32).flatten(0, 1)


def check(positions: torch.Tensor, generated: torch.Tensor, kv_heads: int) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    check_axes("positions", positions, torch.int64, "[S, M]")
    number = len(positions)
    fits = generated.dim() == 1 and len(generated) and number % len(generated) == 0
    if generated.dtype != torch.int64 or not fits:
        raise refused("generated", generated, f"int64 [N], N a part of {number}")
    if kv_heads < 1:
        raise ValueError(f"kv_heads: expected 1 or more, got {kv_heads}")
