"""An experiment in a real server: arms over every route, drift against full KV, ways to end it."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import pytest
from random_tokens import prompt

pytestmark = pytest.mark.server
POLICIES = Path(__file__).parents[2] / "policies"
LAVA, SINKS, GEMFILTER = (
    str(POLICIES / f"{name}.yaml") for name in ("lava", "sinks-recent", "gemfilter")
)
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
ADMIN = {"Authorization": "Bearer secret"}
PATIENCE = 120  # seconds; a machine may be busy
DOCUMENT = {
    "experiment": "trial",
    "targeting_key": ["header:x-key", "body:user", "rid"],
    "coverage": "100 %",
    "arms": {
        "control": {"policy": "none"},
        "same": {"policy": "lava", "set": {"capacity": 4096}},
        "tight": {"policy": "sinks-recent", "set": {"capacity": 12}},
    },
    "shadow": {"sample": "100 %", "top": 64, "tokens_per_second": 1_000_000},
    "metrics": [
        {"metric": "drift", "role": "guardrail", "margin": 0.05, "clip": 2},
        {"metric": "error_rate", "role": "guardrail", "margin": 0.2},
    ],
    "analysis": {"min_samples": 20, "on_fail": "alert"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiment")
    (folder / "experiment.yaml").write_text(json.dumps(DOCUMENT))
    return folder


@pytest.fixture(scope="module")
def server(model, folder):
    """A server with three arms, all compared: full KV, lava with all entries, twelve entries."""
    from kvpolicy.evaluation.serving import serve

    flags = {"enable_metrics": True, "admin_api_key": "secret", "kv_policy_override": "listed"}
    flags |= {"kv_experiment": folder / "experiment.yaml", "env": STRICT}
    flags |= {"kv_experiment_state": folder / "state.json", "chunked_prefill_size": 256}
    flags |= {"kv_policy_allow_set": ["lava.rate", "lava.window", "gemfilter.capacity"]}
    with serve(model, [LAVA, SINKS, GEMFILTER], ["gemfilter.capacity=40"], **flags) as server:
        yield server


def document(server):
    response = server.session.get(server.url + "/kv_policy/experiment", timeout=60)
    assert response.status_code == 200
    return response.json()


def settled(server, seconds=PATIENCE):
    """The document once every sampled request has been compared."""
    end = time.monotonic() + seconds
    while True:
        found = document(server)
        arms = found["analysis"]["arms"].values()
        seen = sum(sum(each.values()) for each in found["shadow"].values())
        if seen >= sum(arm["requests"] - arm["failed"] for arm in arms):
            return found
        assert time.monotonic() < end, found["shadow"]
        time.sleep(0.1)


def post(server, path, body, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.session.post(server.url + path, json=body, headers=headers, timeout=300)


def generate(server, key, tokens, new=8, **sampling):
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True, **sampling}
    response = post(
        server, "/generate", {"input_ids": tokens, "sampling_params": sampling}, x_key=key
    )
    assert response.status_code == 200, response.text
    return response.json()


def test_a_key_has_one_arm_on_every_route(server):
    text = " ".join(f"w{token}" for token in prompt(1, 90))
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
    sampling = {"max_new_tokens": 4, "temperature": 0}
    seen = set()
    for i in range(9):
        key = f"user {i}"
        facts = generate(server, key, prompt(i, 90))["meta_info"]["kv_policy"]
        arm = facts["arm"]
        seen.add(arm)
        assert (facts["experiment"], facts["reason"]) == ("trial", "SPLIT")
        policy = {"control": "none", "same": "lava@same", "tight": "sinks-recent@tight"}[arm]
        assert facts["policy"] == policy
        for path, body in (
            ("/generate", {"text": [text, text + " w5"], "sampling_params": sampling}),
            ("/generate", {"text": text, "sampling_params": {**sampling, "n": 2}}),
            ("/v1/completions", {"prompt": text, "max_tokens": 4, "temperature": 0}),
            ("/v1/chat/completions", chat),
            ("/v1/messages", chat),
        ):
            body = {"model": "default", "user": key, **body}
            header = post(server, path, body).headers["x-kv-policy"]
            found = json.loads(header)
            for each in found if isinstance(found, list) else [found]:
                assert each["arm"] == arm, (path, each)
        before = requests(server, arm)
        for path, body in (("/generate", {"text": text, "sampling_params": sampling}),
                           ("/v1/chat/completions", {"model": "default", **chat})):  # fmt: skip
            assert post(server, path, {**body, "stream": True}, x_key=key).status_code == 200
        assert requests(server, arm) == before + 2
    assert seen == {"control", "same", "tight"}


def requests(server, arm):
    """Number of an arm's requests in SGLang's own histogram of TTFT."""
    settled(server)
    name = "sglang:time_to_first_token_seconds_count"
    labels = (f'kv_arm="{arm}"', 'kv_experiment="trial"')
    found = server.metrics().items()
    return sum(v for k, v in found if k.startswith(name) and all(each in k for each in labels))


@pytest.mark.thorough(besides=["greedy", "temperature-regex"])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"temperature": 0.7, "logit_bias": {"17": 9.0, "300": -9.0}},
        {"temperature": 0.7, "frequency_penalty": 1.5, "presence_penalty": 1.0},
        {"repetition_penalty": 1.4, "min_new_tokens": 6},
        {"temperature": 0.9, "regex": "(w[12][0-9]*)+"},
    ],
    ids=lambda sampling: "-".join(sampling) or "greedy",
)
def test_full_kv_does_not_drift(server, sampling):
    """Sampling options change the tokens, but the model's own distributions are compared."""
    before = settled(server)
    with ThreadPoolExecutor(6) as pool:
        calls = [
            pool.submit(generate, server, f"key {i}", prompt(100 + i, 30 + 37 * i), 12, **sampling)
            for i in range(18)
        ]
        arms = [call.result()["meta_info"]["kv_policy"]["arm"] for call in calls]
    after = settled(server)
    for arm in ("control", "same"):
        assert compared(after, arm) == compared(before, arm) + arms.count(arm)
        means = after["analysis"]["arms"][arm]["tallies"]
        assert means["drift"][1] == means["top1_disagreement"][1] == 0, arm
    assert after["analysis"]["arms"]["tight"]["tallies"]["drift"][1] > 0
    assert "drift" in sampling or after["state"] == "running"  # a breach is only told of


