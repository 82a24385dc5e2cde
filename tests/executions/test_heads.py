"""KV heads divided over ranks: the same entries are kept as by one process."""

import itertools
import threading
from unittest.mock import patch

import numpy as np
import pytest
import torch
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.planned.steps import Steps
from kvpolicy.dsl.execute.prefill.finished import FinishedPrefill
from kvpolicy.dsl.execute.prefill.run import Run
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.tensors.heads import Divided
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.tools.trial_cases import sampled
from kvpolicy.kernels.table import REFERENCE
from kvpolicy.kernels.table_triton import TRITON
from moments import assert_same_moments, kept
from ranks import Ranks, kept_by_ranks
from recordings import tensors
from shipped_policies import shipped_program

SHAPE = (4, 8, 4, 8)  # L, H, G, D
STEPS, EVERY = 9, 3
SMALL = {"capacity": "10", "window": "4", "kernel": "3"}
SETTINGS = {
    "asl-lava-d2o": {"start": "1", "lookback": "2"},
    "asl": {"capacity": "14", "deeper": "12", "start": "1", "lookback": "2"},
    "cam-original": {"recent_rate": "0.3", "start_rate": "0.1", "reach": "3"},
    "cam": {"start": "2", "reach": "3"},
    "d2o-code": {"rate": "0.4", "start": "1"},
    "d2o": {"rate": "0.4", "start": "2", "minmax_heads": "true"},
    "fastkv-adakv": {"tsp_layer": "2", "tsp_rate": "0.5", "kv_rate": "0.3"},
    "fastkv": {"tsp_layer": "2", "tsp_rate": "0.5", "kv_rate": "0.3"},
    "gemfilter": {"filter": "2"},
    "h2o": {"heavy": "5"},
    "pyramidinfer": {"batch": "2", "recent_rate": "0.1", "least": "4"},
    "roco": {"newest": "2"},
    "simlayerkv-prefill": {"queries": "8", "reach": "3", "threshold": "0.3"},
    "simlayerkv": {"threshold": "0.2", "start": "2"},
    "streamingllm-original": {"start": "2"},
    "streamingllm": {"start": "2"},
    "vatp": {"start": "2"},
}


def bound_to(name):
    program = shipped_program(name)
    small = {key: x for key, x in SMALL.items() if key in program.params}
    return bind(program, ModelShape(*SHAPE), small | SETTINGS.get(name, {}), fold_interval=EVERY)


def assert_same(bound, tokens, number, seed, ties=False, shape=SHAPE, **more):
    """Checks `number` ranks against one; returns bytes per exchange, of the prompt and of folds.

    With more ranks than KV heads, ranks that hold the same KV head keep the same entries.
    """
    *recording, steps = tensors(np.random.default_rng(seed), shape, tokens, STEPS, ties=ties)
    whole = kept(bound, recording, steps, TorchProgram(bound, **more))
    ranks, ends = Ranks(number), [0]
    done = lambda: ends.append(len(ranks.sent))  # noqa: E731
    assert_same_moments(kept_by_ranks(ranks, bound, recording, steps, done, **more), whole)
    prompt, *folds = (ranks.sent[i:j] for i, j in itertools.pairwise(ends))
    return prompt, folds


TENSORS = (
    "policy: a-test\nlanguage: 1\ndata: {gate: {axes: [layer, kv]}, weight: {axes: [kv, group]}}\n"
)


@pytest.mark.parametrize(
    "rules",
    [
        "keep: all where top[layer, kv](gate, 7) else sinks(2) then recent(4)\ndecode: same\n",
        "score: norm1[dim](key) * gate\nbudget: 9 * gate + 2\nkeep: recent(2) then top(score)\n"
        "decode: same\n",
        "score: max[group, query](attn(recent(3)) * weight)\nkeep: top[kv, token](score, 30)\n",
    ],
)
def test_tensors_of_the_model(rules):
    shape = ModelShape(*SHAPE)
    program = sampled(load(Source("a-test.yaml", TENSORS + rules)).require(), shape)
    bound = bind(program, shape, fold_interval=EVERY)
    for seed, (tokens, number) in enumerate([(41, 2), (23, 4), (1, 2), (31, 8)]):
        assert_same(bound, tokens, number, seed)
    assert_same(bound, 37, 2, 5, deferred_bytes=0)


