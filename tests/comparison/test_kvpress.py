"""The same methods in kvpress: kept sets on the same tensors; skipped where kvpress is missing.

kvpress is not a dependency (it pins another transformers than SGLang). To run these tests:
`pip install kvpress` in an environment of its own, and the project with `--no-deps`.

What differs, each shown below by a test that compares with the policy as shipped and by one that
compares with kvpress' reading of the method, written as a policy:

    SnapKV         nothing
    PyramidKV      budgets: kvpress divides in floats, rounds, and counts the window inside a
                   layer's share; policies/pyramidkv.yaml has the authors' integers
    AdaKV          kvpress: a share of every head's budget is safe, window included (a floor);
                   policies/adakv.yaml: the authors' mixture of competition and even split
    TOVA           kvpress never drops the last token; the authors and policies/tova.yaml may
    H2O            kvpress ("observed attention") divides by the number of queries that saw a
                   token and protects no recent ones; policies/h2o.yaml sums, and protects
    StreamingLLM   one cut of the prompt, as policies/sinks-recent.yaml; with its rerotation the
                   keys of the slot positions of policies/streamingllm.yaml
    SimLayerKV     kvpress keeps fewer recent tokens, by the number of last queries, and decides
                   nothing for prompts that would lose less
    CaM            kvpress drops by the scores of another press, averaged over the KV heads, and
                   merges only as many entries as were decoded since the last drop;
                   policies/cam.yaml drops what leaves the window, so the sets are not comparable
"""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.tools.cli import EXECUTIONS
from kvpolicy.dsl.tools.commands import execute

kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed")

LAYERS, HEADS, KV, SIZE = 4, 8, 2, 16
pytestmark = pytest.mark.parametrize("execution", EXECUTIONS)


@pytest.fixture(params=[41, 96, 130])
def tensors(request):
    """q [L, H, N, D], k and v [L, G, N, D]."""
    rng = np.random.default_rng(request.param)
    counts = (HEADS, KV, KV)
    return tuple(
        rng.normal(size=(LAYERS, c, request.param, SIZE)).astype(np.float32) for c in counts
    )


class Attention(torch.nn.Module):
    """The part of an attention layer that a press reads; queries come out as they go in."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.q_proj = torch.nn.Identity()
        self.head_dim, self.layer_idx = SIZE, layer
        self.config = SimpleNamespace(
            num_attention_heads=HEADS,
            num_key_value_heads=KV,
            num_hidden_layers=LAYERS,
            _attn_implementation="sdpa",
        )
        frequencies = 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
        self.rotary_emb = SimpleNamespace(inv_freq=frequencies)
        self.masked_key_indices = None


def by_kvpress(press, tensors, attentions: bool = False) -> list[list[list[int]]]:
    """Positions that a press keeps, identified by the values, which no press changes."""
    kept = []
    for layer, (q, k, v) in enumerate(zip(*map(torch.tensor, tensors), strict=True)):
        module, tokens = Attention(layer), k.shape[1]
        hidden = q.transpose(0, 1).reshape(1, tokens, -1)
        still = (torch.ones(1, tokens, SIZE), torch.zeros(1, tokens, SIZE))  # no rotation
        weights = _attention(q, k)[None] if attentions else None
        arguments = (module, hidden, k[None], v[None], weights, {"position_embeddings": still})
        _, values = press.compress(*arguments)
        sets = [_positions(v[g], values[0, g]) for g in range(KV)]
        if module.masked_key_indices is not None:
            _, heads, dropped = (x.tolist() for x in module.masked_key_indices)
            gone = set(zip(heads, dropped, strict=True))
            sets = [[n for n in each if (g, n) not in gone] for g, each in enumerate(sets)]
        kept.append(sets)
    return kept


def _attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    logits = q @ k.repeat_interleave(HEADS // KV, 0).transpose(1, 2) / SIZE**0.5
    return logits.masked_fill(torch.ones_like(logits[0]).triu(1).bool(), -torch.inf).softmax(-1)


def _positions(rows: torch.Tensor, kept: torch.Tensor) -> list[int]:
    same = (kept[:, None] == rows[None]).all(-1)
    assert (same.sum(1) == 1).all()
    return sorted(same.nonzero()[:, 1].tolist())


def by_policy(policy, execution, tensors, **settings) -> list[list[list[int]]]:
    """Positions kept by a policy, given by the name of a shipped one or by its sections."""
    header = "policy: a-test\nlanguage: 1\nabout: a test\n"
    source = Source("a-test.yaml", header + policy) if "\n" in policy else policy
    shape = ModelShape(LAYERS, HEADS, KV, SIZE)
    texts = {name: str(value).lower() for name, value in settings.items()}
    result = execute(bind(load(source).require(), shape, texts), execution, *tensors)
    return [[np.flatnonzero(head).tolist() for head in layer] for layer in result.kept]


def kept_by_ratio(tensors, ratio: float) -> int:
    """kvpress' number of kept entries: truncated in floating point."""
    return max(1, int(tensors[1].shape[2] * (1 - ratio)))


@pytest.mark.parametrize("ratio", [0.5, 0.7])
def test_snapkv(execution, tensors, ratio):
    press = kvpress.SnapKVPress(ratio, window_size=8, kernel_size=5)
    settings = {"window": 8, "kernel": 5, "average": True}
    count = kept_by_ratio(tensors, ratio)
    ours = by_policy("snapkv", execution, tensors, capacity=count, **settings)
    assert ours == by_kvpress(press, tensors)