def compared(found, arm):
    return found["analysis"]["arms"][arm]["tallies"]["drift"][0]


@pytest.mark.thorough
def test_the_tree_stays_as_if_no_shadow_had_run(server):
    """A shadow's entries are not cached: the next turn finds the same prefix as without it."""

    def turns(first, **headers):
        sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
        body = {"input_ids": prompt(first, 150), "sampling_params": sampling}
        answer = post(server, "/generate", body, **headers).json()
        settled(server)
        body["input_ids"] = body["input_ids"] + answer["output_ids"] + prompt(8, 5)
        return post(server, "/generate", body, **headers).json()["meta_info"]

    seen = {}
    for i in range(12):
        found = turns(1000 + i, x_key=f"key {i}")
        seen.setdefault(found["kv_policy"]["arm"], found["cached_tokens"])
    # These requests name their policies, so nothing shadows them.
    same = turns(2000, x_kv_policy="lava@same")["cached_tokens"]
    tight = turns(2001, x_kv_policy="sinks-recent@tight")["cached_tokens"]
    assert (same, tight) == (169, 150)
    assert seen == {"control": same, "same": same, "tight": tight}


def test_metrics_and_logs_do_not_have_the_shadows(server):
    """The scheduler counts only prompts that clients sent."""

    def counted():
        names = ("prompt_tokens_total", "queue_time_seconds_count", "realtime_tokens_total",
                 "kv_policy_requests_total", "num_requests_total")  # fmt: skip
        values = server.metrics().items()
        return [
            sum(v for k, v in values if k.startswith(f"sglang:{name}{{") and "decode" not in k)
            for name in names
        ]

    settled(server)
    before, text = counted(), len(server.log_text())
    for i in range(6):
        generate(server, f"key {i}", prompt(3000 + i, 100))
    settled(server)
    until(server, lambda _: counted()[4] == before[4] + 6)
    prompts, queued, prefilled, policies, requests = (
        after - was for after, was in zip(counted(), before, strict=True)
    )
    assert (prompts, queued, requests, policies) == (600, 6, 6, 6)
    assert prefilled == 600
    assert server.log_text()[text:].count("Prefill batch") == 6


