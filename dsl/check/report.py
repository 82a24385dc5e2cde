"""Checks the section `report`: names under `let` whose values are shown."""

from __future__ import annotations

from collections.abc import Iterator

from kvpolicy.dsl.check.scope import Scope
from kvpolicy.dsl.ops.table import RESERVED
from kvpolicy.dsl.syntax.diagnostics import did_you_mean
from kvpolicy.dsl.syntax.mappings import Item

# Keys that `kvpolicy run` writes for every policy, beside reported values; see docs/run.md.
OUTPUT_KEYS = (
    *("kept", "budgets", "scores", "selected_layer", "propagated", "positions"),
    *("steps", "thresholds", "merged"),
)
_HELP = "`report` lists names that the policy defines under `let`"


def report(scope: Scope) -> dict[str, Item]:
    """The listed items by name; reports those that are no lets."""
    items: dict[str, Item] = {}
    for item in scope.file.get("report") or ():
        if item.value is None:
            continue
        items[item.value] = item
        problem = _problem(scope, item.value)
        if problem is not None:
            message, help = problem
            scope.error("name", message, item.span, help)
    return items


def _problem(scope: Scope, name: str) -> tuple[str, str | None] | None:
    """Why a name cannot be reported, and what to do; None if it can."""
    kinds = {s: names[name].kind for s, names in scope.definitions.items() if name in names}
    if "let" in (kinds.get(""), kinds.get("decode")):
        if name not in OUTPUT_KEYS:
            return None
        return f"`kvpolicy run` writes something else under `{name}`", "choose another name"
    if name in RESERVED:
        return f"`{name}` is {RESERVED[name]}, not a `let`", _HELP
    if not kinds:
        return f"unknown name `{name}`", did_you_mean(name, _lets(scope)) or _HELP
    section, kind = next(iter(kinds.items()))
    if kind == "let":
        return f"`{name}` is defined under `{section}` and exists only there", None
    return f"`{name}` is a {kind}, not a `let`", _HELP


def _lets(scope: Scope) -> Iterator[str]:
    for section in ("", "decode"):
        names = scope.definitions[section].items()
        yield from (name for name, definition in names if definition.kind == "let")
