"""What all replicas of an experiment have seen, pooled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvpolicy.dsl.syntax.diagnostics import PolicyError, refused
from kvpolicy.experiments.definition import reading
from kvpolicy.experiments.definition.experiment import Experiment
from kvpolicy.experiments.definition.metrics import METRICS
from kvpolicy.experiments.fleet.answer_form import defect
from kvpolicy.experiments.fleet.outlook import Outlook, outlook
from kvpolicy.experiments.replica.alarms import kind_of
from kvpolicy.experiments.replica.analysis import WORST, Analysis, pooled
from kvpolicy.experiments.replica.lifecycle import ENDED, ExperimentState
from kvpolicy.experiments.replica.scoring import ComparedShare
from kvpolicy.experiments.replica.verdict import Verdict


@dataclass(frozen=True)
class ReplicaAnswer:
    """The answer of one replica.

    Attributes:
        name: its address, or the file that holds the answer.
        document: the JSON value that `document.document` makes.
    """

    name: str
    document: Mapping[str, Any]


@dataclass(frozen=True)
class ArmRow:
    """One arm, over all replicas.

    Attributes:
        arm, policy: names.
        requests, finished, failed, shadowed, shadowed_tokens: counts.
        keys: number of distinct keys; None with `design: switchback`.
        wanted: share that the weights give the arm among the arms that are not rolled back.
        seen: its share of the keys of these arms, or of their requests with `design: switchback`;
            None before the first.
        gone: whether a replica has rolled it back; then `wanted` is 0 and `seen` None.
        means: mean of each metric of `TALLIES` in its unit; None before the first value.
        kept: share of full KV's memory that its prompts hold; None before the first.
        compared: the part of its sampled requests that was compared; None before the first.
    """

    arm: str
    policy: str
    requests: int
    finished: int
    failed: int
    shadowed: int
    shadowed_tokens: int
    keys: int | None
    wanted: float
    seen: float | None
    gone: bool
    means: Mapping[str, float | None]
    kept: float | None
    compared: ComparedShare | None


class Overview:
    """One experiment in one or several replicas.

    Attributes:
        experiment: the experiment as the first replica has it.
        answers: the answers of the replicas.
        analysis: the pooled analysis of all replicas.
        verdicts: the verdicts of that analysis.
    """

    def __init__(self, answers: Sequence[ReplicaAnswer]) -> None:
        """
        Raises:
            PolicyError: an answer is not such a document, or the answers are of different
                revisions.
        """
        for answer in answers:
            problem = defect(answer.document)
            if problem is not None:
                raise refused(answer.name, "server", problem)
        self.answers = list(answers)
        _check_agreement(self.answers)
        self.experiment = _experiment(self.answers[0])
        try:
            analyses = [answer.document["analysis"] for answer in self.answers]
            self.analysis: Analysis = pooled(self.experiment, analyses)
        except ValueError as error:
            raise refused(self.answers[0].name, "server", str(error)) from None
        self.verdicts: list[Verdict] = self.analysis.verdicts()

    @cached_property
    def states(self) -> dict[ExperimentState, list[str]]:
        """State -> names of the replicas that are in it."""
        names: dict[ExperimentState, list[str]] = {}
        for answer in self.answers:
            names.setdefault(ExperimentState(answer.document["state"]), []).append(answer.name)
        return names

    @property
    def state(self) -> ExperimentState | None:
        """The state of all replicas; None if they differ."""
        return next(iter(self.states)) if len(self.states) == 1 else None

    @property
    def ended(self) -> bool:
        """Whether the experiment has ended at all replicas."""
        return all(state in ENDED for state in self.states)

    @property
    def reasons(self) -> list[str]:
        """The reasons why the experiment has ended, each once."""
        reasons = [answer.document["reason"] for answer in self.answers]
        return list(dict.fromkeys(str(reason) for reason in reasons if reason))

    @cached_property
    def rolled_back(self) -> dict[str, dict[str, str]]:
        """Arm that is rolled back -> name of the replica -> reason."""
        reasons: dict[str, dict[str, str]] = {}
        for answer in self.answers:
            for arm, reason in answer.document["rolled_back"].items():
                reasons.setdefault(arm, {})[answer.name] = str(reason)
        return reasons

    def serves(self, arm: str) -> bool:
        """Whether at least one replica has not rolled an arm back."""
        return len(self.rolled_back.get(arm, ())) < len(self.answers)

    def values(self, name: str) -> list[tuple[Any, str]]:
        """The distinct values that replicas give for a key of the document, with their names."""
        distinct: list[tuple[Any, list[str]]] = []
        for answer in self.answers:
            value = answer.document[name]
            for known, names in distinct:
                if known == value:
                    names.append(answer.name)
                    break
            else:
                distinct.append((value, [answer.name]))
        return [(value, ", ".join(names)) for value, names in distinct]

    @cached_property
    def rows(self) -> list[ArmRow]:
        """The arms, control first."""
        keys = self.analysis.keys() if self.experiment.design is None else None
        wanted = self.experiment.shares(without=self.rolled_back)
        left = [name for name in wanted if name not in self.rolled_back]
        records = self.analysis.records
        requests = {name: record.requests for name, record in records.items()}
        shared = requests if keys is None else keys
        total = sum(shared[name] for name in left)
        return [
            ArmRow(
                arm=arm.name,
                policy=arm.policy,
                requests=records[arm.name].requests,
                finished=records[arm.name].finished,
                failed=records[arm.name].failed,
                shadowed=records[arm.name].shadowed,
                shadowed_tokens=records[arm.name].shadowed_tokens,
                keys=None if keys is None else keys[arm.name],
                wanted=wanted[arm.name],
                seen=shared[arm.name] / total if total and arm.name in left else None,
                gone=arm.name not in left,
                means={name: tally.mean for name, tally in records[arm.name].tallies.items()},
                kept=records[arm.name].kept,
                compared=records[arm.name].scoring.share,
            )
            for arm in self.experiment.arms
        ]

    @property
    def guardrails(self) -> list[Verdict]:
        """The verdicts on guardrails; control has none."""
        return [verdict for verdict in self.verdicts if verdict.role == "guardrail"]

    def is_aside(self, verdict: Verdict) -> bool:
        """Whether a verdict is on latencies of arms that share batches: shown, never compared."""
        return METRICS[verdict.metric].latency and self.experiment.design is None

    def of_metric(self, metric: str) -> list[Verdict]:
        """The verdicts of a metric, by arm."""
        return [verdict for verdict in self.verdicts if verdict.metric == metric]

    @property
    def seconds(self) -> float | None:
        """Longest time for which a replica has gathered samples; None if one does not say."""
        durations = [answer.document.get("analysed_seconds") for answer in self.answers]
        known = [float(seconds) for seconds in durations if seconds is not None]
        return max(known) if len(known) == len(durations) else None

    def outlook(self, verdict: Verdict) -> tuple[Outlook | None, float | None]:
        """Forecast of a guardrail's decision, and the seconds until then at the present rate.

        The seconds are None where no more samples come, or the rate is not known.
        """
        forecast = outlook(self.analysis, verdict)
        going = {ExperimentState.RUNNING, ExperimentState.PAUSED} & set(self.states)
        if forecast is None or not going or not self.seconds:
            return forecast, None
        return forecast, forecast.missing * self.seconds / verdict.samples

    @cached_property
    def warnings(self) -> list[str]:
        """What makes the comparison untrue, what replicas disagree on, and unusable files."""
        warnings = self.analysis.warnings()
        known = {kind_of(warning) for warning in warnings}
        for answer in self.answers:
            for warning in answer.document["warnings"]:
                if kind_of(warning) not in known:
                    warnings.append(f"at {answer.name}: {warning}")
        return [*warnings, *self._standing()]

    def _standing(self) -> list[str]:
        warnings = []
        if self.state is None:
            parts = [f"{state} at {', '.join(names)}" for state, names in self.states.items()]
            warnings.append(f"the replicas differ: {'; '.join(parts)}")
        for arm, reasons in self.rolled_back.items():
            if self.serves(arm):
                warnings.append(f"arm `{arm}` is rolled back at {', '.join(reasons)} only")
        if len(self.values("digest")) > 1:
            warnings.append(
                "the replicas have different versions of this revision (coverage, steps or "
                "enabled); put one file everywhere with `kvpolicy experiment put`"
            )
        for answer in self.answers:
            if not answer.document["reload"].get("success", True):
                problem = str(answer.document["reload"].get("problem") or "").split("\n")[0]
                warnings.append(
                    f"the experiment file at {answer.name} is not in use, an earlier version is: "
                    f"{problem}"
                )
            if answer.document.get("state_file", True) and not answer.document["state_saved"]:
                warnings.append(
                    f"the state file at {answer.name} cannot be written: a restart would forget "
                    "what has changed since"
                )
        return warnings

    @property
    def notes(self) -> list[str]:
        """Sentences on what is worth knowing, though nothing is wrong."""
        return [
            f"{answer.name} has no state file: a restart would forget a rollback and what was "
            "seen; start it with `--kv-experiment-state FILE`"
            for answer in self.answers
            if not answer.document.get("state_file", True)
        ]

    @property
    def worst(self) -> list[tuple[str, dict[str, Any]]]:
        """The `WORST` shadowed requests with the largest drift: the replica, and the request."""
        requests = [
            (answer.name, request)
            for answer in self.answers
            for request in answer.document["analysis"]["worst"]
        ]
        return sorted(requests, key=lambda pair: -float(pair[1]["drift"]))[:WORST]

    @property
    def log(self) -> list[tuple[str, str, str]]:
        """Changes in the order of time: time, replica, and what changed."""
        entries = [
            (str(entry["time"]), answer.name, str(entry["what"]))
            for answer in self.answers
            for entry in answer.document["log"]
        ]
        return sorted(entries, key=lambda entry: entry[0])

    @property
    def shadow(self) -> dict[str, dict[str, int]]:
        """Arm -> outcome -> number of sampled requests."""
        records = self.analysis.records
        return {arm: dict(record.scoring.requests) for arm, record in records.items()}

    def as_document(self) -> dict[str, Any]:
        """Everything as a JSON value, from which `saved.read` reads the replicas' answers."""
        return {
            "experiment": self.experiment.name,
            "revision": self.experiment.revision,
            "state": None if self.state is None else self.state.value,
            "verdicts": [verdict.as_document() for verdict in self.verdicts],
            "warnings": self.warnings,
            "notes": self.notes,
            "shadow": self.shadow,
            "replicas": [
                {"name": answer.name, "document": dict(answer.document)} for answer in self.answers
            ],
        }


def _check_agreement(answers: Sequence[ReplicaAnswer]) -> None:
    names_of: dict[tuple[str, str], list[str]] = {}
    for answer in answers:
        known = (answer.document["name"], answer.document["revision"])
        names_of.setdefault(known, []).append(answer.name)
    if len(names_of) > 1:
        parts = [
            f"`{name}` revision {revision} at {', '.join(names)}"
            for (name, revision), names in names_of.items()
        ]
        message = f"the replicas do not run one experiment: {'; '.join(parts)}"
        help = "put one file everywhere with `kvpolicy experiment put`, or look at one at a time"
        raise refused("replicas", "server", message, help)


def _experiment(answer: ReplicaAnswer) -> Experiment:
    try:
        text = json.dumps(answer.document["experiment"], ensure_ascii=False)
        experiment = reading.read(text, answer.name).require()
    except PolicyError as error:
        message = f"its experiment cannot be read: {error.diagnostics[0].message}"
        raise refused(answer.name, "server", message) from None
    if experiment.revision != answer.document["revision"]:
        message = (
            f"its experiment is of revision {experiment.revision}, and it says "
            f"{answer.document['revision']}: another version of kvpolicy runs there"
        )
        raise refused(answer.name, "server", message)
    return experiment
