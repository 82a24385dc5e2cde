"""`kvpolicy fidelity` and `kvpolicy inspect` with a real server, beside the plain model."""

import csv
import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")
pytestmark = [pytest.mark.server, pytest.mark.thorough]
ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "model-tiny"
sys.path.insert(0, str(ROOT / "tests" / "reference"))

# What each served policy is for the plain model: its file and its settings.
POLICIES = {
    "snapkv": ("snapkv", {"capacity": "40", "window": "8"}),
    "sinks-recent": ("sinks-recent", {"capacity": "32"}),
    "streamingllm": ("streamingllm", {"window": "28"}),
    "everything": ("sinks-recent", {"capacity": "4096"}),
}
PROMPT, POSITIONS = 150, 40


@pytest.fixture(scope="module")
def server():
    from kvpolicy.evaluation.serving import serve

    paths = [f"{name}={ROOT}/policies/{file}.yaml" for name, (file, _) in POLICIES.items()]
    settings = [
        f"{name}.{key}={value}" for name, (_, own) in POLICIES.items() for key, value in own.items()
    ]
    flags = {"max_total_tokens": 4096, "kv_policy_fold_interval": 1}
    with serve(MODEL, paths, settings, kv_policy_allow_inspection=True, **flags) as server:
        yield server


@pytest.fixture(scope="module")
def tokens():
    from kvpolicy.evaluation.asking.tokens import Tokens

    return Tokens(MODEL)


@pytest.fixture(scope="module")
def texts(tokens, tmp_path_factory) -> tuple[Path, list[list[int]]]:
    """A file with two texts in the model's vocabulary, and their token ids."""
    chosen = random.Random(5)
    lines = []
    for _ in range(2):
        words = [chosen.randrange(3, 500) for _ in range(PROMPT + POSITIONS - 1)]
        # The end repeats the beginning, so that predictions there depend on the kept entries.
        words[PROMPT:] = words[10 : 10 + len(words) - PROMPT]
        lines.append(tokens.decode(words))
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return file, [tokens.encode(line) for line in lines]


def run(*words) -> int:
    from kvpolicy.evaluation.cli import main

    return main([str(word) for word in words])


@pytest.fixture(scope="module")
def compared(server, texts, tmp_path_factory):
    """Output of the command: rows of the CSV and lines of the summary."""
    out = tmp_path_factory.mktemp("fidelity")
    policies = [word for name in POLICIES for word in ("--policy", name)]
    sizes = ["--prompt-tokens", PROMPT, "--continuation", POSITIONS]
    where = ["--url", server.url, "--out", out]
    assert run("fidelity", *policies, "--text", texts[0], *sizes, *where) == 0
    with (out / "fidelity.csv").open() as file:
        positions = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (out / "fidelity.jsonl").read_text().splitlines()]
    return positions, lines


def log_probabilities(ids, name=None) -> np.ndarray:
    """Log-probabilities [T, vocabulary] of the plain model after the first PROMPT tokens."""
    import torch
    from eager import generate

    file, settings = POLICIES[name] if name else (None, None)
    given = ids[PROMPT : PROMPT + POSITIONS]
    answer = generate(str(MODEL), ids[:PROMPT], file, settings, new_tokens=len(given), forced=given)
    return torch.stack(answer.logits).log_softmax(-1).numpy()


@pytest.mark.parametrize("name", ["snapkv", "sinks-recent", "streamingllm"])
def test_distances_are_those_of_the_plain_model(compared, texts, name):
    positions, lines = compared
    for number, ids in enumerate(texts[1], 1):
        full, other = log_probabilities(ids), log_probabilities(ids, name)
        kl = (np.exp(full) * (full - other)).sum(axis=1)
        text = f"{texts[0]}:{number}"
        rows = [row for row in positions if (row["text"], row["policy"]) == (text, name)]
        assert [int(row["token_id"]) for row in rows] == ids[PROMPT:]
        assert np.array([float(row["kl"]) for row in rows]) == pytest.approx(kl, rel=1e-3, abs=1e-5)
        agree = (full.argmax(1) == other.argmax(1)).tolist()
        assert [row["agree"] == "1" for row in rows] == agree
        assert [int(row["top_full"]) for row in rows] == full.argmax(1).tolist()
        given = np.take_along_axis(other, np.array(ids[PROMPT:])[:, None], 1)[:, 0]
        measured = np.array([float(row["logprob_policy"]) for row in rows])
        assert measured == pytest.approx(given, rel=1e-4, abs=1e-4)
        line = next(e for e in lines if (e["text"], e["policy"]) == (text, name))
        assert line["mean_kl"] == pytest.approx(kl.mean(), rel=1e-3)
        assert line["perplexity"] == pytest.approx(np.exp(-given.mean()), rel=1e-3)
        assert line["agreement"] == np.mean(agree)
        assert line["whole_vocabulary"] is True
        assert kl.max() > 0.1  # the policy changes something


