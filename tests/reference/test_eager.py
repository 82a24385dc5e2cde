"""The plain model is the model: equal to transformers, and consistent with itself."""

import random

import pytest


def prompt(length: int, seed: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(3, 500) for _ in range(length)]


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
