"""The memory of a decoding request, as a server uses it."""

from __future__ import annotations

import gc
from copy import copy
from functools import partial
from random import Random

import numpy as np
import pytest
import torch
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.decode.memory import Memory
from kvpolicy.dsl.execute.decode.requests import follow_together
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.tensors.kernels import Entries
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.source import Source
from recordings import both, tensors
from remembered import remembered
from shipped_policies import shipped_program

SHAPE = (2, 4, 2, 4)
HEADER = "policy: a-test\nlanguage: 1\nabout: a test\n"
SMALL = {
    "h2o": {"heavy": "3", "window": "3"},
    "cam": {"start": "1", "window": "4", "reach": "3"},
    "d2o": {"rate": "0.5"},
    "tova": {"capacity": "6"},
    "roco": {"capacity": "4", "newest": "1"},
    "streamingllm": {"start": "1", "window": "4"},
}


def policy(text: str):
    return bind(load(Source("a-test.yaml", HEADER + text)).require(), ModelShape(*SHAPE))


def shipped(name: str, **more):
    return bind(shipped_program(name), ModelShape(*SHAPE), SMALL[name], **more)


def prefill(bound, tokens=12, seed=0) -> Memory:
    q, k, v = (torch.tensor(x) for x in tensors(np.random.default_rng(seed), SHAPE, tokens, 0)[:3])
    run = TorchProgram(bound).start(tokens)
    for layer in range(SHAPE[0]):
        run.observe(layer, q[layer], k[layer], v[layer])
    finished = run.finish()
    if bound.folded.prefill.merge is not None:
        for layer in range(SHAPE[0]):
            finished.merged(layer, k[layer], v[layer])
    return Memory.after(finished)


class Server:
    """Computes keys and values from positions, so that a memory needs no store.

    Attributes:
        asked: what the last step has read.
    """

    def __init__(self, memory: Memory, poison: float | None = None) -> None:
        self.memory, self.poison = memory, poison
        self.asked: list[str] = []

    def tensors(self, layer: int, kind: int, positions: torch.Tensor) -> torch.Tensor:
        place = positions[:, None] * 0.7 + torch.arange(SHAPE[3]) * 1.3
        head = torch.arange(SHAPE[2])[:, None, None]
        return torch.sin(place * (1 + head) + layer + kind).float()

    def queries(self, position: int) -> torch.Tensor:
        self.asked.append("queries")
        places = torch.arange(SHAPE[1] * SHAPE[3])
        own = [torch.cos(places * (position + i + 1.0)) for i in range(SHAPE[0])]
        return torch.stack(own).view(-1, 1, SHAPE[3])

    def rows(self, layer: int, positions: torch.Tensor, there: torch.Tensor | None):
        """Keys and values [G, M, D] of a layer."""
        rows = [self.tensors(layer, kind, positions) for kind in (1, 2)]
        if self.poison is not None and there is not None:
            rows = [x.masked_fill(~there[..., None], self.poison) for x in rows]
        return tuple(rows)

    def entries(self, position: int, there: torch.Tensor) -> tuple[Entries, Entries]:
        self.asked.append("entries")
        pools, ids = ([], []), torch.zeros(there.shape, dtype=torch.int64)
        for layer in range(SHAPE[0]):
            positions = torch.cat([self.before[layer], torch.tensor([position])])
            own = slice(layer * SHAPE[2], (layer + 1) * SHAPE[2])
            held = there[own, there.shape[1] - len(positions) :]
            first = sum(map(len, pools[0]))
            places = torch.arange(held.numel()).view(held.shape) + first
            ids[own, there.shape[1] - len(positions) :] = places
            for pool, x in zip(pools, self.rows(layer, positions, held), strict=True):
                pool.append(x.flatten(0, 1))
        return tuple(Entries(torch.cat(pool), ids) for pool in pools)

    def step(self, position: int, *, leaves: bool = True) -> list:
        """Takes one step of all layers; each layer's choice, or None if no entries leave."""
        memory, self.asked = self.memory, []
        self.before = [remembered(memory, layer)[0] for layer in range(SHAPE[0])]
        staying = follow_together(
            [memory], [[position]], torch.tensor([position]), partial(self.queries, position),
            partial(self.entries, position), leaves=leaves,
        )  # fmt: skip
        if staying is None or not memory.numbers().finite:
            return [None] * SHAPE[0]

        def read(layer, there):
            positions = torch.cat([self.before[layer], torch.tensor([position])])
            return self.rows(layer, positions, there)

        made = staying.choices(0, read, slots=memory.bound.positions == "slots")
        dropped = memory.numbers().dropped
        return [x if number else None for x, number in zip(made, dropped, strict=True)]


