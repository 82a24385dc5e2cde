"""The attention that a decode step takes: in a scheduled forward, in a capture, outside both."""

import ast
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")

from kvpolicy.dsl.check.policy import load
from kvpolicy.sglang_ext.attention import backend as backends
from kvpolicy.sglang_ext.attention import graphs
from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.forward.services import Services
from kvpolicy.sglang_ext.memory.arena import create_arena
from kvpolicy.sglang_ext.memory.tables import DeviceTables
from kvpolicy.sglang_ext.request.queries import QueryBuffer
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner_utils import capture_mode

POLICIES = Path(__file__).parents[2] / "policies"
LAYERS, HEADS, KV_HEADS, SIZE, SLOTS, ROWS = 2, 4, 2, 16, 20, 4
LAYER = SimpleNamespace(
    layer_id=1, tp_q_head_num=HEADS, tp_k_head_num=KV_HEADS, qk_head_dim=SIZE, scaling=0.25
)


class Stock(AttentionBackend):
    """A backend whose attention is all ones."""

    def __init__(self):
        self.calls = []
        self.indices_updater_decode = SimpleNamespace(call_begin_forward=None)  # of FlashInfer's
        self.req_to_token_pool = SimpleNamespace(
            req_to_token=torch.arange(ROWS * 8, dtype=torch.int32).view(ROWS, 8) % SLOTS
        )

    def forward_decode(self, q, k, v, layer, batch, save_kv_cache=True):
        self.calls.append("forward_decode")
        return torch.ones_like(q)

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.calls.append(f"init_cuda_graph_state {max_bs} {max_num_tokens}")

    def init_forward_metadata(self, forward_batch):
        self.calls.append("planned for a step without a graph")

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        self.calls.append("planned for a capture" if in_capture else "planned for a replay")


class NotedQueries(QueryBuffer):
    """Notes the layers whose queries were written."""

    def __init__(self, programs):
        super().__init__(programs)
        self.written = []

    def write(self, layer, heads, own):
        self.written.append(layer.layer_id)
        super().write(layer, heads, own)


class Step:
    """A decode step in which nothing fails."""

    def __init__(self, reads, notes=False):
        self.reads, self.notes = reads, notes

    def reading(self):
        return nullcontext()


@pytest.fixture
def services():
    made = Services(())
    made.arena = create_arena(LAYERS, SLOTS, KV_HEADS, SIZE, torch.float32, "cpu")
    made.arena.storage.normal_(generator=torch.Generator().manual_seed(0))
    made.tables = DeviceTables(made.arena, ROWS, SLOTS)
    made.queries = NotedQueries([load(str(POLICIES / "h2o.yaml")).require()])
    return made


@pytest.fixture
def capturing():
    yield capture_mode._set_capture_attention_variant
    capture_mode._set_capture_attention_variant(None)


def going_on(services, **step):
    services.step = SimpleNamespace(decode=Step(**step))
    return services.step.decode


def decode(backend, requests=2, seed=1):
    q = torch.randn(requests, HEADS * SIZE, generator=torch.Generator().manual_seed(seed))
    batch = SimpleNamespace(
        req_pool_indices=torch.tensor([1, 2, 0, 0])[:requests],
        seq_lens=torch.tensor([5, 3, 1, 1])[:requests],
    )
    out = backend.forward_decode(q, None, None, LAYER, batch)
    assert out.shape == q.shape
    return out


def test_a_backend_stays_what_it_was(services):
    backend = backends.attach(Stock(), "triton", services, HEADS, torch.float32)
    assert isinstance(backend, Stock)
    assert type(backend).__name__ == "KVPolicyStock"
    assert backend.calls == []


def test_plain_batches_and_warm_ups_are_the_stock_backends(services):
    backend = backends.attach(Stock(), "triton", services, HEADS, torch.float32)
    assert decode(backend).eq(1).all()  # SGLang's own batch, outside of any scheduled forward
    going_on(services, reads=False)
    assert decode(backend).eq(1).all()
    assert backend.calls == ["forward_decode"] * 2
    assert services.queries.written == []


def test_a_batch_that_reads_compressed_entries_takes_the_tables(services):
    backend = backends.attach(Stock(), "triton", services, HEADS, torch.float32)
    going_on(services, reads=True)
    assert not decode(backend).eq(1).any()
    assert backend.calls == []
    assert services.queries.written == []


