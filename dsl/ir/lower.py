"""Rewriting a checked program for one model and one set of parameter values.

`fold` replaces what parameters and model sizes already decide (`x where average else y`), so that
no execution computes a branch that is never used. A branch may lack axes of the choice; an
operation that reads along one of them gets

    broadcast(x)                    x repeated along the axes of the node's type

`lower` replaces `then` and the unsized `top` by
operations that say what they take:

    missing[axes](budget, taken)    entries to fill, added up over the competing axes
    remaining[axes](taken)          candidates left over, added up over the competing axes
    fill[axes](x, taken, n, left)   taken, and the n best of the rest by x (all if n >= left)
    mask["rest"](x, left)           x at the entries of each KV head that are left over

Expressions over two vectors per entry become inner products, see `ir/inner_products.py`.

The section and the name `budget` become the floored budget. In decode rules without a `budget` of
their own it stays the leaf `budget`: the whole numbers that the prefill decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import IntEnum
from fractions import Fraction
from functools import cache

from kvpolicy.dsl.ir.counts import floored
from kvpolicy.dsl.ir.graph import union
from kvpolicy.dsl.ir.head_tables import HeadTables, has_head_table
from kvpolicy.dsl.ir.host import Value, evaluator
from kvpolicy.dsl.ir.inner_products import with_inner_products
from kvpolicy.dsl.ir.nodes import HeadTable, ModelShape, Node, Type, When
from kvpolicy.dsl.ir.once import once
from kvpolicy.dsl.ir.traverse import Sections, rewritten
from kvpolicy.dsl.ops.operations import Kind

Env = Mapping[str, Value]


class Phase(IntEnum):
    """When an execution can compute a value."""

    PLAN = 0  # the prompt's length is known: no tensor of the model is needed
    LAYER = 1  # end of a layer's prefill
    END = 2  # after the last layer


class Phases:
    """The phase of every node of bound rules.

    Args:
        propagates: whether tokens are propagated: the positions and number of those that reach a
            layer are then known only there.
    """

    def __init__(self, propagates: bool) -> None:
        self._propagates = propagates

    @once
    def of(self, node: Node) -> Phase:
        """The earliest phase at which a node can be computed."""
        # The argument of a window is static; `attn` and `logits` need data, `distance` does not.
        row = node.operation
        if self._propagates and (
            row.of_tokens_there
            or node.op == "remaining"  # it counts tokens, also beside no set at all
            or (node.op == "size" and node.value == "length")
            or (node.op == "broadcast" and "token" in node.type.axes)
        ):
            return Phase.LAYER
        if node.op == "head_table":
            return Phase.PLAN
        if not node.args or row.reads_queries:
            return Phase.PLAN if row.known_to_host or row.of_tokens_there else Phase.LAYER
        phase = max(self.of(argument) for argument in node.args)
        if phase == Phase.LAYER and node.across_layers:
            return Phase.END
        return phase


class Static:
    """Which nodes are scalars that the host knows without data, and what they depend on.

    Args:
        propagates: whether tokens are propagated: `length` is then known with a layer's tokens
            instead of with the prompt.
    """

    def __init__(self, propagates: bool = False) -> None:
        self._names = {"layer": "layer", "prompt": "prompt", "generated": "generated"}
        self._names["length"] = "length" if propagates else "prompt"

    @once
    def needs(self, node: Node) -> frozenset[str] | None:
        """Names that a static scalar depends on; None: not static.

        The names are `layer`, `prompt`, `length` (only where tokens are propagated) and `generated`
        (only in decode).
        """
        if node.op == "size":
            if node.value == "cached":
                return None
            return frozenset({self._names[node.symbol]} if node.symbol in self._names else ())
        if node.op == "head_table":
            return None if node.type.axes or node.type.absent else frozenset({"layer"})
        if node.operation.known_to_host:
            return frozenset()
        if not node.operation.elementwise or node.op == "mask":
            return None
        parts = [self.needs(argument) for argument in node.args]
        name_sets = [names for names in parts if names is not None]
        return frozenset().union(*name_sets) if len(name_sets) == len(parts) else None

    def follows(self, node: Node, *names: str) -> bool:
        """Whether a node is a static scalar that depends on nothing but these names."""
        needs = self.needs(node)
        return needs is not None and needs <= {*names}


def fold(
    sections: Sections, env: Env, shape: ModelShape, tensors: Mapping[str, HeadTable]
) -> Sections:
    """The sections with what is known replaced: scalars by exact values, choices by a branch.

    What the model's tensors decide is replaced by head tables.

    Args:
        sections: of a checked program.
        env: values of parameters and model sizes, keyed as for `host.evaluate`.
        shape: of the model.
        tensors: those that come with the model, by name.
    """
    static, evaluate = Static(), evaluator(env)
    tables = HeadTables(shape, evaluate, tensors)

    @cache
    def visit(node: Node) -> Node:
        if node.operation.kind is Kind.LITERAL:
            return node
        if has_head_table(node):
            return Node(
                "head_table", value=tables.of(node), type=node.type, span=node.span, name=node.name
            )
        if static.follows(node):
            value = evaluate(node)
            if not isinstance(value, float):
                return _constant(value, node)
        if node.op == "decided":
            result = visit(sections.prefill.decided[node.symbol])
            return result if static.follows(result) else node
        if node.op == "choose" and static.follows(node.args[1]):
            return visit(node.args[0 if evaluate(node.args[1]) else 2])
        args = tuple(visit(argument) for argument in node.args)
        if args == node.args:
            return node
        if node.op == "then":
            args = tuple(map(_selection_of_its_own, node.args, args))
        result = _with_arguments(node, args)
        if result.type != node.type and static.follows(result):
            value = evaluate(result)
            return result if isinstance(value, float) else _constant(value, result)
        return result

    return rewritten(sections, visit)


def settled(node: Node, env: Env, static: Static, *names: str) -> Node:
    """A static scalar with every part that depends on `names` alone replaced by its value.

    Args:
        env: as for `fold`, with values of `names`.
        names: as `Static.needs` gives them.
    """
    return _Settling(env, static, names).visit(node)


class _Settling:
    """As `settled`; an object, as a function that calls itself is freed by a search for circles."""

    def __init__(self, env: Env, static: Static, names: tuple[str, ...]) -> None:
        self._evaluate, self._static, self._names = evaluator(env), static, names

    @once
    def visit(self, node: Node) -> Node:
        """The node rewritten."""
        value = self._evaluate(node) if self._static.follows(node, *self._names) else None
        if value is None or isinstance(value, float):
            return replace(node, args=tuple(self.visit(argument) for argument in node.args))
        return _constant(value, node)


def _selection_of_its_own(term: Node, folded: Node) -> Node:
    """A folded term of `then`; of a choice a selection, as its branches do not choose in order."""
    chosen = term.op == "choose" and folded.op == "top"
    return Node("then", (folded,), type=folded.type, when=folded.when) if chosen else folded


def _with_arguments(node: Node, args: tuple[Node, ...]) -> Node:
    """The node with other arguments, which may have lost axes that nothing reads along."""
    first = _with_axes(args[0], node.args[0], node.operation.reads_along or node.axes)
    args = (first, *args[1:])
    lost_axes = {*union(node.args)} - {*union(args)}
    if not lost_axes:
        return replace(node, args=args)
    return replace(node, args=args, type=_without(node.type, lost_axes))


def _with_axes(argument: Node, original: Node, read_axes: tuple[str, ...]) -> Node:
    """A rewritten argument, broadcast to all its old axes if the node reads along an axis.

    To all: where KV heads hold different entries, `token` is another axis without `kv`.
    """
    if not read_axes or not set(original.type.axes) - set(argument.type.axes):
        return argument
    return Node("broadcast", (argument,), type=original.type, when=argument.when)


def _without(type_: Type, lost_axes: set[str]) -> Type:
    axes = tuple(axis for axis in type_.axes if axis not in lost_axes)
    window = type_.window if "query" in axes else None
    return replace(type_, axes=axes, window=window, reach=type_.reach if "past" in axes else None)


def _constant(value: Fraction | bool, node: Node) -> Node:
    kind = "truth" if isinstance(value, bool) else "number"
    type_ = Type(kind, (), node.type.unit, exact=True)
    return Node(kind, value=value, type=type_, when=When.LOAD, span=node.span, name=node.name)


def lower(sections: Sections) -> Sections:
    """The sections without `then`, unsized `top` and the name `budget`; equal nodes are one."""
    budget = sections.prefill.budget
    lowering = _Lowering(budget)
    if sections.propagate is not None and sections.propagate.budget is not None:
        lowering.own["propagate"] = sections.propagate.budget
    prefill = rewritten(sections.prefill, lowering.visit)
    if budget is not None:
        prefill = replace(prefill, budget=lowering.whole_budget(None))
    if sections.share is not None and sections.share.exceptions is not None:
        lowering.visit(sections.share.exceptions)  # equal nodes in `direction` then take its names
    share = rewritten(sections.share, lowering.visit)
    # An unsized `top` in `tokens` fills the section's own budget; lets are shared with `keep`.
    lowering.filled = "propagate"
    propagate = rewritten(sections.propagate, lowering.visit)
    decode_budget = None if sections.decode is None else sections.decode.budget
    if decode_budget is None and budget is not None:
        kind = Type("number", budget.type.axes, "tokens")
        decode_budget = Node("budget", type=kind, when=When.STEP)
    decode = rewritten(sections.decode, _Lowering(decode_budget).visit)
    return with_inner_products(Sections(prefill, decode, propagate, share))


class _Lowering:
    """Rewrites the nodes of the prefill's sections, or of decode."""

    def __init__(self, budget: Node | None) -> None:
        # Budgets by the value of the leaf `budget`: None, or "propagate".
        self.own: dict[str | None, Node] = {} if budget is None else {None: budget}
        self.filled: str | None = None  # the key of the budget that an unsized `top` fills
        self._unique: dict[tuple[object, ...], Node] = {}  # nodes made, by operation and arguments

    @once
    def visit(self, node: Node) -> Node:
        """The node rewritten."""
        return self._share(self._rewrite(node))

    def _share(self, node: Node) -> Node:
        type_ = node.type if node.op == "broadcast" else None
        key = (node.op, node.axes, type(node.value), node.value, type_, *map(id, node.args))
        return self._unique.setdefault(key, node)

    def _nothing(self) -> Node:
        return self._share(Node("truth", value=False, type=Type("truth"), when=When.LOAD))

    def _present(self, taken_set: Node) -> Node:
        """A token set, empty where it is absent."""
        return self._share(_or(taken_set, self._nothing())) if taken_set.type.absent else taken_set

    def _floored(self, node: Node) -> Node:
        """A count, floored where it is used: exactly if it is known before the prefill."""
        if node.op == "budget":  # whole numbers already
            return self._share(node)
        if node.op == "head_table":
            axes, layers = node.head_table.axes, node.head_table.layers
            floors = tuple(tuple(None if x is None else floored(x) for x in own) for own in layers)
            return self._share(replace(node, value=HeadTable(axes, floors)))
        return self._share(Node("floor", (node,), type=node.type, when=node.when))

    def whole_budget(self, name: str | None) -> Node:
        """The budget of a key of `own`, floored."""
        budget = self.own[name]
        return self._floored(budget if budget.op == "budget" else self.visit(budget))

    def _rewrite(self, node: Node) -> Node:
        if node.op == "budget":
            return self.whole_budget(None if node.value is None else node.symbol)
        if node.op == "top" and len(node.args) == 1:
            return self._fill(node, self._nothing())
        if node.op == "top":
            x, count = self.visit(node.args[0]), self._floored(self.visit(node.args[1]))
            return replace(node, args=(x, count))
        if node.op != "then":
            args = tuple(self.visit(argument) for argument in node.args)
            return node if args == node.args else replace(node, args=args)
        taken_set = self._present(self.visit(node.args[0]))
        for argument in node.args[1:]:
            taken_set = self._after(taken_set, argument)
        return taken_set

    def _after(self, taken_set: Node, right: Node) -> Node:
        """`taken_set then right`; a name on the right is computed on all candidates."""
        if right.op != "top" or right.name is not None:
            return self._share(_or(taken_set, self._present(self.visit(right))))
        if len(right.args) == 1:
            return self._fill(right, taken_set)
        x, count = self.visit(right.args[0]), self._floored(self.visit(right.args[1]))
        left_over = self._share(Node("not", (taken_set,), type=taken_set.type, when=taken_set.when))
        kind = Type("number", union((x, left_over)), x.type.unit, absent=True)
        when = max(x.when, left_over.when)
        rest = self._share(Node("mask", (x, left_over), value="rest", type=kind, when=when))
        kind = Type("truth", union((rest, count)))
        origin = right.origin if taken_set.op == "truth" else None
        when = max(rest.when, count.when)
        if "layer" in right.axes and when > When.PROMPT:
            when = max(when, When.END)
        top = Node("top", (rest, count), right.axes, type=kind, when=when, origin=origin)
        return self._share(_or(taken_set, self._share(top)))

    def _fill(self, top: Node, taken_set: Node) -> Node:
        x, budget, axes = self.visit(top.args[0]), self.whole_budget(self.filled), top.axes

        def number_over(*nodes: Node) -> Type:
            """A number of entries, one for all tokens and heads that compete."""
            rest = tuple(axis for axis in union(nodes) if axis not in (*axes, "token"))
            return Type("number", rest, "tokens")

        moment = When.END if "layer" in axes else max(budget.when, taken_set.when)
        kind = number_over(budget, taken_set)
        count = Node("missing", (budget, taken_set), axes, type=kind, when=moment)
        kind, when = number_over(taken_set), max(taken_set.when, moment)
        remaining = Node("remaining", (taken_set,), axes, type=kind, when=when)
        kind = Type("truth", union((x, taken_set, count)))
        moment = max(moment, x.when)
        return Node("fill", (x, taken_set, count, remaining), axes, type=kind, when=moment)


def _or(a: Node, b: Node) -> Node:
    return Node("or", (a, b), type=Type("truth", union((a, b))), when=max(a.when, b.when))