def held(memory: Memory) -> list[list[list[int]]]:
    result = []
    for layer in range(SHAPE[0]):
        positions, there = remembered(memory, layer)
        result.append([positions[own].tolist() for own in there])
    return result


@pytest.mark.parametrize("name", sorted(SMALL))
def test_rows_that_are_not_there_do_not_matter(name):
    plain, poisoned = (Server(prefill(shipped(name)), poison) for poison in (None, float("nan")))
    for position in range(12, 20):
        for a, b in zip(plain.step(position), poisoned.step(position), strict=True):
            assert (a is None) == (b is None)
            if a is None:
                continue
            assert torch.equal(a.kept, b.kept)
            for x, y in zip(a.rows, b.rows, strict=True):
                assert x is None or torch.equal(x[a.kept], y[a.kept])
        assert held(plain.memory) == held(poisoned.memory)
    assert not poisoned.memory.not_finite


def test_some_heads_hold_different_tokens():
    """Otherwise the test above would be empty."""
    server = Server(prefill(shipped("h2o")))
    server.step(12)
    assert any(layer[0] != layer[1] for layer in held(server.memory))


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_while_decoding_keeps_everything(where):
    bound = policy(
        "state: {heat: 'heat + sum[group, query](attn(new))'}\n"
        "score: heat * norm1[dim](value)\nbudget: 5\nkeep: recent(2) then top(score)\n"
        "decode: same\n"
    )
    server = Server(prefill(bound))
    before = held(server.memory)
    queries, tensors_of = server.queries, server.tensors

    def poisoned(x: torch.Tensor) -> torch.Tensor:
        x[-1, -1, 1] = float("nan")
        return x

    if where == "q":
        server.queries = lambda position: poisoned(queries(position))
    else:
        server.tensors = lambda layer, kind, positions: (
            poisoned(tensors_of(layer, kind, positions))
            if kind == " kv".index(where) else tensors_of(layer, kind, positions)
        )  # fmt: skip
    assert server.step(12) == [None, None]
    assert server.memory.not_finite
    assert held(server.memory) == [[[*own, 12] for own in heads] for heads in before]
    for position in range(13, 16):
        server.step(position)
        assert server.asked == []
    assert held(server.memory)[1][0][-4:] == [12, 13, 14, 15]


def test_nan_between_folds_stops_the_next_one():
    server = Server(prefill(shipped("h2o", fold_interval=3)))
    for position in range(12, 15):
        server.step(position)
    assert any(held(server.memory)[0][0][i] != i for i in range(6))
    before = held(server.memory)
    good = server.tensors
    server.tensors = lambda *args: good(*args) * float("inf")
    server.step(15)
    server.tensors = good
    server.step(16)
    assert server.step(17) == [None, None]
    assert server.memory.not_finite
    assert held(server.memory) == [[[*head, 15, 16, 17] for head in own] for own in before]


