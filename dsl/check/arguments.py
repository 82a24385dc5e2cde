"""Arguments of calls: which axes and values were given, and whether they fit the parameters."""

from __future__ import annotations

from kvpolicy.dsl.check.expressions import Typer, unit_words
from kvpolicy.dsl.check.names import Context
from kvpolicy.dsl.ir.host import Value
from kvpolicy.dsl.ir.nodes import AXES, Node, When
from kvpolicy.dsl.ir.ranges import shown
from kvpolicy.dsl.ops.operations import HEAD, Function, Parameter
from kvpolicy.dsl.syntax.diagnostics import did_you_mean, listed
from kvpolicy.dsl.syntax.tree import Argument, Axis, Call, Expr

Nodes = dict[str, Node]
Exprs = dict[str, Expr]


_LOOKS = {"layer": "across", "token": "along"}


def written_axes(typer: Typer, call: Call, function: Function) -> tuple[str, ...] | None:
    """The axes in brackets, `head` expanded; the default where none are written."""
    if call.axes is None:
        if function.axes == "optional":
            return ("token",)
        if function.axes == "none":
            return ()
        only = function.only_axis
        axis = only or "query"
        what = f"the axis that it looks {_LOOKS[only]}" if only else "axes"
        if function.rule == "reduction":
            what = "the axes to remove"
        example = f"{call.name}[{axis}](...)"
        message = f"`{call.name}` needs {what}, as in `{example}`"
        typer.error("arguments", message, call.name_span)
        return None
    if function.axes == "none":
        span = call.axes[0].span
        typer.error(
            "arguments", f"`{call.name}` takes no axes", span, f"write `{function.signature}`"
        )
        return None
    axes = _named_axes(typer, call.axes)
    only = function.only_axis
    if axes is not None and only is not None and axes != (only,):
        message = f"`{call.name}` looks {_LOOKS[only]} {only}s only, as in `{function.signature}`"
        typer.error("arguments", message, call.axes[0].span)
        return None
    return axes


def _named_axes(typer: Typer, written: tuple[Axis, ...]) -> tuple[str, ...] | None:
    if typer.expansion and all(axis.text == "a" for axis in written):
        written = typer.expansion.axes
    axes: list[str] = []
    for axis in written:
        names = HEAD if axis.text == "head" else (axis.text,)
        for name in names:
            if name != "layer" and name not in AXES:
                known = (*AXES, "head", "layer")
                message = f"there is no axis `{name}`"
                help = did_you_mean(name, known) or f"the axes are {listed(known, 'and')}"
                typer.error("axis", message, axis.span, help)
                return None
            if name in axes:
                typer.error("arguments", f"axis `{name}` is named twice", axis.span)
                return None
            axes.append(name)
    return tuple(axes)


def bind_arguments(typer: Typer, call: Call, function: Function) -> Exprs | None:
    """Which expression was given for which parameter; reports what is missing or too much."""
    bound: Exprs = {}
    names = [parameter.name for parameter in function.parameters]
    for place, argument in enumerate(call.arguments):
        problem = _argument_problem(argument, place, names, bound, function)
        if problem:
            span = argument.name_span or argument.value.span
            typer.error("arguments", problem, span, f"write `{function.signature}`")
            return None
        bound[argument.name or names[place]] = argument.value
    missing = [p.name for p in function.parameters if not p.optional and p.name not in bound]
    if missing:
        message = f"`{call.name}` needs {listed(missing, 'and')}"
        typer.error("arguments", message, call.span, f"write `{function.signature}`")
        return None
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


def argument_nodes(typer: Typer, call: Call, function: Function, exprs: Exprs) -> Nodes | None:
    """The typed arguments; None if one of them is wrong. Query sets are not values and left out."""
    nodes: dict[str, Node | None] = {}
    for parameter in function.parameters:
        expr = exprs.get(parameter.name)
        if expr is None or parameter.kind == "queries":
            continue
        reader = typer
        if function.rule in ("target", "receivers") and typer.context.in_merge:
            reader = Typer(typer.scope, Context(typer.context.phase))
            reader.expansion = typer.expansion
        node = reader.expr(expr)
        if node is not None and not _fits(typer, function, parameter, expr, node):
            node = None
        nodes[parameter.name] = node
    if any(node is None for node in nodes.values()):
        return None
    return {name: node for name, node in nodes.items() if node is not None}


def _fits(typer: Typer, function: Function, parameter: Parameter, expr: Expr, node: Node) -> bool:
    """Whether an argument has the kind, unit and moment that its parameter asks for."""
    if parameter.kind == "any":
        return True
    kind = "truth" if parameter.kind == "truth" else "number"
    if not typer.is_kind(node, kind, expr, f"`{function.name}`"):
        return False
    if parameter.unit == "tokens" and not is_token_count(
        typer, node, expr, f"`{function.name}` takes"
    ):
        return False
    if parameter.unit == "tokens" and node.type.absent:
        what = f"the count of `{function.name}`"
        if function.rule == "across":
            what = f"`{parameter.name}` of `{function.name}`"
        typer.absent(node, expr, what)
        return False
    if parameter.kind == "entries":
        typer.scope.suggest_range(expr, whole=True, minimum=0)
        what = f"the count of `{function.name}`"
        return is_no_share(typer, typer.graph.literal(node), expr, what)
    if parameter.kind == "width":
        typer.scope.suggest_range(expr, whole=True, odd=True, minimum=1)
        return _is_constant(typer, node, expr, f"the width of `{function.name}`")
    return True


