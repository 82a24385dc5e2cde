"""An experiment on a model divided over stages (`--pp-size`): it sees what one process sees."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faults_of_process import VARIABLE
from plugins_of_process import installed
from random_tokens import prompt
from test_pipeline_parallel import ADMIN, PATIENCE, assert_nothing_is_left, stages

pytestmark = pytest.mark.server
POLICIES = Path(__file__).parents[2] / "policies"
FILES = [str(POLICIES / f"{name}.yaml") for name in ("snapkv", "sinks-recent", "h2o")]
EXPERIMENT = {
    "experiment": "trial",
    "targeting_key": ["header:x-key"],
    "coverage": "100 %",
    "arms": {
        "control": {"policy": "none"},
        "same": {"policy": "snapkv", "set": {"capacity": 4096}},
        "tight": {"policy": "sinks-recent", "set": {"capacity": 12}},
        "folding": {"policy": "h2o", "set": {"heavy": 20, "window": 12}},
    },
    "shadow": {"sample": "100 %", "top": 64, "tokens_per_second": 1_000_000},
    "metrics": [{"metric": "drift", "role": "guardrail", "margin": 0.05, "clip": 2}],
    "analysis": {"min_samples": 1000, "on_fail": "alert"},
}
REQUESTS = 24


def start(model, folder, **flags):
    from kvpolicy.evaluation.serving import serve

    (folder / "experiment.yaml").write_text(json.dumps(EXPERIMENT))
    own = {"kv_experiment": folder / "experiment.yaml", "admin_api_key": "secret"}
    own |= {"kv_experiment_state": folder / "state.json", "enable_metrics": True}
    own |= {"chunked_prefill_size": 128, "kv_policy_fold_interval": 4}
    return serve(model, FILES, [], **own | flags)


def ask(server, i, new=12, size=90, stream=False):
    """The response to a request with a key, whose arm the experiment chooses."""
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    body = {"input_ids": prompt(i, size), "sampling_params": sampling, "stream": stream}
    headers = {"x-key": f"key {i}"}
    url = server.url + "/generate"
    return server.session.post(url, json=body, headers=headers, stream=stream, timeout=PATIENCE)


def arm_of(server, i, **more):
    """The arm of a request's answer; None: it has none."""
    return ask(server, i, **more).json()["meta_info"].get("kv_policy", {}).get("arm")


def post(server, path, body):
    url = f"{server.url}/kv_policy/experiment/{path}"
    return server.session.post(url, json=body, headers=ADMIN, timeout=PATIENCE)


def totals(server, name):
    """Values of a counter by arm and the outcome, if it says that."""
    samples = server.metrics().items()
    found = {k: v for k, v in samples if k.startswith(f"sglang:kv_experiment_{name}_total")}
    labels = {k: dict(re.findall(r'(\w+)="([^"]*)"', k)) for k in found}
    return {(labels[k]["kv_arm"], labels[k].get("outcome")): v for k, v in found.items() if v}


def settled(server):
    """The document once it is known what became of all sampled requests."""
    end = time.monotonic() + PATIENCE
    while True:
        outcomes, finished = totals(server, "shadow"), totals(server, "finished")
        if sum(outcomes.values()) == sum(v for (_, what), v in finished.items() if what == "ok"):
            return server.session.get(f"{server.url}/kv_policy/experiment", timeout=60).json()
        assert time.monotonic() < end, (outcomes, finished)
        time.sleep(0.2)


def seen(server):
    """Arms of requests in flight together, all of them scored again, and tallies by arm."""
    with ThreadPoolExecutor(8) as pool:
        arms = list(pool.map(lambda i: arm_of(server, i, size=30 + 23 * (i % 12)), range(REQUESTS)))
    document = settled(server)
    assert {arm: each["compared"] for arm, each in document["shadow"].items()} == {
        arm: arms.count(arm) for arm in EXPERIMENT["arms"]
    }
    found = document["analysis"]["arms"]
    names = ("drift", "top1_disagreement", "kv_bytes_per_prompt_token")
    return arms, {(arm, x): found[arm]["tallies"][x] for arm in found for x in names}


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    """What one process sees."""
    with start(model, tmp_path_factory.mktemp("one")) as one:
        return seen(one)


def assert_seen_as_by_one_process(server, expected):
    arms, tallies = seen(server)
    assert arms == expected[0]
    for name, tally in tallies.items():
        assert tally == pytest.approx(expected[1][name], abs=1e-4), name
    assert (tallies["control", "drift"][1], tallies["same", "drift"][1]) == (0, 0)
    assert min(tallies["tight", "drift"][1], tallies["folding", "drift"][1]) > 1


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with start(model, tmp_path_factory.mktemp("two"), **stages(2)) as server:
        yield server


