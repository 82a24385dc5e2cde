"""Arguments of calls: which axes and values were given, and whether they fit the parameters."""

from __future__ import annotations

from functools import partial

from kvpolicy.dsl.check.expressions import UNIT_WORDS, Typer
from kvpolicy.dsl.check.names import Context, Wrong, sound
from kvpolicy.dsl.ir.host import Value
from kvpolicy.dsl.ir.nodes import AXES, Node, When, brackets
from kvpolicy.dsl.ir.ranges import shown
from kvpolicy.dsl.ops.operations import HEAD, Function, Parameter
from kvpolicy.dsl.syntax.diagnostics import did_you_mean, listed
from kvpolicy.dsl.syntax.tree import Argument, Axis, Call, Expr

Nodes = dict[str, Node]
Exprs = dict[str, Expr]


_LOOKS = {"layer": "across", "token": "along"}


def written_axes(typer: Typer, call: Call, function: Function) -> tuple[str, ...]:
    """The axes in brackets, `head` expanded; the default if none are written."""
    only = function.only_axis
    if call.axes is None:
        if function.axes == "optional":
            return ("token",)
        if function.axes == "none":
            return ()
        what = f"the axis that it looks {_LOOKS[only]}" if only else "axes"
        if function.rule == "reduction":
            what = "the axes to remove"
        axis = only or _example_axis(typer, call)
        message = f"`{call.name}` needs {what}, as in `{call.name}[{axis}](...)`"
        raise typer.error("arguments", message, call.name_span)
    span = call.axes[0].span
    if function.axes == "none":
        message = f"`{call.name}` takes no axes"
        raise typer.error("arguments", message, span, f"write `{function.signature}`")
    axes = _named_axes(typer, call.axes)
    if only is not None and axes != (only,):
        message = f"`{call.name}` looks {_LOOKS[only]} {only}s only, as in `{function.signature}`"
        raise typer.error("arguments", message, span)
    return axes


def _example_axis(typer: Typer, call: Call) -> str:
    """An axis of the first argument: `query` if it has that or none."""
    x = sound(partial(typer.expr, call.arguments[0].value)) if call.arguments else None
    return "query" if x is None or not x.type.axes or "query" in x.type.axes else x.type.axes[-1]


def _named_axes(typer: Typer, written: tuple[Axis, ...]) -> tuple[str, ...]:
    if typer.expansion and all(axis.text == "a" for axis in written):
        written = typer.expansion.axes
    axes: list[str] = []
    for axis in written:
        for name in HEAD if axis.text == "head" else (axis.text,):
            if name != "layer" and name not in AXES:
                axis_names = (*AXES, "head", "layer")
                help = did_you_mean(name, axis_names) or f"the axes are {listed(axis_names, 'and')}"
                raise typer.error("axis", f"there is no axis `{name}`", axis.span, help)
            if name in axes:
                raise typer.error("arguments", f"axis `{name}` is named twice", axis.span)
            axes.append(name)
    return tuple(axes)


def bind_arguments(typer: Typer, call: Call, function: Function) -> Exprs:
    """The expressions that were given, by parameter."""
    bound: Exprs = {}
    names = [parameter.name for parameter in function.parameters]
    for place, argument in enumerate(call.arguments):
        problem = _argument_problem(argument, place, names, bound, function)
        if problem:
            span = argument.name_span or argument.value.span
            raise typer.error("arguments", problem, span, f"write `{function.signature}`")
        bound[argument.name or names[place]] = argument.value
    missing = [p.name for p in function.parameters if not p.optional and p.name not in bound]
    if missing:
        message = f"`{call.name}` needs {listed(missing, 'and')}"
        raise typer.error("arguments", message, call.span, f"write `{function.signature}`")
    return bound


def _argument_problem(
    argument: Argument, place: int, names: list[str], bound: Exprs, function: Function
) -> str | None:
    if argument.name:
        if argument.name not in names:
            return f"`{function.name}` has no argument named `{argument.name}`"
        if argument.name in bound:
            return f"`{argument.name}` is given twice"
        return None
    if place >= len(names):
        number = {0: "no arguments", 1: "one argument"}.get(len(names), f"{len(names)} arguments")
        return f"`{function.name}` takes {number}"
    if set(names[:place]) - set(bound):
        return "an argument without a name comes after one with a name"
    if names[place] in bound:
        return f"`{names[place]}` is given twice"
    return None


def argument_nodes(typer: Typer, function: Function, exprs: Exprs) -> Nodes:
    """The typed arguments by parameter, without query sets, which are no values."""
    reader = typer
    if function.rule in ("target", "receivers") and typer.context.in_merge:
        reader = Typer(typer.scope, Context(typer.context.phase))
        reader.expansion = typer.expansion

    nodes, wrong = {}, False
    for parameter in function.parameters:
        expr = exprs.get(parameter.name)
        if expr is None or parameter.kind == "queries":
            continue
        try:
            nodes[parameter.name] = reader.expr(expr)
            _check_fits(typer, function, parameter, expr, nodes[parameter.name])
        except Wrong:
            wrong = True
    if wrong:
        raise Wrong
    return nodes


