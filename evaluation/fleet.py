"""`kvpolicy fleet status`: whether all replicas serve the same, and what differs.

Exit codes: 0 all serve the same; 1 something differs; 2 a replica cannot be asked.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvpolicy.dsl.syntax.diagnostics import PolicyError, refused
from kvpolicy.evaluation import server_answers
from kvpolicy.evaluation.keys import api_key
from kvpolicy.experiments.fleet.client import INFO, Replica

_AT_ONCE = 32  # most replicas asked at the same time
_WIDTH = 100
_OF_POLICY = ("digest", "settings", "default", "enabled")
_OF_EXPERIMENT = ("name", "revision", "digest", "state", "rolled_back", "coverage")

Facts = Mapping[str, str]


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the actions to the parser of `kvpolicy fleet`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    status = actions.add_parser("status", help="what replicas serve, and where it differs")
    status.add_argument(
        "--url",
        action="append",
        required=True,
        metavar="URL",
        help="address of a server; given again for each replica",
    )
    status.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the servers' --api-key"
    )
    status.add_argument("--json", action="store_true", help="everything as JSON")


def main(args: argparse.Namespace) -> int:
    """Runs `fleet status`; returns the exit code.

    Raises:
        PolicyError: an option cannot be used.
    """
    fleet = look(args.url, api_key(args.api_key_env))
    if args.json:
        print(json.dumps(fleet.document(), indent=1))
    else:
        print("\n".join(fleet.lines()))
        for answer in fleet.answers:
            if answer.error is not None:
                print(answer.error, file=sys.stderr)
    if any(answer.error is not None for answer in fleet.answers):
        return 2
    return int(bool(fleet.differing))


def look(urls: Sequence[str], key: str | None) -> Fleet:
    """Asks replicas what they serve.

    Args:
        urls: addresses of the replicas.
        key: key for servers with --api-key, or None.

    Raises:
        PolicyError: a URL is not an address, or is given twice.
    """
    replicas = [Replica(url, api_key=key) for url in urls]
    seen: set[str] = set()
    for replica in replicas:
        if replica.url in seen:
            message = f"{replica.url} is given twice"
            raise refused("--url", "arguments", message, "name each replica once")
        seen.add(replica.url)
    with ThreadPoolExecutor(min(_AT_ONCE, len(replicas))) as pool:
        return Fleet(list(pool.map(_asked, replicas)))


@dataclass(frozen=True)
class ReplicaFacts:
    """The answer of a replica.

    Attributes:
        url: address of the replica.
        schedulers: facts of each scheduler, by name; empty after an error.
        error: why the replica could not be asked, else None.
    """

    url: str
    schedulers: Sequence[Facts]
    error: PolicyError | None = None


def _asked(replica: Replica) -> ReplicaFacts:
    try:
        return ReplicaFacts(replica.url, facts_of(replica.server_info()))
    except PolicyError as error:
        return ReplicaFacts(replica.url, (), error)
    except ValueError as error:
        message = f"its answer to GET {INFO} cannot be used: {error}"
        return ReplicaFacts(replica.url, (), refused(f"--url {replica.url}", "server", message))


def facts_of(info: Mapping[str, Any]) -> list[Facts]:
    """Facts of each scheduler of a server, from the answer of `GET /server_info`.

    Raises:
        ValueError: the answer is of another form.
    """
    states = server_answers.states(info)
    by_rank = sorted(states, key=lambda state: state.get("kv_policy_dp_rank") or 0)
    return [dict(_facts(info, state)) for state in by_rank]


def _facts(info: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "model", str(info.get("model_path", "-"))
    yield "SGLang", str(info.get("version", "-"))
    yield "kvpolicy", str(state.get("kv_policy_version", "-"))
    policies = state.get("kv_policy")
    if policies is None:
        yield "policies", "none: it serves without --kv-policy"
        return
    yield "policies", ", ".join(sorted(policy["name"] for policy in policies)) or "none"
    yield "policies applied", _shown(state.get("kv_policy_applied"))
    yield "inspection", _shown(state.get("kv_policy_inspection"))
    for policy in policies:
        for key in _OF_POLICY:
            yield f"policy {policy['name']}: {key}", _shown(policy.get(key))
    experiment = state.get("kv_experiment")
    yield "experiment", "none" if experiment is None else str(experiment.get("name"))
    if experiment is not None:
        for key in _OF_EXPERIMENT[1:]:
            yield f"experiment: {key.replace('_', ' ')}", _shown(experiment.get(key))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={item}" for name, item in sorted(value.items())) or "defaults"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "-" if value is None else str(value)


class Fleet:
    """The answers of all replicas.

    Attributes:
        answers: the answers, one per replica.
        values: fact -> value -> places that have it, the commonest value first. A place is the
            address of a replica, with the DP rank of the scheduler if it has several.
        differing: names of the facts with several values.
    """

    def __init__(self, answers: Sequence[ReplicaFacts]) -> None:
        self.answers = answers
        places = [
            (f"{answer.url} DP{rank}" if len(answer.schedulers) > 1 else answer.url, facts)
            for answer in answers
            for rank, facts in enumerate(answer.schedulers)
        ]
        names = dict.fromkeys(name for _, facts in places for name in facts)
        self.values: dict[str, dict[str, list[str]]] = {}
        for name in names:
            by_value: dict[str, list[str]] = {}
            for place, facts in places:
                by_value.setdefault(facts.get(name, "-"), []).append(place)
            ordered = sorted(by_value.items(), key=lambda item: -len(item[1]))
            self.values[name] = dict(ordered)
        self.differing = [name for name, by_value in self.values.items() if len(by_value) > 1]

    def lines(self) -> Iterator[str]:
        """Lines for a terminal; facts that differ are marked and list the places of each value."""
        yield self._headline()
        width = max(map(len, self.values), default=0)
        for name, by_value in self.values.items():
            mark = "!" if len(by_value) > 1 else " "
            for number, (value, places) in enumerate(by_value.items()):
                line = f"{mark} {name if number == 0 else '':<{width}}  {value}"
                yield line if len(by_value) == 1 else f"{line}  at {len(places)}:"
                if len(by_value) > 1:
                    indent = " " * (width + 8)
                    yield from textwrap.wrap(
                        " ".join(places), _WIDTH, initial_indent=indent, subsequent_indent=indent,
                        break_long_words=False, break_on_hyphens=False,
                    )  # fmt: skip

    def _headline(self) -> str:
        total = len(self.answers)
        silent_count = sum(answer.error is not None for answer in self.answers)
        replicas = "1 replica" if total == 1 else f"{total} replicas"
        verdict = f"{len(self.differing)} of {len(self.values)} facts differ"
        if not self.differing:
            verdict = "all serve the same" if silent_count < total else "none answers"
        return f"{replicas}: {verdict}" + (
            f"; {silent_count} cannot be asked" if silent_count < total and silent_count else ""
        )

    def document(self) -> dict[str, Any]:
        """The answers and differences as a JSON value."""
        return {
            "uniform": not self.differing and all(answer.error is None for answer in self.answers),
            "differing": {name: self.values[name] for name in self.differing},
            "replicas": [
                {"url": answer.url, "schedulers": [dict(facts) for facts in answer.schedulers]}
                if answer.error is None
                else {"url": answer.url, "error": answer.error.diagnostics[0].message}
                for answer in self.answers
            ],
        }
