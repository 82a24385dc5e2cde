"""Several schedulers behind one front end (`--dp-size 2`): the same answers, the same policies."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest
from random_tokens import prompt
from served_policies import trial

pytestmark = pytest.mark.server
POLICIES = Path(__file__).parents[2] / "policies"
SNAPKV, H2O = (str(POLICIES / f"{name}.yaml") for name in ("snapkv", "h2o"))
SETTINGS = ["snapkv.capacity=48", "snapkv.window=16", "h2o.heavy=20", "h2o.window=12"]
ADMIN = {"Authorization": "Bearer secret"}
RANKS = (0, 1)
PATIENCE = 120  # seconds; a machine may be busy
ENVIRONMENT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|0",  # a scheduler each; a machine may have one core
    "KVPOLICY_TEST_SPARES": "1",
}
EXPERIMENT = trial("snapkv", tight=20)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """Serves snapkv (48 of every list) and h2o (32, also while decoding), and an experiment.

    Its requests decode in mixed forwards; those of other servers in this file do not.
    """
    from kvpolicy.evaluation.serving import serve

    file = tmp_path_factory.mktemp("experiment") / "experiment.yaml"
    file.write_text(json.dumps(EXPERIMENT))
    flags = {"dp_size": 2, "enable_metrics": True, "admin_api_key": "secret", "kv_experiment": file}
    flags |= {"kv_policy_fold_interval": 5, "chunked_prefill_size": 128, "enable_mixed_chunk": True}
    flags |= {"env": ENVIRONMENT, "kv_policy_allow_set": ["snapkv.capacity"]}
    with serve(model, [SNAPKV, H2O], SETTINGS, **flags) as server:
        yield server


def ask(server, tokens, policy, rank=None, new=24, own=None, **headers):
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    if policy is not None:
        sampling["custom_params"] = {"kv_policy": policy, **(own or {})}
    body = {"input_ids": tokens, "sampling_params": sampling, "routed_dp_rank": rank}
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.session.post(server.url + "/generate", json=body, headers=headers, timeout=300)


def answers(server):
    """Tokens, facts and scheduler of requests of three kinds, in flight together."""

    def answer(i):
        found = ask(server, prompt(i, 40 + 17 * i), ("snapkv", "h2o", "none")[i % 3]).json()
        meta = found["meta_info"]
        facts = meta.get("kv_policy", {}).items()  # the reason is the experiment's
        facts = {k: v for k, v in facts if k not in ("compression_seconds", "reason")}
        return found["output_ids"], facts, meta["dp_rank"]

    with ThreadPoolExecutor(9) as pool:
        return zip(*pool.map(answer, range(18)), strict=True)


def states(server):
    info = server.session.get(server.url + "/server_info", headers=ADMIN, timeout=60).json()
    return sorted(info["internal_states"], key=lambda each: each["kv_policy_dp_rank"])


def counted(server, name, policy):
    """Values of a metric by scheduler."""
    series = {k: v for k, v in server.metrics().items() if k.startswith(f"sglang:kv_policy_{name}")}
    return [
        sum(v for k, v in series.items() if f'dp_rank="{rank}"' in k and f'policy="{policy}"' in k)
        for rank in RANKS
    ]


def test_answers_and_facts_are_those_of_one_scheduler(server, model):
    from kvpolicy.evaluation.serving import serve

    names = ("snapkv", "h2o", "none")
    before = [counted(server, "requests_total", name) for name in names]
    tokens, facts, ranks = answers(server)
    assert set(ranks) == set(RANKS)
    flags = {"kv_policy_fold_interval": 5, "chunked_prefill_size": 128}
    with serve(model, [SNAPKV, H2O], SETTINGS, **flags) as one:
        assert [tokens, facts] == list(answers(one))[:2]
    assert any(each.get("folds") for each in facts)
    for i, name in enumerate(names):
        after = counted(server, "requests_total", name)
        asked = [ranks[i::3].count(rank) for rank in RANKS]
        assert [x - y for x, y in zip(after, before[i], strict=True)] == asked


def test_the_server_says_of_each_scheduler_what_it_serves(server):
    found = states(server)
    assert [each["kv_policy_dp_rank"] for each in found] == list(RANKS)
    assert found[0]["kv_policy"] == found[1]["kv_policy"]
    named = [each["name"] for each in found[0]["kv_policy"]]
    assert named == ["snapkv", "h2o", "snapkv@same", "snapkv@tight"]
    assert len({each["digest"] for each in found[0]["kv_policy"]}) == 4


def test_parameters_of_requests_reach_every_scheduler(server):
    for size in (20, 24):
        own = {"kv_policy_set": {"capacity": size}}
        for rank in RANKS:
            found = ask(server, prompt(1, 100), "snapkv", rank, own=own).json()["meta_info"]
            assert found["kv_policy"]["entries_kept"] == 4 * 2 * size
            assert (found["kv_policy"]["set"], found["dp_rank"]) == ({"capacity": size}, rank)


def change(server, method, name, body=None):
    url = f"{server.url}/kv_policy/policies/{name}"
    return server.session.request(method, url, data=body, headers=ADMIN, timeout=300)


def test_policies_come_and_go_on_every_scheduler(server):
    text = Path(SNAPKV).read_text()

    def kept():
        found = [ask(server, prompt(1, 100), "mine", rank, new=4) for rank in RANKS]
        return [
            each.json()["meta_info"]["kv_policy"]["entries_kept"] if each.ok else each.status_code
            for each in found
        ]

    before = [each["kv_policy"] for each in states(server)]
    for size in (20, 30):
        body = json.dumps({"policy": text, "set": {"capacity": size, "window": 4}})
        assert change(server, "PUT", "mine", body).status_code == 200
        assert kept() == [4 * 2 * size] * 2
    pairs = (POLICIES / "minicache.yaml").read_text()  # needs what was not reserved
    response = change(server, "PUT", "mine", pairs)
    assert (response.status_code, "did not reserve" in response.text) == (400, True)
    assert "DP" not in response.text  # all say the same
    assert kept() == [4 * 2 * 30] * 2
    assert change(server, "DELETE", "mine").json() == {"name": "mine", "withdrawn": True}
    assert kept() == [400] * 2
    assert [each["kv_policy"] for each in states(server)] == before


def test_the_fleet_is_told_apart(server, model, monkeypatch, capsys):
    """From answers of real servers: schedulers of one, a replica with equal policies, another."""
    from kvpolicy.evaluation.cli import main
    from kvpolicy.evaluation.serving import serve

    monkeypatch.setenv("KVPOLICY_TEST_KEY", "secret")  # forks may differ in it

    def status(*servers):
        urls = [word for each in servers for word in ("--url", each.url)]
        code = main(["fleet", "status", *urls, "--json", "--api-key-env", "KVPOLICY_TEST_KEY"])
        return code, json.loads(capsys.readouterr().out)

    code, found = status(server)
    assert (code, found["uniform"]) == (0, True)
    first, second = found["replicas"][0]["schedulers"]
    assert first == second
    assert first["SGLang"].startswith("0.5.")
    assert first["kvpolicy"] == version("kvpolicy")
    assert first["experiment"] == "trial"
    assert first["policy snapkv: settings"] == "capacity=48, window=16"
    with serve(model, [SNAPKV], ["snapkv.capacity=40", "snapkv.window=16"]) as other:
        code, found = status(server, other)
    assert code == 1
    assert found["differing"]["policy snapkv: settings"] == {
        "capacity=48, window=16": [f"{server.url} DP0", f"{server.url} DP1"],
        "capacity=40, window=16": [other.url],
    }
    assert found["differing"]["experiment"]["none"] == [other.url]
    assert "policy snapkv: digest" in found["differing"]
    assert "SGLang" not in found["differing"]


def document(server):
    return server.session.get(server.url + "/kv_policy/experiment", timeout=60).json()


def test_an_experiment_and_the_switch_are_one_for_all_schedulers(server):
    """A key has one arm on all schedulers; shadows run where the prompt is cached."""
    arms = {}
    for i in range(12):
        found = [ask(server, prompt(50 + i, 90), None, rank, 8, x_key=f"key {i}") for rank in RANKS]
        metas = [each.json()["meta_info"] for each in found]
        assert [meta["dp_rank"] for meta in metas] == list(RANKS)
        (arm,) = {meta["kv_policy"]["arm"] for meta in metas}
        arms.setdefault(arm, f"key {i}")
    assert set(arms) == set(EXPERIMENT["arms"])
    end = time.monotonic() + PATIENCE
    while sum(each.get("compared", 0) for each in document(server)["shadow"].values()) < 24:
        assert time.monotonic() < end, document(server)["shadow"]
        time.sleep(0.1)
    tallies = {arm: x["tallies"] for arm, x in document(server)["analysis"]["arms"].items()}
    assert (tallies["control"]["drift"][1], tallies["same"]["drift"][1]) == (0, 0)
    assert tallies["tight"]["drift"][1] > 0
    for path, applied in (("disable", False), ("enable", True)):
        url = f"{server.url}/kv_policy/{path}"
        assert server.session.post(url, headers=ADMIN, timeout=60).json() == {"enabled": applied}
        assert [each["kv_policy_applied"] for each in states(server)] == [applied] * 2
        for rank in RANKS:
            meta = ask(server, prompt(7, 90), None, rank, 8, x_key=arms["tight"]).json()[
                "meta_info"
            ]
            assert ("kv_policy" in meta) is applied


def test_nothing_is_left_behind_on_any_scheduler(server):
    sampling = {"max_new_tokens": 400, "ignore_eos": True}
    for rank in (*RANKS, *RANKS):
        body = {"input_ids": prompt(rank, 300), "sampling_params": sampling, "stream": True}
        body |= {"routed_dp_rank": rank}
        url = server.url + "/generate"
        with server.session.post(url, json=body, stream=True, timeout=60) as answer:
            next(answer.iter_content(64))  # its prefill is done; the client goes away
    end = time.monotonic() + PATIENCE
    while True:
        server.session.post(server.url + "/flush_cache", headers=ADMIN, timeout=60)
        loads = server.session.get(server.url + "/v1/loads", headers=ADMIN, timeout=60).json()
        used = [each["num_used_tokens"] for each in loads["loads"]]
        used += counted(server, "private_slots", "snapkv") + counted(server, "private_slots", "h2o")
        if used == [0] * 6:
            break
        assert time.monotonic() < end, used
        time.sleep(0.2)
    assert "leak" not in server.log_text().lower()
