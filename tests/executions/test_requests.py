"""Requests taken through steps together get the same as alone, beside any others."""

from __future__ import annotations

from copy import copy

import numpy as np
import pytest
import stores
import torch
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.planned.steps import Steps
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.tensors.kernels import Entries
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.kernels.table import REFERENCE
from recordings import tensors
from shipped_policies import shipped_program
from stores import TABLE, Store, assert_alike, begun, groups, states_of, together

pytestmark = pytest.mark.interpreted

SHAPE = (3, 4, 2, 16)
SETTINGS = {
    "h2o": {"heavy": "5", "window": "4"}, "tova": {"capacity": "9"},
    "streamingllm": {"start": "2", "window": "6"},
    "streamingllm-original": {"start": "0", "window": "7"},
    "vatp": {"rate": "0.25", "start": "2"}, "cake": {"capacity": "9", "window": "3"},
    "cam": {"start": "2", "window": "6", "reach": "3"},
    "roco": {"capacity": "6", "newest": "2"},
    "cam-original": {"recent_rate": "0.3", "start_rate": "0.1", "reach": "3"},
    "d2o": {"rate": "0.4", "start": "2"}, "d2o-code": {"rate": "0.4", "start": "1"},
    "pyramidinfer": {"batch": "2", "recent_rate": "0.1", "least": "4"},
}  # fmt: skip
LAYER_BY_LAYER = {
    "d2o": {"rate": "0.4"}, "d2o-code": {"rate": "0.4"}, "simlayerkv": {"window": "3"},
}  # fmt: skip
ONCE = "simlayerkv"  # decides at the first new token
SHAPES = {"d2o-code": (5, 4, 2, 16)}  # its first and last layers stay whole
PROMPTS = (14, 1, 23, 14)
WINDOWS = 3  # of these under pyramidinfer: requests go together that have as large ones


@pytest.fixture(autouse=True)
def _generated_files(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "generated"))


def bound_to(name, **more):
    shape = SHAPES.get(name, SHAPE)
    given = SETTINGS.get(name, {}) | more
    return bind(shipped_program(name), ModelShape(*shape), given)


def requests(bound, prompts=PROMPTS, program=None, **more):
    """A store for each prompt, with different tensors and one program."""
    program = program or TorchProgram(bound, **more)
    shape = (bound.shape.layers, bound.shape.heads, bound.shape.kv_heads, bound.shape.head_dim)
    made = []
    for seed, tokens in enumerate(prompts):
        *prompt, later = tensors(np.random.default_rng(seed), shape, tokens, 60)
        made.append(Store(bound, prompt, later, program=program))
    return made


def same_vectors(one, other):
    """Checks vectors; merged rows are rounded, and their sums may be in another order."""
    for heads, others in zip(one.vectors(), other.vectors(), strict=True):
        for rows, same in zip(heads, others, strict=True):
            torch.testing.assert_close(rows, same, rtol=3e-7, atol=1e-7)


def test_which_policies_go_together():
    going = []
    for name in shipped():
        bound = bound_to(name)
        if bound.folded.decode is not None and Steps(bound, False, TABLE).rule(40) is not None:
            going.append(name)
    assert sorted(going) == sorted([*SETTINGS, ONCE])
    assert Steps(bound_to("h2o"), False, REFERENCE).rule(40) is None  # nobody compiles kernels
    # Where a share of the prompt is less than a token, nothing leaves.
    assert Steps(bound_to("vatp"), False, TABLE).rule(3) is None


@pytest.mark.thorough(besides=["h2o", "roco"])
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("name", SETTINGS)
def test_each_gets_what_it_gets_alone(name):
    """Layers and requests hold different numbers of entries, KV heads different entries."""
    bound = bound_to(name)
    prompts = PROMPTS if name != "vatp" else (14, 9, 23, 14)
    plain = requests(bound, prompts)
    crowd = requests(bound, prompts, kernels=TABLE)
    for turn, number in enumerate((3, 1, 16, 5)):
        leaves = turn != 1 or name not in ("h2o", "vatp")
        chosen = [each.follow(number, leaves=leaves) for each in plain]
        found = groups(crowd[:: -1 if turn % 2 else 1], number, leaves=leaves)
        assert len(found) == (WINDOWS if name == "pyramidinfer" else 1)
        for own in found:
            together(own, number, leaves=leaves)
        for one, other, choices in zip(plain, crowd, chosen, strict=True):
            assert one.held() == other.held()
            same_vectors(one, other)
            if choices and turn == 2:
                for layer, choice in enumerate(choices):
                    numbers = other.memory.read_numbers()
                    assert numbers.counts_after[layer].tolist() == choice.kept.sum(-1).tolist()
    assert all(each.done == 25 for each in crowd)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("spare", [0, 1])
