"""Variants of policies, with parameters that requests set, on several ranks and schedulers."""

import asyncio
import random
import re
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")

from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.execute.tensors.heads import Divided
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.sglang_ext.clients import prepared
from kvpolicy.sglang_ext.clients.prepared import Prepared
from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.face.errors import NotCompiled, Refused
from kvpolicy.sglang_ext.face.policy_files import Policy, texts_of
from kvpolicy.sglang_ext.face.ranks import FailedElsewhere, Ranks, Stages
from kvpolicy.sglang_ext.memory.arena import create_arena
from kvpolicy.sglang_ext.request.request import Served
from kvpolicy.sglang_ext.serving.background import Background
from kvpolicy.sglang_ext.serving.messages import (
    FAILED,
    MOST_PENDING,
    MOST_VARIANTS,
    PREPARING,
    READY,
    VARY,
)
from kvpolicy.sglang_ext.serving.variants import _MOST_FRONT_ENDS, Variants
from shipped_policies import shipped_program
from test_changes import Meeting

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
    policy = SimpleNamespace(
        with_settings=lambda texts: SimpleNamespace(bind=lambda shape: texts),
        option=f"--kv-policy {name}=/srv/{name}.yaml",
    )
    policy.reason = partial(Policy.reason, policy)
    return SimpleNamespace(name=name, policy=policy, standing="standing")


def variants_of(make, ranks=None, stages=None, prepare=lambda variant: None):
    given = (ranks or Ranks(), stages or Stages(range(4)), Background(torch.device("cpu")))
    return Variants(None, make, prepare, *given)


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
    of = (lambda *given: until(lambda: variants.is_ready(*given, ""))) if ahead else variants.of
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


def test_a_variant_is_there_when_all_stages_have_made_it():
    """Of which the second handles each message later, and makes variants later."""
    meeting, goes_on, made = Meeting(2), threading.Event(), []

    def make(policy, bound):
        made.append(bound)
        return SimpleNamespace()

    def make_late(policy, bound):
        goes_on.wait(10)
        return make(policy, bound)

    stages = [variants_of(each, stages=meeting.of(i)) for i, each in enumerate((make, make_late))]
    asked = (base(), {"window": 24}, "")
    for _ in range(3):
        assert [each.is_ready(*asked) for each in stages] == [False, False]
    goes_on.set()
    # Each message reaches both.
    until(lambda: [each.is_ready(*asked) for each in stages] == [True, True])
    for each in stages:
        assert each.of(*asked[:2]).set == asked[1]
        assert each.is_ready(*asked)
    assert len(made) == 2


@pytest.mark.parametrize("error", [OSError("no space left on device"), NotCompiled("no kernel")])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_request_is_not_sent_if_a_stage_cannot_make_its_variant(stage, error):
    """Or compile its kernels. The next one asks anew."""
    meeting, fails = Meeting(2), [stage]

    def fail(number, *given):
        if number in fails:
            raise error
        return SimpleNamespace()

    def made(number):
        if isinstance(error, NotCompiled):
            return {"make": lambda *given: SimpleNamespace(), "prepare": partial(fail, number)}
        return {"make": partial(fail, number)}

    stages = [variants_of(**made(i), stages=meeting.of(i)) for i in range(2)]
    asked = (base(), {"window": 24}, "")

    def answers():
        """What each says to a message: whether the variant is there, or the problem."""
        found = []
        for each in stages:
            try:
                found.append(each.is_ready(*asked))
            except ValueError as error:
                found.append(str(error))
        return found

    until(lambda: FAILURE in str(answers()[0]))
    fails.clear()
    until(lambda: answers() == [True, True])


def test_a_request_that_all_stages_have_is_not_refused_by_one_that_cannot_compile_its_kernels():
    def fail(variant):
        raise NotCompiled("no kernel")

    def make(policy, bound):
        return SimpleNamespace()

    stage = variants_of(make, stages=Meeting(2).of(0), prepare=fail)
    assert stage.of(base(), {"window": 24}).set == {"window": 24}
    with pytest.raises(ValueError, match=FAILURE):
        variants_of(make, prepare=fail).of(base(), {"window": 24})


