"""Rewriting a checked program for one model and one set of parameter values.

`fold` replaces what parameters and model sizes already decide (`x where average else y`), so that
no execution computes a branch that is never used. `lower` replaces `then` and the unsized `top` by
operations that say what they take:

    missing[axes](budget, taken)    entries to fill, added up over the competing axes
    remaining[axes](taken)          candidates left over, added up over the competing axes
    fill[axes](x, taken, n, left)   taken, and the n best of the rest by x (all if n >= left)
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from fractions import Fraction

from kvpolicy.dsl.exact import Value, evaluator
from kvpolicy.dsl.ir import AXES, Node, Rules, Type, When

ELEMENTWISE = frozenset(
    "add subtract multiply divide floor_divide modulo power negate abs exp log sqrt cos sin acos "
    "floor ceil round minimum maximum less less_equal greater greater_equal equal not_equal and or "
    "not mask choose".split()
)
REDUCTIONS = frozenset("sum mean max min var any count".split())
# Known to the host before any tensor is seen.
STATIC_LEAVES = frozenset("number truth param size".split())

Env = Mapping[str, Value]


class Phase(IntEnum):
    """When an execution can compute a value."""

    PLAN = 0  # the prompt's length is known: no tensor of the model is needed
    LAYER = 1  # end of a layer's prefill
    END = 2  # after the last layer


_PLAN_LEAVES = STATIC_LEAVES | {"position", "all", "distance"}
_ACROSS = frozenset("past at split cluster".split())


class Phases:
    """The phase of every node of bound rules."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Node, Phase]] = {}

    def of(self, node: Node) -> Phase:
        """The earliest phase at which a node can be computed."""
        if id(node) not in self._known:
            self._known[id(node)] = (node, self._find(node))
        return self._known[id(node)][1]

    def _find(self, node: Node) -> Phase:
        # The argument of a window is static, so that `distance` needs no data and `attn` does.
        if not node.args or node.op in ("attn", "logits"):
            return Phase.PLAN if node.op in _PLAN_LEAVES else Phase.LAYER
        phase = max(self.of(argument) for argument in node.args)
        if phase == Phase.LAYER and ("layer" in node.axes or node.op in _ACROSS):
            return Phase.END
        return phase


