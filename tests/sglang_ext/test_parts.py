"""Results of stages (`--pp`) for a prompt, with a policy that compares layers."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_allocator import Allocator, no_cache
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.sglang_ext.face.kernels_in_use import in_use
from kvpolicy.sglang_ext.face.ranks import Ranks
from kvpolicy.sglang_ext.forward import compress
from kvpolicy.sglang_ext.forward.failures import Failures
from kvpolicy.sglang_ext.forward.parts import Chosen, Comparing, numbers_of_layer
from kvpolicy.sglang_ext.forward.prefill_step import PrefillStep, Scored
from kvpolicy.sglang_ext.memory.arena import create_arena
from kvpolicy.sglang_ext.memory.lists import Lists
from kvpolicy.sglang_ext.memory.store import Store
from kvpolicy.sglang_ext.request.request import RequestState
from kvpolicy.sglang_ext.runtime import Runtime
from shipped_policies import shipped_program

SHAPE = ModelShape(5, 4, 2, 8)
SPANS = (range(2), range(2, 3), range(3, 5))
PROMPT, ROW, SLOTS = 41, 1, 200
TWO_NUMBERS = """policy: two-numbers
language: 1
about: A test, which compares layers by two numbers of each.
let:
  seen: max[head, query](attn(recent(3)))
  peak: max[token](seen)
  spread: var[token](seen)
score: seen
budget: floor(3 + 5 * peak / max[layer](peak) + 5 * spread / max[layer](spread))
keep: top(score)
"""


def program_of(name):
    """A shipped policy's program, or that of `TWO_NUMBERS`."""
    if name == "two-numbers":
        return load(Source(f"{name}.yaml", TWO_NUMBERS)).require()
    return shipped_program(name)


class Stage:
    """One stage and a request whose prompt has ended."""

    def __init__(self, stage, name, **given):
        self.arena = create_arena(len(SPANS[stage]), SLOTS + 1, 2, 8, torch.float32, "cpu")
        self.arena = replace(self.arena, spans=SPANS, stage=stage)
        self.arena.storage.fill_(float("nan"))
        self.store = Store(self.arena, Allocator(SLOTS))
        bound = bind(program_of(name), SHAPE, given)
        program = TorchProgram(bound, layers=SPANS[stage])
        served = SimpleNamespace(
            name=name, bound=bound, program=program, kernels=in_use(torch.device("cpu")),
            upper_layers=frozenset(), in_stages=True, standing=SimpleNamespace(failures=0),
            growth=SimpleNamespace(most=lambda prompt, output: prompt + 2 * output),
        )  # fmt: skip
        self.state = RequestState(served, PROMPT, SLOTS, folds=bound.folded.decode is not None)
        self.request = SimpleNamespace(rid="r", kv=SimpleNamespace(req_pool_idx=ROW))
        self.request.kv.cache_protected_len = self.request.kv.kv_allocated_len = PROMPT
        self.request.sampling_params = SimpleNamespace(max_new_tokens=30)
        self.request.skip_radix_cache_insert = False
        self.request.kv_policy_state = self.state
        self.slots = self.store.allocator.alloc(PROMPT).long()
        self.table = table = torch.zeros(ROW + 1, PROMPT, dtype=torch.int32)
        table[ROW] = self.slots
        q, k, v = prompt()
        own = slice(SPANS[stage].start, SPANS[stage].stop)
        vectors = torch.stack([k[own], v[own]], 1)
        self.arena.storage[:, :, self.slots] = vectors.transpose(2, 3)
        self.reported = []
        reports = SimpleNamespace(finished_prompt=lambda *told, finite: self.reported.append(told))
        metrics = SimpleNamespace(failed=lambda *told: None)
        failures = Failures(self.store, metrics, reports, Ranks(), 0, in_stages=True)
        step = self.step = object.__new__(PrefillStep)
        step._services = SimpleNamespace(
            arena=self.arena, store=self.store, evict=no_cache, failures=failures, reports=reports,
            ranks=Ranks(), streams=nullcontext(), in_stages=True,
            tree=SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table)),
        )  # fmt: skip
        run = program.start(PROMPT)
        for layer in SPANS[stage]:
            run.observe(layer, q[layer], k[layer], v[layer])
        step._concerned, step.parts = [self.request], {}
        scored = Scored(self.request, self.state, self.slots, self.slots, run, run.queries)
        step.scored = [scored]
        step.finish()

    @property
    def part(self):
        return self.step.parts[id(self.request)]

    def entries(self):
        """Held keys [n, D] per layer and KV head."""
        lists = Lists(self.arena, [self.state.private], [PROMPT], self.table)
        found = []
        for layer in range(self.arena.layers):
            indptr, indices = lists.of(0, layer)
            parts = itertools.pairwise(indptr.tolist())
            found.append([self.arena.entries[indices[start:end]] for start, end in parts])
        return found


def prompt():
    """Random q [L, H, N, D], k and v [L, G, N, D]."""
    random = torch.Generator().manual_seed(5)
    return [torch.randn((5, heads, PROMPT, 8), generator=random) for heads in (4, 2, 2)]


def carried_out(name, finite=True, before=lambda stages: None, **given):
    stages = [Stage(i, name, **given) for i in range(len(SPANS))]
    numbers = torch.cat([each.part.stage_numbers() for each in stages])
    assert numbers.shape == (5, numbers_of_layer(stages[0].state, 2))
    assert (numbers >= 0).all()
    before(stages)
    for each in stages:
        each.step.carry_out(each.request, numbers, finite=finite)
    return stages


