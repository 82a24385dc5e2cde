"""Several decode steps taken at once give the same as one by one."""

from __future__ import annotations

from copy import copy
from random import Random

import numpy as np
import pytest
import torch
from grammar import accepted
from host_waits import HostWaits
from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.planned.steps import Steps
from kvpolicy.dsl.execute.tensors.heads import Heads
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.kernels.table import REFERENCE
from kvpolicy.kernels.table_triton import TRITON
from recordings import tensors
from remembered import remembered
from shipped_policies import shipped_program
from stores import Store, assert_alike, begun, finished

pytestmark = pytest.mark.interpreted

SHAPES = [(3, 4, 2, 8), (2, 2, 2, 4), (2, 4, 1, 6), (3, 8, 2, 4), (2, 8, 4, 4)]
SETTINGS = {
    "capacity": "9", "window": "4", "start": "1", "reach": "4", "heavy": "5", "rate": "0.4",
    "recent_share": "0.3", "newest": "2", "kernel": "3", "threshold": "0.45", "batch": "2",
}  # fmt: skip
STRETCHES = ((1, 2, 1, 5), (16, 1, 17), (3, 2, 2, 4, 1))


def bound_to(name: str, shape, every: int = 1, **more: str) -> Bound | None:
    """A shipped policy, bound; None without `decode:`."""
    program = shipped_program(name)
    given = {key: x for key, x in {**SETTINGS, **more}.items() if key in program.params}
    bound = bind(program, ModelShape(*shape), given, fold_interval=every)
    return None if bound.folded.decode is None else bound


DECODING = [name for name in shipped() if bound_to(name, SHAPES[0]) is not None]


def stores(bound: Bound, shape, tokens: int, seed: int, **more) -> tuple[Store, Store]:
    """Two stores of the same request."""
    *prompt, later = tensors(np.random.default_rng(seed), shape, tokens, 40)
    return Store(bound, prompt, later, **more), Store(bound, prompt, later, **more)


@pytest.mark.thorough(besides=["h2o", "cake", "roco"])
@pytest.mark.parametrize("name", DECODING)
def test_shipped_policies(name):
    for seed, stretches in enumerate(STRETCHES):
        shape = SHAPES[(seed + len(name)) % len(SHAPES)]
        for tokens in (14, 1) if seed else (14,):
            one, other = stores(bound_to(name, shape), shape, tokens, seed)
            for i, number in enumerate(stretches):
                leaves = (i + seed) % 4 != 3
                one.step_by_step(number, leaves=leaves)
                other.follow(number, leaves=leaves)
                assert_alike(one, other)


@pytest.mark.parametrize("name", ["h2o", "roco", "cam"])
def test_all_layers_at_once(name, monkeypatch):
    """As one layer with more KV heads, where layers hold different numbers of entries."""
    monkeypatch.setattr(Steps, "by_kernels", True)
    for seed, stretches in enumerate(STRETCHES):
        shape = SHAPES[(seed + len(name)) % len(SHAPES)]
        bound = bound_to(name, shape, **({"rate": "0"} if name == "h2o" else {}))
        one, other = stores(bound, shape, (14, 5, 9)[seed], seed)
        assert other.memory.steps.rule(other.memory.prompt) is not None
        monkeypatch.setattr(one.memory.steps, "rule", lambda prompt: None)
        for i, number in enumerate(stretches):
            leaves = (i + seed) % 4 != 3
            one.step_by_step(number, leaves=leaves)
            other.follow(number, leaves=leaves)
            assert_alike(one, other)


