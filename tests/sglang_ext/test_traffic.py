"""The policy of a request: the one it names, those it may name, and an experiment's draw."""

import asyncio
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.experiments.definition import reading
from kvpolicy.experiments.definition.experiment import (
    Arm,
    CoverageStep,
    Experiment,
    KeySource,
    Metric,
    Shadow,
    as_document,
)
from kvpolicy.experiments.replica import state_file
from kvpolicy.sglang_ext import frontend
from kvpolicy.sglang_ext.clients.allowed import Allowed
from kvpolicy.sglang_ext.clients.control import Control, _policy_in
from kvpolicy.sglang_ext.clients.front_end import FrontEnd
from kvpolicy.sglang_ext.clients.traffic import Traffic
from kvpolicy.sglang_ext.experiment.arms import with_arms
from kvpolicy.sglang_ext.experiment.live import Live
from kvpolicy.sglang_ext.experiment.shadow import Budget
from kvpolicy.sglang_ext.face import asked, compat
from kvpolicy.sglang_ext.face.errors import Refused

EXPERIMENT = Experiment(
    name="trial",
    targeting_key=(
        KeySource("header", "x-key"),
        KeySource("body", "metadata.user"),
        KeySource("session_id"),
    ),
    coverage=0.5,
    default="snapkv",
    arms=(Arm("control", "none"), Arm("lava", "lava", 3.0, {"rate": 0.25})),
    shadow=Shadow(1.0, top=8),
    metrics=(Metric("error_rate", "guardrail", 0.1),),
)

CLEARED = SimpleNamespace(metric="error_rate", role="guardrail", arm="lava", outcome="cleared")


@pytest.fixture
def live(tmp_path):
    file = tmp_path / "experiment.yaml"
    file.write_text("")
    served = {"snapkv": {}, "lava": {}, "lava@lava": {"rate": 0.25}}
    return Live(EXPERIMENT, file, served)


def request(headers=None, body=None, gone=()):
    async def json():
        return body

    async def is_disconnected():
        return bool(gone)

    return SimpleNamespace(headers=headers or {}, json=json, is_disconnected=is_disconnected)


def choose(
    traffic, params=None, *,
    headers=None, body=None, gone=(), adapters=(), preferred=None, **fields,
):  # fmt: skip
    """A request after its policy was chosen; its client has gone once `gone` holds something."""
    fields = {"rid": None, "session_id": None, "session_params": None, "lora_path": None} | fields
    obj = SimpleNamespace(**{"sampling_params": params, "custom_labels": None} | fields)
    registry = SimpleNamespace(get_all_adapters=lambda: adapters)
    manager = SimpleNamespace(
        enable_lora=bool(adapters), lora_registry=registry, preferred_sampling_params=preferred
    )
    sent = request(headers, body, gone)

    async def arrive():
        if await traffic.choose(manager, obj, sent):
            await traffic.draw(traffic.live, manager, obj, sent)

    asyncio.run(arrive())
    return obj


def custom(obj):
    return (obj.sampling_params or {}).get("custom_params")


def test_without_experiment_a_request_stays_as_it_is():
    traffic = Traffic({"lava": 0})
    assert choose(traffic).sampling_params is None
    params = {"temperature": 0.5, "custom_params": {"kv_policy": "lava", "other": 1}}
    assert choose(traffic, params).sampling_params == params
    assert choose(traffic, {"custom_params": [1]}).sampling_params == {"custom_params": [1]}


def test_a_header_or_the_models_name_chooses_too():
    traffic = Traffic({"lava": 0, "snapkv": 0})
    assert custom(choose(traffic, headers={"x-kv-policy": "lava"})) == {"kv_policy": "lava"}
    named = choose(traffic, lora_path="snapkv")
    assert (custom(named), named.lora_path) == ({"kv_policy": "snapkv"}, None)
    assert custom(choose(traffic, lora_path="none")) == {"kv_policy": "none"}
    # What stands in the body comes first, then the header.
    both = {"headers": {"x-kv-policy": "lava"}, "lora_path": "snapkv"}
    assert custom(choose(traffic, **both)) == {"kv_policy": "lava"}
    body = {"custom_params": {"kv_policy": "none"}}
    assert custom(choose(traffic, body, **both)) == {"kv_policy": "none"}
    # Adapters of such a name are adapters.
    adapter = choose(traffic, lora_path="lava", adapters=["lava"])
    assert (custom(adapter), adapter.lora_path) == (None, "lava")
    assert choose(traffic, lora_path="other", adapters=["lava"]).lora_path == "other"
    assert choose(traffic, lora_path="").lora_path == ""  # as none, to SGLang
    message = "^the request names `other`, .* LoRA is not enabled, and the policies are `lava`, "
    with pytest.raises(ValueError, match=message):
        choose(traffic, lora_path="other")


@pytest.mark.parametrize(
    ("override", "name", "message"),
    [
        ("listed", "none", "gives no request full KV on demand .--kv-policy-override listed."),
        ("none", "lava", "chooses the policy of every request .--kv-policy-override none."),
        ("none", "none", "chooses the policy of every request"),
    ],
)
@pytest.mark.parametrize("way", ["body", "header", "model"])
def test_what_a_client_may_not_name(override, name, message, way):
    traffic = Traffic({"lava": 0}, override)
    where, given = {
        "body": ("custom_params.kv_policy", {"params": {"custom_params": {"kv_policy": name}}}),
        "header": ("header x-kv-policy", {"headers": {"x-kv-policy": name}}),
        "model": ("the policy after the model's name", {"lora_path": name}),
    }[way]
    with pytest.raises(ValueError, match=f"^{where} is `{name}`, but this server {message}"):
        choose(traffic, **given)
    if name == "none":
        assert custom(choose(Traffic({"lava": 0}, "listed"), headers={"x-kv-policy": "lava"}))


@pytest.mark.parametrize("name", ["lva", "", ["lava"], None])
def test_an_unknown_name_is_blamed_before_the_scheduler_sees_it(name):
    """A stream could only be told when its answer has begun."""
    shown = f"`{name}`" if isinstance(name, str) else json.dumps(name)
    ways = {"custom_params.kv_policy": {"params": [{}, {"custom_params": {"kv_policy": name}}]}}
    if isinstance(name, str):
        ways["header x-kv-policy"] = {"headers": {"x-kv-policy": name}}
    for where, given in ways.items():
        for override, names in (("any", "`lava`, `none`"), ("listed", "`lava`")):
            message = re.escape(f"{where} is {shown}; this server has {names}")
            with pytest.raises(ValueError, match=f"^{message}$"):
                choose(Traffic({"lava": 0}, override), **given)


