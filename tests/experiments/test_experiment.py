"""Revision and digest: which keys change them, and how experiments are written."""

from dataclasses import replace

import pytest
from kvpolicy.experiments.definition.experiment import (
    AnalysisRules,
    Arm,
    CoverageStep,
    Experiment,
    KeySource,
    Metric,
    Shadow,
    Switchback,
    as_document,
)
from kvpolicy.experiments.definition.quantities import (
    duration_text,
    duration_value,
    percent_text,
    percent_value,
)

BASE = Experiment(
    name="a-test",
    coverage=0.1,
    arms=(Arm("control", "none"), Arm("lava", "lava@0.25", 1, {"rate": 0.25})),
    metrics=(Metric("error_rate", "guardrail", 0.005),),
)


@pytest.mark.parametrize(
    "changes",
    [
        {"enabled": False},
        {"coverage": 0.5},
        {"steps": (CoverageStep(coverage=0.5), CoverageStep(pause=60.0))},
    ],
)
def test_what_may_change_keeps_the_revision(changes):
    changed = replace(BASE, **changes)
    assert changed.revision == BASE.revision
    assert changed.digest != BASE.digest


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "another"},
        {"targeting_key": (KeySource("rid"),)},
        {"default": "lava"},
        {"arms": BASE.arms[::-1]},
        {"arms": (BASE.arms[0], replace(BASE.arms[1], weight=2))},
        {"arms": (BASE.arms[0], replace(BASE.arms[1], settings={"rate": 0.5}))},
        {"design": Switchback(600.0, 60.0)},
        {"shadow": Shadow(0.02)},
        {"metrics": (Metric("error_rate", "guardrail", 0.01),)},
        {"analysis": AnalysisRules(alpha=0.01)},
    ],
)
def test_what_is_compared_makes_a_new_revision(changes):
    changed = replace(BASE, **changes)
    assert changed.revision != BASE.revision
    assert changed.digest != BASE.digest


def test_equal_experiments_have_equal_digests():
    same = replace(BASE, arms=(Arm("control", "none", 1), BASE.arms[1]))
    assert same.digest == BASE.digest
    assert len(BASE.revision) == len(BASE.digest) == 12
    assert BASE.revision == "afcdb200738a"  # a release that changes it ends running analyses


def test_arms_are_found_by_name():
    assert BASE.arm("lava").policy == "lava@0.25"
    assert BASE.control.name == "control"
    with pytest.raises(KeyError):
        BASE.arm("snapkv")


def test_documents_use_the_words_of_the_file():
    experiment = replace(BASE, design=Switchback(5400.0, 90.0), shadow=Shadow(0.005))
    document = as_document(experiment)
    assert document["coverage"] == "10 %"
    assert document["design"] == {"switchback": {"window": "90m", "burn_in": "90s"}}
    assert document["shadow"]["sample"] == "0.5 %"
    assert document["arms"]["lava"] == {"policy": "lava@0.25", "weight": 1, "set": {"rate": 0.25}}


@pytest.mark.parametrize("share", [0.0, 0.07, 0.1, 1 / 3, 1e-7, 0.29, 1.0])
def test_shares_are_exact(share):
    assert percent_value(percent_text(share)) == share


@pytest.mark.parametrize("seconds", [0.0, 0.5, 1.0, 90.0, 1800.0, 7200.0, 86_400.0, 100.1])
def test_durations_are_exact(seconds):
    assert duration_value(duration_text(seconds)) == seconds


def test_durations_take_the_largest_unit():
    assert [duration_text(s) for s in (60.0, 5400.0, 3600.0, 172_800.0)] == [
        "1m",
        "90m",
        "1h",
        "2d",
    ]
