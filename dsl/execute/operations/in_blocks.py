"""Reductions of attention and vectors in blocks of KV heads and queries, bounded in memory.

A reduction over `query` or `dim` is split: values with neither axis are computed first, the rest
for some KV heads and queries at a time. Sums, counts and extremes of blocks are combined by their
definition, variances pairwise (Chan, Golub and LeVeque, 1979).

Dimensions: G KV heads, n candidates of a layer, W queries, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from kvpolicy.dsl.codegen.causal import nothing_after
from kvpolicy.dsl.execute.operations.operands import operands
from kvpolicy.dsl.execute.operations.table import reduce
from kvpolicy.dsl.execute.tensors.values import Frame, Value, as_tensor, filled
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ops.operations import Kind
from kvpolicy.dsl.ops.table import OPERATIONS

# From a node, a block of a layer and values known in it to the node's value there.
Within = Callable[[Node, Frame, dict[Node, Value]], Value]

# Bytes of float64 that one value of a block may take; on a CPU few enough for its caches, beyond
# which it is several times slower.
BLOCK_BYTES = 64 << 20
_CPU_BLOCK_BYTES = 4 << 20
# Number of blocks of a sum over all queries, and fewest queries of one: blocks save reading the
# tokens after their last query.
_CAUSAL_BLOCKS, _LEAST_ROWS = 8, 64
_LARGE_AXES = frozenset(("query", "dim"))
_COMPUTED_IN_BLOCKS = frozenset(
    (Kind.REDUCTION, Kind.WINDOW, Kind.VECTOR, Kind.POOL, Kind.SELECTION)
)


def block_bytes(device: torch.device) -> int:
    """Bytes of float64 that one value of a block may take."""
    return min(BLOCK_BYTES, _CPU_BLOCK_BYTES) if device.type == "cpu" else BLOCK_BYTES


@dataclass(frozen=True)
class Region:
    """What a reduction computes in blocks.

    Attributes:
        outside: nodes without the axes `query` and `dim`, computed before the blocks.
        windows: its nodes `attn`, `logits` and `distance`.
        reads: which of `query`, `key` and `value` it reads.
        by_head, by_query: whether blocks may divide the KV heads, and the queries.
        vectors: whether it has values with the axis `dim`.
        causal: whether tokens after a block's last query add nothing and are left out.
    """

    outside: tuple[Node, ...]
    windows: tuple[Node, ...]
    reads: frozenset[str]
    by_head: bool
    by_query: bool
    vectors: bool
    causal: bool


@lru_cache(maxsize=4096)
def _region(node: Node) -> Region | None:
    """The region of a reduction; None if it is computed in one piece."""
    if not node.operation.is_reduction or "layer" in node.axes or not _LARGE_AXES & set(node.axes):
        return None
    inside: dict[Node, None] = {}
    outside: dict[Node, None] = {}
    waiting = [node.args[0]]
    while waiting:
        operand = waiting.pop()
        known = inside if _LARGE_AXES & set(operand.type.axes) else outside
        if operand not in known:
            known[operand] = None
            waiting.extend(operands(operand) if known is inside else ())
    nodes = list(inside)
    if not nodes or any("kv" in member.axes or not _fits(member) for member in nodes):
        return None
    headless = [member for member in nodes if "kv" not in member.type.axes]
    mixed = any("kv" in x.type.axes and x in inside for n in headless for x in n.args)
    by_query = "query" in node.axes and not any(
        "query" in member.axes and member.op != "index" for member in nodes
    )
    windows = tuple(member for member in nodes if member.operation.is_window)
    reads = {name for member in nodes for name in member.operation.tensors}
    vectors = any("dim" in member.type.axes for member in nodes)
    causal = (
        node.op == "sum" and by_query and not any(window.args for window in windows)
        and all(_by_token(member) for member in nodes) and nothing_after(node.args[0])
    )  # fmt: skip
    by_head = not mixed and len(headless) < len(nodes)
    return Region(tuple(outside), windows, frozenset(reads), by_head, by_query, vectors, causal)


def _fits(node: Node) -> bool:
    """Whether a value can be computed in blocks."""
    return node.operation.elementwise or node.operation.kind in _COMPUTED_IN_BLOCKS


def _by_token(node: Node) -> bool:
    """Whether every token's value comes from that token alone, attention apart."""
    return node.op != "index" and node.operation.kind is not Kind.POOL and "token" not in node.axes


