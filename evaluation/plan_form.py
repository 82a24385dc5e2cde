"""The form of plan.json, as far as it is read again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def plan_problem(plan: Any) -> str | None:
    """What keeps the content of plan.json from being a plan; None if nothing does."""
    if not isinstance(plan, dict):
        return "it is no JSON object"
    for key, has_form in _NEEDED.items():
        if not has_form(plan.get(key)):
            return f"`{key}` is missing or of another form"
    for key, has_form in _OPTIONAL.items():
        if plan.get(key) is not None and not has_form(plan[key]):
            return f"`{key}` is of another form"
    return None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


def _are_policies(entries: Any) -> bool:
    return isinstance(entries, list) and bool(entries) and all(map(_is_policy, entries))


def _is_policy(entry: Any) -> bool:
    if not isinstance(entry, dict) or "budget" not in entry:
        return False
    setting, aliases = (entry.get(key) or {} for key in ("setting", "aliases"))
    return (
        isinstance(entry.get("policy"), str)
        and (entry["budget"] is None or _is_number(entry["budget"]))
        and isinstance(setting, dict)
        and isinstance(aliases, dict)
        and all(map(_are_numbers, aliases.values()))
    )


def _are_titles(tasks: Any) -> bool:
    titles = tasks.values() if isinstance(tasks, dict) else ()
    return bool(titles) and all(isinstance(title, str) for title in titles)


def _are_counts(questions: Any) -> bool:
    """Whether it is task -> length -> numbers of samples and of questions."""
    return isinstance(questions, dict) and all(
        isinstance(by_length, dict)
        and all(_are_numbers(counts) and len(counts) == 2 for counts in by_length.values())
        for by_length in questions.values()
    )


# Key of plan.json -> whether its value is of the right form.
_NEEDED: dict[str, Callable[[Any], bool]] = {
    "policies": _are_policies,
    "tasks": _are_titles,
    "lengths": lambda lengths: bool(lengths) and _are_numbers(lengths),
    "samples": lambda samples: type(samples) is int,
}
_OPTIONAL: dict[str, Callable[[Any], bool]] = {
    "questions": _are_counts,
    "server": lambda server: isinstance(server, dict),
    "stages": lambda stages: isinstance(stages, dict) and all(map(_is_number, stages.values())),
    "notes": lambda notes: isinstance(notes, list),
}