def test_a_programs_own_parameters_stay_as_they_are():
    """`sgl.Engine` sends the caller's objects, and the caller may send them again."""
    traffic, params = Traffic({"lava": 0, "snapkv": 0}), {"temperature": 0}
    for policy in ("lava", "snapkv"):
        chosen = choose(traffic, params, lora_path=policy)
        assert (custom(chosen), params) == ({"kv_policy": policy}, {"temperature": 0})
    parts = [{"temperature": 0}, {"temperature": 1}]
    chosen = choose(traffic, parts, lora_path="lava")
    assert [each["custom_params"]["kv_policy"] for each in chosen.sampling_params] == ["lava"] * 2
    assert parts == [{"temperature": 0}, {"temperature": 1}]


def test_parts_of_a_batch_are_looked_at_one_by_one():
    traffic = Traffic({"lava": 0}, "listed")
    parts = [{"custom_params": {"kv_policy": "lava"}}, {}, {"custom_params": {"kv_policy": "none"}}]
    with pytest.raises(ValueError, match="full KV"):
        choose(traffic, parts)
    with pytest.raises(ValueError, match="kv_policy_assigned is the server's own"):
        choose(Traffic({"lava": 0}), [{}, {"custom_params": {asked.ASSIGNED: {"top": 5}}}])


def test_preferred_custom_params_stay_where_a_policy_is_written(live):
    wanted = {"mine": 1, "kv_policy": "snapkv"}
    preferred = {"temperature": 0.5, "custom_params": wanted}
    same = choose(Traffic({"snapkv": 0}), headers={"x-kv-policy": "snapkv"}, preferred=preferred)
    assert custom(same) == wanted
    given = {"headers": {"x-kv-policy": "lava"}, "preferred": preferred}
    traffic = Traffic({"lava": 0, "snapkv": 0})
    for params in (None, {"top_k": 3}):
        assert custom(choose(traffic, params, **given)) == {"mine": 1, "kv_policy": "lava"}
    for own in (None, {"other": 2}):  # as without a policy, they replace the preferred ones
        found = custom(choose(traffic, {"custom_params": own}, **given))
        assert found == {**(own or {}), "kv_policy": "lava"}
    traffic = Traffic({"lava": 0, "snapkv": 0}, live=live)
    key = next(f"{i}" for i in range(200) if "arm" in live.assign(0, f"{i}", 0.0)[1])
    drawn = choose(traffic, headers={"x-key": key}, preferred=preferred)
    assert custom(drawn)["mine"] == 1
    assert "arm" in custom(drawn)["kv_policy_assigned"]
    assert preferred["custom_params"] == {"mine": 1, "kv_policy": "snapkv"}


def test_parts_that_name_no_policy_are_the_experiments(live):
    traffic = Traffic({"snapkv": 0, "lava": 0}, live=live)
    for i in range(20):
        headers = {"x-key": f"key {i}"}
        alone = choose(traffic, {}, headers=headers).sampling_params["custom_params"]
        params = [{"custom_params": {"kv_policy": "none"}}, {}, {"custom_params": {"mine": 1}}]
        first, second, third = choose(traffic, params, headers=headers).sampling_params
        assert first["custom_params"]["kv_policy"] == "none"
        assert first["custom_params"]["kv_policy_assigned"]["reason"] == "TARGETING_MATCH"
        # These differ from request to request.
        differ = dict.fromkeys(("seconds", "top", "answers", "draw"), 0)
        for part in (second, third):
            given = part["custom_params"]
            assert given.get("kv_policy") == alone.get("kv_policy")
            same = given["kv_policy_assigned"] | differ, alone["kv_policy_assigned"] | differ
            assert same[0] == same[1]
        assert third["custom_params"]["mine"] == 1
    params = [{"custom_params": {"kv_policy": "none"}}, {}]
    _, second = choose(traffic, params, headers={"x-kv-policy": "lava"}).sampling_params
    assert second["custom_params"]["kv_policy"] == "lava"


def test_what_asks_for_no_token_takes_no_part(live):
    traffic = Traffic({"snapkv": 0, "lava": 0}, live=live)
    key = next(f"{i}" for i in range(200) if "arm" in live.assign(0, f"{i}", 0.0)[1])
    before = assigned_number(live)
    default = {"kv_policy": "snapkv", "kv_policy_assigned": {"reason": "DEFAULT"}}
    alone = choose(traffic, {"max_new_tokens": 0}, headers={"x-key": key})
    assert custom(alone) == default
    assert alone.custom_labels == {"kv_experiment": "", "kv_arm": ""}
    params = [{"max_new_tokens": 0}, {"max_new_tokens": 4}, {}]
    obj = choose(traffic, params, headers={"x-key": key})
    first, *others = [each["custom_params"] for each in obj.sampling_params]
    assert first == default
    assert all("arm" in each["kv_policy_assigned"] for each in others)
    assert obj.custom_labels == {"kv_experiment": "", "kv_arm": ""}
    assert assigned_number(live) == before + 1
    named = choose(traffic, {"max_new_tokens": 0, "custom_params": {"kv_policy": "lava"}})
    assert custom(named)["kv_policy"] == "lava"


@pytest.mark.parametrize(
    ("why", "counted"),
    [
        ({"type": "length", "length": 0}, 0),  # SGLang's copy before `n` samples
        ({"type": "length", "length": 4}, 1),
        ({"type": "stop", "matched": 2}, 1),
        ({"type": "abort", "status_code": 503}, 1),
    ],
    ids=lambda each: each["type"] if isinstance(each, dict) else "",
)
def test_what_generated_nothing_is_not_counted(live, why, counted):
    assigned = next(each for i in range(200) if "arm" in (each := live.assign(0, f"{i}", 0.0)[1]))
    server = FrontEnd(Traffic({"snapkv": 0, "lava": 0}, live=live), context=99)
    obj = SimpleNamespace(sampling_params={"custom_params": {asked.ASSIGNED: assigned}})
    stats = SimpleNamespace(first_token_time=0, finished_time=0)

    async def end():
        state = SimpleNamespace(obj=obj, time_stats=stats)
        server.ended(state, {"finish_reason": why, "prompt_tokens": 5}, {}, None)
        await asyncio.sleep(0)

    asyncio.run(end())
    assert live.analysis.records[assigned["arm"]].finished == counted