def in_blocks(
    node: Node, frame: Frame, value: Callable[[Node], Value], within: Within
) -> Value | None:
    """The value of a reduction, computed in blocks; None where one block is enough.

    Args:
        value: gives the value of a node for the whole layer.
    """
    region = _region(node)
    # After the last layer the tensors are gone; values computed from them are held.
    if region is None or not region.reads.issubset(frame.vectors):
        return None
    heads, rows = _sizes(region, frame)
    if heads == frame.kv and rows is None:
        return None
    known = {operand: value(operand) for operand in region.outside}
    joined: _Partial | None = None
    parts: list[Value] = []
    vectors = {name: frame.read(name) for name in region.reads}
    for part in _heads(replace(frame, vectors=vectors), heads):
        part_values = known
        if heads < frame.kv:
            part_values = _narrowed(known, "kv", part.kv_start, part.kv)
        for block in _rows(part, region, rows):
            block_values = part_values
            if block.tokens < frame.tokens:
                block_values = _narrowed(part_values, "token", 0, block.tokens)
            x = within(node.args[0], block, dict(block_values))
            partial = _Partial.of(node, block, x).of_all(frame.tokens)
            joined = partial if joined is None else joined.with_more(partial)
        if joined is not None and "kv" not in node.axes:
            parts.append(joined.result(node))
            joined = None
    if joined is not None:
        return joined.result(node)
    first, *others = parts
    if not others:
        return first
    return replace(first, data=torch.cat([x.tensor for x in parts], first.axes.index("kv")))


