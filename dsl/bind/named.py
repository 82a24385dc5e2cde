"""What options of servers and of commands share: `NAME=PATH`, `NAME.rate=0.25`, and a default."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

# A policy as it is served: a label of metrics, and part of a URL.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9@._-]{0,63}")
OF_NAMES = (
    "a name has at most 64 letters, digits, `@`, `.`, `_` and `-`, and begins with a letter or a "
    "digit"
)
# Decode steps from one fold to the next; docs/results/fold_interval.md has the measurement.
FOLD_INTERVAL = 16


def name_and_path(value: str) -> tuple[str | None, str]:
    """The name that a value of --kv-policy gives, None if it gives none, and the path.

    Raises:
        ValueError: there is no path, or the name cannot be one; the message says which.
    """
    name, equals, path = value.partition("=")
    if not equals or os.sep in name:
        return None, value
    if not path:
        raise ValueError("expected PATH or NAME=PATH")
    if not NAME.fullmatch(name):
        raise ValueError(f"`{name[:70]}` cannot be a name; {OF_NAMES}")
    return name, path


def settings_by_policy(settings: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Policy -> parameter -> value, of values of --kv-policy-set.

    Args:
        names: the policies, at least one.

    Raises:
        ValueError: a setting is of another form, for no policy, or there twice; the message begins
            with it.
    """
    values: dict[str, dict[str, str]] = {name: {} for name in names}
    for setting in settings:
        qualified_name, equals, value = setting.partition("=")
        policy, dot, parameter = qualified_name.strip().rpartition(".")
        if not equals or not parameter:
            raise ValueError(f"{setting}: expected NAME=VALUE or POLICY.NAME=VALUE")
        if not dot:
            if len(names) > 1:
                raise ValueError(f"{setting}: say which policy, as in {names[0]}.{setting}")
            policy = names[0]
        if policy not in values:
            raise ValueError(
                f"{setting}: no policy is called `{policy}`; there is {', '.join(names)}"
            )
        if parameter in values[policy]:
            raise ValueError(f"{setting}: `{parameter}` of `{policy}` is set twice")
        values[policy][parameter] = value.strip()
    return values
