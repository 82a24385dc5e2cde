"""The Prometheus series of an experiment: which are kept, and their values."""

import math
from dataclasses import replace

import pytest
from kvpolicy.experiments.definition.experiment import AnalysisRules, Arm, Experiment, Metric
from kvpolicy.sglang_ext.experiment.live import Live
from prometheus_client import REGISTRY

EXPERIMENT = Experiment(
    name="trial",
    coverage=1.0,
    arms=(Arm("control", "none"), Arm("lava", "lava"), Arm("snapkv", "snapkv")),
    metrics=(Metric("error_rate", "guardrail", 0.1),),
    analysis=AnalysisRules(min_samples=20),
)
PREFIX = "sglang:kv_experiment_"


@pytest.fixture
def live(tmp_path):
    file = tmp_path / "experiment.yaml"
    file.write_text("")
    return Live(EXPERIMENT, file, {"lava": {}, "snapkv": {}})


@pytest.fixture
def exported(live, unregistered):
    """The live experiment, with its series exported."""
    live.series.export({"model_name": "m"})
    return live


def shown(name, **labels):
    labels = {"model_name": "m", "kv_experiment": "trial", **labels}
    return REGISTRY.get_sample_value(PREFIX + name, labels)


def test_without_metrics_nothing_accumulates(live):
    live.look()
    kept = len(live.series._gauges)
    for _ in range(100):
        live.look()
        live.series.standing(live.lifecycle)
        live.series.saved(True)
    assert len(live.series._gauges) == kept


def test_what_was_set_before_is_exported(exported):
    assert shown("state", state="running") == shown("coverage_ratio") == 1
    assert shown("arm_share_ratio", kv_arm="lava") == pytest.approx(1 / 3)
    assert shown("breach_threshold") == pytest.approx(math.log(2 / 0.05))
    exported.abort("drift")
    assert (shown("state", state="running"), shown("state", state="aborted")) == (0, 1)


def fail(live, *arms):
    for key in range(60):
        for arm in ("control", "lava", "snapkv"):
            nothing = {"kv_bytes_per_prompt_token": None, "ttft": None, "e2e": None}
            live.analysis.finished(arm, failed=arm in arms, key_hash=key, **nothing)
    live.look()


def evidence(arm):
    return shown("log_e_value", kv_arm=arm, metric="error_rate", against="breach")


def test_arms_that_are_gone_say_nothing(exported):
    live = exported
    fail(live, "lava")
    assert evidence("lava") > 5
    assert shown("arm_enabled", kv_arm="lava") == 0  # it was rolled back
    live.replace(replace(EXPERIMENT, arms=(EXPERIMENT.arms[0], EXPERIMENT.arms[2])))
    assert (evidence("lava"), evidence("snapkv")) == (0, 0)
    assert shown("srm_p_value", stage="finished") == 1
    assert [shown(name, kv_arm="lava") for name in ("arm_enabled", "arm_share_ratio", "keys")] == [
        0
    ] * 3
    assert [shown(name, kv_arm="snapkv") for name in ("arm_enabled", "arm_share_ratio")] == [1, 0.5]
    assert shown("state", state="running") == shown("reload_success") == 1


def test_what_is_no_number_counts_as_the_largest_value(exported):
    key = {"revision": EXPERIMENT.revision, "arm": "lava", "key": 1}
    for drift, top1 in ((math.nan, math.nan), (math.inf, 0.5), (0.25, 0.0)):
        exported.shadowed("rid", key, drift, top1, 10)
    assert shown("shadow_drift_sum", kv_arm="lava") == 2 * exported.clip + 0.25
    assert shown("shadow_drift_count", kv_arm="lava") == 3
    assert shown("shadow_top1_disagreements_total", kv_arm="lava") == 15
    assert exported.analysis.records["lava"].shadowed == 3


def test_an_experiment_that_is_gone_says_nothing(exported):
    exported.series.reloaded(False)
    exported.replace(replace(EXPERIMENT, name="other"))
    now = {"kv_experiment": "other"}
    assert (shown("state", state="running"), shown("state", state="running", **now)) == (0, 1)
    assert (shown("coverage_ratio"), shown("coverage_ratio", **now)) == (0, 1)
    assert (shown("reload_success"), shown("reload_success", **now)) == (1, 0)
    assert (shown("arm_enabled", kv_arm="lava"), shown("arm_enabled", kv_arm="lava", **now)) == (
        0,
        1,
    )
