"""Types calls of the language's functions, by the rules that their rows name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from kvpolicy.dsl.check.arguments import (
    Exprs,
    Nodes,
    argument_nodes,
    bind_arguments,
    has_axes,
    has_queries_in_common,
    is_alike,
    is_in_a_layer,
    is_static,
    is_token_count,
    reduced_at_once,
    written_axes,
)  # fmt: skip
from kvpolicy.dsl.check.expressions import Typer, typed, unit_words
from kvpolicy.dsl.check.names import Expansion
from kvpolicy.dsl.ir.graph import in_order
from kvpolicy.dsl.ir.nodes import Extent, Node
from kvpolicy.dsl.ops.forms import form
from kvpolicy.dsl.ops.operations import Function, Operation
from kvpolicy.dsl.ops.table import FUNCTIONS, OPERATIONS
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
        """What the call makes."""
        return OPERATIONS[self.function.name]

    def make(self, *args: Node, **given: Any) -> Node:
        """The call's node; what is given is as of `Graph.make`."""
        return self.typer.graph.make(
            self.function.name, args, span=self.typer.span(self.call), **given
        )

    def refused(
        self, code: str, message: str, name: str | None = None, help: str | None = None
    ) -> None:
        """Reports a defect of the call, or of the argument of that name."""
        span = self.call.span if name is None else self.exprs[name].span
        self.typer.error(code, message, span, help)

    def shown(self, name: str) -> str:
        """An argument as it is written."""
        return self.typer.shown(self.exprs[name])

    def has_axes(self, verb: str, axes: tuple[str, ...] | None = None) -> bool:
        """Whether `x` has the axes that are looked along, the call's own; otherwise reports."""
        axes, x = self.axes if axes is None else axes, self.nodes["x"]
        return has_axes(self.typer, axes, x, self.exprs["x"], self.call, verb)

    def competes_fairly(self) -> bool:
        """Whether `x` has the same queries in all layers if these are looked at together."""
        across = "layer" in self.axes
        return not across or has_queries_in_common(self.typer, self.nodes["x"], self.call)

    def is_static(self, name: str, what: str) -> bool:
        """As `is_static`, of an argument."""
        return is_static(self.typer, self.nodes[name], self.exprs[name], what)

    def is_alike(self, name: str, what: str) -> bool:
        """As `is_alike`, of an argument."""
        return is_alike(self.typer, self.nodes[name], self.exprs[name], what)


def type_call(typer: Typer, call: Call, fills: bool = False) -> Node | None:
    """The node of a call; `fills` where a `top` without a count may stand."""
    function = FUNCTIONS.get(call.name)
    if function is None:
        _unknown_function(typer, call)
        return None
    row = OPERATIONS.get(call.name)
    if row is not None and row.of_two and call.axes is None and len(call.arguments) == 2:
        return _pair(typer, call, row.of_two)
    axes = written_axes(typer, call, function)
    exprs = bind_arguments(typer, call, function)
    if exprs is None:
        return None
    nodes = argument_nodes(typer, call, function, exprs)
    if nodes is None or axes is None:
        return None
    if function.rule == "top" and "n" not in nodes and not fills:
        message = f"`{typer.shown(call)}` has no count"
        help = (
            "without a count, `top` fills the budget, which it can only in `keep` and "
            "`propagate.tokens`, in last place"
        )
        typer.error("arguments", message, call.span, help)
        return None
    if function.rule in _NOT_READ_AT_ONCE and not reduced_at_once(typer, nodes, exprs):
        return None
    rule: Callable[[Site], Node | None] = form(f"calls.{function.rule}", "check")
    return rule(Site(typer, call, function, axes, exprs, nodes))


def _unknown_function(typer: Typer, call: Call) -> None:
    for argument in call.arguments:
        typer.expr(argument.value)
    if typer.scope.knows(call.name, typer.context):
        message = f"`{call.name}` is a value, not a function"
        help = "write it without brackets and parentheses"
    else:
        message = f"unknown function `{call.name}`"
        help = did_you_mean(call.name, FUNCTIONS) or "`kvpolicy docs` lists the functions"
    typer.error("name", message, call.name_span, help)


def _pair(typer: Typer, call: Call, op: str) -> Node | None:
    """`max(a, b)` and `min(a, b)`."""
    written = tuple(argument.value for argument in call.arguments)
    named = [argument for argument in call.arguments if argument.name]
    nodes = typed(typer.number(expr, f"`{call.name}`") for expr in written)
    if named:
        message = f"`{call.name}` has no argument named `{named[0].name}`"
        typer.error("arguments", message, named[0].name_span or call.span)
        return None
    return typer.combine(op, call, written, nodes) if nodes else None


# Rules, by the name that rows give them.


