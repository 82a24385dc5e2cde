"""Layers of a model in stages: which policies decide within a layer, and what they keep then."""

from pathlib import Path

import numpy as np
import pytest
import torch
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.bind.bounds import Bounds, max_entries
from kvpolicy.dsl.bind.kept import keep_of
from kvpolicy.dsl.bind.stages import why_not_apart
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.tools.trial_cases import sampled
from kvpolicy.kernels.table import REFERENCE
from recordings import tensors
from shipped_policies import shipped_program
from stages import Stage, observed
from stores import TABLE, Store, assert_alike, begun

pytestmark = pytest.mark.interpreted

SHAPE = (5, 4, 2, 4)
LARGE = (5, 4, 2, 16)  # of heads that kernels read
APART = (range(2), range(2, 3), range(3, 5))
TOKENS = 40
WITHIN = {
    "cam": {"start": "2", "window": "6", "reach": "3"},
    "cam-original": {"recent_rate": "0.3", "start_rate": "0.1", "reach": "3"},
    "h2o": {"heavy": "5", "window": "4"},
    "keydiff": {"capacity": "9"},
    "roco": {"capacity": "6", "newest": "2"},
    "simlayerkv": {"window": "3", "start": "1", "threshold": "0.2", "spare": "1"},
    "streamingllm": {"start": "2", "window": "6"},
    "streamingllm-original": {"start": "0", "window": "7"},
    "tova": {"capacity": "9"},
    "vatp": {"rate": "0.25", "start": "2"},
    "ada-pyramidkv": {"capacity": "12", "window": "3"},
    "adakv": {"capacity": "10", "window": "3"},
    "chunkkv": {"capacity": "10", "window": "3", "chunk": "4"},
    "pyramidkv": {"capacity": "12", "window": "3", "exact_total": "true"},
    "simlayerkv-prefill": {"threshold": "0.2", "queries": "4", "reach": "9", "window": "9"},
    "sinks-recent": {"capacity": "9"},
    "snapkv": {"capacity": "10", "window": "3"},
    "vatp-snapkv": {},
}
# They compare layers by numbers that stages tell each other.
COMPARING = {
    "cake": {"capacity": "10", "window": "3"},
    "d2o": {"rate": "0.3", "start": "2"},
    "d2o-code": {"rate": "0.3", "start": "2"},
}
SETTINGS = WITHIN | COMPARING
FOLDS = [name for name in SETTINGS if shipped_program(name).decode is not None]
# Of all others, a word of the reason.
REFUSED = {
    "asl": "`propagate", "asl-lava-d2o": "`propagate", "dynamickv": "`top[layer",
    "fastkv": "`propagate", "fastkv-adakv": "`propagate", "gemfilter": "`propagate",
    "lava": "layers are compared, and only its own data", "minicache": "`share",
    "pyramidinfer": "`propagate",
}  # fmt: skip


def bound_of(policy, **given):
    return bind(policy.require(), ModelShape(*SHAPE), given)


def prompt_of(shape, tokens=TOKENS):
    return tensors(np.random.default_rng(3), shape, tokens, 0)[:3]


def kept(program, prompt):
    """Entries that a program of some layers keeps, given tensors of all layers."""
    return torch.stack(observed(program, prompt).finish().kept)


@pytest.mark.parametrize(
    "keep", ["all where top[layer, kv](gate, 4) else recent(6)", "recent(split[layer](40, part))"]
)
def test_stages_with_tensors_of_the_model(keep):
    text = (
        "policy: a-test\nlanguage: 1\n"
        f"data: {{gate: {{axes: [layer, kv]}}, part: {{axes: [layer]}}}}\nkeep: {keep}\n"
    )
    shape = ModelShape(*SHAPE)
    bound = bind(sampled(load(Source("a-test.yaml", text)).require(), shape), shape)
    assert why_not_apart(bound) is None
    prompt = prompt_of(SHAPE)
    whole = kept(TorchProgram(bound), prompt)
    assert not whole.all()
    parts = [kept(program, prompt) for program in Stage.all(bound, prompt, APART)]
    assert torch.equal(torch.cat(parts), whole)
    assert int(whole.sum()) == max_entries(bound, TOKENS)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("deferred", [0, 1 << 20])
def test_stages_keep_what_the_whole_model_keeps(name, deferred):
    bound = bound_of(load(name), **SETTINGS[name])
    assert why_not_apart(bound) is None
    prompt = prompt_of(SHAPE)
    whole = kept(TorchProgram(bound, deferred_bytes=deferred), prompt)
    keeps_all = name == "vatp-snapkv" or keep_of(bound.folded.prefill).op == "all"
    assert keeps_all or not whole.all()
    programs, most = (
        Stage.all(bound, prompt, APART, deferred_bytes=deferred),
        Bounds(bound, TOKENS).kept,
    )
    for layers, program in zip(APART, programs, strict=True):
        part = kept(program, prompt)
        assert torch.equal(part, whole[layers.start : layers.stop])
        assert most.of(layers) >= int(part.sum())
    parts = (most.of(range(n, n + 1)) for n in range(5))
    assert sum(parts) >= most.total == most.of(range(5)) == max_entries(bound, TOKENS)


