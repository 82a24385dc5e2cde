"""`kvpolicy fmt`: canonical, idempotent, same meaning, comments kept."""

import errno
import os
from pathlib import Path

import pytest
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.dsl.syntax.fmt import format_file, format_policy
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.syntax.source import Source

FILES = [*sorted((Path(__file__).parent / "good").glob("*.yaml")), *shipped().values()]


def shape(node):
    """A node as a comparable value, without names and places."""
    if node is None:
        return None
    return (node.op, node.axes, node.value, str(node.type), tuple(shape(a) for a in node.args))


def formatted(text):
    return format_policy(Source("x.yaml", text))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_idempotent_and_same_meaning(path):
    source = Source(path.name, path.read_text())
    once = format_policy(source)
    assert formatted(once) == once
    before, after = load(source).require(), load(Source(path.name, once)).require()
    assert list(before.params) == list(after.params)
    for rules in ("score", "budget", "keep"):
        assert shape(getattr(before.prefill, rules)) == shape(getattr(after.prefill, rules))
    assert (
        max(len(line) for line in once.splitlines() if ": " in line and "about" not in line) < 140
    )


@pytest.mark.parametrize("path", shipped().values(), ids=lambda path: path.stem)
def test_shipped_policies_are_formatted(path):
    assert not format_file(path, write=False)


def test_canonical_form():
    text = """\
# a header
keep:   recent( window )then top( score )   # what stays
budget: window+
  4*  window
# about the score
score: "sum[group]( maxpool(sum[query](attn(recent(window)))where not recent(window),kernel) )"
params: {kernel: {odd: true, default: 7},
  # the window
  window: {about: 'last tokens: their attention', default: -(-8), unit: tokens}}

policy: x
language: 1
about: It's "plain"
"""
    expected = """\
# a header
policy: x
language: 1
about: It's "plain"
params:
  kernel: {default: 7, odd: true}
  # the window
  window: {default: -(-8), unit: tokens, about: "last tokens: their attention"}
# about the score
score: sum[group](maxpool(sum[query](attn(recent(window))) where not recent(window), kernel))
budget: window + 4 * window
keep: recent(window) then top(score)  # what stays
"""
    assert formatted(text) == expected


def test_long_lines_are_broken():
    text = "policy: x\nlanguage: 1\nbudget: " + " + ".join(["prompt"] * 30) + "\nkeep: recent(4)\n"
    lines = formatted(text).splitlines()
    assert max(map(len, lines)) <= 120
    assert len(lines) == 6
    assert formatted("\n".join(lines) + "\n") == "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "comment",
    ["# alone\nkeep: recent(4)", "keep: recent(4)  # beside", "keep: recent(4)\n# at the end",
     "let:  # beside a block\n  n: 4\nkeep: recent(n)",
     "let: {n: 4,  # in a flow mapping\n  m: 5}\nkeep: recent(n + m)",
     "budget: |  # beside a bar\n  4 +\n  4\nkeep: recent(4)",
     "require: [1 < 2, # in a list\n  2 < 3]\nkeep: recent(4)"],
)  # fmt: skip
def test_comments_are_kept(comment):
    text = formatted(f"policy: x\nlanguage: 1\n{comment}\n")
    assert comment[comment.index("#") :].partition("\n")[0] in text
    assert formatted(text) == text


def test_reported_names_are_the_last_list():
    text = "policy: x\nlanguage: 1\nreport:\n  - b  # first\n  - a\n{}keep: top(a + b, 4)\n"
    lets = "let:\n  a: norm1[dim](key)\n  b: position\n"
    assert formatted(text.format(lets)) == (
        f"policy: x\nlanguage: 1\n{lets}keep: top(a + b, 4)\nreport: [b, a]  # first\n"
    )


