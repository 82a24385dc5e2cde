"""All layers of a request taken at once, as one layer with L x G KV heads.

A decode step looks at one layer at a time, so that a policy whose numbers are the same in every
layer, and which does not compare KV heads, decides for all layers in as many operations as for one.
Layers with fewer positions begin with entries that no head holds: the newest entries of all layers
stand in the same, last columns.

Dimensions: L layers, G KV heads, H query heads, M cached positions of a layer, here the most of any
layer, T steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from kvpolicy.dsl.execute.evaluate import Evaluation
from kvpolicy.dsl.execute.kernels import Entries, Keys
from kvpolicy.dsl.execute.layout import Held, Remembered, shift_of
from kvpolicy.dsl.execute.values import Value, aligned, constant
from kvpolicy.dsl.ir.lower import Static
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ops.operations import Kind, Operation
from torch.nn.utils.rnn import pad_sequence


def like_heads(
    nodes: Sequence[Node],
    static: Static,
    reads: Callable[[Operation], bool],
    *,
    apart: bool = False,
) -> bool:
    """Whether layers may stand for more KV heads in the computation of nodes.

    Args:
        nodes: all of them.
        static: of the policy.
        reads: whether a leaf may be read besides those that always may.
        apart: whether reductions over KV heads are those of each layer, see `Frame.heads`.
    """
    for node in nodes:
        needs = static.needs(node)
        if needs is not None:
            if "layer" in needs:
                return False
            continue
        if "layer" in node.axes:
            return False
        if "kv" in node.axes and not (apart and node.operation.kind is Kind.REDUCTION):
            return False
        if node.op == "decided" and (node.type.absent or set(node.type.axes) - {"kv"}):
            return False
        counted = node.op == "size"  # `cached`, of each KV head
        if not counted and not node.operation.per_head and not reads(node.operation):
            return False
    return True


def side_by_side(parts: Sequence[torch.Tensor], at: int, nothing: float) -> torch.Tensor:
    """Tensors of different lengths, one after the other along the first dimension.

    Args:
        parts: of every layer, G long in the first dimension.
        at: the dimension in which they differ, not the first.
        nothing: what the shorter ones begin with.
    """
    if all(x.shape[at] == parts[0].shape[at] for x in parts):
        return torch.cat(list(parts))
    first = [x.movedim(at, 0) for x in parts]
    made = pad_sequence(first, True, nothing, padding_side="left")
    return made.movedim(1, at + 1).flatten(0, 1)


def whole(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Bool [G, M], all true; it takes no memory."""
    return torch.ones((), dtype=torch.bool, device=device).expand(*shape)


class Together:
    """What the layers of a request remember, as of one layer.

    Attributes:
        layers: what each remembers, the tokens of the steps included.
        lengths: cached positions of each.
        there: bool [L * G, M].
    """

    def __init__(self, layers: Sequence[Remembered], kv: int) -> None:
        self.layers, self.kv = layers, kv
        self.lengths = [len(x.positions) for x in layers]
        device = layers[0].positions.device
        pairs = zip(layers, self.lengths, strict=True)
        own = [whole((kv, n), device) if x.there is None else x.there for x, n in pairs]
        self.there = side_by_side(own, 1, False)

    @property
    def tokens(self) -> int:
        """M."""
        return self.there.shape[1]

    def position(self, node: Node, evaluation: Evaluation) -> Value:
        """The operation `position`; entries that are not there have position -1."""
        own = [x.positions.expand(self.kv, -1) for x in self.layers]
        data = side_by_side(own, 1, -1).double()
        return Value(data, ("kv", "token"), finite=True)

    def states(self) -> dict[str, Value]:
        """The states of all layers."""
        first = self.layers[0].states
        return {name: _joined([x.states[name] for x in self.layers]) for name in first}

    def budget(self) -> Value | None:
        """The prefill's numbers of all layers, for every KV head."""
        own = [x.budget for x in self.layers if x.budget is not None]
        return self._of_heads(own) if own else None

    def decided(self) -> dict[str, Value]:
        """What the prefill decided of lets in all layers, for every KV head."""
        first = self.layers[0].decided
        plain = [n for n, x in first.items() if x.mask is None and not set(x.axes) - {"kv"}]
        return {name: self._of_heads([x.decided[name] for x in self.layers]) for name in plain}

    def _of_heads(self, own: list[Value]) -> Value:
        """One value per layer, or one per KV head, of all layers."""
        known = [x.data for x in own]
        if not any(isinstance(x, torch.Tensor) for x in known) and len(set(known)) == 1:
            return own[0]
        data = [x if isinstance(x, torch.Tensor) else constant(x, self.there.device) for x in known]
        if any(x.dtype != torch.bool for x in data):
            data = [x.double() for x in data]
        heads = torch.cat([x.expand(self.kv) for x in data])
        return Value(heads, ("kv",), finite=all(x.finite for x in own))

    def entries(self, parts: Sequence[Keys | None]) -> Entries | None:
        """Keys or values of all layers, if they lie in one pool."""
        own = [x for x in parts if isinstance(x, Entries)]
        if len(own) < len(parts) or len({x.pool.data_ptr() for x in own}) > 1:
            return None
        return Entries(own[0].pool, side_by_side([x.ids for x in own], 1, 0))

    def of_layers(self, x: Value) -> list[Value]:
        """The part of each layer of a value with the axis `kv`."""
        data = self._apart(x.tensor, x.axes)
        masks: Sequence[torch.Tensor | None] = [None] * len(data)
        if x.mask is not None:
            own = x.mask_axes if "kv" in x.mask_axes else ("kv", *x.mask_axes)
            mask = aligned(x.mask, x.mask_axes, own)
            masks = self._apart(mask.expand(x.tensor.shape[0], *mask.shape[1:]), own)
            x = Value(x.data, x.axes, x.mask, own, finite=x.finite)
        pairs = zip(data, masks, strict=True)
        return [Value(part, x.axes, mask, x.mask_axes, finite=x.finite) for part, mask in pairs]

    def _apart(self, data: torch.Tensor, axes: tuple[str, ...]) -> list[torch.Tensor]:
        parts = data.unflatten(0, (len(self.layers), self.kv)).unbind(0)
        if "token" not in axes:
            return list(parts)
        at = axes.index("token")
        return [
            part.narrow(at, self.tokens - length, length)
            for part, length in zip(parts, self.lengths, strict=True)
        ]

    def put(self, states: Mapping[str, Value]) -> None:
        """Every layer remembers its part of the states."""
        parts = {name: self.of_layers(x) for name, x in states.items()}
        for number, layer in enumerate(self.layers):
            layer.states = {name: own[number] for name, own in parts.items()}

    def kept(self, kept: torch.Tensor) -> list[torch.Tensor]:
        """[G, M of the layer] of each layer, of bool [L * G, M]."""
        return self._apart(kept, ("kv", "token"))


