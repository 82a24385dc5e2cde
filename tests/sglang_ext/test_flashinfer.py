"""FlashInfer reads private pages in a real scheduler, with torch in place of its kernels.

SGLang's own backend plans and reads tails; scenarios_flashinfer.py runs both readers eagerly, and
captured and replayed as by SGLang's graph runner.
"""

import pytest

POLICIES = {"snapkv": ["capacity=48", "window=16"], "h2o": ["heavy=20", "window=20"]}
ENV = {"TRITON_INTERPRET": "1", "SGLANG_KV_POLICY_FOLD_INTERVAL": "4"}
LAYERS = 4


@pytest.fixture(scope="module")
def served(scenario):
    def run(attention, **flags):
        env = {**ENV, "SGLANG_KV_POLICY_ATTENTION": attention}
        more = {"policies": POLICIES, "lengths": [90, 60, 75], "output": 9, **flags}
        found = scenario("scenarios_flashinfer.py", "answers", env, **more)
        assert (found["used"], found["private"], found["missing_after_flush"]) == (0, 0, 0)
        return found

    return run


@pytest.fixture(scope="module")
def by_triton(served):
    return served("triton")


@pytest.mark.server
def test_sglangs_plans_are_of_tails_whoever_reads(by_triton):
    for each in by_triton["policies"].values():
        assert {(step["private"], *step["ghosts"]) for step in each["steps"]} == {(0, 0)}


@pytest.mark.server
@pytest.mark.parametrize("graphs", [False, True])
def test_answers_are_those_by_triton(served, by_triton, graphs):
    found = served("flashinfer", graphs=graphs)
    steps = 0
    for name, wanted in by_triton["policies"].items():
        each = found["policies"][name]
        assert each["tokens"] == wanted["tokens"]
        assert each["answers"] == wanted["answers"]
        assert len(each["answers"]) == 3
        assert {(step["tails"], *step["ghosts"]) for step in each["steps"]} == {(1, 0)}
        # Lists are planned where they, or whose they are, are others than at the step before: in
        # graphs once for all layers, which are equally long.
        versions = [step["versions"] for step in each["steps"]]
        changed = [now != before for before, now in zip([None, *versions], versions, strict=False)]
        planned = [step["private"] for step in each["steps"]]
        assert planned == [(1 if graphs else LAYERS) * change for change in changed]
        assert 1 < sum(changed) < len(changed)
        steps += len(changed)
    assert found["replays"] == ({"replayed": steps, "others": 0} if graphs else {})


@pytest.mark.thorough
@pytest.mark.server
def test_no_plan_is_made_where_all_tokens_wait(served):
    """Before a prompt's last chunk no row goes deeper, and FlashInfer cannot plan for 0 rows."""
    policies = {"fastkv": ["tsp_layer=1"], "gemfilter": ["filter=1", "capacity=40"]}
    whole = served("triton", policies=policies)
    found = served("triton", policies=policies, chunked_prefill_size=32)
    for name in policies:
        each = found["policies"][name]
        assert each["tokens"] == whole["policies"][name]["tokens"]
        assert len(each["answers"]) == 3
        for _, facts in each["answers"]:
            assert facts["propagated_tokens"] < facts["prompt_tokens"]
            assert "uncompressed" not in facts
