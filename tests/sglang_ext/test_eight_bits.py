"""A cache of 8 bits in a real scheduler: the interpreter's choice of what its entries stand for."""

from functools import partial

import pytest

pytestmark = pytest.mark.server
STORED = pytest.mark.parametrize("stored", ["fp8_e4m3", "fp8_e5m2"])
RETRACT = {"SGLANG_TEST_RETRACT": "1"}


@pytest.fixture(scope="module")
def run(scenario):
    """Runs a scenario of scenarios.py."""
    return partial(scenario, "scenarios.py")


@STORED
def test_kept_entries_are_the_interpreters(run, stored):
    chosen = run("choices", kv_cache_dtype=stored)
    assert len(chosen) == 24
    assert {rid: each["differ"] for rid, each in chosen.items()} == dict.fromkeys(chosen, 0)
    for rid, each in chosen.items():
        if rid.endswith(" again"):
            first = chosen[rid.removesuffix(" again")]
            assert (each["kept"], each["tokens"]) == (first["kept"], first["tokens"]), rid
            assert (first["cached"], each["cached"] > 80) == (0, True), rid
    compressed = {rid.split()[0] for rid, e in chosen.items() if "entries_kept" in e["facts"]}
    assert compressed == {rid.split()[0] for rid in chosen}


@STORED
def test_answers_do_not_depend_on_what_else_happens(run, stored):
    flags = {"max_total_tokens": 1200, "chunked_prefill_size": 64, "page_size": 16}
    seen = run("mixed", RETRACT, count=40, seed=8, kv_cache_dtype=stored, **flags)
    assert seen["different"] == []
    assert (seen["used"], seen["private"], seen["missing_after_flush"]) == (0, 0, 0)
    assert seen["compressed"] >= 5
    assert seen["aborted"] >= 1
    assert seen["retractions"] > 0
