"""Reductions in blocks, prompts in chunks: the same values, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.operations import in_blocks as torch_blocks
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.syntax.source import Source
from recordings import both, in_chunks, tensors
from shipped_policies import shipped_program
from torch.utils._python_dispatch import TorchDispatchMode

SHAPE = (2, 8, 4, 6)
HEADER = "policy: a-test\nlanguage: 1\nabout: a test\n"
RULES = "budget: 9\nkeep: recent(2) then top(score)\n"
SCORES = [
    "sum[group, query](attn({q}))",
    "mean[query](mean[group](attn({q})))",
    "max[group](var[query](attn({q})))",
    "min[group](max[query](attn({q}) where not recent(3)))",
    "count[group, query](attn({q}) > 0.1)",
    "sum[group](mean[query](attn({q}) * distance({q})))",
    "sum[token](var[head, query](logits({q}))) * norm2[dim](value)",
    "var[kv, group, query](attn({q}) / (1 + norm1[dim](key)))",
    "sum[group, query](attn({q}) / sum[query](attn({q})))",
    "sum[group, query](log(attn({q}) where position % 2 == 0)) + sum[dim](key * value)",
    "sum[group, query](attn({q}) where any[query](attn({q}) > 0.3) else 0)",
]


def bound(score: str, queries: str, update: str = "heat + sum[group, query](attn(new))"):
    text = (
        f"{HEADER}state:\n  heat: |\n    {update}\n"
        f"score: |\n  {score.replace('{q}', queries)}\n{RULES}"
    )
    return bind(load(Source("a-test.yaml", text)).require(), ModelShape(*SHAPE))


def scores(each, *prompt) -> torch.Tensor:
    finished = in_chunks(TorchProgram(each, report=True), prompt, ()).finish()
    return torch.stack(
        [torch.as_tensor(x.data) for x in finished.result(each.lowered.prefill.score)]
    )


@pytest.mark.thorough(every=3)
@pytest.mark.parametrize("queries", ["new", "all", "recent(7)"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("size", [1, 3 * 8 * 23 * 2])
def test_blocks_change_nothing(score, queries, size, monkeypatch):
    _compare_blocks(score, queries, size, monkeypatch)


@pytest.mark.parametrize(
    "score",
    [
        "mean[group, query](attn({q}) * index[query](attn({q})))",
        "count[group, query](top[token](attn({q}), 3))",
        "mean[group, query](rank[token](logits({q}) where not recent(3)))",
    ],
)
def test_blocks_count_and_order_as_the_whole(score, monkeypatch):
    _compare_blocks(score, "recent(7)", 1, monkeypatch)


@pytest.mark.parametrize("beside", ["", "merge: {into: next(1)}\n"])
def test_a_variance_with_an_infinite_value_is_none(beside, monkeypatch):
    """If a query precedes the token, the minimum over no heads is infinite."""
    monkeypatch.setattr(torch_blocks, "BLOCK_BYTES", 1)
    text = f"score: var[query](min[group](logits(recent(2))))\nkeep: top(score, 3)\n{beside}"
    each = bind(load(Source("a-test.yaml", HEADER + text)).require(), ModelShape(*SHAPE))
    both(each, *tensors(np.random.default_rng(4), SHAPE, 5, 0)[:3])


def _compare_blocks(score, queries, size, monkeypatch):
    each = bound(score if "[kv, token]" in score else f"{score} + 0 * norm1[dim](key)", queries)
    prompt = tensors(np.random.default_rng(4), SHAPE, 23, 0)[:3]
    whole = scores(each, *prompt)
    monkeypatch.setattr(torch_blocks, "BLOCK_BYTES", size)
    np.testing.assert_allclose(scores(each, *prompt), whole, rtol=1e-11, atol=1e-14)


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made._base is None:
            self.bytes = max(self.bytes, made.untyped_storage().nbytes())
        return made


def test_attention_of_all_queries_is_never_whole(monkeypatch):
    """Neither N x N values nor float64 copies of all heads exist at once."""
    monkeypatch.setattr(torch_blocks, "BLOCK_BYTES", 1 << 16)
    each = bound("heat", "new")
    tokens = 1000
    prompt = tensors(np.random.default_rng(0), SHAPE, tokens, 0)[:3]
    q_bytes = prompt[0][0].nbytes
    with _Largest() as largest:
        scores(each, *prompt)
    assert largest.bytes <= q_bytes
    assert q_bytes < 8 * tokens * tokens * SHAPE[1] / 300


@pytest.mark.parametrize("report", [False, True])
@pytest.mark.parametrize("name", shipped())
def test_no_attention_is_held_between_layers(name, report):
    program = TorchProgram(bind(shipped_program(name), ModelShape(*SHAPE)), report=report)
    for prompt in (1000, 10**9):  # one for which layers choose together, and one too long for it
        held = program.prefill(prompt).layer_roots
        assert not any("query" in node.type.axes for node in held)


@pytest.mark.parametrize(
    "update",
    [
        "heat + sum[group, query](attn(new))",
        "heat + sum[group](sum[query](attn(new)) * 0.5 - 2 * count[query](attn(all) > 0.1))",
        "heat + sum[group, query](attn(new) * (1 + position))",
    ],
)
@pytest.mark.parametrize("cuts", [(5,), (1, 2), (7, 16, 22), ()])
def test_chunks_are_one_prefill(update, cuts):
    each = bound("heat * norm1[dim](value)", "new", update)
    q, k, v = tensors(np.random.default_rng(2), SHAPE, 23, 0)[:3]
    program = TorchProgram(each, report=True)
    assert program.accumulates
    parts, alone = (in_chunks(program, (q, k, v), ends).finish() for ends in (cuts, ()))
    assert torch.equal(torch.stack(parts.kept), torch.stack(alone.kept))
    for one, other in zip(
        *(x.result(each.lowered.prefill.score) for x in (parts, alone)), strict=True
    ):
        np.testing.assert_allclose(one.data, other.data, rtol=1e-12)


@pytest.mark.parametrize(
    ("state", "accumulates"),
    [
        ("heat + sum[group, query](attn(new))", True),
        ("sum[query](mean[group](attn(new)) ^ 2) + heat", True),
        ("heat + count[group, query](attn(new) > 0.1)", True),
        ("heat + sum[query](attn(new)) / length", False),
        ("0.5 * heat + sum[query](attn(new))", False),
        ("max(heat, max[query](attn(new)))", False),
        ("heat + sum[query](attn(new) where not recent(2))", False),
        ("heat + sum[query](attn(new)) * norm1[dim](key)", False),
        # Of a chunk, these would be other numbers than of the whole prompt.
        ("heat + sum[group, query](attn(all) / sum[query](attn(all)))", False),
        ("heat + sum[group, query](attn(new) where attn(new) > mean[query](attn(new)))", False),
        ("heat + sum[group, query](attn(new) / max[token](attn(new)))", False),
        # A query that does not see a token adds to it.
        ("heat + count[group, query](not (attn(new) > 0.1))", False),
        ("heat + sum[group, query](attn(new) where attn(new) > 0.1 else 0.1)", False),
        ("heat + count[query](attn(new) > mean[token](1 where attn(new) > 1 else 2))", False),
    ],
)
def test_what_accumulates(state, accumulates):
    text = (
        f"{HEADER}state:\n  heat: |\n    {state}\nscore: heat where true\nbudget: 9\n"
        "keep: recent(2) then top(score)\n"
    )
    if "group" not in state:
        text = text.replace("score: heat where true", "score: sum[group](heat)")
    text = text.replace("heat where true", "heat")
    program = load(Source("a-test.yaml", text)).require()
    assert TorchProgram(bind(program, ModelShape(*SHAPE))).accumulates == accumulates


def test_what_else_needs_all_queries_does_not_accumulate():
    assert not TorchProgram(bound("heat + mean[head, query](attn(all))", "new")).accumulates
    assert TorchProgram(bound("heat + mean[head, query](attn(recent(2)))", "new")).accumulates
    assert not TorchProgram(bound("sum[group, query](attn(new))", "new")).accumulates
