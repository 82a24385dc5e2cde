"""Types expressions and translates them to IR nodes: names, operators, `where`, `then`.

A method returns None where something is wrong; the defect has then been reported, and whatever
uses the value stays silent.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from kvpolicy.dsl.check.names import Context, Expansion, Names
from kvpolicy.dsl.ir.graph import TooLarge, extents, in_order, union
from kvpolicy.dsl.ir.nodes import Extent, Node, When
from kvpolicy.dsl.ops.exact import applied
from kvpolicy.dsl.ops.operations import Builtin, Kind
from kvpolicy.dsl.ops.table import BUILTINS, OPERATIONS
from kvpolicy.dsl.syntax.source import Span
from kvpolicy.dsl.syntax.tree import Call, Chain, Expr, Name, Number, Operation, Then, Where

# How deep expressions may be nested through names, so that typing them needs little stack.
MAX_LEVEL = 120

_WHERE_NOT = {
    "prompt": "is known only when a request arrives",
    "prefill": "exists only in the prefill",
    "decode": "exists only in decode",
    "merge": "means something only inside `merge`",
    "share": "means something only inside `share`",
    "tensors": "is not known before the prefill",
    "layer": "has no value here: this holds for the whole model",
}


def typed(nodes: Iterable[Node | None]) -> list[Node] | None:
    """Nodes of which each has been looked at; None if one of them is wrong."""
    made = list(nodes)
    found = [node for node in made if node is not None]
    return found if len(found) == len(made) else None


class Typer:
    """Types the expressions of one context."""

    def __init__(self, scope: Names, context: Context) -> None:
        self.scope = scope
        self.context = context
        self.graph = scope.graph
        self.expansion: Expansion | None = None
        self.receivers = False  # whether `nearest` and `next` may stand here

    # Reporting

    def error(self, code: str, message: str, span: Span, help: str | None = None) -> None:
        """Reports a defect; inside a derived function at the call."""
        if self.expansion:
            span = self.expansion.span
        self.scope.error(code, message, span, help)

    def shown(self, expr: Expr) -> str:
        """The expression as written, shortened, for messages."""
        if self.expansion:
            return self.expansion.name
        return self.scope.shown(expr.span)

    def span(self, expr: Expr) -> Span:
        """Where a node made from this expression stands in the file."""
        return self.expansion.span if self.expansion else expr.span

    def absent(self, node: Node, expr: Expr, what: str) -> None:
        """Reports that a deciding value may be absent."""
        message = f"{what} may be absent: `{self.shown(expr)}` has no value for some"
        help = "add `else`, or reduce it"
        if node.op == "mask":
            message = f"{what} may be absent: it has no value where the condition is false"
            help = "add `else`"
        self.error("absent", message, expr.span, help)

    def reduced(self, node: Node, expr: Expr) -> bool:
        """Whether a value may be held: all queries by all tokens may not; otherwise reports."""
        if not is_whole_map(node, self.scope.whole_maps):
            return True
        message = f"`{self.shown(expr)}` would hold N x N values"
        self.error("whole-map", message, expr.span, "reduce it at once with `sum[query](...)`")
        return False

    # Expressions

    def expr(self, expr: Expr) -> Node | None:
        """The node of an expression, or None after a report."""
        self.scope.level += 1
        if self.scope.level > MAX_LEVEL:
            raise TooLarge
        node = self._expr(expr)
        self.scope.level -= 1
        if node is None or not self._held_briefly(node, expr) or not self._merged_here(node, expr):
            return None
        return node

    def _held_briefly(self, node: Node, expr: Expr) -> bool:
        """Whether attention of all queries need not be held for other layers; otherwise reports."""
        if node.when < When.END or self.context.phase != "prefill":
            return True
        if not is_whole_map(node, self.scope.whole_maps):
            return True
        message = f"`{self.shown(expr)}` would hold N x N values until the last layer is done"
        self.error("whole-map", message, expr.span, "reduce `query` or `token` before `[layer]`")
        return False

    def _merged_here(self, node: Node, expr: Expr) -> bool:
        """Whether other layers are not asked for what they merge; otherwise reports."""
        if not self.context.in_merge or not node.across_layers:
            return True
        names = [*self.scope.definitions["merge"], *self.scope.definitions["decode.merge"]]
        states = [each for each in node.walk() if each.op == "state" and each.value in names]
        if not states and not any(each.operation.kind is Kind.MERGE for each in node.walk()):
            return True
        message = f"`{self.shown(expr)}` looks at what other layers merge"
        help = "layers merge one by one: look at others outside `merge`, in a `let` of all tokens"
        self.error("merge", message, expr.span, help)
        return False

    def _expr(self, expr: Expr) -> Node | None:
        if isinstance(expr, Number):
            return self.graph.make("number", value=expr.value, span=self.span(expr))
        if isinstance(expr, Name):
            return self.name(expr)
        if isinstance(expr, Operation):
            return self.operation(expr)
        if isinstance(expr, Chain):
            return self.chain(expr)
        if isinstance(expr, Where):
            return self.where(expr)
        if isinstance(expr, Then):
            return self.then(expr, [self.expr(term) for term in expr.terms])
        assert isinstance(expr, Call)
        return self.scope.type_call(self, expr)

    def number(self, expr: Expr, what: str) -> Node | None:
        """The node of an expression that must be a number."""
        node = self.expr(expr)
        return node if node is None or self.is_kind(node, "number", expr, what) else None

    def truth(self, expr: Expr, what: str) -> Node | None:
        """The node of an expression that must be a truth value."""
        node = self.expr(expr)
        return node if node is None or self.is_kind(node, "truth", expr, what) else None

    def is_kind(self, node: Node, kind: str, expr: Expr, what: str) -> bool:
        """Whether the node is a number or a truth value as needed; otherwise reports."""
        if node.type.kind == kind:
            return True
        words = {"number": "a number", "truth": "a truth value"}
        message = f"{what} needs {words[kind]}; `{self.shown(expr)}` is {words[node.type.kind]}"
        help = None
        if kind == "truth":
            help = "a comparison such as `x > 0` makes one"
        elif "token" in node.type.axes:
            help = "`count[token](...)` counts a set; `x where set` restricts numbers to it"
        self.error("type", message, expr.span, help)
        return False

    def name(self, expr: Name) -> Node | None:
        if self.expansion and expr.text in self.expansion.values:
            return self.expansion.values[expr.text]
        if not self.expansion:
            known, node = self.scope.resolve(expr, self.context)
            if known:
                return node
        builtin = BUILTINS.get(expr.text)
        if builtin is not None:
            return self.builtin(builtin, expr)
        self.scope.unknown(expr, self.context)
        return None

    def builtin(self, builtin: Builtin, expr: Expr) -> Node | None:
        """A name of the language, if it exists in this context."""
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
            help = (
                "`cached` counts a head's entries in decode" if builtin.name == "length" else None
            )
            code = "merge" if where == "merge" else "phase"
            self.error(code, f"`{builtin.name}` {reason}", expr.span, help)
            return None
        if builtin.unserved:
            self.scope.unserved(f"`{builtin.name}`")
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
        if not self.context.in_merge or "token" not in node.type.axes:
            return node
        if node.op == "special":
            return node
        # KV heads drop different entries, so that each reads a value [token] at its own.
        axes = {"kv", *("dropped" if axis == "token" else axis for axis in node.type.axes)}
        return self.graph.make(
            "dropped",
            (node,),
            kind=node.type.kind,
            axes=in_order(axes),
            unit=node.type.unit,
            span=node.span,
        )

    # Operators

    def operation(self, expr: Operation) -> Node | None:
        row = OPERATIONS[expr.op]
        read = self.truth if row.takes == "truth" else self.number
        operands = typed(read(operand, f"`{row.sign}`") for operand in expr.operands)
        return self.combine(expr.op, expr, expr.operands, operands) if operands else None

    def combine(
        self, op: str, expr: Expr, written: tuple[Expr, ...], nodes: list[Node]
    ) -> Node | None:
        """An elementwise operation on nodes of the right kind."""
        if not self.one_extent(nodes, expr):
            return None
        row = OPERATIONS[op]
        if row.unit == "alike" and not self.same_units(written, nodes, row.combines):
            return None
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

    def one_extent(self, nodes: Iterable[Node], expr: Expr) -> bool:
        """Whether queries, and past layers, are the same ones in all nodes; otherwise reports."""
        for axis in ("query", "past"):
            found = extents(nodes, axis)
            if len(found) < 2:
                continue
            first, second = found[:2]
            if axis == "query":
                message = (
                    f"the queries of `{first.text}` and those of `{second.text}` are two axes; "
                    "they cannot be combined"
                )
                help = "reduce `query` of each first, as in `mean[query](...)`, or take one window"
            else:
                message = (
                    f"`past` over {_layers_of(first)} and over {_layers_of(second)} are two axes; "
                    "they cannot be combined"
                )
                help = "reduce `past` of each first, or look back equally far"
            self.error("axis", message, expr.span, help)
            return False
        return True

    def same_units(self, written: tuple[Expr, ...], nodes: list[Node], phrase: str) -> bool:
        """Whether two values have one unit, or one of them none; otherwise reports."""
        left, right = nodes[0].type.unit, nodes[1].type.unit
        if left and right and left != right:
            message = (
                f"`{self.shown(written[0])}` is {unit_words(left)} and "
                f"`{self.shown(written[1])}` is {unit_words(right)}; they cannot be {phrase}"
            )
            help = None
            if {left, right} == {"tokens", "ratio"}:
                help = (
                    "a ratio times a number of tokens is a number of tokens, as in `rate * prompt`"
                )
            self.error("unit", message, Span(written[0].span.start, written[1].span.end), help)
            return False
        for expr, other in ((written[0], right), (written[1], left)):
            if other:
                self.scope.suggest_unit(expr, other)
        return True

    def chain(self, expr: Chain) -> Node | None:
        nodes = typed(self.number(operand, "a comparison") for operand in expr.operands)
        if nodes is None:
            return None
        low = self.combine(expr.first, expr, expr.operands[:2], nodes[:2])
        high = self.combine(expr.second, expr, expr.operands[1:], nodes[1:])
        if low is None or high is None:
            return None
        return self.combine("and", expr, (), [low, high])

    def where(self, expr: Where) -> Node | None:
        value = self.expr(expr.value)
        condition = self.truth(expr.condition, "`where`")
        if expr.other is None:
            if value is None or condition is None:
                return None
            if not self.one_extent((value, condition), expr):
                return None
            return self.masked(value, condition, expr)
        return self.chosen(expr, value, condition, self.expr(expr.other))

    def masked(self, value: Node, condition: Node, expr: Expr) -> Node:
        return self.graph.make(
            "mask", (value, condition), kind=value.type.kind, unit=value.type.unit, absent=True,
            span=self.span(expr),
        )  # fmt: skip

    def chosen(
        self, expr: Where, value: Node | None, condition: Node | None, other: Node | None
    ) -> Node | None:
        """`value where condition else other`."""
        if value is None or condition is None or other is None:
            return None
        assert expr.other is not None
        if value.type.kind != other.type.kind:
            words = {"number": "a number", "truth": "a truth value"}
            message = (
                f"`{self.shown(expr.value)}` is {words[value.type.kind]}, but "
                f"`{self.shown(expr.other)}` is {words[other.type.kind]}"
            )
            self.error("type", message, expr.span, "both branches of `where` are of one kind")
            return None
        if not self.one_extent((value, condition, other), expr):
            return None
        branches = (expr.value, expr.other)
        if not self.same_units(branches, [value, other], OPERATIONS["choose"].combines):
            return None
        return self.graph.make(
            "choose", (value, condition, other), kind=value.type.kind,
            unit=value.type.unit or other.type.unit,
            absent=value.type.absent or other.type.absent, span=self.span(expr),
        )  # fmt: skip

    def then(self, expr: Then, terms: list[Node | None]) -> Node | None:
        """Token sets that fill in order."""
        good = [self.is_set(t, e, "`then`") for t, e in zip(terms, expr.terms, strict=True)]
        if not all(good):
            return None
        nodes = tuple(term for term in terms if term is not None)
        if not self.one_extent(nodes, expr):
            return None
        return self.graph.make(
            "then", nodes, kind="truth", axes=union(nodes), absent=False, span=self.span(expr)
        )

    def is_set(self, node: Node | None, expr: Expr, what: str) -> bool:
        """Whether a node is a token set; otherwise reports."""
        if node is None:
            return False
        if node.type.kind == "number":
            message = f"{what} needs a token set; `{self.shown(expr)}` is a number"
            self.error("not-a-set", message, expr.span, "`top(x, n)` makes a set of a number")
            return False
        if not {"token", "dropped"} & set(node.type.axes):
            rest = node.type.axes
            kind = "one truth value per KV head" if rest else "one truth value for the layer"
            message = f"{what} needs a token set; `{self.shown(expr)}` is {kind}"
            help = f"write `all where {self.shown(expr)} else ...`"
            self.error("not-a-set", message, expr.span, help)
            return False
        return True


def _layers_of(extent: Extent) -> str:
    return f"`{extent.text}` layer{'' if extent.text == '1' else 's'}"


def _result_unit(rule: str | None, units: list[str | None]) -> str | None:
    """The unit of an arithmetic result, by `Operation.unit`."""
    if rule == "alike":
        return units[0] or units[1]
    if rule == "product" and "tokens" in units:
        other = units[1] if units[0] == "tokens" else units[0]
        return "tokens" if other in (None, "ratio") else None
    if rule == "quotient":
        return "tokens" if units[0] == "tokens" and units[1] in (None, "ratio") else None
    return units[0] if rule == "first" else None


def unit_words(unit: str) -> str:
    """A unit as a noun phrase."""
    return {"tokens": "a number of tokens", "layers": "a number of layers", "ratio": "a ratio"}[
        unit
    ]


def is_whole_map(node: Node, maps: set[int]) -> bool:
    """Whether a node holds a value for every query and every token of the prompt.

    `maps` are the nodes known to be attention of all queries; it grows with what is found.
    """
    axes = node.type.axes
    if "query" not in axes or not {"token", "dropped"} & set(axes):
        return False
    if id(node) not in maps and any(is_whole_map(arg, maps) for arg in node.args):
        maps.add(id(node))
    return id(node) in maps
