"""What is compared with control by window of time, for `design: switchback`.

Requests of one window share the server, each other's batches and whatever befalls them; the window
is the unit of the comparison, and its mean is one value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpolicy.experiments.arm_record import judged_margin
from kvpolicy.experiments.bounded_mean import finite
from kvpolicy.experiments.difference import PairedDifference
from kvpolicy.experiments.experiment import Experiment

MAX_WINDOWS = 4_096  # the first ones; four weeks of windows of ten minutes


class Windows:
    """Sums of clipped values by window; replicas share the windows, so their sums add.

    A window is open for as long again after its end; what comes later is left out, so that a value
    once used stays as it is. Time may go back, as when a clock that was ahead is set right: closed
    windows stay closed.

    Attributes:
        clips: largest value of each metric, in its unit; none with `design: request`.
        latest: number of the window that it is now, -1 before the first.
        taken, late: values that were added; that were left out as their window was closed.
        differences: of the means of closed windows to control's, by metric and arm.
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
        self._sums: dict[int, list[float]] = {}  # count and sum of each metric, one by one
        self._open: set[int] = set()

    @property
    def full(self) -> bool:
        """Whether later windows are left out."""
        return len(self._arms) >= MAX_WINDOWS

    def reached(self, window: int) -> None:
        """It is a window's time now: those two before it are closed."""
        if window != self.latest:
            self.latest = window
            for each in sorted(each for each in self._open if each < window - 1):
                self._close(each)

    def add(self, window: int, arm: str, metric: str, value: float) -> None:
        """Takes a value in [0, clip] of a request that began in a window."""
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
        at = 2 * list(self.clips).index(metric)
        self._sums[window][at] += 1
        self._sums[window][at + 1] += value

    def _close(self, window: int) -> None:
        self._open.remove(window)
        sums, arm = iter(self._sums[window]), self._arms[window]
        for metric, count, total in zip(self.clips, sums, sums, strict=True):
            if not count:
                continue
            value = min(total / count, self.clips[metric])  # against rounding
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
            ValueError, KeyError, TypeError: a document is none of `as_document`.
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
