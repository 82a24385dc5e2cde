"""Which values of a parameter `kvpolicy tune` tries, and which parameters it can choose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.ir.nodes import ModelShape, Node, Param, Program
from kvpolicy.dsl.ir.ranges import range_problem, shown
from kvpolicy.dsl.ir.traverse import nodes_of, propagate_roots
from kvpolicy.dsl.syntax.diagnostics import PolicyError, did_you_mean, listed, refused

# Most whole values that are tried by default, and steps into which other ranges are divided.
_WHOLE, _STEPS = 64, 10


def candidates(
    program: Program,
    name: str,
    shape: ModelShape,
    settings: Mapping[str, str],
    given: Sequence[str] | None,
) -> list[Bound]:
    """The policy bound to each value of a parameter that is tried.

    Args:
        name: the parameter.
        settings: values of other parameters.
        given: values as text; None for all that the parameter's declaration allows.

    Raises:
        PolicyError: the parameter does not change what goes deeper, has no values to try, or a
            given value is refused.
    """
    _check_parameter(program, name)
    words = given or [shown(value) for value in _declared(program, program.params[name], shape)]
    bounds = []
    for word in dict.fromkeys(words):
        try:
            bound = bind(program, shape, {**settings, name: word})
        except PolicyError:
            if given:
                raise
            continue  # `require` refuses a part of the range
        if bound.restarts:
            message = "this policy begins the prefill again, so that its final states are others"
            raise refused(program.name, "arguments", message)
        bounds.append(bound)
    if len(bounds) < 2:
        message = f"there is no choice of `{name}`: {len(bounds)} values can be tried"
        raise refused(program.name, "range", message, "say which with `--values`")
    return bounds


def _check_parameter(program: Program, name: str) -> None:
    """Refuses a parameter that does not change which tokens go deeper."""
    choices = list(dict.fromkeys(_read(program, propagate_roots(program.propagate))))
    if name in choices:
        return
    if not choices:
        message = "`tune` needs a policy whose `propagate` depends on a parameter"
        raise refused(program.name, "arguments", message)
    if name in program.params:
        message = f"`{name}` does not change which tokens go deeper"
        help = f"those that do are {listed(choices, 'and')}"
    else:
        message = f"policy `{program.name}` has no parameter `{name}`"
        help = did_you_mean(name, choices) or f"`tune` can choose {listed(choices)}"
    raise refused("--for", "arguments", message, help)


def _read(program: Program, roots: Sequence[Node]) -> Iterator[str]:
    """Names of the parameters that nodes read, directly or through defaults."""
    for node in nodes_of(list(roots)):
        if node.op == "param":
            name = str(node.value)
            yield name
            yield from _read(program, [program.params[name].default])


def _declared(program: Program, param: Param, shape: ModelShape) -> list[Fraction | bool]:
    """The values that a parameter's declaration allows: its choices, or its range."""
    if param.choices:
        return list(param.choices)
    if param.kind == "truth":
        return [False, True]
    low, high = param.minimum, param.maximum
    if low is None:
        low = param.above
    if param.unit == "layers":
        low = Fraction(0) if low is None else low
        last = Fraction(shape.layers - 2)  # tokens that leave after the last layer change nothing
        high = last if high is None else min(high, last)
    is_whole = param.whole or param.odd or param.unit == "layers"
    many = is_whole and param.unit != "layers"
    if low is None or high is None or (many and high - low >= _WHOLE):
        message = f"`{param.name}` may have too many values to try them all"
        raise refused(program.name, "range", message, "say which with `--values`")
    if is_whole:
        values = [Fraction(n) for n in range(int(low), int(high) + 1)]
    else:
        values = [low + (high - low) * step / _STEPS for step in range(_STEPS + 1)]
    return [value for value in values if range_problem(param, value) is None]
