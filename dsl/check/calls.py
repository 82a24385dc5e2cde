"""Types calls of the language's functions, each by the rule that its row names."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from kvpolicy.dsl.check.arguments import (
    Exprs,
    Nodes,
    argument_nodes,
    bind_arguments,
    check_alike,
    check_has_axes,
    check_in_a_layer,
    check_queries_in_common,
    check_static,
    check_token_count,
    inside_brackets,
    written_axes,
)  # fmt: skip
from kvpolicy.dsl.check.expressions import UNIT_WORDS, Typer
from kvpolicy.dsl.check.instead import INSTEAD
from kvpolicy.dsl.check.names import Expansion, Wrong, all_sound, sound
from kvpolicy.dsl.ir.graph import in_order
from kvpolicy.dsl.ir.nodes import Extent, Node
from kvpolicy.dsl.ops.forms import form
from kvpolicy.dsl.ops.operations import Function, Operation
from kvpolicy.dsl.ops.table import FUNCTIONS, OPERATIONS, RESERVED
from kvpolicy.dsl.syntax.diagnostics import did_you_mean
from kvpolicy.dsl.syntax.expression import parse_expression
from kvpolicy.dsl.syntax.tree import Axis, Call, Expr, Name

_NOT_READ_AT_ONCE = frozenset(("top", "along", "index", "pool", "past", "at"))


class Site(NamedTuple):
    """A call whose axes and arguments fit its function."""

    typer: Typer
    call: Call
    function: Function
    axes: tuple[str, ...]
    exprs: Exprs  # as written, by parameter
    nodes: Nodes  # as typed; query sets are left out

    @property
    def row(self) -> Operation:
        """The operation that the call makes."""
        return OPERATIONS[self.function.name]

    @property
    def unit(self) -> str | None:
        """The unit of `x`, if the result has it too."""
        return self.nodes["x"].type.unit if self.function.unit == "first" else None

    def make(self, *args: Node, **options: Any) -> Node:
        """The call's node; arguments as of `Graph.make`."""
        return self.typer.graph.make(
            self.function.name, args, span=self.typer.span(self.call), **options
        )

    def refused(
        self, code: str, message: str, name: str | None = None, help: str | None = None
    ) -> Wrong:
        """Reports a defect of the call, or of the argument called `name`."""
        span = self.call.span if name is None else self.exprs[name].span
        return self.typer.error(code, message, span, help)

    def shown(self, name: str) -> str:
        """An argument as it is written."""
        return self.typer.shown(self.exprs[name])

    def check_axes(self, verb: str, axes: tuple[str, ...] | None = None) -> None:
        """Checks that `x` has the axes along which it is read, the call's if `axes` is None."""
        axes, x = self.axes if axes is None else axes, self.nodes["x"]
        check_has_axes(self.typer, axes, x, self.exprs["x"], self.call, verb)

    def check_competition(self) -> None:
        """Checks that `x` has the same queries in all layers, if the call reads across layers."""
        if "layer" in self.axes:
            check_queries_in_common(self.typer, self.nodes["x"], self.call)

    def check_static(self, name: str, what: str) -> None:
        """As `arguments.check_static`, for an argument."""
        check_static(self.typer, self.nodes[name], self.exprs[name], what)

    def check_alike(self, name: str, what: str) -> None:
        """As `arguments.check_alike`, for an argument."""
        check_alike(self.typer, self.nodes[name], self.exprs[name], what)

    def check_layers(self, name: str, takes: str) -> None:
        """Checks that an argument can be a number of layers, and suggests that unit for it."""
        unit = self.nodes[name].type.unit
        if unit in ("tokens", "ratio"):
            raise self.refused("unit", f"{takes}; `{self.shown(name)}` is {UNIT_WORDS[unit]}", name)
        self.typer.suggest_unit(self.exprs[name], "layers")


