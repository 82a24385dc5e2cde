"""JSON Schema of experiment files, for editors; made from the table of keys.

It covers the form of a file; `reading.py` checks what values mean together.
"""

from __future__ import annotations

from typing import Any

from kvpolicy.dsl.syntax.schema import as_text, document, mapping
from kvpolicy.experiments.definition.form import (
    FILE,
    MAX_ARMS,
    MAX_ITEMS,
    MAX_NAME,
    NAME,
    PARAMETER,
    PLACE,
    Field,
)
from kvpolicy.experiments.definition.metrics import METRICS

_NAME = {"type": "string", "pattern": f"^({NAME})$", "maxLength": MAX_NAME}
_PERCENT = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)? ?%$"}
_SHARE = {"type": "string", "pattern": "^(100(\\.0+)?|[0-9]{1,2}(\\.[0-9]+)?) ?%$"}
_DURATION = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?[smhd]$"}
_BOUNDS = (
    ("minimum", "least"),
    ("exclusiveMinimum", "above"),
    ("maximum", "most"),
    ("exclusiveMaximum", "below"),
)


def schema() -> dict[str, Any]:
    """The schema as a JSON value."""
    return document("Experiment with KV-cache policies", FILE, _value)


def schema_text() -> str:
    """The schema as text."""
    return as_text(schema())


def _choice(key: Field) -> dict[str, Any]:
    if key.name != "metric":
        return {"enum": list(key.choices)}
    return {"oneOf": [{"const": k.name, "description": k.meaning} for k in METRICS.values()]}


def _value(key: Field) -> dict[str, Any]:
    bounds = {
        word: bound for word, name in _BOUNDS if (bound := getattr(key, name)) is not None
    }  # bounds of durations are in seconds, which a pattern cannot check
    number = {"type": "number", **bounds}
    forms: dict[str, dict[str, Any]] = {
        "name": _NAME,
        "policy": _NAME,
        "truth": {"type": "boolean"},
        "number": number,
        "whole": {**number, "type": "integer"},
        "amount": {"anyOf": [number, _PERCENT]},
        "share": {"anyOf": [{"type": "number", **bounds, "exclusiveMaximum": 1}, _SHARE]},
        "duration": _DURATION,
        "choice": _choice(key),
        "places": {
            "type": "array",
            "items": {"type": "string", "pattern": f"^({PLACE})$"},
            "minItems": 1,
            "maxItems": MAX_ITEMS,
            "uniqueItems": True,
        },
        "set": {
            "type": "object",
            "additionalProperties": False,
            "patternProperties": {f"^{PARAMETER}$": {"type": ["number", "boolean"]}},
            "maxProperties": MAX_ITEMS,
        },
    }
    if key.form in forms:
        return forms[key.form]
    inner = mapping(key.fields, _value)
    if key.form == "arms":
        return {
            "type": "object",
            "additionalProperties": False,
            "patternProperties": {_NAME["pattern"]: inner},
            "propertyNames": {"maxLength": MAX_NAME},
            "minProperties": 2,
            "maxProperties": MAX_ARMS,
        }
    if key.form == "items":
        least = {"minItems": 1} if key.required else {}
        if not any(field.required for field in key.fields):  # a step has exactly one key
            inner |= {"minProperties": 1, "maxProperties": 1}
        return {"type": "array", "items": inner, **least, "maxItems": MAX_ITEMS}
    if key.form == "design":
        return {"anyOf": [{"const": "request"}, inner]}
    return inner
