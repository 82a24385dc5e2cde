"""Orders to every replica of an experiment: abort, promote, pause, resume, use another version."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.experiments.fleet.client import Declined, Replica
from kvpolicy.experiments.fleet.overview import Overview, ReplicaAnswer
from kvpolicy.experiments.replica.lifecycle import ExperimentState
from kvpolicy.experiments.replica.promotion import incomparable, not_cleared

_GOAL = {
    "abort": ExperimentState.ABORTED,
    "promote": ExperimentState.PROMOTED,
    "pause": ExperimentState.PAUSED,
    "resume": ExperimentState.RUNNING,
}

_UNCHANGED = "nothing was changed anywhere"


def act(replicas: Sequence[Replica], action: str, body: Mapping[str, Any]) -> int:
    """Makes all replicas abort, pause or resume, and prints a line for each.

    If one replica cannot be reached, the others are told all the same.

    Args:
        action: "abort", "pause" or "resume".
        body: any of `arm` and `reason`.

    Returns:
        The exit code: 0 if all replicas are in the state asked for, 1 if one declines, 2 if one
        cannot be told.
    """

    return _each(replicas, lambda replica: _order(replica, action, body))


def promote(replicas: Sequence[Replica], body: Mapping[str, Any], *, dry_run: bool) -> int:
    """Makes all replicas promote an arm if all of them would; prints a line for each.

    Of several replicas none may have enough evidence by itself: unless the order is forced, what
    they have seen together has to clear the arm.

    Args:
        body: `arm`, and any of `reason` and `force`.
        dry_run: only ask whether they would.

    Returns:
        The exit code: 0 if all replicas promote it, 1 if what they have seen speaks against it or
        one declines, 2 if one cannot be told.

    Raises:
        PolicyError: a replica does not answer, or the replicas do not run one experiment.
    """
    if len(replicas) > 1 and "force" not in body:
        why = _against(replicas, body["arm"])
        if why is not None:
            print(
                f"the replicas together: {why}; to promote `{body['arm']}` all the same, give "
                f"`--force`\n{_UNCHANGED}",
                file=sys.stderr,
            )
            return 1
        body = {**body, "pooled": True}
    return _all_or_none(
        replicas,
        lambda replica: _order(replica, "promote", body, dry_run=True),
        lambda replica: _order(replica, "promote", body),
        dry_run=dry_run,
    )


def _against(replicas: Sequence[Replica], arm: str) -> str | None:
    """What speaks against an arm in what the replicas have seen together."""
    overview = Overview([ReplicaAnswer(replica.url, replica.document()) for replica in replicas])
    if arm not in [other.name for other in overview.experiment.arms[1:]]:
        return None  # control needs no evidence, and servers say which arms there are
    rolled_back = {
        name: "; ".join(f"{reason} (at {replica})" for replica, reason in reasons.items())
        for name, reasons in overview.rolled_back.items()
    }
    return incomparable(overview.analysis, rolled_back, arm) or not_cleared(overview.analysis, arm)


def put(replicas: Sequence[Replica], text: str, *, dry_run: bool) -> int:
    """Sends another version to all replicas if all of them would take it; prints a line for each.

    Args:
        text: text of the experiment file.
        dry_run: only ask whether they would take it.

    Returns:
        The exit code: 0 if all replicas take it, 1 if one declines, 2 if one cannot be told.
    """
    return _all_or_none(
        replicas,
        lambda replica: _would(replica.put(text, dry_run=True)),
        lambda replica: _did(replica.put(text, dry_run=False)),
        dry_run=dry_run,
    )


def _all_or_none(
    replicas: Sequence[Replica],
    ask: Callable[[Replica], str],
    order: Callable[[Replica], str],
    *,
    dry_run: bool,
) -> int:
    """Gives an order that cannot be undone to all replicas if none of them declines when asked."""
    code = _each(replicas, ask)
    if code:
        if len(replicas) > 1:
            print(_UNCHANGED, file=sys.stderr)
        return code
    if dry_run:
        return 0
    return _each(replicas, order)


def _order(replica: Replica, action: str, body: Mapping[str, Any], *, dry_run: bool = False) -> str:
    """What a replica answers to an order; with `dry_run`, to whether it would follow it."""
    try:
        answer = replica.act(action, body, dry_run=dry_run)
    except Declined:
        if _is_so(replica, action, body):
            return f"{_GOAL[action]} already"
        raise
    if dry_run:
        return f"would promote arm {body['arm']}"
    what = answer["state"]
    if action == "abort" and "arm" in body:
        what = f"{what}, without arm {body['arm']}"
    return f"{what}{'' if answer['changed'] else ' already'}"


def _is_so(replica: Replica, action: str, body: Mapping[str, Any]) -> bool:
    """Whether a replica that declines an order is in the state asked for already."""
    if action not in ("abort", "promote"):
        return False
    try:
        document = replica.document()
    except PolicyError:  # the refusal says more
        return False
    same_arm = action == "abort" or document.get("promoted") == body.get("arm")
    return document.get("state") == _GOAL[action] and same_arm


def _would(answer: Mapping[str, Any]) -> str:
    what = "begins a new analysis" if answer["begins_anew"] else "keeps the analysis"
    return f"accepts revision {answer['revision']}, which {what}{_coverage(answer)}"


def _did(answer: Mapping[str, Any]) -> str:
    return f"has revision {answer['revision']} now, {answer['state']}{_coverage(answer)}"


def _coverage(answer: Mapping[str, Any]) -> str:
    return f", coverage {100 * answer['coverage']:.3g} %"


def _each(replicas: Sequence[Replica], order: Callable[[Replica], str]) -> int:
    code = 0
    for replica in replicas:
        try:
            print(f"{replica.url}: {order(replica)}")
        except Declined as error:
            print(f"{replica.url}: declined: {error}", file=sys.stderr)
            code = max(code, 1)
        except PolicyError as error:
            print(error, file=sys.stderr)
            code = 2
    return code
