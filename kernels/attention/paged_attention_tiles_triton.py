"""Parts of attention over ragged lists: tiles of entries, splits of lists and their merge.

A list is cut into splits that different programs read, each with its own online softmax in float32
(split-KV). The last program to end merges them by their log-sum-exp. Of more than 16 splits, the
last to end of every 16 merges these 16, and the last of all merges the results. The order of
merging does not depend on which program merges. Scores are multiplied by log2 e, so that exp2,
which the hardware has, replaces exp.

Dimensions: R query rows of one list (tokens x heads of the group), N entries of a tile, D head
size, padded to COLUMNS, a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.entries.rounding_triton import widened
from kvpolicy.kernels.launch import occupancy, tuned
from kvpolicy.kernels.launch.arguments import refused
from kvpolicy.kernels.launch.occupancy import processors

LOG2_E = 1.4426950408889634

_MOST_SPLITS = 256
_FAN = tl.constexpr(16)  # most splits in one merge; a list has at most the square of it
_MERGED_TOGETHER = 32  # float32 per thread that a merge loads at a time


@dataclass(frozen=True)
class SplitTile:
    """How a program reads its split.

    Attributes:
        entries: N, entries of a tile.
        warps, stages: Triton's num_warps and num_stages.
    """

    entries: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Workspace:
    """Memory for the results of splits, until they are merged.

    Attributes:
        partial: float32, results of splits and their log-sum-exp; arbitrary between calls.
        arrived: int32, numbers of splits that have ended; zeros between calls, as each call leaves
            them.
    """

    partial: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def empty(cls, elements: tuple[int, int], device: torch.device | str) -> Workspace:
        """Allocate it for (partial, arrived) elements, as `workspace_elements` returns them."""
        partial, arrived = elements
        return cls(
            torch.empty(partial, dtype=torch.float32, device=device),
            torch.zeros(arrived, dtype=torch.int32, device=device),
        )

    @property
    def nbytes(self) -> int:
        return self.partial.nbytes + self.arrived.nbytes


@dataclass(frozen=True)
class Cut:
    """Into how many splits lists are cut.

    Attributes:
        splits: most splits of one list, a size of the grid.
        target_splits: number of splits of one length to aim at for all lists together; 0: each list
            is cut into `splits` splits.
    """

    splits: int
    target_splits: int


def columns_of(size: int) -> int:
    """D padded to a power of two, and to 16, the fewest columns that a product takes."""
    return max(triton.next_power_of_2(size), 16)


def tile_and_cut(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    rows: int,
    lists: int,
    *,
    splits: int | None = None,
    tile: SplitTile | None = None,
    programs: int | None = None,
) -> tuple[SplitTile, Cut]:
    """How a kernel reads lists and cuts them: as given, else as measured, else as reasoned.

    Args:
        kernel: its name in `tuned.KERNELS`.
        size: D.
        rows: R, query rows of a program.
        lists: as of `cut`.
        splits, tile, programs: as of `decode_attention`.

    Raises:
        ValueError: splits is not from 1 to 256.
        TunedError: as `tuned.load`.
    """
    if splits is not None and not 1 <= splits <= _MOST_SPLITS:
        raise ValueError(f"splits: expected 1 to {_MOST_SPLITS}, got {splits}")
    measured = tuned.choice(kernel, device, dtype, size, rows, lists)
    if tile is None:
        reasoned = tile_of(size, dtype, rows)
        knobs = ("entries", "warps", "stages")
        tile = SplitTile(*(measured.get(knob, getattr(reasoned, knob)) for knob in knobs))
    if splits is None and programs is None:
        splits, programs = measured.get("splits"), measured.get("programs")
    if splits is not None:
        return tile, Cut(splits, target_splits=0)
    if programs is None:
        programs = programs_at_once(kernel, device, dtype, size, rows, tile)
    return tile, cut(lists, device, programs)


def tile_of(size: int, dtype: torch.dtype, rows: int) -> SplitTile:
    """Tile for heads of D columns and R query rows; reasoned from the sm_90 code.

    Keys of a tile take at most 16 KiB, values as much. Triton reads entry ids one step ahead of the
    rows; with five stages keys and values have two buffers each, so that one tile is loaded while
    another is multiplied (three stages: one buffer, every tile waited for). Three programs per
    multiprocessor then load some 96 KiB at once, more than the 40 KiB or so that cover the latency
    of HBM3e at 4.8 TB/s. With few query rows four warps divide the columns: 16 each of 64 entries,
    32 each of 128 dimensions. Eight warps where more rows, or float32 without tensor cores, would
    spill registers; with more rows at most 64 entries, since Triton 3.6 spills with 128. Tiles of 8
    bits have as many entries as those of 16, to which they are converted.
    """
    row_bytes = columns_of(size) * max(dtype.itemsize, 2)
    entries = min(max(16384 // row_bytes, 16), 128 if rows <= 16 else 64)
    return SplitTile(entries, warps=8 if dtype == torch.float32 or rows > 16 else 4, stages=5)


_PROGRAMS_AT_ONCE: dict[tuple, int] = {}  # launched kernel -> programs at once on a multiprocessor
_SEEN: set[str] = set()  # hashes of their compiled variants


def programs_at_once(
    kernel: str, device: torch.device, dtype: torch.dtype, size: int, rows: int, tile: SplitTile
) -> int:
    """Programs of a kernel that run at once on a multiprocessor of the GPU; 1 without a GPU.

    Once the kernel has been launched, which a server does before it is ready, its compiled code
    decides. Before that, and as an upper limit, shared memory does: two tiles of keys and two of
    values per program, one of each with fewer than five stages. The limit is needed because
    workspaces are allocated before anything is compiled.

    Args:
        kernel, size, rows: as of `tile_and_cut`.
    """
    if device.type != "cuda":
        return 1
    call = (kernel, device, dtype, size, rows, tile)
    if call in _PROGRAMS_AT_ONCE:
        return _PROGRAMS_AT_ONCE[call]
    tiles = 4 if tile.stages >= 5 else 2
    shared = tiles * tile.entries * columns_of(size) * dtype.itemsize
    return max(occupancy.processor(device).programs_at_once(1, shared, tile.warps), 1)


def launched(
    kernel: str,
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    rows: int,
    tile: SplitTile,
    compiled: Any,
) -> None:
    """Note how many programs of a kernel run at once, the fewest of its compiled variants.

    Args:
        kernel, size, rows: as of `tile_and_cut`.
        compiled: what Triton returned from the launch; None in its interpreter.
    """
    if compiled is None or compiled.hash in _SEEN:
        return
    _SEEN.add(compiled.hash)
    programs = occupancy.programs_at_once(device, compiled)
    if programs is not None:
        call = (kernel, device, dtype, size, rows, tile)
        _PROGRAMS_AT_ONCE[call] = max(min(programs, programs_at_once(*call)), 1)


def cut(lists: int, device: torch.device, programs: int) -> Cut:
    """Splits of lists, if there is no measurement.

    Few lists: as many splits as programs run at once, so that all end together, less one per list,
    because rounding up adds at most as many. More lists: two splits of an average list, small
    enough to fill gaps at the end. Very many: whole lists are small enough. A list has at most
    twice as many splits as an average one; the splits of a longer one are longer.

    Args:
        lists: (request, KV head) lists, each once per block of its query rows.
        programs: programs that run at once on a multiprocessor. Without a GPU an average list has
            two splits, and none has more.
    """
    if device.type != "cuda":
        return Cut(splits=2, target_splits=2 * lists)
    programs *= processors(device)
    if 2 * lists <= programs:
        return Cut(min(-(-2 * programs // max(lists, 1)), _MOST_SPLITS), programs - lists)
    if lists <= 4 * programs:
        return Cut(splits=4, target_splits=2 * lists)
    return Cut(splits=1, target_splits=0)


def elements_of_call(rows: int, size: int, lists: int, splits: int) -> tuple[int, int]:
    """Elements of `Workspace.partial` and of `Workspace.arrived` that a call needs.

    Args:
        rows: query rows of all lists together.
        lists: as of `cut`.
    """
    if splits == 1:
        return 0, 0
    groups = triton.cdiv(splits, _FAN.value)
    return _aligned(rows * splits * size) + rows * splits, lists * (1 + groups)


def _aligned(elements: int) -> int:
    """A number of float32, rounded up to a multiple of 16 bytes."""
    return triton.cdiv(elements, 4) * 4


def outputs_of_splits(
    result: torch.Tensor, lists: int, splits: int, workspace: Workspace | None
) -> tuple[torch.Tensor, ...]:
    """Where `put_split` writes: result, found, lse, arrived.

    Args:
        result: [..., D], contiguous, one query row after the other.
        lists: as of `cut`.
        workspace: None: allocated.

    Raises:
        ValueError: the workspace is too small or of another dtype.
    """
    if splits == 1:
        return result, result, result, result  # only the first is written
    size = result.shape[-1]
    rows = result.numel() // size
    elements = elements_of_call(rows, size, lists, splits)
    if workspace is None:
        workspace = Workspace.empty(elements, result.device)
    fields = (("partial", torch.float32), ("arrived", torch.int32))
    for (name, dtype), least in zip(fields, elements, strict=True):
        x = getattr(workspace, name)
        if x.dtype != dtype or x.numel() < least:
            raise refused(f"workspace.{name}", x, f"{dtype} [>= {least}]")
    lse = workspace.partial.view(-1)[_aligned(rows * splits * size) :]
    return result, workspace.partial, lse, workspace.arrived


def merged_at_once(lines: int, size: int, warps: int) -> int:
    """Splits whose results a merge of `lines` query rows loads at a time."""
    elements = lines * columns_of(size)
    return min(max(_MERGED_TOGETHER * 32 * warps // elements, 1), _FAN.value)


@triton.jit
def split_length_of(length, entries, target_splits, splits, N: tl.constexpr):
    """Entries of a list that each of its splits reads, a multiple of N.

    length: of the list. entries: of all lists together. target_splits, splits: of `Cut`.
    """
    pieces = splits
    if target_splits > 0:
        target_length = tl.maximum(tl.cdiv(entries, target_splits), N)
        pieces = tl.minimum(tl.cdiv(length, target_length), splits).to(tl.int32)
    return tl.cdiv(tl.cdiv(length, tl.maximum(pieces, 1)), N) * N


@triton.jit
def attend_tile(
    q,
    pools,
    entries,
    seen,
    scales,
    so_far,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Online softmax with one tile more: its new top, total and out.

    q: [R, COLUMNS]. pools: pointers to keys and to values, of SIZE columns. entries: int64 [N] of
    keys, int64 [N] of values, and [N] which of them exist: others are not read. seen: [R, N] or
    [1, N], the entries that a query sees. scales: of q.k, times log2 e; float32 [N] of keys if
    KEY_SCALE; of values if VALUE_SCALE. so_far: maximum of scores and sum of weights [R] and output
    [R, COLUMNS], float32, not yet divided by that sum. UPCAST: multiply in float32.
    """
    keys, values = pools
    key_entry, value_entry, inside = entries
    scale, key_scale, value_scale = scales
    top, total, out = so_far
    column = tl.arange(0, COLUMNS)
    mask = inside[:, None]
    if SIZE != COLUMNS:
        mask = mask & (column < SIZE)[None, :]
    k = tl.load(keys + key_entry[:, None] * SIZE + column[None, :], mask=mask, other=0.0)
    v = tl.load(values + value_entry[:, None] * SIZE + column[None, :], mask=mask, other=0.0)
    if UPCAST:
        k = widened(k)
        v = widened(v)
    elif k.dtype != q.dtype:  # 8 bits, which 16 bits hold exactly
        k = k.to(q.dtype)
        v = v.to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if KEY_SCALE:
        scores *= key_scale[None, :]
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    # Before any entry is seen the maximum is -inf, and -inf - -inf would be NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(top - base)
    total = total * rescale + tl.sum(weights, axis=1)
    if VALUE_SCALE:
        weights *= value_scale[None, :]
    out = tl.dot(weights.to(v.dtype), v, out * rescale[:, None], input_precision="ieee")
    return new_top, total, out


