"""Fold in place: one launch for all layers, keys and values.

A program moves a piece of the rows (a cache line of each) of one list's keys, or of its values. It
goes through the list's candidates in order, a tile at a time; the numbers cached and kept so far
give the places that a tile's entries come from and go to. A target never lies behind its source, so
what a tile overwrites has been read, except rows of the same tile: all of them are read, the
threads synchronize, all are written. The next tile is read before this one is written, which is
safe because its sources lie behind this one's targets; the masks of the tile after that are loaded
ahead as well (compiled for sm_90, no read is waited for before the writes of the tile before it).
Entries that stay in place, such as all before the first one that leaves, are neither read nor
written. No program writes what another one reads: lists share no page, ordinary slots are only
read, and keys, values and pieces are different bytes.

Choices, none of them measured on a GPU:

- Parallel over pieces of a row, not over parts of a list: the program of a later part would have to
  wait until the earlier one had read what it overwrites. Llama 3.1 8B in bfloat16 has 32 layers x 8
  heads x 2 tensors x 2 pieces = 1024 programs, which all run on an H200 at once with 64 registers a
  thread; with 8 KiB of reads under way each they ask for more than its bandwidth times its latency,
  about 4 MiB. Few lists, as with tensor parallelism, leave it partly idle.
- One launch, not a plan of all moves and then the moves. A plan of 8 bytes an entry would be
  written and read, where each program of a list reads two bytes of masks; it would save the walk
  over candidates that do not stay, which are few at a fold. Only when a long prompt leaves at once
  are many tiles empty, and each costs a step over the masks.
- No copy outside the pool, from which parts of a list could move at once: it would read and write
  everything twice, and mostly everything moves, since one entry that leaves near the front moves
  all behind it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.entries.compact_in_place import check
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.kernels.entries.rounding import movable
from kvpolicy.kernels.launch import tuned
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.launch.tiles import rows_of

# Bytes of a piece: a cache line.
_LINE = 128
# Limit per thread for tiles that need no more; eight programs then run on a multiprocessor.
_REGISTERS = 64


def compact_in_place(
    requests: Requests,
    kept: torch.Tensor,
    holds: torch.Tensor,
    proceed: torch.Tensor,
    *,
    piece: int | None = None,
    tile: int | None = None,
) -> torch.Tensor:
    """Move the kept entries of B requests, in all layers, to the front of their lists' pages.

    As `compact_in_place.compact_in_place`, but the host reads no tensor: neither the number of
    candidates of each list is checked, nor whether it has pages for what it keeps.

    Args:
        piece: bytes of a row that a program moves; a power of two. None: as measured for the GPU
            (see `tuned`), else a cache line.
        tile: candidates whose rows a program holds at a time; a power of two up to 16384.
            None: as measured, else `rows_of`.

    Returns:
        int32 [B, L, G], entries in the private pages of each list afterwards.

    Raises:
        TunedError: as `tuned.load`.
    """
    check(requests, kept, holds, proceed)
    storage, tables, rows, lengths, req_to_token = requests
    layers, _, padded, kv_heads, _ = storage.shape
    words = _words(storage)
    size, word, lists = words.shape[4], words.element_size(), rows.shape[0] * layers
    counts = torch.empty(
        (rows.shape[0], layers, kv_heads), dtype=torch.int32, device=storage.device
    )
    if not lists:
        return counts
    where = (size * word, layers * kv_heads, kept.shape[1])
    measured = tuned.choice("compact_in_place", storage.device, *where)
    piece = piece or measured.get("piece", _LINE)
    part = min(triton.next_power_of_2(size), max(piece // word, 1))
    tile = tile or measured.get("tile") or rows_of(part, word)
    pieces = triton.cdiv(size, part)
    # Pieces and heads change fastest: those of one ordinary slot lie side by side.
    _compact_in_place[(pieces * kv_heads, 2, lists)](
        words, tables.counts, tables.first_page, tables.tail_start, tables.slots_start,
        tables.slots, req_to_token, _bytes(kept), _bytes(holds),
        proceed.contiguous().view(torch.uint8), counts,
        rows, lengths, padded, req_to_token.stride(0), kept.shape[1],
        LAYERS=layers, KV_HEADS=kv_heads, SIZE=size, PIECE=part, PIECES=pieces,
        TILE=tile, FLAGS=proceed.shape[1], FLAGS_P=lanes_of(proceed.shape[1]),
        maxnreg=_REGISTERS if tile <= rows_of(part, word) else None,
    )  # fmt: skip
    return counts


def _words(storage: torch.Tensor) -> torch.Tensor:
    """View rows as words of four bytes if possible, so that no register is half full."""
    whole_words = storage.shape[4] * storage.element_size() % 4 == 0
    return storage.view(torch.int32) if whole_words else movable(storage)


def _bytes(mask: torch.Tensor) -> torch.Tensor:
    return mask.contiguous().view(torch.uint8)


@kernel(aligned=["storage"])
def _compact_in_place(
    storage, counts, first_pages, tail_starts, slots_starts,
    slots, req_to_token, kept, holds, proceed, result,
    rows, lengths, padded, context, width,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PIECE: tl.constexpr,
    PIECES: tl.constexpr, TILE: tl.constexpr, FLAGS: tl.constexpr, FLAGS_P: tl.constexpr,
):  # fmt: skip
    """Move a piece of the rows of one list's keys or values."""
    head, piece = tl.program_id(0) // PIECES, tl.program_id(0) % PIECES
    tensor, request = tl.program_id(1), tl.program_id(2) // LAYERS
    layer = tl.program_id(2) % LAYERS
    row = tl.load(rows + request)
    list_ = layer * KV_HEADS + head
    private = tl.load(counts + row * LAYERS * KV_HEADS + list_)
    number = private
    if proceeds(proceed, request, FLAGS, FLAGS_P):
        length = tl.load(lengths + request).to(tl.int32)
        first_page = tl.load(first_pages + row * LAYERS * KV_HEADS + list_)
        tail_start = tl.load(tail_starts + row)
        cached = private + tl.maximum(length - tail_start, 0)
        own_slots = slots + tl.load(slots_starts + row)
        tail_slots = req_to_token + row * context + tail_start
        list_offset = (tl.program_id(2).to(tl.int64) * KV_HEADS + head) * width
        kept += list_offset
        holds += list_offset
        dims = piece * PIECE + tl.arange(0, PIECE)
        # This program's tensor and piece, in the rows of layer 0.
        base = storage + padded.to(tl.int64) * tensor * KV_HEADS * SIZE + dims[None, :]
        slots_per_layer = padded.to(tl.int64) * 2  # slots of a layer's keys and values
        in_row = (dims < SIZE)[None, :]

        seen = 0
        number = 0
        held, stays = _masks(kept, holds, 0, width, TILE)
        source, target, seen, number = _places(
            held, stays, seen, number, private, cached, first_page, own_slots, tail_slots,
            slots_per_layer, layer, head, LAYERS, KV_HEADS,
        )  # fmt: skip
        x = tl.load(base + source[:, None] * SIZE, mask=(source >= 0)[:, None] & in_row)
        held, stays = _masks(kept, holds, TILE, width, TILE)
        # Two tiles per iteration: what is read ahead need not be copied to other registers for the
        # next iteration, which would wait for it.
        for first in range(0, width, 2 * TILE):
            source, next_target, seen, number = _places(
                held, stays, seen, number, private, cached, first_page, own_slots, tail_slots,
                slots_per_layer, layer, head, LAYERS, KV_HEADS,
            )  # fmt: skip
            held, stays = _masks(kept, holds, first + 2 * TILE, width, TILE)
            # No thread writes before all have read their part of this tile.
            tl.debug_barrier()
            next_x = tl.load(base + source[:, None] * SIZE, mask=(source >= 0)[:, None] & in_row)
            tl.store(base + target[:, None] * SIZE, x, mask=(target >= 0)[:, None] & in_row)

            source, target, seen, number = _places(
                held, stays, seen, number, private, cached, first_page, own_slots, tail_slots,
                slots_per_layer, layer, head, LAYERS, KV_HEADS,
            )  # fmt: skip
            held, stays = _masks(kept, holds, first + 3 * TILE, width, TILE)
            tl.debug_barrier()
            x = tl.load(base + source[:, None] * SIZE, mask=(source >= 0)[:, None] & in_row)
            tl.store(
                base + next_target[:, None] * SIZE,
                next_x,
                mask=(next_target >= 0)[:, None] & in_row,
            )
    if (tensor == 0) & (piece == 0):
        tl.store(result + request.to(tl.int64) * LAYERS * KV_HEADS + list_, number)


