"""How private pages hold two layers that store one direction per token.

The lists of such a pair of layers at a KV head are one list of pages, shared by both, of a prompt
of N tokens:

rows 0 .. K - 1        codes of the lower layer, K = ceil(N / F)
rows K .. 2K - 1       codes of the upper layer
row 2K + t, t < N      what both layers have of token t: a direction, or the upper layer's original
row 2K + N + r         the lower layer's original of the r-th token that the direction leaves out

A row is an entry: D numbers of a key and, elsewhere, D of its value. A row of codes is read as F
numbers of float32, those of the keys in the key's place and those of the values in the value's. The
code of a token at a layer is the number by which its row is multiplied; or, below zero, minus the
place behind the codes at which its original stands, as it is. Places are exact up to 2^24 tokens.
"""

from __future__ import annotations

from typing import TypeVar

import torch

_Count = TypeVar("_Count", int, torch.Tensor)

BELOW, OWN = 0, 1  # the lower layer of a pair, and the upper one, which a policy calls its own


def floats_of_row(size: int, dtype: torch.dtype) -> int:
    """F of rows of so many numbers.

    Raises:
        ValueError: rows are no whole number of float32.
    """
    floats, rest = divmod(size * dtype.itemsize, 4)
    if rest:
        raise ValueError(
            f"storage: expected rows of whole float32 for layers in pairs, got {size} of {dtype}"
        )
    return floats


def code_rows(tokens: _Count, floats: int) -> _Count:
    """K, rows of codes of one layer."""
    return -(-tokens // floats)


def numbers(storage: torch.Tensor) -> torch.Tensor:
    """float32 [E, F], the rows of a pool [L, 2, slots, G, D] read as codes."""
    floats = floats_of_row(storage.shape[4], storage.dtype)
    return storage.view(-1).view(torch.float32).view(-1, floats)


def encode(scales: torch.Tensor, excepted: torch.Tensor) -> torch.Tensor:
    """Codes of both layers.

    Args:
        scales: float32 [2, G, N] of (lower, upper), not below 0.
        excepted: bool [G, N], tokens of which both originals stand.

    Returns:
        float32 [2, G, N]
    """
    tokens = excepted.shape[1]
    lower = (1 - tokens - excepted.cumsum(dim=1)).to(scales.dtype)
    codes = scales.masked_fill(excepted, 1.0)
    return torch.stack([torch.where(excepted, lower, codes[BELOW]), codes[OWN]])


def rows_of(codes: torch.Tensor, floats: int) -> torch.Tensor:
    """float32 [G, 2K, F], the rows in which codes [2, G, N] stand; what is left over is 0."""
    both, heads, tokens = codes.shape
    rows = code_rows(tokens, floats)
    padded = torch.nn.functional.pad(codes, (0, rows * floats - tokens))
    return padded.view(both, heads, rows, floats).transpose(0, 1).reshape(heads, -1, floats)


def decode(codes: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What codes say.

    Args:
        codes: float32 [...].
        tokens: int64 [...], whose they are.

    Returns:
        int64 [...] places behind the codes, and float32 [...] by which their rows are multiplied.
    """
    original = codes < 0
    return torch.where(original, -codes.long(), tokens), codes.masked_fill(original, 1.0)
