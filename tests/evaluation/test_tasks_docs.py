"""docs/tasks.md: its table has every task, its examples are samples, its custom task works."""

import json
import re
from pathlib import Path

import pytest
from kvpolicy.evaluation import tasks
from kvpolicy.evaluation.questions import catalog

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()


def block(language):
    return re.search(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)[1]


def words_in(text):
    return len(text.split())


def draw(task, form, length, index=1):
    return catalog.sample(task, form=form, length=length, index=index, seed=0, count=words_in)


def test_the_table_has_every_task():
    listed = re.findall(r"^\| `([\w:-]+)` \|", PAGE[: PAGE.index("## Two forms")], re.M)
    assert sorted(listed) == sorted([*catalog.names(), "data:PATH"])


@pytest.mark.parametrize(("form", "length"), [("embedded", 64), ("words", 200)])
def test_examples_are_samples(form, length):
    lines = block(form).splitlines()
    assert len(lines) == 7
    for line in lines:
        task, shown = line.split(maxsplit=1)
        sample = draw(task, form, length)
        prompt, answer = shown.split(" -> ")
        text = " ".join((sample.context + sample.turns[0].prompt).split())
        for piece in filter(None, (piece.strip() for piece in prompt.split("..."))):
            assert piece in text
        assert prompt.startswith("...") or text.startswith(prompt.split(" ...")[0])
        assert prompt.endswith("...") or text.endswith(prompt.split("... ")[-1])
        assert answer == sample.turns[0].reference.strip()


def test_the_second_question_is_as_shown():
    assert f"`{draw('multiturn', 'embedded', 64).turns[1].prompt.strip()}`" in PAGE


def test_the_line_of_own_data_is_one(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(block("json"))
    sample = draw(f"data:{path}", "words", 100, 0)
    assert sample.context == json.loads(block("json"))["context"]
    assert sample.turns[0].judge("In Oslo.") == 1


def test_a_file_in_the_folder_is_a_task(tmp_path, monkeypatch):
    (tmp_path / "first_colour.py").write_text(block("python"))
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path)])
    assert "first-colour" in catalog.names()
    assert catalog.title("first-colour") == "the first of many colours"
    for form, tokens in (("words", 20), ("embedded", 19)):  # <s> is no word of the text
        sample = draw("first-colour", form, 20)
        turn = sample.turns[0]
        assert words_in(sample.context + turn.prompt) == tokens
        assert sample.context.startswith(turn.expected[0])
        assert turn.judge(turn.reference) == 1
