"""Readers of decode forwards, when FlashInfer plans for them, and SGLang's plans of tails."""

import json
import logging
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")

import flashinfer_stand_in as stand_in
from kvpolicy.kernels.launch import tuned
from kvpolicy.sglang_ext.attention import graphs, readers
from kvpolicy.sglang_ext.face import compat, options
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.forward.services import Services
from kvpolicy.sglang_ext.forward.warm import warm_attention
from kvpolicy.sglang_ext.memory.arena import create_arena
from kvpolicy.sglang_ext.memory.tables import DeviceTables

LAYERS, HEADS, KV_HEADS, SIZE = 3, 4, 2, 16
BACKEND = SimpleNamespace(
    workspace_buffer=torch.zeros(8, dtype=torch.uint8), decode_use_tensor_cores=True
)
ROWS = torch.tensor([1, 2, 3, 0])


class Step:
    """A decode step with these rows of the pool; None is a plain request."""

    def __init__(self, *rows, entries=5, shared=None, tail=0, reads=None):
        counts = [[entries] * KV_HEADS] * LAYERS
        layout = SimpleNamespace(laid_out_here=counts, laid_out=counts)
        self.private_of_rows = [
            None if row is None else SimpleNamespace(row=row, shared=shared, layout=layout)
            for row in rows
        ]
        self.reads = any(rows) if reads is None else reads
        self.tail, self.failed = tail, None

    def fail_reading(self, error):
        self.failed = error


class Attention:
    """Notes the plans."""

    def __init__(self):
        self.plans = []

    def reserve(self, requests):
        self.plans.append(f"for {requests}")

    def plan(self, tables, rows, counts, *, captured):
        self.plans.append((rows.tolist(), counts.sum((0, 2)).tolist(), captured))


@pytest.fixture
def services():
    made = Services(())
    made.arena = create_arena(LAYERS, 20, KV_HEADS, SIZE, torch.float16, "cpu")
    versions = {1: 7, 2: 8, 3: 9}
    made.tables = SimpleNamespace(tables=None, versions=versions, version=versions.__getitem__)
    return made


