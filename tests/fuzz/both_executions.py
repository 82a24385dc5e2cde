"""Executes an accepted policy by the interpreter, by the torch program and as served.

Dimensions: L layers, H query heads, G KV heads, N tokens of the prompt, D head size, T steps.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from random import Random

import numpy as np
from agreement import agree, frequencies
from judge import Wrong, limited, worded
from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.check.policy import Checked
from kvpolicy.dsl.interpret.interpreter import interpret
from kvpolicy.dsl.ir.nodes import ModelShape, Param, Program
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from noise import rounded_otherwise
from recordings import Shape, assert_same, tensors

RUN_SECONDS = 60
SHAPES: tuple[Shape, ...] = ((2, 4, 2, 4), (2, 2, 2, 3), (3, 4, 1, 4), (1, 6, 3, 2), (2, 2, 1, 2))
LENGTHS = (9, 1, 6, 13, 2, 5)
STEPS = 3


@dataclass(frozen=True)
class Case:
    """Sizes, values of parameters and tensors with which a policy is executed.

    Attributes:
        shape: L, H, G, D.
        tokens: N.
        every: steps between folds, for a policy without its own `when:`.
        settings: values of parameters.
        seed: seed of the tensors.
        ties: whether tensors have small whole numbers, so that many scores are equal.
    """

    shape: Shape
    tokens: int
    every: int
    settings: dict[str, str]
    seed: int
    ties: bool

    @classmethod
    def of(cls, random: Random, program: Program) -> Case:
        """A random case for a policy."""
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
                worded(error)
        return None

    def tensors(self) -> tuple:
        """q, k, v of the prompt, and q, k, v of the steps."""
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


def executed(checked: Checked, seed: str) -> str:
    """Runs an accepted policy by every execution and compares them.

    Returns:
        "agreed"; "unserved" if it uses features that are not served; "refused" if its parameters
        are; "unstable" if executions differ only as rounding errors decide.

    Raises:
        Wrong: executions differ.
        Exception: an execution raises it.
    """
    if checked.unserved:
        return "unserved"
    program = checked.require()
    case = Case.of(Random(seed), program)
    bound = case.bound(program)
    if bound is None:
        return "refused"
    with limited(RUN_SECONDS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            agree(bound, *case.tensors())
        except AssertionError as error:
            if _is_unstable(bound, case):
                return "unstable"
            raise Wrong(f"{case}: {error}") from error
    return "agreed"


def _is_unstable(bound: Bound, case: Case) -> bool:
    """Whether the interpreter's own result changes with other rounding errors."""
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