def test_breaches_are_told_of_and_seen(server):
    found = settled(server)
    verdicts = {(each["arm"], each["metric"]): each for each in found["verdicts"]}
    assert verdicts["tight", "drift"]["outcome"] == "breached"
    assert verdicts["same", "drift"]["mean"] == 0
    assert "guardrail drift of arm tight is breached" in server.log_text()
    metrics = server.metrics()
    values = {k: v for k, v in metrics.items() if k.startswith("sglang:kv_experiment_")}
    [evidence] = [
        v for k, v in values.items()
        if "log_e_value" in k and '"tight"' in k and '"breach"' in k and '"drift"' in k
    ]  # fmt: skip
    assert evidence > 3
    assert [v for k, v in values.items() if "_state{" in k and '"running"' in k] == [1]
    assert [v for k, v in values.items() if "state_saved" in k] == [1]
    arms = found["analysis"]["arms"]
    assert arms["tight"]["tallies"]["kv_bytes_per_prompt_token"][0] > 0
    info = server.session.get(server.url + "/server_info", headers=ADMIN, timeout=60).json()
    full = info["internal_states"][0]["kv_policy_token_bytes"]
    number, total = arms["control"]["tallies"]["kv_bytes_per_prompt_token"]
    assert total == number * full > 0


def test_what_a_client_may_not_do(server):
    body = {"input_ids": prompt(3, 40), "sampling_params": {"max_new_tokens": 2}}
    for custom, message in (
        ({"kv_policy": "none"}, "gives no request full KV on demand"),
        ({"kv_policy_assigned": {"top": 9}}, "is the server's own"),
        ({"kv_policy": "gone"}, "this server has"),
    ):
        params = {"max_new_tokens": 2, "custom_params": custom}
        response = post(server, "/generate", {**body, "sampling_params": params})
        assert response.status_code == 400
        assert message in response.text
    for rid in ("HEALTH_CHECK_1", ["1", "HEALTH_CHECK_1"]):
        ids = [body["input_ids"]] * 2 if isinstance(rid, list) else body["input_ids"]
        response = post(server, "/generate", {**body, "input_ids": ids, "rid": rid})
        assert (response.status_code, "is SGLang's own" in response.text) == (400, True)
    assert server.session.get(server.url + "/health_generate", timeout=60).status_code == 200
    labels = {"kv_arm": "forged", "other": "x"}
    facts = post(server, "/generate", {**body, "custom_labels": labels}, x_kv_policy="lava").json()
    assert facts["meta_info"]["kv_policy"]["policy"] == "lava"
    assert not any("forged" in name for name in server.metrics())


def test_requests_set_parameters(server):
    def ask(custom, i=0):
        params = {"temperature": 0, "max_new_tokens": 4, "custom_params": custom}
        body = {"input_ids": prompt(30 + i, 200), "sampling_params": params}
        return post(server, "/generate", body)

    shares = [0.25, 0.5, 0.25, 0.75, 0.25]
    with ThreadPoolExecutor(5) as pool:
        asked = [{"kv_policy": "lava", "kv_policy_set": {"rate": x, "window": 8}} for x in shares]
        found = [answer.json()["meta_info"]["kv_policy"] for answer in pool.map(ask, asked)]
    for share, facts in zip(shares, found, strict=True):
        assert facts["set"] == {"rate": share, "window": 8}
        assert facts["entries_kept"] / facts["entries_before"] == pytest.approx(share, abs=0.03)
    for custom, message in (
        ({"kv_policy_set": {"rate": 0.5}}, "the server chooses the policy of this request"),
        ({"kv_policy": "lava", "kv_policy_set": {"rate": 3}}, "kv_policy_set of `lava`: `rate` "),
        ({"kv_policy": "lava", "kv_policy_set": {"window": 4.5}}, "kv_policy_set of `lava`: "),
        ({"kv_policy": "lava", "kv_policy_set": {"kernel": 3}}, "only `rate` and `window`"),
        ({"kv_policy": "sinks-recent", "kv_policy_set": {"rate": 1}}, "requests may set none"),
        ({"kv_policy": "lava", "kv_policy_set": {"rate": "0.5"}}, "expected a number"),
        ({"kv_policy": "lava", "kv_policy_set": [1]}, "expected a JSON object"),
        ({"kv_policy": ["lava"], "kv_policy_set": {}}, "kv_policy is ["),
    ):
        response = ask(custom)
        assert (response.status_code, message in response.text) == (400, True), response.text


