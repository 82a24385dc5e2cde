"""JSON Schema of policy files, for editors; made from the table of sections.

It knows the form of a file, not the language of its expressions: `kvpolicy check` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from kvpolicy.dsl.syntax.mappings import K
from kvpolicy.dsl.syntax.parse import NAME, NO_POLICY, POLICY_NAME
from kvpolicy.dsl.syntax.sections import FILE, Key

ValueSchema = Callable[[Any], dict[str, Any]]

_NAME = f"^{NAME.pattern}$"
_VALUE = {"type": ["string", "number", "boolean"]}
_FORMS: dict[str, dict[str, Any]] = {
    "expression": _VALUE,
    "default": _VALUE,
    "expressions": {"type": "array", "items": _VALUE},
    "values": {"type": "array", "items": {"type": ["number", "boolean"]}},
    "names": {"type": "array", "items": {"type": "string", "pattern": _NAME}},
    "text": {"type": "string"},
    "name": {
        "type": "string",
        "pattern": f"^{POLICY_NAME.pattern}$",
        "maxLength": 64,
        "not": {"const": NO_POLICY},
    },
    "version": {"const": 1},
    "number": {"type": "number"},
    "truth": {"type": "boolean"},
}


def schema() -> dict[str, Any]:
    """The schema as a JSON value."""
    return document("KV-cache policy", FILE, _value)


def schema_text() -> str:
    """The schema as text."""
    return as_text(schema())


def as_text(schema: dict[str, Any]) -> str:
    """A schema as it is written to a file."""
    return json.dumps(schema, indent=2) + "\n"


def document(title: str, keys: Sequence[K], value: ValueSchema) -> dict[str, Any]:
    """The schema of files that are mappings of known keys; see `mapping` for the arguments."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **mapping(keys, value),
    }


def mapping(keys: Sequence[K], value: ValueSchema) -> dict[str, Any]:
    """The schema of a mapping.

    Args:
        value: key -> schema of its value.
    """
    return {
        "type": "object",
        "additionalProperties": False,
        "required": [key.name for key in keys if key.required],
        "properties": {key.name: _described(key, value) for key in keys},
    }


def _described(key: K, value: ValueSchema) -> dict[str, Any]:
    return {"description": key.meaning, **value(key)} if key.meaning else value(key)


def _value(key: Key) -> dict[str, Any]:
    if key.form == "keys":
        return mapping(key.keys, _value)
    if key.form in ("same", "either"):
        short_form = {"const": "same"} if key.form == "same" else _VALUE
        return {"anyOf": [short_form, mapping(key.keys, _value)]}
    if key.form == "choice":
        return {"enum": list(key.choices)}
    if key.form == "choices":
        return {"type": "array", "items": {"enum": list(key.choices)}}
    if key.form == "named":
        assert key.item is not None
        item = _value(key.item)
        if key.item.name == "parameter":
            item = {"anyOf": [_VALUE, item]}
        return {"type": "object", "additionalProperties": False, "patternProperties": {_NAME: item}}
    return _FORMS[key.form]