def test_pyramidkv_has_other_budgets_and_for_each_budget_the_same_entries(execution, tensors):
    press = kvpress.PyramidKVPress(0.7, window_size=4, kernel_size=5, beta=3)
    theirs = by_kvpress(press, tensors)
    for layer, heads in enumerate(theirs):
        own = tuple(tensor[layer : layer + 1].repeat(LAYERS, 0) for tensor in tensors)
        settings = {"window": 4, "kernel": 5, "average": True}
        ours = by_policy("snapkv", execution, own, capacity=len(heads[0]), **settings)
        assert ours[0] == heads
    inner = kept_by_ratio(tensors, 0.7)
    settings = {"window": 4, "kernel": 5, "beta": 3, "capacity": inner + 4}
    ours = by_policy("pyramidkv", execution, tensors, **settings)
    for layer, heads in enumerate(ours):
        # Ours hold the window besides, and round each step between layers down.
        assert abs(len(heads[0]) - 4 - len(theirs[layer][0])) <= 2 + layer


HARD_FLOOR = """
params: {capacity: 20, window: 8, kernel: 5, alpha: {default: 0.2, unit: ratio}}
let:
  seen: attn(recent(window)) where not recent(window)
  safe: max(0, floor(alpha * capacity) - window)
score: mean[group](avgpool(mean[query](seen), kernel))
budget: capacity
keep: recent(window) then top(score, safe) then top[kv, token](score)
"""


@pytest.mark.parametrize("alpha", [0.2, 0.6])
def test_adakv_with_a_floor(execution, tensors, alpha):
    press = kvpress.AdaKVPress(kvpress.SnapKVPress(0.6, 8, 5), alpha)
    count = kept_by_ratio(tensors, 0.6)
    ours = by_policy(HARD_FLOOR, execution, tensors, capacity=count, alpha=alpha)
    theirs = by_kvpress(press, tensors)
    assert ours == theirs
    settings = {"capacity": count, "window": 8, "kernel": 5, "alpha": alpha}
    mixed = by_policy("adakv", execution, tensors, **settings)
    assert mixed != theirs


LAST_STAYS = """
params: {capacity: 20}
score: mean[head, query](attn(recent(1)))
budget: capacity
keep: recent(1) then top(score)
"""


@pytest.mark.parametrize("ratio", [0.5, 0.8])
def test_tova(execution, tensors, ratio):
    press, count = kvpress.TOVAPress(ratio), kept_by_ratio(tensors, ratio)
    theirs = by_kvpress(press, tensors)
    assert by_policy(LAST_STAYS, execution, tensors, capacity=count) == theirs
    last = tensors[1].shape[2] - 1
    ours = by_policy("tova", execution, tensors, capacity=count)
    for mine, other in zip(chain(*ours), chain(*theirs), strict=True):
        # The same, but for the entry that gave its place to the last token.
        assert set(other) - set(mine) <= {last}


BY_AGE = """
params: {capacity: 20}
score: mean[group](mean[query](attn(all)))
budget: capacity
keep: top(score)
"""


def test_h2o_by_age(execution, tensors):
    press, count = kvpress.ObservedAttentionPress(0.5), kept_by_ratio(tensors, 0.5)
    theirs = by_kvpress(press, tensors, attentions=True)
    assert by_policy(BY_AGE, execution, tensors, capacity=count) == theirs
    settings = {"heavy": count // 2, "window": count - count // 2}
    assert by_policy("h2o", execution, tensors, **settings) != theirs


def test_streamingllm_is_one_cut(execution, tensors):
    press, count = kvpress.StreamingLLMPress(0.5, n_sink=4), kept_by_ratio(tensors, 0.5)
    theirs = by_kvpress(press, tensors)
    assert by_policy("sinks-recent", execution, tensors, start=4, capacity=count) == theirs
    ours = by_policy("streamingllm", execution, tensors, start=4, window=count - 4)
    assert ours == theirs


@pytest.mark.parametrize("threshold", [0.2, 0.35, 0.9])
def test_simlayerkv(execution, tensors, threshold):
    press = kvpress.SimLayerKVPress(threshold, n_last=1, n_recent=12, n_initial=4)
    settings = {"threshold": threshold, "queries": 1, "start": 4, "reach": 12}
    # kvpress keeps n_recent - n_last recent tokens.
    ours = by_policy("simlayerkv-prefill", execution, tensors, window=11, **settings)
    assert ours == by_kvpress(press, tensors)


def test_streamingllm_at_slot_positions(execution, tensors):
    press = kvpress.KeyRerotationPress(kvpress.StreamingLLMPress(0.5, n_sink=4))
    count = kept_by_ratio(tensors, 0.5)
    shape = ModelShape(LAYERS, HEADS, KV, SIZE)
    settings = {"start": "4", "window": str(count - 4)}
    bound = bind(load("streamingllm").require(), shape, settings)
    frequencies = Attention(0).rotary_emb.inv_freq
    ours = execute(bound, execution, *tensors, inv_freq=frequencies.numpy())
    for layer, (q, k, v) in enumerate(zip(*map(torch.tensor, tensors), strict=True)):
        hidden = q.transpose(0, 1).reshape(1, k.shape[1], -1)
        theirs, _ = press.compress(Attention(layer), hidden, k[None], v[None], None, {})
        kept = torch.tensor(ours.kept[layer])
        for head in range(KV):
            mine = torch.tensor(ours.merged[layer][0][head])[kept[head]].float()
            # They turn keys back to slots 0, 1, ...; here the newest stays where it is. Products
            # of keys depend on the differences of their positions alone.
            torch.testing.assert_close(
                mine @ mine.T, theirs[0, head] @ theirs[0, head].T, rtol=1e-4, atol=1e-4
            )
