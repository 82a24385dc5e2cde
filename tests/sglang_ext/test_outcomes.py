"""Results of a forward with stages (`--pp`): each carries out what all agree on."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fake_allocator import Allocator, no_cache
from kvpolicy.dsl.execute.tensors.arriving import Arriving
from kvpolicy.sglang_ext.face.options import INTERVAL
from kvpolicy.sglang_ext.face.ranks import Ranks
from kvpolicy.sglang_ext.face.streams import Streams
from kvpolicy.sglang_ext.forward.failures import READING, SCORING, Failures, code_of
from kvpolicy.sglang_ext.forward.leaving import Leaving
from kvpolicy.sglang_ext.forward.stages import Outcome
from kvpolicy.sglang_ext.forward.unconfirmed import Unconfirmed
from kvpolicy.sglang_ext.memory.arena import create_arena
from kvpolicy.sglang_ext.memory.store import Store
from kvpolicy.sglang_ext.request.propagation import Progress
from kvpolicy.sglang_ext.request.request import Decoding, RequestState

SPANS = (range(2), range(2, 3))
LENGTH, PROMPT = 20, 12


class Meeting:
    """Gathers what stages send; each receives the largest of all numbers."""

    size = len(SPANS)

    def __init__(self):
        self.sent = []

    def send(self, found):
        self.sent.append(found)
        return SimpleNamespace(read=lambda: torch.stack(self.sent).amax(0))


class OfScheduler(Streams):
    """Knows whether work goes to the scheduler's stream."""

    here = False

    @contextmanager
    def scheduling(self):
        self.here = True
        yield
        self.here = False


class Stage:
    """One stage with one request, which may lose entries after a forward."""

    def __init__(self, stage, meeting, kept, slots=40, finite=True):
        sizes = (len(SPANS[stage]), slots, 2, 4)
        arena = create_arena(*sizes, torch.float32, "cpu")
        arena = replace(arena, spans=SPANS, stage=stage)
        self.store = Store(arena, Allocator(slots))
        self.told, self.folded, self.evicted = [], [], []
        memory = SimpleNamespace(
            withdraw=lambda finite: self.told.append(("withdrawn", finite)), not_finite=False
        )
        served = SimpleNamespace(name="p")
        self.state = RequestState(served, PROMPT, 0, decoding=Decoding(memory, None))
        self.request = SimpleNamespace(kv=SimpleNamespace(holds_kv=True))
        self.request.kv_policy_state = self.state
        self.batch = SimpleNamespace(reqs=[self.request])
        numbers = SimpleNamespace(counts_after=torch.tensor(kept), finite=finite)
        own = SimpleNamespace(request=self.request, fold_numbers=numbers)
        fold = SimpleNamespace(members=[own], carry_out=self.carry_out)
        leaving = Leaving(self.request, self.state, LENGTH)
        decode = SimpleNamespace(leaving=[leaving], folds=[fold])
        self.step = SimpleNamespace(prefill=None, resume=None, decode=decode)
        streams = OfScheduler()
        self.services = SimpleNamespace(
            arena=arena, store=self.store, stages=meeting, streams=streams,
            evict=lambda slots: self.evicted.append((slots, len(self.folded), streams.here)),
            forget_rows=lambda: None,
            tree=SimpleNamespace(evictable_size=lambda: 0, page_size=1),
            failures=SimpleNamespace(take_up_failure=self.take_up_failure),
            reports=SimpleNamespace(
                finished=lambda requests: None,
                skipped_fold=lambda request, state, step: self.told.append(("skipped", step)),
            ),
        )  # fmt: skip

    def take_up_failure(self, request, state, code):
        state.failed |= code > 0

    def carry_out(self, agreed):
        self.folded += [(each.kept.tolist(), each.left, each.fewest) for each in agreed.values()]

    def over(self):
        """Ends the forward."""
        self.outcome = Outcome(self.services, self.batch, self.step, [])