def test_some_tokens_of_a_distribution_give_a_lower_bound(
    server, texts, compared, tmp_path, monkeypatch, capsys
):
    from kvpolicy.evaluation.looking import fidelity

    monkeypatch.setattr(fidelity, "_WHOLE", 100)  # 512 tokens are many now
    words = ["--policy", "snapkv", "--text", texts[0], "--url", server.url, "--out", tmp_path]
    words += ["--prompt-tokens", PROMPT, "--continuation", POSITIONS, "--top", 64]
    assert run("fidelity", *words) == 0
    with (tmp_path / "fidelity.csv").open() as file:
        bounds = list(csv.DictReader(file))
    whole = [row for row in compared[0] if row["policy"] == "snapkv"]
    bound, exact = (np.array([float(row["kl"]) for row in rows]) for rows in (bounds, whole))
    assert (bound <= exact + 1e-4).all()
    assert bound.sum() > 0.5 * exact.sum()
    assert 0 < min(float(row["covered"]) for row in bounds) < 0.9999
    assert (
        "KL is a lower bound: 64 tokens of each distribution are known" in capsys.readouterr().out
    )


def test_greedy_answers_diverge_where_those_of_the_plain_model_do(compared, texts):
    from eager import generate

    for number, ids in enumerate(texts[1], 1):
        file, settings = POLICIES["snapkv"]
        both = [
            generate(str(MODEL), ids[:PROMPT], *policy, new_tokens=POSITIONS).tokens
            for policy in ((), (file, settings))
        ]
        pairs = enumerate(zip(*both, strict=True))
        first = next((at for at, (one, other) in pairs if one != other), None)
        text = f"{texts[0]}:{number}"
        line = next(e for e in compared[1] if (e["text"], e["policy"]) == (text, "snapkv"))
        assert line["greedy_divergence"] == first


def test_a_budget_for_everything_is_full_kv(compared):
    lines = [line for line in compared[1] if line["policy"] == "everything"]
    assert len(lines) == 2
    for line in lines:
        assert line["mean_kl"] < 1e-6
        assert line["agreement"] == 1
        assert line["first_divergence"] is line["greedy_divergence"] is None
        assert line["uncompressed"] == "short_prompt"
        assert line["perplexity"] == pytest.approx(line["perplexity_full"], rel=1e-5)


def test_inspect_shows_what_the_plain_model_keeps(server, texts, tokens, tmp_path, capsys):
    from eager import generate
    from kvpolicy.evaluation.looking.kept import unpacked

    ids = texts[1][0]
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(json.loads(texts[0].read_text().splitlines()[0])["text"])
    files = ["--json", tmp_path / "kept.json", "--html", tmp_path / "kept.html"]
    where = ["--prompt", prompt, "--url", server.url]
    assert run("inspect", "--policy", "policies/snapkv.yaml", *where, *files, "--heads") == 0
    found = json.loads((tmp_path / "kept.json").read_text())
    held = unpacked(found, len(ids))
    expected = generate(str(MODEL), ids, *POLICIES["snapkv"], new_tokens=1).kept[0]
    assert [[np.flatnonzero(h).tolist() for h in layer] for layer in held] == expected
    assert "".join(found["tokens"]) == tokens.tokenizer.decode(ids)
    assert len(found["tokens"]) == len(ids)
    assert found["settings"] == {"capacity": "40", "window": "8"}
    assert found["facts"]["entries_kept"] == held.sum() == 8 * 40
    out = capsys.readouterr().out
    assert out.startswith(
        f"snapkv (capacity=40, window=8): {len(ids)} tokens, 320 of {8 * len(ids):,} entries held"
    )
    assert len(re.findall(r"^ *\d(\.\d)? [#.█▏▎▍▌▋▊▉ ]{8} ", out, re.M)) == 4 + 8
    assert (tmp_path / "kept.html").read_text().count("drawKeptMap(byId") == 1


