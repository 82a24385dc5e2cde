"""Generated kernels keep the same entries as torch; values are within float32's error.

Without a GPU the kernels run in Triton's interpreter, on a GPU they are compiled.

Dimensions: L layers, H query heads, G KV heads, N tokens, D head size, W queries of a window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random

import grammar
import numpy as np
import pytest
import torch
from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute import apply as torch_apply
from kvpolicy.dsl.execute import warm
from kvpolicy.dsl.execute.drive import InPools, drive
from kvpolicy.dsl.execute.prefill.finished import FinishedPrefill
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.tensors.kernels import Slots
from kvpolicy.dsl.execute.tensors.values import Value, aligned
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.tools.explain_kernels import kernels
from kvpolicy.dsl.tools.trial_cases import sampled
from kvpolicy.kernels.entries.rounding import FLOAT8
from kvpolicy.kernels.scoring.generated import generated
from kvpolicy.kernels.table import REFERENCE
from kvpolicy.kernels.templates import run as run_module
from recordings import tensors
from shipped_policies import shipped_program

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TABLE = {**REFERENCE, "generated": generated}
TABLES = REFERENCE, TABLE
HALF_ULP = 2.0**-24  # of float32: the largest relative error of one rounding
SMALL = {"capacity": "11", "window": "4", "start": "2", "queries": "3", "reach": "5"}
# What is computed beside the numbers that count, and for NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
GENERATES = [
    name for name in shipped()
    if TorchProgram(bind(shipped_program(name), ModelShape(2, 4, 2, 8)), kernels=TABLE).generated
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Sizes of a model and a prompt."""

    layers: int
    heads: int
    kv: int
    size: int
    tokens: int
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> ModelShape:
        return ModelShape(self.layers, self.heads, self.kv, self.size)

    def tensors(self, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v [L, H or G, N, D]."""
        random = torch.Generator().manual_seed(seed)
        made = (
            torch.randn(self.layers, heads, self.tokens, self.size, generator=random)
            for heads in (self.heads, self.kv, self.kv)
        )
        return tuple(x.to(DEVICE, self.dtype) for x in made)


# GQA 1, 2, 4 and 8, groups and head sizes that are no power of two, one token, a window, an odd
# length; each policy meets two of them.
CASES = [
    Case(2, 2, 2, 64, 63),
    Case(2, 8, 2, 80, 1),
    Case(2, 8, 1, 128, 33),
    Case(2, 6, 2, 16, 37, torch.float16),
    Case(2, 4, 2, 64, 4),
    Case(2, 4, 1, 80, 45, torch.bfloat16),
    Case(2, 6, 3, 128, 12),
]


def small(name: str, shape: ModelShape) -> Bound:
    program = shipped_program(name)
    given = {n: x for n, x in SMALL.items() if n in program.params}
    if name == "pyramidinfer":
        given["least"] = "2"
    return bind(program, shape, given)


def inline(score: str, shape: ModelShape, rest: str = "") -> Bound:
    text = (
        f"policy: a-test\nlanguage: 1\nabout: a test\n{rest}score: |\n  {score}\n"
        "budget: 9\nkeep: recent(2) then top(score)\n"
    )
    return bind(sampled(load(Source("a-test.yaml", text)).require(), shape), shape)


def log_sum_exp(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp float32 [H, T] that attention has for the last T of n tokens."""
    keys = k.double().repeat_interleave(q.shape[0] // k.shape[0], 0)
    logits = torch.matmul(q.double(), keys.transpose(-1, -2)) * q.shape[2] ** -0.5
    later = torch.ones_like(logits[0]).triu(1 + k.shape[1] - q.shape[1]).bool()
    return logits.masked_fill(later, -torch.inf).logsumexp(-1).float()


def prefill(
    program: TorchProgram, q, k, v, slots: bool = False, attended: bool = False
) -> FinishedPrefill:
    """A finished prefill, with the policy's propagation and restart.

    Args:
        slots: whether keys and values are read from a pool.
        attended: whether attention hands over its log-sum-exp.
    """
    run = program.start(k.shape[2])
    there = torch.arange(k.shape[2], device=k.device)
    layer = 0
    while layer < len(k):
        keys, values = k[layer][:, there], v[layer][:, there]
        if slots:
            keys, values = in_pool(keys), in_pool(values)
        tokens = None if len(there) == run.size else there
        asking = q[layer][:, there]
        lse = log_sum_exp(asking, k[layer][:, there]) if attended else None
        deeper = run.observe(layer, asking, keys, values, tokens, lse=lse)
        if run.restarted:
            there = there if deeper is None else there[deeper]
            q, k, v = q[:, :, there], k[:, :, there], v[:, :, there]
            run, layer = run.again(len(there)), 0
            there = torch.arange(len(there), device=k.device)
            continue
        there = there if deeper is None else there[deeper]
        layer += 1
    return run.finish()


def in_pool(x: torch.Tensor) -> Slots:
    """Rows of [G, n, D] at odd slots of a pool whose other rows are NaN."""
    return in_one_pool(x[None])


def in_one_pool(x: torch.Tensor) -> Slots:
    """As `in_pool` for [L, G, n, D], beside an equal number of values, which are NaN."""
    layers, heads, tokens, size = x.shape
    shape = (layers, 2, 2 * tokens + 5, heads, size)
    pool = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)[:, 0]
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens))
    slots = (2 * order + 1).to(x.device)
    pool[:, slots] = x.transpose(1, 2)
    return Slots(pool, slots)


