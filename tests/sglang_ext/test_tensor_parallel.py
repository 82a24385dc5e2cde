"""A model divided over ranks (`--tp`): the same entries stay as on one rank; ranks agree."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from collectives import GLOO
from counted import assert_counted_once
from faults_of_process import VARIABLE
from plugins_of_process import installed
from random_tokens import prompt
from served_policies import COMPARING, GROWING, trial

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
FLAGS = {"kv_policy_fold_interval": 5, "chunked_prefill_size": 128, "page_size": 1}
ADMIN = {"Authorization": "Bearer secret"}
EXPERIMENT = trial("adakv", tight=12)


def ranks_of(number, copies=1):
    """Options of a server with `number` ranks, all on one core, as a machine may have no more."""
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * number * copies)}
    return {"tp_size": number, "dp_size": copies, "env": ENVIRONMENT | env}


def ask(server, tokens, policy=None, new=16, *, key="", rank=None, **more):
    """An answer under a policy; None: the experiment chooses one for the key."""
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    if policy is not None:
        sampling["custom_params"] = {"kv_policy": policy, **more}
    body = {"input_ids": tokens, "sampling_params": sampling, "routed_dp_rank": rank}
    headers = {"x-key": key}
    return server.session.post(server.url + "/generate", json=body, headers=headers, timeout=300)


def answers(server, alone, each=2):
    """Tokens and facts of requests of all policies.

    Args:
        alone: whether requests come one after the other, not in flight together.
        each: number of requests per policy.
    """

    def answer(i):
        policy = (*SETTINGS, "none")[i % (len(SETTINGS) + 1)]
        found = ask(server, prompt(i, 60 + 13 * i), policy, kv_policy_kept=True).json()
        facts = found["meta_info"].get("kv_policy", {})
        # Slots hold a page of each list that is here: there are others on two ranks. The reason is
        # the experiment's.
        apart = ("compression_seconds", "kv_bytes_after", "slots_freed", "reason")
        return policy, found["output_ids"], {k: v for k, v in facts.items() if k not in apart}

    with ThreadPoolExecutor(1 if alone else 8) as pool:
        return list(pool.map(answer, range(each * (len(SETTINGS) + 1))))


def start(model, **flags):
    from kvpolicy.evaluation.serving import serve

    return serve(model, FILES, GIVEN, **FLAGS, **flags, kv_policy_allow_inspection=True)


@pytest.fixture(scope="module")
def expected(model):
    """Answers of one rank."""
    with start(model, env=ENVIRONMENT) as one:
        found = answers(one, alone=True)
    assert all("uncompressed" not in facts for _, _, facts in found), found
    assert any(facts.get("folds") for _, _, facts in found)
    return found


def assert_those_of_one_rank(server, expected):
    for alone, each in ((True, 1), (False, 2)):
        found = answers(server, alone, each)
        for own, other in zip(found, expected[: len(found)], strict=True):
            assert own == other, own[0]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    file = tmp_path_factory.mktemp("experiment") / "experiment.yaml"
    file.write_text(json.dumps(EXPERIMENT))
    return {"kv_experiment": file, "admin_api_key": "secret"}


@pytest.fixture(scope="module")
def server(model, experiment):
    """A server with two ranks and an experiment."""
    with start(model, **ranks_of(2), **experiment, enable_metrics=True) as server:
        yield server


@pytest.mark.thorough
def test_answers_and_what_is_kept_are_those_of_one_rank(server, expected):
    assert_those_of_one_rank(server, expected)


@pytest.mark.thorough
def test_every_request_is_counted_once(server):
    said = lambda: ask(server, prompt(8, 90), "h2o").json()["meta_info"]["kv_policy"]  # noqa: E731
    assert_counted_once(server, "h2o", said)


def compared(server, requests):
    """Tallies of an experiment's arms, once `requests` requests were scored again."""
    end = time.monotonic() + PATIENCE
    while True:
        url = server.url + "/kv_policy/experiment"
        found = server.session.get(url, timeout=60).json()
        if sum(each.get("compared", 0) for each in found["shadow"].values()) == requests:
            return {arm: each["tallies"] for arm, each in found["analysis"]["arms"].items()}
        assert time.monotonic() < end, found["shadow"]
        time.sleep(0.1)


def assert_drifts(server, before, schedulers=(None,)):
    """Checks drift in every arm: 0 if the policy drops nothing, else above 0."""
    arms = set()
    for i in range(10):
        for rank in schedulers:
            meta = ask(server, prompt(50 + i, 90), new=8, key=f"key {i}", rank=rank).json()
            arms.add(meta["meta_info"]["kv_policy"]["arm"])
    assert arms == set(EXPERIMENT["arms"])
    tallies = compared(server, before + 10 * len(schedulers))
    assert (tallies["control"]["drift"][1], tallies["same"]["drift"][1]) == (0, 0)
    assert tallies["tight"]["drift"][1] > 0


@pytest.mark.thorough
def test_an_experiment_is_scored_again_on_all_ranks(server):
    """In slots that every rank has set aside."""
    assert_drifts(server, 0)


