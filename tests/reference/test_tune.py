"""`kvpolicy tune`: the distances it prints, the value that it chooses, and what it refuses."""

import json
from pathlib import Path

import pytest
from kvpolicy.evaluation.cli import main
from kvpolicy.evaluation.tuning.prompts import read_prompts
from random_tokens import prompt

torch = pytest.importorskip("torch", reason="the model runs in torch")
pytest.importorskip("transformers", reason="the model is transformers'")

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "examples" / "model-tiny")


def tune(policy: str, prompts, *more: str, parameter: str = "tsp_layer", model: str = MODEL) -> int:
    files = [str(each) for each in prompts]
    command = ["tune", policy, "--for", parameter, "--model", model]
    return main([*command, "--prompts", *files, *more])


@pytest.fixture
def prompts(tmp_path):
    """Two prompts of token ids, as an object and as a list."""
    path = tmp_path / "prompts.jsonl"
    lines = (json.dumps({"input_ids": prompt(70, 70)}), "", json.dumps(prompt(101, 101)))
    path.write_text("\n".join((*lines, "")))
    return path


def table(output: str) -> dict[str, list[str]]:
    """Value -> its distance, relative distance and share of rows computed."""
    head, *below = output.partition("prompts: ")[2].splitlines()[1:]
    assert head.split()[1:] == ["distance", "relative", "rows", "computed"]
    return {line.split()[0]: line.split()[1:] for line in below[: below.index("")]}