def entries_in_pools(k, v, asked: list[range]):
    """What `Run.show` asks for; appends the layers that are asked for."""

    def entries(layers):
        asked.append(layers)
        own = slice(layers.start, layers.stop)
        return in_one_pool(k[own]), None if v is None else in_one_pool(v[own])

    return entries


def prefill_together(program: TorchProgram, q, k, v, attended=()) -> FinishedPrefill:
    """A finished prefill, several of whose layers are scored together.

    Args:
        attended: layers whose attention hands over its log-sum-exp.
    """
    entries = entries_in_pools(k, v if program.bound.needs_values else None, [])
    run = program.start(k.shape[2])
    assert run.together > 1
    for layer, own in enumerate(q):
        run.show(layer, own, entries, lse=log_sum_exp(own, k[layer]) if layer in attended else None)
    return run.finish()


def assert_same_kept(a: FinishedPrefill, b: FinishedPrefill) -> None:
    assert a.not_finite == b.not_finite
    for layer, (one, other) in enumerate(zip(a.kept, b.kept, strict=True)):
        assert torch.equal(one, other), f"layer {layer}: {(one != other).nonzero().tolist()}"


def relative_error(case: Case, q, k, queries: int, terms: int) -> float:
    """Bound on the relative error of sums, means and maxima of attention in float32.

    With u = 2^-24, a product q.k of D terms is off by at most (D + 2) u sum|q||k|, and so is the
    exponent. The log-sum-exp of N terms is off by as much, by N u from adding, and by its rounding.
    Then `terms` numbers of one sign are added. A GPU's exponentials are accurate to 4 u.
    """
    repeat = case.heads // case.kv
    keys = k.abs().double().repeat_interleave(repeat, 1)
    length = torch.matmul(q[:, :, -queries:].abs().double(), keys.transpose(-1, -2))
    largest = length.max().item() * case.size**-0.5
    return HALF_ULP * (2 * (case.size + 4) * largest + case.tokens + terms + 16)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """Writes generated files to a cache other than the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


# Every shipped policy.


@pytest.mark.thorough(every=3)
@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATES)
def test_shipped_policies_keep_the_same(name):
    for number in (0, 3):
        case = CASES[(GENERATES.index(name) + number) % len(CASES)]
        bound = small(name, case.shape)
        tensors = case.tensors(number)
        with_kernels = TorchProgram(bound, report=True, kernels=TABLE)
        assert_same_kept(prefill(TorchProgram(bound), *tensors), prefill(with_kernels, *tensors))


def test_most_shipped_policies_have_kernels():
    nothing = {name for name in shipped() if name not in GENERATES}
    assert nothing == {
        "cam-original", "minicache", "roco", "simlayerkv", "sinks-recent", "streamingllm",
        "streamingllm-original",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["snapkv", "h2o"])
def test_a_thousand_tokens(name):
    """Several blocks of keys, splits of rows and, for all queries, blocks of queries."""
    case = Case(1, 4, 1, 64, 1000)
    bound = small(name, case.shape)
    tensors = case.tensors(7)
    with_kernels = TorchProgram(bound, kernels=TABLE)
    assert_same_kept(prefill(TorchProgram(bound), *tensors), prefill(with_kernels, *tensors))


@pytest.mark.parametrize(
    "score",
    [
        "sum[group, query](attn(recent(4)) where any[token](attn(recent(4)) > 0.05) else 0)",
        "sum[group, query](attn(recent(4)) / count[token](attn(recent(4)) > 0.002))",
        "sum[group, query](attn(recent(4)) / max[token](attn(recent(4))))",
    ],
)
def test_splits_of_the_keys_of_a_query_are_put_together(score):
    case = Case(1, 4, 1, 16, 300)
    bound, tensors = inline(score, case.shape), case.tensors(5)
    runs = [
        prefill(TorchProgram(bound, report=True, kernels=t), *tensors) for t in (REFERENCE, TABLE)
    ]
    a, b = (run.result(bound.lowered.prefill.score)[0].tensor for run in runs)
    bar = 4 * relative_error(case, *tensors[:2], 4, 16)
    torch.testing.assert_close(a, b, rtol=bar, atol=0.0)


@pytest.mark.parametrize("inner", ["sum[query, group](attn(all))", "mean[query, group](attn(all))"])
def test_what_was_added_up_over_queries_is_there_for_all(inner):
    """Queries that do not see a token still add terms that do not depend on queries."""
    case = Case(1, 4, 2, 16, 200)
    bound = inline(f"sum[query](sum[group](attn(all)) + {inner})", case.shape)
    tensors = case.tensors(3)
    runs = [
        prefill(TorchProgram(bound, report=True, kernels=t), *tensors) for t in (REFERENCE, TABLE)
    ]
    a, b = (run.result(bound.lowered.prefill.score)[0].tensor for run in runs)
    bar = relative_error(case, *tensors[:2], 200, 400)
    torch.testing.assert_close(a, b, rtol=bar, atol=0.0)


SHARED = [
    "sum[group, query](attn(all))",
    "sum[group](max[query](attn(all)))",
    "min[group](min[query](attn(all) where position % 3 < 2))",
    "max[group](count[query](attn(all) > 0.004))",
]


@pytest.mark.thorough(besides=["75"])
@pytest.mark.parametrize("score", SHARED)
@pytest.mark.parametrize("tokens", [1, 75, 300])
def test_programs_share_the_queries_of_a_block_of_tokens(score, tokens, monkeypatch):
    """Each stores results of its part, and torch puts them together."""
    case, numbers, parts_of = Case(2, 6, 2, 16, tokens), [], run_module._Run._parts
    monkeypatch.setattr(
        run_module._Run, "_parts", lambda run: numbers.append(parts_of(run)) or numbers[-1]
    )
    bound, tensors = inline(score, case.shape), case.tensors(5)
    run = prefill(TorchProgram(bound, report=True, kernels=TABLE), *tensors)
    assert max(numbers) > 1 or tokens == 1
    monkeypatch.setattr(run_module._Run, "_parts", lambda run: 1)
    alone = prefill(TorchProgram(bound, report=True, kernels=TABLE), *tensors)
    for a, b in zip(*(x.result(bound.lowered.prefill.score) for x in (run, alone)), strict=True):
        there = torch.ones_like(a.data, dtype=torch.bool)
        if a.mask is not None:
            assert torch.equal(a.mask, b.mask)
            there &= aligned(a.mask, a.mask_axes, a.axes)
        torch.testing.assert_close(a.data[there], b.data[there], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("score", "shared"),
    [
        ("sum[group, query](attn(all))", True),
        ("sum[group](mean[query](attn(all)))", False),
        ("sum[group](var[query](attn(all)))", False),
        ("sum[group, query](attn(recent(4)))", False),  # one tile holds them
    ],
)
def test_only_what_adds_up_is_shared(score, shared):
    bound = inline(score, ModelShape(2, 4, 2, 16))
    generated = TorchProgram(bound, kernels=TABLE).generated
    texts = [generated._file(each, False).text for each in generated.fusion.bundles]
    assert any('"in_parts": True' in text for text in texts) == shared


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["h2o", "cake", "asl", "d2o", "simlayerkv-prefill"])
def test_what_follows_a_prefill(name, monkeypatch):
    """States, merges and decode steps continue from the kernels' values."""
    bound = small(name, ModelShape(2, 4, 2, 8))
    random = np.random.default_rng(5)
    q, k, v = (random.normal(size=(2, n, 29, 8)).astype(np.float32) for n in (4, 2, 2))
    steps = tuple(random.normal(size=(3, 2, n, 8)).astype(np.float32) for n in (4, 2, 2))
    expected = torch_apply.apply(bound, q, k, v, steps)
    made = []

    def program(*args, **options):
        made.append(TorchProgram(*args, kernels=TABLE, **options))
        return made[-1]

    monkeypatch.setattr(torch_apply, "TorchProgram", program)
    actual = torch_apply.apply(bound, q, k, v, steps)
    assert made[0].generated is not None
    assert all(map(np.array_equal, expected.kept, actual.kept))
    assert [x.kept for x in expected.steps] == [x.kept for x in actual.steps]