@pytest.mark.thorough(besides=["h2o", "asl"])
@pytest.mark.parametrize("name", shipped())
def test_shipped_policies(name):
    bound = bound_to(name)
    for seed, (tokens, number) in enumerate([(41, 2), (23, 4), (1, 2)]):
        assert_same(bound, tokens, number, seed, ties=seed == 1)
    assert_same(bound, 31, 8, 7)  # more ranks than KV heads
    assert_same(bound, 37, 2, 5, deferred_bytes=0)  # as of long prompts
    with patch.object(Steps, "by_kernels", True):  # all layers at once where that is possible
        assert_same(bound, 29, 2, 6)


NUMBER = SHAPE[0] * 2 * 8  # bytes: a float64 per layer and KV head of a rank
FINITE = 2  # bytes: whether all was finite of each KV head of a rank
WIDEST = [8]  # bytes: of the layer that holds most, which a server's own numbers say
# Bytes of each exchange of a prompt whose layers choose at once, and exchanges of a fold.
EXCHANGES = {
    "adakv": ([41 * NUMBER + FINITE], 0), "lava": ([NUMBER + FINITE, NUMBER, 41 * NUMBER], 0),
    "dynamickv": ([41 * NUMBER + FINITE, NUMBER], 0), "snapkv": ([FINITE], 0),
    "cake": ([2 * NUMBER + FINITE, *WIDEST], 1), "h2o": ([FINITE, *WIDEST], 1),
    "vatp": ([FINITE, *WIDEST], 1), "d2o-code": ([2 * NUMBER + FINITE, *WIDEST, 2 * NUMBER], 1),
    "sinks-recent": ([], 0), "streamingllm": (WIDEST, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", EXCHANGES)
def test_what_is_exchanged(name):
    """Numbers per KV head and layer, or per token, in few exchanges, but never attention."""
    expected, each_fold = EXCHANGES[name]
    with patch.object(Steps, "by_kernels", True):
        prompt, folds = assert_same(bound_to(name), 41, 2, 0)
    assert prompt == expected
    assert {len(each) for each in folds} <= {0, each_fold}
    assert max(itertools.chain([0], *folds)) < 2 * 41 * NUMBER


@pytest.mark.thorough(besides=["h2o"])
@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("name", shipped())
def test_no_layer_and_no_fold_has_a_second_exchange(name, monkeypatch, tmp_path):
    """If kernels read the queries, as on a GPU.

    Comparing layers takes at most three exchanges; the merges of all layers take one.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here, exchange, seen = threading.local(), Divided._all, {}

    def exchanged(heads, tensors):
        here.number = getattr(here, "number", 0) + 1
        return exchange(heads, tensors)

    def counted(method):
        def counting(*given, **named):
            before = getattr(here, "number", 0)
            made = method(*given, **named)
            seen.setdefault(method.__name__, []).append(getattr(here, "number", 0) - before)
            return made

        return counting

    def begun(prefill, layer, k, v):
        most = len(prefill.reached(layer))  # a server knows how many leave
        return begin(prefill, layer, k, v, most)

    begin, ranks = FinishedPrefill.begin_merge, 2
    monkeypatch.setattr(Divided, "_all", exchanged)
    monkeypatch.setattr(Run, "observe", counted(Run.observe))
    monkeypatch.setattr(Run, "finish", counted(Run.finish))
    monkeypatch.setattr(FinishedPrefill, "begin_merge", begun)
    monkeypatch.setattr(FinishedPrefill, "merged", counted(FinishedPrefill.merged))
    kernels = REFERENCE | {"generated": TRITON["generated"]}
    _, folds = assert_same(bound_to(name), 41, ranks, 0, kernels=kernels)
    most = {"observe": 1, "finish": 3}
    assert {method: max(seen[method]) for method in most if max(seen[method]) > most[method]} == {}
    assert sum(seen["merged"]) in (0, ranks)
    assert all(len(each) <= 1 for each in folds)


def test_without_kernels_entries_are_compared_layer_by_layer():
    _, folds = assert_same(bound_to("tova"), 41, 2, 0)
    assert [len(each) for each in folds if each] == [SHAPE[0]] * (STEPS // EVERY)


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("ties", [False, True])
def test_only_what_competes_is_exchanged(ties, monkeypatch, tmp_path):
    """With pyramidinfer a batch of tokens, if kernels read the queries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bound, batch = bound_to("pyramidinfer"), 2
    _, folds = assert_same(
        bound, 41, 2, 0, ties=ties, kernels=REFERENCE | {"generated": TRITON["generated"]}
    )
    # Of each list of a rank sums, numbers and where they are, and whether all was finite.
    votes = SHAPE[0] * 2 * (batch * 2 * (8 + 1) + 1)
    leaving = sum(bound.leaves_at(step, 41) for step in range(1, STEPS + 1))
    assert list(itertools.chain(*folds)) == [votes] * leaving


def test_kernels_read_queries_so_that_all_layers_are_compared_at_once():
    for name in ("tova", "h2o", "cake", "vatp", "roco", "streamingllm", "d2o", "pyramidinfer"):
        steps = TorchProgram(bound_to(name), kernels=TRITON, heads=Ranks(2).heads(0, 4)).steps
        assert steps.rule(41) is not None, name


def test_queries_of_ranks_that_hold_the_same_kv_head():
    """Queries of one KV head, in order; without queries nothing is sent."""
    ranks = Ranks(4)
    x = torch.arange(8 * 3).view(1, 8, 3)  # 8 query heads, 2 KV heads

    def work(rank):
        own, heads = x[:, 2 * rank : 2 * rank + 2], ranks.heads(rank, 2)
        return *heads.queries([(own, 1), (own[0, :, 0], 0)]), *heads.queries([(own[..., :0], 1)])

    for rank, (two, one, none) in enumerate(ranks.run(work)):
        first = rank // 2 * 4
        assert two.equal(x[:, first : first + 4])
        assert one.equal(x[0, first : first + 4, 0])
        assert none.shape == (1, 4, 0)
    assert len(ranks.sent) == 1


HEADER = "policy: a-test\nlanguage: 1\nabout: a test\n"
REDUCTIONS = ("sum", "mean", "max", "min", "var", "count")


@pytest.mark.thorough(every=3)
@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("axes", ["kv", "kv, token", "kv, group, token", "kv, group, query, token"])
def test_reductions_across_heads(op, axes):
    """Also of values that are absent for some heads."""
    x = "attn(recent(3)) where attn(recent(3)) > 0.02"
    for axis in ("group", "query"):
        x = x if axis in axes else f"mean[{axis}]({x})"
    text = f"""keep: top(score, 4 + 2 * min(1, abs({op}[{axes}]({x}))))
score: sum[group, query](attn(recent(3)))
""" if "token" in axes else f"""keep: top(score, 5)
score: {op}[{axes}]({x})
"""  # fmt: skip
    bound = bind(load(Source("a.yaml", HEADER + text)).require(), ModelShape(*SHAPE))
    for number in (2, 4):
        assert_same(bound, 19, number, number)


@pytest.mark.parametrize("axes", ["kv, token", "kv, group", "kv"])
def test_a_variance_with_an_infinite_value_is_none(axes):
    """As by one process, whichever rank holds it."""
    x = "max[query](attn(recent(3))) where position > 2 or mean[dim](key) < 0 else 1 / 0"
    x = x if "group" in axes else f"max[group]({x})"
    text = f"keep: top(position, 4 + 2 * min(1, {{}}))\nlet:\n  spread: var[{axes}]({x})\n"
    spread = "spread" if "token" in axes else "max[token](spread)"
    bound = bind(load(Source("a.yaml", HEADER + text.format(spread))).require(), ModelShape(*SHAPE))
    for number in (2, 4):
        assert_same(bound, 19, number, number)


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("axes", ["kv, token", "kv, group", "kv, group, query, token", "kv, dim"])
@pytest.mark.parametrize("kernels", [{}, {"generated": TRITON["generated"]}])
def test_infinities_of_both_signs_add_up_to_none(op, axes, kernels, monkeypatch, tmp_path):
    """As by one process, where one rank holds them and others hold finite values."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    x = "key" if "dim" in axes else "logits(recent(3))"
    for axis in () if "dim" in axes else ("group", "query"):
        x = x if axis in axes else f"mean[{axis}]({x})"
    text = (
        "keep: top(position, 6 + 2 * clamp({}, -1, 1))\nlet:\n  most: |\n"
        f"    {op}[{axes}]({x} / 0 where abs({x}) > 1 else {x})\n"
    )
    whole = "most" if "token" in axes else "max[token](most)"
    bound = bind(load(Source("a.yaml", HEADER + text.format(whole))).require(), ModelShape(*SHAPE))
    for seed in range(4):
        assert_same(bound, 19, 2, seed, kernels=REFERENCE | kernels)


@pytest.mark.parametrize("axes", ["kv", "head", "kv, token"])
def test_entropies_across_heads(axes):
    x = "sum[query](attn(recent(3)))" if axes == "head" else "sum[query, group](attn(recent(3)))"
    beside = "norm1[dim](key) * " if "token" in axes else ""
    text = f"score: {beside}entropy[{axes}]({x})\nbudget: 8 + 20 * max[token](score)\n"
    bound = bind(
        load(Source("a.yaml", HEADER + text + "keep: top(score)\n")).require(), ModelShape(*SHAPE)
    )
    assert_same(bound, 41, 2, 0)


def test_windows_without_queries_across_heads():
    text = "budget: count[token](score > 0)\nkeep: top(score)\nscore: |\n"
    text += "  sum[query, group](attn(recent(prompt / 2)) - mean[kv](attn(recent(prompt / 2))))\n"
    bound = bind(load(Source("a.yaml", HEADER + text)).require(), ModelShape(*SHAPE))
    assert_same(bound, 1, 2, 0)


def test_an_index_of_heads_and_random_numbers_are_those_of_the_model():
    text = (
        "keep: top(score, 5)\nscore: uniform(3) + index[kv](sum[query, group](attn(recent(1))))\n"
    )
    assert_same(bind(load(Source("a.yaml", HEADER + text)).require(), ModelShape(*SHAPE)), 19, 2, 0)


HEAT = "  heat: heat + sum[group, query](attn(new))\n"
# Rules that compare KV heads' entries at decode steps while each head keeps its own: what is kept
# of all heads together, what is counted or added up where some head has an entry, along tokens too.
COMPARING = {
    "top of all heads": (
        f"state:\n{HEAT}keep: top(heat, 6)\ndecode:\n  keep: top[kv, token](heat, 20)\n"
    ),
    "top of all heads, twice": (
        f"state:\n{HEAT}keep: top[kv, token](heat, 30)\ndecode:\n  keep: top[kv, token](heat, 20)\n"
    ),
    "beside the mean": (
        f"state:\n{HEAT}keep: top(heat, 6) or recent(2)\n"
        "decode:\n  keep: top(2 * heat - mean[kv](heat), 5) or recent(2)\n"
    ),
    "beside neighbors of all heads": (
        f"state:\n{HEAT}keep: top(heat, 6) or recent(2)\n"
        "decode:\n  keep: top(heat + maxpool(max[kv](heat), 3), 5) or recent(2)\n"
    ),
    "beside sums along tokens": (
        f"state:\n{HEAT}keep: top(heat, 6)\n"
        "decode:\n  keep: top(heat + cumsum[token](sum[kv](heat)) / 20, 6)\n"
    ),
    "states of all heads": (
        "state:\n  heat: heat + mean[kv](sum[group, query](attn(new)))\n"
        "keep: top(sum[group, query](attn(recent(2))), 6)\n"
        "decode:\n  keep: top(heat + sum[group, query](attn(new)), 6)\n"
    ),
    "by place among heads": (
        f"state:\n{HEAT}keep: top(heat, 6)\ndecode:\n  keep: rank[kv](heat) < 2 or recent(3)\n"
    ),
    "beside a head that holds all": (
        f"state:\n{HEAT}keep: all where index[kv](norm1[dim, token](key)) < 1 else recent(3)\n"
        "budget: 6\ndecode:\n  keep: recent(2) then top[kv, token](heat)\n"
    ),
    "by the number of a head": (
        "keep: recent(3) where index[kv](norm1[dim, token](key)) < 1 else all\ndecode: same\n"
    ),
}  # fmt: skip


@pytest.mark.thorough(
    besides=[
        "top of all heads", "beside neighbors of all heads", "beside a head that holds all",
        "by the number of a head",
    ]
)  # fmt: skip
@pytest.mark.parametrize("name", COMPARING)
def test_entries_of_heads_that_keep_others_are_compared_while_decoding(name):
    text = HEADER + COMPARING[name]
    bound = bind(load(Source("a.yaml", text)).require(), ModelShape(*SHAPE), fold_interval=EVERY)
    for seed, (tokens, number) in enumerate([(41, 2), (23, 4), (31, 8), (1, 2)]):
        assert_same(bound, tokens, number, seed, ties=seed == 1)
    with patch.object(Steps, "by_kernels", True):  # all layers at once where that is possible
        assert_same(bound, 29, 2, 6)
