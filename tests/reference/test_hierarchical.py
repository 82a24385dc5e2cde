"""`--enable-hierarchical-cache`: prompts of compressed requests go to the host and come back."""

import pytest

pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")

METHODS = ("adakv", "fastkv", "gemfilter", "h2o", "snapkv", "streamingllm", "d2o", "minicache")
HOST = {"hicache_ratio": 8.0, "hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"}
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "4"}


@pytest.mark.thorough(besides=["write-through"])
@pytest.mark.server
@pytest.mark.parametrize(
    ("environment", "flags"),
    [
        ({}, {"hicache_write_policy": "write_through"}),
        (
            RETRACT,
            {
                "hicache_write_policy": "write_back",
                "page_size": 4,
                "chunked_prefill_size": 16,
                "disable_overlap_schedule": True,
            },
        ),
    ],
    ids=["write-through", "write-back-retracted"],
)
def test_what_comes_back_is_what_went(serve, random_model, environment, flags):
    from comparison import compare

    environment = {"SGLANG_KV_POLICY_FOLD_INTERVAL": "1", **environment}
    flags = {**HOST, **flags, "max_total_tokens": 480, "methods": METHODS}
    seen = serve(random_model, environment, "hierarchical.py", each=1, pause=4, **flags)
    different, ties, changed = compare(random_model, seen["answers"], 1)
    assert different == []
    assert ties <= 1
    assert len(changed - {"none"}) >= 6
    assert seen["saved"] > 300
    assert seen["loaded"] > 100
    assert (seen["private"], seen["changed"]) == (0, 0)
    assert seen["waits"] > 3
    assert seen["unwaited"] == 0
    assert seen["left"] == [0, 0, 0]