def lanes_of(flags: int) -> int:
    """Lanes that read a request's flags: whole warps, since fewer make the compiler spill."""
    return max(triton.next_power_of_2(flags), 32)


@triton.jit
def proceeds(flags, request, FLAGS: tl.constexpr, FLAGS_P: tl.constexpr):
    """Whether all flags of a request are true."""
    flag = tl.arange(0, FLAGS_P)
    values = tl.load(flags + request.to(tl.int64) * FLAGS + flag, mask=flag < FLAGS, other=1)
    return tl.min(values.to(tl.int32)) != 0


@triton.jit
def _masks(kept, holds, first, width, TILE: tl.constexpr):
    """Which candidates of a tile are cached, and which are kept, as 0 and 1."""
    column = first + tl.arange(0, TILE)
    inside = column < width
    stays = tl.load(kept + column, mask=inside, other=0)
    return tl.load(holds + column, mask=inside, other=0), stays


@triton.jit
def _places(
    held, stays, seen, number, private, cached, first_page, own_slots, tail_slots,
    slots_per_layer, layer, head, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Key entries of the pool from and to which a tile's candidates move; -1 if they do not.

    Returns also the numbers of entries cached (`seen`) and kept (`number`) up to its end.
    """
    held, stays = held.to(tl.int32), (stays & held).to(tl.int32)
    # One prefix sum for both, as a tile has fewer than 2^15 candidates.
    packed = held | (stays << 16)
    packed_sums = tl.cumsum(packed)
    source_place = seen + (packed_sums & 0xFFFF) - held
    target_place = number + (packed_sums >> 16) - stays
    packed_total = tl.sum(packed)
    paged = source_place < private
    # The last condition fails only if `holds` has more True than the list has entries.
    moves = (stays > 0) & ~(paged & (source_place == target_place)) & (source_place < cached)
    page, to_page = first_page + source_place // KV_HEADS, first_page + target_place // KV_HEADS
    # One load finds the slot, private or ordinary.
    slot = tl.load(
        tl.where(paged, own_slots + page // LAYERS, tail_slots + (source_place - private)),
        mask=moves,
        other=0,
    )
    to_slot = tl.load(own_slots + to_page // LAYERS, mask=moves, other=0)
    # int64 as `slots_per_layer` is: a pool may have more than 2^31 entries.
    rows = tl.where(paged, page % LAYERS, layer) * slots_per_layer + slot
    source = rows * KV_HEADS + tl.where(paged, source_place % KV_HEADS, head)
    target = (to_page % LAYERS * slots_per_layer + to_slot) * KV_HEADS + target_place % KV_HEADS
    source, target = tl.where(moves, source, -1), tl.where(moves, target, -1)
    return source, target, seen + (packed_total & 0xFFFF), number + (packed_total >> 16)
