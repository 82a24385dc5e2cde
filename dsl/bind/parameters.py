"""Values of a policy's parameters: overrides, defaults, ranges and `require`.

Every value that is not accepted is refused with one message that names the parameter, the value
and what is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from kvpolicy.dsl.ir.host import Value, evaluate
from kvpolicy.dsl.ir.lower import Env
from kvpolicy.dsl.ir.nodes import ModelShape, Param, Program
from kvpolicy.dsl.ir.ranges import accepted, range_problem, shown
from kvpolicy.dsl.ir.written import bare, written
from kvpolicy.dsl.syntax.diagnostics import did_you_mean, listed, refused

# Digits and exponent are bounded so that a value from a request cannot cost memory.
NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?(e[+-]?[0-9]{1,2})?")
_ANY_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?")
_DIGITS = "18 digits before and after the point, and 2 in the exponent"


def environment(
    shape: ModelShape,
    params: Mapping[str, Value],
    prompt: int | None = None,
    length: int | None = None,
    generated: int | None = None,
) -> Env:
    """The environment for `host.evaluate`: model sizes, parameters, and arguments that are given.

    `length` is the number of tokens at the layer; None: `prompt`, as nothing was propagated.
    `generated` is the number of the decode step, from 1.
    """
    env: dict[str, Value] = {
        "layers": Fraction(shape.layers),
        "heads": Fraction(shape.heads),
        "kv_heads": Fraction(shape.kv_heads),
    }
    if prompt is not None:
        env["prompt"] = Fraction(prompt)
        env["length"] = Fraction(prompt if length is None else length)
    if generated is not None:
        env["generated"] = Fraction(generated)
    env.update((f"param:{name}", value) for name, value in params.items())
    return env


def text_of(value: float | bool) -> str:
    """A parameter's value as settings write it."""
    if isinstance(value, bool | int):  # an integer may be too large for a float
        return str(value).lower()
    return f"{value:.17g}"


def given_value(program: Program, name: str, text: str) -> Value:
    """The value that a setting gives a parameter, checked as far as no model is needed.

    Raises:
        PolicyError: there is no such parameter, or it does not take the value.
    """
    _check_name(program, name)
    param = program.params[name]
    value = _parse(program, param, text)
    problem = range_problem(param, value)
    if problem is not None:
        raise refused(program.name, "range", problem)
    return value


def parameter_values(
    program: Program, shape: ModelShape, overrides: Mapping[str, str]
) -> dict[str, Value]:
    """Values of all parameters: an override, or the default for this model.

    Raises:
        PolicyError: unknown parameter, a value that is not accepted, or a `require` that is false.
    """
    values = _values(program, shape, overrides)
    for name, param in program.params.items():
        problem = range_problem(param, values[name])
        if problem is not None:
            if name in overrides:
                raise refused(program.name, "range", problem)
            raise program.refused("range", problem, param.default.span)
    _check_requires(program, shape, values)
    return values


def _values(program: Program, shape: ModelShape, overrides: Mapping[str, str]) -> dict[str, Value]:
    for name in overrides:
        _check_name(program, name)
    values: dict[str, Value] = {}

    def value_of(name: str) -> Value:
        if name not in values:
            param = program.params[name]
            if name in overrides:
                values[name] = _parse(program, param, overrides[name])
            else:
                for node in param.default.walk():
                    if node.op == "param":
                        value_of(node.symbol)
                values[name] = evaluate(param.default, environment(shape, values))
        return values[name]

    return {name: value_of(name) for name in program.params}


def _check_name(program: Program, name: str) -> None:
    if name not in program.params:
        message = f"policy `{program.name}` has no parameter `{name}`"
        raise refused(program.name, "name", message, _suggest(program, name))


def _suggest(program: Program, name: str) -> str:
    if not program.params:
        return "it has no parameters"
    close = did_you_mean(name, program.params)
    return close or f"its parameters are {listed(sorted(program.params), 'and')}"


def _parse(program: Program, param: Param, text: str) -> Fraction | bool:
    text = text.strip()
    if param.kind == "truth":
        if text not in ("true", "false"):
            raise refused(
                program.name, "range", f"`{param.name}` is `{text}`; it is `true` or `false`"
            )
        return text == "true"
    if NUMBER.fullmatch(text):
        return Fraction(text)
    kind = ", ".join(filter(None, ("a number", accepted(param))))
    message = f"`{param.name}` is `{_short(text)}`; it is {kind}"
    help = None
    if _ANY_NUMBER.fullmatch(text):
        message = f"`{param.name}` is `{_short(text)}`; a number has at most {_DIGITS}"
    elif text.endswith("%") and NUMBER.fullmatch(text[:-1].rstrip()):
        help = f"{text} is `{float(Fraction(text[:-1].rstrip()) / 100):g}`"
    raise refused(program.name, "range", message, help)


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


def _check_requires(program: Program, shape: ModelShape, params: Mapping[str, Value]) -> None:
    env = environment(shape, params)
    for condition in program.requires:
        if evaluate(condition, env):
            continue
        names = sorted({node.symbol for node in condition.walk() if node.op == "param"})
        values = ", ".join(f"`{name}` is {shown(params[name])}" for name in names)
        message = f"policy `{program.name}` requires `{bare(written(condition))}`"
        message += f", but {values}" if values else ""
        raise program.refused("range", message, condition.span)
