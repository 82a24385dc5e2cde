"""Comparison with control by window of time, for `design: switchback`.

Requests of one window share the server, its batches and its mishaps. So the window is the unit of
the comparison, and its mean is one value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpolicy.experiments.definition.experiment import Experiment
from kvpolicy.experiments.replica.arm_record import judged_margin
from kvpolicy.experiments.statistics.bounded_mean import finite
from kvpolicy.experiments.statistics.difference import PairedDifference

MAX_WINDOWS = 4_096  # only the first ones are kept; four weeks of windows of ten minutes


class Windows:
    """Sums of clipped values by window; replicas share the windows, so their sums add.

    A window stays open while the next one lasts; later values are left out, so that a mean that was
    used stays as it is. Time may go back, as when a clock that was ahead is corrected: closed
    windows stay closed.

    Attributes:
        control: name of the control arm.
        clips: largest value of each metric, in its unit; empty with `design: request`.
        latest: number of the present window; -1 before the first.
        taken, late: number of values added, and of values left out because their window was
            closed.
        differences: metric -> arm -> mean minus control's mean, over closed windows.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.control = experiment.control.name
        self.latest = -1
        self.taken = self.late = 0
        self.clips: dict[str, float] = {}
        self.differences: dict[str, dict[str, PairedDifference]] = {}
        for metric in experiment.metrics if experiment.design is not None else ():
            upper = metric.upper
            if metric.kind.compared == "control" and upper is not None:
                self.clips[metric.metric] = upper
                self.differences[metric.metric] = {
                    arm.name: PairedDifference(upper, judged_margin(metric))
                    for arm in experiment.arms[1:]
                }
        self._arms: dict[int, str] = {}
        self._sums: dict[int, list[float]] = {}  # count, sum of each metric in turn
        self._open: set[int] = set()

    @property
    def full(self) -> bool:
        """Whether there are `MAX_WINDOWS`, so that later windows are left out."""
        return len(self._arms) >= MAX_WINDOWS

    def reached(self, window: int) -> None:
        """Makes a window the present one, and closes all windows before the previous one."""
        if window != self.latest:
            self.latest = window
            for earlier in sorted(earlier for earlier in self._open if earlier < window - 1):
                self._close(earlier)

    def add(self, window: int, arm: str, metric: str, value: float) -> None:
        """Adds a value in [0, clip] of a request that began in a window."""
        known = window in self._arms
        if window < self.latest - 1 or (known and window not in self._open):
            self.late += 1
            return
        if self.full and not known:
            return
        self.taken += 1
        if not known:
            self._arms[window] = arm
            self._sums[window] = [0.0] * 2 * len(self.clips)
            self._open.add(window)
        column = 2 * list(self.clips).index(metric)
        self._sums[window][column] += 1
        self._sums[window][column + 1] += value

    def _close(self, window: int) -> None:
        self._open.remove(window)
        sums, arm = iter(self._sums[window]), self._arms[window]
        for metric, count, total in zip(self.clips, sums, sums, strict=True):
            if not count:
                continue
            value = min(total / count, self.clips[metric])  # rounding may exceed the bound
            differences = self.differences[metric]
            if arm == self.control:
                for difference in differences.values():
                    difference.add("control", value)
            else:
                differences[arm].add("arm", value)

    def as_document(self) -> dict[str, Any]:
        """The sums as a JSON value."""
        windows = {str(w): [self._arms[w], *self._sums[w]] for w in self._sums}
        return {"latest": self.latest, "late": self.late, "windows": windows}

    @classmethod
    def pooled(cls, experiment: Experiment, documents: Sequence[dict[str, Any]]) -> Windows:
        """The sums of several documents.

        Raises:
            ValueError, KeyError, TypeError: a document is not one of `as_document`.
        """
        pooled = cls(experiment)
        for document in documents:
            for window, (arm, *sums) in document["windows"].items():
                before = pooled._sums.get(int(window), [0.0] * 2 * len(pooled.clips))
                added = [a + finite(b) for a, b in zip(before, sums, strict=True)]
                pooled._sums[int(window)] = added
                pooled._arms[int(window)] = str(arm)
                pooled.taken += int(sum(sums[::2]))
            pooled.late += int(document["late"])
        pooled._open = set(pooled._sums)
        pooled.reached(max((int(document["latest"]) for document in documents), default=-1))
        return pooled
