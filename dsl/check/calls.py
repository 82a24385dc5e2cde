"""Types calls of the language's functions, by the rules that ops/functions.py names."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

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
from kvpolicy.dsl.ops.functions import FUNCTIONS
from kvpolicy.dsl.ops.signatures import Function
from kvpolicy.dsl.syntax.diagnostics import did_you_mean
from kvpolicy.dsl.syntax.expression import parse_expression
from kvpolicy.dsl.syntax.tree import Axis, Call, Expr, Name

_ELEMENTWISE_PAIRS = {"max": "maximum", "min": "minimum"}
_NOT_READ_AT_ONCE = frozenset(("top", "along", "index", "pool", "past", "at"))


class Site(NamedTuple):
    """A call whose axes and arguments fit its function."""

    typer: Typer
    call: Call
    function: Function
    axes: tuple[str, ...]
    exprs: Exprs  # as written, by parameter
    nodes: Nodes  # as typed; query sets are left out


def type_call(typer: Typer, call: Call, fills: bool = False) -> Node | None:
    """The node of a call; `fills` where a `top` without a count may stand."""
    function = FUNCTIONS.get(call.name)
    if function is None:
        _unknown_function(typer, call)
        return None
    if call.name in _ELEMENTWISE_PAIRS and call.axes is None and len(call.arguments) == 2:
        return _pair(typer, call)
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
    return _RULES[function.rule](Site(typer, call, function, axes, exprs, nodes))


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


def _pair(typer: Typer, call: Call) -> Node | None:
    """`max(a, b)` and `min(a, b)`."""
    written = tuple(argument.value for argument in call.arguments)
    named = [argument for argument in call.arguments if argument.name]
    nodes = typed(typer.number(expr, f"`{call.name}`") for expr in written)
    if named:
        message = f"`{call.name}` has no argument named `{named[0].name}`"
        typer.error("arguments", message, named[0].name_span or call.span)
        return None
    return typer.combine(_ELEMENTWISE_PAIRS[call.name], call, written, nodes) if nodes else None


# Rules: one function per `rule` of the table


def _reduction(site: Site) -> Node | None:
    typer, call, function, axes, exprs, nodes = site
    x = nodes["x"]
    if function.name == "any" and not typer.is_kind(x, "truth", exprs["x"], "`any`"):
        return None
    if "layer" in axes and len(axes) > 1:
        rest = ", ".join(axis for axis in axes if axis != "layer")
        message = "`layer` is reduced on its own"
        help = f"for example `{call.name}[layer]({call.name}[{rest}](...))`"
        typer.error("arguments", message, call.span, help)
        return None
    if not has_axes(typer, axes, x, exprs["x"], call, f"{_VERBS[function.name]} over"):
        return None
    if "layer" in axes and not has_queries_in_common(typer, x, call):
        return None
    unit = x.type.unit if function.unit == "first" else None
    if function.unit == "count":
        counted = {"layer": "layers", "token": "tokens", "query": "tokens", "dropped": "tokens"}
        units = {counted.get(axis) for axis in axes} - {None}
        unit = units.pop() if len(units) == 1 else None
    kind = "truth" if function.name == "any" else "number"
    rest_axes = tuple(axis for axis in x.type.axes if axis not in axes)
    return typer.graph.make(
        function.name, (x,), kind=kind, axes=rest_axes, over=in_writing(axes), unit=unit,
        absent=False, span=typer.span(call),
    )  # fmt: skip


_VERBS = {
    "sum": "sum", "mean": "average", "max": "take the maximum", "min": "take the minimum",
    "var": "take the variance", "any": "look", "count": "count",
}  # fmt: skip


def in_writing(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Axes of a reduction: order does not matter, so it is made canonical."""
    return axes if "layer" in axes else in_order(axes)


def _top(site: Site) -> Node | None:
    typer, call, axes, exprs, nodes = site.typer, site.call, site.axes, site.exprs, site.nodes
    x = nodes["x"]
    for axis in axes:
        if axis != "layer" and axis not in x.type.axes:
            what = {"kv": "heads", "group": "heads", "token": "tokens"}.get(axis, f"`{axis}`")
            shown = typer.shown(exprs["x"])
            message = f"`{shown}` has no axis `{axis}`, so {what} cannot compete with it"
            typer.error("competition", message, call.span)
            return None
    args: tuple[Node, ...] = (x,)
    if "n" in nodes:
        n = nodes["n"]
        shared = [axis for axis in n.type.axes if axis in (*axes, "token")]
        if shared:
            message = f"the count varies over `{shared[0]}`, along which the values compete"
            typer.error("axis", message, exprs["n"].span)
            return None
        args = (x, n)
    if not typer.one_extent(args, call):
        return None
    if "layer" in axes and not has_queries_in_common(typer, x, call):
        return None
    return typer.graph.make(
        "top", args, kind="truth", over=axes, absent=False, span=typer.span(call)
    )


