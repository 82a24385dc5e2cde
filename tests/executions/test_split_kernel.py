"""The kernel "split" in the torch program: its arguments, and the same entries kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.kernels.table import REFERENCE
from kvpolicy.kernels.table_triton import TRITON
from recordings import tensors

pytestmark = pytest.mark.interpreted

SHAPE = (4, 4, 2, 8)
HEADER = "policy: a-test\nlanguage: 1\nabout: a test\n"
SCORE = "score: sum[query, group](attn(recent(2)))\nkeep: recent(2) then top(score)\n"
SPREAD = "entropy[kv, token](score)"


def kept(source, settings, kernels):
    bound = bind(load(source).require(), ModelShape(*SHAPE), settings)
    run = TorchProgram(bound, kernels=kernels).start(60)
    q, k, v = (torch.tensor(x) for x in tensors(np.random.default_rng(3), SHAPE, 60, 0)[:3])
    for i in range(SHAPE[0]):
        run.observe(i, q[i][:, -max(1, run.queries) :], k[i], v[i])
    return torch.stack(run.finish().kept)


@pytest.mark.parametrize(
    ("source", "settings", "calls"),
    [
        ("dynamickv", {"capacity": "20"}, [(48, 52, False)]),
        ("cake", {"capacity": "20", "window": "4"}, [(64, 56, False)]),
        ("cake", {"capacity": "20", "window": "4", "cascading": "true"}, [(64, 56, True)]),
        ("d2o", {"rate": "0.5"}, [(120, 60, False)]),
        (f"budget: 'split[layer](80, {SPREAD})'\n{SCORE}", {}, [(80, None, False)]),
        (
            f"budget: 'split[layer](80, {SPREAD}, max = 10 where layer < 2 else 14)'\n{SCORE}",
            {},
            [(80, [10, 10, 14, 14], False)],
        ),
        (
            f"budget: 'split[layer](300000000, {SPREAD}, max = 9)'\n{SCORE}",
            {},
            [(300000000, 9, False)],
        ),
        # What is known without data is the host's.
        (f"budget: 'split[layer](80, 2 * layer + 1)'\n{SCORE}", {}, []),
    ],
)
def test_the_same_is_kept(source, settings, calls):
    seen = []

    def noting(total, weights, maxima, *, cascade=False):
        limit = maxima.tolist() if isinstance(maxima, torch.Tensor) else maxima
        seen.append((total, limit, cascade))
        return TRITON["split"](total, weights, maxima, cascade=cascade)

    text = Source("a-test.yaml", HEADER + source) if "\n" in source else source
    with_kernel = kept(text, settings, {**REFERENCE, "split": noting})
    assert torch.equal(with_kernel, kept(text, settings, REFERENCE))
    assert not with_kernel.all()
    assert seen == calls
