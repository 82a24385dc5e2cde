"""Several decode steps taken at once give what the steps give one by one."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from kvpolicy.dsl.bind import Bound, bind
from kvpolicy.dsl.check import load
from kvpolicy.dsl.diagnostics import PolicyError
from kvpolicy.dsl.ir import ModelShape
from kvpolicy.dsl.library import shipped
from kvpolicy.dsl.source import Source
from random_policies import policy
from recordings import tensors
from stores import Store

SHAPES = [(3, 4, 2, 8), (2, 2, 2, 4), (2, 4, 1, 6), (3, 8, 2, 4), (2, 8, 4, 4)]
SETTINGS = {
    "capacity": "9", "window": "4", "start": "1", "reach": "4", "heavy": "5", "rate": "0.4",
    "recent_share": "0.3", "newest": "2", "kernel": "3", "threshold": "0.45",
}  # fmt: skip
STRETCHES = ((1, 2, 1, 5), (16, 1, 17), (3, 2, 2, 4, 1))


def bound_to(name: str, shape, **more: str) -> Bound | None:
    """A shipped policy; None if nothing leaves while it decodes."""
    program = load(name).require()
    given = {key: x for key, x in {**SETTINGS, **more}.items() if key in program.params}
    bound = bind(program, ModelShape(*shape), given)
    return None if bound.decode is None else bound


DECODING = [name for name in shipped() if bound_to(name, SHAPES[0]) is not None]


def stores(bound: Bound, shape, tokens: int, seed: int, steps: int = 40) -> tuple[Store, Store]:
    """Two of the same request."""
    *prompt, later = tensors(np.random.default_rng(seed), shape, tokens, steps)
    return Store(bound, prompt, later), Store(bound, prompt, later)


def assert_same(one: Store, other: Store) -> None:
    """Layouts, rows, states, queries."""
    a, b = one.memory, other.memory
    assert (a.generated, a.not_finite) == (b.generated, b.not_finite)
    for layer in range(len(one.rows)):
        x, y = a.layout(layer), b.layout(layer)
        assert x.positions.tolist() == y.positions.tolist(), layer
        assert (x.there is None) == (y.there is None)
        assert x.there is None or torch.equal(x.there, y.there), layer
        for k, m in zip(one.rows[layer], other.rows[layer], strict=True):
            held = torch.ones(k.shape[:2], dtype=torch.bool) if x.there is None else x.there
            torch.testing.assert_close(k[held], m[held], rtol=3e-7, atol=1e-7)
        own, also = a._layers[layer], b._layers[layer]
        assert own.states.keys() == also.states.keys()
        for before, after in ((own.states, also.states), (own.merge_states, also.merge_states)):
            assert before.keys() == after.keys()
            for name in before:
                assert before[name].axes == after[name].axes
                values = [torch.as_tensor(z[name].data).double() for z in (before, after)]
                if x.there is not None and {"kv", "token"} <= set(before[name].axes):
                    axes = before[name].axes
                    held = x.there[
                        tuple(slice(None) if i in ("kv", "token") else None for i in axes)
                    ]
                    values = [torch.where(held, z, 0.0) for z in values]
                torch.testing.assert_close(*values, rtol=1e-9, atol=1e-12)
        assert (own.queries is None) == (also.queries is None)
        if own.queries is not None:
            assert torch.equal(own.queries, also.queries)
            assert own.query_positions.tolist() == also.query_positions.tolist()


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
                assert_same(one, other)


@pytest.mark.parametrize("part", range(4))
def test_random_policies(part):
    random, compared = Random(100 + part), 0
    for seed in range(12):
        shape = SHAPES[seed % len(SHAPES)]
        try:
            program = load(Source("random.yaml", policy(random))).require()
            bound = bind(program, ModelShape(*shape))
        except PolicyError:
            continue
        if bound.decode is None or bound.propagates:
            continue
        one, other = stores(bound, shape, 11, seed, steps=20)
        for number in (1, 4, 2, 5):
            one.step_by_step(number)
            other.follow(number)
            assert_same(one, other)
        compared += 1
    assert compared >= 4