@triton.jit
def used_splits(length, split_length):
    """Number of splits of a list that have entries; the first one counts always."""
    return tl.maximum(tl.cdiv(length, tl.maximum(split_length, 1)), 1)


@triton.jit
def put_split(
    outputs,
    rows,
    lines,
    part,
    found_here,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGED_AT_ONCE: tl.constexpr,
):
    """Write the result of a split; the last program of a list to end merges all.

    outputs: result [query rows, SIZE], float32 found [query rows, splits, SIZE] and lse
    [query rows, splits], and arrived: int32 [lists, groups of 16 splits + 1], zeros, and zeros
    again afterwards. rows: int64 [R] query rows, and which of them exist. lines: the same for the
    merge, with less padding. part: list, split, splits, and how many of these are used.
    found_here: as `attend_tile` returns it. SPLIT: whether there may be several splits.
    MERGED_AT_ONCE: as `merged_at_once` returns it.
    """
    result, found, lse, arrived = outputs
    list_, split, splits, used_count = part
    top, total, out = found_here
    total = tl.where(total == 0.0, 1.0, total)
    out = out / total[:, None]
    if not SPLIT:
        _put_result(result, rows, out, SIZE, COLUMNS)
    else:
        _put_found(found, lse, rows, split, splits, top + tl.log2(total), out, SIZE, COLUMNS)
        group = split // _FAN
        first = group * _FAN
        groups = tl.cdiv(used_count, _FAN)
        counter = arrived + list_ * (tl.cdiv(splits, _FAN) + 1)
        number = tl.minimum(used_count - first, _FAN)
        if _ends_last(counter + group, number):
            group_lse, group_out = _merged(
                found, lse, lines, splits, (first, 1, number), SIZE, COLUMNS, MERGED_AT_ONCE
            )
            if groups == 1:
                _put_result(result, lines, group_out, SIZE, COLUMNS)
            else:
                tl.debug_barrier()  # every thread has read what is overwritten here
                _put_found(found, lse, lines, first, splits, group_lse, group_out, SIZE, COLUMNS)
                if _ends_last(counter + tl.cdiv(splits, _FAN), groups):
                    _, list_out = _merged(
                        found, lse, lines, splits, (0, _FAN, groups), SIZE, COLUMNS, MERGED_AT_ONCE
                    )
                    _put_result(result, lines, list_out, SIZE, COLUMNS)