def test_what_a_step_asks_for():
    asked = []
    for name, every in (("h2o", 2), ("streamingllm", 3), ("tova", 2), ("roco", 2)):
        server = Server(prefill(shipped(name, fold_interval=every)))
        seen = []
        for position in range(12, 16):
            server.step(position)
            seen.append(sorted(server.asked))
        asked.append(seen)
    both_kinds = ["entries", "queries"]
    assert asked == [
        [both_kinds] * 4,  # heat advances at every step
        [[]] * 4,  # positions alone decide
        [[], both_kinds] * 2,
        [both_kinds] * 4,
    ]


def test_last_queries_are_kept_from_the_prefill_on():
    text = (
        "score: sum[head, query](attn(recent(3)))\nbudget: 6\nkeep: top(score)\n"
        "decode: {when: generated == 2}\n"
    )
    server = Server(prefill(policy(text)))
    assert server.memory.bound.step_queries(12) == 3
    server.step(12)
    assert server.asked == ["queries"]
    block, _ = server.memory.block
    assert block.last_queries.positions.tolist() == [[10, 11, 12]] * SHAPE[0]
    assert torch.equal(block.last_queries.queries[:, 2:], server.queries(12))


@pytest.mark.parametrize("name", sorted(SMALL))
def test_copies_go_on_alone(name):
    """A copy decides as the original would, and does not change it."""
    server = Server(prefill(shipped(name)))
    for position in range(12, 15):
        server.step(position)
    alone = Server(copy(server.memory))
    before = held(server.memory)
    for position in range(15, 18):
        alone.step(position)
    assert held(server.memory) == before
    for position in range(15, 18):
        server.step(position)
    assert held(server.memory) == held(alone.memory)
    assert server.memory.generated == alone.memory.generated == 6


def _bytes(memory: Memory) -> int:
    """Bytes of all tensors that the memory reaches."""
    seen = {id(memory.bound), id(memory.steps)}  # not the request's own
    waiting: list[object] = [memory]
    total = 0
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, type):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            total += each.untyped_storage().nbytes()
        elif isinstance(each, dict | list | tuple | set) or hasattr(each, "__dict__"):
            waiting.extend(gc.get_referents(each))
        elif hasattr(each, "__slots__"):
            waiting.extend(getattr(each, name) for name in each.__slots__)
    return total


@pytest.mark.thorough(every=3)
@pytest.mark.parametrize("name", ["h2o", "cam", "d2o", "streamingllm", "tova"])
def test_long_generations_do_not_grow(name):
    server = Server(prefill(shipped(name)))
    sizes = []
    for position in range(12, 132):
        server.step(position)
        if position % 40 == 11:
            sizes.append(_bytes(server.memory))
    assert len(sizes) == 3
    assert max(sizes) <= 1.2 * min(sizes)


def test_states_without_next_and_of_the_layer():
    text = (
        "state:\n  born:\n    start: sum[group, query](attn(new))\n"
        "  age:\n    start: 10\n    next: age + 1\n"
        "score: born + 0 * norm1[dim](key)\nbudget: 4\nkeep: top(score)\n"
        "decode:\n  budget: 4 + age % 3\n"
    )
    both(policy(text), *tensors(np.random.default_rng(5), SHAPE, 12, 7))
    server = Server(prefill(policy(text), 12))
    sizes = []
    for position in range(12, 18):
        server.step(position)
        sizes.append(len(held(server.memory)[0][0]))
    # 10 after `start`, 11 after the prefill, 12 at the first step.
    assert sizes == [4, 5, 6, 4, 5, 6]


def test_random_layouts_do_not_depend_on_the_union():
    """Pooling and ranks see only a head's own entries."""
    random = Random(3)
    text = (
        "state: {heat: 'heat + sum[group, query](attn(new))'}\n"
        "score: maxpool(rank(heat), 3) + avgpool(norm1[dim](key), 5)\nbudget: 5\n"
        "keep: recent(1) then top(score)\ndecode: same\n"
    )
    server = Server(prefill(policy(text)))
    for position in range(12, 30):
        choice = random.choice(server.step(position))
        assert choice is not None
        assert choice.kept.sum(1).tolist() == [5, 5]
