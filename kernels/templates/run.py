"""Launch the frames with a policy's functions: allocate results, cut the work into programs.

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
_SPLITS = 128  # most splits of a list at a decode step
_Vectors = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
_Launch = dict[str, Any]


@dataclass(frozen=True)
class Template:
    """Description of the kernels that a generated file completes.

    Attributes:
        steps: whether they serve decode steps; else they serve prefills.
        group, head_dim: query heads of a KV head, head size; `padded`: both as powers of two.
        query_tile: queries of a tile; `one_tile`: whether one tile holds the window.
        block: tokens of a tile on a GPU; `launch`: warps and stages.
        row_pass: queries of a tile, warps and stages of the kernel `row_partials`.
        softmax: whether the log-sum-exp of rows is needed.
        checks: those of `logits`, `keys`, `values` whose numbers are checked to be finite.
        reads_keys: whether the kernel `columns` reads keys; it reads values if they are given.
        skips: queries that do not see a token add nothing to it.
        in_parts: whether programs of `columns` may share the queries of a block of tokens, so that
            its results have one more axis in front, of parts.
        results: for each result its axes, whether it holds truth values, and whether it has one
            more axis in front, of splits or parts.
        returned: indices of the results that `run` returns; only the kernel `tail` reads the rest.
        columns, rows, tail: functions that complete these kernels (START, TILE and STORE; for
            `tail` STORE alone), or None if the kernel is not launched.
    """

    steps: bool
    group: int
    head_dim: int
    padded: tuple[int, int]
    query_tile: int
    one_tile: bool
    block: int
    launch: dict[str, int]
    row_pass: tuple[int, int, int]
    softmax: bool
    checks: tuple[str, ...]
    reads_keys: bool
    skips: bool
    in_parts: bool
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
        """Launch the kernels; the host does not wait for the device.

        Args:
            window: queries, positions and log-sum-exp. Queries: [H, W, D], or None if no kernel
                reads any. Positions, at decode steps: int64 [W], or [S, W] with a row for each
                G / S consecutive KV heads. Log-sum-exp of the queries' rows, in a prefill: float32
                [H, W] contiguous if attention has given it; None: it is computed.
            keys: keys, rows and scale. In a prefill keys are [L, *, G / L, D] of L layers, whose KV
                heads follow each other; token t is row rows[t], with rows int [n], or row t if
                rows are None. At decode steps keys are [G, n, D], or [E, D] where entry j of KV
                head g is row rows[g, j]. Scale: float32 [G], a factor for each head, or None.
            values: the same of values, or three times None.
            marks: `positions`, int64 [n], ascending (None in a prefill: 0 to n - 1); `holds`, int8
                [G, n], which entries a KV head holds (None: all); `ranks`, int32 [G, n], how many
                entries the head holds up to each one, it included; `order`, int32 [G, n], indices
                of the entries that it holds, in order, then of the others. The last two are None
                without `holds`, or if no kernel reads them.
            tokens: n, above 0.
            inputs, numbers: tensors, and numbers of the host, in the file's order; kernels take
                numbers as float32, so a number of tokens is exact up to 2**24.
            block: tokens of a tile, a power of two; None: by device.
            split: tokens of a split of a list at decode steps; longer lists take longer splits,
                since there are at most 128. None: by device.

        Returns:
            The returned results: truth values are int8, results with splits or parts float32,
            others float64. And checks, which fail if the model's tensors held NaN or infinity: bool
            tensors, 0-d or at decode steps [G], that are then False; or 0-d numbers that are then
            not finite.
        """
        return _Run(self, window, keys, values, marks, tokens, block, split).made(
            # Floats: Triton compiles again for integers in a tuple that are 1 or multiples of 16.
            tuple(inputs),
            tuple(map(float, numbers)),
        )


@dataclass
class _Run:
    """One call of `Template.run`."""

    template: Template
    window: _Vectors
    keys: _Vectors
    values: _Vectors
    marks: tuple[torch.Tensor | None, ...]
    tokens: int
    block: int | None
    split: int | None
    checks: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        template, (q, _, _), (k, rows, _) = self.template, self.window, self.keys
        assert k is not None
        self.gpu, self.device = k.is_cuda, k.device
        self.queries = 0 if q is None else q.shape[1]
        if template.steps:
            self.kv = (k if rows is None else rows).shape[0]
        else:
            self.kv = k.shape[0] * k.shape[2]
        self.tile = self.block or (template.block if self.gpu else 256)
        group, dim = template.padded
        self.heads = {"GROUP": template.group, "GROUP_P": group, "BLOCK_W": template.query_tile}
        self.sizes: _Launch = {
            **self.heads,
            "STEPS": template.steps,
            "HEAD_DIM": template.head_dim, "HEAD_DIM_P": dim, "BLOCK_N": self.tile,
            "SCALE": template.head_dim**-0.5,
            "DTYPE": self._multiplied(q, k),
            "PRECISION": "tf32x3" if self.gpu else "ieee",
            **template.launch,
        }  # fmt: skip
        self.total = triton.cdiv(self.tokens, self.tile)
        self.wanted = 2  # programs that fill the GPU
        if self.gpu:
            self.wanted = 2 * torch.cuda.get_device_properties(k.device).multi_processor_count
        self.tiles = triton.cdiv(self.queries, template.query_tile)
        if template.steps:
            # A list is cut by its length alone: its sums do not depend on other lists.
            blocks = max((self.split or (8192 if self.gpu else 512)) // self.tile, 1)
            self.blocks = max(blocks, triton.cdiv(self.total, _SPLITS))
            self.most_splits = _SPLITS
        else:
            splits = max(1, min(self.total, self.wanted // max(1, self.tiles * self.kv)))
            self.blocks = triton.cdiv(self.total, splits)
            # One layer has fewer lists than several together, so they are cut more often.
            self.most_splits = max(1, self.wanted // k.shape[2])
        self.splits = max(triton.cdiv(self.total, self.blocks), 1)
        self.parts = self._parts()

    def _parts(self) -> int:
        """Number of programs that share the queries of a block of tokens.

        Queries that come before a block skip it, so the first block takes twice the average. Its
        parts are to be no more than half of the share of each program that runs at once, with eight
        KV heads. Their real number plays no part: ranks that hold fewer find the same sums.
        """
        if not self.template.in_parts:
            return 1
        parts = triton.cdiv(self.wanted, 2 * self.total) if self.gpu else 3
        return max(1, min(parts, self.tiles // 2))

    def made(
        self, inputs: tuple[torch.Tensor, ...], numbers: tuple[float, ...]
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """Launch the kernels: the returned results, and the checks."""
        template = self.template
        lse = self._row_lse() if template.softmax else None
        results = tuple(
            self._empty(*spec, i in template.returned) for i, spec in enumerate(template.results)
        )
        arguments = (inputs, numbers, results)
        if template.columns is not None:
            self._columns(template.columns, lse, arguments)
        if template.rows is not None and self.queries:
            self._rows(template.rows, lse, arguments)
        if template.tail is not None:
            span = self.block or (256 if self.gpu else 1024)
            frames.tail[(triton.cdiv(self.tokens, span), self.kv)](
                *self.marks,
                *arguments,
                self.tokens,
                STORE=template.tail,
                STEPS=template.steps,
                BLOCK_N=span,
            )
        return tuple(results[i] for i in template.returned), self.checks

    def _multiplied(self, q: torch.Tensor | None, k: torch.Tensor) -> Any:
        """The type in which tiles are multiplied: that of keys, or of queries if keys have 8 bits.

        Triton's interpreter multiplies float32 only; a GPU multiplies float32 by three products of
        tensor cores (`tf32x3`), as exact as its own rounding.
        """
        use_query_dtype = q is not None and k.dtype in FLOAT8
        dtype = q.dtype if q is not None and use_query_dtype else k.dtype
        same_dtype = q is None or q.dtype == dtype
        return _HALVES.get(dtype, tl.float32) if self.gpu and same_dtype else tl.float32

    def _empty(
        self, axes: tuple[str, ...], truth: bool, splits: bool, returned: bool
    ) -> torch.Tensor:
        sizes = {
            "kv": self.kv, "group": self.template.group,
            "token": self.tokens, "query": self.queries,
        }  # fmt: skip
        shape = [sizes[axis] for axis in axes]
        # Torch goes on in float64 with returned results that are not split.
        float_dtype = torch.float64 if returned and not splits else torch.float32
        dtype = torch.int8 if truth else float_dtype
        number = self.parts if self.template.in_parts else self.splits
        shape = [number, *shape] if splits else shape
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _asked(self) -> tuple:
        """The window as kernels take it: `q`, `query_positions`, `heads_per_row`."""
        q, positions, _ = self.window
        if q is None:
            return None, None, 1
        rows = 1 if positions is None or positions.dim() == 1 else len(positions)
        return (q, q.stride(0), q.stride(1)), positions, self.kv // rows

    def _vectors(self, vectors: _Vectors) -> tuple:
        """Keys or values as kernels take them, with their strides and scale; and their rows."""
        x, rows, scale = vectors
        if x is None:
            return None, None
        if self.template.steps:
            return (x, x.stride(-2), x.stride(0) if rows is None else 0, scale, 0, 1), rows
        # Even of a single layer: a large pool's stride has 64 bits, for which 0 is another kernel.
        to_layer = 0 if rows is None else x.stride(0)
        return (x, x.stride(1), x.stride(2), scale, to_layer, x.shape[2]), rows

    def _row_lse(self) -> torch.Tensor:
        """Log-sum-exp float32 [H, W]: given by attention, else computed by a pass over the keys."""
        *_, attention_lse = self.window
        lse = self._row_pass() if attention_lse is None else attention_lse
        if self.template.steps:  # a query may see nothing
            self.checks.append((lse < float("inf")).view(self.kv, -1).all(1))
        elif self.queries:
            self.checks.append(torch.linalg.vector_norm(lse, math.inf))  # NaN if one is
        return lse

    def _row_pass(self) -> torch.Tensor:
        rows = self.kv * self.template.group * self.queries
        partial = torch.empty(self.splits, rows, dtype=torch.float32, device=self.device)
        lse = partial
        if self.queries:
            query_tile, warps, stages = self.template.row_pass
            overrides = {"BLOCK_W": query_tile, "num_warps": warps, "num_stages": stages}
            row_partials[(self.splits * self.kv * triton.cdiv(self.queries, query_tile),)](
                *self._asked(), *self._vectors(self.keys), *self.marks[:2], partial, self.tokens,
                self.queries, self.blocks, self.kv, **{**self.sizes, **overrides},
            )  # fmt: skip
        if self.queries and self.splits > 1:
            lse = torch.empty_like(partial[0])
            row_combine[(triton.cdiv(rows, 16),)](
                partial, lse, rows, self.splits,
                # The most splits of any prompt, so that it is compiled once.
                SPLITS_P=triton.next_power_of_2(self.most_splits), BLOCK=16,
            )  # fmt: skip
        return lse

    def _columns(
        self, functions: tuple, lse: torch.Tensor | None, arguments: tuple[tuple, ...]
    ) -> None:
        template, (start, tile, store) = self.template, functions
        if tile is not None and not template.one_tile:
            step = 1  # the loop is over queries
        elif tile is not None and template.softmax:
            step = self.blocks  # the same blocks as a program of the row pass
        else:
            step = triton.cdiv(self.total, max(1, triton.cdiv(2 * self.wanted, self.kv)))
        flags = None
        if template.checks:
            flags = torch.empty(
                self.parts * self.kv, self.total, dtype=torch.int32, device=self.device
            )
        keys = self._vectors(self.keys) if template.reads_keys else (None, None)
        frames.columns[(self.kv, triton.cdiv(self.total, step), self.parts)](
            *self._asked(), *keys, *self._vectors(self.values), lse, *self.marks[:3], flags,
            *arguments, self.tokens, self.queries, step,
            START=start, TILE=tile, STORE=store, ONE_TILE=template.one_tile, SKIPS=template.skips,
            IN_PARTS=template.in_parts,
            KEYS=template.reads_keys, VALUES=self.values[0] is not None,
            **{f"CHECK_{x.upper()}": x in template.checks for x in ("logits", "keys", "values")},
            **self.sizes,
        )  # fmt: skip
        if flags is not None:
            self.checks.append(flags.sum(1) == 0 if template.steps else flags.sum() == 0)

    def _rows(
        self, functions: tuple, lse: torch.Tensor | None, arguments: tuple[tuple, ...]
    ) -> None:
        start, tile, store = functions
        frames.rows[(self.splits * self.kv * self.tiles,)](
            *self._asked(), *self._vectors(self.keys), lse, *self.marks[:3], *arguments,
            self.tokens, self.queries, self.blocks, self.kv,
            START=start, TILE=tile, STORE=store, **self.sizes,
        )  # fmt: skip
