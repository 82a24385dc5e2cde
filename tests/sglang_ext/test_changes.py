"""A change of policies happens on every scheduler or on none."""

import asyncio
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")

from kvpolicy.dsl.bind.model_config import ModelConfig
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.experiments.definition import reading
from kvpolicy.sglang_ext.clients import catalog as catalogs
from kvpolicy.sglang_ext.clients.catalog import Catalog
from kvpolicy.sglang_ext.clients.control import Control
from kvpolicy.sglang_ext.clients.front_end import FrontEnd
from kvpolicy.sglang_ext.clients.traffic import Traffic
from kvpolicy.sglang_ext.experiment.live import Live
from kvpolicy.sglang_ext.face import compat, policy_files
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.face.ranks import Ranks, Stages
from kvpolicy.sglang_ext.report.metrics import Metrics
from kvpolicy.sglang_ext.request.request import Standing
from kvpolicy.sglang_ext.serving.background import Background
from kvpolicy.sglang_ext.serving.changes import Changes
from kvpolicy.sglang_ext.serving.messages import (
    COMMIT,
    FAILED,
    LOOK,
    PREPARE,
    PREPARING,
    UNDO,
    WITHDRAW,
)
from kvpolicy.sglang_ext.serving.served import ServedPolicies
from prometheus_client import REGISTRY

SHAPE = ModelShape(layers=4, heads=4, kv_heads=2, head_dim=32)
MODEL = ModelConfig("a model", SHAPE, 128, 512, 512, 2 * 128 * 512, 512, "float32", 4, 4)
FILE = Path(__file__).parents[2] / "policies" / "sinks-recent.yaml"
TEXT = FILE.read_text()


class Scheduler:
    """The part of a scheduler that changes policies; failures are given by name."""

    def __init__(self, rank, given, stages=None):
        self.rank, self.cannot_compile, self.cannot_do = rank, {}, {}
        variants = SimpleNamespace(forget=lambda name: None)
        served = [self.make(each, each.bind(SHAPE)) for each in given]
        self.policies = ServedPolicies(served, variants, Metrics(None, ()))
        runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=SimpleNamespace()))
        runner.req_to_token_pool.req_to_token.shape = (8, 64)
        services = SimpleNamespace(
            layers=None,
            shares=False,
            arena=SimpleNamespace(storage=torch.empty(0)),
            queries=SimpleNamespace(needed=False),
            ranks=Ranks(),
            stages=stages or Stages(range(4)),
        )
        given = (runner, SHAPE, self.make, 0, Background(torch.device("cpu")))
        self.changes = Changes(services, self.policies, *given)

    def make(self, policy, bound):
        if policy.name in self.cannot_compile:
            raise Refused(self.cannot_compile[policy.name])
        standing = SimpleNamespace(enabled=True, failures=0)
        return SimpleNamespace(name=policy.name, policy=policy, bound=bound, standing=standing)

    def handle(self, body):
        policies, self.policies = self.policies, None
        if body["action"] in self.cannot_do:
            self.changes._policies = None  # whatever it tries raises
        answer = self.changes.handle(body)
        self.changes._policies = self.policies = policies
        return {**answer, "dp_rank": self.rank}

    def served(self):
        return [(each["name"], each["settings"]) for each in self.policies.describe()]


@pytest.fixture
def fleet(monkeypatch):
    """A catalog and two schedulers, which it reaches instead of SGLang's manager."""
    given = policy_files.load_policies([f"{name}={FILE}" for name in ("first", "second")], [])
    schedulers = [Scheduler(rank, given) for rank in range(2)]

    async def change_policies(manager, body):
        assert manager is None
        return [each.handle(body) for each in reversed(schedulers)]

    return reaching(change_policies, given, monkeypatch), schedulers


def reaching(change_policies, given, monkeypatch):
    """A catalog that asks a function instead of SGLang's manager."""
    monkeypatch.setattr(compat, "change_policies", change_policies)
    monkeypatch.setattr(compat, "dp_rank", lambda: None)
    monkeypatch.setattr(catalogs, "LOOK_EVERY", 0.001)
    return Catalog(given, MODEL, 2048)