def _along(site: Site) -> Node | None:
    """What reads along axes and keeps them."""
    typer, call, function, axes, exprs, nodes = site
    x = nodes["x"]
    if not has_axes(typer, axes, x, exprs["x"], call, f"{call.name} along"):
        return None
    if "layer" in axes and not has_queries_in_common(typer, x, call):
        return None
    unit = x.type.unit if function.unit == "first" else None
    return typer.graph.make(function.name, (x,), over=axes, unit=unit, span=typer.span(call))


def _index(site: Site) -> Node | None:
    typer, call, axes, exprs, nodes = site.typer, site.call, site.axes, site.exprs, site.nodes
    if len(axes) != 1 or axes == ("layer",):
        typer.error("arguments", "`index` counts along one axis", call.span)
        return None
    if not has_axes(typer, axes, nodes["x"], exprs["x"], call, "count along"):
        return None
    return typer.graph.make(
        "index", (nodes["x"],), axes=axes, over=axes, absent=False, span=typer.span(call)
    )


def _pool(site: Site) -> Node | None:
    typer, call, function, _, exprs, nodes = site
    x, width = nodes["x"], nodes["width"]
    if not has_axes(typer, ("token",), x, exprs["x"], call, "pool along"):
        return None
    typer.scope.widths.append((width, typer.span(exprs["width"])))
    return typer.graph.make(
        function.name, (x, width), axes=x.type.axes, unit=x.type.unit, span=typer.span(call)
    )


def _attention(site: Site) -> Node | None:
    typer, call, exprs = site.typer, site.call, site.exprs
    written = exprs["queries"]
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
    return _attention_node(typer, call, value, args, written)


def _attention_node(
    typer: Typer, call: Call, value: str, args: tuple[Node, ...], written: Expr
) -> Node | None:
    phase = typer.context.phase
    if phase == "static":
        typer.error("phase", f"`{call.name}` is not known before the prefill", call.span)
        return None
    if phase == "decode" and value == "all":
        message = f"`{call.name}(all)` in decode: only recent queries exist"
        typer.error("phase", message, call.span, "use `new` or a state")
        return None
    axes = ("query", "token") if call.name == "distance" else ("kv", "group", "query", "token")
    # In the prefill all tokens are new.
    kind = "all" if value == "new" and phase == "prefill" else value
    meaning = typer.graph.meaning(args[0]) if args else None
    window = Extent(kind, meaning, typer.shown(written), *args)
    node = typer.graph.make(
        call.name, args, axes=axes, unit="tokens" if call.name == "distance" else None,
        absent=True, value=value, when=typer.context.base, span=typer.span(call), extent=window,
    )  # fmt: skip
    if phase == "prefill" and value != "recent":
        typer.scope.whole_maps.add(id(node))
    return typer.at_dropped(node)


def _in_layers(site: Site, argument: str, takes: str) -> bool:
    """Whether an argument may count layers; a parameter in it then gets that unit."""
    typer, _, _, _, exprs, nodes = site
    expr, unit = exprs[argument], nodes[argument].type.unit
    if unit in ("tokens", "ratio"):
        message = f"{takes}; `{typer.shown(expr)}` is {unit_words(unit)}"
        typer.error("unit", message, expr.span)
        return False
    typer.scope.suggest_unit(expr, "layers")
    return True


def _past(site: Site) -> Node | None:
    typer, call, _, _, exprs, nodes = site
    x, n = nodes["x"], nodes["n"]
    if not is_in_a_layer(typer, call):
        return None
    if "past" in x.type.axes:
        typer.error("axis", f"`{typer.shown(exprs['x'])}` has the axis `past` already", call.span)
        return None
    if not is_static(typer, n, exprs["n"], "the number of layers"):
        return None
    if not _in_layers(site, "n", "`past` takes a number of layers"):
        return None
    if not is_alike(typer, n, exprs["n"], "the number of layers"):
        return None
    if not has_queries_in_common(typer, x, call):
        return None
    typer.scope.suggest_range(exprs["n"], whole=True, minimum=1)
    message = f"`past` over `{typer.shown(exprs['n'])}` layers has none; at least one is needed"
    typer.scope.at_least_one(n, typer.span(exprs["n"]), message)
    reach = Extent("past", typer.graph.meaning(n), typer.shown(exprs["n"]), n)
    return typer.graph.make(
        "past", (x, n), kind=x.type.kind, axes=("past", *x.type.axes), unit=x.type.unit,
        absent=True, when=typer.context.base, span=typer.span(call), extent=reach,
    )  # fmt: skip


