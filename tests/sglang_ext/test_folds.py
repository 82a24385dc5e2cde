"""Policies with `decode:` in a real scheduler.

SGLang's checks and the store's run after every step (see test_scheduler.py), and free slots hold
NaN, so that reading one would show in the answers.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))

pytestmark = pytest.mark.server
CLEAN = {"used": 0, "private": 0, "missing_after_flush": 0}
FLAGS = {
    1: {},
    4: {"disable_overlap_schedule": True, "page_size": 16, "chunked_prefill_size": 16},
}


@pytest.fixture(scope="module")
def run(scenario):
    def run(name, interval, env=None, **flags):
        interval = {"SGLANG_KV_POLICY_FOLD_INTERVAL": str(interval)}
        return scenario("scenarios_folds.py", name, {**interval, **(env or {})}, **flags)

    return run


@pytest.mark.thorough
@pytest.mark.parametrize("interval", FLAGS)
def test_answers_and_kept_entries_are_the_eager_models(model, run, interval):
    from eager import generate
    from scenarios_folds import POLICIES, ROOT

    # Prompts of `pyramidinfer` are prefilled in one piece.
    chunked = "chunked_prefill_size" in FLAGS[interval]
    names = [name for name in POLICIES if not (chunked and name == "pyramidinfer")]
    seen = run("alone", interval, names=names, **FLAGS[interval])
    requests = seen.pop("requests")
    assert seen == CLEAN
    assert {each["policy"] for each in requests.values()} == set(names)
    for rid, each in requests.items():
        wanted = generate(
            model,
            each["prompt"],
            str(ROOT / "policies" / f"{each['policy']}.yaml"),
            dict(setting.split("=") for setting in POLICIES[each["policy"]]),
            new_tokens=len(each["tokens"]),
            fold_interval=interval,
        )
        assert each["tokens"] == wanted.tokens, rid
        assert len(each["kept"]) == len(each["tokens"]) - 1, rid
        for step, kept in each["kept"].items():
            assert kept == wanted.kept[int(step)], (rid, step)
        # Everything that came in, less what is left, has left; a fold lets at least one leave.
        facts, last = each["facts"], each["kept"][str(len(each["kept"]))]
        left = sum(len(head) for layer in wanted.kept[0] for head in layer) - sum(
            len(head) for layer in last for head in layer
        )
        lists = sum(len(layer) for layer in last)
        assert facts["entries_dropped_in_decode"] == left + lists * len(each["kept"]), rid
        assert (facts["folds"] > 0) == (facts["entries_dropped_in_decode"] > 0), rid
    folded = {each["policy"] for each in requests.values() if each["facts"]["folds"]}
    assert folded == set(names)


RETRACT = {"SGLANG_TEST_RETRACT": "1"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("interval", "count", "env", "flags"),
    [
        (1, 20, {}, {"max_total_tokens": 220}),
        (3, 20, RETRACT, {"chunked_prefill_size": 32, "page_size": 16}),
        (2, 20, RETRACT, {"disable_radix_cache": True, "disable_overlap_schedule": True}),
        (3, 12, RETRACT, {"chunked_prefill_size": 24, "enable_mixed_chunk": True}),
    ],
    ids=["small-pool", "retracted-paged", "no-radix", "mixed-chunks"],
)
def test_answers_do_not_depend_on_what_else_happens(run, interval, count, env, flags):
    from scenarios_folds import POLICIES

    # What `pyramidinfer` keeps depends on the prefix that it finds in the radix cache.
    names = [name for name in POLICIES if name != "pyramidinfer"]
    seen = run("mixed", interval, env, count=count, seed=interval, names=names, **flags)
    assert {name: seen[name] for name in CLEAN} == CLEAN
    assert seen["different"] == []
    assert seen["facts"] == []
    assert seen["folds"] > 20
    assert seen["cut"] >= 2
    assert seen["aborted"] >= 1
    assert seen["skipped"] <= 4  # SGLang 0.5.22 admits more at once
    assert (seen["mixed"] > 50) == ("enable_mixed_chunk" in flags)
    assert (seen["retractions"] > 5) == bool(env)


def test_slots_of_the_radix_cache_are_not_written(run):
    seen = run("shared", 2)
    assert {name: seen.pop(name) for name in CLEAN} == CLEAN
    for policy, each in seen.items():
        assert each["tree"], policy
        assert each["private"] > 0, policy
        assert not each["locked"], policy
        assert each["cached"] == 60, policy
        assert each["plain"], policy
        assert each["same"], policy


@pytest.mark.thorough
def test_long_generations_stay_small_and_run_together(run):
    seen = run("long", 4)
    assert {name: seen[name] for name in CLEAN} == CLEAN
    assert len(seen["requests"]) == 3
    for policy, each in seen["requests"].items():
        assert each["tokens"] == 120, policy
        assert each["most"] <= each["first"] <= 32, policy
        assert each["folds"] == 29, policy
        assert each["dropped"] == 4 * 2 * 4 * 29, policy  # layers, KV heads, tokens, folds
    assert seen["together"] == 3  # as if nothing left, there is room for one
    assert seen["same"] == list(seen["requests"])
    assert seen["retractions"] == 0


def test_a_fold_without_slots_is_skipped(run):
    seen = run("tight", 2)
    assert {name: seen[name] for name in CLEAN} == CLEAN
    assert seen["skipped"] >= 3
    assert seen["folds"] >= 3
    assert (seen["tokens"], seen["retractions"]) == (40, 0)
