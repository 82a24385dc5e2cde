"""Which values a parameter accepts: one rule and one message for defaults and overrides."""

from __future__ import annotations

from fractions import Fraction

from kvpolicy.dsl.ir.host import Value
from kvpolicy.dsl.ir.nodes import Param


def range_problem(param: Param, value: Value) -> str | None:
    """What is wrong with a value of a parameter, as a sentence; None if nothing is."""
    if isinstance(value, bool) != (param.kind == "truth"):
        kind = "`true` or `false`" if param.kind == "truth" else "a number"
        return f"`{param.name}` is {shown(value)}; it is {kind}"
    if not param.choices or value in param.choices:
        if isinstance(value, bool) or _in_range(param, value):
            return None
    return f"`{param.name}` is {shown(value)}; it must be {accepted(param)}"


def _in_range(param: Param, value: Fraction | float) -> bool:
    return all(
        (
            not (param.whole or param.odd) or value % 1 == 0,
            not param.odd or value % 2 == 1,
            param.above is None or value > param.above,
            param.minimum is None or value >= param.minimum,
            param.maximum is None or value <= param.maximum,
        )
    )


def accepted(param: Param) -> str:
    """What a parameter accepts: `a whole number, odd, at least 1`."""
    parts = []
    if param.whole:
        parts.append("a whole number")
    if param.odd:
        parts.append("odd")
    if param.above is not None:
        parts.append(f"above {shown(param.above)}")
    if param.minimum is not None and (param.above is None or param.minimum > param.above):
        parts.append(f"at least {shown(param.minimum)}")
    if param.maximum is not None:
        parts.append(f"at most {shown(param.maximum)}")
    if param.choices:
        parts.append("one of " + ", ".join(shown(choice) for choice in param.choices))
    return ", ".join(parts)


def shown(value: Value) -> str:
    """A value as an author would write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Fraction) and value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.10g}"
