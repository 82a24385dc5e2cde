"""What packages that know pages, but no lists per KV head, need of `paged_attention`'s arguments.

A list of entries of one KV head is to them a sequence of pages of one token with a single KV head:
B requests with G KV heads become B * G sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from kvpolicy.kernels.attention.paged_attention import Apart, check

# From q [B, 1, H, D], keys and values [E, D] to [B, 1, H, D].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def check_lists(
    package: str,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    apart: Apart,
) -> int:
    """G, the number of KV heads.

    Args:
        package: its name, for messages.

    Raises:
        ValueError: as the reference; or more than one token per request, values in lists of their
            own, scales, or keys and values of another dtype than q.
    """
    groups = check(q, keys, values, indptr, indices, apart)
    for name, tensor in apart._asdict().items():
        if tensor is not None:
            raise ValueError(f"{name}: {package} reads keys and values as they lie, in one list")
    if keys.dtype != q.dtype or values.dtype != q.dtype:
        raise ValueError(f"keys: {package} reads {q.dtype} here, got {keys.dtype}")
    if q.shape[1] != 1:
        raise ValueError(f"q: {package} decodes 1 token per request, got {q.shape[1]}")
    return groups


def pages_of_one(
    package: str, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [E, D] as [E', 1, 1, D]: pages of one token, one KV head.

    Both must be equally long; entries whose value lies beyond the last one are in no list.

    Raises:
        ValueError: there are more entries than an int32 can number.
    """
    entries = min(keys.shape[0], values.shape[0])
    if entries > 2**31:
        raise ValueError(f"keys: {package} numbers pages in int32, got {entries} entries")
    shape = (entries, 1, 1, keys.shape[1])
    return keys[:entries].view(shape), values[:entries].view(shape)