@pytest.mark.parametrize("name", ["adakv", "cake", "pyramidkv", "snapkv", "simlayerkv-prefill"])
def test_stages_that_score_their_layers_together_keep_the_same(name):
    bound = bind(shipped_program(name), ModelShape(*LARGE), SETTINGS[name])
    prompt = prompt_of(LARGE)
    whole = kept(TorchProgram(bound), prompt)
    programs = Stage.all(bound, prompt, APART, kernels=TABLE, keys_stay=True)
    assert programs[0].layers_together(TOKENS) > 1
    parts = [kept(program, prompt) for program in programs]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.thorough(every=3)
@pytest.mark.parametrize("tokens", [1, 2, 7, 40, 97])
@pytest.mark.parametrize("name", COMPARING)
@pytest.mark.parametrize("lenient", [False, True])
def test_every_stage_knows_how_many_entries_all_layers_keep(name, tokens, lenient):
    given = COMPARING[name] | ({"lenient": "true"} if name == "cake" and lenient else {})
    bound, prompt = bound_of(load(name), **given), prompt_of(SHAPE, tokens)
    whole = kept(TorchProgram(bound), prompt)
    for program in Stage.all(bound, prompt, APART):
        run = observed(program, prompt)
        run.finish()
        assert [[n, n] for n in run.entries_kept()] == whole.sum(-1).tolist()
        run.settle(finite=False)
        assert run.entries_kept() == [tokens] * 5


@pytest.mark.parametrize(
    "text",
    [
        # Numbers that are absent, below zero, and the same for all; conditions; other layers'.
        "keep: recent(3) then top(score)\nscore: norm2[dim](key)\nbudget: 4 + split[layer](20, "
        "max[kv, token](norm2[dim](key) where norm2[dim](key) > 2 and layer > 1))",
        "keep: recent(3) where max[layer](mean[kv, token, dim](key)) > mean[kv, token, dim](key)\n"
        "  else sinks(2) then recent(9) where layer > 2 else all",
        "keep: recent(3) then top(score)\nscore: norm2[dim](key)\n"
        "budget: 9 - 5 * rank[layer](mean[kv, token, dim](key)) / layers",
        "keep: recent(2) then top(score)\nscore: norm2[dim](key) * split[layer](20, 1 + layer)\n"
        "budget: 11 where mean[kv, token](norm2[dim](key)) > max[layer](mean[kv, token, dim](key)) "
        "else 7",
        "let:\n  big: max[layer](mean[kv, token](norm2[dim](key)))\n"
        "keep: recent(2) then top(score)\nscore: norm2[dim](key) - big\n"
        "budget: 5 + floor(big) where any[layer](mean[kv, token, dim](key) < 0) else 3",
    ],
)
def test_layers_are_compared_in_stages_as_in_one_process(text):
    text = f"policy: a-test\nlanguage: 1\nabout: a test\n{text}\n"
    bound, prompt = bound_of(load(Source("a-test.yaml", text))), prompt_of(SHAPE)
    assert why_not_apart(bound) is None
    whole = kept(TorchProgram(bound), prompt)
    assert not whole.all()
    for program in Stage.all(bound, prompt, APART):
        assert program.exchanged
        run = observed(program, prompt)
        layers = program.layers
        assert torch.equal(torch.stack(run.finish().kept), whole[layers.start : layers.stop])
        assert [[n, n] for n in run.entries_kept()] == whole.sum(-1).tolist()


def test_nothing_is_decided_before_stages_have_heard_of_each_other():
    bound = bound_of(load("cake"), **COMPARING["cake"])
    run = observed(TorchProgram(bound, layers=range(2)), prompt_of(SHAPE))
    with pytest.raises(RuntimeError, match="nothing has been heard"):
        run.finish()


def request(bound, program):
    """A store of a program's layers, from tensors of all layers."""
    *prompt, later = tensors(np.random.default_rng(3), LARGE, TOKENS, 40)
    layers = program.layers
    own = [x[layers.start : layers.stop] for x in prompt]
    steps = [x[:, layers.start : layers.stop] for x in later]
    return Store(bound, own, steps, program=program)


def of_stages(bound, **options):
    """Stores of all stages."""
    prompt = tensors(np.random.default_rng(3), LARGE, TOKENS, 40)[:3]
    return [request(bound, program) for program in Stage.all(bound, prompt, APART, **options)]


def decoded_apart(bound, table):
    """Takes the whole model and its stages through the same steps; returns the number of folds."""
    whole = request(bound, TorchProgram(bound, kernels=table))
    parts = of_stages(bound, kernels=table)
    left = 0
    for number in (1, 3, 16, 16):
        left += bool(whole.follow(number))
        for layers, part in zip(APART, parts, strict=True):
            part.follow(number)
            assert part.held() == whole.held()[layers.start : layers.stop]
            vectors = whole.vectors()[layers.start : layers.stop]
            for heads, others in zip(part.vectors(), vectors, strict=True):
                for rows, same in zip(heads, others, strict=True):
                    torch.testing.assert_close(rows, same, rtol=3e-7, atol=1e-7)
    return left


