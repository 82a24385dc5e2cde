"""Values of the torch program: named axes, absent values, float64 data on any device.

A value's tensor has one dimension per axis, in canonical order; `layer` comes first where the
values of all layers are held together, after the last layer. Absent values are a mask with axes of
its own, so that a mask over tokens costs N bytes and no copy of the data; where the mask is false
the data are undefined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import overload

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.execute.tensors.checks import FiniteChecks
from kvpolicy.dsl.execute.tensors.heads import ALL, Heads
from kvpolicy.dsl.execute.tensors.kernels import Kernels, Keys, dense, installed
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import AXES, Node, Type
from kvpolicy.dsl.ops.host import SNAP

ORDER = ("layer", *AXES)
PER_ENTRY = ("kv", "token")  # a number per entry of each list
PER_ENTRY_AND_HEAD = ("kv", "group", "token")  # one of each query head that reads the list

# Numbers that only the host needs are computed here, so that no step waits for the device.
HOST = torch.device("cpu")

Scalar = float | bool | int


@dataclass(frozen=True, slots=True)
class Value:
    """A number or truth value with named axes.

    Attributes:
        data: float64 or bool tensor with a dimension per axis, or a Python scalar without axes.
        axes: names in the order of `ORDER`.
        mask: bool tensor, false where the value is absent; None: present everywhere.
        mask_axes: axes of `mask`, among `axes`.
        zero_where_absent: `data` are 0, or false, where absent, so that no more masking is needed.
        finite: no present value is infinite, so that sums and products cannot be NaN.
    """

    data: torch.Tensor | Scalar
    axes: tuple[str, ...] = ()
    mask: torch.Tensor | None = None
    mask_axes: tuple[str, ...] = ()
    zero_where_absent: bool = False
    finite: bool = False

    @property
    def tensor(self) -> torch.Tensor:
        """The data of a value that has axes, or was computed from one with axes.

        Raises:
            TypeError: the value is a number of the host.
        """
        if not isinstance(self.data, torch.Tensor):
            raise TypeError(f"{self.data} is a number of the host")
        return self.data

    def along(self, axis: str, change: Callable[[torch.Tensor, int], torch.Tensor]) -> Value:
        """The value with data and mask changed along an axis, where they have it.

        Args:
            change: takes a tensor and its dimension of the axis; called for the data first.
        """
        if axis not in (*self.axes, *self.mask_axes):
            return self
        data, mask = self.data, self.mask
        if axis in self.axes:
            data = change(self.tensor, self.axes.index(axis))
        if mask is not None and axis in self.mask_axes:
            mask = change(mask, self.mask_axes.index(axis))
        return replace(self, data=data, mask=mask)


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step, or several that are evaluated at once.

    Attributes:
        generated: decode steps so far, this one included; of several, the last one.
        places: int64 [T], positions of the last queries; [S, T] of S layers at once, where they
            differ.
        number: number of steps, whose queries `new` reads. With more than one, every value per
            query and token is absent (a set: false) where the token comes after the query.
    """

    generated: int
    places: torch.Tensor
    number: int = 1