def put(catalog, name, **settings):
    asyncio.run(asyncio.wait_for(catalog.put(None, name, TEXT, settings), 60))


@pytest.mark.parametrize("several", ["fleet", "stages"])
def test_a_change_reaches_every_scheduler(request, several):
    """Every stage takes up what all have prepared."""
    catalog, schedulers = request.getfixturevalue(several)
    put(catalog, "third", capacity="20")
    put(catalog, "second", capacity="30")
    after = [("first", {}), ("second", {"capacity": "30"}), ("third", {"capacity": "20"})]
    assert [each.served() for each in schedulers] == [after, after]
    asyncio.run(catalog.withdraw(None, "second"))
    assert [each.served() for each in schedulers] == [[after[0], after[2]]] * 2
    assert list(catalog.policies) == ["first", "third"]


def test_a_change_whose_place_another_has_taken_does_not_take_up_the_other(fleet):
    _, (scheduler, _) = fleet
    body = {"action": PREPARE, "name": "third", "text": TEXT, "settings": {}}
    for ticket in ("first", "second"):
        scheduler.handle({**body, "ticket": ticket})
    before = scheduler.served()
    for action in (LOOK, COMMIT):
        answer = scheduler.handle({"action": action, "ticket": "first"})
        assert answer["state"] == FAILED
        assert answer["problem"] == "another change has taken its place"
    assert scheduler.served() == before


# 32 rows of 65,536 slots; a number for each of 262,144 rows; 65 steps of 64 requests' queries.
LACKING = [
    ("fastkv", "8.0 MiB for 32 rows of SGLang's table of slots, in which tokens leave the prefill"),
    ("minicache", "1.0 MiB for tables of layers in pairs"),
    ("h2o", "1.0 MiB for queries of decode steps"),
]


@pytest.mark.parametrize(("name", "lacking"), LACKING)
def test_a_policy_is_told_how_much_memory_was_not_reserved_for_it(fleet, name, lacking):
    """On one of four stages, with entries of 8 bits beside queries of 16."""
    scheduler = fleet[1][0]
    changes = scheduler.changes
    services, runner = changes._services, changes._runner
    entries = torch.empty(0, dtype=torch.uint8)
    services.arena = SimpleNamespace(layers=1, kv_heads=2, storage=entries)
    services.store = SimpleNamespace(allocator=SimpleNamespace(size=100))
    runner.dtype, changes._captured = torch.bfloat16, 64
    runner.req_to_token_pool.req_to_token.shape = (1 << 18, 1 << 16)
    body = {"name": name, "text": (FILE.parent / f"{name}.yaml").read_text(), "settings": {}}
    answer = scheduler.handle({"action": PREPARE, "ticket": "a ticket", **body})
    while answer["state"] == PREPARING:
        answer = scheduler.handle({"action": LOOK, "ticket": "a ticket"})
    assert f"it needs {lacking}, which this server did not reserve" in answer["problem"]


class Meeting:
    """Stages, each of which sends at every message and hears when all have sent."""

    def __init__(self, size):
        self.size, self.sent = size, {}

    def of(self, stage):
        mine = self.sent[stage] = []

        def send(numbers):
            place = len(mine)
            mine.append(numbers)
            return SimpleNamespace(
                arrived=lambda: all(len(each) > place for each in self.sent.values()),
                read=lambda: torch.stack([each[place] for each in self.sent.values()]).amax(0),
            )

        return SimpleNamespace(send=send, several=True)


@pytest.fixture
def stages(monkeypatch):
    """A catalog and two stages, of which the first answers and the second lags by a message."""
    given = policy_files.load_policies([f"{name}={FILE}" for name in ("first", "second")], [])
    meeting, under_way = Meeting(2), []
    first, second = [Scheduler(stage, given, meeting.of(stage)) for stage in range(2)]

    async def change_policies(manager, body):
        answer = first.handle(body)
        under_way.append(body)
        while len(under_way) > 1 or body["action"] not in (PREPARE, LOOK):
            second.handle(under_way.pop(0))
            if not under_way:
                break
        return [answer]

    return reaching(change_policies, given, monkeypatch), [first, second]


