"""What the attentions over ragged lists share: one tile of entries, and splits and their merge.

A list is cut into splits that different programs read, each with an online softmax of its own in
float32 (split-KV); a second kernel merges them by their log-sum-exp. Scores are kept in units of
log 2, so that the hardware's exp2 is all that is needed.

Dimensions: R query rows of one list (tokens x heads of the group), N entries of a tile, D head
size, padded to a power of two where it is none.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.launch import tuned

LOG2_E = 1.4426950408889634

# Reasoned: three programs of some 72 KiB of shared memory fit a processor of Hopper (227 KiB).
_PROGRAMS_PER_PROCESSOR = 3
_MOST_SPLITS = 256


@dataclass(frozen=True)
class Tile:
    """How a program reads its share.

    Attributes:
        entries: N.
        warps, stages: Triton's num_warps and num_stages.
    """

    entries: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Cut:
    """Into how many splits lists are cut.

    Attributes:
        splits: at most so many of one list: a size of the grid.
        shares: so many are aimed at for all lists together, of one length whatever the lengths of
            the lists; 0: each list is cut into `splits` of its own.
    """

    splits: int
    shares: int


def columns_of(size: int) -> int:
    """Columns of a block that holds heads of D: a power of two, at least what a product takes."""
    return max(triton.next_power_of_2(size), 16)


def way(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    rows: int,
    lists: int,
    *,
    splits: int | None = None,
    tile: Tile | None = None,
    programs: int | None = None,
) -> tuple[Tile, Cut]:
    """How a kernel reads lists and cuts them: as given, else as measured, else as reasoned.

    Args:
        kernel: its name in `tuned.KERNELS`.
        size: D.
        rows: R, query rows of a program.
        lists: as of `cut`.
        splits, tile, programs: as of `decode_attention`.

    Raises:
        TunedError: as `tuned.load`.
    """
    measured = tuned.choice(kernel, device, dtype, size, rows, lists)
    if tile is None:
        reasoned = tile_of(size, dtype, rows)
        knobs = ("entries", "warps", "stages")
        tile = Tile(*(measured.get(knob, getattr(reasoned, knob)) for knob in knobs))
    if splits is None and programs is None:
        splits, programs = measured.get("splits"), measured.get("programs")
    return tile, cut(lists, device, programs) if splits is None else Cut(splits, shares=0)


def tile_of(size: int, dtype: torch.dtype, rows: int) -> Tile:
    """Tile for heads of D columns and R query rows; reasoned from the sm_90 code.

    Keys of a tile are 16 KiB, its values as much. Triton reads the ids one step ahead of what they
    point to; with five stages either has two buffers, so that a tile is under way while another is
    multiplied (three stages: one buffer, every tile waited for). Three programs per processor then
    have some 96 KiB under way, more than the 40 KiB or so that cover the latency of HBM3e at
    4.8 TB/s. Four warps share out the columns of the few query rows: 16 of 64 entries, 32 of 128
    columns each. Eight where more rows, or float32 without tensor cores, would spill registers.
    """
    row_bytes = columns_of(size) * dtype.itemsize
    entries = min(max(16384 // row_bytes, 16), 128)
    return Tile(entries, warps=8 if dtype == torch.float32 or rows > 16 else 4, stages=5)


@functools.lru_cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def cut(lists: int, device: torch.device, programs: int | None = None) -> Cut:
    """Splits for so many lists, if there is no measurement.

    Few lists: as many shares as programs run at once, so that these end together; one per list is
    set aside, because rounding up adds at most so many. More lists than that: two shares of an
    average one, small enough to fill the gaps at the end. Very many: whole lists do that. The
    longest list may have twice the average number of splits, its shares are longer beyond that.

    Args:
        programs: that run at once on a processor of the GPU; None: reasoned. Without a GPU every
            list has two shares.
    """
    if device.type != "cuda":
        return Cut(splits=2, shares=2 * lists)
    programs = (programs or _PROGRAMS_PER_PROCESSOR) * processors(device)
    if 2 * lists <= programs:
        return Cut(min(-(-2 * programs // max(lists, 1)), _MOST_SPLITS), programs - lists)
    if lists <= 4 * programs:
        return Cut(splits=4, shares=2 * lists)
    return Cut(splits=1, shares=0)


def partial_elements(rows: int, size: int, splits: int) -> int:
    """float32 elements that the splits of so many query rows leave for the merge."""
    return rows * splits * (size + 1)


@triton.jit
def share_of(length, entries, shares, splits, N: tl.constexpr):
    """Entries of a list that each of its splits reads, a multiple of N.

    length: of the list. entries: of all lists together. shares, splits: of `Cut`.
    """
    pieces = splits
    if shares > 0:
        aimed = tl.maximum(tl.cdiv(entries, shares), N)
        pieces = tl.minimum(tl.cdiv(length, aimed), splits).to(tl.int32)
    return tl.cdiv(tl.cdiv(length, tl.maximum(pieces, 1)), N) * N


@triton.jit
def attend_tile(
    q,
    keys,
    values,
    key_entry,
    value_entry,
    inside,
    seen,
    key_scale,
    value_scale,
    scale,
    top,
    total,
    out,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile more: (top, total, out) of the entries so far and these.

    q: [R, COLUMNS]. keys, values: pointers to entries of SIZE columns; key_entry, value_entry:
    int64 [N]; inside: [N], which of them exist: others are not read. seen: [R, N] or [1, N].
    key_scale, value_scale: float32 [N] if KEY_SCALE, VALUE_SCALE. scale: of q.k, times log2 e. top,
    total: [R], out: [R, COLUMNS] float32, not yet divided by total. UPCAST: multiply in float32.
    """
    column = tl.arange(0, COLUMNS)
    mask = inside[:, None]
    if SIZE != COLUMNS:
        mask = mask & (column < SIZE)[None, :]
    k = tl.load(keys + key_entry[:, None] * SIZE + column[None, :], mask=mask, other=0.0)
    v = tl.load(values + value_entry[:, None] * SIZE + column[None, :], mask=mask, other=0.0)
    if UPCAST:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if KEY_SCALE:
        scores *= key_scale[None, :]
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    # Where nothing has been seen yet all is -inf, and -inf - -inf is no number.
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - finite[:, None])
    before = tl.exp2(top - finite)
    total = total * before + tl.sum(weights, axis=1)
    if VALUE_SCALE:
        weights *= value_scale[None, :]
    out = tl.dot(weights.to(v.dtype), v, out * before[:, None], input_precision="ieee")
    return higher, total, out


