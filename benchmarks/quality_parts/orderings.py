"""Tests orderings of policies that papers report on the records of an evaluation.

Two policies are compared on the same samples: a sample's score is the mean over budgets and turns,
and the interval is of the paired difference, averaged over tasks. Only tasks that the model answers
with full KV at least half of the time are counted; the others leave little to lose.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from kvpolicy.evaluation.records import FULL, Record
from kvpolicy.evaluation.reporting.statistics import Estimate, paired_difference

MARGIN = 0.02
"""What "at least equal" may lack: two answers in a hundred."""
KNOWN = 0.5
"""Accuracy with full KV from which a task is counted."""
SMALL = (0.125, 0.0625)
WIDE, LOOSER = "asl-wide", "asl-looser"
"""ASL pooled over more tokens, and with a higher threshold too; see `runs.variants`."""


def early(layer: int) -> str:
    """Name of the FastKV variant whose tokens leave after `layer`."""
    return f"fastkv-after-{layer}"


AWARE = ("snapkv", "adakv", "pyramidkv", "ada-pyramidkv", "lava", "dynamickv", "cake")
BLIND = ("sinks-recent", "streamingllm")


class Verdict(StrEnum):
    """Outcome of one comparison."""

    HOLDS = "holds"
    FAILS = "does not hold here"
    OPEN = "cannot be told"


@dataclass(frozen=True)
class Ordering:
    """An ordering of policies that a paper reports.

    Attributes:
        claim: the ordering in words.
        source: paper or file that reports it.
        pairs: (the better, the worse) by name.
        strict: whether the first is better; otherwise at least equal, within MARGIN.
        tasks: tasks for which it is reported; None means all.
        budgets: budgets for which it is reported; None means all.
    """

    claim: str
    source: str
    pairs: tuple[tuple[str, str], ...]
    strict: bool = True
    tasks: tuple[str, ...] | None = None
    budgets: tuple[float, ...] | None = None


def _against(better: Sequence[str], worse: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((b, w) for w in worse for b in better)


ORDERINGS = (
    Ordering(
        "Policies that look from the question beat those that do not look",
        "arXiv:2404.14469, arXiv:2407.11550",
        _against(AWARE, BLIND),
    ),
    Ordering(
        "The question's attention beats the attention of all tokens added up",
        "arXiv:2404.14469",
        (("snapkv", "h2o"),),
    ),
    Ordering(
        "A budget that heads compete for is at least equal to the same for every head",
        "arXiv:2407.11550, arXiv:2509.09754",
        (("adakv", "snapkv"), ("ada-pyramidkv", "pyramidkv"), ("lava", "snapkv")),
        strict=False,
    ),
    Ordering(
        "Budgets that differ by layer beat the same for every layer",
        "arXiv:2406.02069, arXiv:2412.14838, arXiv:2503.12491, arXiv:2509.09754",
        _against(("pyramidkv", "dynamickv", "cake", "lava"), ("snapkv",)),
        budgets=SMALL,
    ),
    Ordering(
        "An adaptive layer keeps key-value retrieval where an early layer loses it",
        "arXiv:2601.07667",
        _against((WIDE, LOOSER), tuple(map(early, range(4)))),
        tasks=("kv",),
    ),
    Ordering(
        "Tokens that leave after a middle layer beat a second prefill on the chosen ones",
        "arXiv:2502.01068",
        (("fastkv", "gemfilter"),),
    ),
    Ordering(
        "An adaptive layer beats a second prefill on what a fixed layer chooses",
        "arXiv:2601.07667",
        (("asl", "gemfilter"),),
    ),
    Ordering(
        "Merging what is dropped beats dropping it, at small budgets",
        "arXiv:2406.13035, github.com/zyxxmu/cam",
        (("d2o", "h2o"), ("cam", "streamingllm")),
        budgets=SMALL,
    ),
    Ordering(
        "The same for a composition of ours (in no paper): merging with ASL and LAVa's budgets",
        "policies/asl-lava-d2o.yaml",
        (("asl-lava-d2o", "asl"), ("asl-lava-d2o", "lava")),
        budgets=SMALL,
    ),
    Ordering(
        "Attention weighed by the values is at least equal to attention alone",
        "arXiv:2406.12335",
        (("vatp", "h2o"),),
        strict=False,
    ),
    Ordering(
        "What the newest token sees beats the attention of all tokens added up, and a window",
        "arXiv:2401.06104",
        (("tova", "h2o"), ("tova", "streamingllm")),
    ),
)


@dataclass(frozen=True)
class Finding:
    """The comparison of one pair of an ordering.

    Attributes:
        by_budget: the difference at each budget that both have.
        pooled: the difference over all budgets; None if they share no samples.
        levels: accuracy of the better and the worse, over the same samples and budgets.
        full: accuracy with full KV on these samples.
        tasks: tasks that were counted.
    """

    ordering: Ordering
    better: str
    worse: str
    by_budget: dict[float, Estimate]
    pooled: Estimate | None
    levels: tuple[float, float]
    full: float
    tasks: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """Whether the interval of `pooled` lies wholly on one side of the claim's limit."""
        if self.pooled is None:
            return Verdict.OPEN
        if self.pooled.high < 0:
            return Verdict.FAILS
        if self.ordering.strict:
            if self.pooled.low > 0:
                return Verdict.HOLDS
            return Verdict.FAILS if self.pooled.high < MARGIN else Verdict.OPEN
        return Verdict.HOLDS if self.pooled.low > -MARGIN else Verdict.OPEN