def rows(output: str) -> dict[int, list[str]]:
    return {int(value): row for value, row in table(output).items()}


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
    """Mean squared change of the last final state by propagation, by the plain model."""
    from eager_model import attend

    def forward(propagate: bool):
        there = torch.arange(len(prompt))
        hidden = model.embed(torch.tensor(prompt))
        for each in range(model.shape.layers):
            seen = []

            def attended(q, k, v, seen=seen):
                seen += q, k
                return attend(q, k, v)

            hidden = model.layer(each, hidden, there, attended)
            if propagate and each == layer:
                there = salient(*seen, number=len(prompt) // 5, **selection)
                hidden = hidden[there]
        return model.final(hidden)[-1]

    return (forward(True) - forward(False)).pow(2).mean().item()


def test_distances_and_choice(prompts, capsys, tmp_path):
    from eager_model import checkpoint

    plot = tmp_path / "plot.png"
    assert (
        tune("fastkv", [prompts], "--set", "window=4", "--set", "kernel=3", "--out", str(plot)) == 0
    )
    output = capsys.readouterr().out
    found = rows(output)
    assert list(found) == [0, 1, 2]
    model = checkpoint(MODEL)
    for layer, row in found.items():
        each = [distance(model, prompt(n, n), layer, window=4, kernel=3) for n in (70, 101)]
        assert float(row[0]) == pytest.approx(sum(each) / 2, rel=2e-3)
    closest = min(found, key=lambda layer: float(found[layer][0]))
    assert f"--kv-policy-set window=4 kernel=3 tsp_layer={closest}\n" in output
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_the_largest_value_to_choose(prompts, capsys):
    assert tune("fastkv", [prompts], "--most", "0") == 0
    output = capsys.readouterr().out
    assert "tsp_layer: 0\n" in output
    assert output.count("(more than asked)") == 2


def test_what_was_measured_is_shown_where_nothing_may_be_chosen(prompts, capsys):
    assert tune("fastkv", [prompts], "--rows", "0.01") == 2
    output, error = capsys.readouterr()
    assert output.count("(more than asked)") == 3
    assert "closest" not in output
    assert "none computes few enough rows" in error


def test_a_share_is_tried_in_steps_and_limited_by_the_rows_it_computes(prompts, capsys, tmp_path):
    plot = tmp_path / "plot.png"
    more = ("--rows", "0.66", "--set", "tsp_layer=1", "--set", "window=4", "--out", str(plot))
    assert tune("fastkv", [prompts], *more, parameter="tsp_rate") == 0
    output = capsys.readouterr().out
    found = table(output)
    assert list(found) == ["0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "1"]
    # Two of four layers compute all tokens; with all of them going deeper nothing changes.
    assert [row[2] for row in found.values()][-1] == "100.0%"
    assert found["1"][:2] == ["0", "0.00%"]
    few = [value for value in found if float(found[value][2][:-1]) <= 66]
    assert few == ["0.1", "0.2", "0.3"]
    best = min(few, key=lambda value: float(found[value][0]))
    assert f"--kv-policy-set tsp_layer=1 window=4 tsp_rate={best}\n" in output
    assert output.count("(more than asked)") == 7
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_truth_values_and_values_of_ones_own(prompts, capsys):
    assert tune("fastkv", [prompts], parameter="average") == 0
    assert list(table(capsys.readouterr().out)) == ["false", "true"]
    assert tune("fastkv", [prompts], "--values", "4", "16", "4", parameter="window") == 0
    assert list(table(capsys.readouterr().out)) == ["4", "16"]


def test_values_that_the_policy_does_not_allow_are_not_tried(prompts, capsys, tmp_path):
    policy = tmp_path / "p.yaml"
    policy.write_text(
        "policy: p\nlanguage: 1\nparams: {most: {default: 4, unit: tokens, min: 1, max: 9}}\n"
        "require: [most % 3 != 0]\npropagate: {first: layer == 1, tokens: recent(most)}\n"
        "keep: all\n"
    )
    assert tune(str(policy), [prompts], parameter="most") == 0
    assert list(table(capsys.readouterr().out)) == ["1", "2", "4", "5", "7", "8"]
    assert tune(str(policy), [prompts], "--values", "5", "6", parameter="most") == 2
    assert "requires" in capsys.readouterr().err


def test_tokens_that_leave_at_every_layer_that_acts(prompts, capsys, tmp_path):
    from eager_model import attend, checkpoint

    policy = tmp_path / "p.yaml"
    policy.write_text(
        "policy: p\nlanguage: 1\nparams: {phase: {default: 0, min: 0, max: 1}}\n"
        "propagate: {every: layer % 2 == phase, tokens: recent(length // 3)}\nkeep: all\n"
    )
    assert tune(str(policy), [prompts], "--values", "0", "1", parameter="phase") == 0
    found = rows(capsys.readouterr().out)
    model = checkpoint(MODEL)

    def final(prompt: list[int], acting: list[int]):
        there = torch.arange(len(prompt))
        hidden, computed = model.embed(torch.tensor(prompt)), 0
        for layer in range(model.shape.layers):
            hidden = model.layer(layer, hidden, there, attend)
            computed += len(there)
            if layer in acting:
                left = slice(len(there) - len(there) // 3, None)
                there, hidden = there[left], hidden[left]
        return model.final(hidden)[-1], computed / model.shape.layers / len(prompt)

    for phase, acting in ((0, [0, 2]), (1, [1, 3])):
        ends = [(final(prompt(n, n), acting), final(prompt(n, n), [])) for n in (70, 101)]
        distances = [(a - b).pow(2).mean().item() for (a, _), (b, _) in ends]
        assert float(found[phase][0]) == pytest.approx(sum(distances) / 2, rel=2e-3)
        shares = [share for (_, share), _ in ends]
        assert float(found[phase][2][:-1]) == pytest.approx(50 * sum(shares), abs=0.06)


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


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85"])
def test_prompts_may_hold_ends_of_lines_of_any_kind(end, tmp_path):
    path, texts = tmp_path / "prompts.jsonl", [f"one{end}two", "three"]
    lines = [json.dumps(text, ensure_ascii=False) for text in texts]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert read_prompts([path]) == [(f"{path}:1", texts[0]), (f"{path}:2", texts[1])]


def test_a_byte_order_mark_is_not_part_of_a_prompt(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"one"', encoding="utf-8-sig")
    assert read_prompts([path]) == [(f"{path}:1", "one")]


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
    ("policy", "parameter", "more", "message"),
    [
        ("snapkv", "capacity", [], "a policy whose `propagate` depends on a parameter"),
        ("fastkv", "kv_rate", [], "`kv_rate` does not change which tokens go deeper"),
        ("fastkv", "tsp_lair", [], "did you mean `tsp_layer`?"),
        ("fastkv", "capacity", [], "may have too many values to try them all"),
        ("fastkv", "window", ["--values", "8"], "there is no choice of `window`"),
        ("fastkv", "window", ["--values", "8", "0"], "it must be a whole number, at least 1"),
        ("fastkv", "tsp_rate", ["--values", "0.5", "1", "--most", "0.2"], "no value is small"),
        ("gemfilter", "filter", [], "begins the prefill again"),
    ],
)
def test_parameters_that_cannot_be_chosen(policy, parameter, more, message, prompts, capsys):
    assert tune(policy, [prompts], *more, parameter=parameter) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy", "content", "more", "message"),
    [
        ("fastkv", "[5]", ["--set", "tsp_layer=1"], "leave it out"),
        ("fastkv", "", [], "there is no prompt in"),
        ("fastkv", "\n \n", [], "there is no prompt in"),
        ("fastkv", "{", [], "this line is not JSON"),
        ("fastkv", '{"question": "?"}', [], "this line is no prompt"),
        ("fastkv", "[]", [], "this line is no prompt"),
        ("fastkv", "[1, 2.5]", [], "this line is no prompt"),
        (
            "fastkv",
            '\n"a \\ud800 b"',
            [],
            "prompts.jsonl:2: error[file]: the text of this line holds half",
        ),
        ("fastkv", "[5, 6, 7]", [], "all of the prompt's 3 tokens go deeper"),
        ("fastkv", json.dumps([5] * 50), ["--set", "tsp_rate=1"], "all of the prompt's 50 tokens"),
        ("fastkv", json.dumps([5] * 50 + [512]), [], "token id 512: the model has 512 tokens"),
        ("fastkv", json.dumps([5] * 50), ["--rows", "0.1"], "none computes few enough rows"),
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
    (folder / "config.json").write_text(json.dumps(config))
    [weights] = Path(MODEL).glob("*.safetensors")
    (folder / weights.name).write_bytes(weights.read_bytes()[:2000])
    assert tune("fastkv", [prompts], model=str(folder)) == 2
    assert "the model cannot be loaded" in capsys.readouterr().err
    (folder / weights.name).write_bytes(weights.read_bytes())
    (folder / "tokenizer.json").write_text("{}")
    text = folder / "prompt.txt"
    text.write_text("one two")
    assert tune("fastkv", [text], model=str(folder)) == 2
    assert "tokenizer cannot be loaded" in capsys.readouterr().err


def test_missing_packages(prompts, capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    assert tune("fastkv", [prompts]) == 2
    assert "pip install transformers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--most", "1e999999999"], "`1e999999999` is out of range: numbers are at most 1e300"),
        (["--most", "x"], "`x` is not a number"),
        (["--rows", "1.5"], "`1.5` is not from 0 to 1"),
        (["--rows", "nan"], "`nan` is not a number"),
    ],
)
def test_numbers_of_tune_are_refused_at_once(capsys, words, message):
    given = ["asl", "start", "--model", "nowhere", "--prompts", "nowhere"]
    with pytest.raises(SystemExit) as ended:
        main(["tune", *given, *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