@pytest.mark.parametrize(
    ("why", "outcomes"),
    [
        ({"type": "abort", "status_code": 503}, {"failed": 1}),  # a full queue, or too long in it
        (None, {"aborted": 1}),  # its client has gone
    ],
    ids=["failed", "aborted"],
)
def test_what_ends_in_the_queue_is_counted(live, monkeypatch, why, outcomes):
    assigned = next(each for i in range(200) if "arm" in (each := live.assign(0, f"{i}", 0.0)[1]))
    server = FrontEnd(Traffic({"snapkv": 0, "lava": 0}, live=live), context=99)
    obj = SimpleNamespace(sampling_params={"custom_params": {asked.ASSIGNED: assigned}})
    seen = Counter()
    monkeypatch.setattr(live.series, "finished", lambda arm, outcome: seen.update([outcome]))
    stats = SimpleNamespace(first_token_time=0, finished_time=1, get_e2e_latency=lambda: 0.01)
    states = {"a": SimpleNamespace(obj=obj, time_stats=stats)}
    manager = SimpleNamespace(rid_to_state=states, kv_policy_server=server)

    async def end():
        for rid in ("a", "gone"):
            frontend.before_aborted(manager, SimpleNamespace(rid=rid, finished_reason=why))
        await asyncio.sleep(0)

    asyncio.run(end())
    assert seen == outcomes
    record = live.analysis.records[assigned["arm"]]
    assert (record.finished, record.failed) == (seen["failed"], seen["failed"])
    assert "e2e_seconds" not in record.means


@pytest.mark.parametrize("streams", [True, False])
def test_what_is_aborted_has_taken_at_least_its_time(tmp_path, streams):
    file = tmp_path / "experiment.yaml"
    file.write_text("")
    times = tuple(Metric(f"{name}_seconds", "info", clip=60.0) for name in ("ttft", "e2e"))
    live = Live(replace(EXPERIMENT, metrics=times), file, {"snapkv": {}, "lava": {}})
    assigned = next(each for i in range(200) if "arm" in (each := live.assign(0, f"{i}", 0.0)[1]))
    server = FrontEnd(Traffic({"snapkv": 0, "lava": 0}, live=live), context=99)
    params = {"custom_params": {asked.ASSIGNED: assigned}}
    obj = SimpleNamespace(sampling_params=params, stream=streams)
    stats = SimpleNamespace(first_token_time=0, finished_time=1, get_e2e_latency=lambda: 30.0)

    async def end():
        state = SimpleNamespace(obj=obj, time_stats=stats)
        server.ended(state, {"finish_reason": {"type": "abort"}}, {}, None)
        await asyncio.sleep(0)

    asyncio.run(end())
    record = live.analysis.records[assigned["arm"]]
    assert record.tallies["e2e_seconds"].total == 30.0
    assert record.tallies["ttft_seconds"].total == (30.0 if streams else 0.0)
    assert record.finished == 0


def test_disabled_policies_give_everybody_full_kv(live):
    for traffic in (Traffic({"lava": 0}, "none"), Traffic({"lava": 0}, live=live)):
        traffic.enabled = False
        for params in (None, {"custom_params": {"kv_policy": "lava", "mine": 1}}):
            found = custom(choose(traffic, params, headers={"x-key": "a"}))
            assert found["kv_policy"] == "none"
            assert found["kv_policy_assigned"] == {"reason": "DISABLED"}
        traffic.enabled = True
    assert custom(choose(Traffic({"lava": 0}))) is None


def test_labels_are_never_a_clients(live):
    traffic = Traffic({"snapkv": 0, "lava": 0}, live=live, labels=("kv_arm", "mine"))
    forged = {"custom_labels": {"kv_arm": "lava", "kv_experiment": "trial", "mine": 1, "other": 2}}
    for traffic.enabled in (False, True):
        for params in ({"custom_params": {"kv_policy": "lava"}}, {"max_new_tokens": 0}, {}):
            obj = choose(traffic, dict(params), **forged)
            assert obj.custom_labels == {"kv_arm": "", "kv_experiment": "", "mine": "1"}


def test_an_experiment_draws_arms_by_key(live):
    traffic = Traffic({"snapkv": 0, "lava": 0}, live=live)
    seen = {}
    for i in range(600):
        ways = ({"headers": {"x-key": f"{i}"}}, {"body": {"metadata": {"user": i}}},
                {"session_id": f"{i}"}, {"session_params": {"id": f"{i}"}})  # fmt: skip
        obj = choose(traffic, **ways[i % 4])
        assert custom(obj) == custom(choose(traffic, **ways[(i + 1) % 4])) | {
            "kv_policy_assigned": custom(obj)["kv_policy_assigned"]
        }
        seen[i] = custom(obj)["kv_policy"]
        noted = custom(obj)["kv_policy_assigned"]
        arm = noted.get("arm")
        assert obj.custom_labels == {
            "kv_experiment": "trial" if arm else "", "kv_arm": arm or "",
        }  # fmt: skip
        expected = {"control": "none", "lava": "lava@lava", None: "snapkv"}[arm]
        assert seen[i] == expected
        assert noted["reason"] == ("SPLIT" if arm else "DEFAULT")
        assert noted.get("top") == (8 if arm else None)
    counts = [list(seen.values()).count(name) for name in ("snapkv", "none", "lava@lava")]
    assert counts[0] == pytest.approx(300, abs=60)
    assert counts[1] == pytest.approx(75, abs=35)
    assert live.analysis.keys()["control"] == counts[1]
    assert live.analysis.sources == [300, 300, 600]


def test_a_key_may_hold_half_a_character(live):
    live.replace(replace(EXPERIMENT, coverage=1.0))
    traffic = Traffic({"snapkv": 0, "lava": 0}, live=live)
    chosen = choose(traffic, {}, body={"metadata": {"user": "cut \ud83d"}})
    assert custom(chosen)["kv_policy_assigned"]["arm"] in ("control", "lava")


def test_a_request_without_a_key_gets_the_default(live):
    obj = choose(Traffic({"snapkv": 0, "lava": 0}, live=live), {"max_new_tokens": 3}, body=["list"])
    assert custom(obj)["kv_policy"] == "snapkv"
    assert obj.sampling_params["max_new_tokens"] == 3
    assert custom(obj)["kv_policy_assigned"] == {"reason": "DEFAULT"}


def test_who_names_a_policy_stays_out_of_the_analysis(live):
    traffic = Traffic({"snapkv": 0, "lava": 0}, live=live)
    obj = choose(traffic, {"custom_params": {"kv_policy": "lava"}}, headers={"x-key": "a"})
    assert custom(obj) == {
        "kv_policy": "lava", "kv_policy_assigned": {"reason": "TARGETING_MATCH"},
    }  # fmt: skip
    assert obj.custom_labels == {"kv_experiment": "", "kv_arm": ""}
    assert sum(live.analysis.keys().values()) == 0


def test_after_an_abort_everybody_gets_the_default(live):
    traffic = Traffic({"snapkv": 0, "lava": 0}, live=live)
    live.abort("drift")
    found = [custom(choose(traffic, headers={"x-key": f"{i}"})) for i in range(50)]
    assert {each["kv_policy"] for each in found} == {"snapkv"}
    assert found[0]["kv_policy_assigned"] == {"reason": "DISABLED"}


