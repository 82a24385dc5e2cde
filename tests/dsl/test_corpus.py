"""Policy files with one defect each and its exact message; and files without defects.

`bad/NAME.yaml` has one defect, `bad/NAME.txt` is the output of `kvpolicy check`. The name begins
with the defect's code. After an intended change of a message, write the new text to the file. Files
without defects: the shipped ones, and in `good/` some that are not served yet and one by an author.
"""

from pathlib import Path

import pytest
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.syntax.diagnostics import render_all
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.syntax.source import Source

FOLDER = Path(__file__).parent
BAD = sorted((FOLDER / "bad").glob("*.yaml"))
GOOD = sorted([*(FOLDER / "good").glob("*.yaml"), *shipped().values()])

# `file` and `data` are not defects of a policy's text: reading and serving find them.
CODES = {
    "yaml", "key", "syntax", "name", "arguments", "axis", "score-axes", "type", "not-a-set",
    "unit", "absent", "no-budget", "unreachable", "does-not-fit", "competition", "phase",
    "later-layer", "host", "query-set", "whole-map", "merge", "once", "range", "share", "size",
    "unused", "zero",
}  # fmt: skip
NOT_SERVED = {"omnikv", "squeezeattention"}


def read(path: Path) -> Source:
    return Source(path.name, path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_bad_file(path):
    checked = load(read(path))
    expected = path.with_suffix(".txt").read_text(encoding="utf-8")
    assert render_all(checked.diagnostics, checked.source) + "\n" == expected
    assert len(checked.diagnostics) == 1
    diagnostic = checked.diagnostics[0]
    assert path.stem.startswith(diagnostic.code)
    assert (checked.program is None) == (diagnostic.severity == "error")


def test_bad_files_cover_every_code():
    found = {d.code for path in BAD for d in load(read(path)).diagnostics}
    assert found == CODES


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_good_file(path):
    checked = load(read(path))
    assert render_all(checked.diagnostics, checked.source) == ""
    assert checked.program is not None
    assert checked.program.name == path.stem
    assert (checked.unserved != ()) == (path.stem in NOT_SERVED)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("read: recent(8)\n", "`read`"),
        ("score: mean[channel](hidden_mid)\nkeep: top(score, 4)\n", "`hidden_mid`"),
        (
            "data: {gate: {axes: [layer]}}\nkeep: recent(4)\n"
            "decode: {keep: 'recent(4) where max[past](past(gate, 2)) > 0.5 else recent(2)'}\n",
            "`past` in `decode`",
        ),
        (
            "score: norm1[dim](key)\nbudget: 8\nkeep: recent(4)\n"
            "decode: {keep: 'top[layer, kv, token](score, 8)'}\n",
            "`[layer]` in `decode`",
        ),
        ("decode: {keep: 'recent(4) or at(0, top(position, 2))'}\n", "`at` in `decode`"),
        (
            "state: {heat: 'heat + max[layer](sum[head, query](attn(new)))'}\nkeep: top(heat, 4)\n",
            "`[layer]` in a state",
        ),
        (
            "score: norm1[dim](key)\nlet: {most: 'max[layer](score)'}\nkeep: recent(4)\n"
            "decode: {keep: 'recent(2) then top(score where score == most, 8)'}\n",
            "`[layer]` in `decode`",
        ),
        (
            "keep: recent(4)\ndecode:\n  let: {most: 'max[layer](max[kv, token, dim](key))'}\n"
            "  keep: recent(2) or norm1[dim](key) > most\n",
            "`[layer]` in `decode`",
        ),
        (
            "let: {most: 'max[layer](sum[kv](cached))'}\nkeep: recent(4)\n"
            "decode: {keep: recent(most / 8)}\n",
            "`[layer]` in `decode`",
        ),
        (
            "share: {when: layer % 2 == 1, direction: 'unit[dim](own) * max[head, query, token]("
            "attn(recent(1)))'}\n",
            "`attn` in `share`",
        ),
    ],
)
def test_unserved_sentences_name_the_feature(text, what):
    checked = load(Source("a-test.yaml", "policy: a-test\nlanguage: 1\nabout: a test\n" + text))
    assert render_all(checked.diagnostics, checked.source) == ""
    (diagnostic,) = checked.unserved
    assert diagnostic.message == f"{what} cannot be served yet"
    place = checked.source.text[diagnostic.span.start : diagnostic.span.end]
    assert what.split("`")[1].strip("[]") in place


@pytest.mark.parametrize(
    "let",
    [
        "max[layer](total)",
        "total / sum[layer](total)",
        "2 where total > at(0, total) else 3",
        "sum[kv, token](score) / max[layer](total)",
        "max[past](past(total, 2)) where layer > 0",
        "sum[group, query, token](attn(all)) / max[layer](total)",
    ],
)
def test_decode_may_read_what_looked_at_other_layers(let):
    """A number without a token axis: decode sees neither other layers nor `attn(all)`."""
    text = (
        "policy: a-test\nlanguage: 1\nabout: a test\nscore: norm1[dim](key)\nlet:\n"
        f"  total: sum[kv, token](norm1[dim](key))\n  most: {let}\nkeep: all\n"
        "decode: {keep: recent(2) or score > most}\n"
    )
    checked = load(Source("a-test.yaml", text))
    assert render_all(checked.diagnostics, checked.source) == ""
    assert checked.unserved == ()
    assert set(checked.require().prefill.decided) == {"most"}


@pytest.mark.parametrize("name", shipped())
def test_shipped_policy(name):
    checked = load(name)
    assert render_all(checked.diagnostics, checked.source) == ""
    program = checked.require()
    assert program.name == name
    assert program.about
    assert program.source
    assert not checked.unserved


def test_every_defect_is_reported_in_order():
    text = (
        "policy: many\nlanguage: 1\nparams: {window: 8, kernel: 6}\n"
        "score: mean[head, query](avgpool(attn(recent(windw)), kernel))\n"
        "bugdet: 16\nbudget: layer\nkeep: recent(window) then top[kv, token](position)\n"
    )
    checked = load(Source("many.yaml", text))
    places = [checked.source.place(d.span.start) for d in checked.diagnostics]
    assert places == sorted(places)
    assert [d.code for d in checked.diagnostics] == ["range", "name", "key", "unit", "competition"]
