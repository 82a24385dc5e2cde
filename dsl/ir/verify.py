"""What a legal program is; every program is verified before it is bound.

The checker never makes a program that fails here: a failure is a defect of ours, which must show
before anything is executed, and not as a wrong selection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from fractions import Fraction

from kvpolicy.dsl.ir.nodes import AXES, OPERATIONS, WINDOWS, Node, Program

_SIZES = frozenset("layer layers kv_heads heads prompt length generated cached pi".split())
_TRUTHS = frozenset(
    "truth all new less less_equal greater greater_equal equal not_equal and or not any top then "
    "nearest next".split()
)
_NUMBERS = frozenset(
    "number position key value hidden_in hidden_mid attn logits distance add subtract multiply "
    "divide floor_divide modulo power negate abs exp log sqrt cos sin acos floor ceil round "
    "minimum maximum sum mean max min var count rank index avgpool maxpool split cascade cluster "
    "uniform".split()
)
_LOGIC = frozenset("and or not then any".split())
_ELEMENTWISE = frozenset(
    "add subtract multiply divide floor_divide modulo power negate abs exp log sqrt cos sin acos "
    "floor ceil round minimum maximum less less_equal greater greater_equal equal not_equal and or "
    "not mask choose then".split()
)
_REDUCTIONS = frozenset("sum mean max min var any count".split())
_WITH_AXES = _REDUCTIONS | {"rank", "index", "top", "split", "cascade", "cluster"}
_LEAF_AXES = {
    "number": (),
    "truth": (),
    "param": (),
    "size": None,  # `cached` has the axis kv
    "position": ("token",),
    "key": ("kv", "token", "dim"),
    "value": ("kv", "token", "dim"),
    "hidden_in": ("token", "channel"),
    "hidden_mid": ("token", "channel"),
    "attn": ("kv", "group", "query", "token"),
    "logits": ("kv", "group", "query", "token"),
    "distance": ("query", "token"),
}


class MalformedProgram(Exception):
    """A program that no checked file can give."""


def verify(program: Program) -> None:
    """Checks every node of a program and the types of its sections.

    Raises:
        MalformedProgram: with the operation and what is wrong with it.
    """
    seen: set[int] = set()
    for root in _roots(program):
        for node in root.walk(seen):
            try:
                _verify_node(node, program)
            except MalformedProgram as error:
                raise MalformedProgram(f"`{node.op}` in `{program.name}`: {error}") from None
    for name, node, kind, axes in _sections(program):
        if node is not None and (node.type.kind != kind or set(node.type.axes) - axes):
            raise MalformedProgram(f"`{name}` of `{program.name}` is {node.type}")


def _sections(program: Program) -> Iterator[tuple[str, Node | None, str, set[str]]]:
    """Each section's name, value, kind and the axes that it may have."""
    for rules in (program.prefill, program.decode):
        if rules is None:
            continue
        yield "score", rules.score, "number", {"kv", "token"}
        yield "budget", rules.budget, "number", {"kv"}
        yield "keep", rules.keep, "truth", {"kv", "token"}
        yield "when", rules.when, "truth", set()
        if rules.merge is not None:
            merge, dropped = rules.merge, {"kv", "dropped"}
            yield "merge.into", merge.into, "truth", {"kv", "token", "dropped"}
            yield "merge.accept", merge.accept, "truth", dropped
            yield "merge.weight", merge.weight, "number", dropped
            yield "merge.own", merge.own, "number", dropped
            yield "merge.divide", merge.divide, "number", {"kv", "token"}
    for name, node in program.prefill.decided.items():
        yield f"let.{name}", node, node.type.kind, {"kv", "group", "dim"}
    if program.propagate is not None:
        yield "propagate.tokens", program.propagate.tokens, "truth", {"token"}
        yield "propagate.first", program.propagate.first, "truth", set()
        yield "propagate.every", program.propagate.every, "truth", set()
        yield "propagate.budget", program.propagate.budget, "number", set()
    if program.share is not None:
        yield "share.when", program.share.when, "truth", set()
        yield "share.direction", program.share.direction, "number", {"kv", "token", "dim"}
        yield "share.except", program.share.exceptions, "truth", {"kv", "token"}