@pytest.mark.parametrize("stage", [0, 1])
def test_what_one_stage_cannot_compile_no_stage_serves(stages, stage):
    """Nor does what all had prepared before count for what comes next."""
    catalog, schedulers = stages
    put(catalog, "second", capacity="30")
    before = [each.served() for each in schedulers]
    schedulers[stage].cannot_compile["third"] = "its kernels cannot be compiled"
    said = "its kernels cannot" if stage == 0 else "another rank or stage could not prepare it"
    with pytest.raises(Refused, match=said):
        put(catalog, "third")
    assert [each.served() for each in schedulers] == before


@pytest.mark.parametrize("stage", [0, 1])
def test_what_one_stage_cannot_begin_to_prepare_no_stage_serves(stages, monkeypatch, stage):
    """Each hears that of the other, and waits for nothing that was never begun."""

    def submit(run):
        raise RuntimeError("can't start new thread")

    catalog, schedulers = stages
    before = [each.served() for each in schedulers]
    monkeypatch.setattr(schedulers[stage].changes._background._thread, "submit", submit)
    said = "can't start new thread" if stage == 0 else "another rank or stage could not prepare it"
    with pytest.raises(Refused, match=said):
        put(catalog, "third")
    assert [each.served() for each in schedulers] == before


def test_a_policy_that_comes_has_all_series_and_one_that_goes_has_not_failed(unregistered):
    metrics = Metrics({"model_name": "m"}, ["first"])
    made = [SimpleNamespace(name=name, standing=Standing()) for name in ("first", "second")]
    variants = SimpleNamespace(forget=lambda name: None)
    policies = ServedPolicies(made[:1], variants, metrics)

    def series(policy):
        samples = [x for each in REGISTRY.collect() for x in each.samples]
        own = [x for x in samples if x.labels.get("policy") == policy]
        return {(x.name, x.labels.get("reason")): x.value for x in own}

    policies.replace(made[1])
    assert series("second").keys() == series("first").keys()
    made[1].standing.enabled = False
    metrics.private_slots("second", 5)
    metrics.enabled("second", on=False)
    policies.replace(made[0])
    assert series("second")["sglang:kv_policy_enabled", None] == 0
    policies.withdraw("second")
    assert series("second")["sglang:kv_policy_enabled", None] == 1  # no alert for what is gone
    assert series("second")["sglang:kv_policy_private_slots", None] == 5  # requests that have it


def test_a_label_that_is_called_as_ours_is_refused():
    with pytest.raises(Refused, match="--extra-metric-labels has `policy`, by which series"):
        Metrics({"model_name": "m", "policy": "mine"}, ["first"])


def test_what_one_scheduler_cannot_compile_no_scheduler_serves(fleet):
    catalog, schedulers = fleet
    before = [each.served() for each in schedulers]
    schedulers[1].cannot_compile["third"] = "too little memory"
    with pytest.raises(Refused, match=r"^scheduler DP1: too little memory$"):
        put(catalog, "third")
    assert [each.served() for each in schedulers] == before
    assert all(each.changes._begun is None for each in schedulers)  # nothing is held for it
    schedulers[0].cannot_compile["third"] = "too little memory"
    with pytest.raises(Refused, match=r"^too little memory$"):
        put(catalog, "third")
    assert list(catalog.policies) == ["first", "second"]


