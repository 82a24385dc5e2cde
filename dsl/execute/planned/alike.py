"""Whether the KV heads of several layers may be computed as KV heads of one layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpolicy.dsl.ir.lower import Static
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ops.operations import Kind, Operation


def like_heads(
    nodes: Sequence[Node],
    static: Static,
    reads: Callable[[Operation], bool],
    *,
    per_layer: bool = False,
    numbers: bool = False,
) -> bool:
    """Whether nodes may be computed for several layers as for one with all their KV heads.

    Args:
        nodes: all nodes that are computed.
        static: of the policy.
        reads: whether an operation that is not per KV head is allowed all the same.
        per_layer: allows reductions over KV heads, taken layer by layer, see `Frame.layered`.
        numbers: allows numbers of the host that differ between layers.
    """
    for node in nodes:
        needs = static.needs(node)
        if needs is not None:
            if "layer" in needs and not numbers:
                return False
            continue
        if "layer" in node.axes:
            return False
        if "kv" in node.axes and not (per_layer and node.operation.kind is Kind.REDUCTION):
            return False
        if node.op == "decided" and (node.type.absent or set(node.type.axes) - {"kv"}):
            return False
        # `cached`, counted per KV head, or the index of a query, the same in all layers.
        counted = node.op == "size" or (node.op == "index" and node.axes == ("query",))
        if not counted and not node.operation.per_head and not reads(node.operation):
            return False
    return True
