"""Executes an accepted policy in every way, and compares what is kept and what binding claims.

Dimensions: L layers, H query heads, G KV heads, N tokens of the prompt, D head size, T steps.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from agreement import agree, frequencies
from claims import assert_claims
from judge import Wrong, limited, worded
from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.check.policy import Checked
from kvpolicy.dsl.interpret.interpreter import interpret
from kvpolicy.dsl.ir.nodes import ModelShape, Param, Program
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.dsl.tools.trial_cases import sampled
from moments import assert_same_moments, expected
from noise import in_float32, rounded_otherwise, rounded_to_float32
from recordings import Shape, assert_same, tensors
from ways import FLOAT32_TOLERANCE, WAYS, WAYS_BY_KERNELS, Executed, Way

RUN_SECONDS = 60
SHAPES: tuple[Shape, ...] = (
    (2, 4, 2, 4), (2, 2, 2, 3), (3, 4, 1, 4), (1, 6, 3, 2), (2, 2, 1, 2), (4, 4, 2, 4),
    (5, 8, 4, 2), (1, 1, 1, 1),
)  # fmt: skip
LENGTHS = (9, 1, 6, 13, 2, 5)
STEPS = 4
# Share of policies that Triton's kernels execute too. On the CPU they need its interpreter, which
# is in use where there is no GPU.
BY_KERNELS = 0.0 if torch.cuda.is_available() else 0.1


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
        size = ModelShape(*self.shape)
        for settings in (self.settings, {}):
            try:
                return bind(sampled(program, size), size, settings, fold_interval=self.every)
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
    """Runs an accepted policy in every way, and compares what is kept.

    Returns:
        "agreed"; "unserved" if it uses features that are not served; "refused" if its parameters
        are; "unstable" if executions differ only as rounding errors decide.

    Raises:
        Wrong: executions differ, or binding has claimed something else.
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
        q, k, v, steps = case.tensors()
        try:
            result = agree(bound, q, k, v, steps)
            it = Executed.of(bound, [q, k, v], steps, result, Random(case.seed), case.ties)
        except AssertionError as error:
            return _differs(error, case, bound, (q, k, v, steps))
        for other in it.others:
            assert_claims(bound, other.tokens, other.result)
        kernels = WAYS_BY_KERNELS if Random(f"{seed}:kernels").random() < BY_KERNELS else ()
        for way in (*WAYS, *kernels):
            try:
                way(it)
            except AssertionError as error:
                each = [(*x.prompt, x.steps) for x in (it, *it.others)]
                return _differs(error, case, bound, *each, way=way)
    return "agreed"


def _differs(
    error: AssertionError, case: Case, bound: Bound, *recordings: tuple, way: Way | None = None
) -> str:
    """ "unstable" if rounding errors decide what is kept of some tensors.

    Raises:
        Wrong: they do not.
    """
    is_unstable = _is_unstable_in_float32 if way in WAYS_BY_KERNELS else _is_unstable
    if any(is_unstable(bound, case, recording) for recording in recordings):
        return "unstable"
    raise Wrong(f"{case}: {way.__name__ if way else ''} {error}") from error


def _is_unstable(bound: Bound, case: Case, recording: tuple) -> bool:
    """Whether the interpreter's own result changes with other rounding errors."""
    inv_freq = frequencies(bound.shape.head_dim)
    plain = interpret(bound, *recording, inv_freq)
    for seed in range(4):
        with rounded_otherwise(seed):
            other = interpret(bound, *recording, inv_freq)
        try:
            assert_same(plain, other)
        except AssertionError:
            return True
    return False


def _is_unstable_in_float32(bound: Bound, case: Case, recording: tuple) -> bool:
    """Whether the interpreter keeps other entries with rounding errors of float32.

    Products of small whole numbers have none, so that vectors of these stay.
    """
    inv_freq, (*prompt, steps) = frequencies(bound.shape.head_dim), recording
    tokens = prompt[1].shape[2]
    plain = expected(bound, tokens, interpret(bound, *recording, inv_freq))
    for seed in range(8):
        moved = [x if case.ties else in_float32(x, seed) for x in (*prompt, *steps)]
        with rounded_to_float32(seed):
            other = interpret(bound, *moved[:3], tuple(moved[3:]), inv_freq)
        try:
            assert_same_moments(expected(bound, tokens, other), plain, FLOAT32_TOLERANCE)
        except AssertionError:
            return True
    return False
