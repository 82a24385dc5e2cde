"""`kvpolicy tune`: the distances it prints, the layer that it chooses, and what it refuses."""

import json
import random
from pathlib import Path

import pytest
from kvpolicy.dsl.tools.cli import main

torch = pytest.importorskip("torch", reason="the model runs in torch")
pytest.importorskip("transformers", reason="the model is transformers'")

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "examples" / "model-tiny")


def tune(policy: str, prompts, *more: str, model: str = MODEL) -> int:
    files = [str(each) for each in prompts]
    command = ["tune", policy, "--for", "fastkv-layer", "--model", model]
    return main([*command, "--prompts", *files, *more])


def ids(length: int) -> list[int]:
    chosen = random.Random(length)
    return [chosen.randrange(3, 500) for _ in range(length)]


@pytest.fixture
def prompts(tmp_path):
    """Two prompts of token ids, as an object and as a list."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"{json.dumps({'input_ids': ids(70)})}\n\n{json.dumps(ids(101))}\n")
    return path


def rows(output: str) -> dict[int, list[str]]:
    lines = [line.split() for line in output.splitlines() if line[:5].strip().isdigit()]
    return {int(line[0]): line[1:] for line in lines}


def salient(q, k, window: int, kernel: int, number: int):
    """FastKV's tokens that go deeper, written from the paper: q [H, N, D], k [G, N, D]."""
    heads, total, size = q.shape
    k = k.repeat_interleave(heads // k.shape[0], 0).double()
    logits = q[:, -window:].double() @ k.transpose(1, 2) / size**0.5
    later = torch.ones(window, total, dtype=torch.bool).triu(total - window + 1)
    votes = logits.masked_fill(later, -torch.inf).softmax(-1).sum(1)[:, : total - window]
    pooled = torch.nn.functional.max_pool1d(votes[:, None], kernel, 1, kernel // 2)[:, 0]
    # Equal scores, which are normal after pooling, go to the lower position.
    best = pooled.sum(0).float().sort(descending=True, stable=True).indices[: number - window]
    return torch.cat([best.sort().values, torch.arange(total - window, total)])


def distance(model, prompt: list[int], layer: int, **selection: int) -> float:
    """Mean squared difference of the last final state, by the plain model."""
    from eager_llama import attend

    def forward(propagate: bool):
        there = torch.arange(len(prompt))
        hidden = model.embed(torch.tensor(prompt))
        for each in range(model.shape.layers):
            q, k, v = model.project(each, hidden, there)
            hidden = model.leave(each, hidden, attend(q, k, v))
            if propagate and each == layer:
                there = salient(q, k, number=len(prompt) // 5, **selection)
                hidden = hidden[there]
        return model.normed(hidden[-1], "model.norm")

    return (forward(True) - forward(False)).pow(2).mean().item()


def test_distances_and_choice(prompts, capsys, tmp_path):
    from eager_llama import checkpoint

    plot = tmp_path / "plot.png"
    assert (
        tune("fastkv", [prompts], "--set", "window=4", "--set", "kernel=3", "--out", str(plot)) == 0
    )
    output = capsys.readouterr().out
    found = rows(output)
    assert list(found) == [0, 1, 2]
    model = checkpoint(MODEL)
    for layer, row in found.items():
        each = [distance(model, ids(n), layer, window=4, kernel=3) for n in (70, 101)]
        assert float(row[0]) == pytest.approx(sum(each) / 2, rel=2e-3)
    closest = min(found, key=lambda layer: float(found[layer][0]))
    assert f"--kv-policy-set tsp_layer={closest}\n" in output
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_the_deepest_layer_to_choose(prompts, capsys):
    assert tune("fastkv", [prompts], "--deepest", "0") == 0
    output = capsys.readouterr().out
    assert "tsp_layer: 0\n" in output
    assert output.count("(deeper than asked)") == 2


def test_texts_and_token_ids_are_the_same_prompts(capsys, tmp_path):
    from transformers import AutoTokenizer

    text = (ROOT / "examples" / "prompt.txt").read_text()
    tokens = AutoTokenizer.from_pretrained(MODEL)(text)["input_ids"]
    forms = [text, json.dumps({"text": text}), json.dumps({"prompt": text}), json.dumps(tokens)]
    outputs = []
    for number, form in enumerate(forms):
        path = tmp_path / ("prompt.txt" if number == 0 else f"{number}.jsonl")
        path.write_text(form)
        assert tune("fastkv-adakv", [path]) == 0
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 1


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_model_types(kind, tmp_path, prompts, capsys):
    import transformers

    sizes = {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    assert tune("fastkv", [prompts], model=str(tmp_path / "model")) == 0
    assert list(rows(capsys.readouterr().out)) == [0, 1]


@pytest.mark.parametrize(
    ("policy", "content", "more", "message"),
    [
        ("snapkv", "[5]", [], "needs a policy with `propagate` and `first`"),
        ("pyramidinfer", "[5]", [], "needs a policy with `propagate` and `first`"),
        ("asl", "[5]", [], "does not compare `layer` with a parameter"),
        ("gemfilter", "[5]", [], "begins the prefill again"),
        ("fastkv", "[5]", ["--set", "tsp_layer=1"], "leave it out"),
        ("fastkv", "", [], "there is no prompt in"),
        ("fastkv", "\n \n", [], "there is no prompt in"),
        ("fastkv", "{", [], "this line is not JSON"),
        ("fastkv", '{"question": "?"}', [], "this line is no prompt"),
        ("fastkv", "[]", [], "this line is no prompt"),
        ("fastkv", "[1, 2.5]", [], "this line is no prompt"),
        ("fastkv", "[5, 6, 7]", [], "3 tokens are no more than the policy's window"),
        ("fastkv", json.dumps([5] * 50), ["--set", "tsp_rate=1"], "all of the prompt's 50 tokens"),
        ("fastkv", json.dumps([5] * 50 + [512]), [], "token id 512: the model has 512 tokens"),
        ("fastkv", json.dumps([5] * 50), ["--deepest", "3"], "to choose from are 0 to 2"),
    ],
)
def test_refusals(policy, content, more, message, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    assert tune(policy, [path], *more) == 2
    assert message in capsys.readouterr().err


def test_models_that_cannot_be_used(tmp_path, prompts, capsys):
    assert tune("fastkv", [prompts], model=str(tmp_path / "none")) == 2
    assert "there is no such file" in capsys.readouterr().err
    folder = tmp_path / "empty"
    folder.mkdir()
    config = json.loads((Path(MODEL) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    assert tune("fastkv", [prompts], model=str(folder)) == 2
    assert "the model cannot be loaded" in capsys.readouterr().err
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gpt_neox"}))
    assert tune("fastkv", [prompts], model=str(folder)) == 2
    assert "not gpt_neox" in capsys.readouterr().err


def test_missing_packages(prompts, capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    assert tune("fastkv", [prompts]) == 2
    assert "pip install transformers" in capsys.readouterr().err
