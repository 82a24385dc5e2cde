"""Which values generated kernels can compute, and which of them need no tensor."""

from __future__ import annotations

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ir.written import written
from kvpolicy.dsl.ops.operations import Kind

# Whole exponents whose powers are products, for which float32 does as well as float64 powers.
_POWERS = (1, 2, 3, 4)


def written_window(node: Node) -> str:
    """The queries of a window as an author writes them."""
    text = written(node)
    return text[text.index("(") + 1 : -1]


def window_key(node: Node, bound: Bound, steps: bool) -> tuple[object, ...]:
    """A key that windows share if their queries are the same, in a prefill or at decode `steps`."""
    if not node.args:
        return (node.value,) if steps else ("all",)  # in a prefill all tokens are new
    count = node.args[0]
    if bound.static.follows(count):
        return ("recent", bound.number(count, 1))
    return ("recent", count)


def needs_no_tensor(node: Node, bound: Bound) -> bool:
    """Whether a value needs no tensor: it follows from the token's place and the host's numbers."""
    if bound.static.needs(node) is not None:
        return True
    if not set(node.type.axes) <= {"token"}:
        return False
    if node.operation.kind is Kind.PLACE:
        return True
    if node.op == "index":
        return node.axes == ("token",)
    if node.op == "top":
        return is_end(node, bound)
    if not node.operation.in_kernels or (node.op == "power" and exponent(node) is None):
        return False
    return node.op != "exp" and all(needs_no_tensor(arg, bound) for arg in node.args)


def looks_across(node: Node, bound: Bound) -> bool:
    """Whether a value depends on data of other layers."""
    return any(part.across_layers for part in node.walk() if bound.static.needs(part) is None)


def is_end(node: Node, bound: Bound) -> bool:
    """Whether a set is `recent(n)` or `sinks(n)` with a number that the host knows."""
    static = node.takes_an_end and bound.static.needs(node.args[1]) is not None
    return static and node.axes == ("token",)


def exponent(node: Node) -> float | None:
    """The exponent of a power that a kernel can compute: 1, 2, 3, 4 or 1/2; None: another."""
    power = node.args[1]
    if power.op != "number":
        return None
    value = float(power.literal)
    return value if value in _POWERS or value == 0.5 else None


def finite(node: Node) -> bool:
    """Whether every present value of a node made inside kernels is finite."""
    row = node.operation
    if row.always_finite or node.type.kind == "truth":
        return True
    if row.infinite_of_none:
        return finite(node.args[0]) and not node.args[0].type.absent
    if row.kind is Kind.POOL:
        return finite(node.args[0])
    if node.op in ("divide", "power") and node.args[1].op == "number":
        return node.args[1].literal > 0 and finite(node.args[0])
    return row.keeps_finite and all(finite(arg) for arg in node.args)
