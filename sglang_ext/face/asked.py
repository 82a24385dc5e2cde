"""What a request asks of policies: the plugin's keys in its `custom_params`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kvpolicy.dsl.syntax.diagnostics import did_you_mean, listed

PREFIX = "kv_"  # keys that begin so are the plugin's; others are left alone
POLICY = "kv_policy"
KEPT = "kv_policy_kept"
FORCE = "kv_policy_force"
SET = "kv_policy_set"

ASSIGNED = "kv_policy_assigned"  # written by the front end, which refuses it from clients
NO_ROOM = "kv_policy: no slots are free"  # message by which an internal request is refused

_KEYS = (POLICY, SET, KEPT, FORCE)
_INSPECTION = (KEPT, FORCE)
_LONGEST = 60  # characters of a client's value that messages and logs repeat


def of(request: Any, *, inspection: bool) -> Mapping[str, Any]:
    """The plugin's keys of a request's `custom_params`.

    Args:
        inspection: whether the keys for evaluation are allowed (`--kv-policy-allow-inspection`).

    Raises:
        ValueError: `custom_params` is no JSON object, or a key is unknown or not allowed; the
            message is for the client.
    """
    custom = request.sampling_params.custom_params
    if custom is None:
        return {}
    if not isinstance(custom, dict):
        raise ValueError(f"custom_params is {shown(custom)}; expected a JSON object")
    params = {key: custom[key] for key in custom if isinstance(key, str) and key.startswith(PREFIX)}
    params.pop(ASSIGNED, None)
    for key in params:
        if key not in _KEYS:
            hint = did_you_mean(key, _KEYS) or f"there are {listed(_KEYS, 'and')}"
            raise ValueError(f"custom_params has {named(key)}, which is not known; {hint}")
        if key in _INSPECTION and not inspection and params[key] is not False:
            raise ValueError(
                f"custom_params.{key} is for evaluation, and this server was started without "
                "--kv-policy-allow-inspection"
            )
    check_values(params.get(SET, {}))
    return params


def assigned(request: Any) -> Mapping[str, Any]:
    """What the front end has written into a request (clients/traffic.py); empty if nothing."""
    custom = request.sampling_params.custom_params
    note = custom.get(ASSIGNED) if isinstance(custom, dict) else None
    return {} if note is None else note


def is_scoring(request: Any) -> bool:
    """Whether a request is an internal one that scores another's tokens."""
    return bool(assigned(request).get("scores"))


def check_values(values: Any) -> None:
    """Check the values of parameters that a request sets.

    Raises:
        ValueError: they are no JSON object, or one is no value of a parameter.
    """
    if not isinstance(values, dict):
        raise ValueError(f"custom_params.{SET} is {shown(values)}; expected a JSON object")
    for key, value in values.items():
        if not isinstance(value, bool | int | float):
            raise ValueError(
                f"custom_params.{SET}.{key} is {shown(value)}; expected a number, true or false"
            )


def not_served(where: str, name: Any, names: Iterable[str]) -> ValueError:
    """The error about a policy that a request names and the server does not have.

    Args:
        where: what holds the name, as messages say it.
        names: what requests may name.
    """
    return ValueError(f"{where} is {named(name)}; this server has {quoted(names)}")


def quoted(names: Iterable[str]) -> str:
    """Names as messages list them."""
    return ", ".join(f"`{name}`" for name in names)


def shown(value: Any) -> str:
    """A client's value as messages and logs repeat it: as in JSON, of limited length."""
    if isinstance(value, str):
        return _short(f"'{value}'")
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # an object of a program
        text = repr(value)
    return _short(text)


def named(value: Any) -> str:
    """As `shown`, for a value that should be a name."""
    return f"`{_short(value)}`" if isinstance(value, str) else shown(value)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
