"""Whether a policy bounds the cache of a decoding request."""

from __future__ import annotations

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.bounds import max_entries
from kvpolicy.dsl.ir.nodes import Node

ENDLESS = 1 << 62  # tokens of a prompt so long that all policies that bound the cache drop some


def is_steady(bound: Bound) -> bool:
    """Whether every fold leaves no more entries than the prefill may."""
    decode, rules, shape = bound.folded.decode, bound.folded.prefill, bound.shape
    if decode is None or decode.when is not None or bound.propagates:
        return False
    if decode.budget is not None and _size(decode.budget) != _size(rules.budget):
        return False
    everything = shape.layers * shape.kv_heads * ENDLESS
    return max_entries(bound, ENDLESS) < everything and _size(decode.keep) == _size(rules.keep)


def _size(node: Node | None) -> tuple[object, ...] | None:
    """All that decides how many entries a token set holds: everything but the scores."""
    if node is None:
        return None
    arguments = node.args[1:] if node.op == "top" else node.args
    return node.op, str(node.value), node.axes, tuple(_size(argument) for argument in arguments)