def test_the_promoted_arm_serves_everybody_with_its_settings(live):
    traffic = Traffic({"snapkv": 0, "lava": 0}, live=live)
    live.promote(live.experiment.arm("lava"), "cleared")
    found = [custom(choose(traffic, headers={"x-key": f"{i}"})) for i in range(20)]
    assert {each["kv_policy"] for each in found} == {"lava@lava"}
    assert live.document()["default"] == "lava@lava"


def test_what_runs_while_its_arm_is_rolled_back_counts_no_more(live):
    live.replace(replace(EXPERIMENT, arms=(*EXPERIMENT.arms, Arm("third", "snapkv"))))
    assigned = [live.assign(0, f"{i}", 0.0)[1] for i in range(40)]
    [*_, late] = [each for each in assigned if each.get("arm") == "lava"]
    ended = {
        "outcome": "ok",
        "facts": {"prompt_tokens": 9},
        "token_bytes": 8,
        "ttft": 0.1,
        "e2e": 1.0,
    }
    live.finished(late, **ended)
    live.roll_back("lava", "drift")
    live.finished(late, **ended)
    live.shadowed("rid", late, 0.5, 0.1, 7)
    assert live.lifecycle.state == "running"
    record = live.analysis.records["lava"]
    assert (record.finished, record.shadowed) == (1, 0)


def test_arms_with_settings_are_policies_of_their_own():
    assert [arm.served_as for arm in EXPERIMENT.arms] == ["none", "lava@lava"]
    paths, settings = with_arms(EXPERIMENT, {"lava": "/p/lava.yaml"}, ["window=16", "rate=0.5"])
    assert paths == {"lava": "/p/lava.yaml", "lava@lava": "/p/lava.yaml"}
    assert settings == [
        "lava.window=16", "lava.rate=0.5", "lava@lava.rate=0.25", "lava@lava.window=16",
    ]  # fmt: skip
    two = {"snapkv": "/p/snapkv.yaml", "lava": "/p/lava.yaml"}
    assert with_arms(EXPERIMENT, two, ["snapkv.capacity=9"])[1] == [
        "snapkv.capacity=9", "lava@lava.rate=0.25",
    ]  # fmt: skip


def test_another_version_needs_what_the_server_has(live):
    document = as_document(EXPERIMENT)
    assert live.read(json.dumps(document), "request").require().digest == EXPERIMENT.digest
    for change, message in (
        ({"policy": "h2o"}, "request:1:.*: error.*h2o"),
        ({"policy": "lava", "set": {"rate": 0.3}}, "`lava` has settings .* not started with"),
    ):
        document["arms"]["lava"] = change
        with pytest.raises(PolicyError, match=message):
            live.read(json.dumps(document), "request")


def test_a_file_that_breaks_keeps_the_last_version(live, caplog):
    live.reload(b"experiment: [")
    assert (live.file.in_use, live.experiment) == (False, EXPERIMENT)
    assert "The experiment stays as it was" in caplog.text
    assert live.document()["reload"]["problem"]
    live.unreadable(OSError("gone"))
    assert not live.file.in_use


def test_without_a_state_file_nothing_is_saved(tmp_path, caplog):
    file = tmp_path / "experiment.yaml"
    file.write_text("")
    live = Live(EXPERIMENT, file, {"snapkv": {}})
    assert "--kv-experiment-state is not given: a restart forgets" in caplog.text
    live.abort("drift")
    found = live.document()
    assert (live.state_saved, found["state_saved"], found["state_file"]) == (False, False, False)
    assert live.series._gauges["state_saved", ()] == 0
    kept = Live(EXPERIMENT, file, {"snapkv": {}}, tmp_path / "state.json")
    assert kept.series._gauges["state_saved", ()] == 1
    assert kept.document()["state_file"]


def test_a_full_disk_is_said_and_nothing_stops(tmp_path, monkeypatch, caplog):
    file = tmp_path / "experiment.yaml"
    file.write_text("")

    def full(*_):
        raise state_file.StateFileError("it cannot be written: no space")

    monkeypatch.setattr(state_file, "save", full)
    live = Live(EXPERIMENT, file, {"snapkv": {}}, tmp_path / "state.json")
    live.abort("drift")
    assert live.lifecycle.state == "aborted"
    assert not live.state_saved
    assert caplog.text.count("it cannot be written: no space") == 1
    live.analysis.assigned("control", 1)
    asyncio.run(live.keep_evidence())
    assert caplog.text.count("it cannot be written: no space") == 2  # of the other file
    monkeypatch.undo()
    live.save()
    assert not live.state_saved
    asyncio.run(live.keep_evidence())
    assert live.state_saved


STEPS = replace(
    EXPERIMENT,
    steps=(
        CoverageStep(coverage=0.01),
        CoverageStep(pause=60.0),
        CoverageStep(coverage=0.5),
        CoverageStep(pause=60.0),
    ),
)


@pytest.fixture
def stepping(tmp_path, monkeypatch):
    """A function that begins or resumes an experiment with steps; the test sets its clock."""
    now = [0.0]
    file = tmp_path / "experiment.yaml"
    file.write_text("")

    def begin():
        live = Live(STEPS, file, {"snapkv": {}}, tmp_path / "state.json")
        monkeypatch.setattr(live.lifecycle, "_clock", lambda: now[0])
        live.lifecycle._since = now[0]
        return live

    return begin, now


def test_a_restart_takes_no_step_back(stepping):
    begin, now = stepping
    live = begin()
    for now[0], kept in ((20.0, 0.0), (40.0, 40.0), (59.0, 40.0), (61.0, 61.0), (80.0, 61.0)):
        asyncio.run(live.keep_state())
        again = begin().lifecycle
        assert again.elapsed == pytest.approx(kept, abs=0.1)
        assert again.coverage == (0.5 if kept > 60 else 0.01)


def test_no_step_is_taken_while_arms_cannot_be_compared(stepping):
    begin, now = stepping
    live = begin()
    for key in range(200):
        live.analysis.assigned("control", key)
    live.look()
    asyncio.run(live.keep_evidence())
    now[0] = 100.0
    assert live.lifecycle.coverage == 0.01
    again = begin()
    mismatch = "sample ratio mismatch at the stage `assigned`"
    assert again.lifecycle.held == live.lifecycle.held == mismatch
    now[0] = 200.0
    assert again.lifecycle.coverage == 0.01


def test_where_it_stands_is_written_again_and_again(stepping, monkeypatch, tmp_path):
    begin, now = stepping
    live = begin()
    monkeypatch.setattr("kvpolicy.sglang_ext.clients.front_end.POLL", 0.01)

    async def watch():
        server = FrontEnd(Traffic({}, live=live), context=99)
        watching = asyncio.create_task(server._watch(live))
        now[0] = 61.0
        while state_file.load(tmp_path / "state.json")["elapsed"] < 61:
            await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(asyncio.wait_for(watch(), 20))


