"""Every method, served in one scheduler with all others, answers as the plain model does alone."""

import json
import os
import sys
from pathlib import Path

import forked
import pytest
from kvpolicy.dsl.syntax.library import shipped

pytestmark = pytest.mark.server
HERE = Path(__file__).parent
# Sums in float32 may come out in another order: where the best two logits are closer than this a
# server may take the other one, and the rest of the answer is not compared.
TOLERANCE = 1e-3


@pytest.fixture
def serve(random_model, tmp_path):
    """Runs the scenario in a process of its own."""

    def serve(environment: dict[str, str], **flags) -> dict:
        out = tmp_path / "out.json"
        paths = os.pathsep.join([str(HERE), str(HERE.parent / "sglang_ext")])
        command = [sys.executable, "-P", str(HERE / "served.py")]
        done = forked.run(
            [*command, str(out), random_model, json.dumps(flags)],
            timeout=400,
            env={**os.environ, **environment, "PYTHONPATH": paths},
        )
        assert out.exists(), (done.stdout + done.stderr)[-5000:]
        return json.loads(out.read_text())

    return serve


def compare(model: str, answers: list[dict], fold_interval: int) -> tuple[list, int, set[str]]:
    """What differs, how many end in a tie, and the methods whose answers policies changed."""
    from eager import generate
    from methods import METHODS, PROPAGATING

    different, ties, changed = [], 0, set()
    for answer in answers:
        policy, tokens = answer["policy"], answer["tokens"]
        under = policy != "none" and answer["facts"].get("uncompressed") != "too_long"
        if not under or policy not in changed:
            expected = generate(model, answer["prompt"], new_tokens=len(tokens))
            if expected.tokens != tokens:
                changed.add(policy)
        if under:
            expected = generate(
                model,
                answer["prompt"],
                policy,
                METHODS[policy],
                new_tokens=len(tokens),
                fold_interval=fold_interval,
                reused=answer["cached"] if policy in PROPAGATING else 0,
            )
        pairs = enumerate(zip(tokens, expected.tokens, strict=True))
        first = next((i for i, (got, wanted) in pairs if got != wanted), None)
        if first is not None and expected.gap(first) < TOLERANCE:
            ties += 1
        elif first is not None:
            different.append((policy, first, expected.gap(first), answer["facts"]))
    return different, ties, changed


def test_every_shipped_policy_is_among_them():
    from methods import METHODS

    assert sorted(METHODS) == sorted(shipped())


def test_batches_that_mix_all_methods(serve, random_model):
    # One entry leaves for each that comes, as in the papers. Prompts share prefixes.
    seen = serve({"SGLANG_KV_POLICY_FOLD_INTERVAL": "1"}, each=2, pause=2)
    different, ties, changed = compare(random_model, seen["answers"], 1)
    assert different == []
    assert ties <= 2
    assert changed == {each["policy"] for each in seen["answers"]} - {"none"}
    assert seen["left"] == [0, 0, 0]
    assert seen["aborted"] >= 8
    assert sum(each["cached"] > 0 for each in seen["answers"]) >= 15
    reasons = {each["facts"].get("uncompressed") for each in seen["answers"]}
    assert reasons <= {None, "decode_only"}


def test_chunks_and_retractions(serve, random_model):
    # Where the layer of a propagation depends on data a prompt in chunks is served in full.
    # SGLang retracts the newest request at every other step: with pauses that is another one.
    environment = {
        "SGLANG_KV_POLICY_FOLD_INTERVAL": "4",
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "2",
    }
    flags = {"max_total_tokens": 1200, "chunked_prefill_size": 48}
    seen = serve(environment, each=1, pause=5, disable_overlap_schedule=True, **flags)
    different, ties, changed = compare(random_model, seen["answers"], 4)
    assert different == []
    assert ties <= 1
    reasons = [(e["policy"], e["facts"].get("uncompressed")) for e in seen["answers"]]
    in_full = {policy for policy, reason in reasons if reason == "too_long"}
    assert in_full <= {"asl", "asl-lava-d2o", "pyramidinfer"}
    assert changed >= {"fastkv", "gemfilter", "h2o", "tova", "streamingllm", "d2o", "cake", "cam"}
    assert seen["left"] == [0, 0, 0]
    assert sum(each["retractions"] > 0 for each in seen["answers"]) >= 6