def policy_url(server, name):
    return f"{server.url}/kv_policy/policies/{name}"


def put_policy(server, name, body, dry_run="false"):
    body = body if isinstance(body, str) else json.dumps(body)
    url = f"{policy_url(server, name)}?dry_run={dry_run}"
    return server.session.put(url, data=body, headers=ADMIN)


def named(server, name, tokens, new=8):
    params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": params}
    return post(server, "/generate", body, x_kv_policy=name)


@pytest.mark.thorough
def test_policies_come_and_go(server):
    text = (POLICIES / "snapkv.yaml").read_text()
    small = {"policy": text, "set": {"capacity": 20, "window": 4}}
    assert put_policy(server, "mine", small, "true").json()["dry_run"] is True
    assert named(server, "mine", prompt(1, 100)).status_code == 400
    assert put_policy(server, "mine", small).status_code == 200
    first = named(server, "mine", prompt(1, 100)).json()
    assert first["meta_info"]["kv_policy"]["entries_kept"] == 4 * 2 * 20
    # Who decodes keeps what it has; who comes later gets the new one.
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(named, server, "mine", prompt(i, 100), 400) for i in range(3)]
        until(server, lambda _: private(server, "mine") >= 3 * 20)  # their prompts have ended
        large = {"policy": text, "set": {"capacity": 30, "window": 4}}
        assert put_policy(server, "mine", large).status_code == 200
        second = named(server, "mine", prompt(1, 100)).json()
        kept = [each.result().json()["meta_info"]["kv_policy"]["entries_kept"] for each in running]
    assert kept == [4 * 2 * 20] * 3
    assert second["meta_info"]["kv_policy"]["entries_kept"] == 4 * 2 * 30
    shown = server.session.get(server.url + "/kv_policy", timeout=60).json()["policies"]
    assert shown[-1]["name"] == "mine"
    for name in ("h2o", "streamingllm", "fastkv"):  # these decode on, turn keys, propagate
        response = put_policy(server, name, (POLICIES / f"{name}.yaml").read_text())
        assert response.status_code == 200, response.text
        assert named(server, name, prompt(2, 60)).status_code == 200
    for name in ("mine", "h2o", "streamingllm", "fastkv"):
        response = server.session.delete(policy_url(server, name), headers=ADMIN, timeout=60)
        assert response.json() == {"name": name, "withdrawn": True}
        assert named(server, name, prompt(1, 100)).status_code == 400


def test_policies_that_cannot_come(server):
    minicache = (POLICIES / "minicache.yaml").read_text()
    snapkv = (POLICIES / "snapkv.yaml").read_text()
    for name, body, status, message in (
        ("pairs", minicache, 400, "MiB for tables of layers in pairs, which this server did not"),
        ("mine", "policy: [", 400, "mine:1:"),
        ("mine", {"policy": snapkv, "set": {"capacity": -3}}, 400, "capacity"),
        ("mine", {"text": snapkv}, 400, "its YAML"),
        ("none", snapkv, 400, "the name `none` stands for no policy"),
        ("lava", snapkv, 409, "experiment `trial` compares `lava`"),
    ):
        for dry_run in ("true", "false"):  # the first finds whatever the second would
            response = put_policy(server, name, body, dry_run)
            found = (response.status_code, message in response.text)
            assert found == (status, True), response.text
    delete = server.session.delete
    assert delete(policy_url(server, "gone"), headers=ADMIN, timeout=60).status_code == 404
    assert delete(policy_url(server, "lava"), headers=ADMIN, timeout=60).status_code == 409
    assert delete(policy_url(server, "gone"), timeout=60).status_code == 401


def test_the_doors_need_the_admin_key(server):
    for path in ("disable", "enable", "experiment/abort", "experiment/pause"):
        assert post(server, f"/kv_policy/{path}", {}).status_code == 401
    url = server.url + "/kv_policy/experiment"
    assert server.session.put(url, data="x", timeout=60).status_code == 401
    assert server.session.get(server.url + "/kv_policy", timeout=60).json()["enabled"] is True
    info = server.session.get(server.url + "/server_info", headers=ADMIN, timeout=60).json()
    [state] = info["internal_states"]
    found = document(server)
    assert state["kv_policy_applied"] is True
    assert state["kv_experiment"] == {
        "name": "trial", "revision": found["revision"], "digest": found["digest"],
        "state": "running", "rolled_back": [], "coverage": 1.0,
    }  # fmt: skip