def test_what_is_written_late_undoes_no_change(stepping, monkeypatch):
    begin, now = stepping
    live, late = begin(), []

    async def later(work, *given):
        late.append((work, given))

    monkeypatch.setattr(asyncio, "to_thread", later)
    now[0] = 40.0
    asyncio.run(live.keep_state())
    live.roll_back("lava", "drift")
    [(work, given)] = late
    work(*given)
    assert list(begin().lifecycle.rolled_back) == ["lava"]


def test_a_state_that_could_not_be_written_is_tried_again(stepping, monkeypatch):
    begin, _ = stepping
    live = begin()

    def full(*_):
        raise state_file.StateFileError("it cannot be written: no space")

    with monkeypatch.context() as patch:
        patch.setattr(state_file, "save", full)
        live.abort("drift")
    assert not live.state_saved
    asyncio.run(live.keep_state())
    assert live.state_saved
    assert begin().lifecycle.state == "aborted"


def assigned_number(live):
    return sum(record.requests for record in live.analysis.records.values())


def test_two_servers_do_not_share_a_state_file(stepping, tmp_path):
    begin, _ = stepping
    code = """if True:
        import sys
        from pathlib import Path
        from kvpolicy.experiments.replica import state_file
        claimed = state_file.claim(Path(sys.argv[1]))
        print(claimed is not None, flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-P", "-c", code, str(tmp_path / "state.json")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "True\n"
        with pytest.raises(Refused, match="another server keeps its experiment there; give each"):
            begin()
        other.stdin.close()
    begin()


def ask(live, action, body, **query):
    """Status and answer of the endpoint that ends an experiment, or one of its arms."""

    async def content():
        return body if isinstance(body, bytes) else json.dumps(body).encode()

    control = Control(SimpleNamespace(live=live), catalog=None)
    request = SimpleNamespace(body=content, query_params=query)
    return asyncio.run(getattr(control, action)(request))


def test_an_arm_that_gets_no_requests_is_not_cleared(tmp_path):
    file = tmp_path / "experiment.yaml"
    file.write_text("")
    arms = (*EXPERIMENT.arms, Arm("off", "lava", 0.0))
    live = Live(replace(EXPERIMENT, arms=arms), file, {"snapkv": {}, "lava": {}, "lava@lava": {}})
    for arm in ("lava", "off"):
        status, answer = ask(live, "promote", {"arm": arm})
        assert status == 409
        assert "not cleared of error_rate yet" in answer["error"]["message"]
    assert ask(live, "promote", {"arm": "off", "pooled": True}, dry_run="true")[0] == 200
    assert ask(live, "promote", {"arm": "off", "force": True})[0] == 200


def test_an_arm_that_was_rolled_back_is_not_promoted_by_accident(live, monkeypatch):
    monkeypatch.setattr(live.analysis, "verdicts", lambda: [CLEARED])
    extra = replace(EXPERIMENT, arms=(*EXPERIMENT.arms, Arm("more", "snapkv")))
    live.lifecycle.experiment = extra
    assert ask(live, "abort", {"arm": "lava", "reason": "complaints"})[0] == 200
    status, answer = ask(live, "promote", {"arm": "lava", "pooled": True})
    assert status == 409
    assert "rolled back: complaints; to promote `lava` all the same" in answer["error"]["message"]
    assert ask(live, "promote", {"arm": "lava", "force": True})[0] == 200


@pytest.mark.parametrize("guardrails", [True, False])
def test_an_arm_that_cannot_be_compared_is_not_promoted_by_accident(
    tmp_path, monkeypatch, guardrails
):
    file = tmp_path / "experiment.yaml"
    file.write_text("")
    metric = Metric("error_rate", *(("guardrail", 0.1) if guardrails else ("info",)))
    live = Live(replace(EXPERIMENT, metrics=(metric,)), file, {"snapkv": {}, "lava": {}})
    monkeypatch.setattr(live.analysis, "verdicts", lambda: [CLEARED])
    assert ask(live, "promote", {"arm": "lava"}, dry_run="true") == (
        200,
        {"state": "running", "changed": True},
    )
    for key in range(200):
        live.analysis.assigned("control", key)
    status, answer = ask(live, "promote", {"arm": "lava"})
    assert status == 409
    assert "arms cannot be compared: sample ratio mismatch" in answer["error"]["message"]
    assert "`--force`" in answer["error"]["message"]
    assert live.lifecycle.state == "running"
    assert ask(live, "promote", {"arm": "control"}, dry_run="true")[0] == 200
    assert ask(live, "promote", {"arm": "lava"}, dry_run="maybe")[0] == 400
    assert ask(live, "promote", {"arm": "lava", "force": True})[0] == 200


def test_a_reason_with_half_a_character_can_be_shown(live):
    assert ask(live, "abort", b'{"reason": "caf\\udce9"}')[0] == 200
    assert live.lifecycle.reason == "caf?"
    json.dumps(live.document(with_keys=True), ensure_ascii=False).encode()


def test_what_is_nested_too_deeply_is_refused(live):
    assert ask(live, "abort", b"[" * 100_000)[0] == 400
    with pytest.raises(Refused, match="nested too deeply"):
        _policy_in(b"[" * 100_000)


@pytest.fixture
def served(tmp_path):
    """A function that starts a server with an experiment's file and state file."""
    file, state = tmp_path / "experiment.json", tmp_path / "state.json"
    file.write_text(json.dumps(as_document(EXPERIMENT)))
    policies = {"snapkv": {}, "lava": {}, "lava@lava": {"rate": 0.25}}
    return lambda: Live(reading.load(file).require(), file, policies, state)


def put(live, **changes):
    """The status of a `PUT` of the experiment with changes."""
    return asked_to_put(live, **changes)[0]


def asked_to_put(live, **changes):
    """Status and answer of a `PUT` of the experiment with changes."""

    async def body():
        return json.dumps(as_document(replace(EXPERIMENT, **changes))).encode()

    request = SimpleNamespace(body=body, query_params={})
    return asyncio.run(Control(SimpleNamespace(live=live), catalog=None).replace(request))


def test_what_is_put_is_answered_with_the_coverage_that_applies(served, caplog):
    live = served()
    changes = {"coverage": 0.75, "steps": (CoverageStep(coverage=0.25),)}
    status, answer = asked_to_put(live, **changes)
    assert (status, answer["coverage"], live.lifecycle.coverage) == (200, 0.25, 0.25)
    assert "never applies: the first step sets it to 25 %" in answer["warnings"][0]
    live.reload(json.dumps(as_document(replace(EXPERIMENT, **changes))).encode())
    assert "never applies: the first step sets it to 25 %" in caplog.text


