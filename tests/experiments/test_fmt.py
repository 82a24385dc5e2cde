"""The canonical form: idempotent, same meaning, comments kept."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.experiments.definition.fmt import format_file, format_text
from kvpolicy.experiments.definition.reading import as_document, load, read

FOLDER = Path(__file__).parent
EXAMPLE = FOLDER.parents[1] / "examples" / "experiments" / "lava-25.yaml"
GOOD = [*sorted((FOLDER / "good").glob("*.yaml")), EXAMPLE]


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_idempotent_and_same_meaning(path):
    text = path.read_text()
    once = format_text(text)
    assert format_text(once) == once
    assert read(once, "x").require() == read(text, "x").require()
    assert max(map(len, once.splitlines())) <= 100


def test_the_example_is_formatted():
    assert not format_file(EXAMPLE, write=False)


def test_canonical_form():
    text = """\
# a header
metrics: [{role: guardrail, margin: 2%, metric: error_rate}]   # what counts
arms: {control: {weight: 1.0, # a half
   policy: "none"}, "123": {policy: lava, set: {b: true, a: 1e-3}}}  # the rest
steps:   # in steps
# first
- {coverage: 0.01} # one
- # then
  pause: 120m

coverage: 0.123
experiment: x
targeting_key: [header:X-Y,
  # at last
  rid]
# the end
"""
    expected = """\
# a header
experiment: x
targeting_key:
  - header:X-Y
  # at last
  - rid

coverage: 12.3 %
arms:
  control:
    policy: none
    weight: 1  # a half
  "123": {policy: lava, set: {b: true, a: 0.001}}  # the rest
metrics:
  - {metric: error_rate, role: guardrail, margin: 2 %}  # what counts
steps:  # in steps
  # first
  - {coverage: 1 %}  # one
  # then
  - {pause: 2h}
# the end
"""
    assert format_text(text) == expected


def test_long_lines_are_broken():
    steps = ", ".join(f"{{coverage: {i} %}}, {{pause: {i}h}}" for i in range(1, 9))
    text = EXAMPLE.read_text().split("steps:")[0] + f"steps: [{steps}]\n"
    lines = format_text(text).splitlines()
    assert "  - {coverage: 8 %}" in lines
    assert max(map(len, lines)) <= 100


def test_json_becomes_yaml():
    document = json.dumps(as_document(load(EXAMPLE).require()))
    assert "  - {metric: drift, role: guardrail, margin: 0.05, clip: 2}\n" in format_text(document)


def test_mistakes_are_reported():
    with pytest.raises(PolicyError, match=r"e\.yaml:1:1: error\[key\]"):
        format_text("experiment: x\n", "e.yaml")


def test_writes_only_what_changes(tmp_path):
    path = tmp_path / "e.yaml"
    path.write_text(EXAMPLE.read_text().replace("2h", "120m"))
    assert format_file(path, write=False)
    assert "120m" in path.read_text()
    assert format_file(path)
    assert path.read_text() == EXAMPLE.read_text()
    assert not format_file(path)


@pytest.mark.thorough
@given(st.data())
@settings(max_examples=200, deadline=None)
def test_comments_anywhere_are_kept(data):
    lines = data.draw(st.sampled_from(GOOD[:3])).read_text().splitlines()
    for number in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(lines) - 1))
        if "#" not in lines[at]:
            alone = data.draw(st.booleans())
            lines[at] += f"\n# c{number}" if alone else f"  # c{number}"
    text = "\n".join(lines) + "\n"
    found = read(text, "x")
    if found.experiment is not None:
        once = format_text(text)
        assert format_text(once) == once
        assert all(f"# c{n}" in once for n in range(4) if f"# c{n}" in text)


def test_a_comment_stays_where_it_is_indented():
    text = """\
experiment: trial
arms:
  control: {policy: none}
  lava-25:
    policy: lava
    # of lava-25
  # of arms
coverage: 10 %
metrics:
  - metric: error_rate
    role: guardrail
    margin: 0.1
    # of the error rate
default: none
"""
    first, arms, rest = (
        "experiment: trial\n", text[text.index("arms:") : text.index("coverage")],
        text[text.index("metrics") : text.index("default")],
    )  # fmt: skip
    formatted = f"{first}coverage: 10 %\ndefault: none\n{arms}{rest}"
    assert format_text(text, "x") == formatted
    assert format_text(formatted, "x") == formatted
