"""A model divided over two ranks (`--tp 2`): the same entries stay as on one; all decide alike."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.server
POLICIES = Path(__file__).parents[2] / "policies"
# One of each kind: of each head alone, with a window, across heads, layers and both, folds, merges,
# tokens that leave the prefill, layers in pairs.
SETTINGS = {
    "snapkv": ["capacity=48", "window=16"],
    "adakv": ["capacity=40", "window=8"],
    "lava": ["capacity=40", "window=8"],
    "cake": ["capacity=40", "window=8"],
    "h2o": ["heavy=20", "window=12"],
    "tova": ["capacity=40"],
    "d2o": ["rate=0.3", "minmax_heads=true"],
    "cam": ["start=4", "window=30", "reach=4"],
    "fastkv": ["tsp_layer=1"],
    "gemfilter": ["filter=1", "capacity=40"],
    "minicache": ["start=1", "t=0.6", "gamma=0.05"],
}
FILES = [str(POLICIES / f"{name}.yaml") for name in SETTINGS]
GIVEN = [f"{name}.{each}" for name, own in SETTINGS.items() for each in own]
PATIENCE = 120  # seconds; a machine may be busy
ENVIRONMENT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "KVPOLICY_TEST_SPARES": "1",
}
TWO = {"tp_size": 2, "env": ENVIRONMENT | {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}}
FLAGS = {"kv_policy_fold_interval": 5, "chunked_prefill_size": 128, "page_size": 1}


def prompt(seed, length):
    rnd = random.Random(seed)
    return [rnd.randrange(3, 500) for _ in range(length)]


def ask(server, tokens, policy, new=24, **more):
    custom = {"kv_policy": policy, **more}
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": {**sampling, "custom_params": custom}}
    return server.session.post(server.url + "/generate", json=body, timeout=300)


def answers(server, alone):
    """Tokens and facts of requests of all policies.

    Args:
        alone: one after the other; else in flight together.
    """

    def answer(i):
        policy = (*SETTINGS, "none")[i % (len(SETTINGS) + 1)]
        found = ask(server, prompt(i, 60 + 13 * i), policy, kv_policy_kept=True).json()
        facts = found["meta_info"].get("kv_policy", {})
        # Slots hold a page of each list that is here: there are others on two ranks.
        apart = ("compression_seconds", "kv_bytes_after", "slots_freed")
        return policy, found["output_ids"], {k: v for k, v in facts.items() if k not in apart}

    with ThreadPoolExecutor(1 if alone else 8) as pool:
        return list(pool.map(answer, range(2 * (len(SETTINGS) + 1))))


@pytest.fixture(scope="module")
def server(model):
    from kvpolicy.evaluation.serving import serve

    given = [*GIVEN]
    flags = {"kv_policy_allow_inspection": True, "admin_api_key": "secret"}
    with serve(model, FILES, given, **FLAGS, **TWO, **flags) as server:
        yield server


def test_answers_and_what_is_kept_are_those_of_one_rank(server, model):
    from kvpolicy.evaluation.serving import serve

    found = [answers(server, alone) for alone in (True, False)]
    flags = {"kv_policy_allow_inspection": True}
    with serve(model, FILES, GIVEN, **FLAGS, **flags, env=ENVIRONMENT) as one:
        expected = answers(one, alone=True)
    for x in found:
        assert [each[0] for each in x] == [each[0] for each in expected]
        for own, other in zip(x, expected, strict=True):
            assert own == other, own[0]
    assert all("uncompressed" not in facts for _, _, facts in expected), expected
    assert any(facts.get("folds") for _, _, facts in expected)


def test_policies_come_and_go_on_all_ranks(server):
    """One that compares KV heads: a rank that lacked it would be waited for."""
    headers = {"Authorization": "Bearer secret"}
    url = server.url + "/kv_policy/policies/mine"
    text = (POLICIES / "adakv.yaml").read_text()
    for size in (20, 30):
        body = json.dumps({"policy": text, "set": {"capacity": size, "window": 4}})
        answer = server.session.put(url, data=body, headers=headers, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        facts = ask(server, prompt(1, 100), "mine").json()["meta_info"]["kv_policy"]
        assert 0 <= 4 * 2 * size - facts["entries_kept"] < 4 * 2  # shares are whole numbers
    assert server.session.delete(url, headers=headers, timeout=PATIENCE).ok
    assert ask(server, prompt(1, 100), "mine").status_code == 400


def test_nothing_is_left_behind(server):
    sampling = {"max_new_tokens": 400, "ignore_eos": True, "custom_params": {"kv_policy": "h2o"}}
    body = {"input_ids": prompt(3, 300), "sampling_params": sampling, "stream": True}
    url = server.url + "/generate"
    with server.session.post(url, json=body, stream=True, timeout=60) as answer:
        next(answer.iter_content(64))  # its prefill is done; the client goes away
    end = time.monotonic() + PATIENCE
    while True:
        headers = {"Authorization": "Bearer secret"}
        server.session.post(server.url + "/flush_cache", headers=headers, timeout=60)
        loads = server.session.get(server.url + "/v1/loads", headers=headers, timeout=60).json()
        if all(each["num_used_tokens"] == 0 for each in loads["loads"]):
            break
        assert time.monotonic() < end, loads
        time.sleep(0.2)
    assert "leak" not in server.log_text().lower()


# Two schedulers in lockstep, which compare what they hold after every step (scenarios_ranks.py).

ENTRIES = {
    "snapkv": ["capacity=40", "window=8"],
    "adakv": ["capacity=40", "window=8"],
    "h2o": ["heavy=12", "window=10"],
    "d2o": ["rate=0.4", "minmax_heads=true"],
    "roco": ["capacity=4", "newest=2"],
    "minicache": ["start=0", "t=0.6", "gamma=0.05"],
}
TOKENS = {"fastkv": ["tsp_layer=1"], "gemfilter": ["filter=1", "capacity=40"]}
PREFILL = ["start of scoring", "scoring", "choosing", "compaction", "copy", "layout", "memory"]
DECODE = ["noted queries", "following", "fold", "fold in place", "fold elsewhere", "attention"]
# Of which a layer's lists outgrow their pages.
GROWING = """policy: growing
language: 1
about: A test, of which one layer stays whole while it decodes.
keep: sinks(2) then recent(12)
decode:
  keep: all where layer == 0 else sinks(2) then recent(12)
