"""The task `data:PATH`: a user's own questions, judged as its lines say, or refused by line."""

import json
import re

import pytest
from kvpolicy.evaluation.questions import catalog

GOOD = {"context": "Amy lives in Oslo.", "input": "Where does Amy live?", "answers": ["Oslo"]}


def words_in(text):
    return len(text.split())


def written(tmp_path, *rows):
    """The task of a file with these lines."""
    path = tmp_path / "own.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"data:{path}"


def draw(task, index=0, length=1000, form="words"):
    return catalog.sample(task, form=form, length=length, index=index, seed=0, count=words_in)


def test_lines_are_samples(tmp_path):
    task = written(tmp_path, GOOD, "", {**GOOD, "input": "", "answers": "Oslo", "length": 3})
    assert catalog.count_of(task) == 2
    assert catalog.title(task) == "own data: own.jsonl"
    sample = draw(task)
    assert (sample.task, sample.index, sample.context) == (task, 0, GOOD["context"])
    [turn] = sample.turns
    assert turn.prompt == "\n\nWhere does Amy live?\nAnswer:"
    assert turn.judge("She lives in OSLO.") == 1
    assert turn.judge("She lives in Rome.") == 0
    assert turn.expected == draw(task, 1).turns[0].expected == ("Oslo",)
    assert turn.most_tokens == 33


def test_models_with_512_words_are_asked_in_their_form(tmp_path):
    row = {"context": "fact blue dog is oak .", "input": "ask blue dog", "answers": ["oak"]}
    sample = draw(written(tmp_path, row), form="embedded")
    assert sample.context + sample.turns[0].prompt == "fact blue dog is oak . ask blue dog answer"


def test_a_line_says_how_it_is_judged(tmp_path):
    task = written(
        tmp_path,
        {**GOOD, "answers": ["a red house"], "metric": "f1", "most_tokens": 5},
        {**GOOD, "answers": ["Sports"], "all_classes": ["SPORTS ", "Politics"]},
        {**GOOD, "answers": ["Sports"], "all_classes": ["Sports"], "metric": "contains"},
    )
    scores = [draw(task, index).turns[0].judge("red cat, Sports, Politics") for index in range(3)]
    assert scores == [pytest.approx(2 / 6), 0.5, 1]
    assert draw(task).turns[0].most_tokens == 5


def test_a_long_context_loses_its_middle(tmp_path):
    context = " ".join(f"w{i}" for i in range(5000))
    task = written(tmp_path, {**GOOD, "context": context})
    sample = draw(task, length=1000)
    kept = sample.context.split()
    assert 990 <= words_in(sample.context + sample.turns[0].prompt) <= 1000
    assert kept[:400] == context.split()[:400]
    assert kept[-400:] == context.split()[-400:]
    assert draw(task, length=6000).context == context
    chinese = written(tmp_path, {**GOOD, "context": "长" * 900 + "短" * 900})
    sample = catalog.sample(chinese, form="words", length=1000, index=0, seed=0, count=len)
    assert 990 <= len(sample.context + sample.turns[0].prompt) <= 1000
    assert abs(sample.context.count("长") - sample.context.count("短")) <= 1
    task = written(tmp_path, {**GOOD, "context": context})
    with pytest.raises(
        ValueError, match=r"own.jsonl:1: a prompt .* needs at least 5 tokens, got 4"
    ):
        draw(task, length=4)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes"),
        ("[1]", "a line must be a JSON object"),
        ({"input": "", "answers": ["a"]}, "the field context is missing"),
        ({**GOOD, "input": 3}, "input must be a text"),
        ({**GOOD, "answers": []}, "answers must be a list of texts, none empty"),
        ({**GOOD, "answers": ["a", " "]}, "answers must be a list of texts, none empty"),
        ({"context": "", "input": ""}, "the field answers is missing"),
        ({**GOOD, "metric": "bleu"}, "metric must be one of contains, f1, classes, got 'bleu'"),
        ({**GOOD, "metric": "classes"}, "metric classes needs the field all_classes"),
        ({**GOOD, "all_classes": [3]}, "all_classes must be a list of texts, none empty"),
        ({**GOOD, "most_tokens": 0}, "most_tokens must be a whole number above 0, got 0"),
        ({**GOOD, "all_classes": ["Rome"]}, "none of answers is one of all_classes"),
        ({**GOOD, "context": "a \ud800"}, r"context has '\ud800', which is half of a character"),
        ({**GOOD, "answers": ["\udc00"]}, r"answers has '\udc00', which is half of a character"),
        (
            "[" * 100_000,
            "it cannot be read: maximum recursion depth exceeded while decoding a JSON array from "
            "a unicode string",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, row, what):
    task = written(tmp_path, GOOD, row)
    for refused in (lambda: draw(task), lambda: catalog.count_of(task)):
        with pytest.raises(ValueError, match=f"^{re.escape(f'{tmp_path}/own.jsonl:2: {what}')}$"):
            refused()


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "image.jsonl").write_bytes(b"\xff\xd8")
    for name, what in {
        "none.jsonl": "no such file or directory",
        "empty.jsonl": "the file has no questions",
        "image.jsonl": "this is not UTF-8 text",
        "": "is a directory",
    }.items():
        path = tmp_path / name
        with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {what}')}$"):
            catalog.count_of(f"data:{path}")
    with pytest.raises(ValueError, match="data: needs the path of a file"):
        catalog.count_of("data:")


def test_there_is_no_line_beyond_the_last(tmp_path):
    task = written(tmp_path, GOOD)
    with pytest.raises(ValueError, match="1 questions, so none has the index 1"):
        draw(task, 1)


def test_a_changed_file_is_read_again(tmp_path):
    task = written(tmp_path, GOOD)
    assert catalog.count_of(task) == 1
    written(tmp_path, GOOD, GOOD)
    assert catalog.count_of(task) == 2
