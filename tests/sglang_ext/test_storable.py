"""What a merge or `share` gives is infinite in none of the pool's types, whatever its scales."""

from types import SimpleNamespace

import pytest
import torch
from kvpolicy.kernels.entries.rounding import rounded
from kvpolicy.sglang_ext.forward import share
from kvpolicy.sglang_ext.forward.compress import _storable
from kvpolicy.sglang_ext.memory.arena import create_arena

SLOTS = torch.arange(1, 9)
EIGHT_BITS = pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])


def arena_of(dtype):
    arena = create_arena(2, 16, 2, 8, dtype, "cpu")
    generator = torch.Generator().manual_seed(0)
    arena.storage.copy_(torch.randn(arena.storage.shape, generator=generator).to(dtype))
    return arena


@EIGHT_BITS
def test_what_a_merge_makes_too_large_for_8_bits_stays(dtype):
    arena = arena_of(dtype)
    old_k, old_v = arena.storage[1][:, SLOTS].transpose(1, 2).double()
    k, v = old_k + 1, old_v - 1
    k[0, 3], v[1, 5, 7] = 1e6, -1e6
    found = [rounded(x, dtype).float() for x in _storable(arena, 1, SLOTS, k, v)]
    assert all(x.isfinite().all() for x in found)
    if dtype == torch.float8_e5m2:  # the other one has no infinity
        k[0, 3], v[1, 5] = old_k[0, 3], old_v[1, 5]
    for x, wanted in zip(found, (k, v), strict=True):
        assert torch.equal(x, rounded(wanted, dtype).float())


@EIGHT_BITS
def test_directions_too_large_for_8_bits_are_not_shared(dtype):
    arena = arena_of(dtype)
    direction = torch.full((2, 8, 8), 0.5, dtype=torch.float64)
    direction[1, 2, 3] = -1e6
    nothing = SimpleNamespace(direction=direction, excepted=torch.zeros(2, 8, dtype=torch.bool))
    run = SimpleNamespace(shared=lambda *args: {"key": nothing, "value": nothing})
    heads = SimpleNamespace(gathered=lambda parts: [parts[0][0]], part=lambda x, dim: x)
    rows = share.paired(arena, SLOTS, 1, run, heads)
    k, v, holds = rows.dense
    for x in (k, v):
        assert rounded(x, dtype).float().isfinite().all()
    # A list holds codes, a vector per token, and one more per token that shares none.
    codes = rows.codes.shape[2]
    excepted = [0, int(dtype == torch.float8_e5m2)]
    assert holds.sum(1).tolist() == [codes + 8 + number for number in excepted]
