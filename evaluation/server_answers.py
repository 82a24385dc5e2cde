"""What servers answer, checked before anything is computed with it; imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_NUMBERS = ("entries_before", "entries_kept", "entries_dropped_in_decode", "kv_bytes_before",
            "kv_bytes_after", "slots_freed", "prompt_tokens", "propagated_tokens")  # fmt: skip


def generated(answer: object, *, with_text: bool = True) -> dict[str, Any]:
    """An answer of SGLang's /generate as it is, after a look at the fields that are used here.

    Args:
        answer: JSON value.
        with_text: whether it has to have a text; a server without a tokenizer sends none.

    Raises:
        ValueError: a field is missing, or is of another kind. The message says which.
    """
    if not isinstance(answer, dict):
        raise ValueError("the answer is no JSON object")
    meta = answer.get("meta_info")
    if not isinstance(meta, dict):
        raise ValueError("the answer has no `meta_info`")
    if given_up(answer) is not None:
        return answer  # it has no more than a reason
    ids, text = answer.get("output_ids"), answer.get("text")
    if not isinstance(ids, list) or not all(_is_count(token) for token in ids):
        raise ValueError("the answer has no list `output_ids`")
    if not isinstance(text, str) and (with_text or text is not None):
        raise ValueError("the answer has no `text`")
    for name in ("prompt_tokens", "completion_tokens"):
        if not _is_count(meta.get(name)):
            raise ValueError(f"`meta_info` of the answer has no number `{name}`")
    _check_facts(meta.get("kv_policy"))
    return answer


def completed(event: object) -> dict[str, Any]:
    """An event of /v1/completions as it is, after a look at the fields that are used here.

    Raises:
        ValueError: a field is of another kind. The message says which.
    """
    if not isinstance(event, dict):
        raise ValueError("the answer is no JSON object")
    choices, usage = event.get("choices") or [], event.get("usage") or {}
    if not isinstance(choices, list) or not all(map(_is_choice, choices)):
        raise ValueError("`choices` of the answer is no list of objects with a `text`")
    names = ("prompt_tokens", "completion_tokens")
    if not isinstance(usage, dict) or not all(_is_count(usage.get(name, 0)) for name in names):
        raise ValueError("`usage` of the answer has no numbers of tokens")
    return event


def given_up(answer: Mapping[str, Any]) -> str | None:
    """The reason if the server gave the request up, else None."""
    reason = answer["meta_info"].get("finish_reason")
    if not isinstance(reason, dict) or reason.get("type") != "abort":
        return None
    return str(reason.get("message") or "it does not say why")


def json_of(body: bytes) -> Any:
    """The JSON value of an answer; None if it is no JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def refusal(status: int, body: bytes) -> str:
    """A refused request in a few words: the status, and what the server says."""
    words = message_of(json_of(body))
    return f"status {status}" + (f": {words}" if words else "")


def message_of(content: object) -> str | None:
    """The message in the body of a refusal, in any of the forms that servers use; else None."""
    error = content.get("error", content) if isinstance(content, dict) else content
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else None


def states(info: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The state of each scheduler in an answer of /server_info.

    Raises:
        ValueError: a field that is used here is of another kind. The message says which.
    """
    for name in ("model_path", "tokenizer_path", "version"):
        if not isinstance(info.get(name) or "", str):
            raise ValueError(f"`{name}` is no text")
    found = info.get("internal_states")
    if not isinstance(found, list) or not all(isinstance(state, dict) for state in found):
        raise ValueError("`internal_states` is no list of objects")
    for state in found:
        if not _are_policies(state.get("kv_policy") or []):
            raise ValueError("`kv_policy` is no list of policies with a name and settings")
        if not isinstance(state.get("kv_experiment") or {}, dict):
            raise ValueError("`kv_experiment` is no object")
        for name in ("kv_policy_dp_rank", "kv_policy_token_bytes"):
            if not _is_count(state.get(name) or 0):
                raise ValueError(f"`{name}` is no number")
    return found


def models(content: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the models in an answer of /v1/models.

    Raises:
        ValueError: it is no list of models.
    """
    data = content.get("data")
    entries = data if isinstance(data, list) else [None]
    names = [entry["id"] for entry in entries if isinstance(entry, dict) and "id" in entry]
    if len(names) < len(entries) or not all(isinstance(name, str) for name in names):
        raise ValueError("`data` is no list of models with an `id`")
    return tuple(names)


def _are_policies(policies: object) -> bool:
    return isinstance(policies, list) and all(
        isinstance(policy, dict)
        and isinstance(policy.get("name"), str)
        and isinstance(policy.get("settings") or {}, dict)
        for policy in policies
    )


def _check_facts(facts: object) -> None:
    """Checks `meta_info.kv_policy`.

    Raises:
        ValueError: it is of another kind.
    """
    if facts is None:
        return
    if not isinstance(facts, dict):
        raise ValueError("`meta_info.kv_policy` of the answer is no object")
    for name in _NUMBERS:
        if name in facts and not _is_count(facts[name]):
            raise ValueError(f"`{name}` in `meta_info.kv_policy` is no number")
    shares = (("entries_kept", "entries_before"), ("kv_bytes_after", "kv_bytes_before"))
    for after, before in shares:
        if after in facts and not facts.get(before):
            raise ValueError(f"`meta_info.kv_policy` has `{after}` and no `{before}`")


def _is_choice(choice: object) -> bool:
    return isinstance(choice, dict) and isinstance(choice.get("text") or "", str)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
