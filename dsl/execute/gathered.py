"""Operations that look across KV heads of which some are on other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as functional
from kvpolicy.dsl.execute.entropy import operands, operation
from kvpolicy.dsl.execute.heads import ALL
from kvpolicy.dsl.execute.values import Frame, Value, aligned
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ops.operations import Kind


def of_all_heads(nodes: Sequence[Node], frame: Frame, values: Sequence[Value]) -> list[Value]:
    """The values of nodes, computed of all KV heads of the model, as far as they are of those here.

    Args:
        values: of all their operands in order, of the heads that are here; they are gathered in
            one exchange. Those of tokens that the frame does not want are not, and are 0 then.
    """
    selects = any(x.operation.kind is Kind.SELECTION for x in nodes)
    wanted = None if selects or any("token" in x.axes for x in nodes) else frame.wanted
    masked = [_with_mask(x, frame) for x in values]
    if wanted is not None:
        masked = [_of_tokens(x, partial(_some, wanted)) for x in masked]
    there = None
    if frame.step is not None and selects:
        there = frame.there
        if there is None:
            there = torch.ones(frame.kv, frame.tokens, dtype=torch.bool, device=frame.device)
    parts = [part for x in masked for part in _parts(x)]
    parts += [] if there is None else [(there, 0)]
    found = iter(frame.heads.gathered(parts))
    whole = iter([_whole(x, found) for x in masked])
    kv = frame.kv // frame.heads.number(frame.bound.shape.kv_heads) * frame.bound.shape.kv_heads
    of_all = replace(
        frame, kv=kv, kv_start=0, vectors={}, there=None if there is None else next(found),
        heads=ALL, fixed={}, memo={},
    )  # fmt: skip
    if wanted is not None:
        of_all = replace(of_all, tokens=wanted.stop - wanted.start)
    made = [
        _own(operation(node)(node, of_all, *islice(whole, len(operands(node)))), frame)
        for node in nodes
    ]
    if wanted is None:
        return made
    return [_of_tokens(x, partial(_among_all, wanted, frame.tokens)) for x in made]


def _of_tokens(x: Value, change: Callable[[torch.Tensor, int], torch.Tensor]) -> Value:
    """The value with its tensors changed along tokens."""
    if "token" in x.axes:
        x = replace(x, data=change(x.tensor, x.axes.index("token")))
    if x.mask is not None and "token" in x.mask_axes:
        x = replace(x, mask=change(x.mask, x.mask_axes.index("token")))
    return x


def _some(wanted: slice, x: torch.Tensor, at: int) -> torch.Tensor:
    return x.narrow(at, wanted.start, wanted.stop - wanted.start)


def _among_all(wanted: slice, tokens: int, x: torch.Tensor, at: int) -> torch.Tensor:
    """The tensor with the other tokens, 0 or false."""
    ends = (*[0] * 2 * (x.dim() - 1 - at), wanted.start, tokens - wanted.stop)
    return functional.pad(x, ends)


def _with_mask(x: Value, frame: Frame) -> Value:
    """The value as every rank sends it: at a decode step what one lacks may be there on another."""
    if frame.step is None or "kv" not in x.axes:
        return x
    own = torch.ones((), dtype=torch.bool, device=x.tensor.device) if x.mask is None else x.mask
    mask = aligned(own, x.mask_axes, x.axes).expand(x.tensor.shape)
    return replace(x, mask=mask, mask_axes=x.axes)


def _parts(x: Value) -> list[tuple[torch.Tensor, int]]:
    """What of a value runs along KV heads."""
    parts = [(x.tensor, x.axes.index("kv"))] if "kv" in x.axes else []
    if x.mask is not None and "kv" in x.mask_axes:
        parts.append((x.mask, x.mask_axes.index("kv")))
    return parts


def _whole(x: Value, found: Iterator[torch.Tensor]) -> Value:
    """The value with what was gathered of its parts, in their order."""
    if "kv" in x.axes:
        x = replace(x, data=next(found))
    if x.mask is not None and "kv" in x.mask_axes:
        x = replace(x, mask=next(found))
    return x


def _own(x: Value, frame: Frame) -> Value:
    """What of a value of all KV heads is held here."""
    data, mask = x.data, x.mask
    if "kv" in x.axes:
        data = frame.heads.part(x.tensor, x.axes.index("kv"))
    if mask is not None and "kv" in x.mask_axes:
        mask = frame.heads.part(mask, x.mask_axes.index("kv"))
    return replace(x, data=data, mask=mask)
