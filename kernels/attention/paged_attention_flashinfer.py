"""`paged_attention` by FlashInfer's paged decode, where FlashInfer is installed and asked for.

Each list is a sequence of its own (see `paged_attention_packages`). FlashInfer plans on the host,
so this is not for CUDA graphs; `decode_readers` takes it where it was measured to be faster.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from kvpolicy.kernels.attention.paged_attention import TOGETHER, Apart
from kvpolicy.kernels.attention.paged_attention_packages import Attend, check_lists, pages_of_one

_SIZES = (64, 128, 256)  # head sizes of FlashInfer's decode kernels
_WORKSPACE_BYTES = 128 * 2**20  # what its documentation recommends
_TENSOR_CORES_FROM = 4  # query heads per KV head, as SGLang chooses for 16-bit entries


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
        ValueError: as the reference; or FlashInfer cannot do it: more than one token, values in
            lists of their own, scales, another dtype than fp16 or bf16, another head size than 64,
            128 or 256, or more than 2^31 entries.
        ImportError: FlashInfer is not installed.
    """
    groups = check_lists("FlashInfer", q, keys, values, indptr, indices, apart)
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
    workspace: torch.Tensor | None = None,
) -> Attend:
    """Plan for such lists; the result attends with any q, keys and values, without planning again.

    Args:
        indptr, indices: as of `paged_attention`.
        heads: query heads per KV head.
        size: D.
        workspace: bytes for this plan alone. None: one that all plans on a device share, so that
            each is good until the next one is made.

    Raises:
        ValueError, ImportError: as `paged_attention`.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"q: FlashInfer decodes fp16 and bf16, got {dtype}")
    if size not in _SIZES:
        raise ValueError(f"q: FlashInfer decodes head sizes {_SIZES}, got {size}")
    tensor_cores = heads >= _TENSOR_CORES_FROM
    if workspace is None:
        wrapper = shared_wrapper(indptr.device, tensor_cores)
    else:
        wrapper = _wrapper(workspace, tensor_cores)
    used = indptr.diff() > 0
    wrapper.plan(
        (indptr - indptr[0]).to(torch.int32),
        indices[indptr[0] : indptr[-1]].to(torch.int32),
        used.to(torch.int32),  # tokens on the last page, of which an empty list has none
        heads,
        1,
        size,
        1,
        q_data_type=dtype,
        kv_data_type=dtype,
        sm_scale=scale,
    )

    def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        pool = pages_of_one("FlashInfer", keys, values)
        out = wrapper.run(q.reshape(-1, heads, size), pool)
        return out.masked_fill(~used[:, None, None], 0.0).view(q.shape)

    return attend


def package() -> ModuleType:
    """FlashInfer.

    Raises:
        ImportError: says what to install.
    """
    try:
        import flashinfer
    except ImportError as error:
        raise ImportError(
            "paged attention by FlashInfer needs the package flashinfer-python"
        ) from error
    return flashinfer


def new_workspace(device: torch.device) -> torch.Tensor:
    """A workspace for one plan."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@functools.lru_cache
def shared_wrapper(device: torch.device, tensor_cores: bool) -> Any:
    """FlashInfer's wrapper for all calls on a device that bring no workspace of their own."""
    return _wrapper(new_workspace(device), tensor_cores)


def _wrapper(workspace: torch.Tensor, tensor_cores: bool) -> Any:
    return package().BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=tensor_cores
    )