@pytest.fixture
def reader(services):
    given = (services, Attention(), None, HEADS // KV_HEADS, torch.float16)
    return readers.FlashInferReader(*given, always=True)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    def write(*choices):
        runs = [{"choices": [dict(zip(("where", "choice"), c, strict=True))]} for c in choices]
        for run in runs:
            run["choices"][0]["kernel"] = "decode_reader"
        (tmp_path / "cpu.json").write_text(json.dumps({"device": "cpu", "runs": runs}))
        tuned.load.cache_clear()

    monkeypatch.setenv(tuned.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv(options.ATTENTION_CHOICE.variable, "")
    tuned.load.cache_clear()
    yield write
    tuned.load.cache_clear()


def where(lists, entries):
    group = HEADS // KV_HEADS
    named = {"dtype": "float16", "head_dim": SIZE, "group": group}
    return named | {"lists": lists, "entries": entries}


def test_it_plans_when_lists_change_and_not_at_every_step(reader, services):
    per = 5 * LAYERS * KV_HEADS
    for _ in range(3):
        assert reader.ready(Step(1, 2), ROWS)
    assert reader._attention.plans == [([1, 2], [per, per], None)]
    step = Step(1, 2)
    services.tables.versions[2] = 10  # folded
    assert reader.ready(step, ROWS)
    assert reader.ready(step, ROWS)  # at each layer
    assert reader.chosen(step)
    assert not reader.chosen(Step(1, 2))
    for rows in ((2, 1), (2,), (2, None), (None, 2, 3)):
        assert reader.ready(Step(*rows), torch.tensor([row or 4 for row in rows]))
    assert reader._attention.plans[2:] == [
        ([2, 1], [per, per], None),
        ([2], [per], None),
        ([2, 4], [per, 0], None),
        ([4, 2, 3], [0, per, per], None),
    ]


def test_a_replay_is_planned_for_the_size_of_its_graph(reader):
    per = 5 * LAYERS * KV_HEADS
    assert not reader.replays(Step(1), ROWS)  # nothing is captured
    reader.reserve(4)
    for size in (4, 2, 1):
        reader.capture(size)
    assert reader._attention.plans == ["for 4", ([], [], 4), ([], [], 2), ([], [], 1)]
    reader._attention.plans.clear()
    assert reader.replays(Step(1, 2, 3), ROWS)
    assert reader.replays(Step(1, 2, 3), ROWS)
    assert reader.ready(Step(1, 2, 3), ROWS)  # a step without a graph
    assert reader.replays(Step(1, 2, 3), ROWS)
    assert not reader.replays(Step(1, 2, 3, None, None), ROWS)
    sizes = [captured for _, _, captured in reader._attention.plans]
    assert sizes == [4, None, 4]
    assert reader._attention.plans[0] == ([1, 2, 3], [per] * 3, 4)


def test_pairs_and_batches_that_read_nothing_are_left_to_triton(reader):
    assert not reader.ready(Step(1, shared=object()), ROWS)
    assert not reader.ready(Step(None, None), ROWS)
    assert not reader.ready(Step(1, reads=False), ROWS)  # reading has failed
    assert reader._attention.plans == []


def test_what_was_measured_decides(services, measured):
    given = (services, Attention(), None, HEADS // KV_HEADS, torch.float16)
    reader = readers.FlashInferReader(*given, always=False)
    measured((where(4, 1000), {"reader": "flashinfer"}), (where(4, 10), {}))
    assert not reader.ready(Step(1, 2, entries=8, tail=4), ROWS)  # short lists
    services.tables.versions |= {1: 20, 2: 21}
    long = Step(1, 2, entries=900, tail=200)
    assert reader.ready(long, ROWS)
    measured()
    assert not reader.ready(Step(1, 2, entries=900), ROWS)


def test_where_it_cannot_plan_triton_reads(reader, caplog):
    def plan(*_, **__):
        raise MemoryError("no room")

    reader._attention.plan = plan
    with caplog.at_level(logging.ERROR):
        assert not reader.ready(Step(1), ROWS)
        assert not reader.ready(Step(2), ROWS)
    [record] = caplog.records
    assert record.getMessage().endswith("Triton's kernel reads instead.")


def test_ranks_replay_graphs_of_one_kind_though_one_cannot_plan(reader, services):
    """In a graph, sums over ranks read what the same graph on another rank writes."""
    services.ranks = SimpleNamespace(size=2)
    reader.capture(2)
    plan, plans = reader._attention.plan, reader._attention.plans

    def fails(tables, rows, counts, *, captured):
        if rows.numel():
            raise MemoryError("no room")
        plan(tables, rows, counts, captured=captured)

    reader._attention.plan, step = fails, Step(1)
    assert reader.replays(step, ROWS)
    assert isinstance(step.failed, MemoryError)
    assert plans[-1] == ([], [], 2)  # other rows of the batch are read as they should
    reader._attention.plan, step = plan, Step(2)
    assert reader.replays(step, ROWS)
    assert step.failed is None
    reader._attention.plan, step = fails, Step(3)
    assert not reader.ready(step, ROWS)  # without a graph ranks need not do alike
    assert step.failed is None
    reader._attention.plan, step = plan, Step(2)
    assert reader.replays(step, ROWS)


def test_ranks_with_lists_of_other_lengths_choose_alike(services, measured):
    measured((where(4, 1000), {"reader": "flashinfer"}), (where(4, 10), {}))
    services.tables.versions |= {1: 20, 2: 21}
    chosen = []
    for here in (2000, 0):
        given = (services, Attention(), None, HEADS // KV_HEADS, torch.float16)
        step = Step(1, 2, entries=here)
        for each in step.private_of_rows:
            each.layout.laid_out = [[2000, 2000, 0, 0]] * LAYERS  # of two ranks
        chosen.append(readers.FlashInferReader(*given, always=False).ready(step, ROWS))
    assert chosen == [True, True]


def of_backend(services, name="flashinfer"):
    given = (services, name, BACKEND, None, HEADS, torch.float16)
    return readers.by_flashinfer(*given)


def test_who_may_read(services, measured, monkeypatch):
    monkeypatch.setattr(stand_in.BatchDecodeWithPagedKVCacheWrapper, "plans", [])
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    assert of_backend(services) is None  # nothing is measured
    measured((where(4, 1000), {"reader": "triton"}))
    assert of_backend(services) is None
    measured((where(4, 1000), {"reader": "flashinfer"}))
    assert of_backend(services) is not None
    assert of_backend(services, "triton") is None
    monkeypatch.setenv(options.ATTENTION_CHOICE.variable, "triton")
    assert of_backend(services) is None
    monkeypatch.setenv(options.ATTENTION_CHOICE.variable, "flashinfer")
    measured()
    services.tables = DeviceTables(services.arena, 4, 20)
    reader = of_backend(services)
    warm_attention(services, HEADS, torch.float16, 1)
    assert stand_in.BatchDecodeWithPagedKVCacheWrapper.plans == []
    services.pages_reader = reader
    warm_attention(services, HEADS, torch.float16, 1)
    assert len(stand_in.BatchDecodeWithPagedKVCacheWrapper.plans) == LAYERS


def test_without_the_package(services, measured, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    measured((where(4, 1000), {"reader": "flashinfer"}))
    with caplog.at_level(logging.WARNING):
        assert of_backend(services) is None
    [record] = caplog.records
    said = "Measured to be fastest by FlashInfer, but the package flashinfer-python is not"
    assert record.getMessage().startswith(said)
    monkeypatch.setenv(options.ATTENTION_CHOICE.variable, "flashinfer")
    said = "--kv-policy-attention flashinfer: the package flashinfer-python is not installed; leave"
    with pytest.raises(Refused, match=re.escape(said)):
        of_backend(services)


def test_a_third_graph_where_it_may_read(services):
    variants = graphs.GraphVariants(services)
    assert variants.capture_labels == (graphs.COMPRESSED, graphs.PLAIN)
    answers = iter([True, False])
    services.pages_reader = SimpleNamespace(replays=lambda step, rows: next(answers))
    assert variants.capture_labels == (graphs.COMPRESSED, graphs.PAGES, graphs.PLAIN)
    services.step = SimpleNamespace(decode=SimpleNamespace(reads=True, notes=False))
    batch = SimpleNamespace(req_pool_indices=ROWS)
    assert variants.select(batch) == graphs.PAGES
    assert variants.select(batch) == graphs.COMPRESSED
    services.step.decode.reads = False
    assert variants.select(batch) == graphs.PLAIN


def test_sglangs_plans_begin_at_tails():
    given = []
    updater = SimpleNamespace(call_begin_forward=lambda *a, **o: given.append((a, o)))
    found = [None]
    compat.begin_at_tails(SimpleNamespace(indices_updater_decode=updater), lambda: found[0])
    lengths, on_host = torch.tensor([50, 9, 1]), torch.tensor([50, 9, 1])
    rows = torch.tensor([2, 1, 0, 0])  # a row of padding, and what a larger graph has beyond
    call = ("wrapper", lengths, 60, "indptr", None, "spec", on_host)
    options = {"req_pool_indices": rows, "plan": "plan", "disable_split_kv": False}
    updater.call_begin_forward(*call, **options)
    assert given.pop() == (call, options)
    # On the device by row of the table of slots, on the host by row of the forward.
    found[0] = torch.tensor([0, 0, 47], dtype=torch.int32), [47, 0]
    updater.call_begin_forward(*call, **options)
    (wrapper, of_tails, total, indptr, first, spec, of_host), more = given.pop()
    assert (wrapper, total, indptr, spec, more) == ("wrapper", 13, "indptr", "spec", options)
    assert of_tails.tolist() == of_host.tolist() == [3, 9, 1]
    assert first.tolist() == [47, 0, 0]
    assert on_host.tolist() == [50, 9, 1]
    updater.call_begin_forward(*call[:2], None, *call[3:6], None, **options)
    (_, of_tails, total, _, _, _, of_host), _ = given.pop()
    assert (of_tails.tolist(), total, of_host) == ([3, 9, 1], None, None)


def test_counts_are_those_of_the_layouts(reader):
    step = Step(1, None, 2)
    lists = [[1, 0], [0, 0], [2, 3]]
    step.private_of_rows[2].layout = SimpleNamespace(laid_out_here=lists, laid_out=lists)
    counts = []
    reader._attention.plan = lambda tables, rows, found, captured: counts.append(found)
    assert reader.ready(step, ROWS)
    [found] = counts
    assert found.shape == (LAYERS, 3, KV_HEADS)
    assert np.array_equal(found[:, 2], [[1, 0], [0, 0], [2, 3]])
    assert not found[:, 1].any()
    assert (found[:, 0] == 5).all()
