"""With the merging kernels programs keep and merge what they do without them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from kvpolicy.dsl import torch_apply
from kvpolicy.dsl.bind import Bound, bind
from kvpolicy.dsl.check import load
from kvpolicy.dsl.ir import ModelShape
from kvpolicy.dsl.source import Source
from kvpolicy.dsl.torch_evaluate import Evaluation, Updates
from kvpolicy.dsl.torch_merge import Merging
from kvpolicy.dsl.torch_program import TorchProgram
from kvpolicy.dsl.torch_values import Frame
from kvpolicy.kernels.table import TRITON
from recordings import assert_same, tensors

NAMES = ("nearest", "merge_rows", "merge_mass")
SETTINGS = {
    "d2o": {"rate": "0.4", "start": "2"},
    "d2o-code": {"rate": "0.4", "start": "1"},
    "cam": {"window": "8", "start": "2", "reach": "3"},
    "asl-lava-d2o": {"capacity": "9", "window": "3", "start": "1", "lookback": "2", "tau": "2"},
}


def counted(calls: dict[str, int]):
    """The merging kernels, which count how often they are called."""

    def counting(name):
        def call(*args):
            calls[name] = calls.get(name, 0) + 1
            return TRITON[name](*args)

        return call

    return {name: counting(name) for name in NAMES}


@pytest.mark.parametrize("name", SETTINGS)
def test_programs_do_the_same(name, monkeypatch):
    """From the prompt to the last decode step; ties and lengths that tell heads apart."""
    shape = (4, 4, 2, 8) if name == "d2o-code" else (3, 4, 2, 8)
    bound = bind(load(name).require(), ModelShape(*shape), SETTINGS[name])
    calls: dict[str, int] = {}
    table = counted(calls)
    for steps, ties in ((2, False), (1, True)):
        prompt = tensors(np.random.default_rng(steps), shape, 21, steps, ties)
        expected = torch_apply.apply(bound, *prompt)
        with monkeypatch.context() as patched:
            patched.setattr(torch_apply, "TorchProgram", partial(TorchProgram, kernels=table))
            assert_same(expected, torch_apply.apply(bound, *prompt))
    wanted = set(NAMES)
    wanted -= {"nearest", "merge_mass"} if name == "cam" else set()
    wanted -= {"merge_mass"} if name == "d2o-code" else set()
    assert set(calls) == wanted


POLICY = """
policy: other
language: 1
about: What is compared is not the key.
source: none
score: sum[dim](value)
budget: 9
keep: top(score)
merge:
  into: {into}
  weight: 0.5
  own: 2
"""


def layer_of(into: str, dtype: torch.dtype) -> tuple[Bound, Frame, torch.Tensor]:
    policy = load(Source("other.yaml", POLICY.format(into=into)))
    bound = bind(policy.require(), ModelShape(1, 2, 2, 8), {})
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 2, 30, 8, generator=generator).to(dtype)
    frame = Frame(bound, 30, k.device, 2, prompt=30, layer=0, k=k, v=v)
    return bound, frame, torch.rand(2, 30, generator=generator) < 0.3


@pytest.mark.parametrize(
    ("into", "dtype"),
    [
        ("nearest(value)", torch.bfloat16),
        ("nearest(key * value)", torch.float32),
        ("next(2)", torch.bfloat16),
        ("next(99)", torch.float32),
    ],
)
def test_receivers_are_the_same(into, dtype):
    """Whatever is compared, and with more room for dropped entries than there are."""
    bound, frame, kept = layer_of(into, dtype)
    results = []
    for kernels, most in (({}, None), (TRITON, None), (TRITON, 30)):
        frame.kernels = kernels
        merging = Merging.of(bound.lowered.merge, Evaluation(frame), kept, Updates({}), {}, most)
        results.append((merging.rows(frame.k), merging.rows(frame.v)))
    dense = frame.k.double()
    assert (results[0][0] != dense).any(-1).sum() > 3
    for each in results[1:]:
        for made, expected in zip(each, results[0], strict=True):
            # Sums of at most 30 products of numbers below 5, in two orders.
            assert (made - expected).abs().max() < 2 * 30 * 2.0**-53 * 30 * 5