@pytest.mark.thorough(besides=["together-h2o", "together-cake"])
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("table", [REFERENCE, TABLE], ids=["layer by layer", "together"])
def test_stages_keep_while_decoding_what_the_whole_model_keeps(name, table):
    bound = bind(shipped_program(name), ModelShape(*LARGE), SETTINGS[name])
    assert why_not_apart(bound) is None
    assert decoded_apart(bound, table) == (1 if name == "simlayerkv" else 4)


@pytest.mark.thorough(every=3)
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("table", [REFERENCE, TABLE], ids=["layer by layer", "together"])
@pytest.mark.parametrize(
    "keep",
    [
        "recent(4 + 3 * layer)",
        "recent(2) then top[token](uniform(7), 5)",
        "sinks(2) then recent(4) where layer < 3 else sinks(1) then recent(9)",
        "top[token](heat, 6 + split[layer](20, 1 + layer))",
    ],
)
def test_numbers_of_a_layer_are_those_of_the_model(keep, table):
    heat = "state:\n  heat: heat + sum[group, query](attn(new))\n"
    text = f"policy: a-test\nlanguage: 1\nabout: a test\n{heat}keep: all\ndecode:\n  keep: {keep}\n"
    bound = bind(load(Source("a-test.yaml", text)).require(), ModelShape(*LARGE), {})
    assert why_not_apart(bound) is None
    assert decoded_apart(bound, table) == 4


@pytest.mark.thorough(besides=["h2o", "roco"])
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("name", FOLDS)
def test_a_fold_that_is_withdrawn_has_not_been(name):
    bound = bind(shipped_program(name), ModelShape(*LARGE), SETTINGS[name])
    one, other = (of_stages(bound, kernels=TABLE)[2] for _ in range(2))
    for turn, number in enumerate((1, 16, 3)):
        if turn == 1:
            assert begun([one], number) is not None or name == "simlayerkv"
            one.memory.withdraw(finite=True)
            other.follow(number, leaves=False)
        else:
            one.follow(number)
            other.follow(number)
        assert_alike(one, other)


def test_nothing_leaves_any_more_where_tensors_of_another_stage_are_not_finite():
    bound = bind(shipped_program("h2o"), ModelShape(*LARGE), WITHIN["h2o"])
    one = request(bound, TorchProgram(bound, layers=range(2, 5), kernels=TABLE))
    assert begun([one], 3) is not None
    one.memory.withdraw(finite=False)
    assert one.memory.not_finite
    assert begun([one], 16) is None


@pytest.mark.parametrize("name", REFUSED)
def test_what_stages_cannot_decide_apart_is_said(name):
    obstacle = why_not_apart(bound_of(load(name)))
    assert obstacle is not None
    assert REFUSED[name] in obstacle.why


def test_every_shipped_policy_is_one_or_the_other():
    from kvpolicy.dsl.syntax.library import shipped

    assert {*SETTINGS, *REFUSED} == {*shipped()}


def test_the_table_for_operators_says_the_same():
    """Of a refused policy, at least the beginning of the reason."""
    text = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()
    table = text.split("\n| policies | with `--pp-size` |\n")[1].split("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[1:]]
    said = {name: words for names, words in rows for name in names.split(", ")}
    assert {name for name in said if said[name].startswith("served")} == {*SETTINGS}
    assert {*said} == {*SETTINGS, *REFUSED}
    for name in REFUSED:
        obstacle = why_not_apart(bound_of(load(name)))
        assert obstacle.why.startswith(said[name].removeprefix("refused: "))


@pytest.mark.parametrize(
    ("keep", "looks"),
    [
        ("top[token](mean[head, query](attn(recent(2))), 3 where layer < 2 else 5)", None),
        ("top[token](mean[head, query](attn(recent(2))), split[layer](20, 1 + layer))", None),
        ("top[layer, token](mean[head, query](attn(recent(2))), 3)", "top[layer, token]"),
        ("top[layer, token](uniform(1), 9)", "top[layer, token]"),
        ("all where max[layer](mean[kv, token](norm2[dim](key))) > 2 else recent(4)", None),
        ("all where max[layer](mean[token](norm2[dim](key))) > 2 else recent(4)", "max[layer]"),
        ("all where at(0, mean[kv, token](norm2[dim](key))) > 2 else recent(4)", "at"),
        # The number of a layer would follow from the largest number of all, token by token.
        (
            "all where max[layer](1 + mean[kv, token](norm2[dim](key) ^ max[layer]("
            "mean[kv, token](norm2[dim](key))))) > 2 else recent(4)",
            "max[layer]",
        ),
    ],
)
def test_only_looks_at_data_of_other_layers_are_refused(keep, looks):
    text = f"policy: a-test\nlanguage: 1\nabout: a test\nkeep: {keep}\n"
    obstacle = why_not_apart(bound_of(load(Source("a-test.yaml", text))))
    if looks is None:
        assert obstacle is None
        return
    assert obstacle.why == f"`{looks}` looks at layers that lie in other stages"
    span = obstacle.cause.span
    assert text[span.start : span.end].startswith(looks.partition("[")[0])
