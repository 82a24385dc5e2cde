"""Prefills whose layers have different tokens, as a server runs them."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.kernels.scoring.select import top
from kvpolicy.kernels.table import REFERENCE
from recordings import both, tensors
from shipped_policies import shipped_program

SHAPE = (4, 4, 2, 8)
HEADER = "policy: a-test\nlanguage: 1\nabout: a test\n"
SMALL = {
    "snapkv": {"capacity": "8", "window": "2"},
    "lava": {"capacity": "8", "window": "2"},
    "asl": {"capacity": "8", "window": "2", "start": "1", "lookback": "2", "tau": "5"},
}
VOTES = "sum[head, query](attn(recent(2)))"


def program(text: str) -> TorchProgram:
    bound = bind(load(Source("a-test.yaml", HEADER + text)).require(), ModelShape(*SHAPE))
    return TorchProgram(bound)


def shipped(name: str, **given: str) -> TorchProgram:
    return TorchProgram(bind(shipped_program(name), ModelShape(*SHAPE), given))


def recorded(tokens: int, seed: int = 0):
    return [torch.tensor(x) for x in tensors(np.random.default_rng(seed), SHAPE, tokens, 0)[:3]]


def drive(run, q, k, v) -> list[torch.Tensor]:
    """Observes the layers one after the other; returns the tokens of each."""
    there, seen = torch.arange(k.shape[2]), []
    for layer in range(SHAPE[0]):
        seen.append(there)
        few = q[layer][:, there][:, -max(1, run.queries) :]
        deeper = run.observe(layer, few, k[layer][:, there], v[layer][:, there], there)
        if deeper is not None:
            assert deeper.dtype == torch.int64
            assert (deeper.diff() > 0).all()
            there = there[deeper]
        if run.restarted:
            return [*seen, there]
    return seen


def test_tokens_that_did_not_arrive_are_not_kept():
    program_ = program(
        f"propagate: {{first: layer == 1, tokens: 'recent(2) then top({VOTES}, 5)'}}\nkeep: all\n"
    )
    run = program_.start(13)
    seen = drive(run, *recorded(13))
    assert [len(x) for x in seen] == [13, 13, 7, 7]
    for there, kept in zip(seen, run.finish().kept, strict=True):
        assert kept.shape == (2, 13)
        assert kept[0].nonzero()[:, 0].tolist() == kept[1].nonzero()[:, 0].tolist()
        assert kept[0].nonzero()[:, 0].tolist() == there.tolist()


def test_pyramid_of_tokens():
    program_ = program(
        "propagate: {every: layer < 3, tokens: recent(length - 2)}\nkeep: recent(4)\n"
    )
    run = program_.start(9)
    seen = drive(run, *recorded(9))
    assert [len(x) for x in seen] == [9, 7, 5, 3]
    assert [int(x.sum()) for x in run.finish().kept] == [8, 8, 8, 6]
    assert sorted(run.propagated) == [0, 1, 2]


@pytest.mark.parametrize("tokens", ["top(position, 0)", "recent(length)"])
def test_none_and_all_are_all(tokens):
    program_ = program(f"propagate: {{first: layer == 0, tokens: '{tokens}'}}\nkeep: recent(3)\n")
    run = program_.start(6)
    assert [len(x) for x in drive(run, *recorded(6))] == [6] * 4
    assert run.selected_layer == 0
    assert [int(x.sum()) for x in run.finish().kept] == [6] * 4


def test_an_empty_prompt_does_not_begin_again():
    text = "propagate: {first: layer == 1, tokens: all, restart: true}\n"
    text += "score: norm1[dim](key)\nbudget: 4\nkeep: top(score)\n"
    expected, actual = both(program(text).bound, *tensors(np.random.default_rng(0), SHAPE, 0, 0))
    assert [x.shape for x in actual.kept] == [x.shape for x in expected.kept] == [(2, 0)] * 4


def test_restart_is_a_prefill_of_the_chosen_tokens():
    program_ = program(
        f"propagate: {{first: layer == 1, tokens: 'top({VOTES}, 5)', restart: true}}\n"
        f"score: {VOTES}\nbudget: 3\nkeep: top(score)\n"
    )
    q, k, v = recorded(11)
    run = program_.start(11)
    *seen, chosen = drive(run, q, k, v)
    assert run.restarted
    assert [len(x) for x in seen] == [11, 11]
    assert len(chosen) == 5
    again = run.again(5)
    assert not again.restarted
    again_seen = drive(again, *(x[:, :, chosen] for x in (q, k, v)))
    assert [len(x) for x in again_seen] == [5] * 4
    assert [x.sum(1).tolist() for x in again.finish().kept] == [[3, 3]] * 4


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_nan_stops_propagation(layer):
    program_ = shipped("fastkv", tsp_layer="1", window="2", kernel="1")
    q, k, v = recorded(20)
    k[layer, 1, 19, 3] = float("nan")
    run = program_.start(20)
    seen = drive(run, q, k, v)
    kept = run.finish().kept
    assert run.not_finite
    expected = [20] * 4 if layer <= 1 else [20, 20, len(seen[2]), len(seen[3])]
    assert [x.sum(1).tolist() for x in kept] == [[n, n] for n in expected]


def test_layers_that_look_back_read_tokens_that_are_still_there():
    """`at(0, x)` after layer 1 has dropped tokens: x of layer 0 at the remaining tokens."""
    program_ = program(
        "propagate: {every: 0 < layer, tokens: recent(length - 3)}\n"
        "score: at(0, position * (layer + 1)) + 0 * position where true\nbudget: 2\n"
        "keep: top(score where position < 8)\n".replace(" where true", "")
    )
    run = program_.start(10)
    seen = drive(run, *recorded(10))
    assert [x.tolist()[0] for x in seen] == [0, 0, 3, 6]
    kept = [x[0].nonzero()[:, 0].tolist() for x in run.finish().kept]
    assert kept == [[6, 7], [6, 7], [6, 7], [6, 7]]


def test_layers_that_look_back_far_and_near():
    """The propagation reads two layers of what the score reads four of, where it is tested last."""
    program_ = program(
        f"let: {{seen: '{VOTES}'}}\n"
        "propagate:\n  every: layer < 2\n"
        "  tokens: recent(2) then top(sum[past](past(seen, 2)), length - 3)\n"
        "score: sum[past](past(seen, 4))\nbudget: 3\nkeep: top(score)\n"
    )
    both(program_.bound, *tensors(np.random.default_rng(1), SHAPE, 14, 0)[:3])


@pytest.mark.parametrize("name", ["snapkv", "lava", "d2o", "asl"])
def test_what_a_prefill_computed_goes_with_it(name):
    """At once, as on a GPU this is too much memory to leave to the garbage collector."""
    bound = bind(shipped_program(name), ModelShape(*SHAPE), SMALL.get(name, {}))
    run = TorchProgram(bound, report=True).start(21)
    drive(run, *recorded(21))
    finished = run.finish()
    score = weakref.ref(finished.result(bound.lowered.prefill.score)[0].tensor)
    held = [weakref.ref(x) for x in run._evaluations.values()]
    gc.disable()
    try:
        del run, finished
        assert score() is None
        assert not any(x() for x in held)
    finally:
        gc.enable()


SMALLEST = {"capacity": "8", "window": "2"}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("snapkv", SMALLEST),
        ("adakv", SMALLEST),
        ("pyramidkv", SMALLEST),
        ("h2o", {"heavy": "5", "window": "3"}),
        ("tova", {"capacity": "8"}),
    ],
)
def test_layers_choose_together_after_the_last_one(name, values):
    """At once, or layer by layer if their scores would take too much memory."""
    bound = bind(shipped_program(name), ModelShape(*SHAPE), values)
    rows = []

    def chosen(keys, number):
        rows.append(len(keys))
        return top(keys, number)

    tensors_, kept, choices = recorded(29), [], []
    for most in (1 << 20, 0):
        kernels = {**REFERENCE, "top": chosen}
        run = TorchProgram(bound, kernels=kernels, deferred_bytes=most).start(29)
        drive(run, *tensors_)
        assert bool(rows) == (most == 0)
        kept.append(run.finish().kept)
        choices.append(len(rows))
        rows.clear()
    assert choices[1] == SHAPE[0] * choices[0]
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def test_a_layer_that_is_left_out_is_noticed_while_others_wait():
    run, (q, k, v) = shipped("snapkv", **SMALL["snapkv"]).start(29), recorded(29)
    run.together = 3
    assert run.show(0, q[0], None) is None  # its keys are not asked for yet
    with pytest.raises(RuntimeError, match="layer 1 comes before 2"):
        run.show(2, q[2], lambda layers: (k[layers.start], v[layers.start]))


def test_slots_count_tokens_that_did_not_arrive():
    program_ = program(
        "propagate: {first: layer == 1, tokens: 'sinks(2) or recent(3)'}\n"
        "positions: slots\nkeep: sinks(1) then recent(2)\n"
    )
    run = program_.start(9)
    drive(run, *recorded(9))
    finished = run.finish()
    assert finished.kept[3][0].nonzero()[:, 0].tolist() == [0, 7, 8]
    assert finished.shift(0)[0].tolist() == finished.shift(3)[0].tolist() == [6] + [0] * 8


def test_concurrent_prefills_with_propagation():
    """Two prefills in turn keep what each keeps alone."""
    program_ = shipped("asl", capacity="8", window="2", start="1", lookback="2", tau="5")
    alone = []
    for seed, tokens in ((0, 21), (1, 16)):
        run = program_.start(tokens)
        drive(run, *recorded(tokens, seed))
        alone.append((run.selected_layer, torch.stack(run.finish().kept)))
    runs = [program_.start(tokens) for tokens in (21, 16)]
    inputs = [recorded(21, 0), recorded(16, 1)]
    there = [torch.arange(21), torch.arange(16)]
    for layer in range(SHAPE[0]):
        for i, run in enumerate(runs):
            q, k, v = (x[layer][:, there[i]] for x in inputs[i])
            deeper = run.observe(layer, q[:, -run.queries :], k, v, there[i])
            there[i] = there[i] if deeper is None else there[i][deeper]
    for run, (selected, kept) in zip(runs, alone, strict=True):
        assert run.selected_layer == selected is not None
        assert torch.equal(torch.stack(run.finish().kept), kept)


def test_layers_that_share():
    program_ = shipped("minicache", start="0", gamma="0.2")
    _, k, v = recorded(9)
    finished = program_.start(9).finish()
    layers = list(zip(k, v, strict=True))
    assert not finished.shared(0, layers[0], layers[0])
    assert not finished.shared(2, layers[1], layers[2])
    made = finished.shared(3, layers[2], layers[3])
    for direction, apart in (made["key"], made["value"]):
        assert direction.dtype == torch.float64
        assert torch.allclose(direction.norm(dim=-1), torch.ones(2, 9, dtype=torch.float64))
        assert apart.shape == (2, 9)
        assert 0 < apart.sum() < 18
    assert not torch.equal(made["key"].direction, made["value"].direction)


def test_layers_with_nan_share_nothing():
    program_ = shipped("minicache", start="0")
    _, k, v = recorded(9)
    k[2, 1, 4, 3] = float("nan")
    made = program_.start(9).finish().shared(3, (k[2], v[2]), (k[3], v[3]))
    assert made["key"].excepted.all()
    assert made["key"].direction.isfinite().all()
    assert not made["value"].excepted.all()