def axes_of(*nodes: Node, without: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Union of the nodes' axes in canonical order, less `without`."""
    names = {axis for node in nodes for axis in node.type.axes}
    return tuple(axis for axis in AXES if axis in names and axis not in without)


class Static:
    """Which nodes are scalars known before the prefill, and what they depend on."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Node, frozenset[str] | None]] = {}

    def needs(self, node: Node) -> frozenset[str] | None:
        """Names among `layer`, `prompt` that a static scalar depends on; None: not static."""
        if id(node) not in self._known:
            self._known[id(node)] = (node, self._find(node))
        return self._known[id(node)][1]

    def _find(self, node: Node) -> frozenset[str] | None:
        if node.op == "size":
            if node.value in ("generated", "cached"):
                return None
            names = {"layer": "layer", "prompt": "prompt", "length": "prompt"}
            return frozenset({names[node.value]} if node.value in names else ())
        if node.op in STATIC_LEAVES:
            return frozenset()
        if node.op not in ELEMENTWISE or node.op == "mask":
            return None
        parts = [self.needs(argument) for argument in node.args]
        return None if None in parts else frozenset().union(*parts)


def fold(rules: Rules, env: Env) -> Rules:
    """The rules with every scalar that `env` decides replaced by its value.

    Args:
        rules: the prefill rules of a checked program.
        env: values of parameters and model sizes, keyed as for `exact.evaluate`.
    """
    static, evaluate = Static(), evaluator(env)
    done: dict[int, Node] = {}

    def visit(node: Node) -> Node:
        if id(node) not in done:
            done[id(node)] = rewrite(node)
        return done[id(node)]

    def rewrite(node: Node) -> Node:
        if node.op in ("number", "truth"):
            return node
        if static.needs(node) == frozenset():
            value = evaluate(node)
            if not isinstance(value, float):
                return _constant(value, node)
        if node.op == "choose" and static.needs(node.args[1]) == frozenset():
            return visit(node.args[0 if evaluate(node.args[1]) else 2])
        args = tuple(visit(argument) for argument in node.args)
        return node if args == node.args else _with_args(node, args)

    return _map_rules(rules, visit)


def _constant(value: Fraction | bool, node: Node) -> Node:
    kind = "truth" if isinstance(value, bool) else "number"
    type_ = Type(kind, (), node.type.unit, exact=True)
    return Node(kind, value=value, type=type_, when=When.LOAD, span=node.span, name=node.name)


def _with_args(node: Node, args: tuple[Node, ...]) -> Node:
    return Node(
        node.op,
        args,
        node.axes,
        node.value,
        type=node.type,
        when=node.when,
        span=node.span,
        name=node.name,
        origin=node.origin,
    )


def _map_rules(rules: Rules, visit) -> Rules:
    def one(node: Node | None) -> Node | None:
        return None if node is None else visit(node)

    return Rules(score=one(rules.score), budget=one(rules.budget), keep=one(rules.keep))


def lower(rules: Rules) -> Rules:
    """The rules without `then`, unsized `top` and the name `budget`; equal nodes are one."""
    done: dict[int, Node] = {}
    unique: dict[tuple, Node] = {}

    def visit(node: Node) -> Node:
        if id(node) not in done:
            done[id(node)] = share(rewrite(node))
        return done[id(node)]

    def share(made: Node) -> Node:
        key = (made.op, made.axes, type(made.value), made.value, *map(id, made.args))
        return unique.setdefault(key, made)

    def present(taken: Node) -> Node:
        """A token set, empty where it is absent."""
        nothing = share(Node("truth", value=False, type=Type("truth"), when=When.LOAD))
        return share(_or(taken, nothing)) if taken.type.absent else taken

    def floored(node: Node) -> Node:
        """Counts are floored where they are used, exactly if known before the prefill."""
        return share(Node("floor", (node,), type=node.type, when=node.when))

    def rewrite(node: Node) -> Node:
        if node.op == "budget":
            return floored(visit(rules.budget))
        if node.op == "top" and len(node.args) == 1:
            return fill(node, Node("truth", value=False, type=Type("truth"), when=When.LOAD))
        if node.op == "top":
            return _with_args(node, (visit(node.args[0]), floored(visit(node.args[1]))))
        if node.op != "then":
            args = tuple(visit(argument) for argument in node.args)
            return node if args == node.args else _with_args(node, args)
        taken = present(visit(node.args[0]))
        for argument in node.args[1:]:
            taken = after(taken, argument)
        return taken

    def after(taken: Node, right: Node) -> Node:
        """`taken then right`; a name on the right is computed on all candidates."""
        if right.op != "top" or right.name is not None:
            return share(_or(taken, present(visit(right))))
        if len(right.args) == 1:
            return fill(right, taken)
        x, count = visit(right.args[0]), floored(visit(right.args[1]))
        left = share(Node("not", (taken,), type=taken.type, when=taken.when))
        kind = Type("number", axes_of(x, left), x.type.unit, absent=True)
        rest = share(Node("mask", (x, left), type=kind, when=max(x.when, left.when)))
        kind = Type("truth", axes_of(rest, count))
        origin = right.origin if taken.op == "truth" else None
        when = max(rest.when, count.when)
        top = Node("top", (rest, count), right.axes, type=kind, when=when, origin=origin)
        return share(_or(taken, share(top)))

    def fill(top: Node, taken: Node) -> Node:
        x, budget, axes = visit(top.args[0]), floored(visit(rules.budget)), top.axes
        kind = Type("number", axes_of(budget, taken, without=(*axes, "token")), "tokens")
        moment = When.END if "layer" in axes else max(budget.when, taken.when)
        count = Node("missing", (budget, taken), axes, type=kind, when=moment)
        kind = Type("number", axes_of(taken, without=(*axes, "token")), "tokens")
        left = Node("remaining", (taken,), axes, type=kind, when=max(taken.when, moment))
        kind = Type("truth", axes_of(x, taken, count))
        moment = max(moment, x.when)
        return Node("fill", (x, taken, count, left), axes, type=kind, when=moment)

    return _map_rules(rules, visit)


def _or(a: Node, b: Node) -> Node:
    return Node("or", (a, b), type=Type("truth", axes_of(a, b)), when=max(a.when, b.when))
