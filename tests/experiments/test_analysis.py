"""Analysis of one replica: verdicts, warnings, documents, pooling."""

import json
import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from kvpolicy.experiments.definition.experiment import AnalysisRules as Rules
from kvpolicy.experiments.definition.experiment import (
    Arm,
    Experiment,
    KeySource,
    Metric,
    Shadow,
    Switchback,
)
from kvpolicy.experiments.replica.analysis import WORST, Analysis, pooled
from kvpolicy.experiments.replica.assignment import assign, fraction
from kvpolicy.experiments.replica.judge import breach_threshold, clear_threshold
from kvpolicy.experiments.replica.promotion import incomparable
from kvpolicy.experiments.statistics import distinct_keys, heavy_keys, majority_key
from kvpolicy.experiments.statistics.drift import Candidates, disagreements, divergence

EXPERIMENT = Experiment(
    name="a-test",
    targeting_key=(KeySource("header", "x-user"), KeySource("rid")),
    coverage=1.0,
    arms=(Arm("control", "none"), Arm("lava", "lava@0.25")),
    shadow=Shadow(0.5),
    metrics=(
        Metric("drift", "guardrail", 0.05, 2.0),
        Metric("top1_disagreement", "guardrail", 0.02),
        Metric("error_rate", "guardrail", 0.01),
        Metric("kv_bytes_per_prompt_token", "success"),
        Metric("ttft_seconds", "info", clip=10.0),
    ),
)
TURNS = replace(
    EXPERIMENT,
    shadow=None,
    design=Switchback(60.0, 6.0),
    metrics=(
        Metric("ttft_seconds", "guardrail", 0.5, 5.0),
        Metric("e2e_seconds", "info", clip=9.0),
    ),
)
COMPARED = replace(
    TURNS,
    metrics=(
        *TURNS.metrics,
        Metric("error_rate", "guardrail", 0.005),
        Metric("kv_bytes_per_prompt_token", "success", clip=200.0),
    ),
)


def hashed(key):
    return int(fraction("hash", "", key) * 2**53)


def traffic(analyses, requests, *, drift=0.01, failures=0.0, seed=1, keys=100_000):
    """Requests of random users, spread over replicas; every second one is scored again."""
    rng = random.Random(seed)
    for number in range(requests):
        key = f"user-{rng.randrange(keys)}"
        analysis = rng.choice(analyses)
        arm = assign(analysis.experiment, key, coverage=1.0, seconds=0.0).arm
        mine = arm == "lava"
        analysis.key_source(0)
        analysis.assigned(arm, hashed(key), sampled=bool(number % 2))
        analysis.finished(
            arm,
            failed=mine and rng.random() < failures,
            kv_bytes_per_prompt_token=25.0 if mine else 100.0,
            ttft=0.2,
            e2e=1.0,
            key_hash=hashed(key),
        )
        if number % 2:
            lost = min(2.0, rng.expovariate(1 / drift)) if mine else 0.0
            analysis.shadowed(arm, lost, lost / 10, 50, number)
            analysis.sample_ended(arm, "compared", 50, key_hash=hashed(key))


def verdicts(analysis):
    return {(verdict.metric, verdict.arm): verdict for verdict in analysis.verdicts()}


def breached(analysis):
    """Those by which the server rolls an arm back."""
    return [verdict for verdict in analysis.verdicts() if verdict.outcome == "breached"]


@pytest.fixture(scope="module")
def good():
    analysis = Analysis(EXPERIMENT)
    traffic([analysis], 8_000)
    return analysis


def test_a_good_arm_is_cleared(good):
    found = verdicts(good)
    for metric in ("drift", "top1_disagreement", "error_rate"):
        assert found[metric, "lava"].outcome == "cleared"
    assert not breached(good)
    assert good.warnings() == []


