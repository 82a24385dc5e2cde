"""The interpreter and the torch program keep the same entries: shipped policies and random ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.bind.bounds import max_entries
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.tools.commands import execute
from recordings import both, tensors
from shipped_policies import shipped_program

SHAPES = [(3, 4, 2, 8), (2, 2, 2, 4), (1, 4, 1, 3), (2, 8, 2, 5)]
SMALL = {"capacity": "11", "window": "4", "start": "2", "queries": "3", "reach": "5"}
VARIANTS = [
    {},
    {"threshold": "0.45"},
    {"average": "true"},
    {"strongest": "true", "concentrate": "true"},
    {"exact_total": "true"},
    {"alpha": "0.5"},
    {"rate": "0.3"},
]


def prompt(rng, shape, tokens, ties=False):
    """q, k, v."""
    return tensors(rng, shape, tokens, 0, ties)[:3]


def assert_same(bound, q, k, v):
    expected, _ = both(bound, q, k, v)
    kept = sum(int(layer.sum()) for layer in expected.kept)
    assert kept <= max_entries(bound, k.shape[2])


def only_selects(name: str) -> bool:
    """Whether a policy selects at the end of the prefill and does nothing else."""
    program = shipped_program(name)
    rules = program.prefill
    return not (program.propagate or program.decode or program.share or rules.states or rules.merge)


@pytest.mark.thorough(besides=["dynamickv", "sinks-recent"])
@pytest.mark.parametrize("name", [name for name in shipped() if only_selects(name)])
def test_shipped_policies(name):
    """Policies that only select; `test_steps.py` has all others."""
    program = shipped_program(name)
    seed = 0
    for shape in SHAPES:
        for tokens in (0, 1, 3, 4, 5, 11, 12, 23, 40):
            for variant in VARIANTS:
                if not set(variant) <= set(program.params):
                    continue
                given_ = {n: x for n, x in {**SMALL, **variant}.items() if n in program.params}
                bound = bind(program, ModelShape(shape[0], shape[1], shape[2], shape[3]), given_)
                seed += 1
                rng = np.random.default_rng(seed)
                assert_same(bound, *prompt(rng, shape, tokens, ties=seed % 3 == 0))


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "sinks-recent"])
def test_static_budgets_are_counted_exactly(name):
    """If no data decide the number of kept entries, the bound equals it."""
    program = shipped_program(name)
    given_ = {n: x for n, x in SMALL.items() if n in program.params}
    bound = bind(program, ModelShape(3, 4, 2, 4), given_)
    for tokens in range(1, 30):
        q, k, v = prompt(np.random.default_rng(tokens), (3, 4, 2, 4), tokens)
        kept = execute(bound, "torch", q, k, v).kept
        assert sum(int(layer.sum()) for layer in kept) == max_entries(bound, tokens)


@pytest.mark.parametrize("name", ["adakv", "lava", "dynamickv", "ada-pyramidkv"])
def test_bounds_of_data_dependent_budgets_are_tight(name):
    """At most half an entry of rounding per head above the nominal budget."""
    bound = bind(shipped_program(name), ModelShape(4, 8, 4, 8), {"capacity": "100"})
    nominal = 4 * 4 * 100 * (1.1 if name == "ada-pyramidkv" else 1)
    assert max_entries(bound, 1000) <= nominal + 4 * 4
    assert max_entries(bound, 60) == 4 * 4 * 60


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "sinks-recent"])
def test_permuted_heads(name):
    """If heads do not compete, each decides by itself."""
    program = shipped_program(name)
    given_ = {n: x for n, x in SMALL.items() if n in program.params}
    bound = bind(program, ModelShape(1, 4, 4, 8), given_)
    q, k, v = prompt(np.random.default_rng(5), (1, 4, 4, 8), 33)
    turn = [2, 0, 3, 1]
    kept = execute(bound, "torch", q, k, v).kept[0]
    turned = execute(bound, "torch", q[:, turn], k[:, turn], v[:, turn]).kept[0]
    assert np.array_equal(kept[turn], turned)


def _observe(program, q, k, v, dtype=torch.float32):
    run = program.start(k.shape[2])
    for layer in range(k.shape[0]):
        window = q[layer][:, q.shape[2] - run.queries :]
        run.observe(layer, *(torch.tensor(x).to(dtype) for x in (window, k[layer], v[layer])))
    return torch.stack(run.finish().kept)


@pytest.mark.parametrize("name", shipped())
def test_requests_do_not_disturb_each_other(name):
    """Two prefills in turn, layer by layer, keep what each keeps alone; inputs stay unchanged."""
    program = shipped_program(name)
    given_ = {n: x for n, x in SMALL.items() if n in program.params}
    shared = TorchProgram(bind(program, ModelShape(3, 4, 2, 8), given_))
    rng = np.random.default_rng(3)
    requests = [prompt(rng, (3, 4, 2, 8), tokens) for tokens in (29, 17, 29)]
    alone = [_observe(shared, *request) for request in requests]
    runs = [shared.start(request[1].shape[2]) for request in requests]
    inputs = [[torch.tensor(x) for x in request] for request in requests]
    for layer in range(3):
        for run, (q, k, v) in zip(reversed(runs), reversed(inputs), strict=True):
            queries = q[layer][:, q.shape[2] - run.queries :]
            # As a server holds them: tokens first.
            stored = [x[layer].transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v)]
            run.observe(layer, queries, *stored)
    for run, expected in zip(runs, alone, strict=True):
        assert torch.equal(torch.stack(run.finish().kept), expected)
    for request, copies in zip(requests, inputs, strict=True):
        assert all(np.array_equal(x, y.numpy()) for x, y in zip(request, copies, strict=True))


@pytest.mark.parametrize("name", ["snapkv", "lava", "adakv"])
def test_blocks_of_heads_change_nothing(name, monkeypatch):
    """Long prompts are scored a few KV heads at a time."""
    bound = bind(shipped_program(name), ModelShape(2, 8, 4, 8), {"capacity": "9", "window": "4"})
    request = prompt(np.random.default_rng(1), (2, 8, 4, 8), 37)
    whole = _observe(TorchProgram(bound), *request)
    monkeypatch.setattr("kvpolicy.dsl.execute.operations.in_blocks.BLOCK_BYTES", 1)
    assert torch.equal(_observe(TorchProgram(bound), *request), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["snapkv", "lava"])
def test_any_float(name, dtype):
    """Tensors of any dtype decide by their values; nothing is computed in that dtype."""
    bound = bind(shipped_program(name), ModelShape(2, 4, 2, 8), {"capacity": "9", "window": "4"})
    request = prompt(np.random.default_rng(2), (2, 4, 2, 8), 41)
    rounded = [torch.tensor(x).to(dtype).double().numpy() for x in request]
    expected = np.stack(execute(bound, "interpreter", *rounded).kept)
    assert np.array_equal(_observe(TorchProgram(bound), *request, dtype).numpy(), expected)


def test_nan_keeps_everything():
    """NaN or infinity in the model's tensors decides nothing: the prompt stays whole."""
    bound = bind(shipped_program("lava"), ModelShape(2, 4, 2, 4), {"capacity": "8", "window": "4"})
    for index in range(3):
        for value in (np.nan, np.inf):
            request = prompt(np.random.default_rng(0), (2, 4, 2, 4), 20)
            request[index][1, 0, 18, 2] = value
            run = TorchProgram(bound).start(20)
            for layer in range(2):
                run.observe(layer, *(torch.tensor(x[layer]) for x in request))
            assert torch.stack(run.finish().kept).all()
            assert run.not_finite