def is_token_count(typer: Typer, node: Node, expr: Expr, what: str) -> bool:
    """Whether a node can be a number of tokens; otherwise reports."""
    if node.type.unit in (None, "tokens"):
        typer.scope.suggest_unit(expr, "tokens")
        return True
    message = f"{what} a number of tokens; `{typer.shown(expr)}` is {unit_words(node.type.unit)}"
    help = None
    if node.type.unit == "ratio":
        help = f"for example `{typer.shown(expr)} * prompt`"
    typer.error("unit", message, expr.span, help)
    return False


def is_no_share(typer: Typer, value: Value | None, expr: Expr, what: str) -> bool:
    """Whether a number of entries is not a literal between 0 and 1; otherwise reports."""
    if value is None or not 0 < value < 1:
        return True
    message = f"{what} is {shown(value)} of an entry, which is none"
    help = f"a share of the prompt is written `{typer.shown(expr)} * prompt`"
    typer.error("range", message, expr.span, help)
    return False


def is_static(typer: Typer, node: Node, expr: Expr, what: str, code: str = "phase") -> bool:
    """Whether a node is one number known before the prefill; otherwise reports."""
    if not node.type.axes and node.when <= When.PROMPT and not node.type.absent:
        return True
    message = f"{what} must be one number known before the prefill; `{typer.shown(expr)}` is not"
    typer.error(code, message, expr.span)
    return False


def _differs(node: Node) -> bool:
    """Whether a number may be another at each layer; `length` counts as one number."""
    found: dict[int, bool] = {}
    for each in node.walk():
        own = each.operation.across_layers or (each.op == "size" and each.value == "layer")
        own = own or (each.when >= When.LAYER and all(x.when < When.LAYER for x in each.args))
        over_layers = each.operation.is_reduction and "layer" in each.axes
        found[id(each)] = not over_layers and (own or any(found[id(x)] for x in each.args))
    return found[id(node)]


def is_in_a_layer(typer: Typer, call: Call) -> bool:
    """Whether a call that says something of its layer stands in one; otherwise reports."""
    context = typer.context
    if context.phase != "static" or (context.inside == "share" and call.name != "past"):
        return True
    message = f"`{call.name}` has no value here: this holds for the whole model"
    typer.error("phase", message, call.span)
    return False


def is_alike(typer: Typer, node: Node, expr: Expr, what: str) -> bool:
    """Whether a number is that of all layers; otherwise reports."""
    if not _differs(node):
        return True
    message = f"{what} must be the same at every layer; `{typer.shown(expr)}` is not"
    hint = None if node.when < When.LAYER else f"reduce it, as in `sum[layer]({typer.shown(expr)})`"
    typer.error("phase", message, expr.span, hint)
    return False


def has_queries_in_common(typer: Typer, node: Node, call: Call) -> bool:
    """Whether a value looked at across layers has the same queries in all; otherwise reports."""
    window = node.type.window
    if window is None:
        return True
    reason = None
    if window.count is not None and _differs(window.count):
        reason = f"`{window.text}` is of another size at each layer"
    elif typer.scope.propagates:
        reason = "where tokens are propagated, not every query reaches every layer"
    if reason is None:
        return True
    message = f"`{typer.shown(call)}` looks at `query` across layers, but {reason}"
    typer.error("axis", message, call.span, "reduce `query` first")
    return False


def is_of_model(node: Node) -> bool:
    """Whether a number follows from parameters and model sizes, for all layers alike."""
    return node.when == When.LOAD and not _differs(node)


def _is_constant(typer: Typer, node: Node, expr: Expr, what: str) -> bool:
    """Whether a node is one number for the whole model, known at load; otherwise reports."""
    if is_of_model(node) and node.type.exact:
        return True
    message = f"{what} must follow from parameters alone; `{typer.shown(expr)}` does not"
    typer.error("phase", message, expr.span)
    return False


def has_axes(
    typer: Typer, axes: tuple[str, ...], node: Node, expr: Expr, span_of: Call, verb: str
) -> bool:
    """Whether a value has the axes that a function reads along; otherwise reports."""
    for axis in axes:
        if axis == "layer" or axis in node.type.axes:
            continue
        shape = str(node.type).partition("[")[2].partition("]")[0]
        has = f"is [{shape}]" if shape else "has no axes"
        message = f"`{typer.shown(expr)}` {has}; it has no axis `{axis}` to {verb}"
        help = None
        if axis == "token" and "dropped" in node.type.axes:
            help = "inside `merge` the axis of the dropped entries is called `dropped`"
        typer.error("axis", message, span_of.span, help)
        return False
    return True


def reduced_at_once(typer: Typer, nodes: Nodes, exprs: Exprs) -> bool:
    return all(typer.reduced(node, exprs[name]) for name, node in nodes.items())