def test_what_layers_decide_once_is_decided_of_all_at_once(spare):
    """With attention, means over a layer's KV heads, and numbers that differ by layer."""
    bound = bound_to(ONCE, window="3", start="1", threshold="0.2", spare=str(spare))
    plain, crowd = requests(bound), requests(bound, kernels=TABLE)
    poisoned = requests(bound, (17,), program=crowd[0].program)[0]
    poisoned.steps.q[0, 1, -1, 2] = float("nan")
    for number in (1, 3, 16):
        for each in plain:
            each.follow(number)
        others = [*crowd[::-1], *([poisoned] if number == 1 else [])]
        found = groups(others, number)
        assert len(found) == 1
        together(found[0], number)
        assert [each.held() for each in crowd] == [each.held() for each in plain]
    poisoned.memory.read_numbers()
    assert poisoned.memory.not_finite
    layers = [[len(own[0]) for own in each.held()] for each in crowd]
    longest = [tokens + 20 for tokens in PROMPTS]
    thinned = [sum(n < most for n in own) for own, most in zip(layers, longest, strict=True)]
    assert 0 < sum(thinned) < len(crowd) * SHAPE[0]
    if spare:
        assert all(own[-1] == most for own, most in zip(layers, longest, strict=True))


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
def test_what_was_not_finite_before_requests_fold_together_is_known_then():
    fresh, poisoned = requests(bound_to("h2o"), (14, 23), kernels=TABLE)
    poisoned.steps.q[0, 1, -1, 2] = float("nan")
    together([poisoned], 1, leaves=False)
    together([fresh, poisoned], 3)
    for each in (fresh, poisoned):
        each.memory.read_numbers()
    assert (fresh.memory.not_finite, poisoned.memory.not_finite) == (False, True)


@pytest.mark.thorough(besides=["cake"])
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("name", SETTINGS)
def test_no_number_depends_on_the_others(name):
    """Bit by bit: alone, with others, in any order, beside one that is not finite."""
    bound = bound_to(name)
    prompts = (14, 40, 23)
    alone, crowd = (requests(bound, prompts, kernels=TABLE) for _ in range(2))
    reads = name not in ("streamingllm", "streamingllm-original")
    poisoned = requests(bound, (30,), program=crowd[0].program)[0]
    before = poisoned.held()
    for order, number in (((0, 1, 2), 4), ((2, 1), 16), ((0,), 16), ((1, 0, 2), 5)):
        for i in order:
            together([alone[i]], number)
        others = [crowd[i] for i in order]
        if not poisoned.memory.not_finite:
            poisoned.steps.q[poisoned.done + number - 1, 1, -1, 2] = float("nan")
            others.insert(1, poisoned)
        for own in groups(others, number):
            together(own, number)
        for one, other in zip(alone, crowd, strict=True):
            assert one.held() == other.held()
            for layer in range(bound.shape.layers):
                a, b = (states_of(each.memory, layer) for each in (one, other))
                assert all(torch.equal(a[name], b[name]) for name in a)
            a, b = (each.memory.thresholds() for each in (one, other))
            assert str(a) == str(b)
    assert poisoned.memory.not_finite == reads
    if reads:
        since = list(range(30, 30 + poisoned.done))
        assert poisoned.held() == [[own + since for own in heads] for heads in before]


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
def test_a_request_goes_alone_and_comes_back():
    """In its own block in between, and as a copy."""
    bound = bound_to("h2o")
    plain, crowd = requests(bound), requests(bound, kernels=TABLE)
    for number, way in (
        (3, "together"),
        (2, "alone"),
        (16, "together"),
        (4, "copies"),
        (1, "together"),
    ):
        for each in plain:
            each.follow(number)
        if way == "copies":
            for each in crowd:
                each.memory = copy(each.memory)
        if way == "alone":
            for each in crowd:
                each.follow(number)
        else:
            together(crowd, number)
        for one, other in zip(plain, crowd, strict=True):
            assert one.held() == other.held()


