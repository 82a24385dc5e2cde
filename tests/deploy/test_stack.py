"""The compose stack without containers: two replicas on a CPU, `smg` and Prometheus.

Options, rules and queries are those of examples/deploy; only addresses, intervals and the share of
requests that take part differ.
"""

import contextlib
import importlib.util
import json
import math
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import requests
import yaml
from deployed import DEPLOY, ROOT, load, queries, rules, value, variables, words

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="prometheus is not on PATH: Debian's package `prometheus` has it",
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("smg") is None,
        reason="smg is not installed: pip install smg==1.13.0",
    ),
]
MODEL = str(ROOT / "examples" / "model-tiny")
KEY = {"Authorization": "Bearer SGLANG_API_KEY"}  # variables without a value are their names
TEXT = "the quick brown fox jumps over the lazy dog " * 30
ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages")
PATIENCE = 180  # seconds; a machine may be busy


def until(holds, what):
    """Waits for and returns the first true result of `holds`."""
    end = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(requests.ConnectionError):
            if found := holds():
                return found
        assert time.monotonic() < end, what()
        time.sleep(0.2)


@contextlib.contextmanager
def running(command, log, ready):
    """A block in which a process runs, entered once its address answers."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        until(lambda: requests.get(ready, timeout=5).ok, log.read_text)
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """Addresses of `replicas`, `gateway` and `prometheus`, and the experiment's `file`."""
    from kvpolicy.evaluation.serving import free_port, serve

    folder = tmp_path_factory.mktemp("stack")
    services = load("compose.yaml")["services"]
    experiment = load("experiment/experiment.yaml")
    del experiment["steps"]
    experiment["coverage"] = "100 %"
    experiment["shadow"] |= {"sample": "100 %", "tokens_per_second": 1_000_000}
    file = folder / "experiment.yaml"
    file.write_text(yaml.safe_dump(experiment))
    with contextlib.ExitStack() as opened:
        replicas = []
        for name in ("server-0", "server-1"):
            command = words(services[name]["command"])
            own = {option: value(command, option) for option in ("kv-policy-override", "api-key")}
            flags = {
                "enable_metrics": "--enable-metrics" in command,
                "max_total_tokens": 16384,  # two replicas may share a device
                "admin_api_key": value(command, "admin-api-key"),
                "kv_experiment": file,
                "kv_experiment_state": folder / f"{name}.json",
                # A policy that lets entries leave while requests decode, for the panels on folds.
                "arguments": ["--kv-policy-fold-interval=4"],
            }
            policies = [ROOT / "policies" / f"{each}.yaml" for each in ("lava", "streamingllm")]
            settings = ["streamingllm.window=40"]
            flags |= {option.replace("-", "_"): each for option, each in own.items()}
            replicas.append(opened.enter_context(serve(MODEL, policies, settings, **flags)).url)
        gateway, own, prometheus = free_port(), free_port(), free_port()
        here = {"host": "127.0.0.1", "port": gateway, "prometheus-host": "127.0.0.1"}
        here["prometheus-port"] = own
        command = words(services["gateway"]["command"])
        command = command[: command.index("--worker-urls") + 1] + replicas
        command[:0] = [sys.executable, "-P", "-m", "smg", "launch"]
        for option, each in here.items():
            command[command.index(f"--{option}={value(command, option)}")] = f"--{option}={each}"
        ready = f"http://127.0.0.1:{gateway}/readiness"
        opened.enter_context(running(command, folder / "smg.log", ready))
        config = load("prometheus.yml")
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(DEPLOY / name) for name in config["rule_files"]]
        targets = {"sglang": [url.removeprefix("http://") for url in replicas],
                   "smg": [f"127.0.0.1:{own}"]}  # fmt: skip
        for job in config["scrape_configs"]:
            job["static_configs"] = [{"targets": targets[job["job_name"]]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}"]
        command += [f"--web.listen-address=127.0.0.1:{prometheus}"]
        command += [f"--storage.tsdb.path={folder / 'data'}"]
        address = f"http://127.0.0.1:{prometheus}"
        opened.enter_context(running(command, folder / "prometheus.log", f"{address}/-/ready"))
        yield SimpleNamespace(
            replicas=replicas,
            gateway=f"http://127.0.0.1:{gateway}",
            prometheus=address,
            experiment=experiment,
            file=file,
        )


def post(url, path, text=TEXT, *, new=6, headers=None, stream=False, **more):
    """One request of any route; `more` goes into its body."""
    if path == "/generate":
        sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
        if "custom_params" in more:
            sampling["custom_params"] = more.pop("custom_params")
        body = {"text": text, "sampling_params": sampling}
    else:
        body = {"model": MODEL, "max_tokens": new, "stream": stream}
        body |= {"prompt": text} if path == "/v1/completions" else {
            "messages": [{"role": "user", "content": text}]}  # fmt: skip
    headers = {**KEY, **(headers or {})}
    return requests.post(url + path, json={**body, **more}, headers=headers, timeout=120)


def facts(response):
    """The policy facts of an answer."""
    assert response.status_code == 200, response.text
    return json.loads(response.headers["x-kv-policy"])


def test_a_key_has_one_arm_on_both_replicas_and_through_the_gateway(stack):
    arms, used = set(), set()
    for i in range(8):
        key = {"headers": {"x-smg-routing-key": f"user {i}"}}
        seen = {facts(post(url, "/generate", **key))["arm"] for url in stack.replicas}
        for path in ROUTES:
            # The gateway sends what begins alike to one replica.
            for more in (key, {"user": f"user {i}"}):
                response = post(stack.gateway, path, f"{i} {path} {TEXT}", **more)
                seen.add(facts(response)["arm"])
                used.add(response.headers["x-smg-routed-worker-id"])
        assert len(seen) == 1, seen
        arms |= seen
    assert arms == {"control", "lava-25"}
    assert used == set(stack.replicas)


def test_what_the_gateway_lets_through(stack):
    """As the README of the example states."""
    named = {"custom_params": {"kv_policy": "streamingllm"}}
    for path in ROUTES:
        found = facts(post(stack.gateway, path, **named))
        assert (found["policy"], found["reason"]) == ("streamingllm", "TARGETING_MATCH")
    header = {"headers": {"x-kv-policy": "streamingllm"}}
    assert facts(post(stack.replicas[0], "/generate", **header))["policy"] == "streamingllm"
    assert facts(post(stack.gateway, "/generate", **header))["reason"] == "SPLIT"  # it is dropped
    alias = {"model": f"{MODEL}:streamingllm"}
    found = facts(post(stack.replicas[0], "/v1/chat/completions", **alias))
    assert found["policy"] == "streamingllm"
    assert post(stack.gateway, "/v1/chat/completions", **alias).status_code == 404
    unknown = {"custom_params": {"kv_policy": "gone"}}
    response = post(stack.gateway, "/v1/chat/completions", **unknown)
    assert (response.status_code, "this server has" in response.text) == (400, True)
    streamed = post(stack.gateway, "/v1/chat/completions", stream=True)
    assert streamed.text.rstrip().endswith("[DONE]")


def test_nobody_changes_anything_through_the_gateway(stack):
    admin = {"Authorization": "Bearer SGLANG_ADMIN_KEY"}
    for path in ("disable", "experiment/abort"):
        for headers in (KEY, admin):
            url = f"{stack.gateway}/kv_policy/{path}"
            assert requests.post(url, headers=headers, timeout=60).status_code in (401, 404)
    # Without a key nobody sees the server's options, of which SGLang shows the admin key.
    for url in (f"{stack.gateway}/get_server_info", f"{stack.replicas[0]}/server_info"):
        assert requests.get(url, timeout=60).status_code == 401
    for url in stack.replicas:
        found = requests.get(url + "/kv_policy/experiment", headers=KEY, timeout=60).json()
        assert found["state"] == "running"


def ask(stack, query):
    """Samples of an instant query to Prometheus."""
    answer = requests.get(
        f"{stack.prometheus}/api/v1/query", params={"query": query}, timeout=60
    ).json()
    assert answer["status"] == "success", (query, answer)
    return answer["data"]["result"]


@pytest.fixture(scope="module")
def traffic(stack):
    """Sends requests of every kind while Prometheus scrapes: keys, streams, named policies."""
    # The file is changed as a mounted file would be; only a change shows that it is in use.
    stack.file.write_text(yaml.safe_dump({**stack.experiment, "coverage": "90 %"}))

    def one(i):
        key = {"x-smg-routing-key": f"user {i}"}
        told = {"headers": key, "stream": i % 2 == 1}
        assert post(stack.gateway, "/v1/chat/completions", f"{i} {TEXT}", **told).ok
        if i % 4 == 0:
            named = {"custom_params": {"kv_policy": "streamingllm"}}
            facts(post(stack.gateway, "/v1/completions", f"{i} {TEXT}", new=24, **named))

    with ThreadPoolExecutor(4) as pool:
        for begin in range(0, 48, 8):
            list(pool.map(one, range(begin, begin + 8)))
            time.sleep(0.5)  # rates need samples at different times


@pytest.mark.usefixtures("traffic")
def test_both_replicas_and_the_gateway_are_scraped(stack):
    def scraped():
        found = {each["metric"]["instance"]: each["value"][1] for each in ask(stack, "up")}
        return found if len(found) == 3 and set(found.values()) == {"1"} else None

    until(scraped, lambda: ask(stack, "up"))
    [count] = ask(stack, "count(count by (instance) (sglang:kv_experiment_keys))")
    assert count["value"][1] == "2"
    [gateway] = ask(stack, 'sum(smg_router_requests_total{job="smg"})')
    assert float(gateway["value"][1]) > 0


def concrete(query):
    """A query of the dashboard with values for its variables."""
    for name, each in (
        ("$__rate_interval", "1m"), ("$window", "1m"), ("$quantile", "0.95"),
        ("$experiment", "lava-25"), ("$instance", ".+"),
    ):  # fmt: skip
        query = query.replace(name, each)
    return query


def has_data(stack, query):
    """Whether the answer to a query has at least one finite number."""
    return any(math.isfinite(float(each["value"][1])) for each in ask(stack, query))


@pytest.mark.usefixtures("traffic")
def test_every_query_is_answered_with_data(stack):
    asked = [concrete(query) for _, query in queries()]
    asked += [rule["record"] for rule in rules("record")]
    asked += [rule["expr"] for rule in rules("record")]
    empty = set(asked)

    def answered():
        empty.difference_update([query for query in empty if has_data(stack, query)])
        return not empty

    until(answered, lambda: empty)


@pytest.mark.usefixtures("traffic")
def test_the_variables_have_values(stack):
    for name, expected in (("experiment", {"lava-25"}), ("instance", 2)):
        definition = variables()[name]["definition"].removeprefix("label_values(")
        metric, label = definition.removesuffix(")").split(", ")
        params = {"match[]": metric}
        url = f"{stack.prometheus}/api/v1/label/{label}/values"
        found = requests.get(url, params=params, timeout=60).json()["data"]
        assert expected in (set(found), len(found))


@pytest.mark.usefixtures("traffic")
def test_arms_are_told_apart_in_the_panels(stack):
    for title in ("Requests per second", "Time to the first token", "KV memory of prompts saved",
                  "Drift, mean", "Time between tokens (streams)"):  # fmt: skip
        [query] = [query for name, query in queries() if name == title]
        arms = {each["metric"].get("kv_arm") for each in ask(stack, concrete(query))}
        assert {"control", "lava-25"} <= arms, title
    query = concrete(dict(queries())["KV memory of prompts saved"])
    saved = {each["metric"]["kv_arm"]: float(each["value"][1]) for each in ask(stack, query)}
    assert saved["control"] == 0
    assert 0.7 < saved["lava-25"] < 0.8  # rate 0.25
    drift = concrete(dict(queries())["Drift, mean"])
    lost = {each["metric"]["kv_arm"]: float(each["value"][1]) for each in ask(stack, drift)}
    assert lost["control"] == 0
    assert lost["lava-25"] > 0


@pytest.mark.usefixtures("traffic")
def test_no_alert_fires_without_a_cause(stack):
    firing = {each["metric"]["alertname"] for each in ask(stack, 'ALERTS{alertstate="firing"}')}
    assert firing <= {"KVExperimentNearBreach"}  # the small model loses much with a quarter
    known = requests.get(f"{stack.prometheus}/api/v1/rules", timeout=60).json()["data"]["groups"]
    found = [rule for group in known for rule in group["rules"]]
    assert len(found) == len(rules("alert")) + len(rules("record"))
    assert all(rule["health"] == "ok" for rule in found), [rule.get("lastError") for rule in found]


@pytest.mark.usefixtures("traffic")
def test_an_abort_is_alerted(stack, monkeypatch):
    """By the README's command, on one replica: this alert fires, and that of disagreement."""
    monkeypatch.setenv("SGLANG_ADMIN_KEY", "SGLANG_ADMIN_KEY")
    monkeypatch.setenv("SGLANG_API_KEY", "SGLANG_API_KEY")
    command = [sys.executable, "-P", "-m", "kvpolicy.evaluation.cli", "experiment", "abort"]
    command += ["--api-key-env", "SGLANG_API_KEY", "--url", stack.replicas[0]]
    subprocess.run(command, check=True, capture_output=True)
    firing = 'ALERTS{alertstate="firing", alertname="KVExperimentAborted"}'
    [alert] = until(lambda: ask(stack, firing), lambda: ask(stack, "ALERTS"))
    assert alert["metric"]["instance"] == stack.replicas[0].removeprefix("http://")
    until(
        lambda: ask(stack, 'ALERTS{alertname="KVExperimentReplicasDisagree"}'),
        lambda: ask(stack, "sglang:kv_experiment_state"),
    )
