"""The state of an experiment: running, paused or ended, and its coverage.

An arm that fails is rolled back: its keys get the default, and the other arms go on. When no arm
but control is left, the experiment is aborted. Both are latched for the revision: neither a restart
nor an older file that comes back undoes them. Time is counted by a monotonic clock while the
experiment runs, so setting the wall clock changes nothing.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from kvpolicy.experiments.definition.experiment import Experiment
from kvpolicy.experiments.replica.assignment import Assignment, AssignmentReason, assign
from kvpolicy.experiments.statistics.bounded_mean import finite

FORMAT = 1  # of what `Lifecycle.saved` returns
_MOST_LOGGED = 200  # largest number of changes kept in the log
_MOST_LATCHED = 200  # largest number of revisions whose end or rollbacks are kept


class ExperimentState(StrEnum):
    """State of an experiment."""

    RUNNING = "running"
    PAUSED = "paused"  # requests are assigned as before, but no further step is taken
    DISABLED = "disabled"  # `enabled: false` in its file
    ABORTED = "aborted"
    PROMOTED = "promoted"


ENDED = (ExperimentState.ABORTED, ExperimentState.PROMOTED)


class Lifecycle:
    """The state of one experiment in one process.

    Attributes:
        experiment: the version that is in use.
        log: changes, oldest first, each with `time` and `what`.
        held: why no step is taken while the experiment runs; None where nothing holds them up.
    """

    def __init__(
        self,
        experiment: Experiment,
        saved: Mapping[str, Any] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], str] = lambda: datetime.now(UTC).isoformat(timespec="seconds"),
    ) -> None:
        """
        Args:
            saved: what the method `saved` returned before a restart; None to begin.
            clock: seconds of a clock that never goes back.
            now: the time to show in the log of changes.

        Raises:
            ValueError: `saved` is of another format, damaged, or names an arm that the experiment
                does not have.
        """
        self.experiment = experiment
        self._clock, self._now = clock, now
        self._latched: dict[str, dict[str, Any]] = {}
        self._elapsed = 0.0
        self._since = clock()
        self._paused = False
        self.held: str | None = None
        self.log: list[dict[str, str]] = []
        if saved is not None:
            self._restore(saved)
        else:
            self._note(f"revision {experiment.revision} begins")

    def _restore(self, saved: Mapping[str, Any]) -> None:
        if saved.get("format") != FORMAT:
            raise ValueError(f"its format is {saved.get('format')!r}, not {FORMAT}")
        try:
            self.log = [
                {name: str(entry[name]) for name in ("time", "what")} for entry in saved["log"]
            ]
            self._latched = {
                revision: {
                    **{name: end.get(name) for name in ("state", "reason", "arm")},
                    "rolled_back": dict(end["rolled_back"]),
                }
                for revision, end in saved["latched"].items()
            }
            for end in self._latched.values():
                if end["state"] is not None:
                    ExperimentState(end["state"])
            same = saved["revision"] == self.experiment.revision
            self._elapsed = max(0.0, finite(saved["elapsed"])) if same else 0.0
            self._paused = bool(saved["paused"]) and same
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"it lacks something: {error!r}") from None
        names = {arm.name for arm in self.experiment.arms}
        for arm in (self.promoted, *self.rolled_back):
            if arm is not None and arm not in names:
                raise ValueError(f"it names arm `{arm}`, which the experiment does not have")
        self._note(f"the server has started again; revision {self.experiment.revision}")

    def saved(self) -> dict[str, Any]:
        """The state as a JSON value, to be kept over a restart."""
        return {
            "format": FORMAT,
            "experiment": self.experiment.name,
            "revision": self.experiment.revision,
            "elapsed": round(self.elapsed, 3),
            "paused": self._paused,
            "latched": copy.deepcopy(self._latched),
            "log": self.log,
        }

    @property
    def state(self) -> ExperimentState:
        """The present state."""
        if self._has_ended():
            return ExperimentState(self._ended()["state"])
        if not self.experiment.enabled:
            return ExperimentState.DISABLED
        return ExperimentState.PAUSED if self._paused else ExperimentState.RUNNING

    @property
    def reason(self) -> str | None:
        """Why the experiment has ended; None while it has not."""
        return self._ended().get("reason")

    @property
    def promoted(self) -> str | None:
        """The arm that was promoted; None if none was."""
        return self._ended().get("arm")

    @property
    def rolled_back(self) -> dict[str, str]:
        """Arms that are rolled back, each with the reason."""
        return dict(self._ended().get("rolled_back", {}))

    @property
    def elapsed(self) -> float:
        """Seconds for which this revision has run and its steps were not held."""
        running = self.state == ExperimentState.RUNNING and self.held is None
        return self._elapsed + (self._clock() - self._since if running else 0.0)

    @property
    def coverage(self) -> float:
        """Share of the keys that take part now, 0 to 1."""
        return self._step()[0]

    @property
    def step(self) -> int:
        """Number of steps taken, pauses included."""
        return self._step()[1]

    @property
    def default(self) -> str:
        """Policy of requests that do not take part now."""
        if self.promoted is not None:
            return self.experiment.arm(self.promoted).served_as
        return self.experiment.default

    def assign(self, key: str | None, seconds: float) -> Assignment:
        """The arm of a request with this key.

        Args:
            seconds: wall clock in seconds since 1970; used with `design: switchback` only.
        """
        if self.state not in (ExperimentState.RUNNING, ExperimentState.PAUSED):
            return Assignment(None, AssignmentReason.DISABLED)
        drawn = assign(self.experiment, key, coverage=self.coverage, seconds=seconds)
        if drawn.arm in self._ended().get("rolled_back", ()):
            return Assignment(None, AssignmentReason.DISABLED)
        return drawn

    def abort(self, reason: str) -> bool:
        """End it for good: requests get the default. Returns whether this changes anything."""
        return self._end(ExperimentState.ABORTED, reason, None)

    def roll_back(self, arm: str, reason: str) -> bool:
        """End an arm for good: its keys get the default. Returns whether this changes anything.

        Control is never rolled back. Rolling back the last other arm aborts the experiment.
        """
        if self._has_ended() or arm in self.rolled_back or arm == self.experiment.control.name:
            return False
        self._latch()["rolled_back"][arm] = reason
        self._note(f"arm {arm} rolled back: {reason}")
        remaining = [other.name for other in self.experiment.arms[1:] if other.weight > 0]
        if set(remaining) <= set(self.rolled_back):
            self.abort(reason)
        return True

    def promote(self, arm: str, reason: str) -> bool:
        """End it for good: requests get an arm's policy. Returns whether this changes anything."""
        return self._end(ExperimentState.PROMOTED, reason, arm)

    def pause(self) -> bool:
        """Take no further steps. Returns whether this changes anything."""
        return self._set_paused(True, "paused")

    def resume(self) -> bool:
        """Take steps again. Returns whether this changes anything."""
        return self._set_paused(False, "resumed")

    def hold_steps(self, why: str | None) -> bool:
        """Take no further steps while `why` is true, and again with None.

        Returns whether this changes anything, as it does while steps are left.
        """
        held = why if self._step()[2] is not None else None
        if held == self.held:
            return False
        self._hold()
        if held is None:
            self._note(f"steps are taken again, as this is over: {self.held}")
        elif self.held is None:
            self._note(f"no further step is taken for now: {held}")
        self.held = held
        return True

    def replace(self, experiment: Experiment, source: str = "file") -> bool:
        """Use another version of the experiment. Returns whether it is another revision.

        Within a revision `elapsed` goes on and a pause stays; another revision begins anew.

        Args:
            source: where the version is from, for the log of changes.
        """
        before, state, coverage = self.experiment, self.state, self.coverage
        if experiment.digest == before.digest:
            return False
        self._hold()
        self.experiment = experiment
        if experiment.revision == before.revision:
            changes = _changes(before, experiment, coverage, self.coverage)
            self._note(f"changed by {source}: {changes}")
            self._since = self._clock()
            return False
        self._elapsed, self._paused, self.held = 0.0, False, None
        self._since = self._clock()
        self._note(
            f"revision {experiment.revision} by {source} takes the place of {before.revision} "
            f"({state})"
        )
        return True

    def covered_by(self, experiment: Experiment) -> float:
        """Share of the keys that would take part now if `replace` were called."""
        anew = experiment.revision != self.experiment.revision
        return _step(experiment, 0.0 if anew else self.elapsed)[0]

    def document(self) -> dict[str, Any]:
        """The state as shown to operators, a JSON value."""
        coverage, index, wait = self._step()
        return {
            "state": self.state.value,
            "reason": self.reason,
            "promoted": self.promoted,
            "rolled_back": self.rolled_back,
            "coverage": coverage,
            "default": self.default,
            "elapsed_seconds": round(self.elapsed, 1),
            "step": index,
            "steps": len(self.experiment.steps),
            "held": self.held,
            "next_step_in_seconds": None if wait is None else round(wait, 1),
            "log": self.log,
        }

    def _ended(self) -> dict[str, Any]:
        return self._latched.get(self.experiment.revision, {})

    def _has_ended(self) -> bool:
        return self._ended().get("state") is not None

    def _latch(self) -> dict[str, Any]:
        nothing: dict[str, Any] = {"state": None, "reason": None, "arm": None, "rolled_back": {}}
        entry = self._latched.setdefault(self.experiment.revision, nothing)
        while len(self._latched) > _MOST_LATCHED:
            del self._latched[next(iter(self._latched))]
        return entry

    def _end(self, state: ExperimentState, reason: str, arm: str | None) -> bool:
        if self._has_ended():
            return False
        self._hold()
        self._latch().update(state=state.value, reason=reason, arm=arm)
        self._note(f"{state}{'' if arm is None else f' ({arm})'}: {reason}")
        return True

    def _set_paused(self, paused: bool, what: str) -> bool:
        if paused == self._paused or self._has_ended():
            return False
        self._hold()
        self._paused = paused
        self._note(what)
        return True

    def _hold(self) -> None:
        """Add the time until now to `_elapsed`, before the state changes."""
        self._elapsed, self._since = self.elapsed, self._clock()

    def _step(self) -> tuple[float, int, float | None]:
        """Coverage, steps taken, and seconds until the next one; None if there is none."""
        return _step(self.experiment, self.elapsed)

    def _note(self, what: str) -> None:
        self.log = [*self.log, {"time": self._now(), "what": what}][-_MOST_LOGGED:]


def _step(experiment: Experiment, elapsed: float) -> tuple[float, int, float | None]:
    """Coverage, steps taken, and seconds until the next one, after `elapsed` seconds."""
    coverage, left = experiment.coverage, elapsed
    for index, step in enumerate(experiment.steps):
        if step.coverage is not None:
            coverage = step.coverage
        if step.pause is not None:
            if left < step.pause:
                return coverage, index, step.pause - left
            left -= step.pause
    return coverage, len(experiment.steps), None


def _changes(before: Experiment, after: Experiment, covered_before: float, covered: float) -> str:
    """What differs; of the coverage what applies, which steps may have set."""
    parts = []
    if before.enabled != after.enabled:
        parts.append("enabled" if after.enabled else "disabled")
    if before.steps != after.steps:
        parts.append("steps")
    if covered != covered_before:
        parts.append(f"coverage {100 * covered_before:g} % -> {100 * covered:g} %")
    elif before.coverage != after.coverage:
        parts.append(f"coverage, which a step keeps at {100 * covered:g} %")
    return ", ".join(parts)
