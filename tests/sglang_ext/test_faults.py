"""A failing policy fails one request: other answers and all slots are unaffected.

In a real scheduler (scenarios_faults.py), checked after every step as in test_scheduler.py. Free
slots hold NaN, so that reading one would show in the answers.
"""

import pytest
from served_policies import GROWING

pytestmark = pytest.mark.server

ENTRIES = {
    "snapkv": ["capacity=40", "window=8"],
    "h2o": ["heavy=12", "window=10"],
    "streamingllm": ["start=3", "window=21"],
    "d2o": ["rate=0.4", "minmax_heads=true"],
    "roco": ["capacity=4", "newest=2"],
    "minicache": ["start=0", "t=0.6", "gamma=0.05"],
}
TOKENS = {
    "fastkv": ["tsp_layer=1"],
    "gemfilter": ["filter=1", "capacity=40"],
    "h2o": ["heavy=12", "window=10"],
}
ONE_PIECE = {
    "pyramidinfer": ["least=16", "batch=4"],
    "asl": ["capacity=40", "lookback=2", "window=8", "tau=1.5", "start=1", "two_pass=true"],
}
# Attention runs as it was planned for a batch, not over what it is given.
FLASHINFER = {"attention_backend": "flashinfer", "chunked_prefill_size": 64, "common": 0}
WHOLE = {"chunked_prefill_size": -1, "mem_fraction_static": 0.5, "common": 0}
PREFILL = ["arrival", "prefix", "reservation", "allocation", "start of scoring", "scoring"]
PREFILL += ["sums over chunks", "choosing", "end of choosing", "compaction", "copy", "layout"]
PREFILL += ["slots just taken", "memory", "report", "known counts", "what stays", "what fits"]
PREFILL += ["numbers of the device"]
DECODE = ["growth", "when entries leave", "noted queries", "following", "fold", "fold in place"]
DECODE += ["fold elsewhere", "fold by layer", "fold anew", "slots just taken", "tail"]
DECODE += ["report of a fold", "attention"]
PROPAGATION = ["scoring", "chosen rows", "restart", "second prefill", "view"]
RESUMED = ["resumed pass", "resumed reader", "resumed attention", "resumed following", "fold"]


# Whose lists become shorter from fold to fold: they are laid out anew within their pages.
SHRINKING = """policy: shrinking
language: 1
about: A test, whose lists become shorter while they decode.
keep: all
decode:
  keep: sinks(2) then recent(max(6, 30 - 3 * generated))
"""


@pytest.fixture(scope="module")
def changing(tmp_path_factory):
    """Files of SHRINKING and GROWING, as `policies` of a scenario."""
    folder = tmp_path_factory.mktemp("policies")
    paths = {folder / "shrinking.yaml": SHRINKING, folder / "growing.yaml": GROWING}
    for path, text in paths.items():
        path.write_text(text)
    return {str(path): [] for path in paths}


@pytest.fixture(scope="module")
def run(scenario):
    """Runs a scenario of scenarios_faults.py, with folds at every second step."""
    env = {"SGLANG_KV_POLICY_FOLD_INTERVAL": "2", "SGLANG_KV_POLICY_MAX_FAILURES": "0"}
    env["TRITON_INTERPRET"] = "1"  # read where attention is not torch's own
    return lambda name, more=None, **flags: scenario(
        "scenarios_faults.py", name, {**env, **(more or {})}, **flags
    )


CASES = {
    "prefill": (ENTRIES, PREFILL, {"chunked_prefill_size": 64}),
    "mixed": (ENTRIES, PREFILL, {"chunked_prefill_size": 64, "enable_mixed_chunk": True}),
    "pairs": ({"minicache": ENTRIES["minicache"]}, ["pairs", "attention"], {}),
    "decode": (ENTRIES, DECODE, {"page_size": 4, "count": 18}),
    "propagation": (TOKENS, PROPAGATION, {"chunked_prefill_size": 64, "common": 0}),
    "plans": ({"fastkv": ["tsp_layer=1"]}, ["planned view"], FLASHINFER),
    "one-piece": (ONE_PIECE, ["scoring", "chosen rows", "restart", "view"], WHOLE),
}


@pytest.mark.thorough(besides=["pairs", "propagation"])
@pytest.mark.parametrize("case", CASES)
def test_what_fails_for_one_request_leaves_the_others_as_they_were(run, changing, case):
    policies, points, flags = CASES[case]
    policies = policies | (changing if case == "decode" else {})
    flags = {"count": 10, "chance": 0.3, **flags}
    check(run("mixed", policies=policies, points=points, **flags), points)


@pytest.mark.thorough
def test_what_fails_for_a_retracted_request_leaves_the_others_as_they_were(run):
    flags = {"chunked_prefill_size": 64, "count": 10, "chance": 0.2, "output": 24, "together": 3}
    check(
        run("mixed", {"SGLANG_TEST_RETRACT": "1"}, policies=ENTRIES, points=RESUMED, **flags),
        RESUMED,
    )


@pytest.mark.thorough
def test_a_prompt_that_keeps_the_room_it_borrowed_takes_it_from_nobody_for_good(run):
    """SGLang retracts if running requests need the slots; every answer is the same as alone."""
    seen = run("borrowed", length=200, output=50, max_total_tokens=480)
    made, failing = seen["compressed"], seen["failing"]
    assert (made["lent"] > 0, made["failed"], made["retractions"]) == (True, 0, 0)
    assert made["outcomes"] == ["as alone"]
    assert failing["failed"] == failing["lent"] > 0
    assert failing["outcomes"] == ["as alone", "in full"]
    assert failing["retractions"] > 0  # what was lent was needed
    assert (seen["used"], seen["private"], seen["missing_after_flush"]) == (0, 0, 0)


def check(seen, points):
    """Checks that nothing else is wrong, no slot leaked, and the fault occurred at each point."""
    assert set(seen["points"]) == set(points)
    failures = dict.fromkeys(seen["failures"], 0)
    for point, each in seen["points"].items():
        assert each["wrong"] == [], (point, each)
        left = (each["used"], each["private"], each["missing_after_flush"])
        assert left == (0, 0, 0), (point, each)
        assert min(len(each["noted"]), each["raised"]) > 0, (point, each)
        assert "as alone" in each["outcomes"], (point, each)
        for rid in each["noted"]:
            failures[rid.split()[1]] += 1
        for message in each["messages"]:
            assert message.startswith("KV-cache policy `"), message
            assert "custom_params.kv_policy `none`" in message, message
    assert seen["failures"] == failures


def test_a_policy_that_fails_too_often_is_disabled(run):
    seen = run("disabled", {"SGLANG_KV_POLICY_MAX_FAILURES": "3"})
    answers, policies = seen["answers"], seen["policies"]
    assert (policies["snapkv"]["enabled"], policies["snapkv"]["failures"]) == (False, 3)
    assert (policies["lava"]["enabled"], policies["lava"]["failures"]) == (True, 0)
    for i in range(6):
        tokens, why = answers[f"{i} snapkv"]
        assert tokens == answers[f"{i} none"][0]
        assert why == ("policy_error" if i < 3 else "policy_disabled")
        assert answers[f"{i} lava"][1] is None