"""
CASES = {
    "prefill": (ENTRIES, PREFILL, {"chunked_prefill_size": 64}),
    "decode": (ENTRIES, DECODE, {"page_size": 4, "output": 24}),
    "propagation": (TOKENS, ["scoring", "chosen rows", "restart"], {"chunked_prefill_size": 64}),
}


@pytest.fixture(scope="module")
def ranks(scenario):
    from kvpolicy.evaluation.serving import free_port

    env = {"SGLANG_KV_POLICY_FOLD_INTERVAL": "2", "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
    env |= {"SGLANG_KV_POLICY_MAX_FAILURES": "0"}

    def run(name, more=None, **flags):
        flags = {"nccl_port": free_port(), **flags}
        first, second = scenario("scenarios_ranks.py", name, {**env, **(more or {})}, **flags)
        return first, second

    return run


@pytest.mark.parametrize("case", CASES)
def test_what_fails_on_one_rank_fails_on_all(ranks, tmp_path, case):
    policies, points, flags = CASES[case]
    if case == "decode":
        (tmp_path / "growing.yaml").write_text(GROWING)
        policies = {**policies, str(tmp_path / "growing.yaml"): []}
    flags = {"count": 10, "chance": 0.3, **flags}
    first, second = ranks("faults", policies=policies, points=points, **flags)
    assert first["alone"] == second["alone"]
    for point in points:
        own, other = first["points"][point], second["points"][point]
        assert (own["raised"], other["raised"] > 0) == (0, True), point
        assert own["found"] == other["found"], point
        for each in (own, other):
            left = (each["used"], each["private"], each["missing_after_flush"])
            assert left == (0, 0, 0), point
        failed = [
            rid for rid, each in own["found"].items()
            if each["error"] or each["uncompressed"] == "policy_error"
        ]  # fmt: skip
        assert failed, point
        for rid, each in own["found"].items():
            assert rid in failed or each == first["alone"][rid], (point, rid)


@pytest.mark.parametrize("more", [{}, {"SGLANG_TEST_RETRACT": "1"}])
def test_ranks_hold_the_same_at_every_step(ranks, more):
    policies = {**ENTRIES, **TOKENS}
    first, second = ranks(
        "mixed", more, policies=policies, count=24, abort=0.1, chunked_prefill_size=64,
        max_total_tokens=2048,
    )  # fmt: skip
    assert first == second
    for rid, each in first["found"].items():
        assert each is None or each["tokens"] == first["alone"][rid]["tokens"], rid
    left = (first["used"], first["private"], first["missing_after_flush"])
    assert left == (0, 0, 0)