def reduction(site: Site) -> Node | None:
    name, axes, x = site.function.name, site.axes, site.nodes["x"]
    if "layer" in axes and len(axes) > 1:
        rest = ", ".join(axis for axis in axes if axis != "layer")
        help = f"for example `{name}[layer]({name}[{rest}](...))`"
        site.refused("arguments", "`layer` is reduced on its own", help=help)
        return None
    if not site.has_axes(f"{site.function.verb} over") or not site.competes_fairly():
        return None
    unit = x.type.unit if site.function.unit == "first" else None
    if site.function.unit == "count":
        counted = {"layer": "layers", "token": "tokens", "query": "tokens", "dropped": "tokens"}
        units = {counted.get(axis) for axis in axes} - {None}
        unit = units.pop() if len(units) == 1 else None
    kind = site.row.result or "number"
    rest_axes = tuple(axis for axis in x.type.axes if axis not in axes)
    return site.make(x, kind=kind, axes=rest_axes, over=in_writing(axes), unit=unit, absent=False)


def in_writing(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Axes of a reduction: order does not matter, so it is made canonical."""
    return axes if "layer" in axes else in_order(axes)


def top(site: Site) -> Node | None:
    axes, x, n = site.axes, site.nodes["x"], site.nodes.get("n")
    for axis in axes:
        if axis != "layer" and axis not in x.type.axes:
            what = {"kv": "heads", "group": "heads", "token": "tokens"}.get(axis, f"`{axis}`")
            message = f"`{site.shown('x')}` has no axis `{axis}`, so {what} cannot compete with it"
            site.refused("competition", message)
            return None
    shared = [axis for axis in n.type.axes if axis in (*axes, "token")] if n else []
    if shared:
        message = f"the count varies over `{shared[0]}`, along which the values compete"
        site.refused("axis", message, "n")
        return None
    args = (x, n) if n else (x,)
    if not site.typer.one_extent(args, site.call) or not site.competes_fairly():
        return None
    return site.make(*args, kind="truth", over=axes, absent=False)


def along(site: Site) -> Node | None:
    """What reads along axes and keeps them."""
    x = site.nodes["x"]
    if not site.has_axes("look along") or not site.competes_fairly():
        return None
    return site.make(x, over=site.axes, unit=x.type.unit if site.function.unit == "first" else None)


def index(site: Site) -> Node | None:
    if len(site.axes) != 1 or site.axes == ("layer",):
        site.refused("arguments", "`index` counts along one axis")
        return None
    if not site.has_axes("count along"):
        return None
    return site.make(site.nodes["x"], axes=site.axes, over=site.axes, absent=False)


def pool(site: Site) -> Node | None:
    x, width = site.nodes["x"], site.nodes["width"]
    if not site.has_axes("pool along", ("token",)):
        return None
    site.typer.scope.widths.append((width, site.typer.span(site.exprs["width"])))
    return site.make(x, width, axes=x.type.axes, unit=x.type.unit)


def attention(site: Site) -> Node | None:
    typer, call = site.typer, site.call
    written = site.exprs["queries"]
    args: tuple[Node, ...] = ()
    if isinstance(written, Name) and written.text in ("all", "new"):
        value = written.text
    elif isinstance(written, Call) and written.name == "recent":
        value = "recent"
        bound = bind_arguments(typer, written, FUNCTIONS["recent"])
        if bound is None:
            return None
        count = typer.number(bound["n"], "`recent`")
        if count is None or not is_token_count(typer, count, bound["n"], "`recent` takes"):
            return None
        if not is_static(typer, count, bound["n"], "the number of queries", "query-set"):
            return None
        typer.scope.suggest_range(bound["n"], whole=True, minimum=1)
        message = f"`{typer.shown(written)}` has no queries; at least one is needed"
        typer.scope.at_least_one(count, typer.span(written), message)
        args = (count,)
    else:
        message = f"`{call.name}` takes `recent(n)`, `all` or `new`, not `{typer.shown(written)}`"
        typer.error("query-set", message, written.span)
        return None
    return _attention_node(site, value, args, written)


def _attention_node(site: Site, value: str, args: tuple[Node, ...], written: Expr) -> Node | None:
    typer, call = site.typer, site.call
    phase = typer.context.phase
    if phase == "static":
        typer.error("phase", f"`{call.name}` is not known before the prefill", call.span)
        return None
    if phase == "decode" and value == "all":
        message = f"`{call.name}(all)` in decode: only recent queries exist"
        typer.error("phase", message, call.span, "use `new` or a state")
        return None
    # In the prefill all tokens are new.
    kind = "all" if value == "new" and phase == "prefill" else value
    meaning = typer.graph.meaning(args[0]) if args else None
    window = Extent(kind, meaning, typer.shown(written), *args)
    node = site.make(
        *args, axes=site.row.result_axes, unit=None if site.function.unit == "none" else "tokens",
        absent=True, value=value, when=typer.context.base, extent=window,
    )  # fmt: skip
    if phase == "prefill" and value != "recent":
        typer.scope.whole_maps.add(id(node))
    return typer.at_dropped(node)


def _in_layers(site: Site, name: str, takes: str) -> bool:
    """Whether an argument may count layers; a parameter in it then gets that unit."""
    unit = site.nodes[name].type.unit
    if unit in ("tokens", "ratio"):
        site.refused("unit", f"{takes}; `{site.shown(name)}` is {unit_words(unit)}", name)
        return False
    site.typer.scope.suggest_unit(site.exprs[name], "layers")
    return True


def past(site: Site) -> Node | None:
    typer, x, n, written = site.typer, site.nodes["x"], site.nodes["n"], site.exprs["n"]
    if not is_in_a_layer(typer, site.call):
        return None
    if "past" in x.type.axes:
        site.refused("axis", f"`{site.shown('x')}` has the axis `past` already")
        return None
    what = "the number of layers"
    if not site.is_static("n", what):
        return None
    if not _in_layers(site, "n", "`past` takes a number of layers"):
        return None
    if not site.is_alike("n", what) or not has_queries_in_common(typer, x, site.call):
        return None
    typer.scope.suggest_range(written, whole=True, minimum=1)
    message = f"`past` over `{typer.shown(written)}` layers has none; at least one is needed"
    typer.scope.at_least_one(n, typer.span(written), message)
    return site.make(
        x, n, kind=x.type.kind, axes=("past", *x.type.axes), unit=x.type.unit, absent=True,
        when=typer.context.base,
        extent=Extent("past", typer.graph.meaning(n), typer.shown(written), n),
    )  # fmt: skip


def at(site: Site) -> Node | None:
    layer, x = site.nodes["layer"], site.nodes["x"]
    if not is_in_a_layer(site.typer, site.call):
        return None
    if layer.type.axes:
        message = f"`{site.shown('layer')}` is not one number for the layer"
        site.refused("axis", message, "layer")
        return None
    if not _in_layers(site, "layer", "`at` takes a layer"):
        return None
    if not has_queries_in_common(site.typer, x, site.call):
        return None
    return site.make(layer, x, kind=x.type.kind, axes=x.type.axes, unit=x.type.unit, absent=True)


def across(site: Site) -> Node | None:
    """`split` and `cluster`: one number per layer."""
    function, nodes = site.function, site.nodes
    if not is_in_a_layer(site.typer, site.call):
        return None
    for name, node in nodes.items():
        if node.type.axes:
            shape = str(node.type).partition("[")[2].partition("]")[0]
            message = f"`{function.name}` takes one number per layer; `{site.shown(name)}` is"
            help = f"reduce it, as in `sum[{shape}](...)`"
            site.refused("axis", f"{message} [{shape}]", name, help)
            return None
        if node.type.absent:
            site.typer.absent(node, site.exprs[name], f"`{name}` of `{function.name}`")
            return None
    one = "k" if "k" in nodes else "total"
    if one == "k" and not site.is_static("k", "`k`"):
        return None
    if not site.is_alike(one, f"`{one}`"):
        return None
    order = [nodes[p.name] for p in function.parameters if p.name in nodes]
    return site.make(*order, over=("layer",), unit="tokens" if one == "total" else None)


def uniform(site: Site) -> Node | None:
    context = site.typer.context
    if context.phase == "static":
        site.refused("phase", "`uniform` is not known before the prefill")
        return None
    if not site.is_static("seed", "the seed"):
        return None
    node = site.make(site.nodes["seed"], axes=("kv", "token"), when=context.base)
    return site.typer.at_dropped(node)


def receivers(site: Site) -> Node | None:
    name, vectors = site.function.name, site.row.reads_along
    if not site.typer.receivers:
        site.refused("merge", f"`{name}` stands only in `merge.into`")
        return None
    ((argument, node),) = site.nodes.items()
    if not vectors and not site.is_static(argument, "the number of receivers"):
        return None
    if vectors and node.type.axes != vectors:
        message = f"`{name}` compares vectors per KV head and token, such as `key`"
        site.refused("axis", message, argument)
        return None
    return site.make(node, kind="truth", axes=("kv", "token", "dropped"), absent=False)


def target(site: Site) -> Node | None:
    x = site.nodes["x"]
    if not site.typer.context.in_merge:
        site.refused("merge", "`target` means something only inside `merge`")
        return None
    if not site.has_axes("read at the receivers", ("token",)):
        return None
    axes = in_order(("kv", "dropped", *(axis for axis in x.type.axes if axis != "token")))
    return site.make(x, axes=axes, unit=x.type.unit, absent=False)


def elementwise(site: Site) -> Node | None:
    x = site.nodes["x"]
    return site.make(x, unit=x.type.unit if site.function.unit == "first" else None)


def derived(site: Site) -> Node | None:
    typer, call, function, axes, exprs, nodes = site
    if function.axes == "required":
        for name in nodes.keys() & {"x", "y"}:
            if not has_axes(
                typer, axes, nodes[name], exprs[name], call, f"take `{call.name}` over"
            ):
                return None
    inner = Typer(typer.scope, typer.context)
    outer = typer.expansion
    inner.expansion = Expansion(
        outer.name if outer else typer.shown(call),
        typer.span(call),
        nodes,
        tuple(Axis(call.span, axis) for axis in axes),
    )
    node = inner.expr(_body(function))
    if node is None:
        return None
    return typer.graph.relabel(node, origin=function.name, span=typer.span(call))


@cache
def _body(function: Function) -> Expr:
    assert function.body is not None
    return parse_expression(function.body, lambda offset: offset)
