"""Merging in the torch program: what dropped entries add to those that stay.

All reads precede all writes. With Triton's kernels the host does not wait for the device, if the
caller bounds the number of entries that a KV head drops and no data decide the number of receivers.

Dimensions: G KV heads, n candidates of a layer, P dropped entries of a KV head at most, S receivers
of a dropped entry at most, D head size, B requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from kvpolicy.dsl.execute.layer.evaluate import Evaluation
from kvpolicy.dsl.execute.tensors.kernels import Entries, Keys, dense
from kvpolicy.dsl.execute.tensors.values import (
    Value,
    aligned,
    as_tensor,
    filled,
    repeated_along,
    sizes_of,
    union,
)
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.inner_products import place
from kvpolicy.dsl.ir.nodes import Merge, Node, State
from kvpolicy.dsl.ir.traverse import state_roots
from kvpolicy.dsl.ops.operations import Kind

_DROPPED = ("kv", "dropped")
_TOKENS = ("kv", "token")

# Sources and weights of each receiver, see the kernel "links".
Links = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Receivers:
    """The receivers of each dropped entry.

    Attributes:
        index: int64 [G, P, S], columns among the n candidates; 0 where there is no receiver.
        present: bool [G, P, S], whether there is one.
    """

    index: torch.Tensor
    present: torch.Tensor

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """`index` and `present` [G, P] of every entry's first receiver, then of its second, ..."""
        return zip(self.index.unbind(2), self.present.unbind(2), strict=True)