def _at(site: Site) -> Node | None:
    typer, call, _, _, exprs, nodes = site
    layer, x = nodes["layer"], nodes["x"]
    if not is_in_a_layer(typer, call):
        return None
    if layer.type.axes:
        message = f"`{typer.shown(exprs['layer'])}` is not one number for the layer"
        typer.error("axis", message, exprs["layer"].span)
        return None
    if not _in_layers(site, "layer", "`at` takes a layer"):
        return None
    if not has_queries_in_common(typer, x, call):
        return None
    return typer.graph.make(
        "at", (layer, x), kind=x.type.kind, axes=x.type.axes, unit=x.type.unit, absent=True,
        span=typer.span(call),
    )  # fmt: skip


def _across(site: Site) -> Node | None:
    """`split` and `cluster`: one number per layer."""
    typer, call, function, _, exprs, nodes = site
    if not is_in_a_layer(typer, call):
        return None
    for name, node in nodes.items():
        shown = typer.shown(exprs[name])
        if node.type.axes:
            shape = str(node.type).partition("[")[2].partition("]")[0]
            message = f"`{call.name}` takes one number per layer; `{shown}` is [{shape}]"
            typer.error("axis", message, exprs[name].span, f"reduce it, as in `sum[{shape}](...)`")
            return None
        if node.type.absent:
            typer.absent(node, exprs[name], f"`{name}` of `{call.name}`")
            return None
    one = "k" if function.rule == "cluster" else "total"
    if one == "k" and not is_static(typer, nodes["k"], exprs["k"], "`k`"):
        return None
    if not is_alike(typer, nodes[one], exprs[one], f"`{one}`"):
        return None
    order = [nodes[p.name] for p in function.parameters if p.name in nodes]
    unit = "tokens" if function.rule == "split" else None
    return typer.graph.make(
        function.name, tuple(order), over=("layer",), unit=unit, span=typer.span(call)
    )


def _uniform(site: Site) -> Node | None:
    typer, call, _, _, exprs, nodes = site
    if typer.context.phase == "static":
        typer.error("phase", "`uniform` is not known before the prefill", call.span)
        return None
    if not is_static(typer, nodes["seed"], exprs["seed"], "the seed"):
        return None
    node = typer.graph.make(
        "uniform", (nodes["seed"],), axes=("kv", "token"), when=typer.context.base,
        span=typer.span(call),
    )  # fmt: skip
    return typer.at_dropped(node)


def _receivers(site: Site) -> Node | None:
    typer, call, _, _, exprs, nodes = site
    if not typer.receivers:
        typer.error("merge", f"`{call.name}` stands only in `merge.into`", call.span)
        return None
    node = nodes["x" if call.name == "nearest" else "n"]
    if call.name == "next" and not is_static(typer, node, exprs["n"], "the number of receivers"):
        return None
    if call.name == "nearest" and node.type.axes != ("kv", "token", "dim"):
        message = "`nearest` compares vectors per KV head and token, such as `key`"
        typer.error("axis", message, exprs["x"].span)
        return None
    return typer.graph.make(
        call.name, (node,), kind="truth", axes=("kv", "token", "dropped"), absent=False,
        span=typer.span(call),
    )  # fmt: skip


def _target(site: Site) -> Node | None:
    typer, call, _, _, exprs, nodes = site
    if not typer.context.in_merge:
        typer.error("merge", "`target` means something only inside `merge`", call.span)
        return None
    x = nodes["x"]
    if not has_axes(typer, ("token",), x, exprs["x"], call, "read at the receivers"):
        return None
    axes = in_order(("kv", "dropped", *(axis for axis in x.type.axes if axis != "token")))
    return typer.graph.make(
        "target", (x,), axes=axes, unit=x.type.unit, absent=False, span=typer.span(call)
    )


def _elementwise(site: Site) -> Node | None:
    typer, call, function, nodes = site.typer, site.call, site.function, site.nodes
    x = nodes["x"]
    unit = x.type.unit if function.unit == "first" else None
    return typer.graph.make(function.name, (x,), unit=unit, span=typer.span(call))


def _derived(site: Site) -> Node | None:
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


Rule = Callable[[Site], Node | None]
_RULES: dict[str, Rule] = {
    "reduction": _reduction,
    "top": _top,
    "along": _along,
    "index": _index,
    "pool": _pool,
    "attention": _attention,
    "past": _past,
    "at": _at,
    "split": _across,
    "cluster": _across,
    "uniform": _uniform,
    "receivers": _receivers,
    "target": _target,
    "elementwise": _elementwise,
    "derived": _derived,
}
