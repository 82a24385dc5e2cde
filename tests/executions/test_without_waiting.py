"""`Run.finish` without waiting for the device: the same result, with NaN reported later."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from host_waits import HostWaits
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.execute.decode.memory import Held, Known, Memory
from kvpolicy.dsl.execute.operations.select import top
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.tensors.values import Frame, Value
from kvpolicy.dsl.ir.nodes import ModelShape, Node
from kvpolicy.dsl.syntax.library import shipped
from recordings import tensors
from remembered import remembered
from shipped_policies import shipped_program

SHAPE = (4, 4, 2, 8)
POLICIES = {
    "snapkv": {"capacity": "16", "window": "4"},
    "pyramidkv": {"capacity": "24", "exact_total": "true"},
    "lava": {"capacity": "24", "window": "8"},
    "dynamickv": {"capacity": "24"},
    "cake": {"capacity": "24", "window": "8", "cascading": "true"},
    "simlayerkv-prefill": {"window": "8", "queries": "4", "threshold": "0.5"},
    "h2o": {},
    "d2o": {},
    "d2o-code": {},
}


def finished(name: str, layer: int | None, value: float, *, wait: bool):
    """A finished prefill of 50 tokens; one number of a layer's keys and values is `value`."""
    bound = bind(shipped_program(name), ModelShape(*SHAPE), POLICIES[name])
    run = TorchProgram(bound).start(50)
    q, k, v = (torch.tensor(x) for x in tensors(np.random.default_rng(7), SHAPE, 50, 0)[:3])
    if layer is not None:
        k[layer][0, 20, 3] = v[layer][1, 20, 3] = value
    for i in range(SHAPE[0]):
        run.observe(i, q[i][:, -max(1, run.queries) :], k[i], v[i])
    return run.finish(wait=wait)


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_is_kept(name):
    expected = finished(name, None, 0.0, wait=True).kept
    prefill = finished(name, None, 0.0, wait=False)
    kept = prefill.kept
    assert prefill.finite is None or prefill.finite.item()
    assert [x.tolist() for x in kept] == [x.tolist() for x in expected]
    assert name in ("h2o", "d2o", "d2o-code") or not torch.stack(kept).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", POLICIES)
def test_everything_is_kept_where_numbers_are_not_finite(name, value):
    prefill = finished(name, 2, value, wait=False)
    assert not prefill.finite.item()
    assert torch.stack(prefill.kept).all()
    assert not prefill.not_finite
    prefill.settle(finite=False)
    assert prefill.not_finite


def test_a_number_that_is_nan_chooses_nothing():
    bound = bind(shipped_program("lava"), ModelShape(*SHAPE), POLICIES["lava"])
    frame = Frame(bound, 6, torch.device("cpu"), 2, 6)
    scores = Value(torch.arange(12, dtype=torch.float64).view(2, 6), ("kv", "token"))
    node = Node(
        "top",
        axes=("token",),
        type=bound.lowered.prefill.keep.type,
        when=bound.lowered.prefill.keep.when,
    )
    for number, kept in ((float("nan"), 0), (2.0, 4), (float("inf"), 12)):
        chosen = top(node, frame, scores, Value(torch.tensor(number, dtype=torch.float64)))
        assert chosen.data.sum() == kept


@pytest.mark.parametrize("name", ["cake", "h2o", "d2o-code"])
def test_a_memory_needs_no_wait_where_it_is_told_what_is_held(name):
    prefill = finished(name, None, 0.0, wait=False)
    prefill.settle(finite=True)
    kept = prefill.kept
    numbers = Held.of(torch.stack(kept), prefill.columns())
    told = [Held(number, bool(alike)) for number, alike in numbers.tolist()]
    assert [each.alike for each in told] == [bool((x == x[0]).all()) for x in kept]
    known = Known(told, max(each.positions for each in told))
    memory, expected = Memory.after(prefill, known), Memory.after(prefill)
    for layer in range(SHAPE[0]):
        own, other = remembered(memory, layer), remembered(expected, layer)
        assert own[0].tolist() == other[0].tolist()
        assert own[0].tolist() == kept[layer].any(0).nonzero()[:, 0].tolist()
        assert torch.equal(own[1], other[1])
        assert bool(own[1].all()) == told[layer].alike
    assert memory.block[0].alike == expected.block[0].alike == [each.alike for each in told]


@pytest.mark.parametrize("name", shipped())
def test_layers_are_scored_without_waiting(name):
    """The host waits only for a number of tokens that go deeper, if data decide it."""
    shape = ModelShape(4, 4, 2, 32)
    run = TorchProgram(bind(shipped_program(name), shape)).start(70)
    q, k, v = (torch.tensor(x) for x in tensors(np.random.default_rng(7), (4, 4, 2, 32), 70, 0)[:3])
    with HostWaits() as waits:
        for i in range(shape.layers):
            tokens = run.size
            first = max(0, tokens - max(1, run.queries))
            run.observe(i, q[i][:, first:tokens], k[i][:, :tokens], v[i][:, :tokens])
    propagates = name in ("fastkv", "fastkv-adakv")
    assert waits.found == ["run.py:_number_chosen tolist"] * propagates
