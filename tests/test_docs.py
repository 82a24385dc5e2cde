"""The documents are true: links resolve, policies are accepted, commands run."""

import re
import shlex
import sys
from pathlib import Path

import forked
import pytest
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.syntax.diagnostics import render_all
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.syntax.source import Source

ROOT = Path(__file__).parents[1]
BINARIES = Path(sys.executable).parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)#]*)(?:#([^)]*))?\)")


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.M | re.S)


def headings(path: Path) -> set[str]:
    """Names of a document's headings in links, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    prose = re.sub(r"^```.*?^```|`[^`]*`", "", path.read_text(), flags=re.M | re.S)
    for target, heading in LINK.findall(prose):
        if "://" in target:
            continue
        file = path.parent / target if target else path
        assert file.exists(), f"{path.name} links to {target}"
        assert not heading or heading in headings(file), f"{path.name}: {target}#{heading}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_policies_in_documents_check(path):
    for text in blocks(path, "yaml"):
        if "language: 1" in text:
            checked = load(Source(path.name, text))
            assert checked.program is not None, render_all(checked.diagnostics, checked.source)


def test_the_policy_of_the_guide_is_the_one_in_the_examples():
    shown = next(b for b in blocks(ROOT / "docs" / "authors.md", "yaml") if "language: 1" in b)
    assert shown == (ROOT / "examples" / "policies" / "loud.yaml").read_text()


def test_the_policy_of_the_readme_is_the_one_that_is_shipped():
    shown = next(b for b in blocks(ROOT / "README.md", "yaml") if "language: 1" in b)
    assert shown == (ROOT / "policies" / "tova.yaml").read_text()


def test_the_readme_is_short():
    words = (ROOT / "README.md").read_text().split()
    assert sum(any(each.isalnum() for each in word) for word in words) <= 900


@pytest.mark.parametrize("name", ["README.md", "docs/methods.md"])
def test_the_methods_are_those_shipped_with_the_figures_measured(name):
    """The command that writes the tables changes nothing."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import table
    finally:
        sys.path.pop(0)
    text = (ROOT / name).read_text()
    assert table.written(ROOT / name) == text
    assert set(re.findall(r"^\| \[([\w-]+)\]", text, re.M)) == set(shipped())


def test_commands_of_the_guide_run(tmp_path):
    commands = [line for b in blocks(ROOT / "docs" / "authors.md", "sh") for line in b.splitlines()]
    assert len(commands) >= 6
    for command in commands:
        program, *words = shlex.split(command.replace(".cache/", f"{tmp_path}/"))
        if program != "python":
            words = [str(BINARIES / program), *words]
        result = forked.run([sys.executable, *words], cwd=ROOT, timeout=120)
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"


def test_the_picture_of_the_readme_can_be_made(tmp_path):
    made = tmp_path / "kept.png"
    words = [sys.executable, "examples/kept_map.py", "--out", str(made)]
    forked.run(words, cwd=ROOT, timeout=120).check_returncode()
    assert made.read_bytes()[:4] == b"\x89PNG"


def test_the_error_in_the_guide_is_what_check_prints():
    name = "examples/policies/loud.yaml"
    text = (ROOT / name).read_text().replace("max[group, query]", "max[query]")
    shown = next(b for b in blocks(ROOT / "docs" / "authors.md", "text") if "error[" in b)
    source = Source(name, text)
    assert render_all(load(source).diagnostics, source).strip() == shown.strip()


def test_what_the_guide_says_of_pooling(tmp_path):
    """The guide's positions, in section 4."""
    import json

    tensors = str(tmp_path / "prompt.npz")
    record = ["examples/record.py", "--prompt", "examples/prompt.txt", "--out", tensors]
    forked.run([sys.executable, *record], cwd=ROOT, timeout=120).check_returncode()
    for kernel, facts in (("1", {22, 23, 24}), ("5", set(range(20, 27)))):
        out = tmp_path / f"{kernel}.json"
        words = ["run", "examples/policies/loud.yaml", "--tensors", tensors]
        words += ["--set", f"kernel={kernel}", "--out", str(out)]
        command = [sys.executable, str(BINARIES / "kvpolicy"), *words]
        forked.run(command, cwd=ROOT, timeout=120).check_returncode()
        kept = set(json.loads(out.read_text())["kept"][1][1])
        assert kept & set(range(20, 28)) == facts
