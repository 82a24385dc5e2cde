"""Layers stored in pairs: read back through entry lists, and their size."""

from types import SimpleNamespace

import pytest
import torch
from fake_allocator import Allocator, no_cache
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.kernels.attention.decode_attention import decode_attention
from kvpolicy.kernels.attention.paged_attention import paged_attention
from kvpolicy.kernels.entries.compact_layers import compact_layers
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.kernels.entries.rounding import FLOAT8
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.face.kernels_in_use import in_use
from kvpolicy.sglang_ext.face.policy_files import load_policies
from kvpolicy.sglang_ext.face.ranks import Ranks
from kvpolicy.sglang_ext.forward import share
from kvpolicy.sglang_ext.memory.arena import create_arena
from kvpolicy.sglang_ext.memory.lists import Lists
from kvpolicy.sglang_ext.memory.store import Store
from kvpolicy.sglang_ext.memory.tables import DeviceTables
from kvpolicy.sglang_ext.request.request import RequestState

LAYERS, UPPERS, SIZE = 6, [2, 5], 16  # layers 0 and 3 are whole


class Finished:
    """Replaces a finished prefill: directions in float64, exceptions as given."""

    not_finite = False

    def __init__(self, excepted):
        self.excepted = excepted  # layer -> [2, G, N] bool

    def shared(self, layer, below, own):
        middle = [
            torch.nn.functional.normalize(x.double() + y.double(), dim=-1)
            for x, y in zip(below, own, strict=True)
        ]
        for direction, excepted in zip(middle, self.excepted[layer], strict=True):
            direction[excepted] = float("nan")  # must not be stored
        return {
            name: SimpleNamespace(direction=middle[i], excepted=self.excepted[layer][i])
            for i, name in enumerate(("key", "value"))
        }


def restored(kv, excepted, dtype):
    """Tensors [L, 2, N, G, D] that should be read back for a prompt's kv [L, 2, N, G, D]."""
    out = kv.clone()
    for upper in UPPERS:
        below, own = kv[upper - 1].double(), kv[upper].double()
        direction = torch.nn.functional.normalize(below + own, dim=-1).to(dtype).float()
        mask = excepted[upper].transpose(1, 2)[..., None]
        for layer, x in ((upper - 1, below), (upper, own)):
            shared = direction * x.norm(dim=-1, keepdim=True).float()
            out[layer] = torch.where(mask, kv[layer].float(), shared)
    return out


def exceptions(kv_heads, prompt, share_of, generator):
    """Random exceptions for keys and values; the first head has none, the last only values."""
    masks = {}
    for upper in UPPERS:
        mask = torch.rand(2, kv_heads, prompt, generator=generator) < share_of
        mask[:, 0] = False
        mask[0, -1] = False
        masks[upper] = mask
    return masks


class Pool:
    """A store in an arena full of NaN, and SGLang's table of rows."""

    def __init__(self, kv_heads, dtype, rows=900):
        self.arena = create_arena(LAYERS, rows, kv_heads, SIZE, dtype, "cpu")
        self.arena.storage.fill_(float("nan"))
        self.tables = DeviceTables(self.arena, 5, rows - 1, pairs=True)
        self.store = Store(self.arena, Allocator(rows - 1), tables=self.tables)
        self.table = torch.zeros((5, 120), dtype=torch.int32)
        self.ranks = Ranks()

    def prefill(self, row, kv, prompt):
        """Puts kv [L, 2, length, G, D] into ordinary slots; returns the prompt's slots."""
        length = kv.shape[2]
        slots = self.store.allocator.alloc(length)
        self.table[row, :length] = slots.to(torch.int32)
        self.arena.storage[:, :, slots] = kv
        return slots[:prompt]

    def share(self, row, slots, excepted):
        """Stores a prompt in pairs; returns its state."""
        prompt = slots.numel()
        private = self.store.allocate(row, "a", prompt, prompt, no_cache)
        kernels = in_use(torch.device("cpu"))
        served = SimpleNamespace(upper_layers=UPPERS, kernels=kernels)
        state = RequestState(served, prompt, prompt, private=private)
        share.compress(self, state, slots, Finished(excepted))
        return state

    def forget(self, row, slots):
        """Gives the prompt's slots away."""
        self.arena.storage[:, :, slots] = float("nan")
        self.table[row, : slots.numel()] = 0


