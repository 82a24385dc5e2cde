"""Queries of decode steps: which are noted, how long they are held, and which policies read."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.sglang_ext.request import queries
from kvpolicy.sglang_ext.request.decode_rows import DecodeRows
from kvpolicy.sglang_ext.request.pending_steps import LONGEST, PendingSteps, wanted
from kvpolicy.sglang_ext.request.queries import QueryBuffer, may_read, queries_of
from kvpolicy.sglang_ext.request.request import Decoding, RequestState

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
    """One decode forward of `rows` rows; its queries [L, rows, H, D]."""
    generator = torch.Generator().manual_seed(step)
    q = torch.randn(LAYERS, rows, HEADS, SIZE, generator=generator)
    for number, heads in enumerate(q):
        buffer.write(layer(number, scaling), heads, range(LAYERS))
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
    memory = SimpleNamespace(prompt=100, not_finite=False, generated=0)
    state = RequestState(
        SimpleNamespace(bound=bound), 100, 0, decoding=Decoding(memory, PendingSteps(5))
    )

    def noted():
        return noted_and_leaving(state, 1, 40)[0]

    assert noted() == [12, 13, 14, 15, 16, 28, 29, 30, 31, 32]
    state.skipped.add(16)
    assert noted() == [28, 29, 30, 31, 32]
    memory.not_finite = True
    assert noted() == []


def noted_and_leaving(state, first, end):
    """Decode steps whose queries are noted, and those at which entries may leave."""
    request = SimpleNamespace(kv_policy_state=state)
    rows = DecodeRows([request], None, torch.device("cpu"))
    rows.renew(0, state.prompt + first)
    noted, leaving = [], []
    for step in range(first, end):
        lengths = np.array([state.prompt + step])
        noted += [step] * len(rows.noted(lengths))
        if len(rows.leaving(lengths)):
            leaving += [step] * state.leaves_at(step)
            rows.renew(0, state.prompt + step + 1)
    return noted, leaving


@pytest.mark.parametrize("later", [None, 0, 1, 7])
def test_steps_are_found_ahead_as_they_are_one_by_one(later):
    """Also if entries leave rarely, never, or often."""
    for when in ({3, 10, 11, 150, 320}, set(), set(range(1, 400)), {64, 65, 129, 200, 263}):
        bound = SimpleNamespace(
            leaves_at=lambda step, prompt, when=when: step in when,
            next_leaving=lambda step, prompt, most, when=when: next(
                (each for each in range(step, step + most) if each in when), None
            ),
        )
        memory = SimpleNamespace(prompt=100, not_finite=False, generated=0)
        decoding = Decoding(memory, PendingSteps(later))
        state = RequestState(
            SimpleNamespace(bound=bound), 100, 0, decoding=decoding, skipped={11, 200}
        )
        stays = when - {11, 200}
        noted, leaving = noted_and_leaving(state, 1, 350)
        assert leaving == [step for step in range(1, 350) if step in stays]
        read = lambda step, stays=stays: stays & {step + i for i in range(later or 0)}  # noqa: E731
        assert noted == [step for step in range(1, 350) if later is None or read(step)]


class Batches:
    """Decode forwards with a query buffer; policies read all queries, or the last `later`."""

    def __init__(self, later=None, scaling=SIZE**-0.5):
        self.buffer = QueryBuffer([program("tova" if later else "h2o")])
        self.later, self.scaling, self.rows, self.step = later, scaling, None, 0
        self.requests, self.read = {}, {}

    def begin(self, names):
        """Sets the requests of the following forwards."""
        if self.rows is not None:
            self.rows.hand_over()
        for name in names:
            if name not in self.requests:
                bound = SimpleNamespace(next_leaving=lambda step, prompt, most: step)
                memory = SimpleNamespace(prompt=9, not_finite=False, generated=0)
                decoding = Decoding(memory, PendingSteps(self.later))
                state = RequestState(SimpleNamespace(bound=bound), 9, 0, decoding=decoding)
                self.requests[name] = SimpleNamespace(kv_policy_state=state, length=9)
                self.read[name] = []
        self.names, chosen = names, [self.requests[name] for name in names]
        self.rows = DecodeRows(chosen, self.buffer, torch.device("cpu"))
        for row, request in enumerate(chosen):
            self.rows.renew(row, request.length + 1)

    def forward(self, batch=None):
        """One step of all requests, in a batch of `batch` rows."""
        for name in self.names:
            self.requests[name].length += 1
        lengths = np.array([self.requests[name].length for name in self.names])
        number = len(lengths) if batch is None else batch
        q = computed(self.buffer, number, self.step, self.scaling)
        self.step += 1
        noted = self.rows.noted(lengths)
        self.rows.note(noted, lengths, number)
        for row in noted:
            self.read[self.names[row]].append(q[:, row])

    def pending(self, name):
        return self.requests[name].kv_policy_state.pending

    def shown(self, names):
        """Queries [B, L, H, T, D] that these requests' policies read, which ends their steps."""
        self.rows.hand_over()
        made = queries_of([self.pending(name) for name in names], self.buffer)
        return made.view(len(names), LAYERS, HEADS, -1, SIZE)

    def followed(self, names):
        for name in names:
            state = self.requests[name].kv_policy_state
            state.pending.clear()
            self.read[name].clear()
            state.memory.generated = self.requests[name].length - 9
            self.rows.renew(self.names.index(name), self.requests[name].length + 1)

    def wanted(self, name):
        """The expected queries [L, H, T, D]."""
        read = self.read[name] if self.later is None else self.read[name][-self.later :]
        return torch.stack(read, 2)


