"""A model divided over stages (`--pp-size`): the same entries stay as in one process."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from copies_of_process import copied
from counted import assert_counted_once
from faults_of_process import VARIABLE
from plugins_of_process import installed
from random_tokens import prompt
from served_policies import GROWING

pytestmark = pytest.mark.server
POLICIES = Path(__file__).parents[2] / "policies"
# Budgets of each layer alone, of heads that compete, by the layer's number, by data, by both.
SETTINGS = {
    "snapkv": ["capacity=48", "window=16"],
    "adakv": ["capacity=40", "window=8"],
    "pyramidkv": ["capacity=30", "window=8"],
    "lazy": [],
    "sinks-recent": ["capacity=40"],
    # Entries leave while it decodes: of lists of one size, by what heads agree on, of lists that
    # first grow, with values that are merged and keys that turn.
    "h2o": ["heavy=20", "window=20"],
    "tova": ["capacity=30"],
    "roco": ["capacity=12", "newest=4"],
    "cam": ["window=40", "reach=4"],
    # They compare layers, by numbers that the stages tell each other.
    "cake": ["capacity=40", "window=8"],
    "d2o": ["rate=0.3"],
    "d2o-code": ["rate=0.3"],
}
COMPARING = ("cake", "d2o", "d2o-code")
# Data decide of each layer, and so of each stage, how much it keeps.
LAZY = """policy: lazy
language: 1
about: A test, of which some layers keep fewer entries than others.
let:
  looked: sum[token](attn(recent(8)) where distance(recent(8)) <= 24)
keep: sinks(2) then recent(12) where mean[head, query](looked) > 0.35 else sinks(2) then recent(38)
"""
GIVEN = [f"{name}.{each}" for name, own in SETTINGS.items() for each in own]
PATIENCE = 120  # seconds; a machine may be busy
SECONDS = 6  # for which parameters of requests' own are compiled
ENVIRONMENT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
HOST = {
    "enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
}  # fmt: skip
SET = {"kv_policy_allow_set": ["snapkv.capacity"]}
ADMIN = {"Authorization": "Bearer secret"}
FLAGS = {
    "chunked_prefill_size": 64, "page_size": 1, "kv_policy_allow_inspection": True,
    "kv_policy_fold_interval": 4,
}  # fmt: skip


def stages(number, ranks=1):
    """Options of a server with `number` stages, all on one core, as a machine may have no more."""
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * number * ranks)}
    return {"pp_size": number, "tp_size": ranks, "env": ENVIRONMENT | env}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    lazy = tmp_path_factory.mktemp("policies") / "lazy.yaml"
    lazy.write_text(LAZY)
    return [str(lazy if name == "lazy" else POLICIES / f"{name}.yaml") for name in SETTINGS]


def start(model, files, given=GIVEN, **flags):
    from kvpolicy.evaluation.serving import serve

    return serve(model, files, given, **FLAGS | flags)


def ask(server, tokens, policy, new=24, **more):
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    sampling["custom_params"] = {"kv_policy": policy, **more}
    body = {"input_ids": tokens, "sampling_params": sampling}
    return server.session.post(server.url + "/generate", json=body, timeout=PATIENCE)


def requests():
    """Requests of every policy, with prompts of 1 to 250 tokens; half of them share a start."""
    names = [*SETTINGS, "none"]
    sizes = [1, 17, 97, 129, 200]
    for i, (size, name) in enumerate((size, name) for size in sizes for name in names):
        yield name, prompt(7, 50) * (i % 2) + prompt(i, size)


def answers(server, order, *, alone):
    """Tokens and facts by number of the request, alone or in flight together."""
    listed = list(requests())

    retracted = []

    def answer(number):
        name, tokens = listed[number]
        # With such a policy no stage knows the positions kept in layers of other stages.
        found = ask(server, tokens, name, kv_policy_kept=name not in COMPARING)
        assert found.ok, found.text
        meta = found.json()["meta_info"]
        facts = meta.get("kv_policy", {})
        retracted.append(meta["num_retractions"])
        # Slots hold a page of each layer that is here: there are others in two stages.
        apart = ("compression_seconds", "kv_bytes_after", "slots_freed")
        return name, found.json()["output_ids"], {k: v for k, v in facts.items() if k not in apart}

    with ThreadPoolExecutor(1 if alone else 8) as pool:
        found = dict(zip(order, pool.map(answer, order), strict=True))
    return found, sum(retracted)


@pytest.fixture(scope="module")
def expected(model, files):
    """Answers of one process."""
    with start(model, files, env=ENVIRONMENT) as one:
        found, _ = answers(one, range(len(list(requests()))), alone=True)
    compressed = {name for name, _, facts in found.values() if facts.get("entries_kept")}
    folded = {name for name, _, facts in found.values() if facts.get("folds")}
    assert compressed == {*SETTINGS} - {"roco", "d2o-code"}  # which keep the prompt
    assert folded == {"h2o", "tova", "roco", "cam", *COMPARING}
    return found


@pytest.fixture(scope="module")
def server(model, files, tmp_path_factory):
    """Two stages, of which the second compiles kernels of requests' own parameters slowly."""
    more = {"admin_api_key": "secret", "enable_metrics": True}
    two = stages(2)
    slow = {"stage": 1, "rank": 0, "delays": {"variant": SECONDS}}
    path = installed(tmp_path_factory.mktemp("plugin"), "faults_of_process")
    two["env"] |= {"PYTHONPATH": path, VARIABLE: json.dumps(slow)}
    with start(model, files, **two, **more, **SET) as server:
        yield server


