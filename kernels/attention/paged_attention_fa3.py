"""`paged_attention` by FlashAttention 3, where a package with it is installed and asked for.

Each list is a sequence of its own (see `paged_attention_packages`), its ids a row of a page table
as wide as the longest list. The host asks for that length, so this is not for CUDA graphs;
`decode_readers` takes it where it was measured to be faster.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch
from kvpolicy.kernels.attention.paged_attention import TOGETHER, Apart
from kvpolicy.kernels.attention.paged_attention_packages import Attend, check_lists, pages_of_one

# The package that SGLang's `fa3` backend takes, then FlashAttention's own; both document one
# signature.
_PACKAGES = ("sgl_kernel.flash_attn", "flash_attn_interface")
_LARGEST, _MULTIPLE = 256, 8  # of head sizes


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    apart: Apart = TOGETHER,
) -> torch.Tensor:
    """As the reference, for one new token per request and entries that hold what they stand for.

    Raises:
        ValueError: as the reference; or FlashAttention 3 cannot do it: more than one token, values
            in lists of their own, scales, another dtype than fp16 or bf16, a head size above 256 or
            no multiple of 8, or more than 2^31 entries.
        ImportError: no package with FlashAttention 3 is installed.
        NotImplementedError: the package's own, on a GPU for which it was not built.
    """
    groups = check_lists("FlashAttention 3", q, keys, values, indptr, indices, apart)
    if q.numel() == 0:
        return torch.zeros_like(q)
    attend = plan(
        indptr, indices, heads=q.shape[2] // groups, size=q.shape[3], dtype=q.dtype, scale=scale
    )
    return attend(q, keys, values)


def plan(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    *,
    heads: int,
    size: int,
    dtype: torch.dtype,
    scale: float,
) -> Attend:
    """The page table of such lists; the result attends with any q, keys and values.

    Args:
        indptr, indices: as of `paged_attention`.
        heads: query heads per KV head.
        size: D.

    Raises:
        ValueError, ImportError, NotImplementedError: as `paged_attention`.
    """
    table, lengths = page_table(indptr, indices)
    return plan_table(table, lengths, heads=heads, size=size, dtype=dtype, scale=scale)


def plan_table(
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    heads: int,
    size: int,
    dtype: torch.dtype,
    scale: float,
) -> Attend:
    """As `plan`, with the lists as `page_table` writes them.

    Raises:
        ValueError, ImportError, NotImplementedError: as `paged_attention`.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"q: FlashAttention 3 decodes fp16 and bf16, got {dtype}")
    if size > _LARGEST or size % _MULTIPLE:
        raise ValueError(
            f"q: FlashAttention 3 decodes head sizes up to {_LARGEST} that are multiples of "
            f"{_MULTIPLE}, got {size}"
        )
    decode = package()

    def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        pool = pages_of_one("FlashAttention 3", keys, values)
        if not table.shape[1]:
            return torch.zeros_like(q)
        out = decode(
            q.reshape(-1, 1, heads, size),
            *pool,
            cache_seqlens=lengths,
            page_table=table,
            softmax_scale=scale,
            causal=True,  # as SGLang asks for it; one query sees all entries either way
        )
        return out.masked_fill((lengths == 0)[:, None, None, None], 0.0).view(q.shape)

    return attend


def page_table(indptr: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of each list as a row, and how many they are: int32 [lists, longest], int32 [lists].

    Behind its end a list repeats its first entry, and an empty one looks at the next list's, so
    that every number is one of an entry that exists. The host waits for the longest length.

    Args:
        indptr: [lists + 1] int64, perhaps a part of a longer one.
        indices: [nnz] int64.
    """
    lengths = indptr.diff()
    place = torch.arange(int(lengths.max()), device=indptr.device)
    at = indptr[:-1, None] + torch.where(place < lengths[:, None], place, 0)
    table = indices[at.clamp(max=max(indices.shape[0] - 1, 0))]
    return table.to(torch.int32), lengths.to(torch.int32)


@functools.lru_cache
def package() -> Callable[..., torch.Tensor]:
    """Its function for a paged cache.

    Raises:
        ImportError: says what to install.
    """
    for name in _PACKAGES:
        try:
            return importlib.import_module(name).flash_attn_with_kvcache
        except ImportError:
            continue
    raise ImportError(
        "paged attention by FlashAttention 3 needs the package sglang-kernel or flash-attn-3"
    )
