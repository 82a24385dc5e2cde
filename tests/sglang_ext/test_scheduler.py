"""Whole lives of requests in a real scheduler, checked after every step.

Every scenario runs with SGLang's strict memory check (available + evictable + protected + session +
uncached + private == total at every step), with its check that no row points at a free slot, and
with the store's own integrity check.
"""

from functools import partial

import pytest
from kvpolicy.sglang_ext.face.asked import NO_ROOM

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def run(scenario):
    """Runs a scenario of scenarios.py."""
    return partial(scenario, "scenarios.py")


@pytest.fixture(scope="module")
def chosen(run):
    """Results for prompts that are prefilled in one pass."""
    return run("choices")


def test_kept_entries_are_the_interpreters(chosen):
    assert len(chosen) == 24
    assert {rid: each["differ"] for rid, each in chosen.items()} == dict.fromkeys(chosen, 0)
    for rid, each in chosen.items():
        if each["facts"].get("uncompressed"):
            continue
        assert each["facts"]["entries_kept"] == each["entries"], rid
        assert each["entries"] < each["facts"]["entries_before"], rid
        assert each["facts"]["slots_freed"] > 0, rid
    compressed = {rid.split()[0] for rid, e in chosen.items() if "entries_kept" in e["facts"]}
    assert compressed == {rid.split()[0] for rid in chosen}


def test_a_prefix_hit_keeps_the_same_entries(chosen):
    for rid, each in chosen.items():
        if rid.endswith(" again"):
            first = chosen[rid.removesuffix(" again")]
            assert (each["kept"], each["tokens"]) == (first["kept"], first["tokens"]), rid
            assert (first["cached"], each["cached"] > 80) == (0, True), rid


@pytest.mark.thorough
def test_chunked_prefill_keeps_the_same_entries(chosen, run):
    # 50 does not divide the prompts: observation windows lie across chunks.
    for size in (64, 50):
        chunked = run("choices", chunked_prefill_size=size)
        for rid, each in chosen.items():
            assert chunked[rid]["differ"] == 0, rid
            assert chunked[rid]["kept"] == each["kept"], (size, rid)
            assert chunked[rid]["tokens"] == each["tokens"], (size, rid)


RETRACT = {"SGLANG_TEST_RETRACT": "1"}
NO_RADIX = {"disable_radix_cache": True, "disable_overlap_schedule": True}
NO_RADIX["mem_fraction_static"] = 0.5


@pytest.mark.thorough(besides=["retracted-paged-chunks"])
@pytest.mark.parametrize(
    ("env", "flags"),
    [
        ({}, {"max_total_tokens": 700}),
        (RETRACT, {"max_total_tokens": 1200, "chunked_prefill_size": 64, "page_size": 16}),
        (RETRACT, {"chunked_prefill_size": -1, **NO_RADIX}),
    ],
    ids=["small-pool", "retracted-paged-chunks", "retracted-no-radix"],
)
def test_answers_do_not_depend_on_what_else_happens(run, env, flags):
    seen = run("mixed", env, count=40, seed=5 + len(flags), **flags)
    assert seen["different"] == []
    assert (seen["used"], seen["private"], seen["missing_after_flush"]) == (0, 0, 0)
    assert seen["compressed"] >= 5
    assert seen["in_full"] >= 3
    assert seen["aborted"] >= 1
    assert (seen["retractions"] > 0) == bool(env)


def test_others_hit_the_prompt_of_a_request_that_decodes_compressed(run):
    seen = run("prefix")
    assert seen["private"] == 48
    assert (seen["protected"], seen["evictable"]) == (0, 256)
    assert seen["first_still_decoding"]
    assert seen["cached_same"] == 256 - 16  # all but the observation window
    assert seen["cached_longer"] == 256
    assert seen["cached_plain"] == 256
    assert seen["cached_next"] == 256


@pytest.mark.thorough
@pytest.mark.parametrize("flags", [{}, {"chunked_prefill_size": 64}], ids=["whole", "chunks"])
def test_a_copy_takes_its_prompts_place_in_a_pool_that_holds_no_more(run, flags):
    seen = run("tight", **flags)
    assert seen["compressed"] == 6  # prompt, copy and output together do not fit
    assert seen["different"] == []
    assert seen["longer prompt"]  # they do not wait for their own prefix to leave
    assert seen["same prompt, long output"]
    assert (seen["used"], seen["private"], seen["missing_after_flush"]) == (0, 0, 0)


