"""How private pages hold two layers that store one direction per token.

Such a pair of layers shares one list per KV head. For a prompt of N tokens it has

rows 0 .. K - 1        codes of the lower layer, K = ceil(N / F)
rows K .. 2K - 1       codes of the upper layer
row 2K + t, t < N      token t: the direction of both layers, or the upper layer's original vector
row 2K + N + r         the lower layer's original vector of the r-th excepted token, r from 0

A row is an entry: D numbers of a key and, elsewhere, D of its value. A row of codes is read as F
float32, codes of keys in place of the key and codes of values in place of the value. A token's code
at a layer is the length by which its row is multiplied; or, if negative, minus the place of its
original, counted from row 2K, which is not multiplied. float32 has exact places up to 2^24.
"""

from __future__ import annotations

from typing import TypeVar

import torch

_Count = TypeVar("_Count", int, torch.Tensor)

BELOW, OWN = 0, 1  # the lower layer of a pair, `below` in a policy, and the upper, `own`


def floats_of_row(size: int, dtype: torch.dtype) -> int:
    """F, float32 numbers that a row of `size` numbers of the dtype holds.

    Raises:
        ValueError: a row is no whole number of float32.
    """
    floats, rest = divmod(size * dtype.itemsize, 4)
    if rest:
        raise ValueError(
            f"storage: expected rows of whole float32 for layers in pairs, got {size} of {dtype}"
        )
    return floats


def code_rows(tokens: _Count, floats: int) -> _Count:
    """K, rows of codes of one layer for N tokens."""
    return -(-tokens // floats)


def numbers(storage: torch.Tensor) -> torch.Tensor:
    """float32 [E, F], the rows of a pool [L, 2, slots, G, D] read as codes."""
    floats = floats_of_row(storage.shape[4], storage.dtype)
    return storage.view(-1).view(torch.float32).view(-1, floats)


def encode(scales: torch.Tensor, excepted: torch.Tensor) -> torch.Tensor:
    """Codes of both layers.

    Args:
        scales: float32 [2, G, N], lengths in the lower and the upper layer, not negative.
        excepted: bool [G, N], tokens that keep both original vectors.

    Returns:
        float32 [2, G, N], codes in the lower and the upper layer.
    """
    tokens = excepted.shape[1]
    lower = (1 - tokens - excepted.cumsum(dim=1)).to(scales.dtype)
    codes = scales.masked_fill(excepted, 1.0)
    return torch.stack([torch.where(excepted, lower, codes[BELOW]), codes[OWN]])


def rows_of(codes: torch.Tensor, floats: int) -> torch.Tensor:
    """float32 [G, 2K, F], rows that hold codes [2, G, N], padded with 0."""
    layers, heads, tokens = codes.shape
    rows = code_rows(tokens, floats)
    padded = torch.nn.functional.pad(codes, (0, rows * floats - tokens))
    return padded.view(layers, heads, rows, floats).transpose(0, 1).reshape(heads, -1, floats)


def decode(codes: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Places and factors that codes stand for.

    Args:
        codes: float32 [...].
        tokens: int64 [...], the token of each code.

    Returns:
        int64 [...] places, counted from row 2K; float32 [...] factors of the rows there.
    """
    original = codes < 0
    return torch.where(original, -codes.long(), tokens), codes.masked_fill(original, 1.0)