def _sizes(region: Region, frame: Frame) -> tuple[int, int | None]:
    """Number of KV heads and of queries of a block; None: all queries."""
    head_dim, group = frame.bound.shape.head_dim, frame.bound.shape.group
    windows = {frame.window(window) for window in region.windows}
    longest = max(windows, default=1)
    by_query = region.by_query and len(windows) == 1
    per_head = 8 * max(1, frame.tokens) * max(head_dim, 1)
    per_query = 8 * max(1, frame.tokens) * group * (head_dim if region.vectors and windows else 1)
    if not by_query:
        per_head = max(per_head, per_query * max(1, longest) if windows else 0)
    limit = block_bytes(frame.device)
    heads = max(1, min(frame.kv, limit // per_head)) if region.by_head else frame.kv
    rows = max(1, min(longest, limit // (per_query * heads)))
    if region.causal and frame.step is None:
        rows = min(rows, max(_LEAST_ROWS, -(-longest // _CAUSAL_BLOCKS)))
    return heads, rows if by_query and rows < longest else None


def _heads(frame: Frame, size: int) -> Iterator[Frame]:
    if size >= frame.kv:
        yield frame
        return
    for start in range(0, frame.kv, size):
        end = min(start + size, frame.kv)
        vectors = {}
        for name in frame.vectors:
            rows = frame.read(name).unflatten(0, (frame.kv, -1))[start:end].flatten(0, 1)
            vectors[name] = rows.double() if name == "key" else rows
        yield replace(
            frame,
            kv=end - start,
            kv_start=frame.kv_start + start,
            vectors=vectors,
            held_mask=None if frame.held_mask is None else frame.held_mask[start:end],
        )


def _rows(frame: Frame, region: Region, size: int | None) -> Iterator[Frame]:
    if size is None:
        yield frame
        return
    if "key" in frame.vectors:
        frame = replace(frame, vectors={**frame.vectors, "key": frame.read("key").double()})
    longest = frame.window(region.windows[0])
    for start in range(0, longest, size):
        end = min(start + size, longest)
        if region.causal and frame.step is None:
            yield _up_to(frame, longest - end, end - start)
        else:
            yield replace(frame, rows=slice(start, end))


def _up_to(frame: Frame, number: int, rows: int) -> Frame:
    """The frame without its last `number` tokens and queries; `rows` queries ask."""
    tokens = frame.tokens - number
    vectors = {name: frame.read(name) for name in frame.vectors}
    return replace(
        frame,
        tokens=tokens,
        vectors={name: x[:, : x.shape[1] - number] for name, x in vectors.items()},
        positions=None if frame.positions is None else frame.positions[:tokens],
        last=rows,
    )


def _narrowed(values: dict[Node, Value], axis: str, start: int, number: int) -> dict[Node, Value]:
    """The values at `number` places along an axis, from `start` on."""
    return {
        node: x.along(axis, lambda data, dim: data.narrow(dim, start, number))
        for node, x in values.items()
    }


@dataclass(frozen=True)
class _Partial:
    """A reduction of some of the values.

    Attributes:
        data: sums, counts or extremes; of a mean sums, of a variance means.
        number: of a mean or variance, number of present values.
        spread: of a variance, sum of squared deviations.
    """

    op: str
    axes: tuple[str, ...]
    data: torch.Tensor
    finite: bool
    number: torch.Tensor | None = None
    spread: torch.Tensor | None = None

    @classmethod
    def of(cls, node: Node, frame: Frame, x: Value) -> _Partial:
        dims = [x.axes.index(axis) for axis in node.axes]
        if node.op == "sum":
            data = (x.tensor if x.zero_where_absent else filled(x, 0.0)).sum(dims)
            return cls("sum", _without(x.axes, node.axes), data, x.finite)
        if not node.operation.averages:
            result = reduce(node, frame, x)
            return cls(node.op, result.axes, result.tensor, result.finite)
        number = reduce(replace(node, op="count"), frame, x).tensor
        if node.op == "mean":
            total = _Partial.of(replace(node, op="sum"), frame, x)
            return replace(total, op="mean", number=number)
        mean = reduce(replace(node, op="mean"), frame, x)
        spread = as_tensor(reduce(node, frame, x).data, frame.device) * number
        if not x.finite:
            # The variance of infinite values is NaN, whatever the other blocks hold.
            infinite = ~filled(x, 0.0).isfinite()
            spread = spread.masked_fill(infinite.sum(dims) > 0, math.nan)
        return cls(node.op, mean.axes, mean.tensor, mean.finite, number, spread)

    def of_all(self, tokens: int) -> _Partial:
        """The same at all `tokens` tokens, 0 at those that the block left out."""
        if "token" not in self.axes or self.data.shape[self.axes.index("token")] == tokens:
            return self
        dim = self.axes.index("token")
        padding = [0, 0] * (len(self.axes) - dim - 1)
        missing = tokens - self.data.shape[dim]
        return replace(self, data=F.pad(self.data, [*padding, 0, missing]))

    def with_more(self, other: _Partial) -> _Partial:
        """The reduction of the values of both."""
        finite = self.finite and other.finite
        if self.number is None or other.number is None:
            return replace(self, data=_joined(self.op, self.data, other.data), finite=finite)
        number = self.number + other.number
        if self.spread is None or other.spread is None:
            data = _joined(self.op, self.data, other.data)
            return replace(self, data=data, finite=finite, number=number)
        share = (other.number / number).nan_to_num(nan=0.0)
        difference = other.data - self.data
        spread = self.spread + other.spread + difference**2 * self.number * share
        data = self.data + difference * share
        return replace(self, data=data, finite=finite, number=number, spread=spread)

    def result(self, node: Node) -> Value:
        """The reduction of all values, for the node that is computed."""
        data = self.data
        if self.number is not None:
            data = (self.data if self.spread is None else self.spread) / self.number
        if self.number is not None or not (self.finite or node.value == "part"):
            data = torch.nan_to_num(data, nan=0.0, posinf=math.inf, neginf=-math.inf)
        return Value(data, self.axes, finite=self.finite)


def _joined(op: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The results of two parts of the values, combined."""
    row = OPERATIONS[op]
    if row.result == "truth":
        return torch.logical_or(a, b)
    if row.infinite_of_none:
        return torch.maximum(a, b) if row.of_none == -math.inf else torch.minimum(a, b)
    return a + b


def _without(axes: tuple[str, ...], gone: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis not in gone)
