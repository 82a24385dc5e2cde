"""Steps, ends, restarts and new versions of an experiment, by a simulated clock."""

import json
from dataclasses import replace

import pytest
from kvpolicy.experiments.definition.experiment import Arm, CoverageStep, Experiment, KeySource
from kvpolicy.experiments.replica import lifecycle, state_file
from kvpolicy.experiments.replica.assignment import AssignmentReason
from kvpolicy.experiments.replica.lifecycle import ExperimentState, Lifecycle
from kvpolicy.experiments.replica.state_file import StateFileError

EXPERIMENT = Experiment(
    name="trial",
    targeting_key=(KeySource("rid"),),
    coverage=0.01,
    default="snapkv",
    arms=(Arm("control", "none"), Arm("lava", "lava@0.25")),
    steps=(
        CoverageStep(pause=60.0),
        CoverageStep(coverage=0.1),
        CoverageStep(pause=600.0),
        CoverageStep(coverage=1.0),
    ),
)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def begin(clock, saved=None, experiment=EXPERIMENT):
    return Lifecycle(experiment, saved, clock=clock, now=lambda: f"t{clock.now:g}")


def test_coverage_grows_by_steps(clock):
    life = begin(clock)
    seen = []
    for seconds in (0, 59, 60, 659, 660, 10_000):
        clock.now = 1000 + seconds
        document = life.document()
        seen.append((document["coverage"], document["step"], document["next_step_in_seconds"]))
    assert seen == [
        (0.01, 0, 60), (0.01, 0, 1), (0.1, 2, 600), (0.1, 2, 1), (1.0, 4, None), (1.0, 4, None),
    ]  # fmt: skip


def test_a_pause_stops_the_steps_and_keeps_the_arms(clock):
    life = begin(clock)
    clock.now += 30
    assert life.pause()
    assert not life.pause()
    clock.now += 1000
    assert (life.state, life.coverage, life.elapsed) == (ExperimentState.PAUSED, 0.01, 30)
    covered = [life.assign(f"key {i}", 0).arm for i in range(3000)]
    assert life.resume()
    assert covered == [life.assign(f"key {i}", 0).arm for i in range(3000)]
    assert any(covered)
    clock.now += 30
    assert life.coverage == 0.1


def test_steps_wait_while_arms_cannot_be_compared(clock):
    life = begin(clock)
    clock.now += 30
    assert life.hold_steps("sample ratio mismatch")
    assert not life.hold_steps("sample ratio mismatch")
    clock.now += 1000
    assert (life.state, life.coverage, life.elapsed) == (ExperimentState.RUNNING, 0.01, 30)
    assert life.document()["held"] == "sample ratio mismatch"
    assert life.hold_steps(None)
    clock.now += 30
    assert life.coverage == 0.1
    life.hold_steps("sample ratio mismatch")
    assert life.replace(replace(EXPERIMENT, default="none"))
    assert life.held is None
    clock.now += 10_000
    assert not life.hold_steps("sample ratio mismatch")  # there is none left
    assert [each["what"] for each in life.log][1:4] == [
        "no further step is taken for now: sample ratio mismatch",
        "steps are taken again, as this is over: sample ratio mismatch",
        "no further step is taken for now: sample ratio mismatch",
    ]


def test_what_has_ended_has_ended(clock):
    life = begin(clock)
    assert life.abort("drift")
    assert not life.abort("again")
    assert not life.pause()
    assert not life.promote("lava", "no")
    assert (life.state, life.reason, life.default) == (ExperimentState.ABORTED, "drift", "snapkv")
    drawn = life.assign("key", 0)
    assert (drawn.arm, drawn.reason) == (None, AssignmentReason.DISABLED)
    # Neither a ramp nor a restart nor an older file undoes it.
    assert not life.replace(replace(EXPERIMENT, coverage=1.0, steps=()))
    assert life.state == ExperimentState.ABORTED
    saved = json.loads(json.dumps(life.saved()))
    assert begin(clock, saved).state == ExperimentState.ABORTED
    other = replace(EXPERIMENT, arms=(*EXPERIMENT.arms[:1], Arm("lava", "lava@0.5")))
    assert life.replace(other)
    assert life.state == ExperimentState.RUNNING
    assert life.replace(EXPERIMENT)
    assert life.state == ExperimentState.ABORTED
    assert [each["what"] for each in life.log][1] == "aborted: drift"


def test_another_experiment_on_the_way_does_not_undo_it(clock):
    life = begin(clock)
    life.abort("drift")
    other = replace(EXPERIMENT, name="other")
    assert life.replace(other)
    saved = json.loads(json.dumps(life.saved()))
    assert begin(clock, saved, other).state == ExperimentState.RUNNING
    assert begin(clock, saved).state == ExperimentState.ABORTED


def test_ends_of_the_latest_revisions_are_kept(clock):
    life = begin(clock)
    for number in range(lifecycle._MOST_LATCHED + 3):
        life.replace(replace(EXPERIMENT, name=f"trial-{number}"))
        assert life.abort(f"end {number}")
    latched = life.saved()["latched"]
    assert [end["reason"] for end in latched.values()] == [
        f"end {number}" for number in range(3, lifecycle._MOST_LATCHED + 3)
    ]