# Random policies. Every strategy gives the text of an expression with known axes.


def _scores(depth: int):
    """Texts of scores with axes [kv, token]."""
    heads = st.sampled_from(
        [
            "{r}[query](attn(recent(3)))",
            "{r}[query](attn(recent(3)) where not recent(3))",
            "{r}[query](logits(recent(2)))",
            "mean[query](attn(recent(4)) * distance(recent(4)))",
            "var[query](attn(recent(3)))",
            "count[query](attn(recent(3)) > 0.1)",
            "index[token](position) * sum[query](attn(recent(2)))",
        ]
    ).flatmap(lambda text: st.sampled_from(["sum", "mean", "max"]).map(lambda r: text.format(r=r)))
    base = st.one_of(
        st.sampled_from(
            ["sum[dim](value)", "norm1[dim](key)", "norm2[dim](value)", "cosine[dim](key, value)"]
        ),
        st.tuples(st.sampled_from(["sum", "mean", "max", "min", "var"]), heads).map(
            lambda pair: f"{pair[0]}[group]({pair[1]})"
        ),
        heads.map(lambda text: f"max[group](maxpool({text}, 3))"),
    )
    if depth == 0:
        return base
    inner = _scores(depth - 1)
    unary = st.sampled_from(
        [
            "abs({x})",
            "-({x})",
            "exp(-abs({x}))",
            "log({x})",
            "sqrt({x})",
            "floor(4 * {x})",
            "round({x} * 2)",
            "maxpool({x}, 3)",
            "avgpool({x}, 5)",
            "rank({x})",
            "rank[kv, token]({x})",
            "softmax[token]({x})",
            "minmax[kv, token]({x})",
            "({x} where position % 3 < 2)",
            "({x} where not recent(2))",
            "{x} / sum[token]({x})",
            "{x} - max[layer]({x})",
            "{x} * entropy[token](abs({x}))",
            "mean[layer]({x}) + {x}",
            "max[past](past({x}, 2))",
            "({x} where layer < 1 else position + 0 * {x})",
            "min({x}, mean[kv, token]({x}))",
        ]
    )
    binary = st.sampled_from(["{x} + {y}", "{x} * {y}", "{x} / {y}", "max({x}, {y})", "{x} - {y}"])
    return st.one_of(
        base,
        st.tuples(unary, inner).map(lambda p: p[0].format(x=f"({p[1]})")),
        st.tuples(binary, inner, inner).map(lambda p: p[0].format(x=f"({p[1]})", y=f"({p[2]})")),
        st.tuples(inner, inner).map(
            lambda p: f"(({p[0]}) where ({p[1]}) > 0.2 else sum[dim](value))"
        ),
    )