def test_layers_of_different_lengths_at_once(monkeypatch):
    """Budgets that a prefill split over the layers, and lists that differ by head in each layer."""
    monkeypatch.setattr(Steps, "by_kernels", True)
    text = (
        "policy: a-test\nlanguage: 1\nabout: a test\n"
        "state: {heat: 'heat + sum[group, query](attn(new))'}\n"
        "score: heat\nbudget: 3 + split[layer](12, sum[kv, token](heat), max = 9)\n"
        "keep: recent(2) then top(score)\ndecode:\n  score: |\n"
        "    maxpool(heat, 3) where position % 3 < 2 or cached > 6 else heat / sum[token](heat)\n"
    )
    shape = (4, 4, 2, 8)
    bound = bind(load(Source("a-test.yaml", text)).require(), ModelShape(*shape))
    one, other = stores(bound, shape, 21, 2)
    assert other.memory.steps.rule(21) is not None
    monkeypatch.setattr(one.memory.steps, "rule", lambda prompt: None)
    for number in (1, 3, 5, 16, 2):
        one.step_by_step(number)
        other.follow(number)
        assert_alike(one, other)
        assert len({len(remembered(other.memory, layer)[0]) for layer in range(4)}) > 1


@pytest.mark.parametrize(
    "score",
    ["heat / sum[kv, token](heat)", "heat * layer", "heat * uniform(1)", "heat + norm1[dim](key)",
     "heat + index[token](heat)", "heat + sum[group, query](attn(new))"],
)  # fmt: skip
def test_scores_that_depend_on_the_layer_or_on_tensors(score):
    text = (
        "policy: a-test\nlanguage: 1\nabout: a test\n"
        "state: {heat: 'heat + sum[group, query](attn(new))'}\nscore: heat\nbudget: 8\n"
        f"keep: recent(2) then top(score)\ndecode:\n  score: |\n    {score}\n"
    )
    shape = SHAPES[0]
    bound = bind(load(Source("a-test.yaml", text)).require(), ModelShape(*shape))
    one, other = stores(bound, shape, 14, 5)
    for number in (3, 1, 16):
        one.step_by_step(number)
        other.follow(number)
        assert_alike(one, other)


@pytest.mark.thorough(every=3)
@pytest.mark.parametrize("part", range(4))
def test_random_policies(part):
    random = Random(100 + part)
    for seed in range(10):
        shape = SHAPES[seed % len(SHAPES)]
        bound = accepted(random, shape)
        if bound.folded.decode is None or bound.propagates:
            continue
        one, other = stores(bound, shape, 11, seed)
        for number in (1, 4, 2, 5):
            one.step_by_step(number)
            other.follow(number)
            assert_alike(one, other)


@pytest.mark.thorough(besides=["h2o", "cake", "roco"])
@pytest.mark.slow
@pytest.mark.parametrize("name", DECODING)
def test_nothing_waits_before_the_numbers_land(name):
    """If entries merge layer by layer, the numbers of all layers are needed at once."""
    names = (
        "carry", "tally", "best", "draws", "finite", "nearest", "inner_products",
        "means", "following", "links", "target", "merge_rows", "merge_entries", "merge_mass",
        "then", "whole",
    )  # fmt: skip
    shape = SHAPES[0]
    kernels = {**REFERENCE, **{each: TRITON[each] for each in names}}
    _, store = stores(bound_to(name, shape), shape, 14, 0, kernels=kernels)
    memory = store.memory
    at_once = memory.bound.folded.decode.merge is not None and memory.steps.rule(14) is None
    waited = ["arriving.py:read numpy"]
    for number in (1, 4, 16):
        memory.read_numbers()
        memory.block[0].after_leaving()  # as far as that was read
        with HostWaits() as waits:
            staying = begun([store], number)
        found = [each for each in waits.found if not each.startswith("stores.py")]
        assert found == (waited if at_once and staying else [])
        if staying is None:
            assert memory.read_numbers() is None
            continue
        with HostWaits() as waits:
            numbers = memory.read_numbers()
            assert memory.read_numbers() is numbers
        assert waits.found == ([] if at_once else waited)
        ((*choices,),) = finished(staying, [store])
        for layer, choice in enumerate(choices):
            assert numbers.counts_after[layer].tolist() == choice.kept.sum(-1).tolist()


