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
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise refused(path, "file", why(error, "it cannot be read")) from None
    except ValueError:
        raise refused(path, "file", "this is not JSON") from None
    if isinstance(found, dict) and isinstance(found.get("replicas"), list):
        return [_replica(path, each) for each in found["replicas"]] or _nothing(path)
    if isinstance(found, list):
        numbers = [f"{path}[{number}]" for number in range(len(found))]
        return [_answer(*each) for each in zip(numbers, found, strict=True)] or _nothing(path)
    return [_answer(path, found)]


def read_all(paths: Sequence[str]) -> list[ReplicaAnswer]:
    """The answers in several files, in their order.

    Raises:
        PolicyError: as `read`.
    """
    return [answer for path in paths for answer in read(path)]


def _replica(path: str, found: Any) -> ReplicaAnswer:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise _something_else(path)
    return _answer(found["name"], found.get("document"))


def _answer(name: str, found: Any) -> ReplicaAnswer:
    if not isinstance(found, dict):
        raise _something_else(name)
    return ReplicaAnswer(name, found)


def _nothing(path: str) -> list[ReplicaAnswer]:
    raise _something_else(path)


def _something_else(name: str) -> PolicyError:
    help = "save one with `kvpolicy experiment status --url URL --json`"
    return refused(name, "file", "this holds no experiment of a server", help)
