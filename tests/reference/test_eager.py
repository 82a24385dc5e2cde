"""The plain model is the model: equal to transformers, and consistent with itself."""

from functools import partial

import pytest
from random_tokens import prompt


@pytest.mark.parametrize("length", [1, 37, 300])
def test_answers_are_those_of_transformers(embedded, length):
    transformers = pytest.importorskip("transformers")
    import torch
    from eager import generate

    ids = prompt(length, length)
    answer = generate(embedded, ids, new_tokens=6)
    model = transformers.AutoModelForCausalLM.from_pretrained(embedded, dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([ids + answer.tokens])).logits[0, length - 1 : -1]
    torch.testing.assert_close(torch.stack(answer.logits), logits, rtol=0, atol=1e-4)
    assert logits.argmax(-1).tolist() == answer.tokens


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("fastkv", {"kv_rate": "1", "tsp_rate": "1"}),
        ("h2o", {"heavy": "100"}),
        ("d2o", {"rate": "1", "start": "100"}),
        ("streamingllm", {"window": "100"}),
        ("asl", {"capacity": "60", "window": "8", "two_pass": "true"}),
    ],
)
def test_what_keeps_everything_answers_as_no_policy(random_model, policy, settings):
    from eager import generate

    ids = prompt(1, 50)
    plain = generate(random_model, ids, new_tokens=5)
    answer = generate(random_model, ids, policy, settings, new_tokens=5)
    assert answer.kept == plain.kept
    assert answer.tokens == plain.tokens
    pairs = zip(answer.logits, plain.logits, strict=True)
    assert max((a - b).abs().max() for a, b in pairs) < 1e-4


@pytest.mark.parametrize(
    ("policy", "settings"),
    [("gemfilter", {}), ("asl", {"window": "6", "tau": "0.0001", "two_pass": "true"})],
)
def test_a_restart_answers_as_the_chosen_tokens_alone(random_model, policy, settings):
    from eager import generate

    ids = prompt(2, 50)
    settings = {"capacity": "20", **settings}
    answer = generate(random_model, ids, policy, settings, new_tokens=5)
    assert len(answer.restarted) == 20
    alone = generate(random_model, [ids[i] for i in answer.restarted], new_tokens=5)
    assert answer.tokens == alone.tokens
    assert answer.kept == alone.kept


@pytest.mark.parametrize("policy", ["snapkv", "adakv", "fastkv", "streamingllm-original"])
def test_a_step_reads_the_kept_entries_and_nothing_else(random_model, policy):
    # Independent computation: the new token's row of a whole forward, dropped columns masked.
    import torch
    from eager import generate
    from eager_model import attend, checkpoint
    from methods import METHODS

    ids, model = prompt(3, 50), checkpoint(random_model)
    answer = generate(random_model, ids, policy, METHODS[policy], new_tokens=2)
    result = answer.result
    deeper = result.propagated or list(range(50))
    there = torch.arange(51)
    hidden = model.embed(torch.tensor([*ids, answer.tokens[0]]))

    def attended(kept, q, k, v):
        out = attend(q, k, v)
        for head in range(model.shape.heads):
            group = head // model.shape.group
            seen = torch.tensor([*kept[group][there[:-1].numpy()].tolist(), True])
            logits = k[group].double() @ q[head, -1].double() / model.shape.head_dim**0.5
            weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
            out[head, -1] = weights @ v[group].double()
        return out

    for layer in range(model.shape.layers):
        hidden = model.layer(layer, hidden, there, partial(attended, result.kept[layer]))
        if layer == result.selected_layer:
            rows = torch.tensor([*deeper, 50])
            hidden, there = hidden[rows], rows
    torch.testing.assert_close(model.logits(hidden)[-1], answer.logits[1], rtol=0, atol=1e-6)


def first_keys(model, tokens, positions):
    """Keys [G, T, D] of the first layer."""
    from eager_model import attend

    seen = []

    def attended(q, k, v):
        seen.append(k)
        return attend(q, k, v)

    model.layer(0, model.embed(tokens), positions, attended)
    return seen[0]


def test_slots_are_distances_in_the_cache(random_model):
    # Keys of the first layer depend on token and position alone.
    import torch
    from eager import generate
    from eager_model import checkpoint

    ids, model = prompt(4, 40), checkpoint(random_model)
    settings = {"start": "2", "window": "8"}
    answer = generate(random_model, ids, "streamingllm", settings, new_tokens=6)
    tokens = torch.tensor([*ids, *answer.tokens])
    for step, after in enumerate(answer.result.steps, start=1):
        held = after.kept[0][0]
        newest = 40 + step - 1
        assert held == [0, 1, *range(newest - 7, newest + 1)]
        slots = newest - torch.arange(len(held)).flip(0)
        expected = first_keys(model, tokens[held], slots)
        cached = torch.from_numpy(after.merged[0][0][0])
        torch.testing.assert_close(cached, expected[0].double(), rtol=0, atol=1e-4)
