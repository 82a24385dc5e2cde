"""Reads an experiment file: YAML or JSON, with every mistake at its place."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpolicy.dsl.syntax.diagnostics import (
    Diagnostic,
    PolicyError,
    did_you_mean,
    in_order,
    listed,
    refused,
)
from kvpolicy.dsl.syntax.library import is_there, read_file
from kvpolicy.dsl.syntax.mappings import Block, Item
from kvpolicy.dsl.syntax.source import Source, Span
from kvpolicy.experiments.definition.experiment import (
    DEFAULT_TARGETING_KEY,
    NO_POLICY,
    AnalysisRules,
    Arm,
    CoverageStep,
    Experiment,
    Metric,
    Shadow,
    Switchback,
    as_document,
)
from kvpolicy.experiments.definition.metrics import METRICS
from kvpolicy.experiments.definition.parse import parse
from kvpolicy.experiments.definition.quantities import percent_text

# `as_document` is exported too: its JSON text is an input of `read`.
__all__ = ["Read", "as_document", "check_policies", "load", "read"]

_NOT_CAUSAL = (
    "arms of one replica share its batches, so a slow arm slows the other one too and their "
    "times say nothing about the policy"
)


@dataclass(frozen=True)
class Read:
    """The result of reading an experiment file.

    Attributes:
        source: text of the file.
        experiment: the experiment; None if there is an error.
        diagnostics: errors, or warnings if there are none, in the order of their places.
        places: path of a value -> its place; as `arms.control.policy` or `metrics.0.margin`.
    """

    source: Source
    experiment: Experiment | None
    diagnostics: tuple[Diagnostic, ...]
    places: Mapping[str, Span] = field(default_factory=dict)

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """The diagnostics that make the file unusable."""
        return tuple(d for d in self.diagnostics if d.severity == "error")

    def require(self) -> Experiment:
        """The experiment.

        Raises:
            PolicyError: the file has errors; all are in it.
        """
        if self.experiment is None:
            raise PolicyError(self.errors, self.source)
        return self.experiment


def read(text: str, name: str) -> Read:
    """Reads the text of an experiment file, or of a JSON value with the same keys.

    Args:
        name: name of the text in messages; for a file its path.
    """
    source = Source(name, text)
    diagnostics: list[Diagnostic] = []
    block = parse(source, diagnostics.append)
    if block is None:
        return Read(source, None, tuple(in_order(diagnostics)))
    checker = _Checker(block, text, diagnostics)
    checker.check()
    if any(d.severity == "error" for d in diagnostics):
        errors = [d for d in diagnostics if d.severity == "error"]
        return Read(source, None, tuple(in_order(errors)), _places(block))
    return Read(source, checker.experiment(), tuple(in_order(diagnostics)), _places(block))


def load(path: str | Path) -> Read:
    """Reads an experiment file.

    Raises:
        PolicyError: the file cannot be read. Defects of its text are diagnostics.
    """
    path = Path(path)
    if not is_there(path, "an experiment file"):
        raise refused(str(path), "file", "there is no such file")
    source = read_file(path, str(path))
    return read(source.text, source.name)


def check_policies(read: Read, known: Collection[str]) -> list[Diagnostic]:
    """Errors on policies that the experiment names and a server does not have, each at its place.

    Args:
        known: names of the server's policies; `none` is always allowed.

    Raises:
        PolicyError: the file has errors.
    """
    experiment = read.require()
    named = [("default", experiment.default)]
    named += [(f"arms.{arm.name}.policy", arm.policy) for arm in experiment.arms]
    diagnostics = []
    for path, policy in named:
        if policy not in known and policy != NO_POLICY:
            names = list(dict.fromkeys([*known, NO_POLICY]))
            help = did_you_mean(policy, names) or f"this server has {listed(names, 'and')}"
            message = f"this server has no policy `{policy}`"
            diagnostics.append(Diagnostic("name", message, read.places.get(path), help))
    return diagnostics


def _places(block: Block, path: str = "") -> dict[str, Span]:
    places = {}
    for name, item in block.items.items():
        here = f"{path}{name}"
        places[here] = item.span
        if isinstance(item.value, Block):
            places |= _places(item.value, f"{here}.")
        elif isinstance(item.value, list):
            for number, element in enumerate(item.value):
                places[f"{here}.{number}"] = element.span
                if isinstance(element.value, Block):
                    places |= _places(element.value, f"{here}.{number}.")
    return places


class _Checker:
    """Checks values against each other and makes the experiment."""

    def __init__(self, block: Block, text: str, diagnostics: list[Diagnostic]) -> None:
        self.file = block
        self.text = text
        self.diagnostics = diagnostics

    def error(self, message: str, span: Span, help: str | None = None, code: str = "range") -> None:
        self.diagnostics.append(Diagnostic(code, message, span, help))

    def warn(self, message: str, span: Span, help: str | None = None) -> None:
        self.diagnostics.append(Diagnostic("unused", message, span, help, "warning"))

    def check(self) -> None:
        """Reports every contradiction between values."""
        self.targeting_key()
        self.arms()
        self.design()
        self.metrics()
        self.steps()

    def targeting_key(self) -> None:
        item = self.file.items.get("targeting_key")
        if item is None or item.value is None:
            return
        if not item.value:
            help = "leave `targeting_key` out for the usual places"
            self.error("`targeting_key` is empty: no request would have a key", item.span, help)
        seen: set[str] = set()
        for place in item.value:
            if place.value is None:
                continue
            name = str(place.value)
            if name in seen:
                self.error(f"`{name}` is looked for twice", place.span, "remove one of them")
            elif "rid" in seen:
                message = f"`{name}` is never looked for: every request has a `rid`"
                self.warn(message, place.span, "put `rid` last")
            seen.add(name)

    def arms(self) -> None:
        item = self.file.items.get("arms")
        if item is None or item.value is None:
            return
        arms = item.value.items
        for name, arm in arms.items():
            if arm.value is None:
                continue
            settings = arm.value.items.get("set")
            if settings is not None and arm.value.get("policy") == NO_POLICY:
                message = f"arm `{name}` sets parameters, but its policy is `none`, which has none"
                self.error(message, settings.key, "name a policy, or remove `set`", "key")
        if len(arms) < 2:
            help = "add a second one, as in `lava-25: {policy: lava@0.25, weight: 1}`"
            message = "an experiment compares at least two arms"
            self.error(message, item.key, help, "key")
            return
        weights = [self.weight(arm) for arm in arms.values()]
        if any(weight is None for weight in weights):
            return
        if not any(weights):
            message, help = "every weight is 0: no arm gets a key", "give each arm a weight above 0"
            self.error(message, self.weight_span(next(iter(arms.values()))), help)
        elif not weights[0]:
            message = "control has weight 0: there is nothing to compare with"
            help = "the first arm is control; give it a weight above 0"
            self.error(message, self.weight_span(next(iter(arms.values()))), help)
        elif not any(weights[1:]):
            message = "every arm but control has weight 0: there is nothing to compare"
            self.error(message, item.key, "give another arm a weight above 0")
        self.same_arms(arms)

    def same_arms(self, arms: Mapping[str, Item]) -> None:
        """Warns of arms that serve the same, as a copied line does."""
        first: dict[tuple[Any, ...], str] = {}
        for name, arm in arms.items():
            settings = arm.value.get("set")
            values = settings.items if isinstance(settings, Block) else {}
            served = (arm.value.get("policy"), *sorted((k, v.value) for k, v in values.items()))
            other = first.setdefault(served, name)
            if other != name:
                message = f"arms `{other}` and `{name}` serve the same policy with the same values"
                help = "what they differ in is noise; give one another policy, or remove it"
                self.warn(message, arm.key, help)

    def weight(self, arm: Item) -> float | None:
        if not isinstance(arm.value, Block):
            return None
        return arm.value.get("weight") if "weight" in arm.value else 1.0

    def weight_span(self, arm: Item) -> Span:
        return arm.value.items["weight"].span

    def design(self) -> None:
        switchback = self.switchback()
        if switchback is None:
            return
        window, burn_in = switchback.get("window"), switchback.get("burn_in")
        if window is not None and burn_in is not None and burn_in >= window:
            message = "`burn_in` leaves nothing of the window"
            help = "make it shorter than `window`"
            self.error(message, switchback.items["burn_in"].span, help)

    def switchback(self) -> Block | None:
        design = self.file.get("design")
        return design.get("switchback") if isinstance(design, Block) else None

    def metrics(self) -> None:
        item = self.file.items.get("metrics")
        if item is None or item.value is None:
            return
        if not item.value:
            help = "as in `- {metric: error_rate, role: guardrail, margin: 0.005}`"
            self.error("an experiment needs at least one metric", item.key, help, "key")
            return
        seen: set[str] = set()
        for entry in item.value:
            if entry.value is not None and entry.value.get("metric") is not None:
                name = entry.value.get("metric")
                if name in seen:
                    span = entry.value.items["metric"].span
                    self.error(f"the metric `{name}` is there twice", span, "remove one", "key")
                seen.add(name)
                self.metric(entry.value, name)
        blocks = [entry.value for entry in item.value if entry.value is not None]
        roles = [block.get("role") for block in blocks]
        if None not in roles and "guardrail" not in roles:
            message = "no metric is a guardrail: nothing can end this experiment by itself"
            help = "give one `role: guardrail` and a margin"
            self.warn(message, item.key, help)
        shadow = self.file.items.get("shadow")
        scored = any(METRICS[name].shadow for name in seen)
        if shadow is not None and not scored and len(seen) == len(item.value):
            message = "no metric needs `shadow`: requests are scored again for the report alone"
            self.warn(message, shadow.key, "add the metric `drift`, or remove `shadow`")

    def metric(self, block: Block, name: str) -> None:
        kind = METRICS[name]
        span, role = block.items["metric"].span, block.get("role")
        if kind.shadow and "shadow" not in self.file:
            message = f"`{name}` is measured by scoring requests again, and there is no `shadow`"
            self.error(message, span, "add `shadow: {sample: 2 %}`", "key")
        if role is not None and role not in kind.roles:
            message = f"`{name}` can be {listed(kind.roles)}, not `{role}`"
            self.error(message, block.items["role"].span, code="key")
            role = None
        if kind.latency and role == "guardrail" and self.switchback() is None:
            help = "use `design: {switchback: {window: 10m, burn_in: 1m}}`, or `role: info`"
            message = f"`{name}` cannot be a guardrail with `design: request`: {_NOT_CAUSAL}"
            if not isinstance(self.file.get("design"), Block):
                self.error(message, block.items["role"].span, help, "key")
        self.clip(block, name)
        self.margin(block, name, role)

    def clip(self, block: Block, name: str) -> None:
        kind, item = METRICS[name], block.items.get("clip")
        if item is not None and kind.clip == "refused":
            message = f"`{name}` is a share, at most 1 anyway; it takes no `clip`"
            self.error(message, item.key, "remove `clip`", "key")
        if item is None and kind.clip == "needed" and kind.default_clip is None:
            message = f"`{name}` needs a `clip`: without one a single value can be any size"
            help = "the largest value that counts in full, as in `clip: 30`"
            self.error(message, block.items["metric"].span, help, "key")

    def margin(self, block: Block, name: str, role: str | None) -> None:
        kind, item = METRICS[name], block.items.get("margin")
        if item is None:
            if role == "guardrail":
                message = f"the guardrail `{name}` needs a `margin`"
                help = f"how much is too much, in {kind.unit}, as in `margin: 0.05`"
                self.error(message, block.items["role"].span, help, "key")
            return
        if role is not None and role != "guardrail":
            message = f"only a guardrail has a `margin`; `{name}` has the role `{role}`"
            self.error(message, item.key, "remove it, or write `role: guardrail`", "key")
            return
        if item.value is None:
            return
        written = self.written(item.span)
        if "%" in written and not kind.is_share:
            message = f"`{name}` is in {kind.unit}; its margin is no share"
            self.error(message, item.span, "write a number, as in `margin: 0.05`", "key")
            return
        upper = _upper(block, name)
        if upper is not None and item.value >= upper:
            message = f"the margin of `{name}` is {written}, but no value is above {upper:g}"
            self.error(message, item.span, "make the margin smaller, or the clip larger")

    def written(self, span: Span) -> str:
        return self.text[span.start : span.end]

    def steps(self) -> None:
        item = self.file.items.get("steps")
        for step in (item.value or ()) if item is not None else ():
            if step.value is not None and len(step.value.items) != 1:
                help = "as in `steps: [{coverage: 1 %}, {pause: 30m}, {coverage: 10 %}]`"
                message = "a step is either a `coverage` or a `pause`"
                span = Span(step.span.start, step.span.start + 1)
                self.error(message, span, help, "key")
        self.coverage([step.value for step in item.value or ()] if item is not None else [])

    def coverage(self, steps: list[Block | None]) -> None:
        """Warns of a coverage that the first step sets aside at once."""
        coverage, first = self.file.items.get("coverage"), steps[0] if steps else None
        share = first.get("coverage") if first is not None else None
        if coverage is not None and coverage.value not in (None, share) and share is not None:
            shown = percent_text(share)
            message = f"this coverage never applies: the first step sets it to {shown} at once"
            help = f"write `coverage: {shown}` here and remove that step"
            self.warn(message, coverage.span, help)

    def experiment(self) -> Experiment:
        """The experiment of a file without errors."""
        file = self.file
        enabled, places = file.get("enabled"), file.get("targeting_key")
        return Experiment(
            name=file.get("experiment"),
            targeting_key=tuple(place.value for place in places or ()) or DEFAULT_TARGETING_KEY,
            enabled=True if enabled is None else enabled,
            coverage=file.get("coverage"),
            default=file.get("default") or NO_POLICY,
            arms=tuple(_arm(name, arm.value) for name, arm in file.get("arms").items.items()),
            design=_built(Switchback, self.switchback()),
            shadow=_built(Shadow, file.get("shadow")),
            metrics=tuple(_metric(metric.value) for metric in file.get("metrics")),
            analysis=_built(AnalysisRules, file.get("analysis")) or AnalysisRules(),
            steps=tuple(_built(CoverageStep, step.value) for step in file.get("steps") or ()),
        )


def _built(kind: Any, block: Block | None) -> Any:
    """A dataclass from a block whose keys are its attributes; None without a block."""
    if block is None:
        return None
    return kind(**{name: item.value for name, item in block.items.items()})


def _arm(name: str, block: Block) -> Arm:
    weight, settings = block.get("weight"), block.get("set")
    values = {key: item.value for key, item in settings.items.items()} if settings else {}
    return Arm(name, block.get("policy"), 1.0 if weight is None else weight, values)


def _metric(block: Block) -> Metric:
    name = block.get("metric")
    clip = block.get("clip")
    clip = METRICS[name].default_clip if clip is None else clip
    return Metric(name, block.get("role"), block.get("margin"), clip)


def _upper(block: Block, name: str) -> float | None:
    """Largest value of a metric with the clip of its block; None without a bound."""
    kind, clip = METRICS[name], block.get("clip")
    if kind.is_share:
        return 1.0
    return kind.default_clip if clip is None else clip
