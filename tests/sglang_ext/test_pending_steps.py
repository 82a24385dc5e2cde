"""Queries of decode steps: which are noted, how long they are held, and what policies are shown."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.sglang_ext.request import queries
from kvpolicy.sglang_ext.request.pending_steps import LONGEST, PendingSteps, wanted
from kvpolicy.sglang_ext.request.queries import QueryBuffer, may_read, queries_of
from kvpolicy.sglang_ext.request.request import Decoding, State

POLICIES = Path(__file__).parents[2] / "policies"
LAYERS, HEADS, SIZE = 3, 4, 8
SHAPE = ModelShape(layers=LAYERS, heads=HEADS, kv_heads=2, head_dim=SIZE)
WINDOWED = """policy: windowed
language: 1
about: x
score: sum[group](sum[query](attn(recent(5))))
budget: 20
keep: top(score)
decode: same
"""


def program(name):
    return load(str(POLICIES / f"{name}.yaml")).require()


def layer(number, scaling=SIZE**-0.5):
    return SimpleNamespace(layer_id=number, scaling=scaling, qk_head_dim=SIZE)


def computed(buffer, rows, step, scaling=SIZE**-0.5):
    """One decode forward of so many rows; its queries [L, rows, H, D]."""
    generator = torch.Generator().manual_seed(step)
    q = torch.randn(LAYERS, rows, HEADS, SIZE, generator=generator)
    for number, heads in enumerate(q):
        buffer.write(layer(number, scaling), heads, LAYERS)
    return q


@pytest.mark.parametrize(
    ("name", "reads", "steps"),
    [
        ("snapkv", False, 0),
        ("streamingllm", False, 0),
        ("tova", True, 1),
        ("cake", True, 1),
        ("h2o", True, None),
        ("d2o", True, None),
        ("roco", True, None),
    ],
)
def test_only_queries_that_a_policy_reads_are_noted(name, reads, steps):
    assert may_read(program(name)) == reads
    assert wanted(bind(program(name), SHAPE), 100) == steps


def test_the_last_queries_are_noted_where_a_window_is_read(tmp_path):
    path = tmp_path / "windowed.yaml"
    path.write_text(WINDOWED)
    made = load(str(path)).require()
    assert may_read(made)
    bound = bind(made, SHAPE, fold_interval=16)
    assert wanted(bound, 100) == 5
    memory = SimpleNamespace(prompt=100, not_finite=False)
    state = State(SimpleNamespace(bound=bound), 100, 0, decoding=Decoding(memory, PendingSteps(5)))
    noted = [step for step in range(1, 40) if state.reads_queries(step)]
    assert noted == [12, 13, 14, 15, 16, 28, 29, 30, 31, 32]
    state.skipped.add(16)
    assert not any(state.reads_queries(step) for step in range(1, 28))
    memory.not_finite = True
    assert not state.reads_queries(30)


def test_a_request_finds_its_own_rows_of_every_step():
    buffer, pending = QueryBuffer([program("h2o")]), PendingSteps(None)
    expected = []
    # Other requests join and leave, and the batch becomes larger than any before.
    for step, (rows, followed, own) in enumerate([(2, [1], 0), (1, [0], 0), (5, [0, 2, 4], 1)]):
        q = computed(buffer, rows, step)
        pending.add(50 + step, (buffer.take(followed, rows), own))
        expected.append(q[:, followed[own]])
    computed(buffer, 5, 9)  # what is noted later is another step's
    shown = queries_of([pending], buffer)
    assert torch.equal(shown, torch.stack(expected, 2).flatten(0, 1))
    assert pending.positions == [50, 51, 52]
    pending.clear()
    assert not pending.rows
    assert not pending.positions


def test_captured_batches_and_larger_ones_are_found_where_they_were_written():
    buffer = QueryBuffer([program("h2o")])
    buffer.reserve((LAYERS, 3, HEADS, SIZE), torch.float32, torch.device("cpu"))
    captured = buffer.captured
    for step, rows in enumerate([2, 5, 3, 4, 1]):
        q = computed(buffer, rows, step)
        assert torch.equal(buffer.take(range(rows), rows), q)
        assert buffer.captured is captured
    assert buffer.larger.shape[1] == 5


@pytest.mark.parametrize("scaling", [SIZE**-0.5, 1.0])
def test_requests_are_shown_together_what_each_is_shown_alone(scaling):
    """In any order, some of those that were noted, and where these were not always the same."""
    for followed in ([[0, 2, 3]] * 3, [[0, 2, 3], [0, 1, 2, 3], [0, 2, 3]]):
        buffer = QueryBuffer([program("h2o")])
        own = {row: PendingSteps(None) for row in (0, 2, 3)}
        for step, rows in enumerate(followed):
            computed(buffer, 4, step, scaling)
            taken = buffer.take(rows, 4)
            for row, pending in own.items():
                pending.add(step, (taken, rows.index(row)))
        for chosen in ([0, 2, 3], [3, 0], [2]):
            made = queries_of([own[row] for row in chosen], buffer)
            made = made.view(len(chosen), LAYERS, HEADS, 3, SIZE)
            for each, row in zip(made, chosen, strict=True):
                alone = queries_of([own[row]], buffer).view(each.shape)
                torch.testing.assert_close(each, alone, rtol=0, atol=0)


def test_queries_are_scaled_as_a_policys_attention_is():
    buffer, pending = QueryBuffer([program("h2o")]), PendingSteps(None)
    q = computed(buffer, 1, 0, scaling=1.0)
    pending.add(7, (buffer.take([0], 1), 0))
    shown = queries_of([pending], buffer).view(LAYERS, HEADS, 1, SIZE)
    torch.testing.assert_close(shown[1, :, 0], q[1, 0] * SIZE**0.5)


def test_of_a_window_only_the_last_queries_are_held():
    buffer, pending = QueryBuffer([program("tova")]), PendingSteps(2)
    q = [computed(buffer, 1, 0)]
    pending.add(0, None)
    for step in range(1, 5):
        q.append(computed(buffer, 1, step))
        pending.add(step, (buffer.take([0], 1), 0))
    assert len(pending.rows) == 2
    assert not pending.full(1)  # they are not more than it holds anyway
    shown = queries_of([pending], buffer).view(LAYERS, HEADS, 2, SIZE)
    assert torch.equal(shown[2, :, 0], q[3][2, 0])
    assert torch.equal(shown[2, :, 1], q[4][2, 0])


def test_steps_that_gather_are_bounded_in_number_and_in_bytes(monkeypatch):
    buffer, pending = QueryBuffer([program("h2o")]), PendingSteps(None)
    assert buffer.most_steps(10) == LONGEST
    row = LAYERS * HEADS * SIZE * 4
    buffer.reserve((LAYERS, 8, HEADS, SIZE), torch.float32, torch.device("cpu"))
    monkeypatch.setattr(queries, "LARGEST", 20 * row)
    assert [buffer.most_steps(n) for n in (0, 1, 4, 8, 30)] == [LONGEST, 20, 5, 2, 1]
    folding = QueryBuffer([program("h2o")], interval=4)
    folding.reserve((LAYERS, 8, HEADS, SIZE), torch.float32, torch.device("cpu"))
    assert [folding.most_steps(n) for n in (0, 1, 4, 8, 30)] == [LONGEST, 20, 5, 4, 4]
    for step in range(5):
        assert not pending.full(5)
        pending.add(step, (buffer.take([0], 1), 0))
    assert pending.full(5)
