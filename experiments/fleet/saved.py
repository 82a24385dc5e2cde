"""Reads answers of replicas that were saved in files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpolicy.dsl.syntax.diagnostics import PolicyError, refused, why
from kvpolicy.experiments.fleet.overview import ReplicaAnswer


def read(path: str) -> list[ReplicaAnswer]:
    """The answers in a file.

    Args:
        path: file with the answer of `GET /kv_policy/experiment`, a list of such answers, or the
            output of `kvpolicy experiment status --json`.

    Raises:
        PolicyError: the file cannot be read or holds something else.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise refused(path, "file", why(error, "it cannot be read")) from None
    except (ValueError, RecursionError):
        raise refused(path, "file", "this is not JSON") from None
    if isinstance(value, dict) and isinstance(value.get("replicas"), list):
        return [_replica(path, element) for element in value["replicas"]] or _nothing(path)
    if isinstance(value, list):
        numbers = [f"{path}[{number}]" for number in range(len(value))]
        return [_answer(*element) for element in zip(numbers, value, strict=True)] or _nothing(path)
    return [_answer(path, value)]


def read_all(paths: Sequence[str]) -> list[ReplicaAnswer]:
    """The answers in several files, in their order.

    Raises:
        PolicyError: as `read`.
    """
    return [answer for path in paths for answer in read(path)]


def _replica(path: str, value: Any) -> ReplicaAnswer:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise _something_else(path)
    return _answer(value["name"], value.get("document"))


def _answer(name: str, value: Any) -> ReplicaAnswer:
    if not isinstance(value, dict):
        raise _something_else(name)
    return ReplicaAnswer(name, value)


def _nothing(path: str) -> list[ReplicaAnswer]:
    raise _something_else(path)


def _something_else(name: str) -> PolicyError:
    help = "save one with `kvpolicy experiment status --url URL --json`"
    return refused(name, "file", "this holds no experiment of a server", help)