@pytest.mark.parametrize("name", ["snapkv", "tova", "dynamickv", "pyramidkv", "h2o"])
def test_scores_within_the_error_of_float32(name):
    """Pooled sums and maxima of attention have one sign, so the bound is relative."""
    case = Case(2, 8, 2, 64, 63)
    bound = small(name, case.shape)
    q, k, v = case.tensors(11)
    runs = [
        prefill(TorchProgram(bound, report=True, kernels=t), q, k, v) for t in (REFERENCE, TABLE)
    ]
    queries = 63 if name == "h2o" else 4
    bar = relative_error(case, q, k, queries, queries * 4 + 8)
    assert bar < 1e-3
    for a, b in zip(*(run.result(bound.lowered.prefill.score) for run in runs), strict=True):
        assert a.axes == b.axes
        where = torch.ones_like(a.data, dtype=torch.bool)
        if a.mask is not None:
            where &= aligned(a.mask, a.mask_axes, a.axes)
        torch.testing.assert_close(a.data[where], b.data[where], rtol=bar, atol=0.0)
        assert not torch.equal(a.data[where], b.data[where]), "no kernel ran"


# What attention has found already.


ATTENDING = ["snapkv", "pyramidkv", "tova", "lava", "cake", "fastkv", "asl", "h2o", "d2o"]


@pytest.mark.thorough(besides=["tova", "lava", "h2o"])
@pytest.mark.parametrize("name", ATTENDING)
def test_with_attentions_own_log_sum_exp_the_same_is_kept(name):
    """With one pass over the keys, for many groups and sizes; torch ignores the log-sum-exp."""
    for number in (0, 2, 3, 6):
        case = CASES[(ATTENDING.index(name) + number) % len(CASES)]
        bound, tensors = small(name, case.shape), case.tensors(number)
        program = TorchProgram(bound, report=True, kernels=TABLE)
        assert program.reads_lse
        reference = TorchProgram(bound, report=True)
        assert not reference.reads_lse
        runs = [prefill(each, *tensors) for each in (reference, program)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_module, "row_partials", None)
            given = prefill(program, *tensors, slots=True, attended=True)
        runs.append(prefill(reference, *tensors, attended=True))
        for run in runs:
            assert_same_kept(run, given)
        root = bound.lowered.prefill.score
        if root is not None:
            bar = relative_error(case, *tensors[:2], case.tokens, case.tokens * 4 + 8)
            for a, b in zip(runs[1].result(root), given.result(root), strict=True):
                assert torch.allclose(
                    torch.as_tensor(a.data), torch.as_tensor(b.data), rtol=2 * bar, atol=1e-30,
                    equal_nan=True,
                )  # fmt: skip


