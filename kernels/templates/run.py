"""Launches of the frames with a policy's functions: allocates results and cuts the work.

Dimensions: G KV heads, H query heads, n tokens or entries of a layer, W queries of a window, D head
size, E rows of a pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.entries.rounding import FLOAT8
from kvpolicy.kernels.templates import frames
from kvpolicy.kernels.templates.row_pass import row_combine, row_partials

_HALVES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_SPLITS = 128  # of a list at a decode step, at most
_Given = tuple[torch.Tensor | None, torch.Tensor | None]
_Vectors = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
_Launch = dict[str, Any]


@dataclass(frozen=True)
class Frame:
    """What a generated file says of its kernels.

    Attributes:
        steps: they are of decode steps, else of a prefill.
        group, head_dim: query heads of a KV head, head size; `padded` both as powers of two.
        width: queries of a tile; `whole`: one tile holds the window.
        block: tokens of a tile on a GPU; `launch`: warps and stages.
        row_pass: queries of a tile, warps and stages of the kernel `row_partials`.
        softmax: the log-sum-exp of rows is needed.
        checks: which of `logits`, `keys`, `values` are counted where they are not finite.
        reads_keys: the kernel `columns` does, besides the values that it is given.
        skips: queries that do not see a token add nothing to it.
        results: axes of each result, whether it is a truth value, and whether it has one more axis
            in front, of splits.
        returned: which results `run` returns; other ones only the kernel `tail` reads.
        columns, rows, tail: functions of these kernels, or None where there is no such kernel.
    """

    steps: bool
    group: int
    head_dim: int
    padded: tuple[int, int]
    width: int
    whole: bool
    block: int
    launch: dict[str, int]
    row_pass: tuple[int, int, int]
    softmax: bool
    checks: tuple[str, ...]
    reads_keys: bool
    skips: bool
    results: tuple[tuple[tuple[str, ...], bool, bool], ...]
    returned: tuple[int, ...]
    columns: tuple[Callable | None, Callable | None, Callable] | None
    rows: tuple[Callable, Callable, Callable] | None
    tail: Callable | None

    def run(
        self,
        window: _Vectors,
        keys: _Vectors,
        values: _Vectors,
        marks: tuple[torch.Tensor | None, ...],
        tokens: int,
        inputs: list[torch.Tensor],
        numbers: list[float],
        *,
        block: int | None = None,
        split: int | None = None,
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """Launches the kernels; nothing waits for the device.

        Args:
            window: [H, W, D] queries, or None where no kernel reads any; at decode steps their
                positions, int64 [W], or [S, W] of G / S KV heads each; in a prefill the log-sum-exp
                of their rows, float32 [H, W] contiguous, where attention has given it, else None:
                it is computed.
            keys: [L, *, G / L, D] of L layers, whose KV heads stand one after the other, where
                token t is row rows[t], and rows, int [n], or None: t itself. At decode steps
                [G, n, D], or [E, D] where entry j of KV head g is row rows[g, j]. And float32 [G],
                by which each head's numbers are multiplied, or None.
            values: the same of values, or three times None.
            marks: `positions`, `holds`, `ranks`, `order`: int64 [n] positions, ascending (None in a
                prefill: 0 to n - 1); int8 [G, n], which entries a KV head holds (None: all); int32
                [G, n], how many entries up to each one the head holds; int32 [G, n], the entries
                that it holds, in order, then the others. The last two are None without `holds`, or
                where no kernel reads them.
            tokens: n, above 0.
            inputs, numbers: of the host, as the file counts them; a whole number is exact up to
                2**24 tokens.
            block: tokens of a tile, a power of two; None: by device.
            split: tokens after which a row's sum is cut at decode steps; None: by device.

        Returns:
            Tensors of the results: int8 truth values, float64 numbers, of splits float32 ones. And
            what says whether the model's tensors held NaN or infinity: bool tensors, 0-d, at decode
            steps [G], that are then false; or 0-d numbers that are then not finite.
        """
        return _Run(self, window, keys, values, marks, tokens, block, split).made(
            # Triton compiles anew for a whole number in a tuple that is 1, or a multiple of 16.
            tuple(inputs),
            tuple(map(float, numbers)),
        )


@dataclass
class _Run:
    """One call of `Frame.run`."""

    frame: Frame
    window: _Vectors
    keys: _Vectors
    values: _Vectors
    marks: tuple[torch.Tensor | None, ...]
    tokens: int
    block: int | None
    split: int | None
    checks: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        frame, (q, _, _), (k, rows, _) = self.frame, self.window, self.keys
        assert k is not None
        self.gpu, self.device = k.is_cuda, k.device
        self.queries = 0 if q is None else q.shape[1]
        if frame.steps:
            self.kv = (k if rows is None else rows).shape[0]
        else:
            self.kv = k.shape[0] * k.shape[2]
        self.tile = self.block or (frame.block if self.gpu else 256)
        group, dim = frame.padded
        self.heads = {"GROUP": frame.group, "GROUP_P": group, "BLOCK_W": frame.width}
        self.sizes: _Launch = {
            **self.heads,
            "STEPS": frame.steps,
            "HEAD_DIM": frame.head_dim, "HEAD_DIM_P": dim, "BLOCK_N": self.tile,
            "SCALE": frame.head_dim**-0.5,
            "DTYPE": self._multiplied(q, k),
            "PRECISION": "tf32x3" if self.gpu else "ieee",
            **frame.launch,
        }  # fmt: skip
        self.total = triton.cdiv(self.tokens, self.tile)
        self.wanted = 2  # programs that fill the card
        if self.gpu:
            self.wanted = 2 * torch.cuda.get_device_properties(k.device).multi_processor_count
        self.tiles = triton.cdiv(self.queries, frame.width)
        if frame.steps:
            # A list is cut by its length alone: its sums do not depend on other lists.
            blocks = max((self.split or (8192 if self.gpu else 512)) // self.tile, 1)
            self.blocks = max(blocks, triton.cdiv(self.total, _SPLITS))
        else:
            splits = max(1, min(self.total, self.wanted // max(1, self.tiles * self.kv)))
            self.blocks = triton.cdiv(self.total, splits)
        self.splits = max(triton.cdiv(self.total, self.blocks), 1)

    def made(
        self, inputs: tuple[torch.Tensor, ...], numbers: tuple[float, ...]
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """The results, and the checks."""
        frame = self.frame
        lse = self._row_lse() if frame.softmax else None
        results = tuple(
            self._empty(*each, i in frame.returned) for i, each in enumerate(frame.results)
        )
        given = (inputs, numbers, results)
        if frame.columns is not None:
            self._columns(frame.columns, lse, given)
        if frame.rows is not None and self.queries:
            self._rows(frame.rows, lse, given)
        if frame.tail is not None:
            span = self.block or (256 if self.gpu else 1024)
            frames.tail[(triton.cdiv(self.tokens, span), self.kv)](
                *self.marks, *given, self.tokens, STORE=frame.tail, STEPS=frame.steps, BLOCK_N=span
            )
        return tuple(results[i] for i in frame.returned), self.checks

    def _multiplied(self, q: torch.Tensor | None, k: torch.Tensor) -> Any:
        """The type of tiles: that of keys, or of queries where keys have 8 bits.

        The interpreter multiplies float32 only; a GPU does so in three products of tensor cores, as
        exact as its own rounding.
        """
        own = q is not None and k.dtype in FLOAT8
        dtype = q.dtype if q is not None and own else k.dtype
        alike = q is None or q.dtype == dtype
        return _HALVES.get(dtype, tl.float32) if self.gpu and alike else tl.float32

    def _empty(
        self, axes: tuple[str, ...], truth: bool, splits: bool, returned: bool
    ) -> torch.Tensor:
        sizes = {
            "kv": self.kv, "group": self.frame.group, "token": self.tokens, "query": self.queries,
        }  # fmt: skip
        shape = [sizes[axis] for axis in axes]
        # Torch goes on in float64 with what kernels leave whole.
        whole = torch.float64 if returned and not splits else torch.float32
        dtype = torch.int8 if truth else whole
        shape = [self.splits, *shape] if splits else shape
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _asked(self) -> tuple:
        """The window, as kernels take it."""
        q, at, _ = self.window
        if q is None:
            return None, None, 1
        rows = 1 if at is None or at.dim() == 1 else len(at)
        return (q, q.stride(0), q.stride(1)), at, self.kv // rows

    def _vectors(self, given: _Vectors) -> tuple:
        """Keys or values, as kernels take them."""
        x, rows, scale = given
        if x is None:
            return None, None
        if self.frame.steps:
            return (x, x.stride(-2), x.stride(0) if rows is None else 0, scale, 0, 1), rows
        # Of one layer of a pool, too: in a large one it is a number of 64 bits, another kernel's.
        to_layer = 0 if rows is None else x.stride(0)
        return (x, x.stride(1), x.stride(2), scale, to_layer, x.shape[2]), rows

    def _row_lse(self) -> torch.Tensor:
        """float32 [H, W]: as attention has given it, else by a pass over the keys."""
        *_, given = self.window
        lse = self._row_pass() if given is None else given
        if self.frame.steps:  # a query may see nothing
            self.checks.append((lse < float("inf")).view(self.kv, -1).all(1))
        elif self.queries:
            self.checks.append(torch.linalg.vector_norm(lse, math.inf))  # NaN if one is
        return lse

    def _row_pass(self) -> torch.Tensor:
        rows = self.kv * self.frame.group * self.queries
        partial = torch.empty(self.splits, rows, dtype=torch.float32, device=self.device)
        lse = partial
        if self.queries:
            width, warps, stages = self.frame.row_pass
            own = {"BLOCK_W": width, "num_warps": warps, "num_stages": stages}
            row_partials[(self.splits * self.kv * triton.cdiv(self.queries, width),)](
                *self._asked(), *self._vectors(self.keys), *self.marks[:2], partial, self.tokens,
                self.queries, self.blocks, self.kv, **{**self.sizes, **own},
            )  # fmt: skip
        if self.queries and self.splits > 1:
            lse = torch.empty_like(partial[0])
            most = _SPLITS if self.frame.steps else max(1, self.wanted // self.kv)
            row_combine[(triton.cdiv(rows, 16),)](
                partial, lse, rows, self.splits,
                # The most that there are for any prompt, so that it is compiled once.
                SPLITS_P=triton.next_power_of_2(most), BLOCK=16,
            )  # fmt: skip
        return lse

    def _columns(
        self, functions: tuple, lse: torch.Tensor | None, given: tuple[tuple, ...]
    ) -> None:
        frame, (start, tile, store) = self.frame, functions
        if tile is not None and not frame.whole:
            step = 1  # the loop is over queries
        elif tile is not None and frame.softmax:
            step = self.blocks  # as programs of the row pass went over the keys
        else:
            step = triton.cdiv(self.total, max(1, triton.cdiv(2 * self.wanted, self.kv)))
        flags = None
        if frame.checks:
            flags = torch.empty(self.kv, self.total, dtype=torch.int32, device=self.device)
        keys = self._vectors(self.keys) if frame.reads_keys else (None, None)
        frames.columns[(triton.cdiv(self.total, step), self.kv)](
            *self._asked(), *keys, *self._vectors(self.values), lse, *self.marks[:3], flags,
            *given, self.tokens, self.queries, step,
            START=start, TILE=tile, STORE=store, WHOLE=frame.whole, SKIPS=frame.skips,
            KEYS=frame.reads_keys, VALUES=self.values[0] is not None,
            **{f"CHECK_{x.upper()}": x in frame.checks for x in ("logits", "keys", "values")},
            **self.sizes,
        )  # fmt: skip
        if flags is not None:
            self.checks.append(flags.sum(1) == 0 if frame.steps else flags.sum() == 0)

    def _rows(self, functions: tuple, lse: torch.Tensor | None, given: tuple[tuple, ...]) -> None:
        start, tile, store = functions
        frames.rows[(self.splits * self.kv * self.tiles,)](
            *self._asked(), *self._vectors(self.keys), lse, *self.marks[:3], *given,
            self.tokens, self.queries, self.blocks, self.kv,
            START=start, TILE=tile, STORE=store, **self.sizes,
        )  # fmt: skip