@pytest.mark.thorough(besides=["retracted-paged-chunks"])
@pytest.mark.parametrize(
    ("env", "flags"),
    [
        (RETRACT, {"chunked_prefill_size": 32, "page_size": 4}),
        ({}, {"disable_overlap_schedule": True, "disable_radix_cache": True}),
    ],
    ids=["retracted-paged-chunks", "no-radix"],
)
def test_a_prompt_is_compacted_within_its_slots_where_there_is_no_room_for_a_copy(run, env, flags):
    seen = run("within", env, **flags)
    assert seen["different"] == []
    assert seen["compressed"] == 10  # two have one token only
    assert seen["moved"] >= 3
    assert seen["moved alone"] == (10 if "disable_radix_cache" in flags else 0)
    assert seen["at once"] >= 4
    assert (seen["retractions"] > 0) == bool(env)
    assert (seen["used"], seen["private"], seen["missing_after_flush"]) == (0, 0, 0)


def test_a_prompt_in_chunks_waits_for_room(run):
    """Without the plugin, SGLang would continue without slots, and its server would end."""
    loose = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0"}  # slots are taken behind its back
    seen = run("starved", loose, chunked_prefill_size=64, max_total_tokens=500)
    assert 64 < seen["seen"][-1] < 64 + 24
    assert seen["seen"][-1] == seen["seen"][-2]
    assert seen["tokens"]["long"] == seen["tokens"]["alone"]
    assert len(seen["tokens"]["runs"]) == 40
    assert (seen["used"], seen["private"], seen["missing_after_flush"]) == (0, 0, 0)


def test_a_session_keeps_its_prompts_in_the_radix_cache(run):
    seen = run("sessions", enable_session_radix_cache=True, max_total_tokens=800)
    assert (seen["none"], seen["snapkv"]) == (200, 200)
    assert (seen["used"], seen["private"], seen["missing_after_flush"]) == (0, 0, 0)


@pytest.mark.thorough
def test_many_more_requests_decode_at_once(run):
    seen = run("capacity")  # at 12.5 % kept
    assert seen["none"] == 3
    assert seen["sinks-recent"] >= 4 * seen["none"]
    assert seen["freed_share"] >= 0.98


@pytest.mark.parametrize("page", [1, 8])
def test_internal_requests_leave_the_order_of_eviction(run, page):
    """A shadow's hit does not make entries recent; a client's hit does."""
    seen = run("evicted", page_size=page)
    whole, part = 100 // page * page, 59 // page * page
    assert seen["client: found"] == seen["shadow: found"] == whole
    assert seen["shadow of a part: found"] == part
    assert seen["client: older"] == seen["shadow: newer"] == whole
    assert seen["shadow of a part: newer"] == whole
    for rid in ("client: newer", "shadow: older", "shadow of a part: older"):
        assert seen[rid] < whole, rid
    # In a full pool it has what is set aside, and nobody's prompt leaves for it.
    assert seen["dense"] == 400
    for length in (60, 100):
        assert seen[f"{length} new"]["type"] == "length", length
    assert (seen["150 new"]["type"], seen["150 new"]["message"]) == ("abort", NO_ROOM)
    assert seen["said"] == []
    assert seen["still found"] == 340 // page * page
    assert seen["lent"] == [0, (-(-100 // page) + 1) * page]  # at the end, and at most
    assert (seen["used"], seen["private"], seen["missing_after_flush"]) == (0, 0, 0)


def test_the_urgent_go_first_and_internal_requests_last(run):
    """An urgent prompt has others retracted whether its copy has room or not, once for each."""
    seen = run("preempts")
    for name in ("short", "long", "no room for a copy"):
        assert seen[name] == [False, 1], name
    assert seen["internal"] == [True, 0]
    assert (seen["used"], seen["private"], seen["missing_after_flush"]) == (0, 0, 0)