def test_nobody_waits_for_what_is_made_in_the_background():
    made, goes_on = [], threading.Event()

    def make(policy, bound):
        assert "1" in dict(bound).values() or goes_on.wait(10)
        made.append(bound)
        return SimpleNamespace()

    variants = variants_of(make)
    slow, quick = {"window": 24}, {"window": 1}
    assert not variants.is_ready(base(), slow, "worker")
    assert not variants.is_ready(base(), slow, "worker")
    assert variants.of(base(), quick).set == quick  # another request goes on
    assert made == [(("window", "1"),)]
    goes_on.set()
    until(lambda: variants.is_ready(base(), slow, "worker"))
    assert variants.of(base(), slow).set == slow
    assert made == [(("window", "1"),), (("window", "24"),)]  # each is made once


def test_what_is_warmed_in_the_background_exchanges_nothing_of_prompts():
    """Else this rank would take its own numbers for all ranks', and not come to their exchange."""
    sent = []

    def exchange(x):
        sent.append(x.numel())
        return x.expand(2, -1)

    heads = Divided(0, 2, 2, exchange, lambda: None)
    shape, program = (
        ModelShape(layers=2, heads=4, kv_heads=2, head_dim=8),
        shipped_program("snapkv"),
    )
    policy, arena = (
        Policy("snapkv", program, "", {}),
        create_arena(2, 2, 1, 8, torch.float32, "cpu"),
    )
    variant = Served(policy, bind(program, shape, {}), arena, 1, heads)
    of_prompt = heads.gathered_later([(torch.zeros(3, 1, dtype=torch.uint8), 1)])
    variant.program.heads.per_rank(torch.zeros(5, dtype=torch.uint8))
    assert sent == [5]
    assert [x.shape for x in of_prompt()] == [(3, 2)]
    assert sent == [5, 3]


def test_a_request_that_does_not_wait_takes_what_has_been_begun():
    made, goes_on = [], threading.Event()

    def make(policy, bound):
        assert goes_on.wait(10)
        made.append(bound)
        return SimpleNamespace()

    variants = variants_of(make)
    assert not variants.is_ready(base(), {"window": 24}, "worker")
    threading.Timer(0.05, goes_on.set).start()
    assert variants.of(base(), {"window": 24}).set == {"window": 24}
    assert variants.is_ready(base(), {"window": 24}, "worker")
    assert len(made) == 1


def test_a_variant_is_there_when_the_slowest_rank_has_it():
    variants = variants_of(lambda policy, bound: SimpleNamespace(), OneOfTwo(False, looks=3))
    asked = 0
    while not variants.is_ready(base(), {"window": 24}, "worker"):
        asked += 1
        until(lambda: all(each.future.done() for each in variants._begun.values()))
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
    assert not variants.is_ready(old, {"window": 24}, "worker")
    variants.forget("snapkv")
    goes_on.set()
    until(lambda: variants.is_ready(new, {"window": 24}, "worker"))
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
            assert len(found.asked) == number

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


def test_a_failure_is_told_at_once(monkeypatch):
    """Another scheduler may be busy for long; asked meanwhile, the first would begin again."""
    failed = {"state": FAILED, "problem": "it cannot be served"}
    found = Schedulers(monkeypatch, {"state": READY}, failed, looks=10**9)
    with pytest.raises(ValueError, match=r"^it cannot be served$"):
        asyncio.run(Prepared().wait(None, Named(), {"window": 24}))
    assert len(found.asked) == 1


class Scheduler:
    """Makes variants in a real background; counts those that a request had to wait for."""

    def __init__(self, make=lambda policy, bound: SimpleNamespace()):
        self.variants, self.base, self.waited = variants_of(make), base(), 0

    def vary(self, body):
        assert body["action"] == VARY
        ready = self.variants.is_ready(self.base, body["values"], body["front_end"])
        return {"state": READY if ready else PREPARING}

    def serve(self, values):
        self.waited += (self.base.name, texts_of(values)) not in self.variants._kept
        assert self.variants.of(self.base, values).set == values


