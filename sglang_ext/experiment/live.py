"""The experiment of one server: who is assigned what, what was seen, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from kvpolicy.dsl.syntax.diagnostics import Diagnostic, PolicyError, render_all
from kvpolicy.experiments.definition import reading
from kvpolicy.experiments.definition.experiment import NO_POLICY, Arm, Experiment
from kvpolicy.experiments.definition.metrics import METRICS
from kvpolicy.experiments.replica import state_file
from kvpolicy.experiments.replica.alarms import Alarm
from kvpolicy.experiments.replica.analysis import Analysis, Verdict
from kvpolicy.experiments.replica.assignment import AssignmentReason
from kvpolicy.experiments.replica.document import document
from kvpolicy.experiments.replica.evidence import Evidence
from kvpolicy.experiments.replica.lifecycle import ENDED, Lifecycle
from kvpolicy.experiments.replica.state_file import StateFileError
from kvpolicy.sglang_ext.experiment.keeper import Keeper
from kvpolicy.sglang_ext.experiment.series import Series
from kvpolicy.sglang_ext.experiment.version_file import VersionFile
from kvpolicy.sglang_ext.face.errors import Refused

logger = logging.getLogger(__name__)

EXPERIMENT_LABEL, ARM_LABEL = LABELS = ("kv_experiment", "kv_arm")
_EVERY = 1.0  # least seconds between two looks at the evidence of finished requests


class InUse(Refused):
    """An experiment uses the policy that is to be changed."""


class Live:
    """An experiment as it is served.

    Attributes:
        experiment: its latest version.
        lifecycle: where it stands.
        analysis: what was seen of its revision.
        file: the file that says what it is.
        weights: number of times that the model's weights may have changed.
    """

    def __init__(
        self,
        experiment: Experiment,
        file: Path,
        served: Mapping[str, Mapping[str, Any]],
        state: Path | None = None,
    ) -> None:
        """
        Args:
            file: the file that the experiment was read from.
            served: name of each policy that is served -> its settings, if it was added for an arm.
            state: file that keeps where it stands over a restart; None for none.

        Raises:
            Refused: the state file cannot be used.
        """
        self.file = VersionFile(file)
        self._served = dict(served)
        self._changing_policies: set[str] = set()  # names of policies that are being changed
        self._keeper = Keeper(state)
        self.lifecycle = self._restored(experiment)
        self._shadowed_requests = 0  # those before a restart included
        self._begin(Analysis(self.experiment))
        self._resume()
        self.series = Series(self.experiment)
        self.series.reloaded(self.file.in_use)
        self.weights = 0
        self._looked = 0.0
        self._warned: set[str] = set()
        self._hold_steps(self.analysis.alarms())
        self.save()

    def _restored(self, experiment: Experiment) -> Lifecycle:
        try:
            saved = self._keeper.standing()
            text = None if saved is None else self.file.restored(saved)
            if text is not None:
                experiment = self._as_put(text, experiment)
            return Lifecycle(experiment, saved)
        except (StateFileError, ValueError) as error:
            raise Refused(
                f"--kv-experiment-state {self._keeper.file}: {error}; mend it, or remove it to "
                "begin anew"
            ) from None

    def _as_put(self, text: str, experiment: Experiment) -> Experiment:
        """The version that was put before a restart; the file's if it cannot be served now."""
        try:
            version = self.read(text, "the version that was put").require()
        except PolicyError as error:
            logger.error(
                "The version of the experiment that was put cannot be served after the restart; "
                "the one in %s is in use. Put it again when this is mended:\n%s",
                self.file.path,
                error,
            )
            return experiment
        logger.info("The version that was put goes on until %s changes.", self.file.path)
        self.file.put(text)
        return version

    def _begin(self, analysis: Analysis, seconds: float = 0.0) -> None:
        """Count in an analysis from now on; it has gone on for `seconds` already."""
        self.analysis, self._analysed = analysis, time.monotonic() - seconds
        for arm in self.lifecycle.rolled_back:
            analysis.retire(arm)

    def _resume(self) -> None:
        """Go on with the evidence from before a restart; what is damaged is begun anew."""
        file = self._keeper.evidence_file
        if file is None:
            return
        try:
            saved = state_file.load(file)
            evidence = None if saved is None else Evidence.restored(self.experiment, saved)
        except (StateFileError, ValueError) as error:
            logger.warning("The evidence in %s is not used, and begins anew: %s.", file, error)
            return
        if evidence is not None:
            self._begin(evidence.analysis, evidence.seconds)
            self._shadowed_requests = evidence.shadowed

    @property
    def experiment(self) -> Experiment:
        """Its latest version."""
        return self.lifecycle.experiment

    # Requests.

    def assign(
        self, place: int | None, key: str, seconds: float, answers: int = 1
    ) -> tuple[str | None, dict[str, Any]]:
        """The policy of a request, and what is noted in it.

        Args:
            place: place of its key among the targeting keys; None if it has none.
            key: the text by which its arm is drawn; empty if it has none.
            seconds: Unix time, for arms that take turns.
            answers: number of answers to it.
        """
        assignment = self.lifecycle.assign(key if place is not None else None, seconds)
        if assignment.reason != AssignmentReason.DISABLED:
            self.analysis.key_source(place)
            self.series.key_source(place)
        if assignment.arm is None:
            self.series.assigned(None, assignment.reason)
            return self.lifecycle.default, {"reason": assignment.reason.value}
        arm = self.experiment.arm(assignment.arm)
        number = _hash(self.experiment.name, key)
        shadow = self.experiment.shadow
        sampled = shadow is not None and random.random() < shadow.sample
        self.analysis.assigned(arm.name, number, seconds=seconds, sampled=sampled)
        self.series.assigned(arm.name, assignment.reason)
        assigned = {
            "experiment": self.experiment.name,
            "revision": self.experiment.revision,
            "arm": arm.name,
            "reason": assignment.reason.value,
            "key": number,
            "seconds": seconds,
        }
        if shadow is not None and sampled:
            assigned |= {"top": shadow.top, "weights": self.weights}
            if answers > 1:
                assigned |= {"answers": answers, "draw": uuid4().hex}
        return arm.served_as, assigned

    def named_itself(self) -> dict[str, Any]:
        """What is noted in a request that names a policy itself: it stays out of the analysis."""
        self.series.assigned(None, AssignmentReason.TARGETING_MATCH)
        return {"reason": AssignmentReason.TARGETING_MATCH.value}

    def generates_nothing(self) -> tuple[str, dict[str, Any]]:
        """The policy of a request that asks for no token, and what is noted: it takes no part."""
        self.series.assigned(None, AssignmentReason.DEFAULT)
        return self.lifecycle.default, {"reason": AssignmentReason.DEFAULT.value}

    def labels(self, arm: str | None) -> dict[str, str]:
        """Labels of SGLang's own histograms for a request of an arm, or of none."""
        return {
            EXPERIMENT_LABEL: "" if arm is None else self.experiment.name,
            ARM_LABEL: arm or "",
        }

    def finished(
        self,
        assigned: Mapping[str, Any],
        *,
        outcome: str,
        facts: Mapping[str, Any],
        token_bytes: int,
        ttft: float | None,
        e2e: float | None,
    ) -> None:
        """A request of an arm has ended.

        Args:
            outcome: `ok`, `failed`, or `aborted` by its client.
            facts: what is reported of its policy.
            token_bytes: KV memory of one prompt token with full KV.
            ttft, e2e: seconds to the first token, and in all, where known; of an aborted request
                those until then.
        """
        arm = assigned["arm"]
        self.series.finished(arm, outcome)
        if not self.compares(assigned):
            return
        if assigned.get("top") and outcome != "ok":
            self.analysis.sample_ended(arm, None, 0, key_hash=assigned["key"])
        if outcome == "aborted":
            self.analysis.aborted(
                arm, ttft=ttft, e2e=e2e, key_hash=assigned["key"], seconds=assigned["seconds"]
            )
            return
        prompt = facts.get("prompt_tokens", 0)
        before = facts.get("kv_bytes_before", token_bytes * prompt)
        after = facts.get("kv_bytes_after", before)
        self.series.memory(arm, before, after)
        self.analysis.finished(
            arm,
            failed=outcome == "failed",
            kv_bytes_per_prompt_token=after / prompt if prompt else None,
            ttft=ttft,
            e2e=e2e,
            key_hash=assigned["key"],
            kept_bytes=after,
            full_bytes=before,
            seconds=assigned["seconds"],
        )
        now = time.monotonic()
        if now - self._looked >= _EVERY:
            self._looked = now
            self.look()

    def shadowed(
        self, rid: str, assigned: Mapping[str, Any], drift: float, top1: float, tokens: int
    ) -> None:
        """A sampled request has been scored against full KV.

        Args:
            rid: its id, for the log; it is kept nowhere else.
            drift: mean over its tokens of KL(policy || full), clipped, in nats.
            top1: share of its tokens at which the most probable candidate is another.
            tokens: number of tokens that were compared.

        A value that is not finite counts as the largest possible.
        """
        arm = assigned["arm"]
        drift = drift if math.isfinite(drift) else self.clip
        top1 = top1 if math.isfinite(top1) else 1.0
        self._shadowed_requests += 1
        logger.log(
            logging.INFO if drift > self._margin() else logging.DEBUG,
            "KV-cache experiment %s: scored request %d of arm %s drifts by %.3f nats per token. "
            "rid=%s",
            self.experiment.name,
            self._shadowed_requests,
            arm,
            drift,
            rid,
        )
        self.series.drift(arm, drift, top1, tokens)
        if not self.compares(assigned):
            return
        self.analysis.shadowed(
            arm,
            drift=drift,
            top1=top1,
            tokens=tokens,
            number=self._shadowed_requests,
        )
        self.look()

    def sample_ended(self, assigned: Mapping[str, Any], outcome: str, tokens: int) -> None:
        """Note what became of a request that was sampled to be scored against full KV.

        Args:
            outcome: one of `scoring.OUTCOMES`.
            tokens: those of its prompt and output.
        """
        self.series.shadow(assigned["arm"], outcome)
        if assigned["revision"] == self.experiment.revision:
            key = assigned["key"]
            self.analysis.sample_ended(assigned["arm"], outcome, tokens, key_hash=key)

    def compares(self, assigned: Mapping[str, Any]) -> bool:
        """Whether a request counts in the running analysis."""
        same_revision = assigned["revision"] == self.experiment.revision
        arm_gone = assigned["arm"] in self.lifecycle.rolled_back
        return same_revision and not arm_gone and self.lifecycle.state not in ENDED

    def _margin(self) -> float:
        margins = [metric.margin for metric in self.experiment.metrics if metric.metric == "drift"]
        return margins[0] if margins and margins[0] is not None else math.inf

    @property
    def clip(self) -> float:
        """Largest drift that a token counts with, in nats."""
        clips = [metric.clip for metric in self.experiment.metrics if metric.metric == "drift"]
        return next(filter(None, [*clips, METRICS["drift"].default_clip]), math.inf)

    # How it ends.

    def look(self) -> None:
        """End the experiment if a guardrail is breached; say what looks wrong, once."""
        verdicts = self.analysis.verdicts()
        self.series.statistics(self.analysis, verdicts)
        for verdict in verdicts:
            if verdict.outcome == "breached" and self.lifecycle.state not in ENDED:
                self._breached(verdict)
        alarms = self.analysis.alarms()
        self._hold_steps(alarms)
        for alarm in alarms:
            if alarm.kind not in self._warned:
                self._warned.add(alarm.kind)
                logger.warning("KV-cache experiment %s: %s", self.experiment.name, alarm)

    def _hold_steps(self, alarms: Sequence[Alarm]) -> None:
        """Take no further steps while arms cannot be compared."""
        why = next((alarm.kind for alarm in alarms if alarm.untrue), None)
        if self.lifecycle.hold_steps(why):
            self.save()

    def _breached(self, verdict: Verdict) -> None:
        if self.experiment.analysis.on_fail == "abort":
            self.roll_back(verdict.arm, breach(verdict))
            return
        subject = f"{verdict.metric} of {verdict.arm}"
        if subject not in self._warned:
            self._warned.add(subject)
            logger.error("KV-cache experiment %s: %s.", self.experiment.name, breach(verdict))

    def roll_back(self, arm: str, reason: str) -> bool:
        """The keys of an arm get the default from now on, for good. Returns whether that is new.

        The last arm beside control ends the experiment.
        """
        if not self.lifecycle.roll_back(arm, reason):
            return False
        self.analysis.retire(arm)
        logger.error(
            "KV-cache experiment %s (revision %s): arm %s is rolled back: %s. Its requests get "
            "`%s` from now on%s.",
            self.experiment.name,
            self.experiment.revision,
            arm,
            reason,
            self.lifecycle.default,
            "; the experiment has ended" if self.lifecycle.state in ENDED else "",
        )
        self.save()
        return True

    def abort(self, reason: str) -> bool:
        """Requests get the default from now on, for good. Returns whether that is new."""
        if not self.lifecycle.abort(reason):
            return False
        logger.error(
            "KV-cache experiment %s (revision %s) is aborted: %s. Requests get `%s` from now on.",
            self.experiment.name,
            self.experiment.revision,
            reason,
            self.lifecycle.default,
        )
        self.save()
        return True

    def promote(self, arm: Arm, reason: str) -> bool:
        """All requests get an arm's policy from now on. Returns whether that is new."""
        done = self.lifecycle.promote(arm.name, reason)
        if done:
            logger.info("KV-cache experiment %s: arm %s promoted.", self.experiment.name, arm.name)
            self.save()
        return done

    def pause(self) -> bool:
        """Take no further steps. Returns whether that is new."""
        return self._noted(self.lifecycle.pause())

    def resume(self) -> bool:
        """Take steps again. Returns whether that is new."""
        return self._noted(self.lifecycle.resume())

    def _noted(self, new: bool) -> bool:
        if new:
            self.save()
        return new

    def save(self) -> None:
        """Write where the experiment stands; evidence follows soon."""
        self.series.standing(self.lifecycle)
        self._keeper.keep(self._standing(), self.lifecycle.elapsed, self.lifecycle.step)
        self.series.saved(self.state_saved)

    def _standing(self) -> dict[str, Any]:
        """Where the experiment stands, as the state file holds it."""
        return self.lifecycle.saved() | self.file.saved()

    async def keep_state(self) -> None:
        """Write how long the experiment has run, if it is time to."""
        lifecycle = self.lifecycle
        await self._keeper.keep_time(self._standing, lifecycle.elapsed, lifecycle.step)
        self.series.saved(self.state_saved)

    async def keep_evidence(self) -> None:
        """Write what was seen, if it is time to and there is something new."""
        await self._keeper.keep_evidence(self._evidence, sum(self._counts()))
        self.series.saved(self.state_saved)

    def _evidence(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._analysed
        return Evidence(self.analysis, seconds, self._shadowed_requests).saved()

    def _counts(self) -> Iterator[int]:
        for record in self.analysis.records.values():
            yield from (record.requests, record.finished, record.shadowed)

    @property
    def state_saved(self) -> bool:
        """Whether a restart would find the latest state, and evidence as it was last due."""
        return self._keeper.up_to_date

    # The policies of the server.

    @contextlib.contextmanager
    def changing(self, name: str, *, withdrawn: bool = False) -> Iterator[None]:
        """A block in which the server changes a policy and no version begins to use it.

        Args:
            withdrawn: whether the policy is withdrawn; else it is added or replaced.

        Raises:
            InUse: the experiment uses it.
        """
        if self.uses(name):
            raise InUse(f"experiment `{self.experiment.name}` has begun to use `{name}` meanwhile")
        self._changing_policies.add(name)
        try:
            yield
        finally:
            self._changing_policies.remove(name)
        if withdrawn:
            self._served.pop(name, None)
        else:
            self._served[name] = {}

    def uses(self, name: str) -> bool:
        """Whether requests may be given this policy."""
        if name == self.lifecycle.default:
            return True
        ended = self.lifecycle.state in ENDED
        return not ended and any(name in (a.policy, a.served_as) for a in self.experiment.arms)

    # Other versions of it.

    def read(self, text: str, name: str) -> reading.Read:
        """Another version of the experiment, which this server can serve.

        Raises:
            PolicyError: it is wrong, or needs what this server does not have.
        """
        definition = reading.read(text, name)
        experiment = definition.require()
        problems = reading.check_policies(definition, [*self._served, NO_POLICY])
        problems += [
            Diagnostic(
                "name",
                f"arm `{arm.name}` has settings that this server was not started with",
                definition.places.get(f"arms.{arm.name}.set"),
                "settings of an arm are read when the server starts: start it with this file",
            )
            for arm in experiment.arms
            if arm.settings and self._served.get(arm.served_as) != dict(arm.settings)
        ]
        references: list[tuple[str, tuple[str, ...]]] = [("default", (experiment.default,))]
        references += [(f"arms.{a.name}.policy", (a.policy, a.served_as)) for a in experiment.arms]
        problems += [
            Diagnostic(
                "name",
                f"policy `{name}` is being changed",
                definition.places.get(path),
                "send the experiment again when the change is done",
            )
            for path, names in references
            for name in self._changing_policies.intersection(names)
        ]
        if problems:
            raise PolicyError(problems, definition.source)
        return definition

    def put(self, experiment: Experiment, text: str) -> bool:
        """Go on with another version until the file changes, also after a restart.

        Args:
            text: the text that `experiment` was read from.

        Returns:
            Whether the analysis begins anew.
        """
        self.file.put(text)
        return self.replace(experiment, "PUT")

    def replace(self, experiment: Experiment, source: str = "file") -> bool:
        """Go on with another version. Returns whether the analysis begins anew.

        Args:
            source: where it is from, for the log of changes.
        """
        anew = self.lifecycle.replace(experiment, source)
        if anew:
            self._begin(Analysis(experiment))
            self._warned.clear()
            self.series.begin_revision(experiment)
        logger.info(
            "KV-cache experiment %s: %s.",
            experiment.name,
            self.lifecycle.log[-1]["what"] if self.lifecycle.log else "loaded",
        )
        self.save()
        return anew

    async def follow(self) -> None:
        """Look at the file, and take up what has changed in it."""
        try:
            self.reload(await asyncio.to_thread(self.file.path.read_bytes))
        except OSError as error:
            self.unreadable(error)

    def reload(self, content: bytes) -> None:
        """Take up the file's content as it is now; if it is wrong, the last good version stays."""
        text = self.file.changed(content)
        if text is not None:
            try:
                definition = self.read(text, str(self.file.path))
            except PolicyError as error:
                # A policy that is being changed may be served by then.
                self.file.failed(str(error), try_again=bool(self._changing_policies))
            else:
                self.file.taken_up()
                if definition.diagnostics:
                    logger.warning(
                        "The experiment is in use:\n%s",
                        render_all(definition.diagnostics, definition.source),
                    )
                self.replace(definition.require())
        self.series.reloaded(self.file.in_use)

    def unreadable(self, error: OSError) -> None:
        """Note that the file cannot be read; the last good version stays."""
        self.file.failed(f"{self.file.path} cannot be read: {error}", try_again=True)
        self.series.reloaded(False)

    def summary(self) -> dict[str, Any]:
        """What shows whether the replicas of a fleet serve the same experiment."""
        return {
            "name": self.experiment.name,
            "revision": self.experiment.revision,
            "digest": self.experiment.digest,
            "state": self.lifecycle.state.value,
            "rolled_back": list(self.lifecycle.rolled_back),
            "coverage": self.lifecycle.coverage,
        }

    def document(self, *, with_keys: bool = True) -> dict[str, Any]:
        """What `GET /kv_policy/experiment` answers.

        Args:
            with_keys: also hashes of the keys, some bytes for each.
        """
        return document(
            self.lifecycle,
            self.analysis,
            reload={"success": self.file.in_use, "problem": self.file.problem or None},
            state_saved=self.state_saved,
            state_file=self._keeper.file is not None,
            analysed_seconds=time.monotonic() - self._analysed,
            with_keys=with_keys,
        )


def breach(verdict: Verdict) -> str:
    """A breach in a sentence."""
    what = "" if verdict.absolute else " more than control's"
    return (
        f"guardrail {verdict.metric} of arm {verdict.arm} is breached: {verdict.mean:.4g}{what} "
        f"in {verdict.samples} samples, where {verdict.margin:g} is allowed "
        f"(log evidence {verdict.log_e_breach:.1f})"
    )


def _hash(experiment: str, key: str) -> int:
    """64 bits by which distinct keys are counted; the key itself is kept nowhere."""
    text = f"{experiment}/count/{key}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)
