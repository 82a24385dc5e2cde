"""docs/language.md is true: its files are accepted, its table of codes is the checker's."""

import re
from pathlib import Path

import pytest
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.syntax.diagnostics import render_all
from kvpolicy.dsl.syntax.source import Source

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "language.md").read_text()
BLOCKS = re.findall(r"```yaml\n(policy: .*?)```", TEXT, re.S)
BAD = Path(__file__).parent / "bad"


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split()[1])
def test_policies_check(block):
    checked = load(Source("block.yaml", block))
    assert render_all(checked.diagnostics, checked.source) == ""


def test_there_are_policies():
    assert len(BLOCKS) == 2


def test_table_of_codes():
    table = TEXT[TEXT.index("| code | refused |") :]
    documented = set(re.findall(r"^\| `([a-z-]+)` \|", table, re.M))
    texts = (path.read_text() for path in BAD.glob("*.txt"))
    found = {code for text in texts for code in re.findall(r"(?:error|warning)\[([a-z-]+)\]", text)}
    # These are no defects of a policy's text.
    assert documented == found | {"file", "data", "cost", "trial", "unserved"}


def test_example_of_a_message():
    message = re.search(r"```\n(policies/mine.yaml.*?)```", TEXT, re.S)[1]
    lines = ["policy: mine", "language: 1", "params:", "  window: 8", "", "", "keep: recent(windw)"]
    checked = load(Source("policies/mine.yaml", "\n".join(lines)))
    assert render_all(checked.diagnostics, checked.source) + "\n" == message


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([\w./-]+)\)", re.sub(r"`[^`]*`", "", TEXT)):
        assert (DOCS / target).exists(), target


def test_what_cannot_be_served_is_named():
    """The document names each feature that the note of `kvpolicy check` can name."""
    section = TEXT[TEXT.index("## What is served today") : TEXT.index("## Files")]
    for path in sorted((BAD.parent / "good").glob("*.yaml")):
        for diagnostic in load(Source(path.name, path.read_text())).unserved:
            feature = re.match(r"`([^`]+)`", diagnostic.message)[1]
            hidden = feature in ("hidden_in", "hidden_mid") and "hidden" in section
            assert f"`{feature}`" in section or hidden, feature
