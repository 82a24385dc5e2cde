"""Programs give the same with and without the kernels of merging and sharing."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute import apply as torch_apply
from kvpolicy.dsl.execute.layer.evaluate import Evaluation, updating
from kvpolicy.dsl.execute.layer.merge import Merging
from kvpolicy.dsl.execute.layer.share import shared
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.tensors.values import Frame, Value
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.kernels.table import REFERENCE
from kvpolicy.kernels.table_triton import TRITON
from recordings import assert_same, tensors
from shipped_policies import shipped_program
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

pytestmark = [pytest.mark.interpreted, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
MERGING = ("nearest", "inner_products", "following", "links", "target", "merge_rows", "members")
SETTINGS = {
    "d2o": {"rate": "0.4", "start": "2"},
    "d2o-code": {"rate": "0.4", "start": "1"},
    "cam": {"window": "8", "start": "2", "reach": "3"},
    "cam-original": {"recent_rate": "0.3", "reach": "3"},
    "asl-lava-d2o": {"capacity": "9", "window": "3", "start": "1", "lookback": "2", "tau": "2"},
}


def counted(calls: dict[str, int], names=MERGING):
    """The references, with kernels `names` from Triton, whose calls are counted."""

    def counting(name):
        def call(*args):
            calls[name] = calls.get(name, 0) + 1
            return TRITON[name](*args)

        return call

    return {**REFERENCE, **{name: counting(name) for name in names}}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_programs_do_the_same(name, monkeypatch):
    """From the prompt to the last decode step; ties and lengths that tell heads apart."""
    shape = (4, 4, 2, 8) if name == "d2o-code" else (3, 4, 2, 8)
    bound = bind(shipped_program(name), ModelShape(*shape), SETTINGS[name])
    calls: dict[str, int] = {}
    table = counted(calls)
    for steps, ties in ((2, False), (1, True)):
        prompt = tensors(np.random.default_rng(steps), shape, 21, steps, ties)
        expected = torch_apply.apply(bound, *prompt)
        with monkeypatch.context() as patched:
            patched.setattr(torch_apply, "TorchProgram", partial(TorchProgram, kernels=table))
            assert_same(expected, torch_apply.apply(bound, *prompt))
    wanted = set(MERGING)
    wanted -= {"nearest", "inner_products"} if name in ("cam", "cam-original") else set()
    wanted -= {"members"} if name != "d2o-code" else set()
    wanted -= {"target"} if name != "cam" else set()
    assert set(calls) == wanted


POLICY = """
policy: other
language: 1
about: What is compared is not the key.
source: none
score: sum[dim](value)
budget: 9
keep: top(score)
merge:
  into: {into}
  weight: norm2[dim](value) / norm2[dim](target(value))
  own: 2
"""


def layer_of(into: str, dtype: torch.dtype) -> tuple[Bound, Frame, torch.Tensor]:
    policy = load(Source("other.yaml", POLICY.format(into=into)))
    bound = bind(policy.require(), ModelShape(1, 2, 2, 8), {})
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 2, 30, 8, generator=generator).to(dtype)
    frame = Frame(bound, 30, k.device, 2, 30, vectors={"key": k, "value": v})
    return bound, frame, torch.rand(2, 30, generator=generator) < 0.3


@pytest.mark.parametrize(
    ("into", "dtype"),
    [
        ("nearest(value)", torch.bfloat16),
        ("nearest(key * value)", torch.float32),
        ("next(2)", torch.bfloat16),
        ("next(99)", torch.float32),
    ],
)
def test_receivers_are_the_same(into, dtype):
    """Whatever is compared, and however many entries may be dropped."""
    bound, frame, kept = layer_of(into, dtype)
    results = []
    number = int((~kept).sum(-1).max())
    for kernels, most in ((REFERENCE, number), (TRITON, number + 3), (TRITON, number)):
        frame.kernels = kernels
        merging = Merging.begun(bound.lowered.prefill.merge, Evaluation(frame), kept, {}, {}, most)
        merging.finished()
        results.append(tuple(merging.rows(frame.read(name)) for name in ("key", "value")))
    weights = frame.read("value").double().norm(dim=-1)
    assert weights.amax() / weights.amin() < 6
    dense = frame.read("key").double()
    assert (results[0][0] != dense).any(-1).sum() > 3
    for each in results[1:]:
        for made, expected in zip(each, results[0], strict=True):
            # Weights below 6, of norms of 8 numbers; sums of 30 products of these and numbers below
            # 4, in two orders; divided by 2 or more.
            assert (made - expected).abs().max() < 2 * (30 + 8 + 8) * 2.0**-53 * 30 * 6 * 4


@pytest.mark.parametrize(
    ("name", "given"), [(name, SETTINGS[name]) for name in ("d2o", "cam", "asl-lava-d2o")]
)
def test_nothing_waits_for_the_device(name, given):
    """Tensors have no data: reading one raises."""
    bound = bind(shipped_program(name), ModelShape(3, 4, 2, 8), given)
    merge = (bound.lowered.decode if name == "cam" else bound.lowered.prefill).merge
    updates = updating(merge.states)

    with FakeTensorMode():
        k, v = torch.empty(2, 2, 30, 8, dtype=torch.bfloat16)
        vectors = {"key": k, "value": v}
        frame = Frame(bound, 30, k.device, 2, 30, vectors=vectors, kernels=WITHOUT)
        heat = Value(torch.empty(2, 30, dtype=torch.float64), ("kv", "token"))
        evaluation = Evaluation(frame, before={"heat": heat}, after={"heat": heat})
        kept = torch.empty(2, 30, dtype=torch.bool)
        merging = Merging.begun(merge, evaluation, kept, updates, {}, 17)
        merging.finished()
        assert [merging.rows(x).shape for x in (k, v)] == [(2, 30, 8)] * 2
        with pytest.raises(DataDependentOutputException):
            int(kept.sum())


# The kernels' results, without numbers.
WITHOUT = {
    **REFERENCE,
    "nearest": lambda x, places, real, *_: (torch.empty_like(places), torch.empty_like(real)),
    "links": lambda places, receivers, joins, accepted, weights, tokens: (
        torch.empty(receivers.flatten(1).shape, dtype=torch.int64),
        torch.empty(receivers.flatten(1).shape, dtype=torch.float64),
        torch.empty(len(places), tokens + 1, dtype=torch.int32),
    ),
    "inner_products": lambda x, places, *_: torch.empty(4, *places.shape, dtype=torch.float64),
    "merge_rows": lambda x, *_: torch.empty(x.shape, dtype=torch.float64),
    "merge_mass": lambda links, own: links[2][:, 1:].double(),
    "members": lambda links: links[2][:, 1:].double(),
}


SHARE = """
policy: other
language: 1
about: Expressions of both kinds.
source: none
share:
  when: layer % 2 == 1
  direction: {direction}
  except: {apart}
