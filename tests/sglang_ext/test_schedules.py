"""SGLang's ways to order its queue, to let prefills wait and to evict: answers are as alone.

Checked after every step, as in test_scheduler.py.
"""

from importlib.metadata import version

import pytest

pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(version("sglang") == "0.5.22", reason="tried with 0.5.23 only"),
]
RETRACT = {"SGLANG_TEST_RETRACT": "1"}
KINDS = {
    "once": ("scenarios.py", {}),
    "folds": ("scenarios_folds.py", {"names": ["h2o", "d2o", "streamingllm", "cake"]}),
    "propagating": (
        "scenarios_propagate.py",
        {
            "policies": {
                "fastkv": ["tsp_layer=1"],
                "gemfilter": ["filter=1", "capacity=40"],
                "asl": ["capacity=40", "lookback=2", "window=8", "tau=1.5", "start=1"],
            }
        },
    ),
}
SCHEDULES = {
    "urgent": (
        {},
        {
            "enable_priority_scheduling": True,
            "priority_scheduling_preemption_threshold": 5,
            "retraction_policy": "priority",
            "max_running_requests": 3,
        },
    ),
    "shortest": (
        RETRACT,
        {
            "schedule_policy": "shortest-prefill-first",
            "chunked_prefill_size": 64,
            "page_size": 4,
        },
    ),
    "prefixes": (
        {},
        {"schedule_policy": "lpm", "radix_eviction_policy": "lfu", "max_total_tokens": 900},
    ),
    "waits": (
        {},
        {
            "enable_prefill_delayer": True,
            "prefill_decode_interval": 4,
            "prefill_max_requests": 2,
            "chunked_prefill_size": 48,
        },
    ),
}


@pytest.mark.thorough(besides=["once-shortest", "folds-urgent", "propagating-waits"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_do_not_depend_on_who_goes_first(scenario, kind, schedule):
    (file, policies), (env, flags) = KINDS[kind], SCHEDULES[schedule]
    env = {"SGLANG_KV_POLICY_FOLD_INTERVAL": "4", **env}
    seen = scenario(file, "mixed", env, count=24, seed=3, **policies, **flags)
    assert seen["different"] == []
    assert (seen["used"], seen["private"], seen["missing_after_flush"]) == (0, 0, 0)
    assert seen[{"once": "compressed", "folds": "folds", "propagating": "left"}[kind]] >= 5
    assert seen["aborted"] >= 1
    assert (seen["retractions"] > 0) == (schedule in ("urgent", "shortest"))
