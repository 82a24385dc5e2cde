"""Variants of policies, with parameters that requests set, on several ranks and schedulers."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")

from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.face.ranks import FailedElsewhere, Ranks
from kvpolicy.sglang_ext.serving import prepared
from kvpolicy.sglang_ext.serving.background import Background
from kvpolicy.sglang_ext.serving.messages import FAILED, MOST_VARIANTS, PREPARING, READY, VARY
from kvpolicy.sglang_ext.serving.prepared import Prepared
from kvpolicy.sglang_ext.serving.variants import Variants

FAILURE = "`snapkv` failed with these values; the server"


class OneOfTwo(Ranks):
    """Two ranks, of which the other may fail, or take longer.

    Attributes:
        met: how often the hosts have met.
    """

    size = 2

    def __init__(self, other_fails, looks=0):
        self.other_fails, self.looks, self.met = other_fails, looks, 0

    def meet(self, *, failed=False):
        self.met += 1
        if self.other_fails and not failed:
            raise FailedElsewhere("on the other one")

    def worst(self, numbers):
        self.looks -= 1
        return [max(each, self.looks >= 0) for each in numbers]


def base(name="snapkv"):
    policy = SimpleNamespace(with_settings=lambda texts: SimpleNamespace(bind=lambda shape: texts))
    return SimpleNamespace(name=name, policy=policy, standing="standing")


def variants_of(make, ranks=None):
    return Variants(None, make, ranks or Ranks(), Background(torch.device("cpu")))


def until(happens):
    """Waits for the background."""
    for _ in range(10_000):
        if happens():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it does not happen")


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_no_rank_serves_a_variant_that_another_cannot_make(here, elsewhere, ahead, caplog):
    def make(policy, bound):
        if here:
            raise OSError("no space left on device")
        return SimpleNamespace()

    ranks = OneOfTwo(elsewhere)
    variants = variants_of(make, ranks)
    of = (lambda *given: until(lambda: variants.is_ready(*given))) if ahead else variants.of
    for number in (1, 2):
        if here or elsewhere:
            with pytest.raises(ValueError, match=FAILURE):
                of(base(), {"window": 24})
            assert ranks.met == number
        else:
            of(base(), {"window": 24})
            assert variants.of(base(), {"window": 24}).standing == "standing"
            assert ranks.met == 1  # it is kept
    assert ("no space left" in caplog.text) == here


def test_nobody_waits_for_what_is_made_in_the_background():
    made, goes_on = [], threading.Event()

    def make(policy, bound):
        assert "1" in dict(bound).values() or goes_on.wait(10)
        made.append(bound)
        return SimpleNamespace()

    variants = variants_of(make)
    slow, quick = {"window": 24}, {"window": 1}
    assert not variants.is_ready(base(), slow)
    assert not variants.is_ready(base(), slow)
    assert variants.of(base(), quick).set == quick  # another request goes on
    assert made == [(("window", "1"),)]
    goes_on.set()
    until(lambda: variants.is_ready(base(), slow))
    assert variants.of(base(), slow).set == slow
    assert made == [(("window", "1"),), (("window", "24"),)]  # each is made once


def test_a_request_that_does_not_wait_takes_what_has_been_begun():
    made, goes_on = [], threading.Event()

    def make(policy, bound):
        assert goes_on.wait(10)
        made.append(bound)
        return SimpleNamespace()

    variants = variants_of(make)
    assert not variants.is_ready(base(), {"window": 24})
    threading.Timer(0.05, goes_on.set).start()
    assert variants.of(base(), {"window": 24}).set == {"window": 24}
    assert variants.is_ready(base(), {"window": 24})
    assert len(made) == 1


def test_a_variant_is_there_when_the_slowest_rank_has_it():
    variants = variants_of(lambda policy, bound: SimpleNamespace(), OneOfTwo(False, looks=3))
    asked = 0
    while not variants.is_ready(base(), {"window": 24}):
        asked += 1
        until(lambda: all(each.done() for each in variants._begun.values()))
    assert asked == 3


def test_nothing_is_served_of_a_policy_that_was_replaced_meanwhile():
    goes_on, of_which = threading.Event(), []

    def make(policy, bound):
        assert of_which or goes_on.wait(10)
        of_which.append(bound)
        return SimpleNamespace(bound=bound)

    variants = variants_of(make)
    old, new = base(), base()
    new.policy.with_settings = lambda texts: SimpleNamespace(bind=lambda shape: "new")
    assert not variants.is_ready(old, {"window": 24})
    variants.forget("snapkv")
    goes_on.set()
    until(lambda: variants.is_ready(new, {"window": 24}))
    assert variants.of(new, {"window": 24}).bound == "new"


class Named:
    """A policy of the front end; equal only to itself."""

    name = "snapkv"


class Schedulers:
    """Schedulers that the front end asks; each answers `PREPARING` so often, then as given."""

    def __init__(self, monkeypatch, *answers, looks=2):
        self.asked, self.answers, self.looks = [], answers, looks
        self.left = {}
        monkeypatch.setattr(compat, "change_policies", self.answer)
        monkeypatch.setattr(prepared, "LOOK_EVERY", 0.001)

    async def answer(self, manager, body):
        assert body["action"] == VARY
        key = (body["name"], *body["values"].items())
        self.asked.append(key)
        left = self.left.setdefault(key, self.looks)
        self.left[key] -= 1
        await asyncio.sleep(0)
        return list(self.answers) if left <= 0 else [{"state": PREPARING}, *self.answers[1:]]


def test_a_request_is_sent_when_all_schedulers_have_its_variant(monkeypatch):
    found, policy = Schedulers(monkeypatch, {"state": READY}, {"state": READY}), Named()

    async def requests():
        known = Prepared()
        values = [{"window": 24}, {"window": 24}, {"window": 8}, {"rate": 0.5}]
        await asyncio.gather(*(known.wait(None, policy, each) for each in values))
        asked = len(found.asked)
        await known.wait(None, policy, {"window": 24})
        return asked, len(found.asked)

    assert asyncio.run(requests()) == (9, 9)  # three variants, each asked for until it is there


def test_a_variant_that_a_scheduler_cannot_make_is_the_clients_error(monkeypatch):
    failed = {"state": FAILED, "problem": "it cannot be served"}
    found, policy = Schedulers(monkeypatch, {"state": READY}, failed), Named()

    async def requests():
        known = Prepared()
        for number in (1, 2):  # it is asked for again
            with pytest.raises(ValueError, match=r"^it cannot be served$"):
                await known.wait(None, policy, {"window": 24})
            found.left.clear()
            assert len(found.asked) == 3 * number

    asyncio.run(requests())


def test_a_client_that_goes_away_ends_nothing_for_others(monkeypatch):
    found, policy = Schedulers(monkeypatch, {"state": READY}), Named()

    async def requests():
        known = Prepared()
        first, second = (asyncio.create_task(known.wait(None, policy, {"w": 1})) for _ in "ab")
        await asyncio.sleep(0)
        first.cancel()
        await second
        assert first.cancelled()

    asyncio.run(requests())
    assert len(found.asked) == 3


def test_the_front_end_knows_of_no_more_variants_than_schedulers_keep(monkeypatch):
    found, policy = Schedulers(monkeypatch, {"state": READY}, looks=0), Named()

    async def requests():
        known = Prepared()
        for number in [*range(MOST_VARIANTS), 0, MOST_VARIANTS, 0, 1]:
            await known.wait(None, policy, {"window": number})

    asyncio.run(requests())
    assert len(found.asked) == MOST_VARIANTS + 2  # 1 is asked for again


def test_a_scheduler_refuses_what_cannot_be_bound():
    def make(policy, bound):
        raise Refused("it does not fit")

    with pytest.raises(ValueError, match=r"^custom_params\.kv_policy_set: it does not fit$"):
        variants_of(make).of(base(), {"window": 24})
