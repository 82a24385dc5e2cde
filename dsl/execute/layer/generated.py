"""Generated kernels in the torch program: the inputs of a bundle, and its values.

Kernels compute in float32; their results are stored as float64. Kernels of a prefill read whole
layers, those of decode steps read entries, which may differ between KV heads.

Dimensions: G KV heads, H query heads, n tokens or entries of a layer, W queries of a window, D head
size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.codegen.fusion import Bundle, Fusion
from kvpolicy.dsl.codegen.parts import Output
from kvpolicy.dsl.codegen.source import GeneratedFile, generate
from kvpolicy.dsl.execute.operations.operands import operands
from kvpolicy.dsl.execute.operations.table import reduce
from kvpolicy.dsl.execute.tensors.kernels import Entries, Kernels, Keys, Slots, dense
from kvpolicy.dsl.execute.tensors.values import (
    Frame,
    Value,
    as_tensor,
    repeated_along,
    sizes_of,
)
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ir.once import once
from kvpolicy.dsl.ops.operations import Kind, Operation

# Compiled source: from arguments to results and checks, which say whether tensors were finite.
Run = Callable[..., tuple[tuple[torch.Tensor, ...], Sequence[torch.Tensor]]]

_EIGHT_BITS = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
_TYPES = frozenset((torch.float32, torch.float16, torch.bfloat16)) | _EIGHT_BITS


@dataclass
class Generated:
    """The generated kernels of one bound policy.

    Attributes:
        fusion: the bundles that they compute.
        compiled: from the policy's name and a generated source to its `Run`.
    """

    bound: Bound
    fusion: Fusion
    compiled: Callable[[str, str], Run]

    @classmethod
    def of(cls, fusion: Fusion, kernels: Kernels) -> Generated | None:
        """The kernels of what is fused; None if it is nothing, or the table has no "generated"."""
        if "generated" not in kernels or not fusion.bundles:
            return None
        return cls(fusion.bound, fusion, kernels["generated"])

    @cached_property
    def reads_lse(self) -> bool:
        """Whether kernels need the log-sum-exp of queries' logits."""
        outputs = [x for bundle in self.fusion.bundles for x in bundle.outputs]
        return any(node.operation.softmax for x in outputs for node in x.walk())

    @cached_property
    def token_bytes(self) -> int:
        """Bytes that the kernels write per token and KV head."""
        return sum(self._file(bundle, False).token_bytes for bundle in self.fusion.bundles)

    def bundle(self, node: Node, frame: Frame) -> Bundle | None:
        """The bundle that computes a node; None if there is none, or it cannot serve the frame."""
        bundle = self.fusion.bundle_of.get(node)
        return bundle if bundle is not None and self.serves(bundle, frame) else None

    def covers(self, node: Node, frame: Frame) -> bool:
        """Whether kernels do all that a node's operands read of queries, keys and values."""
        bundles = self._all_of(node)
        return bool(bundles) and all(self.serves(bundle, frame) for bundle in bundles)

    @once
    def _all_of(self, node: Node) -> list[Bundle]:
        """The bundles that do all of these reads; empty if torch has to read as well."""
        bundles: list[Bundle] = []
        waiting, seen = list(operands(node)), set()
        while waiting:
            operand = waiting.pop()
            if operand in seen:
                continue
            seen.add(operand)
            if operand in self.fusion.bundle_of:
                bundles.append(self.fusion.bundle_of[operand])
            elif operand.operation.reads_tensors:
                return []
            else:
                waiting.extend(operands(operand))
        return bundles

    def serves(self, bundle: Bundle, frame: Frame) -> bool:
        """Whether kernels can serve a frame: its phase, all its queries at once, its dtypes."""
        if (frame.step is not None) != self.fusion.steps or frame.rows is not None:
            return False
        names = ["key"]
        if bundle.reads_values:
            names.append("value")
        if bundle.window is not None:
            names.append("query")
        dtypes = [frame.vectors[name].dtype for name in names if name in frame.vectors]
        return bool(frame.tokens) and len(dtypes) == len(names) and set(dtypes) <= _TYPES

    def values(
        self, bundle: Bundle, frame: Frame, value: Callable[[Node], Value], **options: int
    ) -> dict[Node, Value]:
        """The bundle's outputs, by node.

        Args:
            frame: the layer's.
            value: gives the value of a node that the bundle reads.
            options: for the source's `run`.
        """
        vectors = frame.vectors
        float32 = any(vectors[x].dtype == torch.float32 for x in ("query", "key") if x in vectors)
        source, run = self._file(bundle, float32), self._run(bundle, float32)
        inputs = [
            _tensor(value(node), axes, frame, of_mask) for node, axes, of_mask in source.tensors
        ]
        numbers = [_number(how, node, frame) for how, node in source.numbers]
        arguments = _given(bundle, frame, source.order)
        tensors, checks = run(*arguments, inputs, numbers, **options)
        frame.finite_checks.extend(checks)
        return _completed(bundle, source.results, tensors, frame)

    @once
    def _file(self, bundle: Bundle, float32: bool) -> GeneratedFile:
        return generate(bundle, self.bound, float32=float32, steps=self.fusion.steps)

    @once
    def _run(self, bundle: Bundle, float32: bool) -> Run:
        return self.compiled(self.bound.program.name, self._file(bundle, float32).text)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _given(bundle: Bundle, frame: Frame, ordered: bool) -> tuple[object, ...]:
    """Queries, keys, values, facts about tokens, and their number, as kernels take them.

    Args:
        ordered: whether kernels read the order of each KV head's entries.
    """
    step, vectors = frame.step, frame.vectors
    rows = _in_slots if step is None else _by_id
    q = query_positions = lse = None
    if bundle.window is not None:
        window = frame.window(bundle.window)
        q = _last(frame.read("query"), 1, window)
        if "lse" in vectors:  # a copy starts at an aligned address, as kernels expect
            lse = frame.read("lse")
            lse = lse.narrow(1, lse.shape[1] - window, window)
            lse = lse.clone(memory_format=torch.contiguous_format)
        query_positions = None if step is None else _last(step.places, -1, window).contiguous()
    values = rows(vectors["value"]) if bundle.reads_values else (None, None, None)
    holds = ranks = order = None
    if step is not None and frame.held_mask is not None:
        holds = frame.held_mask.contiguous().view(torch.int8)
        if ordered:
            ranks = frame.held_mask.cumsum(-1, dtype=torch.int32)
            if any(node.operation.kind is Kind.POOL for node in bundle.tail):
                sorted_holds = holds.sort(dim=-1, descending=True, stable=True)
                order = sorted_holds.indices.int()
    marks = (frame.positions, holds, ranks, order)
    return (q, query_positions, lse), rows(vectors["key"]), values, marks, frame.tokens