@dataclass
class Frame:
    """Where operations find the tensors of the layer (or block of KV heads) at hand.

    Attributes:
        bound: the policy.
        tokens: number of candidates of this layer: n in the prefill (N unless some propagated), M
            in decode.
        kv: number of KV heads in this block; kv_start: the first of them, among those here.
        prompt: N.
        layer: this layer; the first one of several at once.
        layered: whether the KV heads are those of several layers, one after the other; operations
            across KV heads then look at one layer at a time.
        vectors: tensors at hand, for the heads of this block only: `query`, [H, T, D] last queries;
            `key` and `value`, [G, n, D], dense or in a server's pool (torch operations `read`
            them); in a prefill `lse`, float32 [H, T], the log-sum-exp of each query's logits over
            the tokens that it sees, if attention has given it. Empty after the last layer.
        positions: int64 [n] original positions, ascending; None: 0 to n - 1.
        held_mask: bool [G, n]: which KV head holds which candidate; None: all hold all.
        step: the decode step; None in a prefill, whose queries are those of the last T tokens.
        rows: the window's queries that are computed now; None: all.
        last: number of queries that `all` and `new` mean now; None: one per token.
        kernels: by name, see `execute/tensors/kernels.py`; those of torch, if none are given.
        held_counts: number of candidates per KV head, where that is not `tokens`.
        wanted: tokens that are read of values gathered from other ranks; None: all.
        heads: the model's KV heads that are here, and exchange with ranks that hold others.
        finite_checks: whether the model's tensors are finite.
    """

    bound: Bound
    tokens: int
    device: torch.device
    kv: int
    prompt: int
    kv_start: int = 0
    layer: int = 0
    layered: bool = False
    vectors: Mapping[str, Keys] = field(default_factory=dict)
    positions: torch.Tensor | None = None
    held_mask: torch.Tensor | None = None
    step: Step | None = None
    rows: slice | None = None
    last: int | None = None
    kernels: Kernels = field(default_factory=installed)
    held_counts: Value | None = None
    wanted: slice | None = None
    heads: Heads = ALL
    finite_checks: FiniteChecks = field(default_factory=FiniteChecks)

    def read(self, name: str) -> torch.Tensor:
        """`vectors[name]` as a dense tensor; gathered from a pool once."""
        x = self.vectors[name]
        tensor = dense(x)
        if x is tensor or self.held_mask is None:
            return tensor
        # Entries that a KV head does not hold are 0: their rows of the pool may hold NaN.
        return tensor.masked_fill(~self.held_mask[..., None], 0)

    @property
    def places(self) -> torch.Tensor:
        """int64 [n]: original positions of the candidates."""
        if self.positions is not None:
            return self.positions
        return torch.arange(self.tokens, device=self.device)

    @property
    def query_places(self) -> torch.Tensor:
        """int64: original positions of the queries; windows read the last ones."""
        return self.places if self.step is None else self.step.places

    def number(self, node: Node) -> Fraction | float | bool:
        """A scalar that the host knows."""
        if self.step is None:
            return self.bound.number(node, self.prompt, self.layer, length=self.tokens)
        return self.bound.number(node, self.prompt, self.layer, generated=self.step.generated)

    def window(self, node: Node) -> int:
        """How many last queries one `attn`, `logits` or `distance` reads."""
        return self._query_number(str(node.value), node.args[0] if node.args else None)

    def _query_number(self, kind: str, count: Node | None) -> int:
        if kind == "new" and self.step is not None:
            return self.step.number
        limit = self.tokens if self.step is None else self.step.places.shape[-1]
        if count is None:
            return limit if self.last is None else self.last
        return counts.whole(self.number(count), limit)

    def size(self, axis: str, type_: Type) -> int:
        """Length of an axis of a type here; not of `dropped` and `channel`."""
        extent = type_.extent(axis)
        if extent is not None and axis == "query":
            return len(
                range(self._query_number(extent.kind, extent.count))[self.rows or slice(None)]
            )
        if extent is not None and extent.count is not None:
            return counts.whole(self.number(extent.count), self.bound.shape.layers)
        shape = self.bound.shape
        sizes = {"kv": self.kv, "group": shape.group, "token": self.tokens, "dim": shape.head_dim}
        return sizes[axis]

    def present(self, x: Value) -> Value:
        """A value per token, absent (a set: false) where a KV head does not hold the token."""
        if self.held_mask is None or (x.zero_where_absent and x.mask is self.held_mask):
            return x
        return self._within(x, self.held_mask, ("kv", "token"))

    def causal(self, x: Value) -> Value:
        """A value per query and token, absent (a set: false) where the token is after the query."""
        positions = self.query_places[self.rows or slice(None)]
        return self._within(x, self.places <= positions[:, None], ("query", "token"))

    def _within(self, x: Value, present: torch.Tensor, present_axes: tuple[str, ...]) -> Value:
        axes = union(x.axes, present_axes)
        sizes = {**sizes_of(x), "kv": self.kv, "token": self.tokens}
        data = repeated_along(as_tensor(x.data, self.device), x.axes, axes, sizes)
        if data.dtype == torch.bool:
            data = data & aligned(present, present_axes, axes)
            if x.mask is None:
                return Value(data, axes, present, present_axes, zero_where_absent=True, finite=True)
            return Value(data, axes, x.mask, x.mask_axes, finite=True)
        mask, mask_axes = present, present_axes
        if x.mask is not None and x.mask is not present:
            mask, mask_axes = self.conjunction(x.mask, x.mask_axes, mask, present_axes)
        return Value(data, axes, mask, mask_axes, finite=x.finite)

    def candidates(self) -> Value:
        """Number of candidates, per KV head where these differ."""
        if self.held_counts is not None:
            return self.held_counts
        if self.held_mask is None:
            return Value(self.tokens)
        return Value(self.held_mask.sum(-1), ("kv",), finite=True)

    def both(self, a: Value, b: Value) -> tuple[torch.Tensor | None, tuple[str, ...]]:
        """The mask of places where both values are present, and its axes."""
        if a.mask is None or b.mask is None or a.mask is b.mask:
            return (b.mask, b.mask_axes) if a.mask is None else (a.mask, a.mask_axes)
        return self.conjunction(a.mask, a.mask_axes, b.mask, b.mask_axes)

    def conjunction(
        self, a: torch.Tensor, a_axes: tuple[str, ...], b: torch.Tensor, b_axes: tuple[str, ...]
    ) -> tuple[torch.Tensor, tuple[str, ...]]:
        """`a and b` of two masks."""
        axes = union(a_axes, b_axes)
        return aligned(a, a_axes, axes) & aligned(b, b_axes, axes), axes


