"""What the answer of a replica holds: files may be damaged, servers of other versions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from kvpolicy.dsl.syntax.diagnostics import listed
from kvpolicy.experiments.replica.lifecycle import ExperimentState

Check = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _truth(value: Any) -> bool:
    return isinstance(value, bool)


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _reasons(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_text, value.values()))


def _change(value: Any) -> bool:
    return isinstance(value, dict) and _text(value.get("time")) and _text(value.get("what"))


def _reload(value: Any) -> bool:
    known = isinstance(value, dict) and _truth(value.get("success"))
    return known and _or_none(_text)(value.get("problem"))


_NEEDED: dict[str, tuple[Check, str]] = {
    "experiment": (_mapping, "a mapping"),
    "name": (_text, "text"),
    "revision": (_text, "text"),
    "digest": (_text, "text"),
    "state": (_text, "text"),
    "reason": (_or_none(_text), "text"),
    "promoted": (_or_none(_text), "text"),
    "rolled_back": (_reasons, "arms with reasons"),
    "coverage": (_number, "a number"),
    "default": (_text, "text"),
    "elapsed_seconds": (_number, "a number"),
    "step": (_number, "a number"),
    "steps": (_number, "a number"),
    "next_step_in_seconds": (_or_none(_number), "a number"),
    "log": (_list_of(_change), "a list of changes"),
    "reload": (_reload, "whether the file is in use"),
    "state_saved": (_truth, "true or false"),
    "warnings": (_list_of(_text), "a list of texts"),
    "analysis": (_mapping, "a mapping"),
}
_OPTIONAL: dict[str, tuple[Check, str]] = {  # earlier versions lack them
    "held": (_or_none(_text), "text"),
    "state_file": (_truth, "true or false"),
    "analysed_seconds": (_or_none(_number), "a number"),
}


def defect(document: Mapping[str, Any]) -> str | None:
    """What is wrong with an answer, in a sentence; None if it can be read.

    The experiment and the analysis in it are not looked into.
    """
    lacking = [name for name in _NEEDED if name not in document]
    if lacking:
        return f"this is no experiment of a server: it has no {listed(lacking[:3])}"
    for name, (holds, what) in (_NEEDED | _OPTIONAL).items():
        if name in document and not holds(document[name]):
            return f"it is damaged: `{name}` is not {what}"
    if document["state"] not in {state.value for state in ExperimentState}:
        return f"its state is `{document['state']}`, which this version of kvpolicy does not know"
    return None