def test_a_version_by_put_holds_until_the_file_changes(served):
    live = served()
    before = live.file.path.read_bytes()
    assert put(live, enabled=False) == 200
    live.reload(before)
    live.unreadable(OSError("gone for a moment"))
    assert not live.file.in_use
    live.reload(before)
    assert (live.lifecycle.state, live.file.in_use) == ("disabled", True)
    assert live.lifecycle.log[-1]["what"] == "changed by PUT: disabled"
    again = served()
    assert again.lifecycle.state == "disabled"
    again.reload(b"experiment: [")  # half of it is written
    again.reload(before)
    assert (again.lifecycle.state, again.file.in_use) == ("disabled", True)
    again.reload(json.dumps(as_document(replace(EXPERIMENT, coverage=0.75))).encode())
    assert (again.lifecycle.state, again.lifecycle.coverage) == ("running", 0.75)
    again.reload(before)
    assert (again.lifecycle.state, again.lifecycle.coverage) == ("running", 0.5)
    assert served().lifecycle.state == "running"


def test_a_file_that_has_changed_just_before_a_put_is_older(served):
    live = served()
    live.file.path.write_text(json.dumps(as_document(replace(EXPERIMENT, coverage=0.75))))
    assert put(live, enabled=False) == 200
    asyncio.run(live.follow())
    assert live.lifecycle.state == served().lifecycle.state == "disabled"
    live.file.path.unlink()
    asyncio.run(live.follow())
    assert "cannot be read" in live.document()["reload"]["problem"]
    assert live.lifecycle.state == "disabled"


def test_a_file_that_changes_while_the_server_is_down_is_used(served):
    live = served()
    assert put(live, enabled=False) == 200
    live.file.path.write_text(json.dumps(as_document(replace(EXPERIMENT, coverage=0.75))))
    assert served().lifecycle.coverage == 0.75
    assert served().lifecycle.state == "running"


def test_a_version_by_put_that_cannot_be_served_any_more_is_said(served, tmp_path, caplog):
    live = served()
    other = (EXPERIMENT.arms[0], Arm("h2o", "h2o"))
    live._served["h2o"] = {}
    assert put(live, arms=other) == 200
    assert served().experiment == EXPERIMENT
    assert "cannot be served after the restart" in caplog.text
    assert "no policy `h2o`" in caplog.text
    state = tmp_path / "state.json"
    for damage in ({"put": 1}, {"put": {"text": 1, "file": ""}}):
        state.write_text(json.dumps(live.lifecycle.saved() | damage))
        with pytest.raises(Refused, match="under `put` is damaged; mend it, or remove it"):
            served()
    state.write_text(json.dumps(live.lifecycle.saved()))  # of an earlier version of kvpolicy
    assert served().experiment == EXPERIMENT


def test_evidence_outlives_a_restart(tmp_path, caplog, monkeypatch):
    file, state = tmp_path / "experiment.yaml", tmp_path / "state.json"
    file.write_text("")
    live = Live(EXPERIMENT, file, {"snapkv": {}}, state)
    for i in range(50):
        live.assign(0, f"key {i}", 0.0)
    asyncio.run(live.keep_evidence())
    first = assigned_number(live)
    for i in range(50, 100):
        live.assign(0, f"key {i}", 0.0)
    asyncio.run(live.keep_evidence())
    arm = live.experiment.arms[1].name
    live.roll_back(arm, "drift")
    again = Live(EXPERIMENT, file, {"snapkv": {}}, state)
    assert 0 < assigned_number(again) == first < assigned_number(live)  # it was written lately
    assert arm in again.analysis.distinct.retired
    asyncio.run(live.keep_evidence())  # a change of the state brings the rest
    again = Live(EXPERIMENT, file, {"snapkv": {}}, state)
    assert assigned_number(again) == assigned_number(live)
    other = replace(EXPERIMENT, metrics=(Metric("error_rate", "guardrail", 0.2),))
    assert assigned_number(Live(other, file, {"snapkv": {}}, state)) == 0
    assert "evidence" not in caplog.text
    evidence = state_file.evidence_file(state)
    saved = evidence.read_text()
    for text, why in (
        (saved[:100], "it is not JSON"),
        (saved.replace('"format": 1', '"format": 9'), "its format is 9"),
        (saved.replace('"arms"', '"legs"'), "damaged"),
        (saved.replace('"shadowed": 0,\n "analysis"', '"analysis"'), "it lacks something"),
        (saved.replace('"shadowed": 0,\n "analysis"', '"shadowed": 1e999, "analysis"'), "it lacks"),
        (saved.replace('"requests": ', '"requests": 1e999'), "damaged"),
    ):
        caplog.clear()
        evidence.write_text(text)
        assert assigned_number(Live(EXPERIMENT, file, {"snapkv": {}}, state)) == 0
        assert "begins anew" in caplog.text
        assert why in caplog.text


def test_what_became_of_samples_lives_as_long_as_the_evidence(tmp_path):
    file, state = tmp_path / "experiment.yaml", tmp_path / "state.json"
    file.write_text("")
    live = Live(EXPERIMENT, file, {"snapkv": {}}, state)
    assigned = {"arm": "lava", "revision": EXPERIMENT.revision, "key": 1}
    live.analysis.assigned("lava", 1)
    live.sample_ended(assigned, "busy", 9)
    assert live.document()["shadow"]["lava"]["busy"] == 1
    asyncio.run(live.keep_evidence())
    again = Live(EXPERIMENT, file, {"snapkv": {}}, state)
    assert again.document()["shadow"]["lava"]["busy"] == 1
    again.replace(replace(EXPERIMENT, default="none"))
    again.sample_ended(assigned, "superseded", 9)
    assert not any(again.document()["shadow"]["lava"].values())


def test_an_arm_that_was_compared_in_part_is_not_promoted_by_accident(tmp_path, monkeypatch):
    file = tmp_path / "experiment.yaml"
    file.write_text("")
    metrics = (*EXPERIMENT.metrics, Metric("drift", "info", clip=2.0))
    live = Live(replace(EXPERIMENT, metrics=metrics), file, {"snapkv": {}, "lava": {}})
    monkeypatch.setattr(live.analysis, "verdicts", lambda: [CLEARED])
    assigned = {"arm": "lava", "revision": live.experiment.revision, "key": 1}
    for _ in range(100):
        live.sample_ended(assigned, "no_room", 9)
    status, answer = ask(live, "promote", {"arm": "lava"})
    assert (status, "0 of 100 sampled ones" in answer["error"]["message"]) == (409, True)
    assert ask(live, "promote", {"arm": "lava", "force": True})[0] == 200


