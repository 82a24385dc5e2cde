"""Generated kernels of decode steps equal the torch program within float32's error.

KV heads hold different entries, rows of a pool that mean nothing are NaN, several steps are
evaluated at once. Without a GPU the kernels run in Triton's interpreter.

Dimensions: H query heads, G KV heads, M cached positions, T steps, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.codegen.fusion import Fusion
from kvpolicy.dsl.execute.layer.across import known_before
from kvpolicy.dsl.execute.layer.evaluate import Evaluation
from kvpolicy.dsl.execute.layer.generated import Generated
from kvpolicy.dsl.execute.planned.steps import Steps
from kvpolicy.dsl.execute.tensors.checks import FiniteChecks
from kvpolicy.dsl.execute.tensors.kernels import Entries, Keys
from kvpolicy.dsl.execute.tensors.values import Frame, Step, Value, aligned
from kvpolicy.dsl.ir.nodes import ModelShape, Node
from kvpolicy.dsl.ir.traverse import nodes_of
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.kernels.entries.rounding import FLOAT8
from kvpolicy.kernels.scoring.generated import generated
from kvpolicy.kernels.table import REFERENCE
from recordings import tensors
from stores import Store
from test_follow import DECODING, bound_to

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TABLE = {**REFERENCE, "generated": generated}
HALF_ULP = 2.0**-24  # of float32: the largest relative error of one rounding
NAN = float("nan")
# What is computed beside the numbers that count, and for NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """Writes generated files to a cache other than the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def in_pool(x: torch.Tensor, there: torch.Tensor | None, seed: int = 0) -> Entries:
    """Entries [G, M, D] in random order in a pool whose other rows are NaN."""
    heads, entries, size = x.shape
    pool = torch.full((3 * heads * entries + 1, size), NAN, dtype=x.dtype, device=x.device)
    order = torch.randperm(heads * entries, generator=torch.Generator().manual_seed(seed))
    ids = (3 * order + 1).view(heads, entries).to(x.device)
    pool[ids] = x if there is None else x.masked_fill(~there[..., None], NAN)
    return Entries(pool, ids)


def eight_bits(x: Entries, stored: torch.dtype) -> Entries:
    """The entries in 8 bits, with a scale per list."""
    scale = 0.3 + torch.arange(len(x.ids), device=x.ids.device).float()
    pool = x.pool.clone()
    pool[x.ids] = pool[x.ids] / scale[:, None, None]
    return Entries(pool.to(stored), x.ids, scale)