def test_arms_drift_as_in_one_process(server, expected):
    """Each request is counted once, and what is scored again is not among requests."""

    def requests():
        samples = server.metrics().items()
        return sum(v for k, v in samples if k.startswith("sglang:kv_policy_requests_total{"))

    before = requests()
    assert_seen_as_by_one_process(server, expected)
    counted = [totals(server, name) for name in ("assignments", "finished", "shadow")]
    assert [sum(each.values()) for each in counted] == [REQUESTS] * 3
    assert requests() - before == REQUESTS
    assert_nothing_is_left(server)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "ranks", "more"),
    [
        (3, 1, {}),
        (2, 2, {}),
        (4, 1, {"pp_async_batch_depth": 2}),  # two more batches are under way
        (2, 1, {"dp_size": 2}),
    ],
)
def test_more_stages_and_ranks(model, tmp_path, expected, number, ranks, more):
    several = stages(number, ranks * more.get("dp_size", 1)) | {"tp_size": ranks} | more
    several["env"] |= {"KVPOLICY_TEST_SPARES": "1"}
    with start(model, tmp_path, **several) as server:
        assert_seen_as_by_one_process(server, expected)
        assert_nothing_is_left(server)


def test_an_arm_is_rolled_back_and_another_promoted(server):
    url = f"{server.url}/kv_policy/experiment"
    ending = {**EXPERIMENT, "analysis": {"min_samples": 5, "on_fail": "abort"}}
    answer = server.session.put(url, data=json.dumps(ending), headers=ADMIN, timeout=PATIENCE)
    assert answer.json()["begins_anew"] is True
    arms = {}
    for i in range(200):
        arms.setdefault(arm_of(server, i), i)
        if i % 10 == 9 and len(found := settled(server)["rolled_back"]) == 2:
            break
    assert set(found) == {"tight", "folding"}
    assert all("guardrail drift of arm" in why for why in found.values())
    assert [arm_of(server, arms[arm]) for arm in ("tight", "same")] == [None, "same"]
    answer = post(server, "promote", {"arm": "same", "reason": "seen", "force": True})
    assert answer.json()["state"] == "promoted", answer.text
    for arm in ("tight", "control"):
        facts = ask(server, arms[arm]).json()["meta_info"]["kv_policy"]
        assert facts["policy"] == "snapkv@same"
    assert_nothing_is_left(server)


# On one rank of the second stage; of the last, candidates of the model's own distributions.
FAULTS = {"choosing": 9, "copy": 4, "attention": 60}
OF_LAST = FAULTS | {"candidates": 40}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "ranks", "points"), [(2, 1, OF_LAST), (2, 2, OF_LAST), (4, 1, FAULTS)]
)
def test_what_goes_wrong_is_not_compared_and_leaves_nothing(model, tmp_path, number, ranks, points):
    """Policies fail, requests are retracted, clients go away, caches are flushed, slots are few."""
    faulty = stages(number, ranks)
    faults = {"stage": 1, "rank": 0, "points": points}
    path = installed(tmp_path, "faults_of_process")
    faulty["env"] |= {"PYTHONPATH": path, VARIABLE: json.dumps(faults)}
    faulty["env"] |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "17"}
    few = {"max_total_tokens": 1500, "kv_experiment_slots": 60, "enable_mixed_chunk": True}

    def one(i):
        if i % 5:
            found = ask(server, i, new=24, size=20 + 37 * (i % 11))
            return found.json()["meta_info"]["kv_policy"]["arm"] if found.ok else "failed"
        with ask(server, i, new=300, size=300, stream=True) as answer:
            next(answer.iter_content(64))
        if not i % 15:
            server.session.post(server.url + "/flush_cache", headers=ADMIN, timeout=PATIENCE)
        return "aborted"

    with start(model, tmp_path, **few, **faulty, kv_policy_max_failures=0) as server:
        with ThreadPoolExecutor(8) as pool:
            outcomes = list(pool.map(one, range(60)))
        assert set(outcomes) == {*EXPERIMENT["arms"], "failed", "aborted"}
        arms = settled(server)["analysis"]["arms"]
        ended = {outcome for _, outcome in totals(server, "shadow")}
        assert {"compared", "no_room"} <= ended <= {"compared", "no_room", "not_comparable"}
        assert "not_comparable" in ended or "candidates" not in points
        assert arms["control"]["tallies"]["drift"][1] == arms["same"]["tallies"]["drift"][1] == 0
        log = server.log_text()
        assert not {point for point in points if f"{point} on purpose" not in log}
        assert_nothing_is_left(server)
