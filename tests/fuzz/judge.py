"""Properties of the check and of `fmt` that hold for any text; torch is not needed."""

from __future__ import annotations

import re
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import yaml
from kvpolicy.dsl.check.policy import Checked, load
from kvpolicy.dsl.ir.nodes import Program
from kvpolicy.dsl.ir.text import print_program
from kvpolicy.dsl.syntax.diagnostics import PolicyError, render_all
from kvpolicy.dsl.syntax.fmt import format_policy
from kvpolicy.dsl.syntax.source import Source

CHECK_SECONDS = 2  # of processor time, which other load does not change
GROWTH = 300 << 10  # KiB by which one text may raise the peak memory


class Wrong(AssertionError):
    """A property does not hold for a text."""


class TooLong(Exception):
    """More processor time than allowed."""


def judged(text: str) -> Checked:
    """Checks and formats a text; raises Wrong if a property does not hold."""
    before = _most_memory()
    with limited(CHECK_SECONDS), patch.object(yaml, "parse", _parsed_once(yaml.parse)):
        source = Source("any.yaml", text)
        checked = load(source)
        _worded_well(checked, text)
        if checked.program is not None:
            _keeps_meaning(source, checked.program)
    if _most_memory() - before > GROWTH:
        raise Wrong(f"{(_most_memory() - before) >> 10} MiB were used for one text")
    return checked


def _parsed_once(parse: Callable) -> Callable:
    """Caches YAML events by text: `fmt` and the check parse the same text many times."""
    known: dict[str, list[yaml.Event]] = {}

    def parsed(text: str, Loader: type) -> Iterator[yaml.Event]:
        if text in known:
            yield from known[text]
            return
        made = []
        for event in parse(text, Loader=Loader):
            made.append(event)
            yield event
        known[text] = made

    return parsed


def _worded_well(checked: Checked, text: str) -> None:
    errors = [d for d in checked.diagnostics if d.severity == "error"]
    if (checked.program is None) != bool(errors):
        raise Wrong("a policy without a program has an error, and no other")
    for diagnostic in checked.diagnostics:
        if not diagnostic.message or diagnostic.message != diagnostic.message.strip():
            raise Wrong(f"an empty or ragged message: {diagnostic.message!r}")
        hole = re.search(r"(?<![^\s(])``(?![^\s,.;:)])|\bNone\b|Traceback", diagnostic.message)
        if hole and not (hole[0] == "``" and "`" in text):  # a quoted key may end with one
            raise Wrong(f"a message with a hole: {diagnostic.message!r}")
        span = diagnostic.span
        if span is None or not 0 <= span.start <= span.end <= len(text) + 1:
            raise Wrong(f"a place outside of the file: {span}")
    if bool(render_all(checked.diagnostics, checked.source)) != bool(checked.diagnostics):
        raise Wrong("diagnostics that are not shown")


def _keeps_meaning(source: Source, program: Program) -> None:
    """`fmt` keeps the meaning and comments, and does not change its own output."""
    formatted = format_policy(source)
    again = load(Source("any.yaml", formatted))
    if again.program is None:
        raise Wrong(f"`fmt` makes a file that is refused:\n{formatted}")
    if print_program(again.program) != print_program(program):
        raise Wrong(f"`fmt` changes the meaning:\n{formatted}")
    if _comments(formatted) != _comments(source.text):
        raise Wrong(f"`fmt` loses or doubles comments:\n{formatted}")
    if format_policy(again.source) != formatted:
        raise Wrong(f"`fmt` changes what it has written:\n{formatted}")


def _comments(text: str) -> Counter[str]:
    """Counts of the words after each `#`, in comments or in quoted texts."""
    return Counter(re.findall(r"#[ \t]*(\w*)", text))


def worded(error: PolicyError) -> None:
    if not str(error).strip():
        raise Wrong("a refusal without a word")


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises TooLong in a `with` block after `seconds` of this process's processor time."""

    def stop(*_) -> None:
        raise TooLong(f"more than {seconds} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _most_memory() -> int:
    """Peak memory of this process in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
