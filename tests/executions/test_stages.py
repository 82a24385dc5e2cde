"""Layers of a model in stages: which policies decide within a layer, and what they keep then."""

import numpy as np
import pytest
import torch
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.bind.bounds import max_entries
from kvpolicy.dsl.bind.stages import apart
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.source import Source
from recordings import tensors

SHAPE = (5, 4, 2, 4)
TOKENS = 40
WITHIN = {
    "ada-pyramidkv": {"capacity": "12", "window": "3"},
    "adakv": {"capacity": "10", "window": "3"},
    "pyramidkv": {"capacity": "12", "window": "3", "exact_total": "true"},
    "simlayerkv-prefill": {"threshold": "0.2", "queries": "4", "reach": "9", "window": "9"},
    "sinks-recent": {"capacity": "9"},
    "snapkv": {"capacity": "10", "window": "3"},
    "vatp-snapkv": {},
}
# Of all others, a word of the reason.
REFUSED = {
    "asl": "propagate", "asl-lava-d2o": "propagate", "cake": "layer", "cam": "decode",
    "cam-original": "decode", "d2o": "layer", "d2o-code": "layer", "dynamickv": "layer",
    "fastkv": "propagate", "fastkv-adakv": "propagate", "gemfilter": "propagate", "h2o": "decode",
    "lava": "layer", "minicache": "share", "pyramidinfer": "propagate", "roco": "decode",
    "simlayerkv": "decode", "streamingllm": "decode", "streamingllm-original": "decode",
    "tova": "decode", "vatp": "decode",
}  # fmt: skip


def bound_of(policy, **given):
    return bind(policy.require(), ModelShape(*SHAPE), given)


def kept(bound, layers, **options):
    """What a program of some layers keeps, of tensors of them all."""
    made = tensors(np.random.default_rng(3), SHAPE, TOKENS, 0)[:3]
    q, k, v = (torch.tensor(x) for x in made)
    run = TorchProgram(bound, layers=layers, **options).start(TOKENS)
    for layer in layers:
        run.observe(layer, q[layer], k[layer], v[layer])
    return torch.stack(run.finish())


@pytest.mark.parametrize("name", WITHIN)
@pytest.mark.parametrize("deferred", [0, 1 << 20])
def test_stages_keep_what_the_whole_model_keeps(name, deferred):
    bound = bound_of(load(name), **WITHIN[name])
    assert apart(bound) is None
    whole = kept(bound, range(5), deferred_bytes=deferred)
    assert name == "vatp-snapkv" or not whole.all()
    for layers in (range(2), range(2, 3), range(3, 5)):
        part = kept(bound, layers, deferred_bytes=deferred)
        assert torch.equal(part, whole[layers.start : layers.stop])
        assert max_entries(bound, TOKENS, layers) >= int(part.sum())
    parts = (max_entries(bound, TOKENS, range(n, n + 1)) for n in range(5))
    assert sum(parts) >= max_entries(bound, TOKENS) == max_entries(bound, TOKENS, range(5))


@pytest.mark.parametrize("name", REFUSED)
def test_what_stages_cannot_decide_apart_is_said(name):
    why = apart(bound_of(load(name)))
    assert why is not None
    assert REFUSED[name] in why.split("`")[1]


def test_every_shipped_policy_is_one_or_the_other():
    from kvpolicy.dsl.syntax.library import shipped

    assert {*WITHIN, *REFUSED} == {*shipped()}


@pytest.mark.parametrize(
    ("keep", "looks"),
    [
        ("top[token](mean[head, query](attn(recent(2))), 3 where layer < 2 else 5)", None),
        ("top[token](mean[head, query](attn(recent(2))), split[layer](20, 1 + layer))", None),
        ("top[layer, token](mean[head, query](attn(recent(2))), 3)", "top[layer, token]"),
        ("top[layer, token](uniform(1), 9)", "top[layer, token]"),
        ("all where max[layer](mean[kv, token](norm2[dim](key))) > 2 else recent(4)", "max[layer]"),
        ("all where at(0, mean[kv, token](norm2[dim](key))) > 2 else recent(4)", "at"),
    ],
)
def test_only_looks_at_data_of_other_layers_are_refused(keep, looks):
    text = f"policy: a-test\nlanguage: 1\nabout: a test\nkeep: {keep}\n"
    why = apart(bound_of(load(Source("a-test.yaml", text))))
    assert why == (looks and f"`{looks}` looks at layers that lie in other stages")