def test_the_budget_of_shadows():
    now = [0.0]
    budget = Budget(lambda: now[0])
    assert budget.take(1000, 100)  # ten seconds' worth are saved up
    assert not budget.take(1, 100)
    now[0] = 0.5
    assert budget.take(400, 100)  # once more than there is
    budget.give_back(400)
    assert budget.take(400, 100)
    now[0] = 3.0
    assert not budget.take(1, 100)
    now[0] = 4.5
    assert budget.take(1, 100)


class Settable:
    """A policy with a parameter; equal only to itself."""

    def __init__(self, name):
        self.name, self.program = name, SimpleNamespace(params={"capacity": 0})


class Setting:
    """A front end whose clients may set `capacity`; `during` happens while a request waits."""

    def __init__(self, monkeypatch, check=lambda policy: None, vary=lambda: None):
        self.policies = {name: Settable(name) for name in ("snapkv", "lava")}
        self.asked = []
        catalog = SimpleNamespace(policies=self.policies, default="snapkv")
        allowed = Allowed(catalog, ["snapkv.capacity", "lava.capacity"])
        allowed._check = lambda policy, values: check(policy)
        self.traffic = Traffic(self.policies, allowed=allowed)

        async def ready(manager, body):
            self.asked.append(body["name"])
            vary()
            return [{"state": "ready"}]

        monkeypatch.setattr(compat, "change_policies", ready)

    def send(self, values, **fields):
        params = {"custom_params": {"kv_policy_set": values}}
        return custom(choose(self.traffic, params, headers={"x-kv-policy": "lava"}, **fields))


def test_parameters_are_those_of_the_policy_that_was_checked(monkeypatch):
    """A policy that is replaced while a request waits is checked again."""
    checked = []

    def check(policy):
        checked.append(policy)
        if len(checked) == 1:
            setting.policies["lava"] = Settable("lava")

    setting = Setting(monkeypatch, check)
    sent = setting.send({"capacity": 77})
    assert sent == {"kv_policy": "lava", "kv_policy_set": {"capacity": 77}}
    assert len(set(checked)) == 2
    assert checked[-1] is setting.policies["lava"]
    assert setting.asked == ["lava", "lava"]


def test_a_policy_that_is_withdrawn_while_a_request_waits_fails_it(monkeypatch):
    """Its values would otherwise be set in the default policy."""
    setting = Setting(monkeypatch, lambda policy: setting.policies.pop("lava", None) and None)
    with pytest.raises(ValueError, match=r"custom_params\.kv_policy is `lava`; this server has"):
        setting.send({"capacity": 77})


def test_policies_that_are_disabled_while_a_request_waits_are_not_applied(monkeypatch):
    setting = Setting(monkeypatch, vary=lambda: setattr(setting.traffic, "enabled", False))
    assert setting.send({"capacity": 77})["kv_policy"] == "none"


def test_a_client_that_goes_while_its_request_waits_takes_it_along(monkeypatch):
    setting = Setting(monkeypatch, vary=lambda: gone.append(True))
    gone = []
    with pytest.raises(ValueError, match="the client has gone"):
        setting.send({"capacity": 77}, gone=gone)
    # It need not wait for an answer in the background (/v1/responses).
    setting = Setting(monkeypatch)
    assert setting.send({"capacity": 77}, gone=gone, background=True)["kv_policy"] == "lava"


def test_no_parameters_need_no_variant(monkeypatch):
    setting = Setting(monkeypatch)
    assert setting.send({})["kv_policy"] == "lava"
    assert setting.asked == []


def test_an_error_in_what_a_client_asks_for_fails_the_request(monkeypatch):
    """Only an experiment's own errors fail none."""

    def check(policy):
        raise RuntimeError("on purpose")

    setting = Setting(monkeypatch, check)
    server = FrontEnd(setting.traffic, context=99)
    obj = compat.scoring_request([1, 2], start=0, top=1, custom={}, namespace={})
    obj.sampling_params = {"custom_params": {"kv_policy": "lava", "kv_policy_set": {"capacity": 7}}}
    manager = SimpleNamespace(enable_lora=False, enable_metrics=False, preferred_sampling_params={})
    with pytest.raises(RuntimeError, match="on purpose"):
        asyncio.run(server.arrived(manager, obj, request({})))


def test_an_experiment_that_fails_fails_nobodys_request(live, monkeypatch, caplog):
    server = FrontEnd(Traffic({"snapkv": 0, "lava": 0}, live=live), context=99)
    state = SimpleNamespace(time_stats=None)

    def broken(*_, **__):
        raise RuntimeError("on purpose")

    async def serve():
        obj = compat.scoring_request([1, 2], start=0, top=1, custom={}, namespace={})
        obj.sampling_params = {"temperature": 0}
        manager = SimpleNamespace(
            enable_lora=False, enable_metrics=False, preferred_sampling_params=None
        )
        monkeypatch.setattr(compat, "is_starting", lambda _: False)
        with monkeypatch.context() as patch:
            patch.setattr(live, "assign", broken)
            await server.arrived(manager, obj, request({"x-key": "a"}))
        assert obj.sampling_params == {"temperature": 0}
        for i in range(3):  # until one has an arm
            await server.arrived(manager, obj, request({"x-key": f"{i}"}))
            state.obj = obj
            monkeypatch.setattr(compat, "latencies", broken)
            meta = {"finish_reason": {"type": "stop"}, "prompt_tokens": 5}
            server.ended(state, meta, {}, None)
            obj.sampling_params = {}
        await asyncio.sleep(0.01)

    asyncio.run(serve())
    assert caplog.text.count("a request was not assigned and gets the server's default") == 1
    assert caplog.text.count("a request that has ended was not counted") == 1


def test_full_kv_takes_what_schedulers_say(live, monkeypatch):
    """A checkpoint may ask for a cache of 8 bits, which the front end does not see."""
    server = FrontEnd(Traffic({"snapkv": 0, "lava": 0}, live=live), context=99)
    found = []
    monkeypatch.setattr(live.series, "memory", lambda arm, *sizes: found.append(sizes))
    monkeypatch.setattr(compat, "is_starting", lambda _: False)
    monkeypatch.setattr(compat, "latencies", lambda _: (None, None))

    async def states():
        return [{"kv_policy_token_bytes": 24}]

    async def serve():
        manager = SimpleNamespace(
            enable_lora=False,
            enable_metrics=False,
            preferred_sampling_params=None,
            get_internal_state=states,
        )
        for i in range(20):
            obj = compat.scoring_request([1, 2], start=0, top=1, custom={}, namespace={})
            obj.sampling_params = {}
            await server.arrived(manager, obj, request({"x-key": f"{i}"}))
            meta = {"finish_reason": {"type": "stop"}, "prompt_tokens": 5}
            server.ended(SimpleNamespace(obj=obj), meta, {}, None)
        await asyncio.sleep(0.01)

    asyncio.run(serve())
    assert set(found) == {(5 * 24, 5 * 24)}


