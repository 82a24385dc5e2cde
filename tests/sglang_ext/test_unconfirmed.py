"""Prompts that are compressed before the device has returned how many entries stay."""

from functools import partial

import pytest

pytestmark = pytest.mark.server

POLICIES = {
    "snapkv": ["capacity=48", "window=16"],
    "pyramidkv": ["capacity=48"],
    "tova": ["capacity=40"],  # goes on from the first decode step on
    "h2o": ["heavy=20", "window=20"],  # the same; its KV heads keep different positions
}
NOTHING_LEFT = {"used": 0, "private": 0, "missing_after_flush": 0}


@pytest.fixture(scope="module")
def run(scenario):
    """Runs a scenario of scenarios_unconfirmed.py."""
    return partial(
        scenario, "scenarios_unconfirmed.py", env={"SGLANG_KV_POLICY_FOLD_INTERVAL": "1"}
    )


@pytest.fixture(scope="module", params=[False, True], ids=["overlap", "one after the other"])
def disabled(request):
    """Whether SGLang processes a result before the next forward."""
    return request.param


@pytest.fixture(scope="module")
def seen(run, disabled):
    """Sound prompts beside prompts for which the model's tensors are not finite."""
    return run("outcomes", policies=POLICIES, disable_overlap_schedule=disabled)


@pytest.mark.thorough(besides=["overlap"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_poisoned_request_goes_on_in_full_and_others_do_not_notice(seen, policy):
    answers = seen[policy]["answers"]
    for i in (0, 1):
        (alone, facts), (sound, beside) = answers[f"alone {i}"], answers[f"sound {i}"]
        assert sound == alone
        assert "uncompressed" not in facts.keys() | beside.keys()
        assert facts["entries_kept"] == beside["entries_kept"] < facts["entries_before"]
        tokens, facts = answers[f"poisoned {i}"]
        assert len(tokens) == len(alone)
        assert facts["uncompressed"] == "not_finite"
        assert ("entries_kept" in facts) == (policy != "h2o")  # it was told before it was known
    assert seen["left"] == NOTHING_LEFT


@pytest.mark.parametrize("policy", POLICIES)
def test_the_next_forward_does_not_wait_for_numbers(seen, disabled, policy):
    told = ["sound: True to True", "poisoned: True to False"] * 2
    if policy == "h2o":  # it has waited for them
        told = []
    first = ["extend", *told, "decode"] if disabled else ["extend", "decode", *told]
    assert seen[policy]["events"] == [*first, *["decode"] * 4]


@pytest.mark.thorough(besides=["overlap"])
def test_nor_does_it_where_a_prompt_comes_in_chunks(run, disabled):
    """While a chunk's result is processed, the forward of the last chunk runs."""
    seen = run("chunks", chunked_prefill_size=128, disable_overlap_schedule=disabled)
    told = ["long: True to True"]
    first = [*told, "decode"] if disabled else ["decode", *told]
    assert seen["events"] == ["extend", "extend", *first, "decode", "decode"]
    assert seen["left"] == NOTHING_LEFT


def test_what_was_misjudged_fails_for_its_request_alone(run):
    found = run("misjudged")
    (before, _), (_, facts), (after, _) = found["answers"].values()
    assert before == after
    assert facts["uncompressed"] == "policy_error"
    (said,) = found["said"]
    lists = "[48, 48, 48, 48, 48, 48, 48, 48]"
    assert said.startswith(
        "KV-cache policy snapkv failed at compaction: RuntimeError: request misjudged: lists keep "
        f"{lists} entries, and there is room for {lists.replace('8', '9')}"
    )
    assert found["left"] == NOTHING_LEFT


def test_a_request_may_be_aborted_before_its_numbers_are_read(run):
    found = run("aborted")
    answers = found["answers"]
    assert len(answers["1"]) < len(answers["1 again"])
    for i in (0, 2):
        assert answers[f"{i}"] == answers[f"{i} again"]
    assert found["left"] == NOTHING_LEFT