def _last(x: torch.Tensor, dim: int, number: int) -> torch.Tensor:
    return _unit(x.narrow(dim, x.shape[dim] - number, number))


_Vectors = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def _in_slots(x: Keys) -> _Vectors:
    """Keys or values [L, *, G, D], the row of each token (None: its index), and their scale."""
    if isinstance(x, Slots):
        return _unit(x.pool), x.slots, x.scale
    return _unit(dense(x).transpose(0, 1))[None], None, None


def _by_id(x: Keys) -> _Vectors:
    """Keys or values, the row of each entry (None if they are dense), and their scale."""
    if isinstance(x, Entries):
        return _unit(x.pool), x.ids.contiguous(), x.scale
    return _unit(dense(x)), None, None


def _tensor(x: Value, to: tuple[str, ...], frame: Frame, of_mask: bool) -> torch.Tensor:
    """An input with all axes of `to`: float32 or int8 data, or with `of_mask` its mask as int8."""
    sizes = {
        "kv": frame.kv, "group": frame.bound.shape.group, "token": frame.tokens, **sizes_of(x),
    }  # fmt: skip
    source, axes = x.data, x.axes
    if of_mask:
        source, axes = (True if x.mask is None else x.mask), x.mask_axes
    data = repeated_along(as_tensor(source, frame.device), axes, to, sizes)
    return data.to(torch.int8 if data.dtype == torch.bool else torch.float32).contiguous()


