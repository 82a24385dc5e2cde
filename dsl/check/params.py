"""Parameters: what the file declares, what their uses add, which values they take; `data`."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

from kvpolicy.dsl.check.expressions import Typer
from kvpolicy.dsl.check.names import Context, Definition, Uses, Wrong, sound
from kvpolicy.dsl.check.scope import Scope
from kvpolicy.dsl.ir.nodes import Data, Node, Param
from kvpolicy.dsl.ir.ranges import range_problem
from kvpolicy.dsl.ops.operations import Kind
from kvpolicy.dsl.syntax.mappings import Block
from kvpolicy.dsl.syntax.source import Span
from kvpolicy.dsl.syntax.tree import Expr


def declared_params(scope: Scope) -> dict[str, Param]:
    """The parameters of the file by name, without those that are wrong."""
    params = {}
    for definition in scope.definitions[""].values():
        if definition.kind == "parameter":
            param = sound(partial(_param, scope, definition))
            if param is not None:
                params[param.name] = param
    _report_cycles(scope, params)
    return params


def _param(scope: Scope, definition: Definition) -> Param:
    value, item = definition.item.value, definition.item
    block = value if isinstance(value, Block) else Block(item.span)
    default = block.get("default") if isinstance(value, Block) else value
    span = block.items["default"].span if "default" in block else item.span
    node = _default(scope, default, span)
    uses = scope.uses.get(definition.name, Uses())
    unit = scope.parameter(definition).type.unit
    minimum = _largest(block.get("min"), uses.minimum)
    maximum, above = block.get("max"), block.get("above")
    if block.get("unit") == "ratio":
        minimum = Fraction(0) if minimum is None else minimum
        maximum = Fraction(1) if maximum is None else maximum
    choices = tuple(i.value for i in block.get("choices") or () if i.value is not None)
    if "choices" in block and not choices:
        message = f"`choices` of `{definition.name}` is empty: the parameter could have no value"
        scope.error("range", message, block.items["choices"].span, "list values, or leave it out")
    odd = bool(block.get("odd") or uses.odd)
    param = Param(
        definition.name, node, node.type.kind, unit, minimum, above, maximum, odd,
        odd or uses.whole or unit in ("tokens", "layers"), choices,
        (block.get("about") or "").strip(), item.key,
    )  # fmt: skip
    if node.operation.kind is Kind.LITERAL:
        problem = range_problem(param, node.value)  # type: ignore[arg-type]
        if problem:
            scope.error("range", problem, span, _share(param, node.value))
    return param


def _share(param: Param, value: object) -> str | None:
    """Help if the value is a share but the parameter is a number of tokens; else None."""
    if param.unit != "tokens" or not isinstance(value, Fraction) or not 0 < value < 1:
        return None
    return f"a share has `unit: ratio`, and is written `{param.name} * prompt` where it is used"


def _default(scope: Scope, default: object, span: Span) -> Node:
    """The node of a default: a literal or an expression over model sizes and parameters."""
    graph = scope.graph
    if isinstance(default, bool):
        return graph.make("truth", kind="truth", axes=(), value=default, span=span)
    if isinstance(default, Fraction):
        return graph.make("number", value=default, span=span)
    if isinstance(default, Expr):
        return Typer(scope, Context("static", "default")).expr(default)
    raise Wrong


def _largest(*bounds: Fraction | None) -> Fraction | None:
    return max((bound for bound in bounds if bound is not None), default=None)


def _report_cycles(scope: Scope, params: dict[str, Param]) -> None:
    """Reports defaults that depend on themselves."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            message = f"the default of `{name}` depends on itself"
            scope.error("name", message, params[name].span or Span(0, 0))
        elif name not in done and name in params:
            for node in params[name].default.walk():
                if node.op == "param":
                    visit(str(node.value), (*path, name))
            done.add(name)

    for name in params:
        visit(name, ())


def declared_data(scope: Scope) -> dict[str, Data]:
    """The tensors that must come with the model, by name."""
    tensors = {}
    for definition in scope.definitions[""].values():
        block = definition.item.value
        if definition.kind != "tensor" or not isinstance(block, Block):
            continue
        axes = tuple(item.value for item in block.get("axes") or ())
        low, high = block.get("min"), block.get("max")
        if low is not None and high is not None and low > high:
            message = f"`{definition.name}` is at least {low} and at most {high}: no number is"
            scope.error("range", message, block.items["max"].span)
        if None not in axes:
            about = (block.get("about") or "").strip()
            tensors[definition.name] = Data(definition.name, axes, low, high, about)
    return tensors