@dataclass(frozen=True)
class Case:
    """Sizes of a model, a layer's entries and its queries.

    Attributes:
        queries: number of queries, of the steps or remembered.
        ragged: whether KV heads hold different entries.
        gathered: whether keys and values are rows of a pool.
    """

    heads: int
    kv: int
    size: int
    entries: int
    queries: int = 1
    ragged: bool = True
    gathered: bool = True
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> ModelShape:
        return ModelShape(2, self.heads, self.kv, self.size)

    def frame(self, bound: Bound, seed: int, *, steps: bool = True) -> Frame:
        """A decode step, or with `steps` as many as there are queries, at layer 1."""
        random = torch.Generator().manual_seed(seed)
        new = min(self.queries, self.entries)
        positions = torch.randperm(3 * self.entries, generator=random)[: self.entries - new]
        last = 3 * self.entries + torch.arange(new)
        positions = torch.cat([positions.sort().values, last]).to(DEVICE)
        there = torch.rand(self.kv, self.entries, generator=random) < 0.6
        there[:, self.entries - new :] = True
        q, k, v = (
            torch.randn(heads, number, self.size, generator=random).to(DEVICE, self.dtype)
            for heads, number in (
                (self.heads, self.queries), (self.kv, self.entries), (self.kv, self.entries)
            )
        )  # fmt: skip
        asked = positions[self.entries - new :]
        if not steps:  # remembered queries, some from before all entries of a head
            asked = torch.arange(self.queries, device=DEVICE) + (positions[-1] + 1 - self.queries)
            asked[: self.queries // 2] = torch.arange(self.queries // 2)
        there = there.to(DEVICE) if self.ragged else None
        k, v = (self.rows(x, there, seed + i) for i, x in enumerate((k, v)))
        return Frame(
            bound, self.entries, torch.device(DEVICE), self.kv, 2 * self.entries, layer=1,
            vectors={"query": q, "key": k, "value": v}, positions=positions, held_mask=there,
            step=Step(7, asked, self.queries if steps else 1),
        )  # fmt: skip

    def rows(self, x: torch.Tensor, there: torch.Tensor | None, seed: int) -> Keys:
        """Keys or values; in a pool, entries that a KV head does not hold are NaN."""
        if self.gathered:
            return in_pool(x, there, seed)
        return x if there is None else x.masked_fill(~there[..., None], 0.0)

    def error(self, frame: Frame, terms: int) -> float:
        """Bound on the relative error of sums of attention; see `test_generated`."""
        q, keys = (frame.read(name).abs().double() for name in ("query", "key"))
        keys = keys.repeat_interleave(self.heads // self.kv, 0)
        length = torch.matmul(q, keys.transpose(-1, -2)).max().item()
        largest = length * self.size**-0.5
        return HALF_ULP * (2 * (self.size + 4) * largest + self.entries + terms + 16)


# GQA 1, 2, 3 and 4, one entry, less than a block, several splits; 1, 2 and 16 steps.
CASES = [
    Case(2, 2, 64, 63, 2),
    Case(4, 2, 80, 130, 16),
    Case(4, 1, 64, 1),
    Case(6, 2, 5, 63, 1, ragged=False),
    Case(4, 2, 64, 130, 16, dtype=torch.float16),
    Case(4, 1, 80, 63, 16, gathered=False),
    Case(4, 2, 16, 600, 2, dtype=torch.bfloat16),
    Case(2, 2, 64, 40, 40, ragged=False, gathered=False),
]


def policy(text: str, shape: ModelShape) -> Bound:
    header = "policy: a-test\nlanguage: 1\nabout: a test\n"
    return bind(load(Source("a-test.yaml", header + text)).require(), shape)


def scored(score: str, shape: ModelShape) -> tuple[Bound, Node]:
    """A policy that decides decode steps by `score`, and the node of the score."""
    bound = policy(
        "score: position\nbudget: 9\nkeep: recent(2) then top(score)\n"
        f"decode:\n  score: |\n    {score}\n",
        shape,
    )
    keep = bound.lowered.decode.keep
    return bound, next(node for node in nodes_of([keep]) if node.name == "score")


def evaluated(frame: Frame, node: Node, made: Generated | None) -> Value:
    x = Evaluation(
        frame,
        Steps(frame.bound, False, REFERENCE).updates,
        across_layers=known_before,
        generated=made,
    )
    return x.value(node)


def both(frame: Frame, node: Node) -> tuple[Value, Value]:
    """Values by torch and by kernels; kernels must not read missing entries."""
    made = Generated.of(Fusion(frame.bound, [node], steps=True), TABLE)
    assert not made.fusion.reasons
    assert all(made.serves(bundle, frame) for bundle in made.fusion.bundles)
    values = []
    for given in (None, made):
        frame = replace(frame, finite_checks=FiniteChecks())
        values.append(evaluated(frame, node, given))
        assert frame.finite_checks.results
        assert all(bool(each.all()) for each in frame.finite_checks.results)
    return values[0], values[1]


def shown(x: Value) -> torch.Tensor:
    """The data, 0 where absent."""
    if x.mask is None:
        return x.data
    return x.data.where(aligned(x.mask, x.mask_axes, x.axes), torch.zeros_like(x.data))


EXPRESSIONS = [
    "sum[group, query](attn({q}))",
    "max[group](var[query](attn({q})))",
    "count[group, query](attn({q}) > 0.1)",
    "sum[group](mean[query](attn({q}) * distance({q})))",
    "sum[group, query](attn({q}) / sum[query](attn({q})))",
    "sum[group, query](attn({q}) where any[query](attn({q}) > 0.3) else 0)",
    "mean[group](avgpool(max[query](attn({q})) where position % 3 < 2, 5))",
    "sum[group](maxpool(sum[query](attn({q})) where not recent(3), 3))",
    "max[group](sum[query](attn({q}) / max[token](attn({q}))))",
    "mean[dim](key) + var[dim](value) * min[group](min[query](logits({q})))",
    "sum[group, query](attn({q})) * norm1[dim](value) where not sinks(2)",
    "mean[group, query](attn({q})) * mean[kv, group, query](attn({q}))",
    "sum[group, query](attn({q}) * (1 + cached)) + mean[token](position) + "
    "sum[query, group, token](attn({q}) where recent(5) or sinks(2))",
    "sum[query](mean[group](attn({q})) ^ 2) / count[query](mean[group](attn({q})))",
    "max[token](max[group, query](attn({q}))) * max[dim](abs(value)) + mean[kv, token, dim](key)",
    "sum[group](sum[query](attn({q})) where not sinks(3)) + floor(position / 2) * "
    "mean[group](sum[query](2 - attn({q}) where recent(5) or position == 7))",
]


@pytest.mark.slow
@pytest.mark.thorough(every=2)
@pytest.mark.parametrize("number", range(len(EXPRESSIONS)))
def test_expressions(number):
    """One step, and a window of remembered queries that may see nothing."""
    for turn in range(2):
        case = CASES[(number + 3 * turn) % len(CASES)]
        for window, steps in (("new", 1), ("recent(7)", 7)):
            case = replace(case, queries=steps)
            bound, node = scored(EXPRESSIONS[number].replace("{q}", window), case.shape)
            frame = case.frame(bound, number, steps=False)
            a, b = both(frame, node)
            assert a.axes == b.axes
            bar = 32 * case.error(frame, 7 * 4 + case.size) * shown(a).abs().max().item()
            torch.testing.assert_close(shown(a), shown(b), rtol=0.0, atol=bar)


@pytest.mark.parametrize("stored", FLOAT8)
@pytest.mark.parametrize("number", [0, 9, 10, 15])
def test_entries_of_8_bits_are_read_through_their_scale(number, stored):
    """Kernels read stored entries, torch the scaled ones."""
    case = replace(CASES[1], queries=7)
    bound, node = scored(EXPRESSIONS[number].replace("{q}", "recent(7)"), case.shape)
    frame = case.frame(bound, number, steps=False)
    vectors = {name: eight_bits(frame.vectors[name], stored) for name in ("key", "value")}
    frame = replace(frame, vectors={**frame.vectors, **vectors})
    a, b = both(frame, node)
    bar = 32 * case.error(frame, 7 * 4 + case.size) * shown(a).abs().max().item()
    torch.testing.assert_close(shown(a), shown(b), rtol=0.0, atol=bar)
    assert shown(a).abs().max() > 0


ADDED = [
    "sum[group, query](attn(new))",
    "count[query](mean[group](attn(new)))",
    "sum[query](mean[group](attn(new)) ^ 2)",
    "sum[group, query](1 - attn(new) where position % 2 == 0 else 0.5)",
    "sum[group](sum[query](attn(new) * distance(new)))",
    "mean[group](sum[query](0.5 + 0 * attn(new) where position > 9 or attn(new) > 0.1 else 2))",
]


@pytest.mark.parametrize("number", range(len(ADDED)))
def test_several_steps_at_once(number):
    """Tokens of later steps are absent at earlier ones, whatever a value would be without them."""
    for turn in range(3):
        case = CASES[(number + 3 * turn) % len(CASES)]
        bound, node = scored(ADDED[number], case.shape)
        frame = case.frame(bound, number)
        a, b = both(frame, node)
        bar = 32 * case.error(frame, case.queries * 4) * shown(a).abs().max().item()
        torch.testing.assert_close(shown(a), shown(b), rtol=0.0, atol=bar)


# Every shipped policy.

SHAPES = [(2, 4, 2, 64), (2, 2, 2, 80), (2, 4, 1, 16), (3, 6, 2, 6)]


def has_kernels(name: str) -> bool:
    bound = bound_to(name, SHAPES[0])
    steps = Steps(bound, False, TABLE)
    return steps.advancing is not None or steps.leaving is not None


class Pool(Store):
    """Keys and values as a server has them."""

    def read(self, layer: int, there: torch.Tensor | None) -> tuple[Keys, Keys]:
        return tuple(in_pool(x, there, i) for i, x in enumerate(self.rows[layer]))


@pytest.mark.thorough(besides=["h2o", "cake", "tova"])
@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DECODING if has_kernels(name)])
def test_shipped_policies_keep_the_same(name):
    """Prefill and decode steps by kernels, with states carried over."""
    for turn in range(2):
        shape = SHAPES[(len(name) + turn) % len(SHAPES)]
        bound = bound_to(name, shape)
        *prompt, later = tensors(np.random.default_rng(turn), shape, (19, 1)[turn], 24)
        plain, fast = Store(bound, prompt, later), Pool(bound, prompt, later, kernels=TABLE)
        for number in (1, 5, 16, 2):
            chosen = plain.follow(number), fast.follow(number)
            for layer, (a, b) in enumerate(zip(*chosen, strict=True)):
                assert torch.equal(a.kept, b.kept), (number, layer)
        assert not fast.memory.not_finite