def test_policies_without_attention_need_no_log_sum_exp():
    shape = ModelShape(2, 4, 2, 8)
    needing = {n for n in GENERATES if TorchProgram(small(n, shape), kernels=TABLE).reads_lse}
    assert {*ATTENDING} <= needing
    assert "gemfilter" not in needing


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_log_sum_exp_that_is_not_finite_decides_nothing(wrong):
    case = Case(1, 4, 2, 16, 29)
    program = TorchProgram(small("snapkv", case.shape), kernels=TABLE)
    q, k, v = (x[0] for x in case.tensors(3))
    lse = log_sum_exp(q, k)
    lse[3, -2] = wrong
    run = program.start(29)
    run.observe(0, q, k, v, lse=lse)
    run.finish()
    assert run.not_finite


# Several layers in one go.

TOGETHER = [
    name for name in GENERATES
    if not (bound := bind(shipped_program(name), ModelShape(2, 4, 2, 8))).propagates
    and TorchProgram(bound, kernels=TABLE, keys_stay=True).layers_together(29) == 2
]  # fmt: skip


def test_policies_that_score_layers_together():
    assert TOGETHER == [
        "ada-pyramidkv", "adakv", "cake", "cam", "chunkkv", "d2o-code", "d2o", "dynamickv", "h2o",
        "lava", "pyramidkv", "simlayerkv-prefill", "snapkv", "tova", "vatp-snapkv", "vatp",
    ]  # fmt: skip


@pytest.mark.parametrize("number", ["mean[head, query, token]", "0.5 * max[head, query]"])
def test_layers_whose_kernels_read_what_is_of_one_layer_are_scored_apart(number):
    asked = "attn(recent(3))"
    score = f"sum[group, query]({asked} where {asked} > {number}({asked}))"
    text = f"policy: a-test\nlanguage: 1\nbudget: 4\nkeep: top(score)\nscore: |\n  {score}\n"
    bound = bind(load(Source("a-test.yaml", text)).require(), ModelShape(3, 4, 2, 16))
    made = tensors(np.random.default_rng(0), (3, 4, 2, 16), 17, 0)[:3]
    q, k, v = map(torch.from_numpy, made)
    shown = InPools(q, k.transpose(1, 2), v.transpose(1, 2))
    programs = TorchProgram(bound, kernels=TABLE, keys_stay=True), TorchProgram(bound)
    one, other = (drive(program, 17, shown).run.finish().kept for program in programs)
    assert all(map(torch.equal, one, other))


@pytest.mark.thorough(besides=["snapkv", "h2o"])
@pytest.mark.parametrize("name", TOGETHER)
def test_all_layers_together_and_one_after_the_other(name):
    """Kept entries, scores and budgets are equal, with the log-sum-exp from attention or not."""
    for number, attended in ((0, (0, 2)), (5, (0, 1, 2))):
        case = replace(CASES[(TOGETHER.index(name) + number) % len(CASES)], layers=3)
        bound, tensors = small(name, case.shape), case.tensors(number)
        program = TorchProgram(bound, report=True, kernels=TABLE, keys_stay=True)
        expected = prefill(program, *tensors)
        assert_same_kept(expected, prefill(TorchProgram(bound), *tensors))
        run = prefill_together(program, *tensors, attended=attended)
        assert_same_kept(run, expected)
        assert_close(run, expected, case.tokens)


def assert_close(run: FinishedPrefill, expected: FinishedPrefill, tokens: int) -> None:
    """Scores, budgets, and states that decode steps go on with."""
    pairs = [
        pair
        for root in run.program.prefill(tokens).roots
        for pair in zip(run.result(root), expected.result(root), strict=True)
    ]
    for layer in run.program.layers:
        states, wanted = run.states(layer), expected.states(layer)
        assert states.keys() == wanted.keys()
        pairs += [(states[name], wanted[name]) for name in states]
    for a, b in pairs:
        assert a.axes == b.axes
        got, wanted = (torch.as_tensor(x.data, dtype=torch.float64) for x in (a, b))
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=1e-9, equal_nan=True)


@pytest.mark.thorough(besides=["snapkv", "lava", "d2o"])
@pytest.mark.parametrize("name", TOGETHER)
def test_groups_of_layers(name):
    """Of five layers three are scored together, then two."""
    case = replace(CASES[TOGETHER.index(name) % len(CASES)], layers=5)
    bound, tensors = small(name, case.shape), case.tensors(7)
    programs = (
        TorchProgram(bound, report=True, kernels=TABLE, keys_stay=True, deferred_bytes=2**n)
        for n in range(30)
    )
    program = next(each for each in programs if each.layers_together(case.tokens) == 3)
    expected = prefill(program, *tensors)
    run = prefill_together(program, *tensors, attended=(0, 1, 2))
    assert_same_kept(run, expected)
    assert_close(run, expected, case.tokens)
    for layer in program.layers:
        queries = run.last_queries(layer), expected.last_queries(layer)
        assert queries == (None, None) or torch.equal(*queries)