def pages(lists, kv_heads):
    return sum(-(-n // kv_heads) for n in lists)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, *FLOAT8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (4, 2), (6, 3)])
@pytest.mark.parametrize("share_of", [0.0, 0.1, 0.3])
def test_attention_is_that_over_the_restored_tensors(heads, kv_heads, dtype, share_of):
    """Requests in pairs beside one compressed without; free memory holds NaN.

    By lists and by device tables; 8-bit entries are read through the scales of their layer.
    """
    generator = torch.Generator().manual_seed(heads)
    pool = Pool(kv_heads, dtype)
    scales = [(1.0, 1.0)] * LAYERS
    if dtype in FLOAT8:
        scales = [(0.3 + layer, 2.0 - 0.3 * layer) for layer in range(LAYERS)]
        pool.arena.set_scales(scales)
    by = torch.tensor(scales)[:, :, None, None, None]
    privates, lengths, wanted = [], [], []
    for row, (prompt, tail) in enumerate(((40, 1), (61, 9), (33, 20)), start=1):
        kv = torch.randn(LAYERS, 2, prompt + tail, kv_heads, SIZE, generator=generator).to(dtype)
        slots = pool.prefill(row, kv, prompt)
        seen = kv.float() * by
        if row == 2:
            private = whole(pool, row, slots)
            seen = torch.cat([seen[:, :, :30], seen[:, :, prompt:]], 2)
        else:
            excepted = exceptions(kv_heads, prompt, share_of, generator)
            private = pool.share(row, slots, excepted).private
            shared = restored(seen[:, :, :prompt], excepted, dtype)
            seen = torch.cat([shared, seen[:, :, prompt:]], 2)
            assert private.slots.numel() < prompt
        pool.forget(row, slots)
        privates.append(private)
        lengths.append(prompt + tail)
        wanted.append(seen)
    pool.tables.write()
    pool.store.check_integrity(pool.store.allocator.free_slots)

    q = torch.randn(3, LAYERS, heads, SIZE, generator=generator)
    q = q if dtype in FLOAT8 else q.to(dtype)
    given = (pool.arena, privates, lengths, pool.table)
    first, lists = (Lists(*given, remember=True) for _ in range(2))
    for layer, (of_keys, of_values) in enumerate(scales):
        scale = SIZE**-0.5 * of_keys
        first.layer(layer)
        indptr, indices, reading = lists.layer(layer)
        arena = (pool.arena.entries, pool.arena.values)
        got = paged_attention(
            q[:, layer, None], *arena, indptr, indices, scale=scale, reading=reading
        )
        by_tables = decode_attention(
            q[:, layer].contiguous(),
            Requests(
                pool.arena.storage,
                pool.tables.tables,
                torch.tensor([1, 2, 3]),
                torch.tensor(lengths),
                pool.table,
            ),
            layer=layer,
            scale=scale,
        )
        assert torch.equal(by_tables, got[:, 0])
        for row, seen in enumerate(wanted):
            k, v = seen[layer].repeat_interleave(heads // kv_heads, dim=2).transpose(1, 2)
            scores = torch.einsum("hd,hnd->hn", q[row, layer].float(), k) * SIZE**-0.5
            dense = torch.einsum("hn,hnd->hd", scores.softmax(-1), v)
            tolerance = 1e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-5
            found = got[row, 0].float() * of_values
            torch.testing.assert_close(found, dense, atol=tolerance, rtol=tolerance)


def whole(pool, row, slots):
    """A request compressed without pairs: the first 30 tokens."""
    arena = pool.arena
    kept = torch.zeros(LAYERS, arena.kv_heads, slots.numel(), dtype=torch.bool)
    kept[:, :, :30] = True
    private = pool.store.allocate(row, "b", 40, slots.numel(), no_cache)
    pool.store.fill(private, torch.full((LAYERS, arena.kv_heads), 30))
    compact_layers(arena.storage, slots, kept, private.slots, private.first_page)
    return private


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_pair_takes_one_list_and_the_excepted_tokens(kv_heads):
    generator = torch.Generator().manual_seed(kv_heads)
    pool = Pool(kv_heads, torch.float32)
    prompt = 97
    kv = torch.randn(LAYERS, 2, prompt, kv_heads, SIZE, generator=generator)
    excepted = exceptions(kv_heads, prompt, 0.1, generator)
    slots = pool.prefill(1, kv, prompt)
    private = pool.share(1, slots, excepted).private
    # What others may read is as it was.
    assert torch.equal(pool.arena.storage[:, :, slots], kv)
    used = (LAYERS - 2 * len(UPPERS)) * pages([prompt] * kv_heads, kv_heads)
    for mask in excepted.values():
        # A number of float32 per token and layer, in rows of 16.
        used += pages((2 * -(-prompt // SIZE) + prompt + mask.sum(2).amax(0)).tolist(), kv_heads)
    assert private.slots.numel() == pool.store.held == -(-used // LAYERS)


@pytest.mark.parametrize("prompt", [1, 4, 7])
def test_short_prompts(prompt):
    pool = Pool(2, torch.float32)
    kv = torch.randn(LAYERS, 2, prompt, 2, SIZE)
    slots = pool.prefill(1, kv, prompt)
    none = dict.fromkeys(UPPERS, torch.zeros(2, 2, prompt, dtype=torch.bool))
    state = pool.share(1, slots, none)
    # 4 tokens are 2 pages per head and list, a pair's 3 with its codes: 20 pages take 4 slots.
    # 7 are 4 and 5: 36 pages take 6.
    assert (state.private is not None) == (prompt == 7)
    assert pool.store.held == (6 if prompt == 7 else 0)


def test_where_all_is_excepted_nothing_is_held():
    pool = Pool(2, torch.float32)
    slots = pool.prefill(1, torch.randn(LAYERS, 2, 40, 2, SIZE), 40)
    free = pool.store.allocator.free_slots.numel()
    everything = dict.fromkeys(UPPERS, torch.ones(2, 2, 40, dtype=torch.bool))
    assert pool.share(1, slots, everything).private is None
    assert pool.store.held == 0
    assert pool.store.allocator.free_slots.numel() == free


def test_tensors_that_are_not_finite_are_not_shared(monkeypatch):
    monkeypatch.setattr(Finished, "not_finite", True)
    pool = Pool(2, torch.float32)
    slots = pool.prefill(1, torch.randn(LAYERS, 2, 40, 2, SIZE), 40)
    none = dict.fromkeys(UPPERS, torch.zeros(2, 2, 40, dtype=torch.bool))
    assert pool.share(1, slots, none).private is None
    assert pool.store.held == 0


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ("when: layer == 3", None),
        ("when: layer % 2 == 1", None),
        ("when: layer > layers", ":5:9: error.* holds at none of the model's 6 layers"),
        ("when: layer == 3\n  apply: [key]", "leaves out keys or values"),
    ],
)
def test_sharing_that_would_save_nothing_is_refused(tmp_path, section, sentence):
    file = tmp_path / "pairs.yaml"
    file.write_text(
        f"policy: pairs\nlanguage: 1\nabout: Shares.\n"
        f"share:\n  {section}\n  direction: normalize[dim](own)\n"
    )
    [policy] = load_policies([str(file)], [])
    shape = ModelShape(layers=6, heads=4, kv_heads=2, head_dim=8)
    if sentence is None:
        assert policy.bind(shape).lowered.share is not None
        return
    with pytest.raises(Refused, match=sentence) as caught:
        policy.bind(shape)
    assert str(file) in str(caught.value)
