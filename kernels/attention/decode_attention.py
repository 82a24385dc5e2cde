"""Attention of one new token per request over its private pages and its tail.

The torch implementation is the reference: it writes the lists out and reads them with
`paged_attention`. It defines the result for every other one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from kvpolicy.kernels.attention.paged_attention import (
    UNPAIRED,
    PairReading,
    check_stored,
    paged_attention,
)
from kvpolicy.kernels.entries import layer_pairs
from kvpolicy.kernels.entries.requests import Requests


def decode_attention(
    q: torch.Tensor, requests: Requests, *, layer: int, scale: float
) -> torch.Tensor:
    """Softmax attention of each request's newest token; compressed and plain requests may mix.

    Each KV head reads its list at the layer. Where the layer is stored in a pair, the list is the
    pair's, and `layer_pairs` says what stands in it.

    Args:
        q: [B, H, D] fp32, fp16 or bf16.
        requests: storage of q's dtype, or float8_e4m3fn or float8_e5m2; G divides H. Rows and
            lengths may be of any integer type.
        layer: from 0 to L - 1.
        scale: multiplies q.k, usually D ** -0.5.

    Returns:
        [B, H, D], dtype of q, computed in float32. Zero where a head reads no entry.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(q, requests, layer)
    if q.shape[0] == 0:
        return torch.zeros_like(q)
    rows, lengths = requests.rows.long(), requests.lengths.long()
    indptr, entries, reading = lists_of(requests._replace(rows=rows, lengths=lengths), layer)
    storage = requests.storage
    pool = storage.view(-1, storage.shape[4])
    values = pool[storage.shape[2] * storage.shape[3] :]
    out = paged_attention(
        q.unsqueeze(1), pool, values, indptr, entries, scale=scale, reading=reading
    )
    return out[:, 0]


def lists_of(requests: Requests, layer: int) -> tuple[torch.Tensor, torch.Tensor, PairReading]:
    """The entries of each (request, KV head).

    Returns:
        indptr int64 [B * G + 1], indices int64 [nnz], and, where layers may be stored in pairs,
        where the values lie and what multiplies keys and values.
    """
    storage, tables, rows, lengths, req_to_token = requests
    layers, _, padded, kv_heads, _ = storage.shape
    request = torch.arange(rows.shape[0], device=rows.device).repeat_interleave(kv_heads)
    head = torch.arange(kv_heads, device=rows.device).repeat(rows.shape[0])
    row = rows[request]
    private = tables.counts[row, layer, head].long()  # [B * G]
    tail_start = tables.tail_start[row].long()
    length = private + (lengths[request] - tail_start).clamp(min=0)
    indptr = torch.nn.functional.pad(length.cumsum(0), (1, 0))

    owner = torch.repeat_interleave(length)
    place = torch.arange(owner.shape[0], device=rows.device) - indptr[owner]
    paged = place < private[owner]
    first_page, starts = tables.first_page[row, layer, head].long(), tables.slots_start[row].long()
    # Private and ordinary entries are computed for all places, and one of both is used: places of
    # the tail read private slot 0, private ones token 0. The padding is for pools without slot 0.
    slots = torch.nn.functional.pad(tables.slots, (0, 1)).long()

    def entry(places: torch.Tensor) -> torch.Tensor:
        """Key entries for places [nnz] in the lists' private pages."""
        page = torch.where(paged, first_page[owner] + places // kv_heads, 0)
        slot_index = torch.where(paged, starts[owner] + page // layers, 0)
        return (page % layers * 2 * padded + slots[slot_index]) * kv_heads + places % kv_heads

    token = torch.where(paged, 0, tail_start[owner] + place - private[owner])
    slot = req_to_token[row[owner], token].long()
    ordinary = (layer * 2 * padded + slot) * kv_heads + head[owner]
    if not tables.paired.numel():
        return indptr, torch.where(paged, entry(place), ordinary), UNPAIRED

    kind = tables.paired[row, layer].long()[owner]
    keys, values = _in_pairs(storage, torch.where(paged, kind, 0), place, private[owner], entry)
    keys, values = [
        (torch.where(paged, entries, ordinary), factors) for entries, factors in (keys, values)
    ]
    return indptr, keys[0], PairReading(values[0], keys[1], values[1])


def _in_pairs(
    storage: torch.Tensor,
    kind: torch.Tensor,
    place: torch.Tensor,
    tokens: torch.Tensor,
    entry: Callable[[torch.Tensor], torch.Tensor],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Entries [nnz] in private pages and their factors float32 [nnz], of keys and of values.

    Args:
        kind: [nnz], as `Tables.paired`; 0 for tokens of the tail.
        place: [nnz], place of the token in its list.
        tokens: [nnz], number of tokens that the list has in private pages.
        entry: from places [nnz] in the lists' private pages to entries.
    """
    coded, numbers = kind > 0, layer_pairs.numbers(storage)
    floats = numbers.shape[1]
    rows = torch.where(coded, layer_pairs.code_rows(tokens, floats), 0)
    code_entry = entry(torch.where(coded, (kind - 1) * rows + place // floats, 0))
    result = []
    for offset in (0, storage.shape[2] * storage.shape[3]):
        codes = numbers[code_entry + offset, place % floats].masked_fill(~coded, 1.0)
        places, factors = layer_pairs.decode(codes, place)
        result.append((entry(2 * rows + places), factors))
    return result


def check(q: torch.Tensor, requests: Requests, layer: int) -> None:
    """Raise ValueError as `decode_attention` says, from shapes and dtypes only."""
    if q.dim() != 3:
        raise ValueError(f"q: expected [B, H, D], got {list(q.shape)}")
    number, heads, size = q.shape
    if requests.rows.shape != (number,):
        raise ValueError(f"rows: expected [{number}], got {list(requests.rows.shape)}")
    requests.check(dtypes=(torch.int32, torch.int64))
    storage, tables = requests.storage, requests.tables
    shape = list(storage.shape)
    if shape[4] != size or heads % shape[3]:
        raise ValueError(
            f"storage: expected [L, 2, slots, G, {size}] with G dividing {heads}, got {shape}"
        )
    check_stored("storage", storage, q)
    if not 0 <= layer < shape[0]:
        raise ValueError(f"layer: expected 0 to {shape[0] - 1}, got {layer}")
    _check_pairs(tables.paired, [len(tables.tail_start), shape[0]], storage)


def _check_pairs(paired: torch.Tensor, full_shape: list[int], storage: torch.Tensor) -> None:
    shape, empty_shape = list(paired.shape), [0, full_shape[1]]
    if shape not in (empty_shape, full_shape):
        raise ValueError(f"tables.paired: expected {full_shape} or {empty_shape}, got {shape}")
    if shape == full_shape:
        layer_pairs.floats_of_row(storage.shape[4], storage.dtype)