@pytest.mark.thorough
def test_copies_of_a_divided_model(model, experiment, expected):
    """`--tp-size 2 --dp-size 2`: ranks exchange only within their copy."""
    with start(model, **ranks_of(2, copies=2), **experiment) as both:
        assert_those_of_one_rank(both, expected)
        assert_drifts(both, 0, schedulers=(0, 1))
        for rank in (0, 1):
            facts = ask(both, prompt(1, 100), "h2o", rank=rank).json()["meta_info"]
            assert (facts["dp_rank"], facts["kv_policy"]["folds"] > 0) == (rank, True)
        text = (POLICIES / "adakv.yaml").read_text()
        url = both.url + "/kv_policy/policies/mine"
        answer = both.session.put(url, data=text, headers=ADMIN, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        for rank in (0, 1):
            assert ask(both, prompt(1, 100), "mine", rank=rank).ok
        assert_nothing_is_left(both)


def test_policies_come_and_go_on_all_ranks(server):
    """A policy that compares KV heads: others would wait for a rank that lacked it."""
    url = server.url + "/kv_policy/policies/mine"
    text = (POLICIES / "adakv.yaml").read_text()
    for size in (20, 30):
        body = json.dumps({"policy": text, "set": {"capacity": size, "window": 4}})
        answer = server.session.put(url, data=body, headers=ADMIN, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        facts = ask(server, prompt(1, 100), "mine").json()["meta_info"]["kv_policy"]
        assert 0 <= 4 * 2 * size - facts["entries_kept"] < 4 * 2  # shares are whole numbers
    assert server.session.delete(url, headers=ADMIN, timeout=PATIENCE).ok
    assert ask(server, prompt(1, 100), "mine").status_code == 400


def test_nothing_is_left_behind(server):
    assert_nothing_is_left(server)


def assert_nothing_is_left(server):
    """Checks that no slots are in use, also after a client has gone away."""
    sampling = {"max_new_tokens": 400, "ignore_eos": True, "custom_params": {"kv_policy": "h2o"}}
    body = {"input_ids": prompt(3, 300), "sampling_params": sampling, "stream": True}
    url = server.url + "/generate"
    with server.session.post(url, json=body, stream=True, timeout=60) as answer:
        next(answer.iter_content(64))  # its prefill is done; the client goes away
    end = time.monotonic() + PATIENCE
    while True:
        server.session.post(server.url + "/flush_cache", headers=ADMIN, timeout=60)
        loads = server.session.get(server.url + "/v1/loads", headers=ADMIN, timeout=60).json()
        if all(each["num_used_tokens"] == 0 for each in loads["loads"]):
            break
        assert time.monotonic() < end, loads
        time.sleep(0.2)
    assert "leak" not in server.log_text().lower()


@pytest.mark.thorough
def test_a_model_that_fails_on_one_rank_ends_the_server_at_once(model, tmp_path):
    """In a second prefill, as in any forward: the other rank waits for it there."""
    faults = {"stage": 0, "rank": 1, "points": {"second prefill": 1}}
    path = installed(tmp_path, "faults_of_process")
    failing = ranks_of(2)
    failing["env"] |= {"PYTHONPATH": path, VARIABLE: json.dumps(faults)}
    with start(model, **failing, watchdog_timeout=60) as server:
        with pytest.raises(requests.ConnectionError):
            ask(server, prompt(1, 200), "gemfilter")
        assert "second prefill on purpose" in server.log_text()
        assert "watchdog timeout" not in server.log_text()


# Schedulers in lockstep, which compare what they hold after every step (scenarios_ranks.py).

ENTRIES = {
    "snapkv": ["capacity=40", "window=8"],
    "adakv": ["capacity=40", "window=8"],
    "h2o": ["heavy=12", "window=10"],
    "d2o": ["rate=0.4", "minmax_heads=true"],
    "d2o-code": ["rate=0.4"],
    "roco": ["capacity=4", "newest=2"],
    "minicache": ["start=0", "t=0.6", "gamma=0.05"],
}
TOKENS = {"fastkv": ["tsp_layer=1"], "gemfilter": ["filter=1", "capacity=40"]}
PREFILL = ["start of scoring", "scoring", "choosing", "compaction", "slots just taken", "copy"]
PREFILL += ["layout", "memory", "what stays"]
DECODE = [
    "last fold", "pending steps", "noted queries", "following", "fold", "fold in place",
    "fold elsewhere", "fold anew", "slots just taken", "tail", "attention",
]  # fmt: skip
# Each scheduler admits requests by itself, from numbers that are the same on all ranks.
ADMISSION = ["arrival", "prefix", "reservation", "growth", "resumed pass"]
RESUMED = ["resumed reader", "resumed attention", "resumed following", "fold", "what stays"]
CASES = {
    "prefill": (ENTRIES, PREFILL, {"chunked_prefill_size": 64, "output": 6}),
    "decode": (ENTRIES, DECODE, {"page_size": 4, "output": 16}),
    "propagation": (
        TOKENS,
        ["scoring", "chosen rows", "restart", "view"],
        {"chunked_prefill_size": 64, "output": 6},
    ),
    "retracted": (ENTRIES, RESUMED, {"chunked_prefill_size": 64, "output": 24, "chance": 0.2}),
}
SHARED = {  # of ranks that hold the same KV head
    "prefill": (ENTRIES, ["start of scoring", "scoring", "compaction"], CASES["prefill"][2]),
    "decode": (ENTRIES, ["noted queries", "following", "fold", "attention"], CASES["decode"][2]),
    "propagation": (TOKENS, ["scoring", "restart"], CASES["propagation"][2]),
    "retracted": (ENTRIES, ["resumed reader", "resumed following"], CASES["retracted"][2]),
}


@pytest.fixture(scope="module")
def ranks(scenario):
    from kvpolicy.evaluation.serving import free_port

    env = {"SGLANG_KV_POLICY_FOLD_INTERVAL": "2", "SGLANG_KV_POLICY_MAX_FAILURES": "0"}

    def run(name, more=None, number=2, folder=None, **flags):
        flags = {"nccl_port": free_port(), "tp_size": number, **flags}
        bound = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * number)}
        given = {**env, **bound, **(more or {})}
        return scenario("scenarios_ranks.py", name, given, folder, **flags)

    return run


