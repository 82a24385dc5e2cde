"""The series of an experiment: what they keep, and what they show."""

import pytest
from kvpolicy.experiments.experiment import Arm, Experiment, Metric
from kvpolicy.sglang_ext.experiment.live import Live
from prometheus_client import REGISTRY

EXPERIMENT = Experiment(
    name="trial",
    coverage=1.0,
    arms=(Arm("control", "none"), Arm("lava", "lava"), Arm("snapkv", "snapkv")),
    metrics=(Metric("error_rate", "guardrail", 0.1),),
)
PREFIX = "sglang:kv_experiment_"


@pytest.fixture
def live(tmp_path):
    file = tmp_path / "experiment.yaml"
    file.write_text("")
    return Live(EXPERIMENT, file, {"lava": {}, "snapkv": {}})


@pytest.fixture
def exported(live):
    """Has the series exported; they are gone after the test."""
    before = set(REGISTRY._collector_to_names)
    live.series.export({"model_name": "m"})
    yield live
    for each in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(each)


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
    exported.abort("drift")
    assert (shown("state", state="running"), shown("state", state="aborted")) == (0, 1)
