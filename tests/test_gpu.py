"""Torch programs and kernel references give the same on a GPU as on the CPU.

Kernels beside their references: tests/kernels and tests/executions, which a GPU runs compiled. A
server on a GPU: test_gpu_server.py.
"""

from dataclasses import fields
from functools import partial

import pytest
import torch
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.execute.decode.memory import Memory
from kvpolicy.dsl.execute.decode.requests import follow_together
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.tensors.kernels import Entries
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.kernels.attention.decode_attention import decode_attention
from kvpolicy.kernels.attention.paged_attention import PairReading, paged_attention
from kvpolicy.kernels.attention.private_attention_flashinfer import PrivateAttention
from kvpolicy.kernels.entries.compact_layers import compact_layers
from kvpolicy.kernels.entries.gather import gather
from kvpolicy.kernels.entries.place import place
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.kernels.entries.rotate import rotate
from kvpolicy.kernels.entries.tables import Tables
from kvpolicy.kernels.merging.following import following
from kvpolicy.kernels.merging.merge_rows import merge_mass, merge_rows
from kvpolicy.kernels.merging.nearest import nearest
from kvpolicy.kernels.scoring.select import ABSENT, top
from kvpolicy.kernels.table import REFERENCE
from kvpolicy.kernels.table_triton import TRITON
from remembered import remembered
from shipped_policies import shipped_program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SHAPE = ModelShape(layers=3, heads=8, kv_heads=2, head_dim=64)
SMALL = {"capacity": "40", "window": "8", "start": "2", "queries": "8", "reach": "30"}


# What programs compute with on the GPU; on the CPU always the first, which the others equal.
KERNELS = pytest.mark.parametrize("kernels", [REFERENCE, TRITON], ids=["torch", "triton"])


@KERNELS
@pytest.mark.parametrize("tokens", [1, 8, 9, 63, 1000])
@pytest.mark.parametrize("name", shipped())
def test_programs_keep_the_same_entries(name, tokens, kernels):
    program = shipped_program(name)
    bound = bind(program, SHAPE, {k: v for k, v in SMALL.items() if k in program.params})
    generator = torch.Generator().manual_seed(tokens)
    kept = {}
    q = torch.randn(3, 8, bound.queries(tokens), 64, generator=generator)
    k, v = torch.randn(2, 3, 2, tokens, 64, generator=generator)
    for device, table in (("cpu", REFERENCE), ("cuda", kernels)):
        run = TorchProgram(bound, kernels=table).start(tokens)
        for layer in range(3):
            run.observe(layer, *(x[layer].to(device) for x in (q, k, v)))
        kept[device] = torch.stack(run.finish().kept).cpu()
    assert torch.equal(kept["cpu"], kept["cuda"])


def _kept_while_decoding(bound, prompt, device: str, kernels) -> list:
    """Positions per layer and KV head after a prefill and twelve steps."""
    q, k, v = (x.to(device) for x in prompt)
    tokens = k.shape[2]
    run = TorchProgram(bound, kernels=kernels).start(tokens)
    there = torch.arange(tokens, device=device)
    for layer in range(3):
        rows = (x[layer][:, there] for x in (q, k, v))
        deeper = run.observe(layer, *rows, None if len(there) == tokens else there)
        there = there if deeper is None or run.restarted else there[deeper]
    finished = run.finish()
    if bound.folded.prefill.merge is not None:
        for layer in range(3):
            finished.merged(layer, k[layer], v[layer])
    memory = Memory.after(finished)
    if memory is None:
        return [layer.cpu().tolist() for layer in finished.kept]
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(2, 2, 2 * tokens, 64, generator=generator).to(device)
    for step in range(12):
        queries = torch.randn(3 * 8, 1, 64, generator=generator).to(device)
        new = torch.tensor([tokens + step], device=device)
        positions = [torch.cat([remembered(memory, layer)[0], new]) for layer in range(3)]

        def read(there, positions=positions):
            ids = torch.zeros(there.shape, dtype=torch.int64, device=device)
            heads = torch.arange(2, device=device)[:, None] * noise.shape[2]
            for own, places in zip(ids.split(2), positions, strict=True):
                own[:, own.shape[1] - len(places) :] = heads + places
            return tuple(Entries(x.flatten(0, 1), ids) for x in noise)

        asked = partial(torch.clone, queries)
        follow_together([memory], [[tokens + step]], new, asked, read, leaves=True)
    return [[x.tolist() for x in remembered(memory, layer)] for layer in range(3)]