def present(kept: torch.Tensor, there: torch.Tensor | None) -> torch.Tensor:
    """Bool [G, M], which entries there are."""
    return whole(kept.shape, kept.device) if there is None else there


def shifts(kept: Sequence[torch.Tensor], there: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`shift_of` for all layers; bool [G, M] of each."""
    made = shift_of(side_by_side(kept, 1, False), side_by_side(there, 1, False))
    parts = zip(made.unflatten(0, (len(kept), -1)), kept, strict=True)
    return [part[:, part.shape[1] - own.shape[1] :] for part, own in parts]


def leave(layers: Sequence[Remembered], kept: Sequence[torch.Tensor], held: Sequence[Held]) -> None:
    """The layers forget the entries that are not kept.

    Args:
        kept: bool [G, M] of each.
        held: what the host knows of it.
    """
    if any(x.axes[:1] != ("kv",) for own in layers for x in own.states.values()):
        for own, stays, known in zip(layers, kept, held, strict=True):
            own.leave(stays, known)
        return
    number, kv = len(layers), kept[0].shape[0]
    wide = side_by_side(kept, 1, False).unflatten(0, (number, kv))
    # In order, the positions that some KV head keeps; `nonzero` would wait for the device.
    some = (~wide.any(1)).to(torch.uint8).argsort(dim=-1, stable=True)
    some = some[:, : max(x.positions for x in held)]
    positions = side_by_side([x.positions[None] for x in layers], 1, -1).gather(1, some)
    there = wide.gather(2, some[:, None].expand(-1, kv, -1))
    states = {
        name: _chosen(_joined([x.states[name] for x in layers]), some.repeat_interleave(kv, 0))
        for name in layers[0].states
    }
    for i, (own, each) in enumerate(zip(layers, held, strict=True)):
        own.positions = positions[i, : each.positions]
        own.there = None if each.alike else there[i, :, : each.positions]
        own.states = {name: _of(x, i, kv, each.positions) for name, x in states.items()}


def _chosen(x: Value, some: torch.Tensor) -> Value:
    """A state of all layers at some of its tokens, by index [L * G, m]."""
    if "token" not in x.axes:
        return x
    at = x.axes.index("token")
    index = aligned(some, ("kv", "token"), x.axes)
    shape = list(x.tensor.shape)
    shape[at] = some.shape[1]
    return replace(x, data=x.tensor.gather(at, index.expand(shape)), mask=None, mask_axes=())


def _of(x: Value, layer: int, kv: int, tokens: int) -> Value:
    """The part of a layer, of its first tokens."""
    data = x.tensor[layer * kv : (layer + 1) * kv]
    mask = None if x.mask is None else x.mask[layer * kv : (layer + 1) * kv]
    if "token" in x.axes:
        data = data.narrow(x.axes.index("token"), 0, tokens)
    return replace(x, data=data, mask=mask)


def _joined(parts: list[Value]) -> Value:
    """A state of all layers; it has the axis `kv` first."""
    axes, finite = parts[0].axes, all(x.finite for x in parts)
    data = _row([x.tensor for x in parts], axes, 0.0)
    if all(x.mask is None for x in parts):
        return Value(data, axes, finite=finite)
    masks = [
        torch.ones_like(x.tensor, dtype=torch.bool) if x.mask is None
        else aligned(x.mask, x.mask_axes, axes).expand(x.tensor.shape)
        for x in parts
    ]  # fmt: skip
    return Value(data, axes, _row(masks, axes, False), axes, finite=finite)


def _row(parts: list[torch.Tensor], axes: tuple[str, ...], nothing: float) -> torch.Tensor:
    if "token" not in axes:
        return torch.cat(parts)
    return side_by_side(parts, axes.index("token"), nothing)