def test_every_request_is_compared_once(server):
    """SGLang sends a copy that generates nothing before `n` samples, as scoring does."""
    before = settled(server)
    arm = generate(server, "key 1", prompt(60, 80), n=3)[0]["meta_info"]["kv_policy"]["arm"]
    params = {"max_new_tokens": 0}
    for path, body in (
        ("/v1/score", {"query": "w3 w4", "items": ["w5", "w6"], "label_token_ids": [5, 6]}),
        ("/generate", {"input_ids": prompt(61, 80), "sampling_params": params}),
    ):
        assert post(server, path, {"model": "default", **body}, x_key="key 1").status_code == 200
    generate(server, "key 1", prompt(62, 80))  # what came before it has been counted, too
    after = settled(server)
    new = {
        a: f - b for a, b, f in zip(after["shadow"], finished(before), finished(after), strict=True)
    }
    assert new == {**dict.fromkeys(new, 0), arm: 4}
    outcomes = after["shadow"][arm]
    assert outcomes["compared"] == before["shadow"][arm]["compared"] + 2
    assert outcomes["not_comparable"] == before["shadow"][arm]["not_comparable"]


def test_requests_that_are_not_sampled_count_too(server):
    """SGLang completes no answers of a batch from which nothing is collected."""
    fewer = {**DOCUMENT, "shadow": {**DOCUMENT["shadow"], "sample": "0.0001 %"}}
    assert put(server, json.dumps(fewer)).json()["begins_anew"] is True
    for i in range(12):
        assert generate(server, f"key {i}", prompt(i, 30))["meta_info"]["kv_policy"]["arm"]
    found = until(server, lambda found: sum(finished(found)) == 12)
    assert finished(found) == [arm["requests"] for arm in found["analysis"]["arms"].values()]
    assert min(finished(found)) > 0
    assert put(server, json.dumps(DOCUMENT)).json()["begins_anew"] is True


def finished(found):
    return [arm["finished"] for arm in found["analysis"]["arms"].values()]


def test_the_switch(server):
    assert post(server, "/kv_policy/disable", {}, **ADMIN).json() == {"enabled": False}
    for key in ("key 1", "key 2", "key 3"):
        assert "kv_policy" not in generate(server, key, prompt(4, 90))["meta_info"]
    assert applied(server) == 0
    assert post(server, "/kv_policy/enable", {}, **ADMIN).json() == {"enabled": True}
    assert "arm" in generate(server, "key 1", prompt(4, 90))["meta_info"]["kv_policy"]
    assert applied(server) == 1


def applied(server):
    [value] = [v for k, v in server.metrics().items() if k.startswith("sglang:kv_policy_applied")]
    return value


def put(server, text, dry_run="false"):
    url = f"{server.url}/kv_policy/experiment?dry_run={dry_run}"
    return server.session.put(url, data=text, headers=ADMIN, timeout=60)


def test_other_versions_by_request_and_by_file(server, folder):
    first = document(server)
    smaller = {**DOCUMENT, "coverage": "50 %"}
    assert put(server, json.dumps(smaller), "true").json()["begins_anew"] is False
    assert document(server)["coverage"] == 1
    assert put(server, json.dumps(smaller)).status_code == 200
    now = document(server)
    assert (now["coverage"], now["revision"]) == (0.5, first["revision"])
    assert now["analysis"]["arms"]["tight"]["requests"] > 0
    for text, status, message in (
        ("coverage: [", 400, "request:1"),
        (json.dumps({**DOCUMENT, "experiment": "other"}), 409, "runs experiment `trial`"),
        (json.dumps({**DOCUMENT, "default": "gone"}), 400, "no policy `gone`"),
    ):
        response = put(server, text)
        assert (response.status_code, message in response.text) == (status, True), response.text
    # A mounted ConfigMap changes by a link; a broken file changes nothing.
    file = folder / "experiment.yaml"
    other = folder / "second.yaml"
    weights = {**DOCUMENT["arms"], "tight": {**DOCUMENT["arms"]["tight"], "weight": 2}}
    other.write_text(json.dumps({**DOCUMENT, "arms": weights}))
    link = folder / "link"
    link.symlink_to(other)
    link.replace(file)
    until(server, lambda found: found["revision"] != first["revision"])
    assert document(server)["analysis"]["arms"]["tight"]["requests"] == 0
    other.write_text("experiment: {")
    found = until(server, lambda found: not found["reload"]["success"])
    assert "second.yaml" in found["reload"]["problem"] or "experiment" in found["reload"]["problem"]
    other.write_text(json.dumps({**DOCUMENT, "arms": weights}))
    until(server, lambda found: found["reload"]["success"])