def test_every_metric_has_its_verdicts(good):
    found = verdicts(good)
    assert list(found) == [
        ("drift", "control"), ("drift", "lava"),
        ("top1_disagreement", "control"), ("top1_disagreement", "lava"),
        ("error_rate", "lava"), ("kv_bytes_per_prompt_token", "lava"),
        ("ttft_seconds", "control"), ("ttft_seconds", "lava"),
    ]  # fmt: skip
    noise = found["drift", "control"]
    assert (noise.role, noise.mean, noise.outcome, noise.margin) == ("info", 0.0, "undecided", None)
    drift = found["drift", "lava"]
    assert drift.low < 0.01 < drift.high < 0.05
    assert drift.absolute
    assert drift.samples == good.records["lava"].shadowed
    memory = found["kv_bytes_per_prompt_token", "lava"]
    assert (memory.mean, memory.low, memory.absolute) == (-75.0, None, False)
    time = found["ttft_seconds", "lava"]
    assert time.mean == pytest.approx(0.2)
    assert (time.margin, time.outcome, time.absolute) == (None, "undecided", True)


def test_a_bad_arm_is_breached_by_its_worst_metric():
    analysis = Analysis(EXPERIMENT)
    traffic([analysis], 1_200, drift=0.5)
    breach = max(breached(analysis), key=lambda verdict: verdict.log_e_breach)
    assert (breach.metric, breach.arm, breach.role) == ("drift", "lava", "guardrail")
    assert breach.log_e_breach > breach_threshold(EXPERIMENT)
    assert breach.as_document()["outcome"] == "breached"


def test_failures_are_breached():
    analysis = Analysis(EXPERIMENT)
    traffic([analysis], 4_000, failures=0.08)
    [breach] = breached(analysis)
    assert breach.metric == "error_rate"
    assert breach.mean == pytest.approx(0.08, abs=0.02)


def test_nothing_is_decided_before_enough_samples():
    patient = replace(EXPERIMENT, analysis=Rules(min_samples=100_000))
    analysis = Analysis(patient)
    traffic([analysis], 1_000, drift=0.5)
    assert {verdict.outcome for verdict in analysis.verdicts()} == {"undecided"}
    assert verdicts(analysis)["drift", "lava"].log_e_breach > breach_threshold(patient)


def test_nothing_is_subtracted_before_control_has_values():
    analysis = Analysis(EXPERIMENT)
    nothing = {"failed": False, "ttft": None, "e2e": None, "key_hash": 1}
    for arm in ("lava", "control"):
        verdict = verdicts(analysis)["kv_bytes_per_prompt_token", "lava"]
        assert (verdict.samples, verdict.mean) == (0, None)
        analysis.finished(arm, kv_bytes_per_prompt_token=7.0, **nothing)
    assert verdicts(analysis)["kv_bytes_per_prompt_token", "lava"].mean == 0.0


def test_breaches_share_alpha_and_clearing_does_not():
    assert breach_threshold(EXPERIMENT) == pytest.approx(math.log(3 / 0.05))
    more = (*EXPERIMENT.arms, Arm("tova", "tova"), Arm("off", "h2o", 0.0))
    assert breach_threshold(replace(EXPERIMENT, arms=more)) == pytest.approx(math.log(6 / 0.05))
    assert clear_threshold(replace(EXPERIMENT, arms=more)) == pytest.approx(math.log(1 / 0.05))


def test_arms_of_weight_zero_have_no_verdicts():
    arms = (*EXPERIMENT.arms, Arm("off", "h2o", 0.0))
    analysis = Analysis(replace(EXPERIMENT, arms=arms))
    assert "off" not in {verdict.arm for verdict in analysis.verdicts()}


def test_two_replicas_are_one():
    replicas, one = [Analysis(EXPERIMENT), Analysis(EXPERIMENT)], Analysis(EXPERIMENT)
    traffic(replicas, 3_000, keys=500)
    traffic([one], 3_000, keys=500)
    documents = [json.loads(json.dumps(each.as_document())) for each in replicas]
    both = pooled(EXPERIMENT, documents)
    assert both.keys() == one.keys()  # keys that both saw count once
    assert both.sources == one.sources
    ours, theirs = verdicts(both), verdicts(one)
    for key, verdict in ours.items():
        assert verdict.mean == pytest.approx(theirs[key].mean)
        assert verdict.samples == pytest.approx(theirs[key].samples, rel=0.05)  # of pairs
    assert both.worst[0]["drift"] == max(each.worst[0]["drift"] for each in replicas)