def test_a_request_finds_its_own_rows_of_every_step():
    """Others join, leave and change places, and the batch becomes larger than before."""
    batches = Batches()
    for names in ("xab", "bya", "a", "vwxyzab"):
        batches.begin(names)
        for _ in range(2):
            batches.forward(len(names) + 2 * (names == "a"))
    assert torch.equal(batches.shown("a")[0], batches.wanted("a"))
    assert batches.shown("a").shape[3] == 8
    batches.followed("a")
    assert not batches.pending("a").parts
    batches.forward()
    assert torch.equal(batches.shown("a")[0], batches.wanted("a"))


def test_requests_are_shown_together_what_each_is_shown_alone():
    """In any order, for some of the noted requests, also if these changed between steps."""
    for later in (None, 2):
        batches = Batches(later)
        for names in ("abcd", "xdcba", "abcd"):
            batches.begin(names)
            batches.forward()
            batches.forward()
        for chosen in ("abcd", "da", "c"):
            made = batches.shown(chosen)
            for each, name in zip(made, chosen, strict=True):
                assert torch.equal(each, batches.wanted(name))
        # Of other phases: one has been taken through its steps, the others not.
        batches.followed("b")
        batches.forward()
        assert torch.equal(batches.shown("b")[0], batches.wanted("b"))
        made = batches.shown("dca")
        for each, name in zip(made, "dca", strict=True):
            assert torch.equal(each, batches.wanted(name))


def test_requests_that_joined_apart_are_shown_together_what_each_is_shown_alone():
    batches = Batches()
    for names in ("a", "xb"):
        batches.begin(names)
        batches.forward()
    batches.begin("ba")
    batches.forward()
    made = batches.shown("ab")
    for each, name in zip(made, "ab", strict=True):
        assert torch.equal(each, batches.wanted(name))


def test_no_more_steps_are_held_than_some_request_is_to_be_taken_through():
    batches = Batches()
    batches.begin("ab")
    for step in range(1, 9):
        batches.forward()
        if step % 4 == 0:
            batches.rows.hand_over()
            batches.followed("a" if step == 4 else "ab")
    assert not batches.pending("a").parts
    assert not batches.pending("b").parts
    assert not batches.rows._live
    batches.begin("b")
    batches.forward()
    batches.begin("b")
    assert [len(part.steps) for part in batches.pending("b").parts] == [1]


def test_captured_batches_and_larger_ones_are_found_where_they_were_written():
    buffer = QueryBuffer([program("h2o")])
    buffer.reserve((LAYERS, 3, HEADS, SIZE), torch.float32, torch.device("cpu"))
    captured = buffer.captured
    for step, rows in enumerate([2, 5, 3, 4, 1]):
        q = computed(buffer, rows, step)
        assert torch.equal(buffer.take(torch.arange(rows), rows), q.transpose(0, 1))
        assert buffer.captured is captured
    assert buffer.larger.shape[1] == 5


def test_queries_are_scaled_as_a_policys_attention_is():
    batches = Batches(scaling=1.0)
    batches.begin("a")
    batches.forward()
    torch.testing.assert_close(batches.shown("a")[0], batches.wanted("a") * SIZE**0.5)


def test_of_a_window_only_the_last_queries_are_held():
    batches = Batches(2)
    for names in ("a", "ba", "a"):
        batches.begin(names)
        for _ in range(3):
            batches.forward()
    batches.rows.hand_over()
    assert sum(len(part.steps) for part in batches.pending("a").parts) == 2
    lengths = np.array([batches.requests["a"].length])
    assert not len(batches.rows.must_advance(lengths, 1))  # they are not more than it holds anyway
    assert torch.equal(batches.shown("a")[0], batches.wanted("a"))


def test_steps_that_gather_are_bounded_in_number_and_in_bytes(monkeypatch):
    buffer = QueryBuffer([program("h2o")])
    assert buffer.most_steps(10) == LONGEST
    row = LAYERS * HEADS * SIZE * 4
    buffer.reserve((LAYERS, 8, HEADS, SIZE), torch.float32, torch.device("cpu"))
    monkeypatch.setattr(queries, "LARGEST", 20 * row)
    assert [buffer.most_steps(n) for n in (0, 1, 4, 8, 30)] == [LONGEST, 20, 5, 2, 1]
    folding = QueryBuffer([program("h2o")], interval=4)
    folding.reserve((LAYERS, 8, HEADS, SIZE), torch.float32, torch.device("cpu"))
    assert [folding.most_steps(n) for n in (0, 1, 4, 8, 30)] == [LONGEST, 20, 5, 4, 4]
    batches = Batches()
    batches.begin("ab")
    for _ in range(4):
        batches.forward()
        lengths = np.array([batches.requests[name].length for name in "ab"])
        assert not len(batches.rows.must_advance(lengths, 5))
    batches.forward()
    assert batches.rows.must_advance(lengths + 1, 5).tolist() == [0, 1]
    batches.followed("b")
    assert batches.rows.must_advance(lengths + 1, 5).tolist() == [0]
