"""Any text gives diagnostics or a program: never a traceback, in bounded time and memory."""

import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvpolicy.dsl.check import load
from kvpolicy.dsl.diagnostics import render_all
from kvpolicy.dsl.expression import ExpressionError, tokenize
from kvpolicy.dsl.fmt import format_policy
from kvpolicy.dsl.functions import FUNCTIONS
from kvpolicy.dsl.library import shipped
from kvpolicy.dsl.names import BUILTINS
from kvpolicy.dsl.source import Source

FILES = [*(Path(__file__).parent / "good").glob("*.yaml"), *shipped().values()]
GOOD = [path.read_text() for path in sorted(FILES)]
SNIPPETS = (
    "[token]", "[layer]", "[head, query]", "(", ")", ",", " where ", " else ", " then ", " not ",
    "-", " / ", " ^ ", "0", "1e300", "all", "new", "budget", "score", ": ", "\n", "  ", "#", "'",
    '"', "|", ">", "&a", "*a", "!!x", "<<", "{", "}", "- ", "\t", "\x00", "\ufeff", "\u2028", "😀",
    "params:\n", "decode: same\n", "merge:\n  into: nearest(key)\n", "state:\n  s: s + 1\n",
    *BUILTINS, *(f"{name}(" for name in FUNCTIONS),
)  # fmt: skip
SLOW = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


def judged(text: str) -> None:
    """Checks a text and looks at what comes back."""
    source = Source("any.yaml", text)
    checked = load(source)
    errors = [d for d in checked.diagnostics if d.severity == "error"]
    assert (checked.program is None) == bool(errors)
    for diagnostic in checked.diagnostics:
        assert diagnostic.message
        assert diagnostic.message == diagnostic.message.strip()
        assert 0 <= diagnostic.span.start <= diagnostic.span.end <= len(text) + 1
    rendered = render_all(checked.diagnostics, source)
    assert bool(rendered) == bool(checked.diagnostics)
    if checked.program is not None:
        again = Source("any.yaml", format_policy(source))
        assert load(again).program is not None


@SLOW
@given(st.text(max_size=400))
def test_any_text(text):
    judged(text)


@SLOW
@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz_0123456789+-*/%^()[],=<> \n", max_size=200))
def test_any_expression(text):
    judged("policy: any\nlanguage: 1\nkeep: |\n  " + text.replace("\n", "\n  ") + "\n")


@st.composite
def mutations(draw):
    """A good file with a few edits: pieces removed, repeated, moved, or put in."""
    text = draw(st.sampled_from(GOOD))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        end = min(len(text), at + draw(st.integers(0, 30)))
        kind = draw(st.sampled_from(("cut", "repeat", "insert", "replace", "swap")))
        snippet = draw(st.sampled_from(SNIPPETS))
        if kind == "cut":
            text = text[:at] + text[end:]
        elif kind == "repeat":
            text = text[:end] + text[at:end] + text[end:]
        elif kind == "insert":
            text = text[:at] + snippet + text[at:]
        elif kind == "replace":
            text = text[:at] + snippet + text[end:]
        else:
            other = draw(st.sampled_from(GOOD))
            text = text[:at] + other[at:end] + text[end:]
    return text


@SLOW
@given(mutations())
def test_mutated_policies(text):
    judged(text)


def words(text: str) -> list[str]:
    try:
        return [token.text for token in tokenize(text) if token.text]
    except ExpressionError:
        return []


@SLOW
@given(st.integers(0, 2**32))
def test_shuffled_words_of_policies(seed):
    """Expressions of the right words in the wrong order: deep into the checker."""
    chance = random.Random(seed)
    lines = []
    for line in chance.choice(GOOD).split("\n"):
        head, colon, value = line.partition(": ")
        value = value.partition(" #")[0]
        found = words(value)
        if colon and len(found) > 3 and chance.random() < 0.5 and "{" not in value:
            i, j = chance.randrange(len(found)), chance.randrange(len(found))
            found[i], found[j] = found[j], found[i]
            value = " ".join(found)
        lines.append(head + colon + value)
    judged("\n".join(lines))


def nested(levels: int) -> str:
    """Lets that double each other's work."""
    lets = ["  n0: value"]
    for i in range(1, levels):
        lets.append(f"  n{i}: slerp[dim](n{i - 1}, entropy[dim](n{i - 1}) + n{i - 1}, 0.5)")
    return "policy: big\nlanguage: 1\nlet:\n" + "\n".join(lets) + f"\nkeep: n{levels - 1} > 0\n"


LARGE = {
    "many bytes": "a: " + "x" * 70_000,
    "many brackets": "policy: x\nlanguage: 1\nkeep: " + "[" * 60_000,
    "many braces": "{" * 60_000,
    "many parentheses": "policy: x\nlanguage: 1\nkeep: '" + "(" * 60_000 + "'",
    "many dashes": "- " * 30_000,
    "many indents": "\n".join(" " * i + "a:" for i in range(300)),
    "many keys": "".join(f"k{i}: 1\n" for i in range(8_000)),
    "many minus signs": "policy: x\nlanguage: 1\nbudget: " + "-" * 1_900 + "1\nkeep: all\n",
    "one long name": "policy: x\nlanguage: 1\nkeep: " + "a" * 60_000,
    "huge power": "policy: x\nlanguage: 1\nbudget: 9 ^ 9 ^ 9 ^ 9 ^ 9\nkeep: recent(4)\n",
    "power tower": "policy: x\nlanguage: 1\nlet:\n  n0: 3\n"
    + "".join(f"  n{i}: n{i - 1} ^ n{i - 1}\n" for i in range(1, 60))
    + "budget: n59\nkeep: recent(4) then top(position)\n",
    "squares": "policy: x\nlanguage: 1\nlet:\n  n0: 3.7\n"
    + "".join(f"  n{i}: n{i - 1} * n{i - 1}\n" for i in range(1, 60))
    + "budget: n59\nkeep: recent(4) then top(position)\n",
    "huge width": "policy: x\nlanguage: 1\nkeep: top(maxpool(position, 1e300 + 1), 4)\n",
    "doubling lets": nested(60),
    "quoted escapes": 'policy: "\\UFFFFFFFF"\n',
    "surrogate": 'policy: "\\uD800"\n',
    "aliases": "a: &a [x]\n" + "".join(f"k{i}: *a\n" for i in range(5_000)),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_input(name):
    judged(LARGE[name])


def test_time_and_memory_are_bounded():
    """All large inputs together, in a process that may use 60 seconds and 512 MiB."""
    script = "import sys, test_any_text as t\nfor text in t.LARGE.values():\n    t.judged(text)\n"

    def limit():
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
        resource.setrlimit(resource.RLIMIT_AS, (512 * 2**20, 512 * 2**20))

    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