KEEPS = [
    "recent(3) then top(score)",
    "sinks(2) then recent(2) then top[kv, token](score)",
    "top(score)",
    "top[token, kv](score)",
    "top(score, 5)",
    "top(score, budget // 2) then recent(2) then top(score)",
    "recent(2) then top(score, 2) then top[layer, kv, token](score)",
    "top[layer, kv, token](score, 17)",
    "recent(2) then top(score) where max[kv, token](score) > 0.5 else all",
    "score > mean[token](score) or recent(1)",
    "top(max[kv](score), 4) then top(score)",
    "recent(2) then top(score) where 0 < layer else sinks(3)",
]
BUDGETS = [
    "7",
    "5 + layer * 3",
    "0.4 * length",
    "2 + split[layer](20, max[kv, token](score), max = length)",
    "1 + count[token](top[kv, token](score, 9))",
    "1 + 6 * max[token](score) / sum[layer](max[token](score))",
]


@pytest.mark.thorough
@settings(
    max_examples=120,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(score=_scores(2), keep=st.sampled_from(KEEPS), budget=st.sampled_from(BUDGETS))
def test_random_policies(score, keep, budget):
    text = (
        "policy: random\nlanguage: 1\nabout: random\n"
        f"score: |\n  {score}\nbudget: |\n  {budget}\nkeep: |\n  {keep}\n"
    )
    program = load(Source("random.yaml", text)).require()
    for seed, (shape, tokens) in enumerate([(SHAPES[0], 19), (SHAPES[2], 2), (SHAPES[1], 11)]):
        bound = bind(program, ModelShape(*shape))
        rng = np.random.default_rng(seed)
        assert_same(bound, *prompt(rng, shape, tokens, ties=seed == 2))
