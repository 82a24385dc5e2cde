"""Attention backends beside torch_native: the same answers, graphs, and a host that never waits.

Without a GPU these are SGLang's Triton backend and the project's kernels in Triton's interpreter,
in a real scheduler. Graphs are not captured; the arguments that SGLang's graphs would get are
noted.
"""

from functools import partial

import pytest

pytestmark = pytest.mark.server

ENVIRONMENT = {"TRITON_INTERPRET": "1", "SGLANG_KV_POLICY_FOLD_INTERVAL": "2"}
TRITON = {"attention_backend": "triton", "triton_attention_num_kv_splits": 1}
SPLIT = {
    "prefill_attention_backend": "torch_native",
    "decode_attention_backend": "triton",
    "triton_attention_num_kv_splits": 1,
}
MIXED = {"chunked_prefill_size": 16, "enable_mixed_chunk": True}
NOTHING_LEFT = {"used": 0, "private": 0, "missing_after_flush": 0}
# Three float32 implementations of four layers: logits of about 10 differ by rounding only.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def run(scenario):
    """Runs a scenario of scenarios_backends.py."""
    return partial(scenario, "scenarios_backends.py", env=ENVIRONMENT)


@pytest.fixture(scope="module")
def steps(run):
    """Decode forwards of five batches, with different backends for prefills and decode steps."""
    return run("steps", **SPLIT)


def of(steps, batch):
    """Notes of one batch's steps, in order."""
    return [each for each in steps["steps"] if each["requests"][0].startswith(f"{batch} ")]


# A retracted request computes its output again, in prefills over what it had kept.
RETRACT = ENVIRONMENT | {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "9"}


@pytest.fixture(scope="module")
def reference(run):
    found = run("answers", env=RETRACT)
    assert {key: found[key] for key in NOTHING_LEFT} == NOTHING_LEFT
    return found


@pytest.mark.thorough(besides=["mixed"])
@pytest.mark.parametrize("flags", [{}, MIXED], ids=["apart", "mixed"])
def test_answers_are_those_of_torch_native(run, reference, flags):
    found = run("answers", env=RETRACT, **TRITON, **flags)
    assert {key: found[key] for key in NOTHING_LEFT} == NOTHING_LEFT
    assert (found["mixed"] > 5) == bool(flags)
    answers = found["requests"]
    assert answers.keys() == reference["requests"].keys()
    for rid, wanted in reference["requests"].items():
        answer = answers[rid]
        assert answer["tokens"] == wanted["tokens"], rid
        assert answer["cached_tokens"] == wanted["cached_tokens"], rid
        more = answer["logits"].keys() - wanted["logits"].keys()  # ends of chunks
        assert flags or not more, rid
        for length, logits in wanted["logits"].items():
            assert answer["logits"][length] == pytest.approx(logits, abs=TOLERANCE), (rid, length)
    for rid in ("snapkv", "adakv", "streamingllm", "h2o", "minicache", "hit"):
        assert answers[rid]["facts"]["slots_freed"] > 0, rid
    assert flags or answers["snapkv"]["retractions"] > 0  # SGLang retracts at pure decode steps
    for rid in ("streamingllm", "h2o"):
        assert answers[rid]["facts"]["entries_dropped_in_decode"] > 0, rid
    assert answers["hit"]["cached_tokens"] == answers["plain hit"]["cached_tokens"] == 40


def test_the_host_waits_only_where_entries_leave(steps):
    for batch in ("none+none", "none+snapkv+adakv", "minicache+none"):
        assert [each["waits"] for each in of(steps, batch)] == [[], [], []], batch
    for batch in ("none+streamingllm", "h2o+snapkv"):
        first, fold, after = of(steps, batch)
        assert (first["waits"], after["waits"]) == ([], [])
        assert fold["waits"]  # where there are some, they are found


def test_batches_replay_the_stock_graph_or_the_one_that_reads_tables(steps):
    told = {
        batch: [(each["graph"], each["reads_end"], each["replays"]) for each in of(steps, batch)]
        for batch in (
            "none+none",
            "none+snapkv+adakv",
            "none+streamingllm",
            "h2o+snapkv",
            "minicache+none",
        )
    }
    plain = ("kv_policy_plain", "IN_REPLAY", True)
    compressed = ("kv_policy_compressed", "POST_REPLAY", True)
    assert told == {
        "none+none": [plain] * 3,
        "none+snapkv+adakv": [compressed] * 3,
        "none+streamingllm": [compressed] * 3,
        "h2o+snapkv": [compressed] * 3,
        "minicache+none": [compressed] * 3,
    }


def test_what_is_captured_computes_the_same_with_padding(steps):
    replayed = [each for each in steps["steps"] if each["replays"]]
    compressed = [each for each in replayed if each["graph"] == "kv_policy_compressed"]
    assert len(compressed) == 12
    assert [each["captured_error"] for each in compressed] == [pytest.approx(0, abs=1e-6)] * 12


def test_slots_change_hands_on_the_schedulers_stream(steps):
    slots = steps["slots"]
    assert slots["elsewhere"] == 0
    assert slots["in_forwards"] > 0
    assert slots["changes"] > slots["in_forwards"]
    assert {key: steps[key] for key in NOTHING_LEFT} == NOTHING_LEFT