@pytest.mark.thorough(every=3)
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("name", ["d2o", "d2o-code", "pyramidinfer", "simlayerkv"])
def test_layers_may_be_looked_at_one_after_the_other(name):
    """Then, too, results do not depend on other requests."""
    bound = bound_to(name, **LAYER_BY_LAYER.get(name, {}))
    alone, crowd = requests(bound), requests(bound)
    for number in (3, 1, 16, 5):
        for each in alone:
            each.follow(number)
        for own in groups(crowd, number):
            together(own, number)
        for one, other in zip(alone, crowd, strict=True):
            assert_alike(one, other)


def test_what_fails_has_changed_nothing():
    bound = bound_to("tova")
    plain, crowd = requests(bound), requests(bound, kernels=TABLE)
    together(crowd, 4)
    done = [each.done for each in crowd]
    rows = [list(each.rows) for each in crowd]
    broken = crowd[2].memory.steps
    original = broken.kernels

    def fails(*given):
        raise RuntimeError("made to fail")

    broken.kernels = original | {"best": fails}
    with pytest.raises(RuntimeError, match="made to fail"):
        together(crowd, 3)
    broken.kernels = original
    for each, own, number in zip(crowd, rows, done, strict=True):
        each.rows, each.done = own, number
    together(crowd, 3)
    for one, other in zip(plain, crowd, strict=True):
        one.follow(4)
        one.follow(3)
        assert one.held() == other.held()