def _number(how: str, node: Node, frame: Frame) -> float | int:
    """A number of the host as a kernel takes it."""
    x = frame.number(node)
    if how == "truth":
        return int(bool(x))
    if how == "value":
        return float(x)
    if how == "count":
        return counts.whole(x, frame.tokens)
    width = max(1, counts.whole(float(x), 2**31))
    if how == "width":
        return float(width)
    reach = (width - 1) // 2 if how == "before" else width // 2
    return min(reach, frame.tokens)


# What torch completes: splits and parts, and reductions over tokens and KV heads.


def _completed(
    bundle: Bundle, results: tuple[Output, ...], tensors: tuple[torch.Tensor, ...], frame: Frame
) -> dict[Node, Value]:
    parts: dict[Node, dict[str, torch.Tensor]] = {}
    reductions = {reduction.node: reduction for reduction in bundle.reductions}
    for result, data in zip(results, tensors, strict=True):
        data = data.view(torch.bool) if result.truth else data
        if result.splits:
            data = _joined(result.node.operation, data)
            is_part = reductions[result.node].rest or result.node.value == "part"
            if not (result.node in bundle.finite or is_part):
                data = torch.nan_to_num(data, nan=0.0, posinf=math.inf, neginf=-math.inf)
        parts.setdefault(result.node, {})[result.part] = data
    axes = {result.node: result.axes for result in results}
    values = {}
    for node in bundle.outputs:
        node_parts = parts[node]
        reduction, bounded = reductions.get(node), node in bundle.finite
        if reduction is not None and (reduction.rest or "count" in node_parts):
            x = _rest(node, reduction.rest, node_parts, axes[node], frame, bounded=bounded)
        else:
            x = _value(node_parts, axes[node], bounded=bounded)
        values[node] = frame.present(x) if {"kv", "token"} <= set(x.axes) else x
    return values


def _joined(row: Operation, parts: torch.Tensor) -> torch.Tensor:
    """A reduction of the results of parts, which lie along the first dimension, in float64."""
    if parts.dtype == torch.bool:
        return parts.any(0)
    if row.infinite_of_none:
        return (parts.amax(0) if row.of_none == -math.inf else parts.amin(0)).double()
    return parts.sum(0, dtype=torch.float64)


def _value(parts: dict[str, torch.Tensor], axes: tuple[str, ...], *, bounded: bool) -> Value:
    mask = parts.get("there")
    mask_axes = axes if mask is not None else ()
    return Value(parts["value"], axes, mask, mask_axes, finite=bounded)


def _rest(
    node: Node,
    rest: tuple[str, ...],
    parts: dict[str, torch.Tensor],
    axes: tuple[str, ...],
    frame: Frame,
    *,
    bounded: bool,
) -> Value:
    """The reduction over the axes that the kernel left, in float64."""
    # KV heads per layer, where each layer is reduced apart.
    kv_heads = frame.bound.shape.kv_heads if frame.layered and "kv" in rest else None
    over = tuple(axis for axis in rest if axis in axes)
    dims = [axes.index(axis) for axis in over]
    remaining = tuple(axis for axis in axes if axis not in over)
    if node.op in ("mean", "count"):
        # Kernels stored 0 for entries that a KV head does not hold.
        total = torch.stack(list(parts.values()))
        if kv_heads is not None:
            total = total.unflatten(1, (-1, kv_heads))
            dims = [2, *(dim + 2 for dim in dims if dim)]
            remaining = ("kv", *remaining)
        else:
            dims = [dim + 1 for dim in dims]
        total = total.sum(dims) if dims else total
        if kv_heads is not None:
            total = total.unsqueeze(2).expand(-1, -1, kv_heads, *total.shape[2:])
        if node.op == "count":
            (data,) = total
        else:
            by_name = dict(zip(parts, total, strict=True))
            data = by_name["sum"] / by_name["count"]
            data = data.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
        data = data if kv_heads is None else data.flatten(0, 1)
        return Value(data, remaining, finite=node.op == "count" or bounded)
    x = Value(parts["value"], axes, finite=bounded)
    return reduce(replace(node, axes=over), frame, frame.present(x) if "token" in axes else x)
