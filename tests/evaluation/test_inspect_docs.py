"""docs/inspect.md: its commands parse, its options exist, its texts can be made."""

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest
from kvpolicy.evaluation.looking import look_arguments

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "inspect.md").read_text()
ARGUMENTS = {"inspect": look_arguments.of_inspect, "fidelity": look_arguments.of_fidelity}


def parser(command: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=command)
    ARGUMENTS[command](made)
    return made


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def test_the_commands_are_understood():
    commands = [shlex.split(block) for block in blocks("sh")]
    assert [words[:2] for words in commands] == [["kvpolicy", "inspect"], ["kvpolicy", "fidelity"]]
    for _, command, *words in commands:
        parser(command).parse_args(words)


def test_the_options_exist_and_are_described():
    prose = re.sub(r"^```.*?^```", "", PAGE, flags=re.M | re.S)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose))
    elsewhere = {"--kv-policy", "--kv-policy-allow-inspection", "--max-total-tokens"}  # servers
    helps = " ".join(parser(command).format_help().split("\n\n", 1)[1] for command in ARGUMENTS)
    options = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", helps))
    assert named - elsewhere <= options
    assert options - named <= {
        "-h",
        "--help",
        "--set",
        "--data",
        "--prompt",
        "--api-key-env",
        "--prompt-tokens",
    }


def test_the_texts_can_be_made(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from kvpolicy.evaluation.asking.tokens import Tokens

    code = blocks("python")[0].replace("examples/model-tiny", str(ROOT / "examples" / "model-tiny"))
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/inspect.md", "exec"), {})
    texts = [json.loads(line)["text"] for line in Path("answers.jsonl").read_text().splitlines()]
    assert len(texts) == 40
    tokens = Tokens(ROOT / "examples" / "model-tiny")
    for text in texts:
        ids = tokens.encode(text)
        assert tokens.decode(ids[:512]).endswith("answer")
        assert len(ids) == 512 + 20


def test_the_figures_shown_are_of_these_texts():
    shown = blocks("text")[1]
    assert "800 positions of 40 texts" in shown
    assert len(re.findall(r"^(snapkv|lava|sinks-recent) ", shown, re.M)) == 3