@KERNELS
@pytest.mark.parametrize("name", shipped())
def test_decode_steps_keep_the_same_entries(name, kernels):
    program = shipped_program(name)
    given = {**SMALL, "heavy": "20", "rate": "0.3", "lookback": "2"}
    bound = bind(program, SHAPE, {k: v for k, v in given.items() if k in program.params})
    generator = torch.Generator().manual_seed(2)
    shapes = [(3, 8, 90, 64), (3, 2, 90, 64), (3, 2, 90, 64)]
    prompt = [torch.randn(shape, generator=generator) for shape in shapes]
    pairs = (("cpu", REFERENCE), ("cuda", kernels))
    kept = [_kept_while_decoding(bound, prompt, *pair) for pair in pairs]
    assert kept[0] == kept[1]


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


def test_paged_attention_over_separate_lists_with_lengths():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 0, 17, 63])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    count = int(indptr[-1])
    indices, value_indices = torch.randperm(200, generator=generator)[: 2 * count].split(count)
    keys, values = torch.randn(2, 200, 64, generator=generator)
    q = torch.randn(2, 1, 8, 64, generator=generator)
    scales = torch.rand(2, count, generator=generator)
    results = []
    for device in ("cpu", "cuda"):
        inputs = [x.to(device) for x in (q, keys, values, indptr, indices)]
        reading = PairReading(*(x.to(device) for x in (value_indices, *scales)))
        results.append(paged_attention(*inputs, scale=0.125, reading=reading).cpu())
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_place_and_gather(dtype):
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 2, 37, 64, generator=generator, dtype=torch.float64)
    kept = torch.rand(2, 37, generator=generator) < 0.5
    pages = torch.randperm(50, generator=generator)
    results = []
    for device in ("cpu", "cuda"):
        entries = torch.zeros(200, 64, dtype=dtype, device=device)
        rows = [x.to(device) for x in (k, v, kept, pages)]
        counts = place(entries, *rows, value_offset=100)
        used = (counts + 1) // 2
        first = used.cumsum(0) - used
        lists = [
            (rows[3][int(f) : int(f + u), None] * 2 + torch.arange(2, device=device)).flatten()[:n]
            for f, u, n in zip(first, used, counts, strict=True)
        ]
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        read = gather(entries, entries[100:], indptr, torch.cat(lists), rows[2])
        results.append([entries.cpu(), *(x.cpu() for x in read)])
    for cpu, cuda in zip(*results, strict=True):
        assert torch.equal(cpu, cuda)
    assert torch.equal(results[0][1][kept], k[kept].to(dtype))


def test_rotate():
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(2, 9, 64, generator=generator)
    shift = torch.randint(0, 20000, (2, 9), generator=generator)
    inv_freq = 10000.0 ** (-torch.arange(32) / 32)
    results = [rotate(*(x.to(d) for x in (k, shift, inv_freq))).cpu() for d in ("cpu", "cuda")]
    torch.testing.assert_close(*results, atol=1e-6, rtol=0)


def test_selection_of_ties():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-5, 5, (4, 1000), generator=generator, dtype=torch.int32)
    keys[0] = ABSENT
    for number in (0, 1, 300, 1000, torch.tensor([[3], [0], [1000], [77]])):
        many = number.cuda() if isinstance(number, torch.Tensor) else number
        wanted = top(keys, number)
        assert not wanted[0].any()
        assert torch.equal(top(keys.cuda(), many).cpu(), wanted)


