"""A cache of 8 bits in a real scheduler: choices equal the interpreter's on scaled entries."""

from functools import partial

import pytest
from served_policies import OF_EVERY_CLASS

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


@pytest.mark.thorough
@STORED
def test_kernels_of_triton_answer_as_those_of_torch(scenario, stored):
    """For every class of policies; both round merged and rotated entries to 8 bits."""

    def run(kernels):
        seen = scenario(
            "scenarios_kernels.py",
            "same",
            {
                "SGLANG_KV_POLICY_KERNELS": kernels,
                "TRITON_INTERPRET": "1",
                "SGLANG_KV_POLICY_FOLD_INTERVAL": "4",
            },
            policies=OF_EVERY_CLASS,
            lengths=[90, 61],
            output=7,
            kv_cache_dtype=stored,
        )
        return seen, seen.pop("called"), seen.pop("called at start")

    (by_triton, called, at_start), (by_torch, none, _) = run("triton"), run("torch")
    assert none == {}
    # Kernels generated for a policy are compiled for entries of 8 bits before a request waits.
    generated = {name for name in called if not name.split(".")[0].endswith("_triton")}
    assert generated
    assert generated <= set(at_start)
    assert by_triton == by_torch
    facts = {rid: answer["facts"] for rid, answer in by_torch["answers"].items()}
    assert [rid for rid, each in facts.items() if "uncompressed" in each] == []
    folded = {rid.split()[0] for rid, each in facts.items() if each.get("folds")}
    assert folded == {"h2o", "d2o", "streamingllm", "cam"}


@pytest.mark.thorough
@STORED
def test_answers_do_not_depend_on_what_else_happens(run, stored):
    flags = {"max_total_tokens": 1200, "chunked_prefill_size": 64, "page_size": 16}
    seen = run("mixed", RETRACT, count=40, seed=8, kv_cache_dtype=stored, **flags)
    assert seen["different"] == []
    assert (seen["used"], seen["private"], seen["missing_after_flush"]) == (0, 0, 0)
    assert seen["compressed"] >= 5
    assert seen["aborted"] >= 1
    assert seen["retractions"] > 0