@triton.jit
def _put_result(result, rows, out, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    row, exists = rows
    column = tl.arange(0, COLUMNS)
    mask = exists[:, None] & (column < SIZE)[None, :]
    offset = row[:, None] * SIZE + column[None, :]
    tl.store(result + offset, out.to(result.dtype.element_ty), mask=mask)


@triton.jit
def _put_found(
    found, lse, rows, split, splits, lse_of_rows, out, SIZE: tl.constexpr, COLUMNS: tl.constexpr
):
    row, exists = rows
    column = tl.arange(0, COLUMNS)
    offset = row * splits + split
    mask = exists[:, None] & (column < SIZE)[None, :]
    tl.store(found + offset[:, None] * SIZE + column[None, :], out, mask=mask)
    tl.store(lse + offset, lse_of_rows, mask=exists)


@triton.jit
def _ends_last(counter, number):
    """Whether this program is the last of `number` to end, which may read what the others stored.

    The barrier orders the stores of all threads before the atomic add, whose release shows them to
    the program that acquires it; another barrier passes the count to that program's threads.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == number - 1
    if is_last:
        tl.store(counter, 0)  # for the next call
    return is_last


@triton.jit
def _merged(
    found,
    lse,
    lines,
    splits,
    those,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MERGED_AT_ONCE: tl.constexpr,
):
    """Log-sum-exp [R] and result [R, COLUMNS] of at most 16 splits of a list.

    those: the first split, the step to the next, and the number of splits.
    """
    line, exists = lines
    first, step, number = those
    column = tl.arange(0, COLUMNS)
    all_splits = tl.arange(0, _FAN)
    # From L2: other multiprocessors have written it.
    parts = tl.load(
        lse + line[None, :] * splits + (first + all_splits * step)[:, None],
        mask=(all_splits < number)[:, None] & exists[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    top = tl.max(parts, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(parts - top[None, :]), axis=0)
    out = tl.zeros([line.shape[0], COLUMNS], tl.float32)
    for start in range(0, number, MERGED_AT_ONCE):
        member = start + tl.arange(0, MERGED_AT_ONCE)
        offset = line[None, :] * splits + (first + member * step)[:, None]
        mask = (member < number)[:, None] & exists[None, :]
        weight = tl.exp2(
            tl.load(lse + offset, mask=mask, other=float("-inf"), cache_modifier=".cg")
            - top[None, :]
        )
        values = tl.load(
            found + offset[:, :, None] * SIZE + column[None, None, :],
            mask=mask[:, :, None] & (column < SIZE)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        out += tl.sum(weight[:, :, None] * values, axis=0)
    divisor = tl.where(total == 0.0, 1.0, total)
    return tl.where(total == 0.0, float("-inf"), top + tl.log2(divisor)), out / divisor[:, None]