@pytest.fixture
def arrive(live, monkeypatch):
    """Sends a request to a server on which clients may name no policy; returns the result."""
    server = FrontEnd(Traffic({"snapkv": 0, "lava": 0}, "none", live), context=99)

    def run(rid, params, path, starting):
        obj = compat.scoring_request([1, 2], start=0, top=1, custom={}, namespace={})
        obj.rid, obj.sampling_params = rid, params
        monkeypatch.setattr(compat, "is_starting", lambda _: starting)
        sent = request({"x-key": "a"})
        sent.scope = {"path": path}
        manager = SimpleNamespace(
            enable_lora=False, enable_metrics=False, preferred_sampling_params=None
        )

        async def serve():
            await server.arrived(manager, obj, sent)

        asyncio.run(serve())
        return obj

    return run


@pytest.mark.parametrize("starting", [False, True])
@pytest.mark.parametrize("rid", ["mine", "HEALTH_CHECK_mine", ["mine", "HEALTH_CHECK_mine"]])
@pytest.mark.parametrize("forged", [{"kv_policy": "none"}, {asked.ASSIGNED: {"arm": "lava"}}])
def test_no_client_passes_the_checks(arrive, rid, starting, forged):
    with pytest.raises(ValueError, match=r"HEALTH_CHECK|is the server's own|chooses the policy"):
        arrive(rid, {"custom_params": forged}, "/generate", starting)


@pytest.mark.parametrize(
    ("path", "model", "named"),
    [
        ("/v1/responses", "m:lava", "lava"),
        ("/llm/v1/responses", "m:none", "none"),
        ("/v1/responses", "m", None),
        ("/v1/responses", None, None),
        ("/v1/completions", "m:lava", None),  # SGLang reads it there
    ],
)
def test_what_stands_behind_the_models_name(path, model, named):
    request = SimpleNamespace(scope={"path": path, "root_path": "/llm"})
    assert compat.ignored_adapter(request, {"model": model}) == named


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/api/chat", "/api/generate"])
def test_routes_are_known_below_a_root_path(path):
    def dropped(**scope):
        return compat.drops_custom_params(SimpleNamespace(scope=scope))

    assert dropped(path=path)
    assert dropped(path=path, root_path="")
    assert dropped(path=f"/llm{path}", root_path="/llm")
    assert dropped(path=f"/llm{path}", root_path="/llm/")
    assert dropped(path=path, root_path="/llm")  # a proxy has taken it away
    assert not dropped(path=f"/llm{path}", root_path="/l")
    assert not dropped(path="/generate", root_path="")


def test_the_servers_own_requests_take_no_part(arrive, live):
    params = {"max_new_tokens": 1, "temperature": 0.0}
    for path in ("/health", "/health_generate"):
        assert arrive("HEALTH_CHECK_1", dict(params), path, False).sampling_params == params
    assert arrive("1", dict(params), "/generate", True).sampling_params == params  # the warm-up
    assert live.analysis.sources == [0, 0, 0]
    assert arrive("1", dict(params), "/generate", False).sampling_params != params
    with pytest.raises(ValueError, match="begins with HEALTH_CHECK is SGLang's own"):
        arrive("HEALTH_CHECK_1", params, "/generate", False)


def test_a_stream_that_is_refused_ends_without_an_error_in_the_log(monkeypatch):
    """SGLang looks at it once more, two seconds after its answer."""
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    async def refuse(manager, obj, request):
        raise ValueError("on purpose")

    async def at_once(seconds):
        pass

    async def send(obj):
        server, request = SimpleNamespace(arrived=refuse), None
        async for _ in frontend._generate(server, None, None, obj, request):
            pass

    aborted = []
    obj = GenerateReqInput(text="one", stream=True, rid="somebody else's")
    with pytest.raises(ValueError, match="on purpose"):
        asyncio.run(send(obj))
    manager = SimpleNamespace(rid_to_state={"somebody else's": 0}, abort_request=aborted.append)
    (task,) = TokenizerManager.create_abort_task(manager, obj).tasks
    monkeypatch.setattr(asyncio, "sleep", at_once)
    asyncio.run(task.func())
    assert aborted == []


def test_crash_dumps_hold_no_scoring_requests():
    scoring = compat.scoring_request([1, 2, 3], start=1, top=4, custom={}, namespace={})
    ordinary = SimpleNamespace(rid="kv-shadow-by-a-client")
    states = {each.rid: SimpleNamespace(obj=each) for each in (scoring, ordinary)}
    manager = SimpleNamespace(rid_to_state=states)
    frontend.before_crash_dump(manager)
    assert list(manager.rid_to_state) == ["kv-shadow-by-a-client"]
    assert (scoring.log_metrics, scoring.no_logs) == (False, True)


def test_what_is_scored_again_is_logged_and_exported_nowhere(tmp_path):
    """SGLang's request log at every level, which decodes prompts, and its export of metrics."""
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.observability.request_metrics_exporter import FileRequestMetricsExporter
    from sglang.srt.utils.request_logger import RequestLogger

    def decode(tokens, **options):
        return f"text of {tokens}"

    class Exporters:
        async def write_record(self, obj, out):
            options = SimpleNamespace(export_metrics_to_file_dir=str(tmp_path))
            exporter = FileRequestMetricsExporter(options, set(), set())
            await exporter.write_record(obj, out)

    scoring = compat.scoring_request([111, 222], start=1, top=4, custom={}, namespace={})
    ordinary, lines = GenerateReqInput(input_ids=[333, 444], rid="by a client"), []
    out = {"text": "", "meta_info": {"e2e_latency": 1.0}}
    for level in (0, 1, 2, 3):
        log = RequestLogger(True, level, "text", None)
        log._log = lines.append
        for obj in (scoring, ordinary):
            tokenizer = SimpleNamespace(decode=decode)
            frontend.around_log(RequestLogger.log_received_request, log, obj, tokenizer)
            frontend.around_log(RequestLogger.log_finished_request, log, obj, out)
    for obj in (scoring, ordinary):
        asyncio.run(frontend.around_export(Exporters.write_record, Exporters(), obj, out))
    exported = "".join(path.read_text() for path in tmp_path.iterdir())
    assert len(lines) == 8
    assert scoring.text is None
    for seen in ("".join(lines), exported):
        assert "444" in seen
        assert "222" not in seen


def test_empty_lists_of_pictures_are_none():
    tokens = {"image_data": [], "video_data": None, "audio_data": None, "input_embeds": None}
    request = SimpleNamespace(**tokens, session_params=None)
    assert compat.has_only_tokens(request)
    request.image_data = ["a picture"]
    assert not compat.has_only_tokens(request)