def test_without_keys_counts_are_added():
    replicas = [Analysis(EXPERIMENT), Analysis(EXPERIMENT)]
    for replica in replicas:
        replica.assigned("lava", 7)
    documents = [replica.as_document(with_keys=False) for replica in replicas]
    assert pooled(EXPERIMENT, documents).keys() == {"control": 0, "lava": 2}
    documents = [replica.as_document() for replica in replicas]
    assert pooled(EXPERIMENT, documents).keys() == {"control": 0, "lava": 1}


@pytest.mark.parametrize(
    "experiment", [EXPERIMENT, TURNS, COMPARED], ids=["request", "switchback", "all compared"]
)
def test_a_restart_goes_on_where_it_stopped(experiment):
    def run(analysis, start, stop):
        for number in range(start, stop):
            arm = experiment.arms[number // 10 % 2].name
            seconds = 6.0 * number + 1
            analysis.key_source(number % 2)
            analysis.assigned(arm, number % 50, seconds=seconds, sampled=True)
            analysis.finished(
                arm, failed=number % 7 == 0, kv_bytes_per_prompt_token=10.0, ttft=number % 5,
                e2e=None, key_hash=number % 50, seconds=seconds,
            )  # fmt: skip
            if experiment.shadow is not None:
                analysis.shadowed(arm, number % 3 / 10, 0.0, 20, number)
                analysis.sample_ended(arm, "compared", 20, key_hash=number % 50)
        return analysis

    whole = run(Analysis(experiment), 0, 600)
    stopped = json.loads(json.dumps(run(Analysis(experiment), 0, 301).as_document()))
    resumed = run(Analysis.from_document(experiment, stopped), 301, 600)
    assert resumed.as_document() == whole.as_document()
    assert resumed.verdicts() == whole.verdicts()


def test_documents_hold_no_keys_and_are_small(good):
    text = json.dumps(good.as_document(with_keys=False))
    assert len(text) < 12_000
    assert str(hashed("user-1")) not in json.dumps(good.as_document())
    assert len(json.dumps(good.as_document())) - len(text) < 6 * 8_000


def test_documents_of_other_revisions_are_refused(good):
    other = replace(EXPERIMENT, default="lava")
    with pytest.raises(
        ValueError, match=r"of revision \w+, the experiment `a-test` is of revision"
    ):
        Analysis.from_document(other, good.as_document())
    ramped = replace(EXPERIMENT, coverage=0.5)
    assert Analysis.from_document(ramped, good.as_document()).keys() == good.keys()


@pytest.mark.parametrize(
    "damage", [{"arms": {}}, {"keys": None}, {"worst": [1]}, {"sources": [1]}, {"majority": "x"}]
)
def test_damaged_documents_are_refused(good, damage):
    with pytest.raises(ValueError, match="is damaged"):
        Analysis.from_document(EXPERIMENT, good.as_document() | damage)


def test_memory_is_a_share_of_all_bytes():
    """Nine of ten prompts are short and stay whole; one is long, and a quarter of it stays."""
    analysis = Analysis(EXPERIMENT)
    for number in range(100):
        tokens = 32_000 if number % 10 == 0 else 100
        kept = tokens // 4 if tokens > 1000 else tokens
        analysis.finished(
            "lava", failed=False, kv_bytes_per_prompt_token=kept / tokens, ttft=None, e2e=None,
            key_hash=number, kept_bytes=kept, full_bytes=tokens,
        )  # fmt: skip
    record = analysis.records["lava"]
    assert record.tallies["kv_bytes_per_prompt_token"].mean == pytest.approx(0.925)
    assert record.kept == pytest.approx((10 * 8_000 + 90 * 100) / (10 * 32_000 + 90 * 100))
    saved = json.loads(json.dumps(analysis.as_document()))
    assert pooled(EXPERIMENT, [saved, saved]).records["lava"].kept == record.kept
    del saved["arms"]["lava"]["memory"]  # of an earlier version
    assert Analysis.from_document(EXPERIMENT, saved).records["lava"].kept is None


def test_the_worst_requests_are_kept():
    analysis = Analysis(EXPERIMENT)
    for number in range(100):
        analysis.shadowed("lava", number % 50 / 100, 0.0, 10, number)
    worst = analysis.worst
    assert len(worst) == WORST
    assert worst[0] == {"arm": "lava", "number": 99, "drift": 0.49, "tokens": 10}
    assert [each["drift"] for each in worst] == sorted((w["drift"] for w in worst), reverse=True)


def test_what_is_no_number_counts_as_the_worst():
    analysis = Analysis(EXPERIMENT)
    analysis.shadowed("lava", math.nan, math.nan, 10, 1)
    found = verdicts(analysis)
    assert found["drift", "lava"].mean == 2.0
    assert found["top1_disagreement", "lava"].mean == 1.0
    json.dumps(analysis.as_document(), allow_nan=False)


def test_a_policy_whose_logits_are_no_numbers_is_breached():
    ids = np.tile(np.arange(8), (3, 1))
    full = Candidates(ids, np.full((3, 8), -2.5, dtype=np.float32))
    broken = Candidates(ids, np.full((3, 8), np.nan, dtype=np.float32))
    analysis = Analysis(EXPERIMENT)
    for number in range(200):
        drift = float(np.minimum(divergence(broken, full), 2.0).mean())
        top1 = float(disagreements(broken, full).mean())
        analysis.shadowed("lava", drift, top1, 3, number)
    found = verdicts(analysis)
    for metric in ("drift", "top1_disagreement"):
        assert found[metric, "lava"].outcome == "breached"


def test_a_key_counts_once_at_each_stage():
    analysis = Analysis(EXPERIMENT)
    for _ in range(3):
        analysis.assigned("lava", 5)
        analysis.finished(
            "lava", failed=False, kv_bytes_per_prompt_token=None, ttft=None, e2e=None, key_hash=5
        )
    analysis.assigned("control", 6)
    ratios = analysis.distinct.ratios
    assert [ratios[stage].counts for stage in ratios] == [[1, 1], [0, 1], [0, 0]]
    assert analysis.records["lava"].requests == 3


def test_keys_are_bounded(monkeypatch):
    monkeypatch.setattr(distinct_keys, "MAX_KEYS", 10)
    analysis = Analysis(EXPERIMENT)
    for key in range(30):
        analysis.assigned("lava", key, sampled=True)
        analysis.sample_ended("lava", "compared", 1, key_hash=key)
    assert len(analysis.distinct) == 10
    assert analysis.distinct.ratios["shadowed"].counts == [0, 10]


# Warnings


def test_a_gateway_that_overwrites_the_key_is_noticed():
    analysis = Analysis(EXPERIMENT)
    for number in range(300):
        key = 77 if number % 5 else number
        analysis.assigned("control" if key == 77 else "lava", key)
    [warning] = [each for each in analysis.warnings() if each.startswith("all traffic in one arm")]
    assert "one key carries 239 of the last 300 requests" in warning
    assert "let it pass" in warning


def test_a_key_that_has_much_of_an_arm_is_noticed():
    rng, whole = random.Random(3), Analysis(EXPERIMENT)
    replicas = [Analysis(EXPERIMENT), Analysis(EXPERIMENT)]
    nothing = {"failed": False, "kv_bytes_per_prompt_token": None, "ttft": None, "e2e": None}
    for number in range(6_000):
        arm = "lava" if number % 2 else "control"
        key = 5 if arm == "lava" and rng.random() < 0.12 else hashed(f"{number}")
        for analysis in (whole, replicas[number // 2 % 2]):
            analysis.finished(arm, key_hash=key, **nothing)
        if number == 900:
            assert whole.alarms() == []  # too few to say
    [alarm] = whole.alarms()
    assert alarm.kind == "one key has much of arm `lava`"
    assert re.match(r"at least [23]\d\d of 3,000 finished requests", alarm.about)
    assert len(whole.records["lava"].heavy.counts) <= heavy_keys.COUNTERS
    documents = [json.loads(json.dumps(each.as_document())) for each in replicas]
    assert [each.kind for each in pooled(EXPERIMENT, documents).alarms()] == [alarm.kind]
    assert str(5) not in str(whole.as_document(with_keys=False)["arms"]["lava"]["heavy"][1])
    whole.retire("lava")
    assert whole.alarms() == []


@pytest.mark.parametrize("replicas", [1, 2])
def test_counters_of_replicas_are_as_few_as_those_of_one_and_as_near(replicas):
    """Also with every counter in use, as after a restart."""
    documents, number = [], 0
    for replica in range(replicas):
        heavy = heavy_keys.HeavyKeys()
        for key in range(heavy_keys.COUNTERS):
            for _ in range(2 + key):
                heavy.add(key or 100 * replica)
        number += heavy.values
        documents.append(heavy.as_document(with_keys=True))
    pooled_keys = heavy_keys.HeavyKeys()
    pooled_keys.take(documents)
    assert len(pooled_keys.counts) <= heavy_keys.COUNTERS
    true = replicas * (2 + heavy_keys.COUNTERS - 1)
    assert true - number / (heavy_keys.COUNTERS + 1) <= pooled_keys.largest <= true
    assert replicas > 1 or pooled_keys.as_document(with_keys=True) == documents[0]


def test_it_is_noticed_also_when_it_begins_later():
    analysis = Analysis(EXPERIMENT)
    for number in range(10_000):
        analysis.assigned("control", number)
    assert not any("one key" in warning for warning in analysis.warnings())
    for count in range(majority_key.ENOUGH):
        assert not any("one key" in warning for warning in analysis.warnings()), count
        analysis.assigned("control", 77)
    assert any("one key" in warning for warning in analysis.warnings())


def test_requests_without_keys_are_noticed():
    analysis = Analysis(EXPERIMENT)
    for _ in range(199):
        analysis.key_source(1)
    assert analysis.warnings() == []
    analysis.key_source(1)
    [warning] = analysis.warnings()
    assert "none of 200 requests has one (`header:x-user`)" in warning
    analysis.key_source(0)
    analysis.key_source(None)
    assert analysis.warnings() == []


def test_requests_whose_key_is_found_nowhere_are_noticed():
    analysis = Analysis(replace(EXPERIMENT, targeting_key=(KeySource("body", "user"),)))
    for number in range(300):
        analysis.key_source(0 if number % 25 else None)
    assert analysis.warnings() == []
    for _ in range(20):
        analysis.key_source(None)
    [warning] = analysis.warnings()
    assert warning.startswith(
        "requests without a key: 32 of 320 (10%) have none of `body:user`; they get `none`"
    )
    saved = json.loads(json.dumps(analysis.as_document()))
    assert Analysis.from_document(analysis.experiment, saved).warnings() == [warning]
    del saved["keyless"]
    assert Analysis.from_document(analysis.experiment, saved).warnings() == []


@pytest.mark.parametrize(
    ("stage", "cause"), [("assigned", "gateway"), ("finished", "timeouts"), ("shadowed", "skipped")]
)
def test_a_mismatch_is_noticed_at_its_stage(stage, cause):
    analysis = Analysis(EXPERIMENT)
    for key in range(2_000):
        arm = "lava" if key % 2 else "control"
        lost = arm == "lava" and key % 4 == 1
        if lost and stage == "assigned":
            continue
        analysis.assigned(arm, key, sampled=True)
        if lost and stage == "finished":
            analysis.aborted(arm, ttft=None, e2e=None, key_hash=key)
            continue
        analysis.finished(
            arm, failed=False, kv_bytes_per_prompt_token=1.0, ttft=0.1, e2e=1.0, key_hash=key
        )
        analysis.sample_ended(arm, "busy" if lost else "compared", 1, key_hash=key)
    [warning] = [each for each in analysis.warnings() if "mismatch" in each]
    assert f"at the stage `{stage}`: control has 1,000 of 1,500 keys (66.7% for 50.0%)" in warning
    assert cause in warning
    assert analysis.p_values()[stage] < 0.001


def test_noise_of_control_is_noticed():
    analysis = Analysis(EXPERIMENT)
    for number in range(200):
        analysis.shadowed("control", 0.02, 0.001, 10, number)
    [warning] = analysis.warnings()
    assert warning.startswith("noise in `drift`: control has 0.02 with full KV on both sides")
    assert incomparable(analysis, {}, "lava") is None  # an arm may be promoted all the same
    arms = (Arm("control", "snapkv"), EXPERIMENT.arms[1])
    lossy = Analysis(replace(EXPERIMENT, arms=arms))
    for number in range(200):
        lossy.shadowed("control", 0.02, 0.001, 10, number)
    assert lossy.warnings() == []  # that is what its policy loses


def sampled(analysis, arm, outcome, number, tokens=100):
    for _ in range(number):
        analysis.sample_ended(arm, outcome, tokens, key_hash=0)


def test_samples_that_are_left_out_are_noticed():
    analysis = Analysis(EXPERIMENT)
    sampled(analysis, "lava", "compared", 79)
    sampled(analysis, "lava", "no_room", 20)
    assert analysis.warnings() == []  # too few to say
    sampled(analysis, "lava", "busy", 1)
    sampled(analysis, "lava", "one_token", 100)  # there is nothing to compare
    [alarm] = analysis.alarms()
    assert str(alarm).startswith(
        "requests of `lava` that are not scored again: 79 of 100 sampled ones are compared "
        "(79.0%), with 79.0% of their tokens (1 `busy`, 20 `no_room`);"
    )
    assert str(alarm).endswith("raise `--kv-experiment-slots`")
    assert (alarm.untrue, alarm.one_sided) == (False, True)
    saved = json.loads(json.dumps(analysis.as_document()))
    assert Analysis.from_document(EXPERIMENT, saved).alarms() == [alarm]
    [both] = pooled(EXPERIMENT, [saved, saved]).alarms()
    assert "158 of 200" in both.about
    del saved["arms"]["lava"]["scoring"]  # of an earlier version
    assert Analysis.from_document(EXPERIMENT, saved).alarms() == []
    analysis.retire("lava")
    assert analysis.alarms() == []


def test_long_samples_that_are_left_out_are_noticed():
    analysis = Analysis(EXPERIMENT)
    sampled(analysis, "lava", "compared", 950)
    sampled(analysis, "lava", "too_long", 50, 10_000)
    sampled(analysis, "control", "compared", 950)
    sampled(analysis, "control", "busy", 50)
    [alarm] = analysis.alarms()
    assert "(95.0%), with 16.0% of their tokens (50 `too_long`)" in alarm.about
    metrics = tuple(metric for metric in EXPERIMENT.metrics if not metric.kind.shadow)
    unneeded = Analysis(replace(EXPERIMENT, metrics=metrics))
    sampled(unneeded, "lava", "too_long", 500)
    assert unneeded.alarms() == []


def test_warnings_begin_alike_while_figures_change():
    analysis = Analysis(EXPERIMENT)
    kinds = set()
    for _ in range(600):
        analysis.key_source(1)
        analysis.assigned("lava", 5)
        kinds |= {warning.split(":")[0] for warning in analysis.warnings()}
    assert len(kinds) == 2


# Switchback


def turn(analysis, window, ttft, *, at=30.0, arm=None):
    drawn = arm or assign(TURNS, "k", coverage=1.0, seconds=60.0 * window).arm
    seconds = 60.0 * window + at
    analysis.assigned(drawn, 1, seconds=seconds)
    analysis.finished(
        drawn, failed=False, kv_bytes_per_prompt_token=None, ttft=ttft(drawn), e2e=1.0, key_hash=1,
        seconds=seconds,
    )  # fmt: skip


def test_windows_are_the_unit_of_latency():
    analysis = Analysis(TURNS)
    for window in range(200):
        for at in (1.0, 20.0, 40.0):  # the first is in the burn-in
            turn(
                analysis, window, lambda arm, at=at: 5.0 if at < 6 else 1.0 + (arm == "lava"), at=at
            )
    found = verdicts(analysis)
    assert set(found) == {("ttft_seconds", "lava"), ("e2e_seconds", "lava")}
    verdict = found["ttft_seconds", "lava"]
    assert verdict.mean == pytest.approx(1.0)
    assert 40 < verdict.samples < 100  # pairs of windows, not requests
    assert verdict.outcome == "breached"
    assert found["e2e_seconds", "lava"].outcome == "undecided"
    assert analysis.keys() == {"control": 0, "lava": 0}


def test_clients_that_hang_up_do_not_make_an_arm_fast():
    """Control answers within the 30 s that clients wait; the arm takes a minute."""
    slow = replace(TURNS, metrics=(Metric("e2e_seconds", "guardrail", 3.0, 60.0),))
    analysis = Analysis(slow)
    for window in range(600):
        arm = assign(slow, "k", coverage=1.0, seconds=60.0 * window).arm
        for at in (20.0, 40.0):
            seconds = 60.0 * window + at
            analysis.assigned(arm, 1, seconds=seconds)
            times = {"ttft": None, "key_hash": 1, "seconds": seconds}
            if arm == "lava" and at == 40.0:
                analysis.aborted(arm, e2e=30.0, **times)
            else:
                analysis.finished(
                    arm, failed=False, kv_bytes_per_prompt_token=None, e2e=20.0, **times
                )
    verdict = verdicts(analysis)["e2e_seconds", "lava"]
    assert (verdict.mean, verdict.outcome) == (pytest.approx(5.0), "breached")


def test_equal_arms_are_cleared():
    analysis = Analysis(TURNS)
    for window in range(500):
        turn(analysis, window, lambda arm: 1.0)
    assert verdicts(analysis)["ttft_seconds", "lava"].outcome == "cleared"


def failing(windows, fails):
    """Ten requests in each window, the first in its burn-in; `fails` of arm, window and number."""
    analysis = Analysis(COMPARED)
    for window in range(windows):
        arm = assign(COMPARED, "k", coverage=1.0, seconds=60.0 * window).arm
        for number in range(10):
            seconds = 60.0 * window + 6.0 * number + 1
            analysis.assigned(arm, 1, seconds=seconds)
            analysis.finished(
                arm, failed=fails(arm, window, number), kv_bytes_per_prompt_token=100.0, ttft=1.0,
                e2e=1.0, key_hash=1, seconds=seconds,
            )  # fmt: skip
    return analysis


def test_an_arm_that_fails_every_request_is_breached_by_few_windows():
    analysis = failing(100, lambda arm, window, number: arm == "lava")
    [breach] = breached(analysis)
    assert (breach.metric, breach.mean) == ("error_rate", 1.0)
    assert breach.samples < COMPARED.analysis.min_samples < analysis.records["lava"].finished
    early = failing(38, lambda arm, window, number: arm == "lava")  # it has too few requests
    assert min(record.finished for record in early.records.values()) < 200
    assert verdicts(early)["error_rate", "lava"].log_e_breach > breach_threshold(COMPARED)
    assert not breached(early)


def test_a_window_is_one_value_of_every_difference():
    """An event in a window, such as an outage, counts once, for any number of requests."""
    found = verdicts(failing(100, lambda arm, window, number: window == 50))
    pairs = found["ttft_seconds", "lava"].samples
    assert pairs < 50
    assert found["error_rate", "lava"].samples == pairs
    assert found["kv_bytes_per_prompt_token", "lava"].samples == pairs
    assert abs(found["error_rate", "lava"].mean) * pairs == pytest.approx(1.0)
    begun = verdicts(failing(100, lambda arm, window, number: arm == "lava" and not number))
    assert begun["error_rate", "lava"].mean == 0.0  # the burn-in is left out


def test_late_requests_do_not_change_closed_windows():
    analysis = Analysis(TURNS)
    for window in range(20):
        turn(analysis, window, lambda arm: 1.0)
    before = analysis.as_document()["windows"]["windows"]
    turn(analysis, 3, lambda arm: 5.0, arm="lava")
    assert analysis.as_document()["windows"]["windows"] == before


def test_one_client_is_no_mistake_where_arms_take_turns():
    analysis = Analysis(TURNS)
    for window in range(300):
        turn(analysis, window, lambda arm: 1.0)
    assert analysis.majority.dominates
    assert analysis.alarms() == []


def test_many_late_values_are_noticed():
    analysis = Analysis(TURNS)
    for window in range(20):
        turn(analysis, window, lambda arm: 1.0)
    assert analysis.warnings() == []
    for _ in range(3):
        analysis.finished(
            "lava", failed=False, kv_bytes_per_prompt_token=None, ttft=5.0, e2e=6.0, key_hash=1,
            seconds=200.0,
        )  # fmt: skip
    [warning] = analysis.warnings()
    assert warning.startswith("late values: 6 of 46 came when their window was closed")
    assert Analysis.from_document(TURNS, analysis.as_document()).warnings() == [warning]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_clock_that_was_ahead_does_not_end_the_comparison(restarted):
    """One request is dated to another year; later ones have today's date."""

    def hours(ahead):
        analysis = Analysis(TURNS)
        for window in range(300):
            if window in ahead:
                turn(analysis, 10**6, lambda arm: 1.0)
                if restarted:
                    saved = json.loads(json.dumps(analysis.as_document()))
                    analysis = Analysis.from_document(TURNS, saved)
            for at in (20.0, 40.0):
                turn(analysis, window, lambda arm: 1.0 + 2 * (arm == "lava"), at=at)
        return analysis

    wrong = hours([100, 101, 150])
    assert breached(wrong)
    assert not any(warning.startswith("late values") for warning in wrong.warnings())
    missing = verdicts(hours([]))["ttft_seconds", "lava"].samples
    missing -= verdicts(wrong)["ttft_seconds", "lava"].samples
    assert 0 <= missing <= 6  # at most two windows each time


def test_a_window_that_was_closed_too_soon_stays_as_it_is():
    analysis = Analysis(TURNS)
    turn(analysis, 5, lambda arm: 1.0)
    turn(analysis, 50, lambda arm: 1.0)
    before = analysis.as_document()["windows"]["windows"]["5"]
    turn(analysis, 5, lambda arm: 4.0)
    after = analysis.as_document()["windows"]
    assert (after["windows"]["5"], after["late"], after["latest"]) == (before, 2, 5)


def test_replicas_share_windows():
    replicas = [Analysis(TURNS), Analysis(TURNS)]
    for window in range(100):
        for replica, ttft in zip(replicas, (1.0, 3.0), strict=True):
            turn(replica, window, lambda arm, ttft=ttft: ttft + (arm == "lava"))
    both = pooled(TURNS, [json.loads(json.dumps(each.as_document())) for each in replicas])
    ours, one = (
        verdicts(both)["ttft_seconds", "lava"],
        verdicts(replicas[0])["ttft_seconds", "lava"],
    )
    assert ours.samples == one.samples
    assert ours.mean == pytest.approx(1.0)
    idle = Analysis(TURNS)
    turn(idle, 10, lambda arm: 1.0 + (arm == "lava"))  # and nothing since
    documents = [json.loads(json.dumps(each.as_document())) for each in (idle, replicas[0])]
    ours = verdicts(pooled(TURNS, documents))["ttft_seconds", "lava"]
    assert (ours.samples, ours.mean) == (one.samples, pytest.approx(1.0))


def test_latency_without_a_time_of_day_is_left_out():
    analysis = Analysis(TURNS)
    analysis.finished(
        "lava", failed=False, kv_bytes_per_prompt_token=None, ttft=1.0, e2e=1.0, key_hash=1
    )
    assert analysis.as_document()["windows"]["windows"] == {}