@pytest.mark.parametrize(("front_ends", "schedulers"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_no_request_waits_for_a_variant_in_the_schedulers_loop(front_ends, schedulers, monkeypatch):
    """Front ends and schedulers keep their variants apart, and never disagree on what is there."""
    monkeypatch.setattr(prepared, "LOOK_EVERY", 0.0)
    replicas = [Scheduler() for _ in range(schedulers)]

    async def answer(manager, body):
        await asyncio.sleep(0)
        return [replica.vary(body) for replica in replicas]

    monkeypatch.setattr(compat, "change_policies", answer)
    rng, policy = random.Random(7), Named()

    async def requests(known, spread):
        for _ in range(120):
            batch = [{"window": int(rng.paretovariate(spread))} for _ in range(rng.randint(1, 12))]
            await asyncio.gather(*(known.wait(None, policy, values) for values in batch))
            for values in batch:
                rng.choice(replicas).serve(values)

    async def all_front_ends():
        await asyncio.gather(*(requests(Prepared(), 0.3 + 0.2 * i) for i in range(front_ends)))

    asyncio.run(all_front_ends())
    for replica in replicas:
        assert replica.waited == 0
        assert MOST_VARIANTS < len(replica.variants._kept) <= 2 * MOST_VARIANTS * front_ends
        assert not replica.variants._begun


def test_a_request_makes_what_waits_behind_others():
    made, goes_on = [], threading.Event()

    def make(policy, bound):
        if dict(bound)["window"] == "1":
            assert goes_on.wait(10)
        made.append(dict(bound)["window"])
        return SimpleNamespace()

    variants = variants_of(make)
    assert not variants.is_ready(base(), {"window": 1}, "worker")
    assert not variants.is_ready(base(), {"window": 2}, "worker")
    assert variants.of(base(), {"window": 2}).set == {"window": 2}  # 1 is still being made
    assert made == ["2"]
    goes_on.set()
    until(lambda: variants.is_ready(base(), {"window": 1}, "worker"))
    assert made == ["2", "1"]


def test_of_variants_that_no_front_end_asked_for_those_used_last_are_kept():
    """With several stages, requests alone bring them."""
    made = []
    variants = variants_of(lambda policy, bound: made.append(bound) or SimpleNamespace())
    for window in range(3 * MOST_VARIANTS):
        variants.of(base(), {"window": window})
        variants.of(base(), {"window": 0})
    assert len(made) == 3 * MOST_VARIANTS
    variants.of(base(), {"window": 1})
    assert len(made) == 3 * MOST_VARIANTS + 1
    assert len(variants._kept) == 2 * MOST_VARIANTS


def test_what_nobody_asks_for_again_is_dropped():
    variants = variants_of(lambda policy, bound: SimpleNamespace())
    for window in range(1000):
        variants.is_ready(base(), {"window": window}, "worker")
    assert len(variants._begun) <= 8 * MOST_PENDING
    assert len(variants._kept) <= 2 * MOST_VARIANTS


def test_what_front_ends_wanted_that_asked_longest_ago_is_dropped():
    """There are so many only after some have ended."""
    variants = variants_of(lambda policy, bound: SimpleNamespace(texts=bound))
    for number in (*range(_MOST_FRONT_ENDS), 0, *range(_MOST_FRONT_ENDS, _MOST_FRONT_ENDS + 3)):
        values = {"window": number}
        until(partial(variants.is_ready, base(), values, f"front end {number}"))
    kept = [dict(variant.set)["window"] for variant in variants._kept.values()]
    assert kept == [0, *range(4, _MOST_FRONT_ENDS + 3)]


def test_a_front_end_asks_for_few_variants_at_a_time(monkeypatch):
    pending, most = set(), []

    async def answer(manager, body):
        window = body["values"]["window"]
        looked = window in pending
        pending.add(window)
        most.append(len(pending))
        await asyncio.sleep(0)
        if looked:
            pending.remove(window)
        return [{"state": READY if looked else PREPARING}]

    monkeypatch.setattr(compat, "change_policies", answer)
    monkeypatch.setattr(prepared, "LOOK_EVERY", 0.001)
    policy = Named()

    async def requests():
        known = Prepared()
        await asyncio.gather(*(known.wait(None, policy, {"window": i}) for i in range(50)))

    asyncio.run(requests())
    assert max(most) == MOST_PENDING


def test_a_request_that_waits_can_be_aborted(monkeypatch):
    """SGLang does not know it yet. Who waits for the same variant goes on."""
    found, policy = Schedulers(monkeypatch, {"state": READY}, looks=5), Named()
    groups = [["a-1"], ["a-2"], ["b"], ["a-3", "b-2"], []]

    async def requests(aborts):
        known = Prepared()
        waits = [
            asyncio.create_task(known.wait(None, policy, {"window": 24}, rids)) for rids in groups
        ]
        await asyncio.sleep(0)
        for rid, all_requests in aborts:
            known.abort(rid, all_requests=all_requests)
        results = await asyncio.gather(*waits, return_exceptions=True)
        assert not known._aborts
        found.left.clear()
        for result in filter(None, results):
            assert str(result).startswith("aborted while")
        return [rids for rids, result in zip(groups, results, strict=True) if result]

    assert asyncio.run(requests([("", False), ("c", False)])) == []
    assert asyncio.run(requests([("a", False), ("a-1", False)])) == [["a-1"], ["a-2"]]
    assert asyncio.run(requests([("", True)])) == groups


def test_schedulers_that_do_not_answer_are_not_awaited_for_ever(monkeypatch):
    monkeypatch.setattr(prepared, "PATIENCE", 0.01)
    monkeypatch.setattr(compat, "change_policies", lambda *_: asyncio.Event().wait())
    with pytest.raises(ValueError, match="were not compiled within"):
        asyncio.run(Prepared().wait(None, Named(), {"window": 24}))


def test_nothing_is_made_while_memory_is_given_up():
    made, first, second = [], threading.Event(), threading.Event()
    background = Background(torch.device("cpu"))

    def make(name, begun, goes_on):
        begun.set()
        assert goes_on.wait(10)
        made.append(name)

    background.begin(partial(make, "first", first, second))
    background.begin(partial(make, "second", second, second))
    assert first.wait(10)
    threading.Timer(0.05, second.set).start()
    background.pause()  # waits for what is being made
    assert made == ["first"]
    background.pause()  # other memory is given up too
    threading.Event().wait(0.05)
    assert made == ["first"]
    background.resume()
    background.resume()
    until(lambda: made == ["first", "second"])


def test_the_front_end_knows_of_no_more_variants_than_schedulers_keep(monkeypatch):
    found, policy = Schedulers(monkeypatch, {"state": READY}, looks=0), Named()

    async def requests():
        known = Prepared()
        for number in [*range(MOST_VARIANTS), 0, MOST_VARIANTS, 1, 0]:
            await known.wait(None, policy, {"window": number})

    asyncio.run(requests())
    assert len(found.asked) == MOST_VARIANTS + 2  # 0 is asked for again


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            Refused(
                "--kv-policy snapkv=/srv/snapkv.yaml: a: error[range]: `capacity` is too small"
            ),
            "custom_params.kv_policy_set of `snapkv`: `capacity` is too small",
        ),
        (
            NotCompiled("--kv-policy snapkv=/srv/snapkv.yaml: OutOfMemoryError: 80 GiB"),
            f"custom_params.kv_policy_set: {FAILURE}'s log says why",
        ),
    ],
)
def test_a_client_is_told_what_concerns_it(error, message):
    def make(policy, bound):
        raise error

    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        variants_of(make).of(base(), {"window": 24})