Key = tuple[str, int, int]
"""Task, length and index: one sample."""


class Scores:
    """Scores of an evaluation by policy, budget and sample, averaged over turns.

    Args:
        records: records of one or several runs that asked the same questions.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        turns: dict[tuple[str, float | None], dict[Key, list[float]]]
        turns = defaultdict(lambda: defaultdict(list))
        for record in records:
            sample = (record.task, record.length, record.index)
            turns[record.policy, record.budget][sample].append(record.score)
        self.scores = {
            asked: {sample: float(np.mean(found)) for sample, found in samples.items()}
            for asked, samples in turns.items()
        }
        self.full = self.scores.get((FULL, None), {})

    def budgets(self, policy: str) -> list[float]:
        """Budgets of a policy, the largest first."""
        found = {budget for name, budget in self.scores if name == policy and budget is not None}
        return sorted(found, reverse=True)

    def known(self, least: float = KNOWN) -> tuple[str, ...]:
        """Tasks with at least this accuracy with full KV, in the order of the records."""
        by_task: dict[str, list[float]] = defaultdict(list)
        for (task, *_), score in self.full.items():
            by_task[task].append(score)
        return tuple(task for task, found in by_task.items() if np.mean(found) >= least)

    def table(self, policy: str, budgets: Sequence[float], samples: Sequence[Key]) -> np.ndarray:
        """Scores [samples, budgets]."""
        return np.array([[self.scores[policy, b][s] for b in budgets] for s in samples])

    def common(
        self, names: Sequence[str], budgets: Sequence[float], tasks: Sequence[str]
    ) -> list[Key]:
        """Samples of the tasks that full KV and all policies have at all budgets."""
        asked = [self.scores[name, budget] for name in names for budget in budgets]
        return [s for s in self.full if s[0] in tasks and all(s in each for each in asked)]


def by_task(samples: Sequence[Key], scores: np.ndarray) -> list[np.ndarray]:
    """Scores [samples] of each task."""
    tasks = np.array([task for task, *_ in samples])
    return [scores[tasks == task] for task in dict.fromkeys(tasks.tolist())]


def level(samples: Sequence[Key], scores: np.ndarray) -> float:
    """Mean over tasks of scores [samples]."""
    return float(np.mean([each.mean() for each in by_task(samples, scores)]))


def difference(samples: Sequence[Key], one: np.ndarray, other: np.ndarray) -> Estimate:
    """Mean over tasks of the paired differences of scores [samples] with its 95 % interval."""
    return paired_difference(by_task(samples, one), by_task(samples, other))


def compare(scores: Scores, ordering: Ordering, better: str, worse: str) -> Finding:
    """Compares one pair of an ordering."""
    tasks = tuple(t for t in scores.known() if ordering.tasks is None or t in ordering.tasks)
    budgets = [
        b
        for b in scores.budgets(better)
        if b in scores.budgets(worse) and (ordering.budgets is None or b in ordering.budgets)
    ]
    samples = scores.common((better, worse), budgets, tasks) if budgets else []
    if not samples:
        return Finding(ordering, better, worse, {}, None, (math.nan, math.nan), math.nan, tasks)
    one, other = (scores.table(name, budgets, samples) for name in (better, worse))
    full = np.array([scores.full[sample] for sample in samples])
    return Finding(
        ordering,
        better,
        worse,
        {b: difference(samples, one[:, i], other[:, i]) for i, b in enumerate(budgets)},
        difference(samples, one.mean(1), other.mean(1)),
        (level(samples, one.mean(1)), level(samples, other.mean(1))),
        level(samples, full),
        tasks,
    )


def findings(records: Iterable[Record], orderings: Sequence[Ordering] = ORDERINGS) -> list[Finding]:
    """Compares every pair of every ordering."""
    scores = Scores(records)
    return [
        compare(scores, ordering, better, worse)
        for ordering in orderings
        for better, worse in ordering.pairs
    ]