def test_arms_take_turns(server):
    """With `design: switchback` the time window decides the arm, also for latency."""
    latency = {"metric": "e2e_seconds", "role": "guardrail", "margin": 0.5, "clip": 5}
    turns = {**DOCUMENT, "metrics": [latency], "shadow": {"sample": "0.0001 %"}}
    turns["design"] = {"switchback": {"window": "1h", "burn_in": "0s"}}
    assert put(server, json.dumps(turns)).json()["begins_anew"] is True
    hours = {int(time.time() // 3600)}
    facts = [
        generate(server, f"key {i}", prompt(i, 40))["meta_info"]["kv_policy"] for i in range(9)
    ]
    arms = {each["arm"] for each in facts}
    hours.add(int(time.time() // 3600))
    assert len(arms) <= len(hours)
    found = until(server, lambda found: sum(finished(found)) == 9)
    windows = found["analysis"]["windows"]["windows"]
    assert {int(hour) for hour in windows} <= hours
    assert {arm for arm, *_ in windows.values()} == arms
    assert sum(count for _, count, _ in windows.values()) == 9
    assert put(server, json.dumps(DOCUMENT)).json()["begins_anew"] is True


def test_scoring_makes_way_for_what_wants_an_idle_server(server):
    """Flushes succeed and memory is released while a sample is scored, which is compared later."""
    before = settled(server)
    for i in range(12):
        generate(server, f"key {i}", prompt(4000 + i, 600), 4)
        time.sleep(0.01 * (i % 4))
        for path in ("flush_cache", "release_memory_occupation", "resume_memory_occupation"):
            response = post(server, f"/{path}", {}, **ADMIN)
            assert response.status_code == 200, response.text
    arms = ("control", "same", "tight")
    until(
        server,
        lambda after: sum(compared(after, arm) - compared(before, arm) for arm in arms) == 12,
    )


def test_answers_of_other_weights_are_not_compared(server, model):
    before = settled(server)["shadow"]
    tags = {"tags": ["cuda_graph"]}  # a server on a CPU serves on; samples wait
    assert post(server, "/release_memory_occupation", tags, **ADMIN).status_code == 200
    arms = [
        generate(server, f"key {i}", prompt(5000 + i, 50))["meta_info"]["kv_policy"]["arm"]
        for i in range(4)
    ]
    update = {"model_path": model}
    assert post(server, "/update_weights_from_disk", update, **ADMIN).json()["success"]
    assert post(server, "/resume_memory_occupation", tags, **ADMIN).status_code == 200

    def left_out(found):
        return {
            arm: outcomes["not_comparable"] - before[arm]["not_comparable"]
            for arm, outcomes in found["shadow"].items()
        }

    found = until(server, lambda found: sum(left_out(found).values()) == len(arms))
    assert left_out(found) == {arm: arms.count(arm) for arm in found["shadow"]}


def until(server, holds, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not holds(found := document(server)):
        assert time.monotonic() < end, found
        time.sleep(0.1)
    return found


@pytest.mark.thorough
def test_a_breach_rolls_an_arm_back_and_a_restart_does_not_undo_it(server, folder, model):
    from kvpolicy.evaluation.serving import serve

    ending = {**DOCUMENT, "analysis": {"min_samples": 20, "on_fail": "abort"}, "default": "lava"}
    assert put(server, json.dumps(ending)).json()["begins_anew"] is True
    arms = {}
    for i in range(200):
        key = f"key {i}"
        facts = generate(server, key, prompt(200 + i, 80))["meta_info"]["kv_policy"]
        arms.setdefault(facts.get("arm"), key)
        if i % 10 == 9 and settled(server)["rolled_back"]:
            break
    found = document(server)
    assert found["state"] == "running"
    assert "guardrail drift of arm tight is breached" in found["rolled_back"]["tight"]
    for arm, policy in (("tight", "lava"), ("same", "lava@same"), ("control", "none")):
        facts = generate(server, arms[arm], prompt(1, 80))["meta_info"]["kv_policy"]
        assert (facts["policy"], facts.get("arm")) == (policy, None if arm == "tight" else arm)
    enabled = {k: v for k, v in server.metrics().items() if "kv_experiment_arm_enabled" in k}
    assert [v for k, v in enabled.items() if '"tight"' in k] == [0]
    assert [v for k, v in enabled.items() if '"same"' in k] == [1]
    # The last arm beside control takes the experiment with it.
    url = "/kv_policy/experiment/abort"
    assert post(server, url, {"arm": "gone"}, **ADMIN).status_code == 409
    body = {"arm": "same", "reason": "enough seen"}
    assert post(server, url, body, **ADMIN).json() == {"state": "aborted", "changed": True}
    assert post(server, "/kv_policy/experiment/resume", {}, **ADMIN).status_code == 409
    facts = generate(server, arms["same"], prompt(1, 80))["meta_info"]["kv_policy"]
    assert (facts["policy"], "arm" in facts) == ("lava", False)
    (folder / "ending.yaml").write_text(json.dumps(ending))
    seen = document(server)["analysis"]
    evidence = folder / "state.json.evidence"
    until(server, lambda _: json.loads(evidence.read_text())["analysis"] == seen)
    for name in ("state.json", "state.json.evidence"):  # the server still runs, and has claimed it
        (folder / f"copied-{name}").write_bytes((folder / name).read_bytes())
    state = folder / "copied-state.json"
    flags = {"kv_experiment": folder / "ending.yaml", "kv_experiment_state": state}
    with serve(model, [LAVA, SINKS], **flags) as again:
        found = document(again)
        assert (found["state"], found["reason"]) == ("aborted", "enough seen")
        assert list(found["rolled_back"]) == ["tight", "same"]
        assert found["analysis"]["arms"] == seen["arms"]
        facts = generate(again, arms["same"], prompt(1, 80))["meta_info"]["kv_policy"]
        assert (facts["policy"], "arm" in facts) == ("lava", False)
        # No admin key is configured: nobody may.
        assert post(again, "/kv_policy/disable", {}).status_code == 403


def changed(text, old, new):
    assert old in text
    return text.replace(old, new)


@pytest.mark.thorough
def test_a_wrong_experiment_stops_the_launch(model, tmp_path):
    """One message with the place, before any process starts."""
    text = json.dumps(DOCUMENT, indent=1)
    file, state = tmp_path / "experiment.yaml", tmp_path / "state.json"
    state.write_text("{")
    cases = {
        changed(text, '"100 %",\n "arms"', '"101 %",\n "arms"'): f"{file}:8:14: error",
        changed(text, '"policy": "lava"', '"policy": "lawa"'): "did you mean `lava`?",
        changed(text, '"policy"', '"weight": 0, "policy"'): "error",
        "experiment: [": f"{file}:",
        text: f"--kv-experiment-state {state}: it is not JSON",
    }
    for content, message in cases.items():
        file.write_text(content)
        command = [sys.executable, "-P", "-m", "sglang.launch_server", "--model-path", model]
        command += ["--device", "cpu", "--attention-backend", "torch_native", "--kv-policy", LAVA]
        command += [SINKS, "--kv-experiment", str(file), "--kv-experiment-state", str(state)]
        done = forked.run(command, timeout=200)
        output = done.stdout + done.stderr
        assert (done.returncode, message in output) == (1, True), output[-3000:]
        assert "Traceback" not in output


def test_nothing_is_left_behind(server):
    assert post(server, "/flush_cache", {}, **ADMIN).status_code == 200
    end = time.monotonic() + PATIENCE
    while any(used(server)):
        assert time.monotonic() < end, used(server)
        time.sleep(0.2)


def used(server):
    """Slots in use, by SGLang's load report and of compressed entries."""
    loads = server.session.get(server.url + "/v1/loads", headers=ADMIN, timeout=60).json()["loads"]
    assert loads
    return [each["num_used_tokens"] for each in loads] + [private(server)]


def private(server, policy=""):
    """Slots of compressed entries, of all policies or of one."""
    values = server.metrics().items()
    slots = {k: v for k, v in values if k.startswith("sglang:kv_policy_private_slots{")}
    assert slots
    return sum(v for k, v in slots.items() if f'policy="{policy}' in k)