def type_call(typer: Typer, call: Call, fills: bool = False) -> Node:
    """The node of a call; `fills`: whether `top` may stand without a count."""
    function = FUNCTIONS.get(call.name)
    if function is None:
        raise _unknown_function(typer, call)
    row = OPERATIONS.get(call.name)
    if row is not None and row.of_two and call.axes is None and len(call.arguments) > 1:
        return _pair(typer, call, row.of_two)
    axes = sound(partial(written_axes, typer, call, function))
    exprs = bind_arguments(typer, call, function)
    nodes = argument_nodes(typer, function, exprs)
    if axes is None:
        raise Wrong
    if function.rule == "top" and "n" not in nodes and not fills:
        message = f"`{typer.shown(call)}` has no count"
        help = (
            "without a count, `top` fills the budget, which it can only in `keep` and "
            "`propagate.tokens`, alone or last after `then`"
        )
        raise typer.error("arguments", message, call.span, help)
    if function.rule in _NOT_READ_AT_ONCE:
        for name, node in nodes.items():
            typer.check_reduced(node, exprs[name])
    rule: Callable[[Site], Node] = form(f"calls.{function.rule}", "check")
    return rule(Site(typer, call, function, axes, exprs, nodes))


def _unknown_function(typer: Typer, call: Call) -> Wrong:
    for argument in call.arguments:
        sound(partial(typer.expr, argument.value))
    if RESERVED.get(call.name) == "an axis":
        return typer.scope.unknown(Name(call.name_span, call.name), typer.context)
    if typer.scope.knows(call.name, typer.context):
        message = f"`{call.name}` is a value, not a function"
        help = "write it without brackets and parentheses"
    else:
        message = f"unknown function `{call.name}`"
        close = INSTEAD.get(call.name) or did_you_mean(call.name, FUNCTIONS)
        help = close or "`kvpolicy docs` lists the functions"
    return typer.error("name", message, call.name_span, help)


def _pair(typer: Typer, call: Call, op: str) -> Node:
    """`max(a, b)` and `min(a, b)`."""
    if len(call.arguments) > 2:
        help = f"write `{call.name}(a, {call.name}(b, c))`"
        raise typer.error("arguments", f"`{call.name}` compares two numbers", call.span, help)
    written = tuple(argument.value for argument in call.arguments)
    numbers = (partial(typer.number, expr, f"`{call.name}`") for expr in written)
    nodes = sound(partial(all_sound, numbers))
    named_argument = next((argument for argument in call.arguments if argument.name), None)
    if named_argument is not None:
        message = f"`{call.name}` has no argument named `{named_argument.name}`"
        raise typer.error("arguments", message, named_argument.name_span or call.span)
    if nodes is None:
        raise Wrong
    return typer.combine(op, call, written, nodes)


# Rules, by the names that the rows of functions give them.


def reduction(site: Site) -> Node:
    name, axes, x = site.function.name, site.axes, site.nodes["x"]
    if "layer" in axes and len(axes) > 1:
        rest = ", ".join(axis for axis in axes if axis != "layer")
        help = f"for example `{name}[layer]({name}[{rest}](...))`"
        raise site.refused("arguments", "`layer` is reduced on its own", help=help)
    site.check_axes(f"{site.function.verb} over")
    site.check_competition()
    unit = site.unit
    if site.function.unit == "count":
        axis_units = {"layer": "layers", "token": "tokens", "query": "tokens", "dropped": "tokens"}
        units = {axis_units.get(axis) for axis in axes} - {None}
        unit = units.pop() if len(units) == 1 else None
    kind = site.row.result or "number"
    rest_axes = tuple(axis for axis in x.type.axes if axis not in axes)
    return site.make(x, kind=kind, axes=rest_axes, over=in_writing(axes), unit=unit, absent=False)


