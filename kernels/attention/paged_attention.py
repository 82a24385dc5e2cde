"""Attention over ragged lists of entries, one list per (request, KV head).

The torch implementation is the reference: it defines the result for every other one. Lists of one
request may differ in length from KV head to KV head, which ordinary paged attention cannot express.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from kvpolicy.kernels.entries.rounding import FLOAT8, movable


class PairReading(NamedTuple):
    """Places of values, and factors of keys and values, where layers are stored in pairs.

    Attributes:
        value_indices: [nnz] int64, entries of the values. None: those of the keys.
        key_scale, value_scale: [nnz] float32; the j-th key is keys[indices[j]] * key_scale[j], the
            value likewise. None: 1.
    """

    value_indices: torch.Tensor | None = None
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None


UNPAIRED = PairReading()


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    reading: PairReading = UNPAIRED,
) -> torch.Tensor:
    """Softmax attention of the last T tokens of each request over its listed entries.

    Args:
        q: [B, T, H, D] fp32, fp16 or bf16. T is 1 for a decode step.
        keys, values: [E, D], dtype of q or float8_e4m3fn or float8_e5m2; entry e is keys[e] and
            values[e].
        indptr: [B * G + 1] int64. KV head g of request b owns
            indices[indptr[b * G + g] : indptr[b * G + g + 1]]; G divides H.
        indices: [nnz] int64 entries in position order. The last T of a list are those of the
            queries' own tokens: query t does not see the last T - 1 - t of them.
        scale: multiplies q.k, usually D ** -0.5.
        reading: where values do not lie with their keys, or keys or values are scaled.

    Returns:
        [B, T, H, D], dtype of q, computed in float32. Zero where a query sees no entry.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    kv_heads = check(q, keys, values, indptr, indices, reading)
    requests, tokens, heads, size = q.shape
    if requests == 0 or indices.shape[0] == 0:
        return torch.zeros_like(q)
    length = indptr.diff()
    shortest, longest = torch.stack(length.aminmax()).tolist()
    index = unseen = None
    place = torch.arange(longest, device=q.device)
    if shortest < longest:
        # A place past the end of a list repeats its first entry, so that no other list is read; an
        # empty one reads another's, and its result becomes zero below.
        inside = place < length[:, None]
        index = (indptr[:-1, None] + torch.where(inside, place, 0)).clamp_(max=indices.shape[0] - 1)
    if shortest < longest or tokens > 1:
        last_place = length[:, None] - tokens + torch.arange(tokens, device=q.device)  # [B * G, T]
        unseen = place > last_place[:, :, None]  # [B * G, T, M]
        unseen = unseen.repeat_interleave(heads // kv_heads, dim=1)

    def rows(pool: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """Listed rows, scaled: [B * G, M, D] float32, M the length of the longest list."""
        if index is not None:
            ids, scales = ids[index].flatten(), None if scales is None else scales[index].flatten()
        vectors = movable(pool).index_select(0, ids).view(pool.dtype).float()
        vectors = vectors if scales is None else vectors.mul_(scales[:, None])
        return vectors.view(-1, longest, size)

    # [B * G, T * H / G, D] against [B * G, M, D]
    grouped = q.view(requests, tokens, kv_heads, heads // kv_heads, size).transpose(1, 2)
    grouped = grouped.reshape(requests * kv_heads, tokens * (heads // kv_heads), size).float()
    scores = torch.bmm(grouped, rows(keys, indices, reading.key_scale).transpose(1, 2)) * scale
    if unseen is not None:
        scores.masked_fill_(unseen, float("-inf"))
    weights = scores.softmax(dim=-1)
    value_indices = indices if reading.value_indices is None else reading.value_indices
    out = torch.bmm(weights, rows(values, value_indices, reading.value_scale))
    if unseen is not None:
        out.masked_fill_(unseen.all(-1, keepdim=True), 0.0)
    out = out.view(requests, kv_heads, tokens, heads // kv_heads, size).transpose(1, 2)
    return out.reshape(requests, tokens, heads, size).to(q.dtype)


def check(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    reading: PairReading,
) -> int:
    """G, the number of KV heads; raises ValueError as `paged_attention` says."""
    if q.dim() != 4:
        raise ValueError(f"q: expected [B, T, H, D], got {list(q.shape)}")
    requests, _, heads, size = q.shape
    for name, tensor in (("keys", keys), ("values", values)):
        if tensor.dim() != 2 or tensor.shape[1] != size:
            raise ValueError(f"{name}: expected [E, {size}], got {list(tensor.shape)}")
        check_stored(name, tensor, q)
    lists = indptr.shape[0] - 1
    kv_heads = lists // requests if requests else 1
    if requests and (kv_heads == 0 or kv_heads * requests != lists or heads % kv_heads):
        raise ValueError(
            f"indptr: expected [{requests} * G + 1] with G dividing {heads}, "
            f"got {list(indptr.shape)}"
        )
    for name, field in reading._asdict().items():
        if field is not None and field.shape != indices.shape:
            raise ValueError(f"{name}: expected {list(indices.shape)}, got {list(field.shape)}")
    return kv_heads


def check_stored(name: str, tensor: torch.Tensor, q: torch.Tensor) -> None:
    """Refuse keys or values of another dtype than that of the queries or 8-bit floats."""
    if tensor.dtype not in (q.dtype, *FLOAT8):
        raise ValueError(f"{name}: expected {q.dtype} or 8-bit floats, got {tensor.dtype}")