def test_layers_are_scored_as_soon_as_they_are_due():
    case = Case(5, 4, 2, 16, 37)
    q, k, _ = case.tensors(3)
    program = TorchProgram(small("snapkv", case.shape), kernels=TABLE, keys_stay=True)
    run = program.start(case.tokens)
    run.together = 3
    asked, number = [], []
    entries = entries_in_pools(k, None, asked)
    for layer in range(5):
        run.show(layer, q[layer], entries)
        number.append(len(asked))
        if not layer:
            with pytest.raises(RuntimeError, match="layer 1 comes before 2"):
                run.show(2, q[2], entries)
    assert asked == [range(3), range(3, 5)]
    assert number == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("name", "given", "groups"),
    [
        ("fastkv", {"kv_rate": "0.3", "tsp_rate": "0.5", "tsp_layer": "3"}, [(0, 3), (4, 7)]),
        # Rankings are compared up to the layer that chooses.
        ("asl", {"capacity": "9", "window": "4", "start": "2", "tau": "1e9"}, [(3, 7)]),
        ("asl", {"capacity": "9", "window": "4", "start": "2", "tau": "1e-9"}, []),
        ("gemfilter", {"capacity": "11", "filter": "2"}, [(0, 7)]),
        ("pyramidinfer", {"least": "2"}, []),
        ("pyramidinfer", {"least": "2", "interval": "4"}, [(0, 4), (5, 7)]),
    ],
)
def test_layers_with_the_same_tokens_are_scored_together(name, given, groups, monkeypatch):
    """The same goes deeper and is kept as where each layer is scored by itself."""
    case, found = Case(7, 4, 2, 16, 37), []
    q, k, v = case.tensors(3)
    shown = InPools(q, k.transpose(1, 2), v.transpose(1, 2))
    bound = bind(shipped_program(name), case.shape, given)
    entries = InPools.entries

    def noted(self, layers, tokens):
        if len(layers) > 1:
            found.append((layers.start, layers.stop))
        return entries(self, layers, tokens)

    monkeypatch.setattr(InPools, "entries", noted)
    programs = (
        TorchProgram(bound, kernels=TABLE, keys_stay=True),
        TorchProgram(bound, kernels=TABLE, keys_stay=True, deferred_bytes=0),
    )
    together, apart = (drive(program, case.tokens, shown) for program in programs)
    assert found == groups
    assert_same_kept(together.run.finish(), apart.run.finish())
    ways = [(each.first_run.propagated, each.run.propagated) for each in (together, apart)]
    for one, other in zip(*ways, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[layer], other[layer]) for layer in one)


@pytest.mark.thorough(every=6)
@pytest.mark.parametrize("name", TOGETHER)
def test_layers_together_take_the_launches_of_one(name, monkeypatch):
    case = Case(5, 4, 2, 16, 37)
    program = TorchProgram(small(name, case.shape), kernels=TABLE, keys_stay=True)
    tensors, made = case.tensors(3), []

    def counted(self, *given):
        made.append(self.kv)
        return run_(self, *given)

    run_ = run_module._Run.made
    monkeypatch.setattr(run_module._Run, "made", counted)
    prefill_together(program, *tensors)
    bundles = len(program.generated.fusion.bundles)
    assert made == [case.layers * case.kv] * bundles
    made.clear()
    prefill(program, *tensors)
    assert made == [case.kv] * bundles * case.layers


def test_one_layer_that_is_not_finite_lets_nothing_leave():
    case = Case(3, 4, 2, 16, 37)
    program = TorchProgram(small("snapkv", case.shape), kernels=TABLE, keys_stay=True)
    q, k, v = case.tensors(3)
    k[1, 0, 5, 3] = torch.nan
    run = prefill_together(program, q, k, v)
    assert run.not_finite
    assert all(bool(kept.all()) for kept in run.kept)


@pytest.mark.parametrize(
    ("rest", "together"),
    [
        (" where position > 3", True),
        (" / mean[kv](norm1[dim](key))", True),
        (" where position > prompt * layer / layers", False),
        (" * (1 + layer)", False),
        (" where rank[kv, token](norm1[dim](key)) > 3", True),
    ],
)
def test_what_differs_from_layer_to_layer_is_scored_layer_by_layer(rest, together):
    case = Case(3, 4, 2, 16, 37)
    bound = inline(f"sum[query, group](attn(recent(4))){rest}", case.shape)
    q, k, v = case.tensors(3)
    asked = []
    entries = entries_in_pools(k, None, asked)
    run = TorchProgram(bound, kernels=TABLE, keys_stay=True).start(case.tokens)
    for layer in range(3):
        run.show(layer, q[layer], entries)
    assert asked == ([range(3)] if together else [range(i, i + 1) for i in range(3)])
    assert_same_kept(run.finish(), prefill(TorchProgram(bound), q, k, v))


def test_what_takes_too_much_memory_is_scored_layer_by_layer():
    case = Case(3, 4, 2, 16, 37)
    bound = small("snapkv", case.shape)
    for most, together in ((100_000, 3), (5_000, 2), (1_000, 1), (0, 1)):
        program = TorchProgram(bound, kernels=TABLE, keys_stay=True, deferred_bytes=most)
        assert program.layers_together(37) == together
    assert TorchProgram(bound, kernels=TABLE).layers_together(37) == 1
    assert TorchProgram(bound, kernels=REFERENCE, keys_stay=True).layers_together(37) == 1


@pytest.mark.parametrize(("most", "together"), [(256 << 20, True), (1000, False)])
def test_what_a_layer_orders_by_itself_is_not_ordered_among_all(most, together):
    """Values per KV head alone take no memory; for long prompts, each layer orders its own."""
    case = Case(3, 4, 2, 16, 37)
    keep = "all where top[kv](seen, 1) else sinks(2) then recent(4)"
    far = "mean[query, group](sum[token](attn(recent(1)) where distance(recent(1)) > 4))"
    text = f"policy: heads\nlanguage: 1\nlet:\n  seen: {far}\nkeep: {keep}\n"
    bound = bind(load(Source("heads.yaml", text)).require(), case.shape)
    tensors = case.tensors(3)
    program = TorchProgram(bound, kernels=TABLE, keys_stay=True, deferred_bytes=most)
    assert program.generated.token_bytes == 0
    assert program.layers_together(case.tokens) == (case.layers if together else 1)
    drive = prefill_together if together else prefill
    assert_same_kept(drive(program, *tensors), prefill(TorchProgram(bound), *tensors))