def in_writing(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Axes of a reduction in canonical order, as order does not matter."""
    return axes if "layer" in axes else in_order(axes)


def top(site: Site) -> Node:
    axes, x, n = site.axes, site.nodes["x"], site.nodes.get("n")
    for axis in axes:
        if axis != "layer" and axis not in x.type.axes:
            what = {"kv": "heads", "group": "heads", "token": "tokens"}.get(axis, f"`{axis}`")
            message = f"`{site.shown('x')}` has no axis `{axis}`, so {what} cannot compete with it"
            raise site.refused("competition", message)
    shared_axes = [axis for axis in n.type.axes if axis in (*axes, "token")] if n else []
    if shared_axes:
        message = f"the count varies over `{shared_axes[0]}`, along which the values compete"
        raise site.refused("axis", message, "n")
    args = (x, n) if n else (x,)
    site.typer.check_extents(args, site.call)
    site.check_competition()
    return site.make(*args, kind="truth", over=axes, absent=False)


def along(site: Site) -> Node:
    """A function that reads along axes and keeps them."""
    site.check_axes("look along")
    site.check_competition()
    return site.make(site.nodes["x"], over=site.axes, unit=site.unit)


def index(site: Site) -> Node:
    if len(site.axes) != 1 or site.axes == ("layer",):
        raise site.refused("arguments", "`index` counts along one axis")
    site.check_axes("count along")
    return site.make(site.nodes["x"], axes=site.axes, over=site.axes, absent=False)


def pool(site: Site) -> Node:
    x, width = site.nodes["x"], site.nodes["width"]
    site.check_axes("pool along", ("token",))
    site.typer.scope.widths.append((width, site.typer.span(site.exprs["width"])))
    return site.make(x, width, axes=x.type.axes, unit=x.type.unit)


def attention(site: Site) -> Node:
    typer, call = site.typer, site.call
    written = site.exprs["queries"]
    args: tuple[Node, ...] = ()
    if isinstance(written, Name) and written.text in ("all", "new"):
        value = written.text
    elif isinstance(written, Call) and written.name == "recent":
        value = "recent"
        number = bind_arguments(typer, written, FUNCTIONS["recent"])["n"]
        count = typer.number(number, "`recent`")
        check_token_count(typer, count, number, "`recent` takes")
        check_static(typer, count, number, "the number of queries", "query-set")
        typer.suggest_range(number, 1)
        message = f"`{typer.shown(written)}` has no queries; at least one is needed"
        typer.scope.at_least_one(count, typer.span(written), message)
        args = (count,)
    else:
        message = f"`{call.name}` takes `recent(n)`, `all` or `new`, not `{typer.shown(written)}`"
        raise typer.error("query-set", message, written.span)
    return _attention_node(site, value, args, written)


def _attention_node(site: Site, value: str, args: tuple[Node, ...], written: Expr) -> Node:
    typer, call = site.typer, site.call
    phase = typer.context.phase
    if phase == "static":
        raise typer.error("phase", f"`{call.name}` is not known before the prefill", call.span)
    if phase == "decode" and value == "all":
        message = f"`{call.name}(all)` in decode: only recent queries exist"
        raise typer.error("phase", message, call.span, "use `new` or a state")
    # In the prefill all tokens are new.
    kind = "all" if value == "new" and phase == "prefill" else value
    definition_id = typer.graph.definition_id(args[0]) if args else None
    window = Extent(kind, definition_id, typer.shown(written), *args)
    node = site.make(
        *args, axes=site.row.result_axes, unit=None if site.function.unit == "none" else "tokens",
        absent=True, value=value, when=typer.context.base, extent=window,
    )  # fmt: skip
    if phase == "prefill" and value != "recent":
        typer.scope.whole_maps.add(node)
    return typer.at_dropped(node)


def past(site: Site) -> Node:
    typer, x, n, written = site.typer, site.nodes["x"], site.nodes["n"], site.exprs["n"]
    check_in_a_layer(typer, site.call)
    if "past" in x.type.axes:
        raise site.refused("axis", f"`{site.shown('x')}` has the axis `past` already")
    what = "the number of layers"
    site.check_static("n", what)
    site.check_layers("n", "`past` takes a number of layers")
    site.check_alike("n", what)
    check_queries_in_common(typer, x, site.call)
    typer.suggest_range(written, 1)
    message = f"`past` over `{typer.shown(written)}` layers has none; at least one is needed"
    typer.scope.at_least_one(n, typer.span(written), message)
    return site.make(
        x, n, kind=x.type.kind, axes=("past", *x.type.axes), unit=x.type.unit, absent=True,
        when=typer.context.base,
        extent=Extent("past", typer.graph.definition_id(n), typer.shown(written), n),
    )  # fmt: skip


def at(site: Site) -> Node:
    layer, x = site.nodes["layer"], site.nodes["x"]
    check_in_a_layer(site.typer, site.call)
    if layer.type.axes:
        message = f"`{site.shown('layer')}` is not one number for the layer"
        raise site.refused("axis", message, "layer")
    site.check_layers("layer", "`at` takes a layer")
    check_queries_in_common(site.typer, x, site.call)
    return site.make(layer, x, kind=x.type.kind, axes=x.type.axes, unit=x.type.unit, absent=True)


def across(site: Site) -> Node:
    """`split`, `cascade` and `cluster`, which take one number per layer."""
    function, nodes = site.function, site.nodes
    check_in_a_layer(site.typer, site.call)
    for name, node in nodes.items():
        if node.type.axes:
            shape = inside_brackets(node)
            message = f"`{function.name}` takes one number per layer; `{site.shown(name)}` is"
            help = f"reduce it, as in `sum[{shape}](...)`"
            raise site.refused("axis", f"{message} [{shape}]", name, help)
        if node.type.absent:
            raise site.typer.absent(node, site.exprs[name], f"`{name}` of `{function.name}`")
    scalar = "k" if "k" in nodes else "total"
    if scalar == "k":
        site.check_static("k", "`k`")
    site.check_alike(scalar, f"`{scalar}`")
    order = [nodes[p.name] for p in function.parameters if p.name in nodes]
    return site.make(*order, over=("layer",), unit="tokens" if scalar == "total" else None)


def uniform(site: Site) -> Node:
    context = site.typer.context
    if context.phase == "static":
        raise site.refused("phase", "`uniform` is not known before the prefill")
    site.check_static("seed", "the seed")
    node = site.make(site.nodes["seed"], axes=("kv", "token"), when=context.base)
    return site.typer.at_dropped(node)


def receivers(site: Site) -> Node:
    name, vectors = site.function.name, site.row.reads_along
    if not site.typer.receivers:
        raise site.refused("merge", f"`{name}` stands only in `merge.into`")
    ((argument, node),) = site.nodes.items()
    if not vectors:
        site.check_static(argument, "the number of receivers")
    if vectors and node.type.axes != vectors:
        message = f"`{name}` compares vectors per KV head and token, such as `key`"
        raise site.refused("axis", message, argument)
    return site.make(node, kind="truth", axes=("kv", "token", "dropped"), absent=False)


def target(site: Site) -> Node:
    x = site.nodes["x"]
    if not site.typer.context.in_merge:
        raise site.refused("merge", "`target` means something only inside `merge`")
    site.check_axes("read at the receivers", ("token",))
    axes = in_order(("kv", "dropped", *(axis for axis in x.type.axes if axis != "token")))
    return site.make(x, axes=axes, unit=x.type.unit, absent=False)


def elementwise(site: Site) -> Node:
    return site.make(site.nodes["x"], unit=site.unit)


def derived(site: Site) -> Node:
    typer, call, function, axes, exprs, nodes = site
    if function.axes == "required":
        verb = f"take `{call.name}` over"
        for name in [name for name in ("x", "y") if name in nodes]:
            check_has_axes(typer, axes, nodes[name], exprs[name], call, verb)
    body_typer = Typer(typer.scope, typer.context)
    outer_expansion = typer.expansion
    body_typer.expansion = Expansion(
        outer_expansion.name if outer_expansion else typer.shown(call),
        typer.span(call),
        nodes,
        tuple(Axis(call.span, axis) for axis in axes),
    )
    node = body_typer.expr(_body(function))
    return typer.graph.relabel(node, origin=function.name, span=typer.span(call))


@cache
def _body(function: Function) -> Expr:
    assert function.body is not None
    return parse_expression(function.body, lambda offset: offset)