def broadcast(x: Value, type_: Type, frame: Frame, dropped: int = 0) -> Value:
    """The value repeated along the axes of a type that it lacks, without a copy.

    Args:
        dropped: length of the axis `dropped`.
    """
    missing = [axis for axis in type_.axes if axis not in x.axes]
    if not missing:
        return x
    axes = union(x.axes, type_.axes)
    sizes = {axis: dropped if axis == "dropped" else frame.size(axis, type_) for axis in missing}
    sizes.update(sizes_of(x))
    data = repeated_along(as_tensor(x.data, frame.device), x.axes, axes, sizes)
    return replace(x, data=data, axes=axes)


def union(*sets: tuple[str, ...]) -> tuple[str, ...]:
    """All axes, in order."""
    first = sets[0]
    if all(axes == first or not axes for axes in sets):
        return first
    names = set().union(*sets)
    return tuple(axis for axis in ORDER if axis in names)


@overload
def aligned(data: torch.Tensor, axes: tuple[str, ...], to: tuple[str, ...]) -> torch.Tensor: ...


@overload
def aligned(
    data: torch.Tensor | Scalar, axes: tuple[str, ...], to: tuple[str, ...]
) -> torch.Tensor | Scalar: ...


def aligned(
    data: torch.Tensor | Scalar, axes: tuple[str, ...], to: tuple[str, ...]
) -> torch.Tensor | Scalar:
    """The data with a dimension of size 1 for each axis of `to` that they lack."""
    if axes == to or not isinstance(data, torch.Tensor) or not axes:
        return data
    return data[tuple(slice(None) if axis in axes else None for axis in to)]


def repeated_along(
    data: torch.Tensor, axes: tuple[str, ...], to: tuple[str, ...], sizes: Mapping[str, int]
) -> torch.Tensor:
    """The data repeated along the axes of `to` that they lack, without a copy."""
    return data if axes == to else aligned(data, axes, to).expand([sizes[axis] for axis in to])


def as_tensor(data: torch.Tensor | Scalar, device: torch.device) -> torch.Tensor:
    """The data as a tensor: a number of the host becomes 0-d, without waiting for the device."""
    if isinstance(data, torch.Tensor):
        return data
    kind = torch.bool if isinstance(data, bool) else torch.float64
    return torch.full((), data, dtype=kind, device=device)


