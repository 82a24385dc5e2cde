"""Whether the KV heads of several layers may be computed as those of one."""

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
    apart: bool = False,
    numbers: bool = False,
) -> bool:
    """Whether layers may stand for more KV heads in the computation of nodes.

    Args:
        nodes: all of them.
        static: of the policy.
        reads: whether a leaf may be read besides those that always may.
        apart: whether reductions over KV heads are those of each layer, see `Frame.layered`.
        numbers: whether numbers of the host may be others at other layers.
    """
    for node in nodes:
        needs = static.needs(node)
        if needs is not None:
            if "layer" in needs and not numbers:
                return False
            continue
        if "layer" in node.axes:
            return False
        if "kv" in node.axes and not (apart and node.operation.kind is Kind.REDUCTION):
            return False
        if node.op == "decided" and (node.type.absent or set(node.type.axes) - {"kv"}):
            return False
        # `cached`, of each KV head, or the order of the queries.
        counted = node.op == "size" or (node.op == "index" and node.axes == ("query",))
        if not counted and not node.operation.per_head and not reads(node.operation):
            return False
    return True
