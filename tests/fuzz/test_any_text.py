"""Any text gives diagnostics or a program: never a traceback, in bounded time and memory."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from judge import judged

SLOW = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@SLOW
@given(st.text(max_size=400))
def test_any_text(text):
    judged(text)


@SLOW
@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz_0123456789+-*/%^()[],=<> \n", max_size=200))
def test_any_expression(text):
    judged("policy: any\nlanguage: 1\nkeep: |\n  " + text.replace("\n", "\n  ") + "\n")


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
