"""Memory beside the KV pool is taken off the pool when SGLang sizes it."""

import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")

from kvpolicy.kernels.attention.decode_attention_triton import Workspace, workspace_elements
from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.memory.tables import DeviceTables
from kvpolicy.sglang_ext.request.pending_steps import LONGEST
from kvpolicy.sglang_ext.request.queries import LARGEST, most_bytes
from kvpolicy.sglang_ext.serving import reserved

LAYERS, HEADS, KV_HEADS, SIZE, CONTEXT = 3, 6, 2, 16, 100
SLOT = LAYERS * 2 * KV_HEADS * SIZE * 2  # bytes of a bfloat16 token


class Configurator:
    """Replaces SGLang's configurator; the profiled memory is given."""

    def __init__(self, page=1, requests=None, **options):
        self.page, self.requests, self.device = page, requests, "cpu"
        self.model_dtype = torch.bfloat16
        self.model_config = SimpleNamespace(
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            get_total_num_kv_heads=lambda: KV_HEADS,
            head_dim=SIZE,
            context_len=CONTEXT,
        )
        self.server_args = SimpleNamespace(
            **{
                "max_total_tokens": None,
                "page_size": page,
                "tp_size": 1,
                "pp_size": 1,
                "mem_fraction_static": 0.8,
                "captured": 0,
                "decode": "triton",
                **options,
            }
        )

    def resolve_max_num_reqs(self, tokens):
        return min(self.requests or 2048, tokens // 2)

    def sizes(self, budget):
        tokens = budget // SLOT // self.page * self.page
        if self.server_args.max_total_tokens is not None:
            tokens = min(tokens, self.server_args.max_total_tokens // self.page * self.page)
        assert tokens > 0
        return SimpleNamespace(max_total_num_tokens=tokens)


@pytest.fixture(autouse=True)
def plain_options(monkeypatch):
    monkeypatch.setattr(compat, "resolved", lambda options: options)
    monkeypatch.setattr(compat, "captured_requests", lambda options: options.captured)
    monkeypatch.setattr(compat, "attention_backends", lambda options: ("triton", options.decode))


def serving(propagates=False, noted=False, shares=False):
    queries = SimpleNamespace(needed=noted)
    return SimpleNamespace(propagates=propagates, queries=queries, shares=shares)


def size(configurator, budget, **runtime):
    runtime = serving(**runtime)
    sizes = reserved.size_pool(runtime, configurator.sizes, configurator, budget)
    return sizes.max_total_num_tokens


def held(configurator, tokens, propagates=False, noted=False, shares=False):
    """Bytes that are really allocated beside a pool of `tokens` tokens."""
    requests = configurator.resolve_max_num_reqs(tokens)
    scratch = reserved.SCRATCH if propagates else 0
    rows = requests + 1 + scratch
    tables = DeviceTables.empty(rows, LAYERS, KV_HEADS, tokens, "cpu", pairs=shares)
    total = tables.bytes + scratch * (CONTEXT + 4) * 4
    captured = min(configurator.server_args.captured, requests)
    if captured and configurator.server_args.decode != "torch_native":
        device = torch.device("cpu")
        elements = workspace_elements(captured, HEADS, KV_HEADS, SIZE, device)
        workspace = Workspace.empty(elements, device)
        total += workspace.partial.nbytes + workspace.arrived.nbytes
        if noted:
            queries = torch.empty(LAYERS, captured, HEADS, SIZE, dtype=torch.bfloat16)
            total += queries.nbytes * (1 + LONGEST)
    return total


@pytest.mark.parametrize("budget", [5_000_000, 12_345_678, 40_000_001])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(
    ("options", "runtime"),
    [
        ({}, {}),
        ({"requests": 7}, {"propagates": True, "shares": True}),
        ({"captured": 64, "requests": 200}, {"noted": True}),
        ({"captured": 64, "requests": 9}, {"noted": True, "propagates": True}),
        ({"captured": 64, "decode": "torch_native"}, {"noted": True}),
    ],
)
def test_pool_and_what_lies_beside_it_fit_in_the_budget(budget, page, options, runtime):
    configurator = Configurator(page, **options)
    tokens = size(configurator, budget, **runtime)
    whole = budget // SLOT
    assert tokens < whole
    assert tokens * SLOT + held(configurator, tokens, **runtime) <= budget
    # Nothing is wasted but what rows and places of the tokens that are gone would have held.
    unused = budget - tokens * SLOT - held(configurator, tokens, **runtime)
    most = held(configurator, whole, **runtime) - held(configurator, tokens, **runtime)
    assert unused <= most + page * SLOT + 64 * 4 * reserved.SCRATCH


@pytest.mark.parametrize(("propagates", "scratch"), [(False, 0), (True, reserved.SCRATCH)])
def test_tables_are_computed_to_the_byte(propagates, scratch):
    configurator = Configurator(requests=9)
    runtime = serving(propagates=propagates)
    parts = reserved.bytes_by_part(runtime, configurator, configurator.server_args, 4000)
    rows = 9 + 1 + scratch  # row 0 is SGLang's padding
    tables = DeviceTables.empty(rows, LAYERS, KV_HEADS, 4000, "cpu", pairs=False)
    assert parts["tables"] == tables.bytes


@pytest.mark.parametrize("captured", [0, 8])
def test_lists_for_flashinfer_are_taken_off_the_pool(monkeypatch, captured):
    configurator = Configurator(requests=9, captured=captured, decode="flashinfer")
    for asked, reads in (("auto", False), ("triton", False), ("flashinfer", True)):
        monkeypatch.setenv("SGLANG_KV_POLICY_ATTENTION", asked)
        parts = reserved.bytes_by_part(serving(), configurator, configurator.server_args, 4000)
        assert ("lists for FlashInfer" in parts) == reads
    assert parts["lists for FlashInfer"] > 4 * LAYERS * 4000


def test_large_steps_are_noted_less_often():
    assert most_bytes(LARGEST // LONGEST, 1) == LARGEST // LONGEST + LARGEST
    assert most_bytes(LARGEST // 3, 1) == LARGEST // 3 * 4
    assert most_bytes(3 * LARGEST, 1) == 6 * LARGEST


def test_steps_between_two_folds_are_noted_however_large():
    assert most_bytes(LARGEST // 3, 16) == LARGEST // 3 * 17
    assert most_bytes(3 * LARGEST, 2 * LONGEST) == 3 * LARGEST * (1 + LONGEST)
    assert most_bytes(LARGEST // 32, 16) == LARGEST // 32 * 33


@pytest.mark.parametrize("given", [1000, 1007])
def test_the_operators_number_of_tokens_stays(given, caplog):
    configurator = Configurator(page=8, max_total_tokens=given)
    with caplog.at_level(logging.INFO):
        assert size(configurator, 1000 * SLOT + 10) == 1000
    assert "--max-total-tokens stays as given" in caplog.text


def test_a_number_of_tokens_that_never_had_room_is_made_smaller():
    configurator = Configurator(max_total_tokens=5000)
    tokens = size(configurator, 1000 * SLOT)
    assert tokens < 1000
    assert tokens * SLOT + held(configurator, tokens) <= 1000 * SLOT


def test_one_line_says_how_much_for_what(caplog):
    configurator = Configurator(captured=32, requests=400)
    with caplog.at_level(logging.INFO):
        tokens = size(configurator, 40_000_000, noted=True)
    (record,) = caplog.records
    parts = reserved.bytes_by_part(
        serving(noted=True),
        configurator,
        configurator.server_args,
        40_000_000 // SLOT,
    )
    mib = {what: f"{part / 2**20:.1f}" for what, part in parts.items()}
    assert parts["queries"] == LAYERS * 32 * HEADS * SIZE * 2 * (1 + LONGEST)
    assert record.getMessage() == (
        f"KV-cache policies take {sum(parts.values()) / 2**20:.1f} MiB of the device beside the KV "
        f"pool (tables {mib['tables']}, decode attention {mib['decode attention']}, queries "
        f"{mib['queries']}); the pool has {tokens} tokens, {40_000_000 // SLOT - tokens} fewer for "
        "it."
    )


def test_a_budget_without_room_is_refused_in_one_sentence():
    configurator = Configurator(requests=2000, mem_fraction_static=0.31)
    with pytest.raises(
        Refused,
        match=r"^--mem-fraction-static 0\.31 leaves 0\.0 MiB beside the weights, and KV-cache "
        r"policies need \d\.\d MiB of it; raise it, or lower --max-running-requests\.$",
    ):
        size(configurator, 40 * SLOT, propagates=True)


@pytest.mark.thorough
@pytest.mark.server
@pytest.mark.parametrize("page", [1, 8])
def test_a_servers_pool_leaves_room_for_what_is_allocated(scenario, page):
    run = partial(scenario, "scenarios_backends.py", env={"TRITON_INTERPRET": "1"})
    budget = 12_000_000
    found = run(
        "memory",
        budget=budget,
        captured=24,
        max_total_tokens=None,
        page_size=page,
        attention_backend="triton",
        max_running_requests=100,
    )
    ((tokens, computed),) = found["computed"]
    assert tokens == budget // found["slot"] // page * page
    beside = found["held"]
    assert beside["decode attention"] == computed["decode attention"]
    assert beside["queries"] * (1 + LONGEST) == computed["queries"]
    # Computed for the tokens that the pool would have had without it.
    assert 0 <= computed["tables"] - beside["tables"] <= 8 * (tokens - found["tokens"])
    assert found["tokens"] < tokens
    assert found["tokens"] * found["slot"] + sum(beside.values()) <= budget
    # SGLang's pool has a page more than it has tokens, for padding.
    assert found["pool"] == (found["tokens"] + page) * found["slot"]