# Where keys and values lie.


@pytest.mark.parametrize("name", ["snapkv", "lava", "cake", "h2o", "simlayerkv-prefill"])
def test_slots_and_dense_tensors_agree(name):
    """Bit for bit; unused rows of the pool are NaN."""
    case = Case(2, 4, 2, 80, 45)
    bound = small(name, case.shape)
    program = TorchProgram(bound, report=True, kernels=TABLE)
    tensors = case.tensors(3)
    dense, pooled = prefill(program, *tensors), prefill(program, *tensors, slots=True)
    assert not pooled.not_finite
    assert_same_kept(dense, pooled)
    for root in filter(None, (bound.lowered.prefill.score, bound.lowered.prefill.keep)):
        for a, b in zip(dense.result(root), pooled.result(root), strict=True):
            assert torch.equal(torch.as_tensor(a.data), torch.as_tensor(b.data))


@pytest.mark.thorough(every=2)
@pytest.mark.parametrize("name", ["snapkv", "lava", "cake", "h2o", "fastkv"])
@pytest.mark.parametrize("stored", FLOAT8)
def test_entries_of_8_bits_are_read_through_their_scale(name, stored):
    """Torch and kernels decide on the scaled values."""
    case = Case(2, 6, 2, 20, 45)
    bound = small(name, case.shape)
    q, k, v = case.tensors(4)
    scale = torch.tensor([0.37, 2.0], device=DEVICE)
    codes = [(x / scale[:, None, None]).to(stored) for x in (k, v)]
    k, v = (x.float() * scale[:, None, None] for x in codes)
    expected = prefill(TorchProgram(bound), q, k, v)

    def pooled(x):
        found = in_pool(x.view(torch.uint8).float())  # NaN becomes a code of NaN
        pool = found.pool.nan_to_num(127.0).to(torch.uint8).view(stored)
        return Slots(pool, found.slots, scale)

    for table in TABLES:
        program = TorchProgram(bound, report=True, kernels=table)
        run, there = program.start(case.tokens), torch.arange(case.tokens, device=DEVICE)
        for layer in range(case.layers):
            own = [pooled(x[layer][:, there]) for x in codes]
            tokens = None if len(there) == case.tokens else there
            deeper = run.observe(layer, q[layer][:, there], *own, tokens)
            there = there if deeper is None else there[deeper]
        finished = run.finish()
        assert not finished.not_finite
        assert_same_kept(finished, expected)


def test_slots_are_gathered_only_for_torch():
    """Kernels read the pool; torch operations gather the slots, once."""
    case = Case(1, 4, 2, 16, 29)
    q, k, v = (x[0] for x in case.tensors(3))
    for table, gathers in ((TABLE, False), (REFERENCE, True)):
        program = TorchProgram(small("lava", case.shape), kernels=table)
        keys, values = in_pool(k), in_pool(v)
        program.start(case.tokens).observe(0, q, keys, values)
        assert ("dense" in vars(keys), "dense" in vars(values)) == (gathers, gathers)