def run(meanwhile=lambda stages: None, before=lambda stages: None, **options):
    """Two stages after a forward; `before` and `meanwhile` run before and after its end."""
    meeting = Meeting()
    more = options.pop("finite", (True, True))
    kept = [[[5, 6], [7, 20]], [[9, 1]]]
    stages = [
        Stage(i, meeting, own, finite=finite, **options)
        for i, (own, finite) in enumerate(zip(kept, more, strict=True))
    ]
    before(stages)
    for each in stages:
        each.over()
        assert each.state.under_way == 1
    meanwhile(stages)
    for each in stages:
        each.outcome.take_up(each.batch)
    return stages


def test_all_stages_fold_by_the_numbers_of_the_whole_model():
    for each in run():
        lists = [[5, 6], [7, 20], [9, 1]]
        assert each.folded == [(lists, 6 * LENGTH - sum(map(sum, lists)), 0)]
        assert each.told == []
        assert each.state.under_way == 0


def test_all_stages_evict_alike_for_their_folds_whatever_their_order():
    """At once and before any is written: stages group requests by the widths of their layers."""
    for each in run():
        assert each.evicted == [(10, 0, True)]


def test_nothing_leaves_where_tensors_of_one_stage_are_not_finite():
    for each in run(finite=(True, False)):
        assert (each.folded, each.told) == ([], [("withdrawn", False)])


@pytest.mark.parametrize(("slots", "room"), [(9, False), (10, True)])
def test_nothing_leaves_where_one_stage_has_no_room_for_what_stays(slots, room):
    """The first stage needs the most slots: 20 pages of two layers."""

    def taken(stages):
        for each in stages:
            each.store.allocator.alloc(40 - slots)

    for each in run(taken):
        skipped = [("withdrawn", True), ("skipped", LENGTH - PROMPT)]
        assert bool(each.folded) == room
        assert each.told == ([] if room else skipped)


def prompt_ends(stages, found=([[5, 6], [7, 8]], [[9, 1]]), finite=(True, True)):
    """A prompt ends in the forward; `found` is None of a stage on which that has failed."""
    for each, numbers, own in zip(stages, found, finite, strict=True):
        part = SimpleNamespace(finite=own, stage_numbers=partial(torch.tensor, numbers))
        parts = {} if numbers is None else {id(each.request): part}
        if numbers is None:
            each.state.failure_code = 3
        each.state.served.program = SimpleNamespace(exchanged=())
        each.services.detach = lambda requests, each=each: each.told.append("detached")
        prefill = SimpleNamespace(ending=[(each.request, each.state)], parts=parts)
        prefill.carry_out = lambda request, numbers, each=each, **told: each.told.append(
            (numbers.tolist(), told)
        )
        each.step = SimpleNamespace(prefill=prefill, resume=None, decode=None)


@pytest.mark.parametrize("finite", [(True, True), (True, False)])
def test_all_stages_compress_a_prompt_by_the_numbers_of_the_whole_model(finite):
    for each in run(before=partial(prompt_ends, finite=finite)):
        assert each.told == [([[5, 6], [7, 8], [9, 1]], {"finite": all(finite)})]


def test_no_stage_compresses_a_prompt_that_has_failed_on_one():
    for each in run(before=partial(prompt_ends, found=([[5, 6], [7, 8]], None))):
        assert each.state.failed
        assert each.told == []


@pytest.mark.parametrize("ready", [None, False, True])
def test_a_prompt_that_was_offered_to_the_cache_before_is_left_to_it_once_it_is_copied(ready):
    """As of a resumed request; None: everything stays."""

    def offered(stages):
        for each in stages:
            prompt_ends(stages)
            each.state.published = True
            each.state.private = None if ready is None else SimpleNamespace(ready=ready)

    for each in run(before=offered):
        assert each.told[1:] == (["detached"] if ready else [])


def test_nothing_is_written_of_what_has_failed_on_one_stage():
    def fail(stages):
        stages[1].state.failure_code = 3
        stages[1].step.decode.folds = []  # it has found nothing to send

    for each in run(before=fail):
        assert each.state.failed
        assert (each.folded, each.told) == ([], [])


class OneOfTwo(Ranks):
    """Two ranks, of which the other sends a code, and whether it has given up the prompt."""

    size = 2

    def __init__(self, code, gave_up=False):
        self.other = code, gave_up

    def worst(self, numbers):
        return [max(pair) for pair in zip(numbers, self.other, strict=True)]