def longer_than(tokens, expected):
    """Numbers of the requests with longer prompts."""
    listed = list(requests())
    return [i for i in sorted(expected) if len(listed[i][1]) > tokens]


@pytest.mark.thorough
def test_answers_and_what_is_kept_are_those_of_one_process(server, expected):
    """Requests come one after the other, so at most one stage has work."""
    order = longer_than(128, expected)
    assert answers(server, order, alone=True)[0] == {i: expected[i] for i in order}


@pytest.mark.thorough
def test_requests_in_flight_together_and_in_another_order(server, expected):
    order = sorted(expected)
    random.Random(1).shuffle(order)
    assert answers(server, order, alone=False)[0] == expected
    assert_nothing_is_left(server)


@pytest.mark.thorough
def test_batches_of_both_kinds(model, files, expected):
    """Chunks of prompts that are computed together with decode steps of other requests."""
    mixing = stages(2)
    mixing["env"] |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"}
    with start(model, files, **mixing, enable_mixed_chunk=True) as server:
        found, retractions = answers(server, sorted(expected), alone=False)
        assert found == expected
        assert retractions > 3
        assert_nothing_is_left(server)


def test_what_requests_ask_besides(server):
    """Their own parameters and forced output, which only the last stage samples."""
    tokens, output = prompt(5, 150), prompt(6, 8)
    given = {"kv_policy_set": {"capacity": 30}, "kv_policy_force": output}
    found = ask(server, tokens, "snapkv", new=8, **given).json()
    assert found["output_ids"] == output
    assert found["meta_info"]["kv_policy"]["entries_kept"] == 4 * 2 * 30
    assert found["meta_info"]["kv_policy"]["set"] == {"capacity": 30}


def test_nobody_waits_for_the_kernels_of_anothers_parameters(server):
    own = {"kv_policy_set": {"capacity": 28}}
    with ThreadPoolExecutor() as pool:
        given = (ask, server, prompt(5, 60), "snapkv", 1)
        waiting = [pool.submit(*given, **own) for _ in range(3)]
        others = 0
        while not any(each.done() for each in waiting):
            assert ask(server, prompt(6, 20), "snapkv", 1).ok
            others += 1
    assert others > 3
    facts = [each.result().json()["meta_info"]["kv_policy"] for each in waiting]
    assert [each["set"] for each in facts] == [{"capacity": 28}] * 3


@pytest.mark.parametrize("name", COMPARING)
def test_positions_that_no_stage_knows_are_not_told(server, name):
    answer = ask(server, prompt(5, 60), name, kv_policy_kept=True)
    assert answer.status_code == 400
    wanted = f"with --pp-size a server cannot say which positions `{name}` keeps"
    assert wanted in answer.json()["error"]["message"]


def test_every_request_is_counted_once_and_every_policy_said_once(server):
    said = lambda: ask(server, prompt(8, 90), "h2o").json()["meta_info"]["kv_policy"]  # noqa: E731
    assert_counted_once(server, "h2o", said)
    told = server.session.get(server.url + "/server_info", headers=ADMIN, timeout=PATIENCE).json()
    (state,) = told["internal_states"]
    assert [each["name"] for each in state["kv_policy"]] == [*SETTINGS]