def test_policies_that_decode_have_kernels():
    assert {name for name in DECODING if not has_kernels(name)} == {
        "streamingllm", "streamingllm-original",
    }  # fmt: skip


# What kernels read, and what they find there.


@pytest.mark.parametrize("wrong", [NAN, float("inf"), float("-inf")])
@pytest.mark.parametrize("score", ["sum[group, query](attn(new))", "norm1[dim](value)"])
def test_not_finite(score, wrong):
    """In one entry that one KV head holds, read by one query or by all."""
    case = replace(CASES[1], queries=3)
    bound, node = scored(score, case.shape)
    made = Generated.of(Fusion(bound, [node], steps=True), TABLE)
    for row, column in ((5, 3), (129, 40)):
        frame = case.frame(bound, 3)
        frame.held_mask[1, row] = True
        x = frame.vectors["value" if "value" in score else "key"]
        for number, finite in ((0.5, True), (wrong, False)):
            x.pool[x.ids[1, row]] = 0.5
            x.pool[x.ids[1, row], column] = number
            frame.finite_checks = FiniteChecks()
            evaluated(frame, node, made)
            assert all(bool(each.all()) for each in frame.finite_checks.results) == finite


def test_entries_are_gathered_only_for_torch():
    case = CASES[1]
    bound, node = scored("sum[group, query](attn(new)) * norm1[dim](value)", case.shape)
    made = Generated.of(Fusion(bound, [node], steps=True), TABLE)
    for given, gathers in ((made, False), (None, True)):
        frame = case.frame(bound, 2)
        evaluated(frame, node, given)
        assert all(("dense" in vars(frame.vectors[x])) == gathers for x in ("key", "value"))


def test_what_kernels_do_not_serve():
    """A prefill, a step without keys, and types that no kernel reads stay with torch."""
    case = CASES[0]
    bound, node = scored("sum[group, query](attn(new))", case.shape)
    frame = case.frame(bound, 1)
    made = Generated.of(Fusion(bound, [node], steps=True), TABLE)
    (bundle,) = made.fusion.bundles
    assert made.serves(bundle, frame)
    query, double = frame.vectors["query"], frame.read("key").double()
    assert not made.serves(bundle, replace(frame, step=None))
    for vectors in ({"query": query}, {"query": query, "key": double}):
        assert not made.serves(bundle, replace(frame, vectors=vectors))
