"""Layers stored in pairs, served by a real scheduler under SGLang's strict memory check."""

from functools import partial

import pytest

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def run(scenario):
    """Runs a scenario of scenarios_share.py."""
    return partial(scenario, "scenarios_share.py")


@pytest.fixture(scope="module")
def seen(run):
    """Results for prompts prefilled in one pass, and again with a prefix hit."""
    return run("answers")


LONG = ("300", "131", "40")


def test_answers_are_those_of_an_eager_model(seen):
    for rid in LONG:
        assert seen[rid]["tokens"] == seen[rid]["eager"], rid
        assert seen[rid]["tokens"] != seen[rid]["full"], rid
        assert seen[rid]["excepted"] > 0, rid


def test_a_prefix_hit_gives_the_same_answer(seen):
    for rid in LONG:
        assert seen[f"{rid} again"]["tokens"] == seen[rid]["tokens"], rid
        assert (seen[rid]["cached"], seen[f"{rid} again"]["cached"]) == (0, int(rid) - 1)


def test_less_memory_is_held(seen):
    """Two pairs of two layers: half of the entries, and codes of 32 tokens per row of a head."""
    for rid in LONG:
        prompt, facts = int(rid), seen[rid]["facts"]
        slots = seen[rid]["held"]
        codes = 2 * -(-prompt // 32)
        least = prompt / 2 + codes / 2
        assert least <= slots <= least + seen[rid]["excepted"] + 3, rid
        assert facts["slots_freed"] == prompt - slots > 0.4 * prompt, rid
        assert facts["kv_bytes_after"] == slots * seen[rid]["slot_bytes"], rid
        assert facts["entries_kept"] == facts["entries_before"] == 4 * 2 * prompt, rid


def test_where_nothing_is_saved_the_prompt_stays(seen):
    assert seen["2"]["facts"]["uncompressed"] == "nothing_saved"
    assert seen["2"]["tokens"] == seen["2"]["full"]
    assert seen["2"]["held"] == 0


@pytest.mark.thorough
def test_chunked_prefill_gives_the_same_answers(seen, run):
    chunked = run("answers", chunked_prefill_size=50)
    for rid, each in seen.items():
        assert chunked[rid]["tokens"] == each["tokens"], rid
        assert chunked[rid]["held"] == each["held"], rid


RETRACT = {"SGLANG_TEST_RETRACT": "1"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("env", "flags"),
    [
        ({}, {"max_total_tokens": 1104, "page_size": 16, "disable_overlap_schedule": True}),
        (RETRACT, {"max_total_tokens": 1200, "chunked_prefill_size": 64}),
    ],
    ids=["small-paged-pool", "retracted-chunks"],
)
def test_answers_do_not_depend_on_what_else_happens(run, env, flags):
    """Beside plain, SnapKV and TOVA requests, with aborts; nothing is lost at the end."""
    mixed = run("mixed", env, count=30, seed=len(flags), **flags)
    assert mixed["different"] == []
    assert (mixed["used"], mixed["private"], mixed["missing_after_flush"]) == (0, 0, 0)
    assert mixed["compressed"] >= 5
    assert mixed["aborted"] >= 1
    assert (mixed["retractions"] > 0) == bool(env)