def test_policies_come_and_go_on_all_stages(server):
    """While other requests are computed; one that stages cannot decide apart changes nothing."""
    url = server.url + "/kv_policy/policies/mine"

    def put(name, given):
        body = json.dumps({"policy": (POLICIES / f"{name}.yaml").read_text(), "set": given})
        return server.session.put(url, data=body, headers=ADMIN, timeout=PATIENCE)

    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(ask, server, prompt(i, 150), "h2o", new=60) for i in range(16)]
        for capacity in (20, 30):
            answer = put("adakv", {"capacity": capacity, "window": 4})
            assert answer.ok, answer.text
            facts = ask(server, prompt(1, 100), "mine").json()["meta_info"]["kv_policy"]
            # Shares are whole numbers, in each layer.
            assert 0 <= 4 * 2 * capacity - facts["entries_kept"] < 4 * 2
        answer = put("lava", {})
        assert "`mine` cannot be served with --pp-size: layers are compared" in answer.text
        assert ask(server, prompt(1, 100), "mine").ok
        assert server.session.delete(url, headers=ADMIN, timeout=PATIENCE).ok
        assert ask(server, prompt(1, 100), "mine").status_code == 400
        assert all(each.result().ok for each in others)
    assert_nothing_is_left(server)


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "ranks", "ahead"), [(2, 2, 0), (3, 1, 0), (2, 1, 2)])
def test_what_is_retracted_goes_on_as_it_was(model, files, expected, number, ranks, ahead):
    """Stages of two ranks each; three stages, of which one has more layers than the others; and
    two more batches under way than there are stages.

    The pool is small: at times a fold is skipped for want of slots, or a retracted request has none
    for its copy and continues in full. Its facts say so, and its answer differs; all others answer
    as alone.
    """
    retracting = stages(number, ranks)
    retracting["env"] |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
    retracting |= {"pp_async_batch_depth": ahead, "max_total_tokens": 900}
    with start(model, files, **retracting) as server:
        found, retractions = answers(server, longer_than(90, expected), alone=False)
        whole = {i: own for i, own in found.items() if not found_no_room(own[2])}
        assert len(whole) >= len(found) - 5, str(sorted(set(found) - set(whole)))
        others = {i: (own, expected[i]) for i, own in whole.items() if own != expected[i]}
        assert not others, str(others)
        assert retractions > 10
        assert_nothing_is_left(server)


@pytest.mark.thorough
def test_stages_evict_alike_when_folds_take_what_is_cached(model, tmp_path):
    """By SGLang's own check of what stages decide, which ends a server where they differ.

    Lists of one stage grow, so it groups requests otherwise than the other; between these some
    lose entries of their prompts for the first time, for which cached prompts have to leave.
    """
    growing = tmp_path / "growing.yaml"
    growing.write_text(GROWING)
    names = ["growing", "streamingllm", "growing", "roco"]
    policies = [growing, *(POLICIES / f"{name}.yaml" for name in ("streamingllm", "roco"))]
    given = ["streamingllm.window=40", "roco.capacity=16", "roco.newest=4"]
    checking = stages(2)
    checking["env"] |= {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
    more = {"kv_policy_fold_interval": 2, "max_total_tokens": 2000}
    with start(model, policies, given, **checking, **more) as server:

        def answer(i):
            tokens = prompt(i % 4, 100) + prompt(i, 20 + 17 * (i % 16))
            return ask(server, tokens, names[i % len(names)], new=40 + i % 40)

        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(answer, range(48)))
        assert all(each.ok for each in found)
        assert "Rank consensus checker is enabled" in server.log_text()


RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"}
CHECKED = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}  # SGLang's own, of what stages decide


@pytest.mark.thorough(besides=["write-through"])
@pytest.mark.parametrize(
    ("number", "environment", "flags"),
    [
        (2, {}, {"hicache_write_policy": "write_through"}),
        (3, RETRACT, {"hicache_write_policy": "write_back", "page_size": 4}),
        (2, RETRACT | CHECKED, {"hicache_write_policy": "write_through"}),
    ],
    ids=["write-through", "write-back-retracted", "checked"],
)
def test_prompts_go_to_the_host_and_come_back(
    server, model, files, tmp_path, number, environment, flags
):
    """SGLang's copies end late, at other moments on each stage; prompts do not all fit the pool."""
    storing = stages(number)
    path = installed(tmp_path, "copies_of_process")
    storing["env"] |= environment | {"PYTHONPATH": path}
    flags = HOST | {"max_total_tokens": 3000} | flags
    order = longer_than(90, range(len(list(requests()))))
    expected = answers(server, order, alone=False)[0]
    with start(model, files, **storing, **flags) as hierarchical:
        for _ in range(2):
            found = answers(hierarchical, order, alone=False)[0]
            # For want of slots some folds are skipped: copies not ended keep prompts in the pool.
            whole = {i: own for i, own in found.items() if not found_no_room(own[2])}
            assert len(whole) >= len(found) - 8, str(sorted(set(found) - set(whole)))
            others = {i: (own, expected[i]) for i, own in whole.items() if own != expected[i]}
            assert not others, str(others)
        assert_nothing_is_left(hierarchical)
        copies = list(copied(hierarchical.log_text()).values())
    assert copies == copies[:1] * number
    assert copies[0]["saved"] > 4000
    assert copies[0]["loaded"] > 500


