"""What must hold for one text: of the check, of `fmt`, and of a policy that is accepted.

Dimensions: L layers, H query heads, G KV heads, N tokens of the prompt, D head size, T steps.
"""

from __future__ import annotations

import re
import resource
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from unittest.mock import patch

import numpy as np
import yaml
from agreement import agree, frequencies
from kvpolicy.dsl.bind import Bound, bind
from kvpolicy.dsl.check import Checked, load
from kvpolicy.dsl.diagnostics import PolicyError, render_all
from kvpolicy.dsl.fmt import format_policy
from kvpolicy.dsl.interpret import interpret
from kvpolicy.dsl.ir import ModelShape, Param, Program
from kvpolicy.dsl.print_ir import print_program
from kvpolicy.dsl.source import Source
from noise import rounded_otherwise
from recordings import Shape, assert_same, tensors

CHECK_SECONDS = 2  # of processor time, whatever else the machine does
RUN_SECONDS = 60
GROWTH = 300 << 10  # KiB by which one text may raise the most memory that was ever used
SHAPES: tuple[Shape, ...] = ((2, 4, 2, 4), (2, 2, 2, 3), (3, 4, 1, 4), (1, 6, 3, 2), (2, 2, 1, 2))
LENGTHS = (9, 1, 6, 13, 2, 5)
STEPS = 3


class Wrong(AssertionError):
    """A text for which something does not hold."""


class TooLong(Exception):
    """More processor time than allowed."""


@dataclass(frozen=True)
class Case:
    """How an accepted policy is executed: sizes, values of parameters, tensors.

    Attributes:
        shape: L, H, G, D.
        tokens: N.
        every: entries leave at every so many steps, where the policy does not say when.
        settings: of parameters.
        seed: of the tensors.
        ties: small whole numbers, so that many scores are equal.
    """

    shape: Shape
    tokens: int
    every: int
    settings: dict[str, str]
    seed: int
    ties: bool

    @classmethod
    def of(cls, random: Random, program: Program) -> Case:
        """A case for a policy."""
        shape = random.choice(SHAPES)
        settings = {}
        for name, param in program.params.items():
            if random.random() < 0.85:
                settings[name] = _setting(random, param, shape[0])
        return cls(
            shape, random.choice(LENGTHS), random.choice((1, 2, 3)), settings,
            random.randrange(1 << 30), random.random() < 0.3,
        )  # fmt: skip

    def bound(self, program: Program) -> Bound | None:
        """The policy for this case, or with its defaults; None if neither is accepted."""
        for settings in (self.settings, {}):
            try:
                return bind(program, ModelShape(*self.shape), settings, fold_interval=self.every)
            except PolicyError as error:
                _worded(error)
        return None

    def tensors(self) -> tuple:
        """q, k, v of the prompt, and those of the steps."""
        random = np.random.default_rng(self.seed)
        return tensors(random, self.shape, self.tokens, STEPS, self.ties)


def _setting(random: Random, param: Param, layers: int) -> str:
    if param.kind == "truth":
        return random.choice(("true", "false"))
    if param.choices:
        return str(random.choice(param.choices))
    if param.unit == "ratio" or (param.maximum is not None and param.maximum <= 1):
        return random.choice(("0", "0.3", "0.5", "0.77", "1"))
    if param.odd:
        return random.choice(("1", "3", "5"))
    if param.unit == "layers":
        return str(random.randrange(layers + 1))
    if param.whole:
        return str(random.choice((0, 1, 1, 2, 3, 4, 5, 8)))
    return random.choice(("0.5", "1", "2", "0", "1.3"))


# The check and `fmt`.


def judged(text: str) -> Checked:
    """Checks and formats a text; raises Wrong where something does not hold."""
    before = _most_memory()
    with _limited(CHECK_SECONDS), patch.object(yaml, "parse", _parsed_once(yaml.parse)):
        source = Source("any.yaml", text)
        checked = load(source)
        _worded_well(checked, text)
        if checked.program is not None:
            _keeps_meaning(source, checked.program)
    if _most_memory() - before > GROWTH:
        raise Wrong(f"{(_most_memory() - before) >> 10} MiB were used for one text")
    return checked


def _parsed_once(parse: Callable) -> Callable:
    """YAML takes most of the time, and `fmt` and the check read the same text many times."""
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
        if re.search(r"``|\bNone\b|Traceback", diagnostic.message):
            raise Wrong(f"a message with a hole: {diagnostic.message!r}")
        span = diagnostic.span
        if span is None or not 0 <= span.start <= span.end <= len(text) + 1:
            raise Wrong(f"a place outside of the file: {span}")
    if bool(render_all(checked.diagnostics, checked.source)) != bool(checked.diagnostics):
        raise Wrong("diagnostics that are not shown")


def _keeps_meaning(source: Source, program: Program) -> None:
    """`fmt` says the same, keeps comments, and leaves its own work alone."""
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
    """How often the words after each `#` are there, in comments or not."""
    return Counter(re.findall(r"#\s*(\S*)", text))


def _worded(error: PolicyError) -> None:
    if not str(error).strip():
        raise Wrong("a refusal without a word")


# Executions.


def executed(checked: Checked, seed: str) -> str:
    """Runs an accepted policy everywhere.

    Returns:
        "agreed"; "unserved" or "refused" if it is not run for what it needs or for its parameters;
        "unstable" if executions differ where rounding errors decide.

    Raises:
        Wrong: executions differ.
        Exception: one of them raises.
    """
    if checked.unserved:
        return "unserved"
    program = checked.require()
    case = Case.of(Random(seed), program)
    bound = case.bound(program)
    if bound is None:
        return "refused"
    with _limited(RUN_SECONDS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            agree(bound, *case.tensors())
        except AssertionError as error:
            if _is_unstable(bound, case):
                return "unstable"
            raise Wrong(f"{case}: {error}") from error
    return "agreed"


def _is_unstable(bound: Bound, case: Case) -> bool:
    """Whether the interpreter itself differs when it rounds otherwise."""
    inv_freq = frequencies(case.shape[3])
    plain = interpret(bound, *case.tensors(), inv_freq)
    for seed in range(4):
        with rounded_otherwise(seed):
            other = interpret(bound, *case.tensors(), inv_freq)
        try:
            assert_same(plain, other)
        except AssertionError:
            return True
    return False


# Limits.


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """Raises TooLong after so much processor time of this process."""

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
    """KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