@pytest.mark.parametrize("gave_up", [False, True])
@pytest.mark.parametrize("in_stages", [False, True])
def test_ranks_of_a_stage_know_and_wait_for_the_other_stages(
    in_stages, gave_up, monkeypatch, caplog
):
    """Without stages what fails on one rank is taken up where they agree."""

    def fail_request(self, req, state, stage, *, whole):
        taken.append((stage, whole))
        state.failed, state.failure_code = True, 0

    taken = []
    monkeypatch.setattr(Failures, "_fail_request", fail_request)
    ranks = OneOfTwo(code_of(SCORING, whole=True), gave_up)
    failures = Failures(*[SimpleNamespace()] * 3, ranks, 0, in_stages=in_stages)
    request = Stage(0, Meeting(), [[5, 6], [7, 20]]).request
    request.rid = "r"
    state = request.kv_policy_state
    failures.agree([request])
    assert state.broken
    assert taken == ([] if in_stages else [("scoring", not gave_up)])
    assert "failed at scoring on another rank, whose log says why" in caplog.text
    failures.agree([request])
    if in_stages:
        worse = code_of(SCORING, whole=False)  # as another stage says
        failures.take_up_failure(request, state, worse)
    assert taken == [("scoring", not in_stages and not gave_up)]
    assert caplog.text.count("on another") == 1


def test_that_requests_failed_together_is_logged_once(caplog):
    failures = Failures(*[SimpleNamespace()] * 3, Ranks(), 0)
    for error in (ValueError("one"), ValueError("two"), KeyError("three")):
        failures.one_by_one(4, error)
    assert [record.exc_info[0] for record in caplog.records] == [ValueError, KeyError]


@pytest.mark.parametrize("failed_here", [False, True])
def test_prompts_that_are_not_finite_give_slots_back_on_all_ranks_at_once(failed_here):
    """Also where a decode step that has begun meanwhile failed on one, and the others wait."""
    arena = create_arena(2, 40, 2, 4, torch.float32, "cpu")
    store, row = Store(arena, Allocator(40)), 3
    state = RequestState(SimpleNamespace(name="p"), PROMPT, 10)
    state.private = store.allocate(row, "p", 10, PROMPT, no_cache)
    request = SimpleNamespace(
        rid="r", kv_policy_state=state, kv=SimpleNamespace(kv_committed_len=PROMPT)
    )
    state.failure_code = failed_here * code_of(READING, whole=True)
    numbers = torch.tensor([5, 5, 5, 5, 0])
    counts = torch.full((2, 2), 5)
    unconfirmed = Unconfirmed(request, state, state.progress, counts, numbers, Arriving(numbers))
    failures = Failures(store, *[SimpleNamespace()] * 2, OneOfTwo(()), 0)
    services = SimpleNamespace(
        store=store, reports=SimpleNamespace(), failures=failures, forget_rows=lambda: None
    )
    unconfirmed.confirm(services)
    assert (state.private, store.allocator.available_size()) == (None, 40)


def test_ranks_agree_after_steps_at_which_nothing_else_made_them(monkeypatch):
    failures = Failures(*[SimpleNamespace()] * 3, OneOfTwo(0), 0)
    folds = {3, 19, 35, 60, 77}  # none, or one, of the steps between is the sixteenth in a row
    agreed = {step for step in range(100) if failures.due(anyway=step in folds)}
    assert agreed - folds == {51, 76, 93}
    monkeypatch.setenv(INTERVAL.variable, "40")
    failures = Failures(*[SimpleNamespace()] * 3, OneOfTwo(0), 0)
    assert not any(failures.due(anyway=step % 40 == 0) != (step % 40 == 0) for step in range(200))


@pytest.mark.parametrize("how", ["retracted", "aborted"])
def test_nothing_is_written_of_what_has_gone_meanwhile(how):
    def gone(stages):
        for each in stages:
            if how == "retracted":
                each.state.progress, each.state.under_way = Progress(), 0
            else:
                each.request.kv.holds_kv = False

    for each in run(gone):
        assert (each.folded, each.told) == ([], [])


def test_results_are_taken_up_in_their_order():
    (first, _) = run()
    with pytest.raises(RuntimeError, match="not processed in the order"):
        first.outcome.take_up(SimpleNamespace())