@pytest.mark.parametrize("name", ["second", "third"])
def test_what_one_scheduler_does_not_take_up_the_others_give_back(fleet, name):
    catalog, schedulers = fleet
    before = [each.served() for each in schedulers]
    schedulers[0].cannot_do[COMMIT] = True
    with pytest.raises(Refused, match=r"^scheduler DP0: AttributeError: "):
        put(catalog, name, capacity="20")
    assert [each.served() for each in schedulers] == before
    assert dict(catalog.policies[catalog.default].settings) == {}
    assert list(catalog.policies) == ["first", "second"]
    schedulers[0].cannot_do.clear()
    put(catalog, name, capacity="20")
    assert schedulers[0].served() == schedulers[1].served() != before[0]


def test_what_one_scheduler_does_not_withdraw_all_go_on_with(fleet):
    catalog, schedulers = fleet
    before = [each.served() for each in schedulers]
    schedulers[1].cannot_do[WITHDRAW] = True
    with pytest.raises(Refused, match=r"^scheduler DP1: AttributeError: "):
        asyncio.run(catalog.withdraw(None, "second"))
    assert [each.served() for each in schedulers] == before
    assert list(catalog.policies) == ["first", "second"]


def test_a_change_that_cannot_be_undone_is_said(fleet):
    catalog, schedulers = fleet
    schedulers[0].cannot_do[COMMIT] = schedulers[1].cannot_do[UNDO] = True
    with pytest.raises(Refused, match="; the change was not undone: scheduler DP1: Attr"):
        put(catalog, "third")


DOCUMENT = {
    "experiment": "trial",
    "coverage": "100 %",
    "arms": {"control": {"policy": "none"}, "other": {"policy": "first"}},
    "metrics": [{"metric": "error_rate", "role": "guardrail", "margin": 0.1}],
}


def experiment(arm):
    return json.dumps({**DOCUMENT, "arms": {**DOCUMENT["arms"], "other": {"policy": arm}}})


def asking(content="", **path):
    async def body():
        return content if isinstance(content, bytes) else content.encode()

    return SimpleNamespace(path_params=path, query_params={}, body=body)


@pytest.fixture
def control(fleet, tmp_path, monkeypatch):
    """The endpoints of a server that compares `first` with full KV."""
    catalog, _ = fleet
    file = tmp_path / "experiment.yaml"
    file.write_text(experiment("first"))
    found = reading.read(file.read_text(), "file").require()
    live = Live(found, file, {"first": {}, "second": {}})
    monkeypatch.setattr(compat, "manager", lambda: None)
    server = FrontEnd(Traffic(catalog.policies, "any", live), context=1)
    return Control(server, catalog), live


@pytest.fixture
def called(control, monkeypatch):
    """A function that calls an endpoint as its route does."""
    routes = {}

    def add_route(path, method, endpoint, *, admin):
        routes[method, path] = endpoint

    monkeypatch.setattr(compat, "add_route", add_route)
    control[0].install()

    def call(method, path, content="", query=None, **names):
        request = asking(content, **names)
        request.query_params = query or {}
        return asyncio.run(routes[method, f"/kv_policy/{path}"](request))

    return call


POLICIES, EXPERIMENT = "policies/{name}", "experiment"
MISSPELT = [
    ("POST", "experiment/abort", '{"arms": "second"}', "", "`arms`", "body", "`arm`, `reason`"),
    ("POST", "experiment/pause", '{"x": 1}', "", "`x`", "body", "nothing"),
    ("PUT", EXPERIMENT, experiment("second"), "dryrun", "`dryrun`", "URL's query", "`dry_run`"),
    ("PUT", POLICIES, "policy: third", "dryrun", "`dryrun`", "URL's query", "`dry_run`"),
    ("DELETE", POLICIES, "", "dry_run", "`dry_run`", "URL's query", "nothing"),
    ("PUT", POLICIES, '{"policy": "x", "sets": {}}', "", "`sets`", "body", "`policy`, `set`"),
]


@pytest.mark.parametrize(("method", "path", "content", "flag", "name", "where", "takes"), MISSPELT)
def test_what_is_misspelt_changes_nothing(
    control, called, method, path, content, flag, name, where, takes
):
    before = control[1].lifecycle.state, control[1].experiment
    query = {flag: "true"} if flag else {}
    status, answer = called(method, path, content, query, name="third")
    expected = f"{name} is not known in the {where}, which takes {takes}"
    assert (status, answer["error"]["message"]) == (400, expected)
    assert (control[1].lifecycle.state, control[1].experiment) == before