def _check_fits(
    typer: Typer, function: Function, parameter: Parameter, expr: Expr, node: Node
) -> None:
    """Checks that an argument has the kind and unit of its parameter and is known in time."""
    if parameter.kind == "any":
        return
    kind = "truth" if parameter.kind == "truth" else "number"
    typer.check_kind(node, kind, expr, f"`{function.name}`")
    what = f"the count of `{function.name}`"
    if parameter.unit == "tokens":
        check_token_count(typer, node, expr, f"`{function.name}` takes")
        if node.type.absent:
            of_layers = function.rule == "across"
            name = f"`{parameter.name}` of `{function.name}`" if of_layers else what
            raise typer.absent(node, expr, name)
    if parameter.kind == "entries":
        typer.suggest_range(expr, 0)
        check_no_share(typer, typer.graph.literal(node), expr, what)
    if parameter.kind == "width":
        typer.suggest_range(expr, 1, odd=True)
        if not (is_of_model(node) and node.type.exact):
            message = (
                f"the width of `{function.name}` must follow from parameters alone; "
                f"`{typer.shown(expr)}` does not"
            )
            raise typer.error("phase", message, expr.span)


def check_token_count(typer: Typer, node: Node, expr: Expr, what: str) -> None:
    """Checks that a node can be a number of tokens."""
    unit = node.type.unit
    if unit in (None, "tokens"):
        typer.suggest_unit(expr, "tokens")
        return
    message = f"{what} a number of tokens; `{typer.shown(expr)}` is {UNIT_WORDS[unit]}"
    help = f"for example `{typer.shown(expr)} * prompt`" if unit == "ratio" else None
    raise typer.error("unit", message, expr.span, help)


def check_no_share(typer: Typer, value: Value | None, expr: Expr, what: str) -> None:
    """Checks that a number of entries is not a literal between 0 and 1."""
    if value is not None and 0 < value < 1:
        message = f"{what} is {shown(value)} of an entry, which is none"
        help = f"a share of the prompt is written `{typer.shown(expr)} * prompt`"
        raise typer.error("range", message, expr.span, help)


def check_static(typer: Typer, node: Node, expr: Expr, what: str, code: str = "phase") -> None:
    """Checks that a node is one number known before the prefill."""
    if node.type.axes or node.when > When.PROMPT or node.type.absent:
        text = typer.shown(expr)
        message = f"{what} must be one number known before the prefill; `{text}` is not"
        raise typer.error(code, message, expr.span)


def _differs(node: Node) -> bool:
    """Whether a number may differ between layers; `length` counts as the same everywhere."""
    differs: dict[Node, bool] = {}
    for part in node.walk():
        is_source = part.operation.across_layers or (part.op == "size" and part.value == "layer")
        is_source = is_source or (
            part.when >= When.LAYER and all(x.when < When.LAYER for x in part.args)
        )
        over_layers = part.operation.is_reduction and "layer" in part.axes
        differs[part] = not over_layers and (is_source or any(differs[x] for x in part.args))
    return differs[node]


def check_in_a_layer(typer: Typer, call: Call) -> None:
    """Checks that a call whose value depends on its layer is evaluated for a layer."""
    context = typer.context
    if context.phase == "static" and (context.inside != "share" or call.name == "past"):
        message = f"`{call.name}` has no value here: this holds for the whole model"
        raise typer.error("phase", message, call.span)


def check_alike(typer: Typer, node: Node, expr: Expr, what: str) -> None:
    """Checks that a number is the same at every layer."""
    if _differs(node):
        text = typer.shown(expr)
        help = None if node.when < When.LAYER else f"reduce it, as in `sum[layer]({text})`"
        message = f"{what} must be the same at every layer; `{text}` is not"
        raise typer.error("phase", message, expr.span, help)


def check_queries_in_common(typer: Typer, node: Node, call: Call) -> None:
    """Checks that a value read across layers has the same queries in all of them."""
    window = node.type.window
    if window is None:
        return
    if window.count is not None and _differs(window.count):
        reason = f"`{window.text}` is of another size at each layer"
    elif typer.scope.propagates:
        reason = "where tokens are propagated, not every query reaches every layer"
    else:
        return
    message = f"`{typer.shown(call)}` looks at `query` across layers, but {reason}"
    raise typer.error("axis", message, call.span, "reduce `query` first")


def is_of_model(node: Node) -> bool:
    """Whether a number follows from parameters and model sizes, the same for all layers."""
    return node.when == When.LOAD and not _differs(node)


def check_has_axes(
    typer: Typer, axes: tuple[str, ...], node: Node, expr: Expr, call: Call, verb: str
) -> None:
    """Checks that a value has the axes along which a function reads it."""
    missing = [axis for axis in axes if axis not in ("layer", *node.type.axes)]
    if not missing:
        return
    shape = inside_brackets(node)
    axes_text = f"is [{shape}]" if shape else "has no axes"
    message = f"`{typer.shown(expr)}` {axes_text}; it has no axis `{missing[0]}` to {verb}"
    help = None
    if missing[0] == "token" and "dropped" in node.type.axes:
        help = "inside `merge` the axis of the dropped entries is called `dropped`"
    elif missing == ["group"] and "kv" in node.type.axes:
        help = "its heads are KV heads: write `kv`"
    raise typer.error("axis", message, call.span, help)


def inside_brackets(node: Node) -> str:
    """The axes of a value as they are written; empty if it has none."""
    return brackets(node.type.axes)[1:-1]
