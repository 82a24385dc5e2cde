"""Shared by the commands that execute policies: overrides and the choice of an execution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.ir.nodes import Program
from kvpolicy.dsl.syntax.diagnostics import did_you_mean, refused

if TYPE_CHECKING:
    import numpy as np
    from kvpolicy.dsl.data.result import Result, Steps


def overrides(settings: Sequence[str] | None) -> dict[str, str]:
    """`name=value` strings as a mapping.

    Raises:
        PolicyError: a string without `=`, or two with one name.
    """
    result: dict[str, str] = {}
    for setting in settings or ():
        name, equals, value = setting.partition("=")
        if not equals or not name.strip():
            raise refused("--set", "arguments", f"`{setting}` is not name=value")
        if name.strip() in result:
            raise refused("--set", "arguments", f"`{name.strip()}` is set twice")
        result[name.strip()] = value
    return result


def overrides_of_each(programs: Sequence[Program], settings: Sequence[str]) -> list[dict[str, str]]:
    """`name=value` strings as a mapping for each policy, with the parameters that it has.

    Raises:
        PolicyError: as `overrides`, or no policy has a parameter of that name.
    """
    values = overrides(settings)
    for name in values:
        if not any(name in program.params for program in programs):
            params = [param for program in programs for param in program.params]
            message = f"no policy here has a parameter `{name}`"
            raise refused("--set", "arguments", message, did_you_mean(name, params))
    return [
        {name: value for name, value in values.items() if name in program.params}
        for program in programs
    ]


def execute(
    bound: Bound,
    execution: str,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    steps: Steps | None = None,
    inv_freq: np.ndarray | None = None,
) -> Result:
    """Applies a policy with the named execution; see `interpret` for arguments and errors.

    PolicyError also if torch is missing.
    """
    from kvpolicy.dsl.interpret.interpreter import interpret

    if execution == "interpreter":
        return interpret(bound, q, k, v, steps, inv_freq)
    try:
        from kvpolicy.dsl.execute.apply import apply
    except ImportError as error:
        raise refused(
            "--execution torch", "arguments", f"{error}", "install torch, or use the interpreter"
        ) from None
    return apply(bound, q, k, v, steps, inv_freq)