@pytest.mark.parametrize("name", ["snapkv", "lava", "gemfilter", "h2o", "simlayerkv-prefill"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_not_finite(name, wrong):
    """NaN and infinity decide nothing, in whichever kernel they occur first."""
    case = Case(2, 4, 2, 16, 29)
    program = TorchProgram(small(name, case.shape), kernels=TABLE)
    q, k, v = case.tensors(3)
    (v if name == "lava" else k)[1 if name != "gemfilter" else 0, 1, 7, 3] = wrong
    run = prefill(program, q, k, v)
    assert run.not_finite
    assert all(bool(kept.all()) for kept in run.kept)


@pytest.mark.parametrize("name", ["lava", "asl", "h2o", "simlayerkv-prefill"])
def test_kernels_can_be_compiled_before_a_request(name, monkeypatch):
    """All kernels that a prefill uses; the pool stays unchanged, NaN included."""
    case = Case(2, 4, 2, 16, 29)
    program = TorchProgram(small(name, case.shape), kernels=TABLE)
    pool = torch.randn(case.shape.layers, 40, 2, 16, device=DEVICE)
    pool[:, 3] = float("nan")
    before = pool.clone()
    warm.prefill(program, 16, Slots(pool, torch.empty(0, dtype=torch.int64)), torch.float32)
    assert torch.equal(pool.nan_to_num(7.0), before.nan_to_num(7.0))
    monkeypatch.setattr(program.generated, "compiled", None)
    prefill(program, *case.tensors(2))


def test_other_types_stay_with_torch():
    """A type that no kernel reads is computed by torch."""
    case = Case(2, 4, 2, 16, 29, torch.float64)
    bound, tensors = small("snapkv", case.shape), case.tensors(3)
    runs = [
        prefill(TorchProgram(bound, report=True, kernels=t), *tensors) for t in (REFERENCE, TABLE)
    ]
    for a, b in zip(*(run.result(bound.lowered.prefill.score) for run in runs), strict=True):
        assert torch.equal(a.data, b.data)


@pytest.mark.parametrize("attended", [False, True])
def test_chunks_add_up(attended):
    """Sums over all queries from chunks, as in a server."""
    case = Case(1, 4, 2, 16, 61)
    bound = small("h2o", case.shape)
    q, k, v = (x[0] for x in case.tensors(2))
    program = TorchProgram(bound, report=True, kernels=TABLE)
    whole, parts = program.start(61), program.start(61)
    whole.observe(0, q, k, v)
    for start, end in ((0, 20), (20, 45), (45, 61)):
        asking, keys = q[:, start:end], k[:, :end]
        lse = log_sum_exp(asking, keys) if attended else None
        if end < 61:
            parts.accumulate(0, asking, in_pool(keys), lse=lse)
        else:
            parts.observe(0, asking, keys, v, lse=lse)
    bar = relative_error(case, q[None], k[None], 61, 61 * 2)
    (a,), (b,) = (run.finish().result(bound.lowered.prefill.score) for run in (whole, parts))
    torch.testing.assert_close(a.data, b.data, rtol=2 * bar, atol=0.0)


# Expressions.

EXPRESSIONS = [
    "max[group](var[query](attn({q})))",
    "min[group](max[query](attn({q}) where not recent(3)))",
    "count[group, query](attn({q}) > 0.1)",
    "count[group](any[query](attn({q}) > 0.2)) + 0 * norm1[dim](key)",
    "sum[group](mean[query](attn({q}) * distance({q})))",
    "sum[group, query](attn({q}) / sum[query](attn({q})))",
    "sum[group, query](log(attn({q}) where position % 2 == 0)) + sum[dim](key * value)",
    "sum[group, query](attn({q}) where any[query](attn({q}) > 0.3) else 0)",
    "mean[group](avgpool(max[query](attn({q})) where position % 3 < 2, 5))",
    "max[group](sum[query](attn({q}) / max[token](attn({q}))))",
    "sum[group](sum[query](attn({q}) where distance({q}) >= 2)) * max[dim](abs(value))",
    "mean[dim](key) + var[dim](value) * min[group](min[query](logits({q})))",
    "sum[query](mean[group](attn({q})) ^ 2) / count[query](mean[group](attn({q})))",
    "norm2[dim](key) * cosine[dim](key, value) * sum[group, query](attn({q}))",
    "sum[group, query](attn({q}) * (1 + layer)) + length * "
    "mean[group](mean[query](attn({q}) where layer < 1 or position > 4))",
    "max[group](exp(-sum[query](attn({q})))) - sum[group](sum[query](abs(logits({q})) ^ 0.5))",
    "mean[group, query](attn({q})) * mean[kv, group, query](attn({q}))",
    "sum[group](max[query](min(attn({q}), 0.1 + 0 * distance({q})))) / 3",
    "sum[group](sum[query](attn({q})) where not sinks(3)) + "
    "min[group](sum[query](1 - attn({q}) where recent(5) or position == 7))",
]


def size_of(x: Value) -> float:
    data = x.data[x.data.isfinite()]
    return data.abs().max().item() if data.numel() else 0.0


@pytest.mark.thorough(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(EXPRESSIONS)))
def test_expressions(number):
    """A window in one tile, in blocks of queries, and all queries; groups of 3, head size 5.

    None of these expressions raises a relative error of attention by more than a factor of 32 of
    the largest score, as logarithms, differences and variances have small condition numbers here.
    """
    case = Case(2 if "layer" in EXPRESSIONS[number] else 1, 6, 2, 5, 45)
    windows = ("recent(7)", "recent(prompt - 5)", "new")
    queries = windows[number % 3], windows[(number + 1) % 3]
    q, k, v = case.tensors(4)
    bar = 32 * relative_error(case, q, k, 45, 45 * 3 + case.size)
    assert bar < 1e-2
    for asked in queries:
        score = EXPRESSIONS[number].replace("{q}", asked)
        bound = inline(f"{score} + 0 * norm1[dim](key)", case.shape)
        programs = [TorchProgram(bound, report=True, kernels=t) for t in TABLES]
        assert not programs[1].generated.fusion.reasons
        runs = [prefill(program, q, k, v) for program in programs]
        for a, b in zip(*(run.result(bound.lowered.prefill.score) for run in runs), strict=True):
            torch.testing.assert_close(a.data, b.data, rtol=0.0, atol=bar * size_of(a))


@pytest.mark.parametrize(
    "score",
    [
        "sum[group, query](attn(recent(7)) * weight)",
        "max[group](sum[query](attn(new) where attn(new) > part)) * gate",
        "norm1[dim](value * gate) + sum[head, query](attn(recent(3))) / (1 + part)",
        "sum[group, query](attn(recent(7)) where gate > 0.4 else 0) + 0 * norm1[dim](key)",
    ],
)
@pytest.mark.parametrize("together", [False, True])
def test_tensors_of_the_model_in_kernels(score, together):
    case = Case(3, 6, 2, 16, 45)
    data = "{gate: {axes: [layer, kv]}, part: {axes: [layer]}, weight: {axes: [kv, group]}}"
    bound = inline(score, case.shape, f"data: {data}\n")
    q, k, v = case.tensors(4)
    bar = 32 * relative_error(case, q, k, 45, 45 * 3 + case.size)
    programs = [TorchProgram(bound, report=True, kernels=t, keys_stay=together) for t in TABLES]
    assert programs[1].layers_together(45) == (3 if together else 1)
    runs = [
        drive(program, 45, InPools(q, *(x.transpose(1, 2) for x in (k, v)))).run.finish()
        for program in programs
    ]
    kept = [torch.stack(run.kept) for run in runs]
    assert torch.equal(*kept)
    for a, b in zip(*(run.result(bound.lowered.prefill.score) for run in runs), strict=True):
        torch.testing.assert_close(
            torch.as_tensor(a.data).double(), torch.as_tensor(b.data).double(),
            rtol=0.0, atol=bar * size_of(a),
        )  # fmt: skip


@pytest.mark.parametrize("size", [3, 8, 16])
@pytest.mark.parametrize(
    "score",
    [
        "sum[dim](key + 1)",
        "mean[dim](max(key, 0.5)) + var[dim](2 - value)",
        "norm2[dim](key * value where layer < 1 else norm1[dim](value))",
        "sum[dim](value where {flag} else 2) + min[dim](key where {flag} else 3)",
    ],
)
def test_what_is_added_up_over_few_dimensions(score, size):
    """A tile has at least 16 dimensions; the surplus adds nothing, even for constant values."""
    case = Case(2, 4, 2, size, 23)
    for flag in ("flag", "layer == 1"):
        bound = inline(score.format(flag=flag), case.shape, "params: {flag: false}\n")
        programs = [TorchProgram(bound, report=True, kernels=t) for t in TABLES]
        runs = [prefill(program, *case.tensors(5)) for program in programs]
        for a, b in zip(*(run.result(bound.lowered.prefill.score) for run in runs), strict=True):
            torch.testing.assert_close(
                torch.as_tensor(a.data).double(), torch.as_tensor(b.data).double(),
                rtol=0.0, atol=1e-5 * (1 + size_of(a)),
            )  # fmt: skip


@pytest.mark.parametrize(
    "score",
    [
        "sum[kv, group, query, token]((attn(recent(3)) - 0.02) / 0)",  # torch adds what is left
        "max[query, group](sum[token]((attn(recent(3)) - 0.02) / 0))",  # splits of a row
        "sum[query, group](sum[token]((attn(recent(3)) - 0.02) / 0))",
        "sum[group, query]((attn(all) - 0.004) / 0)",  # programs share the queries
        "sum[token, dim](key / 0)",
        "sum[kv, dim](value / 0)",
    ],
)
@pytest.mark.parametrize("tokens", [9, 300])
def test_infinities_of_both_signs_add_up_to_none(score, tokens):
    """Wherever they meet: in a part of a sum, or where parts are put together."""
    case = Case(2, 4, 2, 4, tokens)
    bound = inline(f"({score}) + 0 * norm1[dim](key)", case.shape)
    runs = [prefill(TorchProgram(bound, report=True, kernels=t), *case.tensors(5)) for t in TABLES]
    assert runs[1].program.generated is not None
    for a, b in zip(*(run.result(bound.lowered.prefill.score) for run in runs), strict=True):
        assert torch.equal(torch.as_tensor(a.data), torch.as_tensor(b.data))


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        ("sum[group](sum[query](floor(9 * attn(recent(5)))))", "`floor` has no kernel"),
        ("sum[group](sum[query](avgpool(attn(recent(5)), 3)))", "`avgpool` has no kernel"),
        ("sum[group](sum[query](attn(recent(5)) ^ 0.3))", "a power that is not"),
        ("sum[group](sum[query](exp(logits(recent(5)))))", "range of float32"),
        ("sum[group](sum[query](attn(recent(5)) * mean[kv](attn(recent(5)))))", "`mean[kv]`"),
    ],
)  # fmt: skip
def test_unsupported_expressions_stay_with_torch(score, reason):
    case = Case(2, 4, 2, 8, 23)
    bound = inline(score, case.shape)
    programs = [TorchProgram(bound, report=True, kernels=t) for t in TABLES]
    runs = [prefill(program, *case.tensors(1)) for program in programs]
    assert_same_kept(*runs)
    assert any(reason in each for each in TorchProgram(bound).fusions[0].reasons.values())
    assert any(reason in line for line in kernels(bound))