def test_a_server_is_started_with_the_policy_and_its_settings(server, tmp_path, monkeypatch):
    from contextlib import contextmanager

    from kvpolicy.evaluation.looking import look

    started = []

    @contextmanager
    def serve(*words, **flags):
        started.append((*words, flags["arguments"]))
        yield server

    monkeypatch.setattr(look, "serve", serve)
    (tmp_path / "prompt.txt").write_text("he even know start " * 20)
    words = ["--set", "capacity=40", "--set", "window=8", "--server-args", "--page-size 1"]
    words += ["--prompt", tmp_path / "prompt.txt", "--model", MODEL]
    assert run("inspect", "--policy", "snapkv", *words) == 0
    settings = ["snapkv.capacity=40", "snapkv.window=8"]
    file = f"snapkv={ROOT / 'policies' / 'snapkv.yaml'}"
    assert started == [(str(MODEL), [file], settings, ["--page-size", "1"])]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["inspect", "--prompt", "{}", "--layer", "99"], "99 is none of the model's 4 layers"),
        (["fidelity", "--text", "{}", "--prompt-tokens", "9999"], "9,999 would be the prompt"),
    ],
)
def test_what_the_model_does_not_have_is_found_before_a_server_starts(
    tmp_path, monkeypatch, capsys, words, sentence
):
    from kvpolicy.evaluation.looking import look

    monkeypatch.setattr(look, "serve", None)
    (tmp_path / "prompt.txt").write_text("he even know start " * 20)
    words = [word.format(tmp_path / "prompt.txt") for word in words]
    assert run(*words, "--policy", "snapkv", "--model", MODEL) == 2
    assert sentence in capsys.readouterr().err


def test_inspect_of_a_short_prompt_says_that_nothing_left(server, capsys, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"he even know start")))
    assert run("inspect", "--policy", "snapkv", "--prompt", "-", "--url", server.url) == 0
    out = capsys.readouterr().out
    assert "40 of 40 entries held (100.0 %)" in out
    assert "served in full: short_prompt (the budget holds the whole prompt)" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--policy", "lava"], "has no policy called `lava`; it has `snapkv`, `sinks-recent`"),
        (["--policy", "snapkv", "--layer", "4"], "4 is none of the model's 4 layers"),
        (["--policy", "snapkv", "--layer", "0", "--head", "-1"], "-1 is none of the model's 2 KV"),
    ],
)
def test_what_this_server_does_not_have_is_named(server, tmp_path, capsys, words, sentence):
    (tmp_path / "prompt.txt").write_text("he even know start")
    where = ["--prompt", tmp_path / "prompt.txt", "--url", server.url]
    assert run("inspect", *words, *where) == 2
    assert sentence in capsys.readouterr().err


def test_a_prompt_that_is_too_long_is_refused_in_the_servers_words(server, tmp_path, capsys):
    (tmp_path / "long.txt").write_text("he even know start " * 1200)
    where = ["--prompt", tmp_path / "long.txt", "--url", server.url]
    assert run("inspect", "--policy", "snapkv", *where) == 2
    error = capsys.readouterr().err
    assert "error[server]" in error
    assert "(4801 tokens)" in error
    assert "Traceback" not in error


def test_a_text_shorter_than_its_prompt_is_refused(server, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("he even know start")
    words = ["--text", tmp_path / "short.txt", "--prompt-tokens", "5", "--url", server.url]
    assert run("fidelity", "--policy", "snapkv", *words) == 2
    assert "it has 5 tokens, of which 5 would be the prompt" in capsys.readouterr().err