def test_compaction_of_all_layers():
    generator = torch.Generator().manual_seed(0)
    storage = torch.randn(3, 2, 100, 2, 16, generator=generator)
    slots = torch.randperm(100, generator=generator)
    kept = torch.rand(3, 2, 50, generator=generator) < 0.3
    pages = (kept.sum(-1).flatten() + 1) // 2
    first = (pages.cumsum(0) - pages).view(3, 2)
    inputs = (slots[:50], kept, slots[50 : 50 + -(-int(pages.sum()) // 3)], first)
    results = []
    for device in ("cpu", "cuda"):
        copy = storage.clone().to(device)
        compact_layers(copy, *(x.to(device) for x in inputs))
        results.append(copy.cpu())
    assert not torch.equal(results[0], storage)
    assert torch.equal(*results)


def _decode_batch(device: str, dtype: torch.dtype = torch.float32) -> tuple:
    """Queries and what `Requests` takes: a compressed request and a plain one, 19 + 60 entries."""
    generator = torch.Generator().manual_seed(0)
    storage = torch.randn(2, 2, 64, 2, 64, generator=generator).to(dtype)
    q = torch.randn(2, 8, 64, generator=generator).to(dtype)
    tables = Tables.empty(3, 2, 2, 8, "cpu")
    tables.counts[1] = torch.tensor([[5, 2], [0, 4]])
    tables.first_page[1] = torch.tensor([[0, 3], [4, 4]])
    tables.tail_start[1] = 20
    tables.slots[:3] = torch.tensor([60, 50, 40])
    places = torch.randint(1, 39, (3, 30), generator=generator, dtype=torch.int32)
    on_device = Tables(*(getattr(tables, each.name).to(device) for each in fields(tables)))
    rows, lengths = torch.tensor([1, 2], device=device), torch.tensor([23, 30], device=device)
    return q.to(device), storage.to(device), on_device, rows, lengths, places.to(device)


def test_decode_attention():
    results = [
        decode_attention(q, Requests(*own), layer=1, scale=0.125).cpu()
        for q, *own in map(_decode_batch, ("cpu", "cuda"))
    ]
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_flashinfer_reads_private_pages_in_a_graph_and_without(dtype, group):
    """A captured batch is planned again for other lists, none, another order; tails are merged."""
    flashinfer = pytest.importorskip("flashinfer")
    q, storage, tables, rows, lengths, table = _decode_batch("cuda", dtype)
    q = q[:, : 2 * group]
    work = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
    tensor_cores, scale = group >= 4, 0.125
    private = PrivateAttention(storage, 2 * group, dtype, work, tensor_cores=tensor_cores)
    private.reserve(4)
    counts = tables.counts.transpose(0, 1).long().cpu().numpy()
    private.plan(tables, rows[:0], counts[:, :0], captured=4)
    static = torch.zeros(4, 2 * group, 64, dtype=dtype, device="cuda")
    private.attend(static, layer=1, scale=scale)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = private.attend(static, layer=1, scale=scale)
    tails = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        work, "NHD", use_tensor_cores=tensor_cores, backend="fa2"
    )
    for order in ([0, 1], [1], [1, 0]):
        own, ends = rows[order], lengths[order]
        requests = Requests(storage, tables, own, ends, table)
        wanted = decode_attention(q[order], requests, layer=1, scale=scale)
        starts = tables.tail_start[own]
        slots = [table[r, s:e] for r, s, e in zip(own, starts, ends, strict=True)]
        number = torch.tensor([0, *(len(each) for each in slots)]).cumsum(0).int()
        ones = torch.ones(len(order), dtype=torch.int32)
        kinds = {"q_data_type": dtype, "kv_data_type": dtype, "sm_scale": scale}
        tails.plan(number, torch.cat(slots), ones, 2 * group, 2, 64, 1, **kinds)
        tail = tails.run(q[order], tuple(storage[1].unsqueeze(2)), return_lse=True)
        atol = 4 * torch.finfo(dtype).eps * float(storage.abs().max())
        for captured in (4, None):
            private.plan(tables, own, counts[:, own.cpu().numpy()], captured=captured)
            if captured is None:
                found = private.attend(q[order], layer=1, scale=scale)
            else:
                static[: len(order)] = q[order]
                graph.replay()
                assert not out[len(order) :].any()
                assert lse[len(order) :].isneginf().all()
                found = out[: len(order)], lse[: len(order)]
            torch.testing.assert_close(private.merged(found, tail), wanted, atol=atol, rtol=0)


def test_merges():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 60, 64, generator=generator)
    kept = torch.rand(2, 60, generator=generator) < 0.3
    places, real, *_ = following(kept, torch.ones_like(kept), 50, 0)
    found = [nearest(*(each.to(d) for each in (x, places, real, kept))) for d in ("cpu", "cuda")]
    assert found[0][0].unique().numel() > 10
    assert all(torch.equal(one, other.cpu()) for one, other in zip(*found, strict=True))
    receivers, sources = torch.randint(60, (2, 30), generator=generator).sort(-1)
    offsets = torch.stack([torch.searchsorted(row, torch.arange(61)) for row in receivers]).int()
    weights = torch.rand(2, 30, generator=generator, dtype=torch.float64)
    links = (sources, weights, offsets)
    mass = merge_mass(links, None)
    merged = [
        merge_rows(x.to(d), tuple(each.to(d) for each in links), None, mass.to(d)).cpu()
        for d in ("cpu", "cuda")
    ]
    assert not torch.equal(merged[0], x.double())
    torch.testing.assert_close(*merged, atol=1e-14, rtol=1e-14)
