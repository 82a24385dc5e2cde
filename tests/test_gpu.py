"""The torch programs and kernel references give on a GPU what they give on the CPU."""

import pytest
import torch
from kvpolicy.dsl.bind import bind
from kvpolicy.dsl.check import load
from kvpolicy.dsl.ir import ModelShape
from kvpolicy.dsl.library import shipped
from kvpolicy.dsl.torch_program import TorchProgram
from kvpolicy.kernels.compact import compact
from kvpolicy.kernels.paged_attention import paged_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SHAPE = ModelShape(layers=3, heads=8, kv_heads=2, head_dim=64)
SMALL = {"capacity": "40", "window": "8", "start": "2", "queries": "8", "reach": "30"}


@pytest.mark.parametrize("tokens", [1, 8, 9, 63, 1000])
@pytest.mark.parametrize("name", shipped())
def test_programs_keep_the_same_entries(name, tokens):
    program = load(name).require()
    bound = bind(program, SHAPE, {k: v for k, v in SMALL.items() if k in program.params})
    generator = torch.Generator().manual_seed(tokens)
    kept = {}
    q = torch.randn(3, 8, bound.queries(tokens), 64, generator=generator)
    k, v = torch.randn(2, 3, 2, tokens, 64, generator=generator)
    for device in ("cpu", "cuda"):
        run = TorchProgram(bound).start(tokens)
        for layer in range(3):
            run.observe(layer, *(x[layer].to(device) for x in (q, k, v)))
        kept[device] = torch.stack(list(run.finish())).cpu()
    assert torch.equal(kept["cpu"], kept["cuda"])


def test_paged_attention():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 0, 17, 63])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    indices = torch.randperm(200, generator=generator)[: int(indptr[-1])]
    keys, values = torch.randn(2, 200, 64, generator=generator)
    q = torch.randn(2, 1, 8, 64, generator=generator)
    inputs = (q, keys, values, indptr, indices)
    wanted = paged_attention(*inputs, scale=0.125)
    got = paged_attention(*(x.cuda() for x in inputs), scale=0.125)
    torch.testing.assert_close(got.cpu(), wanted, atol=1e-5, rtol=1e-5)


def test_compact():
    generator = torch.Generator().manual_seed(0)
    entries = torch.randn(512, 16, generator=generator)
    slots = torch.randperm(100, generator=generator)[:50]
    kept = torch.rand(2, 50, generator=generator) < 0.3
    pages = 100 + torch.arange(28)
    results = []
    for device in ("cpu", "cuda"):
        copy = entries.clone().to(device)
        inputs = (x.to(device) for x in (slots, kept, pages))
        compact(copy, *inputs, key_base=0, value_offset=256)
        results.append(copy.cpu())
    assert not torch.equal(results[0], entries)
    assert torch.equal(*results)