@triton.jit
def put_split(
    result,
    found,
    lse,
    query_row,
    exists,
    split,
    splits,
    top,
    total,
    out,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Write what a program has found: for the merge, or the result itself if there is one split.

    result: [query rows, SIZE]; found: float32 [query rows, splits, SIZE]; lse: float32
    [query rows, splits]. query_row: int64 [R], of them those that `exists`.
    """
    column = tl.arange(0, COLUMNS)
    mask = exists[:, None] & (column < SIZE)[None, :]
    total = tl.where(total == 0.0, 1.0, total)
    out = out / total[:, None]
    if SPLIT:
        at = query_row * splits + split
        tl.store(found + at[:, None] * SIZE + column[None, :], out, mask=mask)
        tl.store(lse + at, top + tl.log2(total), mask=exists)
    else:
        at = query_row[:, None] * SIZE + column[None, :]
        tl.store(result + at, out.to(result.dtype.element_ty), mask=mask)


@triton.jit
def skip_split(lse, query_row, exists, split, splits):
    """Say of a split that it has read nothing; the merge does not look into `found` then."""
    nothing = tl.where(exists, float("-inf"), 0.0)
    tl.store(lse + query_row * splits + split, nothing, mask=exists)


@triton.jit(do_not_specialize=["splits"])
def _merge(
    result, found, lse, splits, SIZE: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr
):
    query_row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    top = tl.full([SPLITS], float("-inf"), tl.float32)
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        at = lse + query_row * splits + split
        top = tl.maximum(top, tl.load(at, mask=split < splits, other=float("-inf")))
    highest = tl.max(top, axis=0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([SPLITS], tl.float32)
    out = tl.zeros([SPLITS, COLUMNS], tl.float32)
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        at = query_row * splits + split
        weight = tl.exp2(tl.load(lse + at, mask=split < splits, other=float("-inf")) - highest)
        # A split that has read nothing has written nothing.
        mask = (weight != 0.0)[:, None] & (column < SIZE)[None, :]
        rows = tl.load(found + at[:, None] * SIZE + column[None, :], mask=mask, other=0.0)
        out += weight[:, None] * rows
        total += weight
    all_splits = tl.sum(total, axis=0)
    merged = tl.sum(out, axis=0) / tl.where(all_splits == 0.0, 1.0, all_splits)
    at = result + query_row * SIZE + column
    tl.store(at, merged.to(result.dtype.element_ty), mask=column < SIZE)


def merge(result: torch.Tensor, found: torch.Tensor, lse: torch.Tensor) -> None:
    """Write `result` [..., D] from what `put_split` and `skip_split` have left.

    Args:
        found: float32 [query rows, splits, D].
        lse: float32 [query rows, splits].
    """
    rows, splits, size = found.shape
    _merge[(rows,)](
        result,
        found,
        lse,
        splits,
        SIZE=size,
        COLUMNS=columns_of(size),
        # Many at once, because a tile's rows are read together and one tile waits for the other.
        SPLITS=min(triton.next_power_of_2(splits), 32),
        num_warps=4,
    )


def partials(
    rows: int, size: int, splits: int, workspace: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """`found` and `lse` for so many query rows, out of a workspace if there is one.

    Args:
        workspace: float32, at least `partial_elements` of these.

    Raises:
        ValueError: the workspace is too small or of another dtype.
    """
    needed = partial_elements(rows, size, splits)
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=device)
    if workspace.dtype != torch.float32 or workspace.numel() < needed:
        raise ValueError(
            f"workspace: expected float32 [>= {needed}], got {workspace.dtype} "
            f"{list(workspace.shape)}"
        )
    flat = workspace.view(-1)
    found = flat[: rows * splits * size].view(rows, splits, size)
    return found, flat[rows * splits * size :][: rows * splits].view(rows, splits)