@pytest.mark.parametrize(
    ("name", "reads"), [("triton", False), ("triton", True), ("torch_native", False)]
)
def test_queries_are_noted_where_a_policy_will_read_them(services, name, reads):
    backend = backends.attach(Stock(), name, services, HEADS, torch.float32)
    going_on(services, reads=reads, notes=True)
    out = decode(backend, requests=3)
    assert out.eq(1).all() == (name == "torch_native")
    q = torch.randn(3, HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    noted = services.queries.take(torch.tensor([2, 0]), 3)
    assert noted.shape == (2, LAYERS, HEADS, SIZE)
    assert torch.equal(noted[:, 1], q[[2, 0]])
    assert noted[:, 0].eq(0).all()  # layer 1 alone has been computed


def test_a_capture_notes_queries_in_one_variant_and_where_replays_find_them(services, capturing):
    backend = backends.attach(Stock(), "triton", services, HEADS, torch.float32)
    backend.init_cuda_graph_state(4, 4)
    capturing(graphs.PLAIN)
    decode(backend)
    assert services.queries.take(torch.arange(4), 4).eq(0).all()
    capturing(graphs.COMPRESSED)
    decode(backend, requests=4)
    captured = services.queries.take(torch.arange(4), 4)
    assert not captured[:, 1].eq(0).any()
    capturing(None)
    going_on(services, reads=False, notes=True)
    decode(backend, requests=2, seed=2)  # a step that runs without a graph
    noted = services.queries.take(torch.arange(4), 4)
    assert not noted[:2, 1].eq(captured[:2, 1]).any()
    assert torch.equal(noted[2:, 1], captured[2:, 1])


def test_a_server_whose_policies_read_no_queries_notes_none(services, capturing):
    services.queries = NotedQueries([load(str(POLICIES / "streamingllm.yaml")).require()])
    backend = backends.attach(Stock(), "triton", services, HEADS, torch.float32)
    backend.init_cuda_graph_state(4, 4)
    capturing(graphs.COMPRESSED)
    decode(backend)
    assert services.queries.written == []


def test_a_capture_decides_for_its_variant_alone(services, capturing):
    backend = backends.attach(Stock(), "triton", services, HEADS, torch.float32)
    going_on(services, reads=True)
    wanted = decode(backend)
    services.step = None
    capturing(graphs.COMPRESSED)
    captured = decode(backend, requests=4)  # two rows of padding
    torch.testing.assert_close(captured[:2], wanted, atol=1e-6, rtol=1e-6)
    assert captured.isfinite().all()
    assert backend.calls == []
    capturing(graphs.PLAIN)
    assert decode(backend).eq(1).all()
    assert backend.calls == ["forward_decode"]


def test_replays_that_read_the_tables_are_not_planned_for_the_stock_kernel(services, capturing):
    """Plain batches, prefills, captures and steps that may fall back to it are planned."""
    backend = backends.attach(Stock(), "flashinfer", services, HEADS, torch.float32)
    decoding, extending = (
        SimpleNamespace(forward_mode=mode) for mode in (ForwardMode.DECODE, ForwardMode.MIXED)
    )

    def planned(call, *arguments, **options):
        backend.calls.clear()
        call(*arguments, **options)
        return backend.calls

    plan = backend.init_forward_metadata_out_graph
    assert planned(plan, decoding) == ["planned for a replay"]  # SGLang's own batch
    going_on(services, reads=False)
    assert planned(plan, decoding) == ["planned for a replay"]
    for step in ({"reads": True}, {"reads": False, "notes": True}):
        going_on(services, **step)
        assert planned(plan, decoding) == []
        assert planned(plan, extending) == ["planned for a replay"]
        eager = backend.init_forward_metadata
        assert planned(eager, decoding) == ["planned for a step without a graph"]
    services.step = None
    capturing(graphs.COMPRESSED)
    assert planned(plan, decoding, in_capture=True) == ["planned for a capture"]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("triton_backend", "TritonAttnBackend"),
        ("flashinfer_backend", "FlashInferAttnBackend"),
        ("flashattention_backend", "FlashAttentionBackend"),
    ],
)
def test_a_step_without_a_graph_is_planned_by_a_way_of_its_own(module, name):
    """Otherwise it could not fall back to the stock kernel if reading the tables fails."""
    found = find_spec(f"sglang.srt.layers.attention.{module}")
    tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
    [backend] = [x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == name]
    methods = {x.name: x for x in backend.body if isinstance(x, ast.FunctionDef)}
    plans = ast.unparse(methods["init_forward_metadata"])
    assert "out_graph" not in plans
    options = methods["init_forward_metadata_out_graph"].args.args
    assert [each.arg for each in options] == ["self", "forward_batch", "in_capture"]