@pytest.mark.thorough(every=3)
@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_policies(seed, monkeypatch):
    """States, propagation, merges and decode steps all continue from the kernels' values."""
    random = Random(seed)
    bound = grammar.accepted(random, (2, 6, 2, 5))
    q, k, v, steps = tensors(np.random.default_rng(seed), (2, 6, 2, 5), 12 + seed, 2)
    expected = torch_apply.apply(bound, q, k, v, steps)
    monkeypatch.setattr(torch_apply, "TorchProgram", partial(TorchProgram, kernels=TABLE))
    actual = torch_apply.apply(bound, q, k, v, steps)
    assert all(map(np.array_equal, expected.kept, actual.kept))
    assert expected.propagated == actual.propagated
    assert [x.kept for x in expected.steps] == [x.kept for x in actual.steps]


# Of the first seeds, those of policies that score all layers together.
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2, 3, 9, 11, 14, 15, 16, 20, 21])
def test_random_policies_that_score_all_layers_together(seed):
    random, case = Random(seed), Case(3, 6, 2, 16, 9 + seed)
    accepted = (grammar.accepted(random, (3, 6, 2, 16)) for _ in range(20))
    programs = (TorchProgram(x, kernels=TABLE, keys_stay=True) for x in accepted)
    together = (x for x in programs if x.layers_together(case.tokens) == case.layers)
    program = next(x for x in together if not x.bound.propagates)
    bound = program.bound
    tensors = case.tensors(seed)
    assert_same_kept(prefill_together(program, *tensors), prefill(TorchProgram(bound), *tensors))
