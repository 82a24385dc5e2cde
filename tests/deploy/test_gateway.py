"""SGLang's gateway `smg`: two replicas with policies and an experiment, one of which dies."""

import contextlib
import importlib.util
import json
import os
import signal
import time
from types import SimpleNamespace

import pytest
from deployed import ROOT

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        importlib.util.find_spec("smg") is None,
        reason="smg is not installed: pip install smg==1.13.0",
    ),
]
MODEL = str(ROOT / "examples" / "model-tiny")
EXPERIMENT = {
    "experiment": "trial",
    "targeting_key": ["header:x-smg-routing-key"],
    "coverage": "100 %",
    "arms": {"control": {"policy": "none"}, "tight": {"policy": "snapkv"}},
    "metrics": [{"metric": "error_rate", "role": "info"}],
}
USERS = [f"user {i}" for i in range(10)]
TEXT = "the quick brown fox jumps over the lazy dog " * 20


@pytest.fixture(scope="module")
def gateway(monkeypatch_module):
    """The module benchmarks/gateway.py."""
    monkeypatch_module.syspath_prepend(str(ROOT / "benchmarks"))
    import gateway

    return gateway


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def stack(tmp_path_factory, gateway):
    """Two replicas, and a gateway that sends a key's requests to the same replica."""
    from kvpolicy.evaluation.serving import serve

    file = tmp_path_factory.mktemp("experiment") / "experiment.yaml"
    file.write_text(json.dumps(EXPERIMENT))
    policies = [ROOT / "policies" / f"{name}.yaml" for name in ("snapkv", "h2o")]
    given = ["snapkv.capacity=48", "snapkv.window=16", "h2o.heavy=24", "h2o.window=24"]
    with contextlib.ExitStack() as opened:
        servers = [
            opened.enter_context(serve(MODEL, policies, given, kv_experiment=file))
            for _ in range(2)
        ]
        words = ["--policy=cache_aware", "--routing-key-override", "--assignment-mode=min_group"]
        words += ["--health-check-interval-secs=1", "--health-check-timeout-secs=5"]
        words += ["--health-failure-threshold=1"]
        url = opened.enter_context(gateway.gateway([each.url for each in servers], *words))
        yield SimpleNamespace(servers=servers, url=url)


def asked(stack, gateway, user, begins):
    """The replica to which a user's request was sent, and its arm."""
    answer = gateway.ask(stack.url, f"{begins} {TEXT}", None, x_smg_routing_key=user)
    assert answer.status_code == 200, answer.text
    facts = answer.json()["meta_info"]["kv_policy"]
    return answer.headers[gateway.WORKER], facts["arm"]


def test_keys_are_sticky_and_survive_a_replica(stack, gateway):
    """A key's requests go to one replica and, after its death, to the other, in the same arm."""
    before = {user: asked(stack, gateway, user, user) for user in USERS}
    replicas = {where for where, _ in before.values()}
    assert {arm for _, arm in before.values()} == {"control", "tight"}
    assert replicas == {each.url for each in stack.servers}
    for user in USERS:  # what begins alike would go to one replica without a key
        assert asked(stack, gateway, user, "all of us") == before[user]
    dead, left = stack.servers
    os.killpg(dead.process.pid, signal.SIGKILL)
    dead.process.wait()
    end = time.monotonic() + gateway.PATIENCE
    moved = {}
    for user in USERS:
        while user not in moved:
            assert time.monotonic() < end
            with contextlib.suppress(AssertionError):  # it may be noticed by this request
                moved[user] = asked(stack, gateway, user, user)
    assert {where for where, _ in moved.values()} == {left.url}
    assert {user: arm for user, (_, arm) in moved.items()} == {
        user: arm for user, (_, arm) in before.items()
    }