def sent(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device; the host does not wait for the copy."""
    if device.type == "cuda" and x.device == HOST:
        x = x.contiguous().pin_memory()
    return x.to(device, non_blocking=True)


def filled(x: Value, filler: Scalar) -> torch.Tensor:
    """The data, with `filler` where absent.

    Raises:
        TypeError: the value is a number of the host that is present.
    """
    if x.mask is None or (x.zero_where_absent and not filler):
        return x.tensor
    mask = aligned(x.mask, x.mask_axes, x.axes)
    return mask & x.tensor if filler is False else torch.where(mask, x.data, filler)


def mask_of(x: Value) -> torch.Tensor | None:
    """The mask of a value with a dimension per axis, to broadcast; None: present everywhere."""
    if x.mask is None:
        return None
    mask = aligned(x.mask, x.mask_axes, x.axes)
    return mask if mask.ndim else mask.expand([1] * len(x.axes))


def scalar(number: Fraction | float | bool) -> Value:
    """A number of the host."""
    if isinstance(number, bool):
        return Value(number, finite=True)
    return Value(float(number), finite=math.isfinite(number))


def stacked(values: Sequence[Value], device: torch.device) -> Value:
    """The values of all layers as one, with the axis `layer` in front if they differ."""
    first = values[0]
    if all(x is first for x in values):
        return first
    if not any(isinstance(x.data, torch.Tensor) or x.mask is not None for x in values):
        numbers = [x.data for x in values]
        if all(x == numbers[0] for x in numbers):
            return first
        kind = torch.bool if isinstance(numbers[0], bool) else torch.float64
        numbers_sent = sent(torch.tensor(numbers, dtype=kind, device=HOST), device)
        return Value(numbers_sent, ("layer",), finite=all(x.finite for x in values))
    axes = union(*(x.axes for x in values))
    data, masks = of_one_shape(values, axes, device)
    mask, mask_axes = first.mask, first.mask_axes
    if masks is not None and any(x.mask is not mask for x in values):
        mask, mask_axes = torch.stack(masks), ("layer", *axes)
    zero, finite = all(x.zero_where_absent for x in values), all(x.finite for x in values)
    return Value(
        torch.stack(data), ("layer", *axes), mask, mask_axes, zero_where_absent=zero, finite=finite
    )


def of_one_shape(
    values: Sequence[Value], axes: tuple[str, ...], device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Data and masks of values, each repeated along all axes that any has; None: all present."""
    sizes, masks = sizes_of(*values), None
    data = [repeated_along(as_tensor(x.data, device), x.axes, axes, sizes) for x in values]
    if any(x.mask is not None for x in values):
        present = [(True if x.mask is None else x.mask, x.mask_axes) for x in values]
        masks = [repeated_along(as_tensor(x, device), own, axes, sizes) for x, own in present]
    return data, masks


def over_layers(x: Value, layers: int, device: torch.device) -> Value:
    """The value with the axis `layer`, repeated if all layers have the same."""
    if "layer" in x.axes:
        return x
    data = as_tensor(x.data, device)
    return replace(x, data=data.expand(layers, *data.shape), axes=("layer", *x.axes))


def with_layer_axis(x: Value, kv: int, *, alike: bool = False) -> Value:
    """A value over the KV heads of several layers, `kv` each, with the axis `layer` in front.

    Args:
        alike: whether all heads of a layer have one value, which then loses the axis `kv`.
    """

    def split(data: torch.Tensor, axes: tuple[str, ...]) -> tuple[torch.Tensor, tuple[str, ...]]:
        if "kv" not in axes:
            return data, axes
        data = data.unflatten(0, (-1, kv))
        return (data[:, 0], ("layer", *axes[1:])) if alike else (data, ("layer", *axes))

    if not isinstance(x.data, torch.Tensor):
        return x
    mask, mask_axes = x.mask, x.mask_axes
    if mask is not None:
        mask, mask_axes = split(mask, mask_axes)
    data, axes = split(x.data, x.axes)
    return replace(x, data=data, axes=axes, mask=mask, mask_axes=mask_axes)


def of_layer(x: Value, layer: int) -> Value:
    """One layer's part of a value with or without the axis `layer`."""
    if "layer" not in x.axes:
        return x
    mask, mask_axes = x.mask, x.mask_axes
    if mask is not None and "layer" in mask_axes:
        mask, mask_axes = mask[layer], mask_axes[1:]
    return replace(x, data=x.tensor[layer], axes=x.axes[1:], mask=mask, mask_axes=mask_axes)


def without_heads(x: Value) -> Value:
    """A value that all KV heads of a layer share, without the axis `kv`."""
    if "kv" not in x.axes:
        return x
    dim = x.axes.index("kv")
    return replace(x, data=x.tensor.select(dim, 0), axes=x.axes[:dim] + x.axes[dim + 1 :])


def snapped(x: torch.Tensor) -> torch.Tensor:
    """`snap` of `ops/host.py` for tensors."""
    nearest = torch.round(2 * x) / 2
    return torch.where((x - nearest).abs() <= SNAP * x.abs().clamp(min=1), nearest, x)


def sizes_of(*values: Value) -> dict[str, int]:
    """Size of every axis that the values have."""
    return {
        axis: size
        for x in values
        if x.axes
        for axis, size in zip(x.axes, x.tensor.shape, strict=True)
    }