def whole_model(name, **given):
    """Entries that one process keeps, bool [L, G, N]."""
    q, k, v = prompt()
    run = TorchProgram(bind(program_of(name), SHAPE, given)).start(PROMPT)
    for layer in range(SHAPE.layers):
        run.observe(layer, q[layer], k[layer], v[layer])
    return torch.stack(run.finish().kept)


CASES = [
    ("cake", {"capacity": "12", "window": "3"}, Comparing),
    ("two-numbers", {}, Comparing),
    ("h2o", {"heavy": "5", "window": "6"}, Chosen),
    ("snapkv", {"capacity": "11", "window": "4"}, Chosen),
]


@pytest.mark.parametrize(("name", "given", "kind"), CASES)
def test_each_stage_holds_what_one_process_keeps_and_as_many_slots_as_the_others(name, given, kind):
    stages, whole = carried_out(name, **given), whole_model(name, **given)
    keys = prompt()[1]
    assert len({each.state.private.slots.numel() for each in stages}) == 1
    for each, layers in zip(stages, SPANS, strict=True):
        assert type(each.part) is kind
        assert each.state.reported.kept is None  # nobody asked
        ((_, _, entries),) = each.reported
        assert entries == int(whole.sum())
        for layer, heads in zip(layers, each.entries(), strict=True):
            for head, held in enumerate(heads):
                assert torch.equal(held, keys[layer, head][whole[layer, head]])


def test_a_stage_that_fails_to_choose_holds_as_many_slots_as_the_others(caplog):
    def fail(stages):
        def raising(part):
            raise RuntimeError("on purpose")

        kind = type("Failing", (Comparing,), {"choose": raising})
        part = stages[1].part
        failing = kind(part.state, part.finite, part.run, part.numbers, part.kv_heads)
        stages[1].step.parts[id(stages[1].request)] = failing

    stages = carried_out("cake", before=fail, capacity="12", window="3")
    assert [bool(each.state.failure_code) for each in stages] == [False, True, False]
    assert len({each.state.private.slots.numel() for each in stages}) == 1
    assert len({each.store.allocator.free_slots.numel() for each in stages}) == 1
    # All take it up with the next result; the request ends, because its prompt is not whole.
    assert stages[1].state.failure_code % 2 == 0
    assert not stages[1].reported
    other = stages[0]
    failures = other.step._services.failures
    failures._fail_request = lambda *given, whole: None
    failures.take_up_failure(other.request, other.state, stages[1].state.failure_code)
    assert "failed at choosing on another stage, whose log says why. rid=r" in caplog.text


@pytest.mark.parametrize("point", ["Store.fill", "Store.grow_together", "copy_kept", "remember"])
@pytest.mark.parametrize(("name", "given", "kind"), CASES)
def test_a_stage_that_fails_to_copy_holds_as_many_slots_as_the_others(name, given, kind, point):
    """With nothing in them, wherever it failed; the request ends once all stages know."""

    def fail(stages):
        def raising(*given, **more):
            raise RuntimeError("on purpose")

        owner, _, attribute = point.rpartition(".")
        failing = stages[1]
        if owner == "Store":
            original = getattr(failing.store, attribute)
            setattr(failing.store, attribute, once(raising, original))
        elif attribute == "remember":
            object.__setattr__(failing.state, attribute, raising)
        else:
            original = compress.copy_kept
            patches.setattr(compress, attribute, lambda services, *rest: (
                raising() if services is failing.step._services else original(services, *rest)
            ))  # fmt: skip

    with pytest.MonkeyPatch.context() as patches:
        stages = carried_out(name, before=fail, **given)
    assert [bool(each.state.failure_code) for each in stages] == [False, True, False]
    assert len({each.state.private.slots.numel() for each in stages}) == 1
    assert len({each.store.allocator.free_slots.numel() for each in stages}) == 1
    assert {each.state.private.tail_start for each in stages} == {PROMPT}
    assert all(each.state.private.ready for each in stages)  # so all leave the prompt to others
    assert int(stages[1].state.private.counts.sum()) == 0
    assert stages[1].state.failure_code % 2 == 0
    goes_on = stages[0].state.decoding is not None
    assert stages[1].state.goes_on_elsewhere == goes_on
    # Until then, all admit the same requests beside it.
    runtimes = [SimpleNamespace(services=each.step._services) for each in stages]
    pairs = zip(runtimes, stages, strict=True)
    needs = {Runtime.still_needs(runtime, each.request, 300) for runtime, each in pairs}
    assert (len(needs), needs == {300}) == (1, not goes_on)


def test_a_stage_that_fails_to_copy_keeps_a_resumed_request_from_the_cache_like_the_others():
    def fail(stages):
        for each in stages:
            each.state.was_compressed = True
        object.__setattr__(stages[1].state, "remember", lambda *given: 1 / 0)

    stages = carried_out("h2o", before=fail, heavy="5", window="6")
    assert [bool(each.state.failure_code) for each in stages] == [False, True, False]
    assert all(each.request.skip_radix_cache_insert for each in stages)


def once(first, then):
    """A function that calls `first` the first time, and `then` later."""
    calls = iter([first])
    return lambda *given, **more: next(calls, then)(*given, **more)


@pytest.mark.parametrize(("name", "given", "kind"), CASES)
def test_everything_stays_where_tensors_of_one_stage_are_not_finite(name, given, kind):
    for each in carried_out(name, finite=False, **given):
        assert not each.state.failure_code
        assert each.state.private is None
        assert each.store.held == 0


def test_a_stage_that_keeps_more_than_others_expect_fails(monkeypatch):
    def wrong(stages):
        run = stages[0].part.run
        monkeypatch.setattr(run, "entries_kept", lambda: [13] * 5)

    first, *others = carried_out("cake", before=wrong, capacity="12", window="3")
    assert first.state.failure_code
    assert not any(each.state.failure_code for each in others)