"""


def shared_by(bound, below, own, kernels):
    return shared(bound, below[0].shape[1], 1, tuple(below), tuple(own), kernels)


def random_layers(dtype: torch.dtype):
    """Keys and values of two layers [2, 2, 40, 16], many of them parallel, opposite or zero."""
    generator = torch.Generator().manual_seed(3)
    below, own = torch.randn(2, 2, 2, 40, 16, generator=generator).to(dtype)
    own[:, :, 3] = 2 * below[:, :, 3]
    own[:, 0, 4] = below[:, 1, 5] = 0
    return below, own


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_minicache_shares_the_same(dtype):
    bound = bind(shipped_program("minicache"), ModelShape(2, 4, 2, 16), {"start": "0"})
    below, own = random_layers(dtype)
    expected = shared_by(bound, below, own, REFERENCE)
    calls: dict[str, int] = {}
    made = shared_by(bound, below, own, counted(calls, ("gram", "blend")))
    assert calls == {"gram": 2, "blend": 2}
    vectors = zip(below.double(), own.double(), strict=True)
    for name, (x, y) in zip(("key", "value"), vectors, strict=True):
        apart = expected[name].excepted
        assert apart.any()
        assert torch.equal(made[name].excepted, apart)
        cosine = torch.nn.functional.cosine_similarity(x, y, dim=-1)
        sine = (1 - cosine**2).clamp(min=0).sqrt()
        # An error e of the cosine is e / sin in the angle and 2 e / sin^3 in either weight; where
        # the sine is below 1e-6 the angle is not used.
        e = 2.0**-53 * (2 * 16 + 8)
        bound_ = torch.where(sine > 1e-3, 4 * e / sine.clamp(min=1e-3) ** 3 + 8 * e, 8 * e)
        error = made[name].direction - expected[name].direction
        assert (error.abs().amax(-1) <= bound_).all()


@pytest.mark.parametrize(
    ("direction", "apart", "blended"),
    [
        ("unit[dim](below - 2 * own)", "norm2[dim](own - below) > 5", 1),
        ("-unit[dim](own)", "cosine[dim](below, own) > 0.2", 1),
        ("unit[dim](own) where layer > 3 else unit[dim](below) / 2", "norm1[dim](own) > 12", 1),
        ("unit[dim](abs(below))", "sum[dim](below * own) > 2", 0),
        ("unit[dim](below * own)", "norm2[dim](below) < 4", 0),
        ("index[dim](own) * unit[dim](own)", "max[dim](own * below) > 2", 0),
    ],
)
def test_other_expressions_share_the_same(direction, apart, blended):
    """Sums of both layers' vectors are computed by kernels, the rest by torch."""
    policy = load(Source("other.yaml", SHARE.format(direction=f'"{direction}"', apart=apart)))
    bound = bind(policy.require(), ModelShape(2, 4, 2, 16), {})
    below, own = random_layers(torch.float32)
    calls: dict[str, int] = {}
    expected = shared_by(bound, below, own, REFERENCE)
    made = shared_by(bound, below, own, counted(calls, ("gram", "blend")))
    assert calls.get("blend", 0) == 2 * blended
    for name in ("key", "value"):
        exceptions = expected[name].excepted
        assert exceptions.any()
        assert not exceptions.all()
        assert torch.equal(made[name].excepted, exceptions)
        one, other = (x[name].direction for x in (made, expected))
        # Norms of sums of two vectors, none of which nearly cancel.
        assert (one - other).abs().max() <= 100 * 16 * 2.0**-53 * other.abs().max()


def test_what_is_not_finite_stays_apart():
    bound = bind(shipped_program("minicache"), ModelShape(2, 4, 2, 16), {"start": "0"})
    below, own = random_layers(torch.bfloat16)
    own[1, 1, 7, 2] = torch.inf
    made = shared_by(bound, below, own, TRITON)
    assert made["value"].excepted.all()
    assert not made["value"].direction.any()
    assert not made["key"].excepted.all()