@pytest.mark.parametrize("path", [POLICIES, EXPERIMENT])
def test_bodies_are_text(called, path):
    status, answer = called("PUT", path, b"\x00\xff", name="third")
    assert (status, answer["error"]["message"]) == (400, "the body is not text in UTF-8")


def meanwhile(monkeypatch, action, happens):
    """Calls `happens` once, just before schedulers are asked for an action."""
    ask, left = compat.change_policies, [happens]

    async def change_policies(manager, body):
        if body["action"] == action and left:
            await left.pop()()
        return await ask(manager, body)

    monkeypatch.setattr(compat, "change_policies", change_policies)


LARGE = json.dumps({"policy": TEXT, "set": {"capacity": 30}})


def test_what_an_experiment_begins_to_use_is_not_replaced(control, fleet, monkeypatch):
    (control, live), (catalog, schedulers) = control, fleet

    async def begin():
        assert (await control.replace(asking(experiment("second"))))[0] == 200

    meanwhile(monkeypatch, LOOK, begin)
    status, answer = asyncio.run(control.put_policy(asking(LARGE, name="second")))
    assert (status, live.uses("second")) == (409, True)
    assert "`trial` has begun to use `second` meanwhile" in answer["error"]["message"]
    assert dict(catalog.policies["second"].settings) == {}
    assert all(each.served()[1] == ("second", {}) for each in schedulers)
    assert all(each.changes._begun is None for each in schedulers)


@pytest.mark.parametrize("action", [COMMIT, WITHDRAW])
def test_no_experiment_begins_to_use_what_is_being_changed(control, fleet, monkeypatch, action):
    (control, live), (catalog, _) = control, fleet
    before = live.experiment

    async def begin():
        live.reload(experiment("second").encode())
        assert "policy `second` is being changed" in live.document()["reload"]["problem"]
        status, answer = await control.replace(asking(experiment("second")))
        assert (status, "is being changed" in str(answer)) == (400, True)

    meanwhile(monkeypatch, action, begin)
    change = control.put_policy if action == COMMIT else control.withdraw_policy
    assert asyncio.run(change(asking(LARGE, name="second")))[0] == 200
    assert live.experiment is before
    assert ("second" in catalog.policies) == (action == COMMIT)
    live.reload(experiment("second").encode())  # the file is looked at again
    assert live.uses("second") == live.file.in_use == (action == COMMIT)


def test_what_is_withdrawn_only_after_a_wait_may_be_used_by_then(control, fleet):
    (control, live), (catalog, _) = control, fleet

    async def both():
        async with catalog._changing:
            withdrawing = asyncio.create_task(control.withdraw_policy(asking(name="second")))
            await asyncio.sleep(0)
            assert (await control.replace(asking(experiment("second"))))[0] == 200
        return await withdrawing

    assert asyncio.run(both())[0] == 409
    assert "second" in catalog.policies
    assert live.uses("second")


def test_a_policy_is_compiled_on_the_schedulers_device(monkeypatch):
    """A new thread starts on the first GPU, even if the scheduler computes on another."""
    now = []

    @contextlib.contextmanager
    def within(what):
        now.append(what)
        yield
        now.pop()

    def stream():
        made.extend(now)
        return SimpleNamespace(synchronize=lambda: waited.extend(now))

    made, waited = [], []
    monkeypatch.setattr(torch.cuda, "device", within)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", within)
    device = torch.device("cuda", 1)
    thread = Background(device)
    for _ in range(2):  # on one stream
        assert thread.begin(now.copy).result(10) == [device, thread._stream]
    assert made == [device]
    assert waited == [device, device]
    assert Background(torch.device("cpu")).begin(now.copy).result(10) == []