@pytest.mark.thorough(every=12)
@pytest.mark.parametrize(
    ("rules", "goes"),
    [
        ("score: heat\nbudget: 9\nkeep: recent(3) then top(score)", True),
        ("score: heat\nbudget: 9\nkeep: sinks(2) then recent(3) then top(score)", True),
        ("score: heat\nbudget: 9\nkeep: top(score)", True),
        ("score: maxpool(heat, 3)\nbudget: 9\nkeep: recent(3) then top(score)", True),
        ("score: mean[kv](heat)\nbudget: 9\nkeep: recent(3) then top(score)", True),
        ("score: heat\nbudget: floor(prompt / 2)\nkeep: recent(1) then top(score)", True),
        ("score: heat\nbudget: 9 + generated\nkeep: recent(3) then top(score)", True),
        ("score: heat + position / prompt\nbudget: 9\nkeep: recent(3) then top(score)", True),
        ("score: heat where position < prompt\nbudget: 9\nkeep: recent(3) then top(score)", True),
        ("score: heat\nkeep: position > prompt / 2 then top(score, prompt // 3)", True),
        ("score: heat\nbudget: 9\nkeep: top(score) where layer != 1 else all", True),
        ("score: heat\nbudget: 9 where layer > 0 else 7\nkeep: recent(3) then top(score)", True),
        ("score: heat * layer\nbudget: 9\nkeep: recent(3) then top(score)", True),
        ("score: heat\nkeep: top(score, 7 where layer > 0 else 9)", True),
        ("score: sum[group, query](attn(new) * layer)\nbudget: 9\nkeep: top(score)", False),
        ("score: heat\nkeep: top[kv, token](score, 12)", False),
        ("score: heat\nbudget: 9\nkeep: heat > 0.1 then top(score)", True),
        ("score: heat\nkeep: recent(3) then recent(2)", True),
        # Queries of earlier steps, whose own entries may have left.
        ("score: sum[group, query](attn(recent(4)))\nbudget: 6\nkeep: top(score)", True),
        ("score: heat + max[query, kv, group](attn(recent(3)))\nkeep: top(score, 5)", True),
        (
            "score: mean[group, query](attn(recent(2)) * index[query](attn(recent(2))))\n"
            "budget: 7\nkeep: recent(1) then top(score)",
            True,
        ),
        (
            "score: mean[group, query](distance(recent(2)) * attn(recent(2)))\nkeep: top(score, 8)",
            False,
        ),
        ("score: heat\nbudget: 9\nkeep: position < 3 then recent(2) then top(score)", True),
        ("score: heat\nkeep: heat > 0.1 then top(score, cached / 4) then recent(2)", True),
        ("score: heat\nkeep: position < 5 then top(score where heat < 1, prompt / 4)", True),
        ("score: heat\nkeep: position < 3 then recent(generated / 4) then top(score, 3)", True),
        ("score: heat\nbudget: 9\nkeep: heat > 0.4 then top(score where heat < 0.9)", True),
        ("score: heat\nbudget: 5 + cached / 3\nkeep: position < 3 then top(score)", True),
        (
            "score: sum[group, query](attn(recent(2)))\nkeep: top(score, 6)\n"
            "merge:\n  into: next(2)\n  weight: max[group, query](attn(new))",
            False,
        ),
        # One number of each layer, which kernels would take for one of all layers.
        (
            "score: |\n  sum[group, query](attn(recent(2)) where attn(recent(2)) > 0.5 * near)\n"
            "let:\n  near: mean[head, query, token](attn(recent(2)))\nkeep: top(score, 6)",
            False,
        ),
        # One number of each layer.
        (
            "score: heat - entropy[kv, token](heat) / 3\nkeep: top(score where score < 0, 6)",
            True,
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
def test_rules(rules, goes):
    lines = "".join(f"  {line}\n" for line in rules.splitlines())
    text = (
        "policy: a-test\nlanguage: 1\nabout: a test\nkeep: all\ndecode:\n"
        f"  state:\n    heat: heat + sum[group, query](attn(new))\n{lines}"
    )
    bound = bind(load(Source("a-test.yaml", text)).require(), ModelShape(*SHAPE))
    crowd = requests(bound, (14, 19), kernels=TABLE)
    assert (crowd[0].memory.steps.rule(14) is not None) == goes
    plain = requests(bound, (14, 19))
    for number in (4, 16, 3):
        for each in plain:
            each.follow(number)
        (own,) = groups(crowd, number)
        together(own, number)
        for one, other in zip(plain, crowd, strict=True):
            assert one.held() == other.held()


def on_a_grid(x, scales, stored):
    """Tensors [..., L, G, n, D] rounded to 8 bits with a scale per layer."""
    by = torch.tensor(scales)[:, None, None, None]
    return (torch.as_tensor(x) / by).to(stored).float() * by


@pytest.mark.thorough(besides=["h2o-torch", "cake-triton"])
@pytest.mark.parametrize("table", [REFERENCE, TABLE], ids=["torch", "triton"])
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_lists_of_8_bits_are_followed_through_the_scales_of_their_layers(name, table, monkeypatch):
    """Choices and merge weights are those of the scaled entries."""
    stored, bound = torch.float8_e5m2, bound_to(name)
    layers, heads = bound.shape.layers, bound.shape.kv_heads
    scales = [[0.37 + layer, 2.0, 5.5, 0.1, 1.0][layer] for layer in range(layers)]
    shape = (layers, bound.shape.heads, heads, bound.shape.head_dim)
    follow_together = stores.follow_together

    def of_8_bits(memories, steps, newest, queries, read, **options):
        def scaled(there):
            by = torch.tensor(scales).repeat_interleave(heads).repeat(len(memories))
            made = []
            for x in read(there):
                codes = torch.full(x.pool.shape, torch.nan)
                codes[x.ids] = x.pool[x.ids] / by[:, None, None]
                codes[0] = torch.nan  # what no list holds
                made.append(Entries(codes.to(stored), x.ids, by))
            return tuple(made)

        return follow_together(memories, steps, newest, queries, scaled, **options)

    found = []
    for follow in (follow_together, of_8_bits):
        monkeypatch.setattr(stores, "follow_together", follow)
        program, made = TorchProgram(bound, kernels=table), []
        for seed, tokens in enumerate((14, 23)):
            q, k, v, later = tensors(np.random.default_rng(seed), shape, tokens, 60)
            k, v = (on_a_grid(x, scales, stored).numpy() for x in (k, v))
            steps = [later[0]]
            for x in later[1:]:
                steps.append(on_a_grid(x[..., None, :], scales, stored)[..., 0, :].numpy())
            made.append(Store(bound, (q, k, v), steps, program=program))
        for each in made:  # the prompt's merges are rounded as well
            each.rows = [
                tuple(on_a_grid(x[None], scales[layer : layer + 1], stored)[0] for x in rows)
                for layer, rows in enumerate(each.rows)
            ]
        found.append([begun([each], 4) for each in made])
    assert any(found[0])  # under pyramidinfer only those of one prompt may leave
    for plain, eight in zip(*found, strict=True):
        if plain is None:
            assert eight is None
            continue
        assert torch.equal(plain.kept, eight.kept)
        assert bool(plain.proceed.all())
        assert bool(eight.proceed.all())
        assert len(plain.merges) == len(eight.merges)
        for a, b in zip(plain.merges, eight.merges, strict=True):
            (sources, weights, offsets), other = a.merging._links, b.merging._links
            assert torch.equal(offsets, other[2])
            for row, number in enumerate(offsets[:, -1].tolist()):  # nothing lies behind
                assert torch.equal(sources[row, :number], other[0][row, :number])
                torch.testing.assert_close(weights[row, :number], other[1][row, :number])
            torch.testing.assert_close(a.merging._divide, b.merging._divide)