def test_captured_batches_share_one_workspace(services, monkeypatch):
    from kvpolicy.kernels.attention import decode_attention_triton as kernel

    given = []

    def noting(q, *arguments, workspace, **options):
        given.append(workspace)
        return torch.zeros_like(q)

    monkeypatch.setattr(kernel, "decode_attention", noting)
    backend = backends.attach(Stock(), "fa3", services, HEADS, torch.float32)
    going_on(services, reads=True)
    decode(backend)
    backend.init_cuda_graph_state(3, 7)
    for requests in (1, 3, 4):
        decode(backend, requests)
    assert backend.calls == ["init_cuda_graph_state 3 7"]
    before, first, second, larger = given
    assert before is None
    assert first is second
    sizes = (HEADS, KV_HEADS, SIZE, torch.device("cpu"))
    assert (first.partial.numel(), first.arrived.numel()) == kernel.workspace_elements(3, *sizes)
    assert not first.arrived.any()
    assert larger is None  # more requests than were captured: a step without a graph


def test_reads_of_the_table_of_slots_end_with_the_layers(services):
    backend = backends.attach(Stock(), "flashinfer", services, HEADS, torch.float32)
    assert backend.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.IN_REPLAY
    going_on(services, reads=False)
    assert backend.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.IN_REPLAY
    going_on(services, reads=True)
    assert backend.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.POST_REPLAY
    services.step = SimpleNamespace(decode=None)  # a prefill
    assert backend.shared_read_ends(ForwardMode.EXTEND) is SharedReadEnds.UNKNOWN


def test_the_two_variants_are_two_graphs(services):
    graph_runner = object.__new__(DecodeCudaGraphRunner)
    graph_runner.attention_graph_variants = variants = graphs.GraphVariants(services)
    going_on(services, reads=False)
    plain = graph_runner._resolve_attention_variant(None, 2)
    going_on(services, reads=True)
    compressed = graph_runner._resolve_attention_variant(None, 2)
    keys = {graph_runner._make_graph_key(2, attention_variant=v) for v in (plain, compressed)}
    assert len(keys) == 2
    assert set(variants.capture_labels) == {plain, compressed}


def test_the_stock_graph_of_a_batch_size_is_captured_last(services):
    """FlashInfer plans every replay in the buffers of the last capture of its batch size."""
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

    backend = object.__new__(FlashInferAttnBackend)
    backend.decode_cuda_graph_metadata = {}
    made = iter(["first", "second"])
    backend._create_decode_wrappers = lambda bs, num_tokens: next(made)
    labels = graphs.GraphVariants(services).capture_labels
    for _ in labels:
        backend._prepare_cuda_graph_metadata(8, 8, ForwardMode.DECODE, None)
    assert backend.decode_cuda_graph_metadata == {8: "second"}
    assert labels[-1] == graphs.PLAIN


def test_graphs_without_the_variant_are_refused(services):
    def runner(sizes, variants):
        graph_runner = SimpleNamespace(attention_graph_variants=variants)
        return SimpleNamespace(
            decode_cuda_graph_capture_bs=sizes, decode_cuda_graph_runner=graph_runner
        )

    graphs.verify(runner([], None))  # nothing was captured
    graphs.verify(runner([1, 2], graphs.GraphVariants(services)))
    with pytest.raises(Refused, match=r"without one that reads compressed entries; .*\.$"):
        graphs.verify(runner([1, 2], None))


def test_a_batch_that_notes_queries_replays_the_graph_that_does(services):
    variants = graphs.GraphVariants(services)
    going_on(services, reads=False, notes=True)
    assert variants.select(None) == graphs.COMPRESSED
    going_on(services, reads=False)
    assert variants.select(None) == graphs.PLAIN


def test_the_backends_of_both_phases_are_verified():
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    hybrid = object.__new__(HybridAttnBackend)
    hybrid.prefill_backend, hybrid.decode_backend = Stock(), Stock()
    runner = SimpleNamespace(attn_backend=hybrid)
    assert compat.backends_in_use(runner) == [hybrid.prefill_backend, hybrid.decode_backend]
    runner.attn_backend = hybrid.decode_backend
    assert compat.backends_in_use(runner) == [hybrid.decode_backend]
