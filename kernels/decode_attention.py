"""Attention of one new token per request over its private pages and its tail.

The torch implementation is the reference: it writes the lists out and reads them with
`paged_attention`. It defines the result for every other one.
"""

from __future__ import annotations

import torch
from kvpolicy.kernels.paged_attention import paged_attention
from kvpolicy.kernels.tables import Tables


def decode_attention(
    q: torch.Tensor,
    storage: torch.Tensor,
    tables: Tables,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    req_to_token: torch.Tensor,
    *,
    layer: int,
    scale: float,
) -> torch.Tensor:
    """Softmax attention of each request's newest token; compressed and plain requests may mix.

    KV head g of request b reads first the `tables.counts[rows[b], layer, g]` entries of its private
    pages, then the tokens `tables.tail_start[rows[b]] .. lengths[b] - 1` in ordinary slots. Entry j
    of the private list is place j % G of page p = first_page + j // G; page p lies in the request's
    private slot number p // L, in the rows of layer p % L.

    Args:
        q: [B, H, D] fp32, fp16 or bf16.
        storage: [L, 2, padded slots, G, D] contiguous, dtype of q; 0 keys, 1 values. G divides H.
        tables: of R rows.
        rows: int [B], row of each request in SGLang's request pool.
        lengths: int [B] tokens of each request, those dropped and the newest included.
        req_to_token: int32 [>= R, context], the ordinary slot of each token.
        layer: whose attention this is.
        scale: multiplies q.k, usually D ** -0.5.

    Returns:
        [B, H, D], dtype of q, computed in float32. Zero where a head reads no entry.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(q, storage, tables, rows, lengths, req_to_token, layer)
    if q.shape[0] == 0:
        return torch.zeros_like(q)
    indptr, entries = lists_of(storage, tables, rows.long(), lengths.long(), req_to_token, layer)
    pool = storage.view(-1, storage.shape[4])
    values = pool[storage.shape[2] * storage.shape[3] :]
    return paged_attention(q.unsqueeze(1), pool, values, indptr, entries, scale=scale)[:, 0]


def lists_of(
    storage: torch.Tensor,
    tables: Tables,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    req_to_token: torch.Tensor,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries of each (request, KV head): indptr int64 [B * G + 1], indices int64 [nnz]."""
    layers, _, padded, page, _ = storage.shape
    request = torch.arange(rows.shape[0], device=rows.device).repeat_interleave(page)
    head = torch.arange(page, device=rows.device).repeat(rows.shape[0])
    row = rows[request]
    private = tables.counts[row, layer, head].long()  # [B * G]
    tail_start = tables.tail_start[row].long()
    length = private + (lengths[request] - tail_start).clamp(min=0)
    indptr = torch.nn.functional.pad(length.cumsum(0), (1, 0))

    owner = torch.repeat_interleave(length)
    place = torch.arange(owner.shape[0], device=rows.device) - indptr[owner]
    paged = place < private[owner]
    first = tables.first_page[row, layer, head].long()
    number = torch.where(paged, first[owner] + place // page, 0)
    # A place of the tail looks at the first private slot of all, and a private place at token 0,
    # for want of one of its own; neither is used. There may be no private slot at all.
    slots = torch.nn.functional.pad(tables.slots, (0, 1)).long()
    own = torch.where(paged, tables.slots_start[row].long()[owner] + number // layers, 0)
    token = torch.where(paged, 0, tail_start[owner] + place - private[owner])
    private_entry = (number % layers * 2 * padded + slots[own]) * page + place % page
    ordinary = (layer * 2 * padded + req_to_token[row[owner], token].long()) * page + head[owner]
    return indptr, torch.where(paged, private_entry, ordinary)


def check(
    q: torch.Tensor,
    storage: torch.Tensor,
    tables: Tables,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    req_to_token: torch.Tensor,
    layer: int,
) -> None:
    """Raise ValueError as `decode_attention` says, from shapes and dtypes only."""
    if q.dim() != 3:
        raise ValueError(f"q: expected [B, H, D], got {list(q.shape)}")
    requests, heads, size = q.shape
    shape = list(storage.shape)
    if len(shape) != 5 or shape[1] != 2 or shape[4] != size or heads % shape[3]:
        raise ValueError(
            f"storage: expected [L, 2, slots, G, {size}] with G dividing {heads}, got {shape}"
        )
    if storage.dtype != q.dtype:
        raise ValueError(f"storage: expected {q.dtype}, got {storage.dtype}")
    if not storage.is_contiguous():
        raise ValueError("storage: expected a contiguous tensor")
    if not 0 <= layer < shape[0]:
        raise ValueError(f"layer: expected 0 to {shape[0] - 1}, got {layer}")
    lists = [tables.tail_start.shape[0], shape[0], shape[3]]
    for name, tensor in (("counts", tables.counts), ("first_page", tables.first_page)):
        if list(tensor.shape) != lists:
            raise ValueError(f"tables.{name}: expected {lists}, got {list(tensor.shape)}")
    for name, tensor in (("rows", rows), ("lengths", lengths)):
        if tensor.shape != (requests,):
            raise ValueError(f"{name}: expected [{requests}], got {list(tensor.shape)}")
    if req_to_token.dim() != 2 or req_to_token.dtype != torch.int32:
        raise ValueError(
            f"req_to_token: expected int32 [rows, context], "
            f"got {req_to_token.dtype} {list(req_to_token.shape)}"
        )
