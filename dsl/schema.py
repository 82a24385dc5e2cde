"""JSON Schema of policy files, for editors; made from the table of sections.

It knows the form of a file, not the language of its expressions: `kvpolicy check` does.
"""

from __future__ import annotations

import json
from typing import Any

from kvpolicy.dsl.sections import FILE, Key

NAME = "^[a-z][a-z0-9_]*$"
POLICY = "^[a-z][a-z0-9]*(-[a-z0-9]+)*$"

_VALUE = {"type": ["string", "number", "boolean"]}
_FORMS: dict[str, dict[str, Any]] = {
    "expression": _VALUE,
    "default": _VALUE,
    "expressions": {"type": "array", "items": _VALUE},
    "values": {"type": "array", "items": {"type": ["number", "boolean"]}},
    "text": {"type": "string"},
    "name": {"type": "string", "pattern": POLICY, "maxLength": 64},
    "version": {"const": 1},
    "number": {"type": "number"},
    "truth": {"type": "boolean"},
}


def schema() -> dict[str, Any]:
    """The schema as a JSON value."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "KV-cache policy",
        **_mapping(FILE),
    }


def schema_text() -> str:
    """The schema as text."""
    return json.dumps(schema(), indent=2) + "\n"


def _mapping(keys: tuple[Key, ...]) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": [key.name for key in keys if key.required],
        "properties": {key.name: _described(key) for key in keys},
    }


def _described(key: Key) -> dict[str, Any]:
    return {"description": key.meaning, **_value(key)} if key.meaning else _value(key)


def _value(key: Key) -> dict[str, Any]:
    if key.form == "keys":
        return _mapping(key.keys)
    if key.form == "same":
        return {"anyOf": [{"const": "same"}, _mapping(key.keys)]}
    if key.form == "either":
        return {"anyOf": [_VALUE, _mapping(key.keys)]}
    if key.form == "choice":
        return {"enum": list(key.choices)}
    if key.form == "choices":
        return {"type": "array", "items": {"enum": list(key.choices)}}
    if key.form == "named":
        assert key.item is not None
        item = _value(key.item)
        if key.item.name == "parameter":
            item = {"anyOf": [_VALUE, item]}
        return {"type": "object", "additionalProperties": False, "patternProperties": {NAME: item}}
    return _FORMS[key.form]