@pytest.mark.thorough
@pytest.mark.parametrize("number", [1, 2])
def test_prompts_come_from_what_an_earlier_server_has_stored(
    server, model, files, tmp_path, number
):
    """Each stage stores its layers of a prompt and finds them again."""
    storing = stages(number)
    storing["env"] |= {"PYTHONPATH": installed(tmp_path, "copies_of_process")}
    given = {"file_storage_path": str(tmp_path / "stored"), "prefetch_threshold": 16}
    storing |= {"hicache_storage_backend_extra_config": json.dumps(given)}
    storing |= {"hicache_storage_backend": "file", "hicache_write_policy": "write_through"}
    storing |= {"hicache_storage_prefetch_policy": "wait_complete", "page_size": 4}
    order = longer_than(90, range(len(list(requests()))))
    expected = answers(server, order, alone=False)[0]
    for loaded in (0, 2000):
        with start(model, files, **HOST, **storing, max_total_tokens=6000) as stored:
            assert answers(stored, order, alone=False)[0] == expected
            assert_nothing_is_left(stored)
            copies = list(copied(stored.log_text()).values())
        assert copies == copies[:1] * number
        assert copies[0]["loaded"] >= loaded


# Of a prompt: scoring, choosing, taking slots, copying, remembering. While decoding: reading, the
# policy's steps, writing what stays in place and elsewhere.
POINTS = {
    "scoring": 60, "choosing": 9, "end of choosing": 7, "layout": 11, "copy": 7, "memory": 11,
    "attention": 90, "following": 17, "fold in place": 9, "fold elsewhere": 3, "fold anew": 2,
    "variant": 2,  # compiled ahead, for a request with its own parameters
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("mixed", [False, True])
def test_what_fails_in_one_process_fails_for_one_request(model, files, expected, tmp_path, mixed):
    """With stages of two ranks: others answer as alone, and the server goes on without leaks."""
    faulty = stages(2, 2) | {"enable_mixed_chunk": mixed}
    faults = {"stage": 1, "rank": 0, "points": POINTS}
    path = installed(tmp_path, "faults_of_process")
    faulty["env"] |= {"PYTHONPATH": path, VARIABLE: json.dumps(faults)}
    listed = list(requests())

    def answer(i):
        name, tokens = listed[i]
        found = ask(server, tokens, name, kv_policy_kept=name not in COMPARING)
        if not found.ok:
            assert f"KV-cache policy `{name}` failed at " in found.text
            return "ended"
        meta = found.json()["meta_info"]["kv_policy"] if name != "none" else {}
        if meta.get("uncompressed") == "policy_error":
            return "in full"
        assert found.json()["output_ids"] == expected[i][1], (i, name, meta)
        return "as alone"

    with start(model, files, **faulty, **SET, kv_policy_max_failures=0) as server:
        with ThreadPoolExecutor(8) as pool:
            outcomes = set(pool.map(answer, range(len(listed))))
        assert outcomes == {"ended", "in full", "as alone"}
        sizes = range(30, 42)
        given = [ask(server, prompt(n, 90), "snapkv", kv_policy_set={"capacity": n}) for n in sizes]
        refused = [found for found in given if found.status_code == 400]
        assert len(refused) == 6
        assert all("failed with these values; the server's log says why" in x.text for x in refused)
        facts = {
            n: each.json()["meta_info"]["kv_policy"]
            for n, each in zip(sizes, given, strict=True) if each.ok
        }  # fmt: skip
        kept = {n: own["entries_kept"] for n, own in facts.items() if "entries_kept" in own}
        assert kept
        assert all(entries == 4 * 2 * n for n, entries in kept.items()), kept
        log = server.log_text()
        missed = {point for point in POINTS if f"{point} on purpose" not in log}
        assert missed <= {"fold elsewhere", "fold anew"}  # which few requests come to
        assert_nothing_is_left(server)


def found_no_room(facts):
    return facts.get("skipped_folds") or facts.get("uncompressed") == "no_slots"


def assert_nothing_is_left(server):
    """Checks that no slots are in use, also after a client has gone away."""
    for new, size in ((400, 300), (2, 1200)):
        params = {"kv_policy": "snapkv"}
        sampling = {"max_new_tokens": new, "ignore_eos": True, "custom_params": params}
        body = {"input_ids": prompt(3, size), "sampling_params": sampling, "stream": True}
        url = server.url + "/generate"
        with server.session.post(url, json=body, stream=True, timeout=PATIENCE) as answer:
            if new > 2:
                next(answer.iter_content(64))  # its prefill is done; the client goes away
    end = time.monotonic() + PATIENCE
    while True:
        server.session.post(server.url + "/flush_cache", headers=ADMIN, timeout=PATIENCE)
        loads = server.session.get(server.url + "/v1/loads", headers=ADMIN, timeout=PATIENCE).json()
        if all(each["num_used_tokens"] == 0 for each in loads["loads"]):
            break
        assert time.monotonic() < end, loads
        time.sleep(0.2)
    assert "leak" not in server.log_text().lower()
