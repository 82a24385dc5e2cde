"""A change of the policies is that of every scheduler or of none."""

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")

from kvpolicy.dsl.bind.model_config import ModelConfig
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.sglang_ext.face import compat, options
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.face.ranks import Ranks, Stages
from kvpolicy.sglang_ext.report.metrics import Metrics
from kvpolicy.sglang_ext.serving import catalog as catalogs
from kvpolicy.sglang_ext.serving import changes
from kvpolicy.sglang_ext.serving.catalog import Catalog
from kvpolicy.sglang_ext.serving.changes import COMMIT, UNDO, WITHDRAW, Changes
from kvpolicy.sglang_ext.serving.served import ServedPolicies

SHAPE = ModelShape(layers=4, heads=4, kv_heads=2, head_dim=32)
MODEL = ModelConfig("a model", SHAPE, 128, 512, 512, 2 * 128 * 512, 512, "float32", 4)
FILE = Path(__file__).parents[2] / "policies" / "sinks-recent.yaml"
TEXT = FILE.read_text()


class Scheduler:
    """The part of one that changes policies; what it cannot compile and do is given by name."""

    def __init__(self, rank, given):
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
            stages=Stages(range(2)),
        )
        self.changes = Changes(services, self.policies, runner, SHAPE, self.make, 0)

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
    """A catalog, two schedulers, and what the catalog calls SGLang's manager."""
    given = options.load_policies([f"{name}={FILE}" for name in ("first", "second")], [])
    schedulers = [Scheduler(rank, given) for rank in range(2)]

    async def change_policies(manager, body):
        assert manager is None
        return [each.handle(body) for each in reversed(schedulers)]

    monkeypatch.setattr(compat, "change_policies", change_policies)
    monkeypatch.setattr(compat, "dp_rank", lambda: None)
    monkeypatch.setattr(catalogs, "LOOK_EVERY", 0.001)
    return Catalog(given, MODEL, 2048), schedulers


def put(catalog, name, **settings):
    asyncio.run(asyncio.wait_for(catalog.put(None, name, TEXT, settings), 60))


def test_a_change_reaches_every_scheduler(fleet):
    catalog, schedulers = fleet
    put(catalog, "third", capacity="20")
    put(catalog, "second", capacity="30")
    after = [("first", {}), ("second", {"capacity": "30"}), ("third", {"capacity": "20"})]
    assert [each.served() for each in schedulers] == [after, after]
    asyncio.run(catalog.withdraw(None, "second"))
    assert [each.served() for each in schedulers] == [[after[0], after[2]]] * 2
    assert list(catalog.policies) == ["first", "third"]


def test_what_one_scheduler_cannot_compile_no_scheduler_serves(fleet):
    catalog, schedulers = fleet
    before = [each.served() for each in schedulers]
    schedulers[1].cannot_compile["third"] = "too little memory"
    with pytest.raises(Refused, match=r"^scheduler DP1: too little memory$"):
        put(catalog, "third")
    assert [each.served() for each in schedulers] == before
    assert all(each.changes._served is None for each in schedulers)  # nothing is held for it
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


def test_a_policy_is_compiled_on_the_schedulers_device(monkeypatch):
    """A thread begins at the first GPU, whichever one the scheduler computes on."""
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
    with changes._side_stream(device):
        assert now[0] == device
        assert len(now) == 2
    assert made == waited == [device]
    with changes._side_stream(torch.device("cpu")):
        assert now == []