def test_laid_out_expressions_keep_their_lines():
    text = (
        "policy: x\nlanguage: 1\nbudget: |\n  4*prompt\n\n    where  layer<2\n  else -8\n"
        "keep: recent(4)\n"
    )
    assert "budget: |\n  4 * prompt\n  where layer < 2\n  else -8\nkeep" in formatted(text)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [("0.2*prompt", "0.2 * prompt"), ("-8+heads", "-8 + heads"), ("-1e-3", "-1e-3"), ("8", "8")],
)
def test_expressions_that_begin_with_a_digit(expression, expected):
    text = "policy: x\nlanguage: 1\nbudget: {}\nkeep: recent(4)\n"
    assert formatted(text.format(expression)) == text.format(expected)


@pytest.mark.parametrize("text", ["2404.14469", "yes", "null", "12", "2024-04-22"])
def test_texts_that_yaml_reads_as_something_else_keep_their_quotes(text):
    text = f'policy: x\nlanguage: 1\nabout: "{text}"\nkeep: recent(4)\n'
    assert formatted(text) == text


@pytest.mark.parametrize("character", ["\\u2028", "\\x85", "\\x07", "\\ufeff", "\\U000e0001"])
def test_texts_that_cannot_be_shown_are_kept(character):
    """Some of these end a line in YAML if they are not escaped."""
    text = f'policy: x\nlanguage: 1\nabout: "one{character}😀two"\nkeep: recent(3)\n'
    formatted = format_policy(Source("x.yaml", text))
    one, other = (load(Source("x.yaml", each)).require().about for each in (text, formatted))
    assert one == other
    assert len(one) == 8
    assert "😀" in formatted


def test_a_hash_inside_text_is_no_comment():
    text = 'policy: x\nlanguage: 1\nabout: "a # b"\nsource: see#1\nkeep: recent(4)\n'
    assert formatted(text) == text


def test_defects_of_form_are_reported():
    with pytest.raises(PolicyError, match=r"error\[syntax\]"):
        formatted("policy: x\nlanguage: 1\nkeep: recent(\n")


def test_writes_only_what_changes(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("language: 1\npolicy: x\nkeep: recent(4)\n")
    assert format_file(path, write=False)
    assert path.read_text().startswith("language")
    assert format_file(path)
    assert path.read_text().startswith("policy")
    assert not format_file(path)


def test_a_file_that_cannot_be_written_stays_as_it_is(tmp_path, monkeypatch):
    def full(path, text, **options):
        with path.open("w") as file:
            file.write(text[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path, text = tmp_path / "x.yaml", "language: 1\npolicy: x\nkeep: recent(4)\n"
    path.write_text(text)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(PolicyError, match="no space left"):
            format_file(path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == text


def test_links_and_permissions_stay(tmp_path):
    path, link = tmp_path / "x.yaml", tmp_path / "link.yaml"
    path.write_text("language: 1\npolicy: x\nkeep: recent(4)\n")
    path.chmod(0o640)
    link.symlink_to(path)
    assert format_file(link)
    assert link.is_symlink()
    assert path.read_text().startswith("policy")
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_comment_before_what_braces_hold_goes_behind_it():
    text = (
        "policy: x\nlanguage: 1\nparams:\n  n: {  # one\n    default: 4, min: 1}\nkeep: recent(n)\n"
    )
    written = formatted(text)
    assert "  n: {default: 4, min: 1}  # one\n" in written
    assert formatted(written) == written


def test_a_comment_stays_in_the_section_in_which_it_is_indented():
    text = """\
policy: x
language: 1
params:
  big:
    default: 3
    # of big
  small: 4
  # of params
budget: big
let:
  a: position
  # of let
# of the score
score: a
"""
    formatted = """\
policy: x
language: 1
params:
  big:
    default: 3
    # of big
  small: 4
  # of params
let:
  a: position
  # of let
# of the score
score: a
budget: big
"""
    assert format_policy(Source("x", text)) == formatted
    assert format_policy(Source("x", formatted)) == formatted
