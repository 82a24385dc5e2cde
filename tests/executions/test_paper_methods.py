"""Shipped policies keep the same as the methods' definitions in plain loops."""

from __future__ import annotations

import numpy as np
import paper_methods
import pytest
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.tools.cli import EXECUTIONS
from kvpolicy.dsl.tools.commands import execute

BASE = {"capacity": 9, "window": 3, "kernel": 3, "average": False}
METHODS = {
    "snapkv": (paper_methods.snapkv, BASE),
    "snapkv-average": (paper_methods.snapkv, {**BASE, "average": True}),
    "vatp-snapkv": (paper_methods.vatp_snapkv, BASE),
    "pyramidkv": (paper_methods.pyramidkv, {**BASE, "beta": 3}),
    "pyramidkv-strongest": (paper_methods.pyramidkv, {**BASE, "beta": 3, "strongest": True}),
    "adakv": (paper_methods.adakv, {**BASE, "alpha": 0.2, "strongest": False}),
    "adakv-strongest": (paper_methods.adakv, {**BASE, "alpha": 0.5, "strongest": True}),
    "ada-pyramidkv": (paper_methods.adakv, {**BASE, "alpha": 0.2, "strongest": False, "beta": 3}),
    "chunkkv": (paper_methods.chunkkv, {"capacity": 9, "window": 3, "chunk": 4, "reuse": 1}),
    "chunkkv-reuse": (paper_methods.chunkkv, {"capacity": 11, "window": 2, "chunk": 3, "reuse": 2}),
    "keydiff": (paper_methods.keydiff, {"capacity": 9, "newest": 0}),
    "keydiff-newest": (paper_methods.keydiff, {"capacity": 9, "newest": 3}),
    "lava": (paper_methods.lava, {**BASE, "alpha": 0}),
    "lava-code": (paper_methods.lava, {**BASE, "alpha": 0.2}),
    "simlayerkv-prefill": (
        paper_methods.simlayerkv,
        {"threshold": 0.4, "queries": 3, "start": 2, "reach": 5, "window": 4},
    ),
}
POLICY = {
    "snapkv-average": "snapkv",
    "pyramidkv-strongest": "pyramidkv",
    "adakv-strongest": "adakv",
    "chunkkv-reuse": "chunkkv",
    "keydiff-newest": "keydiff",
    "lava-code": "lava",
}


def _text(value: object) -> str:
    return str(value).lower()


@pytest.mark.thorough(every=3)
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1)], ids=lambda h: f"{h[0]}q{h[1]}kv")
@pytest.mark.parametrize("method", METHODS)
def test_policy_keeps_what_the_method_keeps(method, heads, execution):
    reference, settings = METHODS[method]
    program = load(POLICY.get(method, method)).require()
    for seed, tokens in enumerate((4, 9, 10, 13, 31)):
        rng = np.random.default_rng(seed)
        shape = ModelShape(3, *heads, 4)
        q = rng.normal(size=(3, heads[0], tokens, 4)).astype(np.float32)
        k = rng.normal(size=(3, heads[1], tokens, 4)).astype(np.float32)
        v = rng.normal(size=(3, heads[1], tokens, 4)).astype(np.float32)
        bound = bind(program, shape, {name: _text(value) for name, value in settings.items()})
        result = execute(bound, execution, q, k, v)
        kept = [[np.flatnonzero(head).tolist() for head in layer] for layer in result.kept]
        assert kept == reference(q, k, v, **settings), f"{tokens} tokens, seed {seed}"