def test_numbers_of_a_fold():
    shape = SHAPES[0]
    _, store = stores(bound_to("h2o", shape, rate="0"), shape, 14, 0)
    assert store.memory.numbers_arrived()
    assert store.memory.read_numbers() is None
    for number in (2, 3):
        before = [remembered(store.memory, layer) for layer in range(shape[0])]
        choices = store.follow(number)
        numbers = store.memory.read_numbers()
        assert numbers.finite
        for layer, ((positions, own), choice) in enumerate(zip(before, choices, strict=True)):
            assert numbers.counts_before[layer].tolist() == (own.sum(-1) + number).tolist()
            assert numbers.counts_after[layer].tolist() == choice.kept.sum(-1).tolist() == [9, 9]
            assert (choice.held_mask is None) == bool(own.all())
            assert choice.kept.shape[1] == len(positions) + number
    assert not before[0][1].all()
    store.follow(1, leaves=False)
    assert store.memory.read_numbers() is None


def test_entries_are_read_once():
    shape = SHAPES[0]
    for name, leaves, reads in (
        ("h2o", True, 1), ("h2o", False, 1), ("tova", True, 1), ("tova", False, 0),
        ("streamingllm", True, 0),
    ):  # fmt: skip
        _, store = stores(bound_to(name, shape), shape, 14, 0)
        begun([store], 4, leaves=leaves)
        assert store.reads == reads, name


@pytest.mark.parametrize("name", ["h2o", "d2o", "tova"])
def test_numbers_that_are_not_finite(name):
    """In any step, layer and tensor: no entries leave at any layer, then or later."""
    shape = SHAPES[0]
    for place, step, layer in (("q", 1, 2), ("k", 0, 1), ("q", 3, 0), ("k", 3, 2)):
        _, store = stores(bound_to(name, shape), shape, 14, 0)
        store.follow(2)
        before = [remembered(store.memory, i)[0].tolist() for i in range(shape[0])]
        getattr(store.steps, place)[2 + step, layer, -1, 1] = float("nan")
        begun([store], 4)
        if name == "tova" and place == "q" and step < 3:  # the last query alone decides
            assert store.memory.read_numbers().finite
            continue
        numbers = store.memory.read_numbers()
        assert not numbers.finite
        assert torch.equal(numbers.counts_after, numbers.counts_before)
        assert store.memory.not_finite
        store.follow(3)
        for i, own in enumerate(before):
            assert remembered(store.memory, i)[0].tolist() == [*own, *range(16, 23)]


@pytest.mark.parametrize("name", ["h2o", "d2o", "roco"])
def test_copies_go_on_alone(name):
    shape = SHAPES[0]
    one, other = stores(bound_to(name, shape), shape, 14, 3)
    staying = begun([other], 5)
    alone = copy(other.memory)
    finished(staying, [other])
    one.step_by_step(5)
    assert_alike(one, other)
    rows = list(other.rows)
    other.follow(4)
    other.memory, other.rows, other.done = alone, rows, 5
    assert_alike(one, other)


def test_only_the_steps_that_say_so_let_entries_leave():
    shape = SHAPES[1]
    bound = bound_to("h2o", shape, every=4)
    one, other = stores(bound, shape, 14, 1)
    for number, leaving in ((4, True), (3, False), (5, True), (6, False), (2, True)):
        one.step_by_step(number)
        assert bool(other.follow(number)) == leaving
        assert_alike(one, other)


def test_ranks_agree_after_all_steps(monkeypatch):
    """Also after steps without a fold, as one rank alone may have failed at them."""
    shape, agreed = SHAPES[0], []
    monkeypatch.setattr(Heads, "agree", lambda self: agreed.append(True))
    for name in ("h2o", "tova"):
        _, store = stores(bound_to(name, shape), shape, 14, 0)
        for number, leaves in ((2, False), (3, True), (1, False)):
            store.follow(number, leaves=leaves)
    assert len(agreed) == 6
