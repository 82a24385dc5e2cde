"""Operations across KV heads, some of which other ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as functional
from kvpolicy.dsl.execute.operations.operands import operation
from kvpolicy.dsl.execute.tensors.heads import ALL
from kvpolicy.dsl.execute.tensors.values import Frame, Value, aligned
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ops.operations import Kind


def of_all_heads(node: Node, frame: Frame, values: Sequence[Value]) -> Callable[[], Value]:
    """A function that gives the value of a node, computed over all KV heads of the model.

    The operands are exchanged when the value is first asked for, or with an earlier exchange;
    whether the model's tensors are finite is sent along. The value is that of the heads here.

    Args:
        values: values of the operands, for the heads here. Unless the node selects entries or
            works along tokens, only `frame.wanted` tokens are exchanged; at others the value is 0.
    """
    selects = node.operation.kind is Kind.SELECTION
    wanted = None if selects or "token" in node.axes else frame.wanted
    masked = [_with_mask(x, frame) for x in values]
    if wanted is not None:
        masked = [x.along("token", partial(_some, wanted)) for x in masked]
    held = None
    if frame.step is not None and selects and any("token" in x.type.axes for x in node.args):
        held = frame.held_mask
        if held is None:
            held = torch.ones(frame.kv, frame.tokens, dtype=torch.bool, device=frame.device)
    parts = [part for x in masked for part in _parts(x)]
    parts += [] if held is None else [(held, 0)]
    exchange = frame.heads.gathered_later(parts)
    frame.finite_checks.ask(frame.heads, frame.kv)

    def gathered_value() -> Value:
        gathered = iter(exchange())
        operands = [x.along("kv", lambda part, dim: next(gathered)) for x in masked]
        model_frame = _of_all(frame, wanted, None if held is None else next(gathered))
        result = operation(node)(node, model_frame, *operands).along("kv", frame.heads.part)
        return (
            result
            if wanted is None
            else result.along("token", partial(_among_all, wanted, frame.tokens))
        )

    return gathered_value


def _of_all(frame: Frame, wanted: slice | None, held: torch.Tensor | None) -> Frame:
    """The frame with all KV heads of the model and the wanted tokens only."""
    kv = frame.kv // frame.heads.number(frame.bound.shape.kv_heads) * frame.bound.shape.kv_heads
    return replace(
        frame, kv=kv, kv_start=0, vectors={}, held_mask=held, heads=ALL,
        tokens=frame.tokens if wanted is None else wanted.stop - wanted.start,
    )  # fmt: skip


def _some(wanted: slice, x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.narrow(dim, wanted.start, wanted.stop - wanted.start)


def _among_all(wanted: slice, tokens: int, x: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor padded from the wanted tokens to all of them, with 0 or false."""
    ends = (*[0] * 2 * (x.dim() - 1 - dim), wanted.start, tokens - wanted.stop)
    return functional.pad(x, ends)


def _with_mask(x: Value, frame: Frame) -> Value:
    """The value with a mask at a decode step: every rank sends one, whether it needs it or not."""
    if frame.step is None or "kv" not in x.axes:
        return x
    present = torch.ones((), dtype=torch.bool, device=x.tensor.device) if x.mask is None else x.mask
    mask = aligned(present, x.mask_axes, x.axes).expand(x.tensor.shape)
    return replace(x, mask=mask, mask_axes=x.axes)


def _parts(x: Value) -> list[tuple[torch.Tensor, int]]:
    """The value's tensors with the axis `kv`, and its dimension, in the order of `Value.along`."""
    parts = [(x.tensor, x.axes.index("kv"))] if "kv" in x.axes else []
    if x.mask is not None and "kv" in x.mask_axes:
        parts.append((x.mask, x.mask_axes.index("kv")))
    return parts
