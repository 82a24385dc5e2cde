"""Policies keep the same whether torch or the kernel selects, with many equal scores."""

from functools import partial

import numpy as np
import pytest
import torch
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.execute import apply as torch_apply
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.kernels.table import REFERENCE
from kvpolicy.kernels.table_triton import TRITON
from shipped_policies import shipped_program

pytestmark = pytest.mark.interpreted

SHAPE = (3, 4, 2, 4)
SMALL = {"capacity": "9", "window": "3", "kernel": "3", "heavy": "4", "tsp_layer": "1"}
# Per head with one number; flat over heads, and over layers as well; numbers that differ by head;
# one mask for all heads; while decoding; tokens of a propagation.
NAMES = ["snapkv", "adakv", "dynamickv", "lava", "tova", "h2o", "fastkv"]


def recorded(tokens, steps, ties):
    layers, heads, kv, size = SHAPE
    rng = np.random.default_rng(tokens)

    def made(*dims):
        x = rng.integers(-1, 2, dims) if ties else rng.normal(size=dims)
        return x.astype(np.float32)

    prompt = [made(layers, count, tokens, size) for count in (heads, kv, kv)]
    return prompt, tuple(made(steps, layers, count, size) for count in (heads, kv, kv))


@pytest.mark.slow
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_keeps_the_same(name, ties, monkeypatch):
    program = shipped_program(name)
    given = {key: value for key, value in SMALL.items() if key in program.params}
    bound = bind(program, ModelShape(*SHAPE), given)
    prompt, steps = recorded(31, 2, ties)
    expected = torch_apply.apply(bound, *prompt, steps)

    seen = []

    def top(keys, number):
        seen.append(keys)
        return TRITON["top"](keys, number)

    with_kernel = partial(TorchProgram, kernels={**REFERENCE, "top": top})
    monkeypatch.setattr(torch_apply, "TorchProgram", with_kernel)
    got = torch_apply.apply(bound, *prompt, steps)

    assert seen
    for a, b in zip(expected.kept, got.kept, strict=True):
        assert np.array_equal(a, b)
    assert [step.kept for step in expected.steps] == [step.kept for step in got.steps]
    if ties:
        assert any(_has_ties(keys) for keys in seen)


def _has_ties(keys: torch.Tensor) -> bool:
    return any(len(row.unique()) < len(row) for row in keys)