def test_the_promoted_arm_serves_everybody(clock):
    life = begin(clock)
    assert life.promote("lava", "cleared")
    assert (life.state, life.default, life.promoted) == (
        ExperimentState.PROMOTED,
        "lava@0.25",
        "lava",
    )
    again = begin(clock, json.loads(json.dumps(life.saved())))
    assert again.default == "lava@0.25"


def test_an_arm_that_fails_leaves_the_others_alone(clock):
    three = replace(EXPERIMENT, coverage=1.0, steps=(), arms=(*EXPERIMENT.arms, Arm("b", "h2o")))
    life = begin(clock, experiment=three)
    before = {f"key {i}": life.assign(f"key {i}", 0).arm for i in range(300)}
    assert not life.roll_back("control", "never")
    assert life.roll_back("b", "drift")
    assert not life.roll_back("b", "again")
    for key, arm in before.items():
        drawn = life.assign(key, 0)
        assert drawn.arm == (None if arm == "b" else arm)
        assert arm != "b" or drawn.reason == AssignmentReason.DISABLED
    assert (life.state, life.rolled_back) == (ExperimentState.RUNNING, {"b": "drift"})
    assert life.log[-1]["what"] == "arm b rolled back: drift"
    again = begin(clock, json.loads(json.dumps(life.saved())), three)
    assert (again.state, again.rolled_back) == (ExperimentState.RUNNING, {"b": "drift"})
    assert again.roll_back("lava", "errors")
    assert (again.state, again.reason) == (ExperimentState.ABORTED, "errors")


def test_a_restart_goes_on_where_it_was(clock):
    life = begin(clock)
    clock.now += 100
    saved = life.saved()
    later = Clock()
    later.now = 5.0  # the machine has started again as well
    again = begin(later, saved)
    assert (again.elapsed, again.coverage) == (100, 0.1)
    assert again.log[:1] == life.log
    other = replace(EXPERIMENT, default="none")
    assert begin(later, saved, other).elapsed == 0


def test_the_log_has_the_coverage_that_applies(clock):
    life = begin(clock)
    clock.now += 10_000
    higher = replace(EXPERIMENT, coverage=0.5)
    assert (life.covered_by(higher), life.covered_by(replace(higher, default="none"))) == (1, 0.5)
    life.replace(higher)
    assert life.log[-1]["what"] == "changed by file: coverage, which a step keeps at 100 %"
    life.replace(replace(EXPERIMENT, coverage=0.5, steps=()))
    assert life.log[-1]["what"] == "changed by file: steps, coverage 100 % -> 50 %"
    life.replace(replace(EXPERIMENT, coverage=0.2, steps=()))
    assert life.log[-1]["what"] == "changed by file: coverage 50 % -> 20 %"


def test_disabled_in_its_file(clock):
    life = begin(clock)
    clock.now += 10
    life.replace(replace(EXPERIMENT, enabled=False))
    clock.now += 500
    assert (life.state, life.elapsed) == (ExperimentState.DISABLED, 10)
    assert life.assign("key", 0).arm is None
    life.replace(EXPERIMENT)
    assert (life.state, life.elapsed) == (ExperimentState.RUNNING, 10)
    assert life.log[-1]["what"] == "changed by file: enabled"


@pytest.mark.parametrize(
    "change",
    [
        {"format": 9},
        {"latched": 3},
        {"latched": {EXPERIMENT.revision: {"state": "aborted"}}},
        {"latched": {EXPERIMENT.revision: {"state": "gone", "rolled_back": {}}}},
        {"latched": {EXPERIMENT.revision: {"state": None, "rolled_back": {"other": "why"}}}},
        {"latched": {EXPERIMENT.revision: {"state": "promoted", "arm": "x", "rolled_back": {}}}},
        {"elapsed": "x"},
        {"elapsed": float("nan")},
        {"elapsed": float("inf")},
        {"log": [{"time": "t"}]},
        {"log": None},
    ],
)
def test_a_broken_state_is_refused(clock, change):
    with pytest.raises(ValueError, match=r"format|lacks|names arm"):
        begin(clock, {**begin(clock).saved(), **change})


def test_the_file_is_whole_or_as_it_was(tmp_path, monkeypatch, clock):
    path = tmp_path / "state.json"
    assert state_file.load(path) is None
    saved = begin(clock).saved()
    state_file.save(path, saved)
    assert state_file.load(path) == saved

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_file.os, "fsync", full)
    with pytest.raises(StateFileError, match=r"cannot be written: .*No space left"):
        state_file.save(path, {"experiment": "trial"})
    assert state_file.load(path) == saved
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[]", "not the state"), ("{}", "not the state"), (b"\xff", "be read")],
)
def test_a_file_of_something_else(tmp_path, text, message):
    path = tmp_path / "state.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(StateFileError, match=message):
        state_file.load(path)
