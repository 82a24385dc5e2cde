"""Every method, served in one scheduler with all others, answers as the plain model does alone."""

import pytest
from kvpolicy.dsl.syntax.library import shipped

pytestmark = pytest.mark.server


def test_every_shipped_policy_is_among_them():
    from methods import METHODS

    assert sorted(METHODS) == sorted(shipped())


@pytest.mark.thorough(besides=["1"])
@pytest.mark.parametrize("each", [1, 2])
def test_batches_that_mix_all_methods(serve, random_model, each):
    # One entry leaves for each that comes, as in the papers. Prompts share prefixes.
    from comparison import compare
    from methods import METHODS

    environment = {"SGLANG_KV_POLICY_FOLD_INTERVAL": "1"}
    seen = serve(random_model, environment, methods=sorted(METHODS), each=each, pause=2)
    different, ties, changed = compare(random_model, seen["answers"], 1)
    assert different == []
    assert ties <= 2
    assert changed == {each["policy"] for each in seen["answers"]} - {"none"}
    assert seen["left"] == [0, 0, 0]
    assert seen["aborted"] >= 4 * each
    assert sum(answer["cached"] > 0 for answer in seen["answers"]) >= 7 * each
    reasons = {each["facts"].get("uncompressed") for each in seen["answers"]}
    assert reasons <= {None, "decode_only"}


@pytest.mark.thorough
def test_chunks_and_retractions(serve, random_model):
    # A chunked prompt is served with full KV if data decide the layer of its propagation.
    # SGLang retracts the newest request at every other step; pauses vary which one that is.
    from comparison import compare
    from methods import METHODS

    environment = {
        "SGLANG_KV_POLICY_FOLD_INTERVAL": "4",
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "2",
    }
    flags = {"max_total_tokens": 1200, "chunked_prefill_size": 48}
    flags |= {"methods": sorted(METHODS), "disable_overlap_schedule": True}
    seen = serve(random_model, environment, each=1, pause=5, **flags)
    different, ties, changed = compare(random_model, seen["answers"], 4)
    assert different == []
    assert ties <= 1
    reasons = [(e["policy"], e["facts"].get("uncompressed")) for e in seen["answers"]]
    in_full = {policy for policy, reason in reasons if reason == "too_long"}
    assert in_full <= {"asl", "asl-lava-d2o", "pyramidinfer"}
    assert changed >= {"fastkv", "gemfilter", "h2o", "tova", "streamingllm", "d2o", "cake", "cam"}
    assert seen["left"] == [0, 0, 0]
    assert sum(each["retractions"] > 0 for each in seen["answers"]) >= 6


RETRACTED = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "2"}
IN_CHUNKS = {"max_total_tokens": 1200, "chunked_prefill_size": 48, "disable_overlap_schedule": True}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "stored", "interval", "environment", "flags"),
    [
        ("fp8_e4m3", "float8_e4m3fn", 1, {}, {"pause": 2}),
        ("fp8_e5m2", "float8_e5m2", 4, RETRACTED, {"pause": 5, **IN_CHUNKS}),
    ],
    ids=["e4m3", "e5m2 in chunks, retracted"],
)
def test_a_cache_of_8_bits(serve, random_model, dtype, stored, interval, environment, flags):
    """Merged and turned entries are rounded to 8 bits, too."""
    import torch
    from comparison import OF_8_BITS, compare
    from methods import METHODS

    environment = {**environment, "SGLANG_KV_POLICY_FOLD_INTERVAL": str(interval)}
    flags = {**flags, "methods": sorted(METHODS), "kv_cache_dtype": dtype}
    seen = serve(random_model, environment, each=1, **flags)
    options = {"tolerance": OF_8_BITS, "stored": getattr(torch, stored)}
    different, ties, changed = compare(random_model, seen["answers"], interval, **options)
    assert different == []
    assert ties <= 5
    assert len(changed) >= 24
    assert seen["left"] == [0, 0, 0]
    assert {each["facts"].get("uncompressed") for each in seen["answers"]} <= {
        None, "decode_only", "too_long",
    }  # fmt: skip
    assert bool(environment.keys() & RETRACTED) == any(x["retractions"] for x in seen["answers"])


SCALES = [(0.37, 1.9), (2.0, 0.5), (1.0, 1.0), (5.3, 0.11), (0.08, 3.0)]


@pytest.mark.thorough
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_entries_of_8_bits_are_read_through_the_scales_of_a_checkpoint(
    serve, random_model, kernels
):  # fmt: skip
    """A policy sees scaled entries; SGLang's prefill reads its own before they are stored."""
    import torch
    from comparison import compare

    methods = ["snapkv", "lava", "h2o", "vatp", "adakv", "tova", "fastkv"]
    environment = {"TRITON_INTERPRET": "1", "SGLANG_KV_POLICY_KERNELS": kernels}
    environment |= {"SGLANG_KV_POLICY_FOLD_INTERVAL": "1"}
    flags = {"attention_backend": "triton", "triton_attention_num_kv_splits": 1}
    seen = serve(
        random_model, environment, each=1, pause=2, methods=methods, scales=SCALES,
        kv_cache_dtype="fp8_e4m3", disable_radix_cache=True, **flags,
    )  # fmt: skip
    # SGLang's own kernel, of batches without compressed requests, rounds queries to 8 bits too.
    answers = [each for each in seen["answers"] if each["policy"] != "none"]
    options = {"stored": torch.float8_e4m3fn, "scales": SCALES, "prefills_as_computed": True}
    different, ties, changed = compare(random_model, answers, 1, tolerance=0.15, **options)
    assert different == []
    assert ties <= 2
    assert changed == set(methods)
    assert seen["left"] == [0, 0, 0]