@dataclass
class Merging:
    """The merge of one layer: `begun`, then `finished`.

    Attributes:
        states: values of the merge's states after it.
    """

    merge: Merge
    evaluation: Evaluation
    kept: torch.Tensor
    states: dict[str, Value] = field(default_factory=dict)
    _index: torch.Tensor = field(init=False)
    _present: torch.Tensor = field(init=False)
    _receivers: Receivers = field(init=False)
    _links: Links = field(init=False)
    _own: torch.Tensor | None = field(init=False)
    _divide: torch.Tensor | None = field(init=False)
    _products: dict[str, list[Value]] = field(default_factory=dict, init=False)

    @classmethod
    def begun(
        cls,
        merge: Merge,
        evaluation: Evaluation,
        kept: torch.Tensor,
        updates: Mapping[str, State],
        before: Mapping[str, Value],
        most: int,
    ) -> Merging:
        """Begins a merge: finds receivers, and asks other ranks for what weights need.

        Args:
            merge: the section.
            evaluation: the layer's, with its keys and values.
            kept: bool [G, n].
            updates: the merge's states, see `updating`.
            before: their values before this step; states that have not begun are left out.
            most: P, an upper bound of the entries that a KV head drops.
        """
        merging = cls(merge, evaluation, kept)
        merging.evaluation = replace(
            evaluation,
            updates={**evaluation.updates, **updates},
            before={**evaluation.before, **before},
            after=dict(evaluation.after),
            known=dict(evaluation.known),
            own_operations={
                **evaluation.own_operations,
                "dropped": merging._read_dropped,
                "target": merging._read_target,
                "special": merging._sum,
                "inner_product": merging._of_two_vectors,
                "inner_cosine": merging._of_two_vectors,
                "mean": merging._mean,
            },
        )
        merging._find(most)
        merging.evaluation.dropped = merging._present
        decide = [node for node in (merge.accept, merge.weight) if node is not None]
        merging.evaluation.ask([*decide, *state_roots(updates)])
        return merging

    def waiting(self) -> Merging:
        """Releases keys, values and other vectors until the merge is `finished`; returns it."""
        frame = replace(self.evaluation.frame, vectors={})
        known = {name: x for name, x in self.evaluation.known.items() if "dim" not in x.axes}
        self.evaluation.frame, self.evaluation.known = frame, known
        return self

    def finished(self, vectors: Mapping[str, Keys] | None = None) -> Merging:
        """Computes states and weights; returns the merge, which releases what it does not need.

        Args:
            vectors: the layer's keys and values; only after `waiting`.
        """
        if vectors is not None:
            self.evaluation.frame = replace(self.evaluation.frame, vectors=dict(vectors))
        self.states = {name: self.evaluation.state(name) for name in self.merge.states}
        self._weigh()
        # This evaluation reads values of the merge, and would be held by it, with keys and values,
        # until Python looks for such circles.
        self.evaluation = Evaluation(replace(self.evaluation.frame, vectors={}))
        self._products = {}
        return self

    def of_layers(self, before: Mapping[str, Value], heads: int) -> dict[str, Value]:
        """States after a merge of several layers, a number per KV head.

        Args:
            before: the same before the merge, which stay in layers that nothing leaves.
            heads: KV heads per layer.
        """
        kernel, states = self.evaluation.frame.kernels["updated_where_left"], {}
        for name, old in before.items():
            new = self.states[name]
            numbers = (self._spread(x, ("kv",), math.nan).double() for x in (new, old))
            data = kernel(*numbers, self._present, heads)
            states[name] = Value(data, ("kv",), finite=new.finite and old.finite)
        return states

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values after the merge: float64 [G, n, D] from [G, n, D]."""
        kernel = self.evaluation.frame.kernels["merge_rows"]
        merged: torch.Tensor = kernel(x, self._links, self._own, self._divide)
        return merged

    def write(self, entries: Entries, proceed: torch.Tensor) -> None:
        """Merges keys or values [G, n, D] in the pool itself.

        Args:
            proceed: bool [B, *], a row for G / B KV heads each, to which nothing is written if any
                value of the row is false.
        """
        kernel = self.evaluation.frame.kernels["merge_entries"]
        kernel(entries.pool, entries.ids, self._links, self._own, self._divide, proceed)

    def of_some(self, heads: slice, first: int) -> Merging:
        """The merge of some KV heads, without the columns before `first`, which hold no entry."""
        merging = Merging(self.merge, self.evaluation, self.kept[heads, first:])
        sources, weights, offsets = (x[heads] for x in self._links)
        merging._links = sources - first, weights, offsets[:, first:]
        merging._own, merging._divide = (
            None if x is None else x[heads, first:] for x in (self._own, self._divide)
        )
        return merging

    # Who receives.

    def _find(self, most: int) -> None:
        frame, into = self.evaluation.frame, self.merge.into
        held = torch.ones_like(self.kept) if frame.held_mask is None else frame.held_mask
        steps = 0
        if into.op == "next":
            steps = counts.whole(self.evaluation.number(into.args[0]), frame.tokens)
        self._index, self._present, *receivers = frame.kernels["following"](
            self.kept, held, most, steps
        )
        self._receivers = Receivers(*receivers)
        if into.op == "nearest":
            self._receivers = self._nearest(into.args[0])

    def _vectors(self, node: Node) -> torch.Tensor:
        """float64 [G, n, D], vectors that are compared."""
        frame = self.evaluation.frame
        x = filled(self.evaluation.value(node), 0.0)
        return x.expand(frame.kv, frame.tokens, -1)

    def _nearest(self, node: Node) -> Receivers:
        """For each dropped entry the kept one with the highest cosine.

        Keys and values are read where they lie, in the dtype of the cache.
        """
        frame = self.evaluation.frame
        cached = node.operation.kind is Kind.VECTOR
        x = frame.vectors[node.op] if cached else self._vectors(node)
        vectors, ids = _vectors(x)
        arguments = (vectors, self._index, self._present, self.kept, ids)
        index, present = frame.kernels["nearest"](*arguments)
        return Receivers(index[..., None], present[..., None])

    # What the expressions of a merge read.

    def _of_two_vectors(self, node: Node, evaluation: Evaluation) -> Value:
        """An inner product, or the cosine, of a dropped entry and its receiver."""
        return self._inner_products(node.args[0].args[0].op)[place(node)]

    def _inner_products(self, name: str) -> list[Value]:
        """What the kernel "inner_products" gives for dropped entries and their receivers.

        Args:
            name: "key" or "value".
        """
        if name in self._products:
            return self._products[name]
        x = self.evaluation.frame.vectors[name]
        ((receivers, present),) = self._receivers
        vectors, ids = _vectors(x)
        arguments = (vectors, self._index, self._present, receivers, present, ids)
        products = self.evaluation.frame.kernels["inner_products"](*arguments)
        if isinstance(x, Entries) and x.scale is not None:
            # The kernel reads numbers without their scale, which a cosine does not depend on.
            products[:3] *= (x.scale.double() ** 2)[:, None]
        self._products[name] = [Value(x, _DROPPED, finite=True) for x in products]
        return self._products[name]

    def _read(
        self, x: Value, index: torch.Tensor, present: torch.Tensor
    ) -> tuple[Value, torch.Tensor]:
        """A value per token, read at columns `index`, and its mask with a dimension per axis."""
        frame = self.evaluation.frame
        axes = union(x.axes, ("kv",))
        sizes = {**sizes_of(x), "kv": frame.kv}
        dim = axes.index("token")
        dropped_axes = tuple("dropped" if axis == "token" else axis for axis in axes)
        dropped_sizes = {**sizes, "dropped": index.shape[1]}
        places = repeated_along(index, _DROPPED, dropped_axes, dropped_sizes)
        per_head = repeated_along(as_tensor(x.data, frame.device), x.axes, axes, sizes)
        data = per_head.gather(dim, places)
        aligned_present = aligned(present, _DROPPED, dropped_axes)
        # Entries that are dropped or receive are there.
        if x.mask is None or x.mask is frame.held_mask:
            return Value(data, dropped_axes, present, _DROPPED, finite=x.finite), aligned_present
        mask = repeated_along(x.mask, x.mask_axes, axes, sizes).gather(dim, places)
        mask = mask & aligned_present
        return Value(data, dropped_axes, mask, dropped_axes, finite=x.finite), mask

    def _read_dropped(self, node: Node, evaluation: Evaluation) -> Value:
        x = evaluation.value(node.args[0])
        return self._read(x, self._index, self._present)[0]

    def _read_target(self, node: Node, evaluation: Evaluation) -> Value:
        """The mean over the receivers of each dropped entry."""
        x, receivers = evaluation.value(node.args[0]), self._receivers
        frame = evaluation.frame
        complete = x.mask is None or x.mask is frame.held_mask
        if x.axes == _TOKENS and complete:
            data = frame.kernels["target"](x.tensor.double(), receivers.index, receivers.present)
            return Value(data, _DROPPED, self._present, _DROPPED, finite=x.finite)
        parts = [(receivers.index, receivers.present)]
        if receivers.index.shape[2] > 1 and not set(x.axes) <= {"kv", "token"}:
            # Vectors of one receiver at a time, so that P * S of them are never held.
            parts = [(index[..., None], present[..., None]) for index, present in receivers]
        totals, numbers = [], []
        for index, present in parts:
            part, mask = self._read(x, index.flatten(1), present.flatten(1))
            dim, shape = part.axes.index("dropped"), index.shape[1:]
            totals.append(filled(part, 0.0).unflatten(dim, shape).sum(dim + 1))
            numbers.append(mask.unflatten(dim, shape).sum(dim + 1))
        total, number = (sum(terms[1:], terms[0]) for terms in (totals, numbers))
        data = (total / number).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
        return Value(data, part.axes, self._present, _DROPPED, finite=x.finite)

    def _mean(self, node: Node, evaluation: Evaluation) -> Value | None:
        """The operation `mean` over several layers' entries, as if each layer were alone.

        None: it is computed as elsewhere.
        """
        frame = evaluation.frame
        if not frame.layered or node.across_layers:
            return None
        x = evaluation.value(node.args[0])
        columns = node.axes == ("kv",) and x.axes == _DROPPED and x.mask is self._present
        if not (columns or "dropped" in node.axes):
            return None
        kv_heads = frame.bound.shape.kv_heads if "kv" in node.axes else 1
        kernel = frame.kernels["means_of_columns" if columns else "means"]
        means = kernel(self._of_each(x, _DROPPED, self._present), self._present, kv_heads)
        return Value(means, _DROPPED if columns else ("kv",), finite=x.finite)

    def _sum(self, node: Node, evaluation: Evaluation) -> Value:
        """`mass` and `members` of the receivers."""
        frame = evaluation.frame
        if node.value == "mass":
            data = frame.kernels["merge_mass"](self._links, self._own)
        else:
            data = frame.kernels["members"](self._links)
        return Value(data, _TOKENS, finite=True)

    # Weights.

    def _weigh(self) -> None:
        frame, merge = self.evaluation.frame, self.merge
        accepted = self._present
        if merge.accept is not None:
            accepted = self._spread(self.evaluation.value(merge.accept), _DROPPED, False)
        weight = Value(1.0) if merge.weight is None else self.evaluation.value(merge.weight)
        receivers = self._receivers
        weights = self._of_each(weight, _DROPPED, self._present)
        arguments = (self._index, receivers.index, receivers.present, accepted, weights)
        self._links = frame.kernels["links"](*arguments, frame.tokens)
        self._own = self._of_kept(merge.own)
        self._divide = self._of_kept(merge.divide)  # may name `mass`, which `own` is part of

    def _of_kept(self, node: Node | None) -> torch.Tensor | None:
        if node is None:
            return None
        return self._of_each(self.evaluation.value(node), _TOKENS, self.evaluation.frame.held_mask)

    def _of_each(
        self, x: Value, axes: tuple[str, ...], present: torch.Tensor | None
    ) -> torch.Tensor:
        """A number per entry, [G, n] or [G, P]: 0 where absent, undefined where no entry is."""
        if x.mask is present:
            x = replace(x, mask=None, mask_axes=())
        return self._spread(x, axes, 0.0)

    def _spread(self, x: Value, axes: tuple[str, ...], filler: float | bool) -> torch.Tensor:
        frame = self.evaluation.frame
        sizes = {"kv": frame.kv, "token": frame.tokens, "dropped": self._index.shape[1]}
        data = as_tensor(x.data, frame.device)
        if x.mask is not None:
            data = filled(replace(x, data=data), filler)
        return repeated_along(data, x.axes, axes, sizes)


def _vectors(x: Keys) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Vectors [G, n, D] and None, or a pool [E, D] and rows int64 [G, n], as kernels take them."""
    return (x.pool, x.ids) if isinstance(x, Entries) else (dense(x), None)