@pytest.mark.thorough
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_what_fails_on_one_rank_fails_on_all(ranks, checkpoint, tmp_path, case, shared):
    policies, points, flags = (SHARED if shared else CASES)[case]
    if case == "decode":
        for name, text in (("growing", GROWING), ("comparing", COMPARING)):
            (tmp_path / f"{name}.yaml").write_text(text)
            policies = {**policies, str(tmp_path / f"{name}.yaml"): []}
    folder = checkpoint("llama", kv_heads=1 if shared else 2)
    flags = {"count": 10, "chance": 0.3, "folder": folder, **flags}
    more = {"SGLANG_TEST_RETRACT": "1"} if case == "retracted" else {}
    check(*ranks("faults", more, policies=policies, points=points, **flags), points)


@pytest.mark.thorough
def test_what_fails_at_admission_fails_on_all_ranks_alike(ranks):
    flags = {"chunked_prefill_size": 64, "output": 24, "chance": 0.1, "count": 10, "alike": True}
    more = {"SGLANG_TEST_RETRACT": "1"}
    seen = ranks("faults", more, policies=ENTRIES, points=ADMISSION, **flags)
    check(*seen, ADMISSION, alike=True)


def check(first, second, points, *, alike=False):
    """Checks that all is the same on two ranks, nothing leaked, and all else is as alone.

    Args:
        alike: whether each point failed on both, not on the second alone.
    """
    assert first["alone"] == second["alone"]
    for point in points:
        own, other = first["points"][point], second["points"][point]
        assert (own["raised"], other["raised"] > 0) == (other["raised"] * alike, True), point
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


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Flags of requests of all policies."""
    comparing = tmp_path_factory.mktemp("mixed") / "comparing.yaml"
    comparing.write_text(COMPARING)
    policies = {**ENTRIES, str(comparing): [], **TOKENS}
    return {
        "policies": policies, "output": 16, "chunked_prefill_size": 64, "max_total_tokens": 2048,
    }  # fmt: skip


@pytest.fixture(scope="module")
def of_one(ranks, checkpoint, mixed):
    """A function from numbers of KV heads and requests to one rank's answers and kept entries."""

    def of_one(kv_heads, count):
        folder = checkpoint("llama", kv_heads)
        (found,) = ranks("alone", number=1, folder=folder, count=count, **mixed)
        return found

    return of_one


@pytest.mark.thorough(besides=["2-2-11-more0"])
@pytest.mark.parametrize(
    ("number", "kv_heads", "count", "more"),
    [
        (2, 2, 11, {"SGLANG_TEST_RETRACT": "1", GLOO: "1"}),  # with no shortcut between ranks
        (2, 2, 33, {"SGLANG_TEST_RETRACT": "1"}),
        (2, 1, 22, {"SGLANG_TEST_RETRACT": "1"}),
        (4, 2, 22, {}),
    ],
)
def test_ranks_hold_the_same_at_every_step(
    ranks, checkpoint, of_one, mixed, number, kv_heads, count, more
):
    """And keep the same as one rank; with more ranks than KV heads, two hold the same one."""
    folder = checkpoint("llama", kv_heads)
    first, *others = ranks("mixed", more, number, folder, abort=0.1, count=count, **mixed)
    assert others == [first] * (number - 1)
    for rid, expected in of_one(kv_heads, count).items():
        assert first["alone"][rid] == expected, rid
    for rid, each in first["found"].items():
        # Deeper layers of fastkv read a cached prefix as it was computed for others.
        if each is not None and not rid.endswith(" fastkv"):
            assert each["tokens"] == first["alone"][rid]["tokens"], rid
    left = (first["used"], first["private"], first["missing_after_flush"])
    assert left == (0, 0, 0)