def _roots(value: object) -> Iterator[Node]:
    """Every node that stands in a field of the program, at any depth."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _roots(each)
    elif isinstance(value, tuple):
        for each in value:
            yield from _roots(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _roots(getattr(value, field.name))


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise MalformedProgram(message)


def _verify_node(node: Node, program: Program) -> None:
    _expect(node.op in OPERATIONS, "there is no such operation")
    least, most = _arity(OPERATIONS[node.op][0])
    _expect(least <= len(node.args) <= most, f"has {len(node.args)} arguments")
    _verify_type(node)
    _verify_axes(node)
    check = _VALUES.get(node.op)
    if check is None:
        _expect(node.value is None, f"has the value {node.value!r}")
    else:
        _expect(check(node, program), f"has the value {node.value!r}")


def _arity(text: str) -> tuple[int, int]:
    """`2`, `1-2` or `2+` as the least and most number of arguments."""
    if text.endswith("+"):
        return int(text[:-1]), 1 << 30
    least, _, most = text.partition("-")
    return int(least), int(most or least)


def _verify_type(node: Node) -> None:
    kind, args = node.type.kind, node.args
    _expect(kind in ("number", "truth"), f"is a {kind}")
    _expect(node.op not in _TRUTHS or kind == "truth", "must be a truth value")
    _expect(node.op not in _NUMBERS or kind == "number", "must be a number")
    if node.op in _LOGIC:
        _expect(all(arg.type.kind == "truth" for arg in args), "takes truth values")
    elif node.op in ("mask", "choose"):
        _expect(args[1].type.kind == "truth", "needs a condition")
        _expect(all(arg.type.kind == kind for arg in args[::2]), "chooses between unlike kinds")
    elif node.op in _ELEMENTWISE or node.op in (
        "top",
        "rank",
        "split",
        "cascade",
        "avgpool",
        "maxpool",
    ):
        _expect(all(arg.type.kind == "number" for arg in args), "takes numbers")
    if node.op not in ("at", "past"):
        _expect(all(arg.when <= node.when for arg in args), "is known before its arguments")


def _verify_axes(node: Node) -> None:
    own, axes = node.axes, node.type.axes
    ordered = tuple(axis for axis in AXES if axis in axes)
    _expect(axes == ordered, f"has the axes {axes} out of order")
    _expect(bool(own) == (node.op in _WITH_AXES), f"is over {own}")
    _expect(len(set(own)) == len(own), "names an axis twice")
    _expect(all(axis in (*AXES, "layer") for axis in own), f"is over {own}")
    inner = {axis for arg in node.args for axis in arg.type.axes}
    if node.op in _LEAF_AXES and _LEAF_AXES[node.op] is not None:
        _expect(axes == _LEAF_AXES[node.op], f"has the axes {axes}")
    if node.op in _ELEMENTWISE:
        _expect(set(axes) == inner, f"has the axes {axes} of arguments with {sorted(inner)}")
    if node.op in _REDUCTIONS:
        _expect(set(own) - {"layer"} <= inner, f"is over {own}, which its argument lacks")
        _expect(set(axes) == inner - set(own), f"has the axes {axes} left of {sorted(inner)}")
    if node.op in ("top", "rank"):
        _expect(set(own) - {"layer"} <= set(node.args[0].type.axes), "nothing competes there")


_VALUES: dict[str, Callable[[Node, Program], bool]] = {
    "number": lambda node, program: isinstance(node.value, Fraction),
    "truth": lambda node, program: isinstance(node.value, bool),
    "param": lambda node, program: node.value in program.params,
    "size": lambda node, program: node.value in _SIZES,
    "data": lambda node, program: node.value in program.data,
    "state": lambda node, program: isinstance(node.value, str),
    "budget": lambda node, program: (
        node.value is None or (node.value == "propagate" and program.propagate is not None)
    ),
    "decided": lambda node, program: node.value in program.prefill.decided,
    "special": lambda node, program: node.value in ("own", "below", "mass", "members"),
    **dict.fromkeys(
        WINDOWS,
        lambda node, program: (
            node.value in ("recent", "all", "new") and (node.value == "recent") == bool(node.args)
        ),
    ),
}
