"""Types expressions and translates them to IR nodes: names, operators, `where`, `then`.

Methods that find a defect report it and raise `Wrong`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial

from kvpolicy.dsl.check.names import Context, Expansion, Names, Wrong, all_sound, sound
from kvpolicy.dsl.ir.graph import TooLarge, extents, in_order, union
from kvpolicy.dsl.ir.nodes import Extent, Node, When
from kvpolicy.dsl.ops.host import applied
from kvpolicy.dsl.ops.operations import Builtin, Kind
from kvpolicy.dsl.ops.table import BUILTINS, OPERATIONS
from kvpolicy.dsl.syntax.source import Span
from kvpolicy.dsl.syntax.tree import Call, Chain, Expr, Name, Number, Operator, Then, Where

# Deepest nesting of expressions, through names too, so that typing them needs little stack.
MAX_LEVEL = 120

Reading = Callable[[], Node]  # types an expression when it is called

_WHERE_NOT = {
    "prompt": "is known only when a request arrives",
    "prefill": "exists only in the prefill",
    "decode": "exists only in decode",
    "merge": "means something only inside `merge`",
    "share": "means something only inside `share`",
    "tensors": "is not known before the prefill",
    "layer": "has no value here: this holds for the whole model",
}
_ELSEWHERE = {
    "length": "`cached` counts a head's entries in decode",
    "cached": "`length` counts a layer's tokens in the prefill",
    "generated": "use it under `decode`",
}
UNIT_WORDS = {"tokens": "a number of tokens", "layers": "a number of layers", "ratio": "a ratio"}
_KINDS = {"number": "a number", "truth": "a truth value"}


class Typer:
    """Types the expressions of one context."""

    def __init__(self, scope: Names, context: Context) -> None:
        self.scope = scope
        self.context = context
        self.graph = scope.graph
        self.expansion: Expansion | None = None
        self.receivers = False  # whether `nearest` and `next` may stand here

    # Reporting

    def error(self, code: str, message: str, span: Span, help: str | None = None) -> Wrong:
        """Reports a defect; one inside a derived function at the place of the call."""
        if self.expansion:
            span = self.expansion.span
        return self.scope.error(code, message, span, help)

    def shown(self, expr: Expr) -> str:
        """The expression as written, shortened, for messages."""
        if self.expansion:
            return self.expansion.name
        return self.scope.shown(expr.span)

    def span(self, expr: Expr) -> Span:
        """Where a node made from this expression stands in the file."""
        return self.expansion.span if self.expansion else expr.span

    # Uses of parameters; a name inside a derived function is an argument, not a parameter.

    def suggest_unit(self, expr: Expr, unit: str) -> None:
        """As `Names.suggest_unit`."""
        if not self.expansion:
            self.scope.suggest_unit(expr, unit)

    def suggest_range(self, expr: Expr, minimum: int, *, odd: bool = False) -> None:
        """As `Names.suggest_range`."""
        if not self.expansion:
            self.scope.suggest_range(expr, minimum, odd=odd)

    def absent(self, node: Node, expr: Expr, what: str) -> Wrong:
        """Reports that a deciding value may be absent."""
        message = f"{what} may be absent: `{self.shown(expr)}` has no value for some"
        help = "add `else`, or reduce it"
        if node.op == "mask":
            message = f"{what} may be absent: it has no value where the condition is false"
            help = "add `else`"
        return self.error("absent", message, expr.span, help)

    def check_reduced(self, node: Node, expr: Expr) -> None:
        """Checks that a held value does not have all queries by all tokens."""
        if is_whole_map(node, self.scope.whole_maps):
            message = f"`{self.shown(expr)}` would hold N x N values"
            help = "reduce it at once with `sum[query](...)`"
            raise self.error("whole-map", message, expr.span, help)

    # Expressions

    def expr(self, expr: Expr) -> Node:
        """The node of an expression."""
        self.scope.level += 1
        if self.scope.level > MAX_LEVEL:
            raise TooLarge
        try:
            node = self._expr(expr)
        finally:
            self.scope.level -= 1
        self._check_held_briefly(node, expr)
        self._check_merged_here(node, expr)
        return node

    def _check_held_briefly(self, node: Node, expr: Expr) -> None:
        """Checks that attention of all queries is not held until other layers are computed."""
        if node.when < When.END or self.context.phase != "prefill":
            return
        if is_whole_map(node, self.scope.whole_maps):
            message = f"`{self.shown(expr)}` would hold N x N values until the last layer is done"
            help = "reduce `query` or `token` before `[layer]`"
            raise self.error("whole-map", message, expr.span, help)

    def _check_merged_here(self, node: Node, expr: Expr) -> None:
        """Checks that a value does not depend on what other layers merge."""
        if not self.context.in_merge or not node.across_layers:
            return
        names = [*self.scope.definitions["merge"], *self.scope.definitions["decode.merge"]]
        states = [part for part in node.walk() if part.op == "state" and part.value in names]
        if states or any(part.operation.kind is Kind.MERGE for part in node.walk()):
            message = f"`{self.shown(expr)}` looks at what other layers merge"
            help = (
                "layers merge one by one: look at others outside `merge`, in a `let` of all tokens"
            )
            raise self.error("merge", message, expr.span, help)

    def _expr(self, expr: Expr) -> Node:
        if isinstance(expr, Number):
            return self.graph.make("number", value=expr.value, span=self.span(expr))
        if isinstance(expr, Name):
            return self.name(expr)
        if isinstance(expr, Operator):
            return self.operation(expr)
        if isinstance(expr, Chain):
            return self.chain(expr)
        if isinstance(expr, Where):
            return self.where(expr)
        if isinstance(expr, Then):
            return self.then(expr, [sound(partial(self.expr, term)) for term in expr.terms])
        assert isinstance(expr, Call)
        return self.scope.type_call(self, expr)

    def number(self, expr: Expr, what: str) -> Node:
        """The node of an expression that must be a number."""
        node = self.expr(expr)
        self.check_kind(node, "number", expr, what)
        return node

    def truth(self, expr: Expr, what: str) -> Node:
        """The node of an expression that must be a truth value."""
        node = self.expr(expr)
        self.check_kind(node, "truth", expr, what)
        return node

    def check_kind(self, node: Node, kind: str, expr: Expr, what: str) -> None:
        """Checks that a node is a number or a truth value, as `kind` says."""
        if node.type.kind == kind:
            return
        message = f"{what} needs {_KINDS[kind]}; `{self.shown(expr)}` is {_KINDS[node.type.kind]}"
        help = None
        if kind == "truth":
            help = "a comparison such as `x > 0` makes one"
        elif "token" in node.type.axes:
            help = (
                "`count[token](...)` counts a set; `x where set` restricts numbers to it; "
                "`or` joins two sets, `and not` takes one away"
            )
        raise self.error("type", message, expr.span, help)

    def name(self, expr: Name) -> Node:
        if self.expansion and expr.text in self.expansion.values:
            return self.expansion.values[expr.text]
        if not self.expansion:
            node = self.scope.resolve(expr, self.context)
            if node is not None:
                return node
        builtin = BUILTINS.get(expr.text)
        if builtin is None:
            raise self.scope.unknown(expr, self.context)
        return self.builtin(builtin, expr)

    def builtin(self, builtin: Builtin, expr: Expr) -> Node:
        """The node of a name of the language; reports one that this context does not have."""
        context, where = self.context, builtin.where
        exists = {
            "always": True,
            "layer": context.phase != "static" or context.inside == "share",
            "prompt": context.phase != "static",
            "tensors": context.phase != "static",
            "prefill": context.phase == "prefill",
            "decode": context.phase == "decode",
            "merge": context.in_merge,
            "share": context.inside == "share",
        }[where]
        if not exists:
            static = context.phase == "static" and where != "layer"
            reason = _WHERE_NOT["tensors" if static else where]
            help = _ELSEWHERE.get(builtin.name)
            code = "merge" if where == "merge" else "phase"
            raise self.error(code, f"`{builtin.name}` {reason}", expr.span, help)
        if builtin.unserved:
            self.scope.note_unserved(f"`{builtin.name}`", self.span(expr))
        return self.at_dropped(self.leaf(builtin, self.span(expr)))

    def leaf(self, builtin: Builtin, span: Span) -> Node:
        when, exact = When.LOAD, builtin.exact
        if builtin.where == "prompt":
            when = When.PROMPT
        elif builtin.name == "length" and not self.scope.propagates:
            when = When.PROMPT
        elif builtin.where not in ("always", "layer"):
            when, exact = self.context.base, False
        return self.graph.make(
            builtin.op, kind=builtin.kind, axes=builtin.axes, unit=builtin.unit,
            value=builtin.value, when=when, exact=exact, span=span,
        )  # fmt: skip

    def at_dropped(self, node: Node) -> Node:
        """Inside `merge`, a value per token is read at the dropped entries."""
        if not self.context.in_merge or "token" not in node.type.axes or node.op == "special":
            return node
        # KV heads drop different entries, so each reads a value [token] at its own.
        axes = {"kv", *("dropped" if axis == "token" else axis for axis in node.type.axes)}
        type_ = node.type
        return self.graph.make(
            "dropped", (node,), kind=type_.kind, axes=in_order(axes), unit=type_.unit,
            span=node.span,
        )  # fmt: skip

    # Operators

    def operation(self, expr: Operator) -> Node:
        row = OPERATIONS[expr.op]
        reader = self.truth if row.takes == "truth" else self.number
        operands = all_sound(partial(reader, operand, f"`{row.sign}`") for operand in expr.operands)
        return self.combine(expr.op, expr, expr.operands, operands)

    def combine(self, op: str, expr: Expr, written: tuple[Expr, ...], nodes: list[Node]) -> Node:
        """An elementwise operation on nodes of the right kind."""
        self.check_extents(nodes, expr)
        row = OPERATIONS[op]
        if row.unit == "alike":
            self.check_units(written, nodes, row.combines)
        if row.result == "truth":
            return self.graph.make(
                op, tuple(nodes), kind="truth", absent=False, span=self.span(expr)
            )
        if row.divides and row.host is not None and self.graph.literal(nodes[1]) == 0:
            infinite = applied(row.host, (Fraction(1), Fraction(0)))
            result = "infinite, or 0 where 0 is divided" if infinite else "0"
            message = f"a division by 0: `{self.shown(expr)}` is {result}"
            self.scope.warn("zero", message, self.span(expr))
        exact = None
        if op == "power":
            exact = nodes[1].op == "number" and nodes[1].literal.denominator == 1
        unit = _result_unit(row.unit, [node.type.unit for node in nodes])
        return self.graph.make(op, tuple(nodes), unit=unit, exact=exact, span=self.span(expr))

    def check_extents(self, nodes: Iterable[Node], expr: Expr) -> None:
        """Checks that all nodes that have queries, or past layers, have the same ones."""
        for axis in ("query", "past"):
            axis_extents = extents(nodes, axis)
            if len(axis_extents) < 2:
                continue
            first, second = axis_extents[:2]
            if axis == "query":
                subject = f"the queries of `{first.text}` and those of `{second.text}`"
                help = "reduce `query` of each first, as in `mean[query](...)`, or take one window"
            else:
                subject = f"`past` over {_layers_of(first)} and over {_layers_of(second)}"
                help = "reduce `past` of each first, or look back equally far"
            message = f"{subject} are two axes; they cannot be combined"
            raise self.error("axis", message, expr.span, help)

    def check_units(self, written: tuple[Expr, ...], nodes: list[Node], phrase: str) -> None:
        """Checks that two values have one unit, and suggests it for one that has none."""
        left, right = nodes[0].type.unit, nodes[1].type.unit
        if left and right and left != right:
            message = (
                f"`{self.shown(written[0])}` is {UNIT_WORDS[left]} and "
                f"`{self.shown(written[1])}` is {UNIT_WORDS[right]}; they cannot be {phrase}"
            )
            help = None
            if {left, right} == {"tokens", "ratio"}:
                help = (
                    "a ratio times a number of tokens is a number of tokens, as in `rate * prompt`"
                )
            span = Span(written[0].span.start, written[1].span.end)
            raise self.error("unit", message, span, help)
        for expr, unit in ((written[0], right), (written[1], left)):
            if unit:
                self.suggest_unit(expr, unit)

    def chain(self, expr: Chain) -> Node:
        nodes = all_sound(
            partial(self.number, operand, "a comparison") for operand in expr.operands
        )
        comparisons = all_sound(
            partial(self.combine, op, expr, expr.operands[i : i + 2], nodes[i : i + 2])
            for i, op in enumerate((expr.first, expr.second))
        )
        return self.combine("and", expr, (), comparisons)

    def where(self, expr: Where) -> Node:
        reading = partial(self.expr, expr.value)
        if expr.other is not None:
            return self.chosen(expr, reading, partial(self.expr, expr.other))
        value, condition = all_sound((reading, self._condition(expr)))
        self.check_extents((value, condition), expr)
        return self.graph.make(
            "mask", (value, condition), kind=value.type.kind, unit=value.type.unit, absent=True,
            span=self.span(expr),
        )  # fmt: skip

    def _condition(self, expr: Where) -> Reading:
        return partial(self.truth, expr.condition, "`where`")

    def chosen(self, expr: Where, value: Reading, other: Reading) -> Node:
        """`value where condition else other`, whose branches `value` and `other` type."""
        x, condition, y = all_sound((value, self._condition(expr), other))
        assert expr.other is not None
        if x.type.kind != y.type.kind:
            message = (
                f"`{self.shown(expr.value)}` is {_KINDS[x.type.kind]}, but "
                f"`{self.shown(expr.other)}` is {_KINDS[y.type.kind]}"
            )
            help = "both branches of `where` are of one kind"
            raise self.error("type", message, expr.span, help)
        self.check_extents((x, condition, y), expr)
        self.check_units((expr.value, expr.other), [x, y], OPERATIONS["choose"].combines)
        return self.graph.make(
            "choose", (x, condition, y), kind=x.type.kind, unit=x.type.unit or y.type.unit,
            absent=x.type.absent or y.type.absent, span=self.span(expr),
        )  # fmt: skip

    def then(self, expr: Then, terms: Iterable[Node | None]) -> Node:
        """Token sets that fill in order; None stands for one that is wrong."""
        pairs = zip(terms, expr.terms, strict=True)
        nodes = tuple(all_sound(partial(self.check_set, *pair, "`then`") for pair in pairs))
        self.check_extents(nodes, expr)
        return self.graph.make(
            "then", nodes, kind="truth", axes=union(nodes), absent=False, span=self.span(expr)
        )

    def check_set(self, node: Node | None, expr: Expr, what: str) -> Node:
        """The node, if it is a token set."""
        if node is None:
            raise Wrong
        if node.type.kind == "number":
            message = f"{what} needs a token set; `{self.shown(expr)}` is a number"
            help = "`top(x, n)` makes a set of a number"
            raise self.error("not-a-set", message, expr.span, help)
        if not {"token", "dropped"} & set(node.type.axes):
            of = "per KV head" if node.type.axes else "for the layer"
            message = f"{what} needs a token set; `{self.shown(expr)}` is one truth value {of}"
            help = f"write `all where {self.shown(expr)} else ...`"
            raise self.error("not-a-set", message, expr.span, help)
        return node


def _layers_of(extent: Extent) -> str:
    return f"`{extent.text}` layer{'' if extent.text == '1' else 's'}"


def _result_unit(rule: str | None, units: list[str | None]) -> str | None:
    """The unit of an arithmetic result, by `Operation.unit`."""
    if rule == "alike":
        return units[0] or units[1]
    if rule == "product" and "tokens" in units:
        other_unit = units[1] if units[0] == "tokens" else units[0]
        return "tokens" if other_unit in (None, "ratio") else None
    if rule == "quotient":
        return "tokens" if units[0] == "tokens" and units[1] in (None, "ratio") else None
    return units[0] if rule == "first" else None


def is_whole_map(node: Node, maps: set[Node]) -> bool:
    """Whether a node holds a value for every query and every token of the prompt.

    `maps` has the nodes known to hold such values; those found are added.
    """
    axes = node.type.axes
    if "query" not in axes or not {"token", "dropped"} & set(axes):
        return False
    if node not in maps and any(is_whole_map(arg, maps) for arg in node.args):
        maps.add(node)
    return node in maps
