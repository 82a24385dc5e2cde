"""The prompts on which a policy is tried before it is served, on a model small enough to be quick.

A trial tests the meaning of a policy, so only what costs time and decides nothing is scaled down:
see `cases`.

Dimensions: L layers, H query heads, G KV heads, N tokens of the prompt, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from random import Random

from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.bind.bounds import Bounds
from kvpolicy.dsl.bind.parameters import parameter_values
from kvpolicy.dsl.bind.tensors import tensor_shape
from kvpolicy.dsl.ir.nodes import Data, Delivered, ModelShape, Node, Param, Program
from kvpolicy.dsl.syntax.diagnostics import PolicyError

LAYERS, KV_HEADS, GROUP, SIZE = 6, 2, 2, 8
# Lengths for the long prompt: the first at which the policy drops something. Windows are counted on
# a prompt of `_FEW` tokens; one of all its queries is the whole prompt.
_LENGTHS = (24, 40, 56, 80, 112, 160, 224, 320)
_FEW = 64
_STEPS = 32  # decode steps searched for those at which entries leave


@dataclass(frozen=True)
class TrialCase:
    """One prompt of a trial.

    Attributes:
        bound: the policy, bound to a small model.
        tokens: N tokens of the prompt.
        steps: number of decode steps.
        ties: whether some tokens have the same key and value, and so the same scores.
    """

    bound: Bound
    tokens: int
    steps: int
    ties: bool


def cases(bound: Bound) -> Iterator[TrialCase]:
    """The prompts on which a bound policy is tried.

    The model is scaled down to at most 6 layers, 2 KV heads, 2 query heads per KV head and head
    size 8; parameters that count layers fall in proportion. On the first prompt, of two tokens, all
    other parameters are as in force. On the others, those that count tokens are smaller, so that
    short prompts lose entries: up to 4 they stay, above they grow by 1 per doubling. If the policy
    refuses such values (`require`), they are divided by 64, 16, 4 or 1 instead; if it refuses all
    of these, the same is tried with all layers of the model; else it stays as it is bound. Numbers
    written out in the file do not change: a policy with `budget: 2048` drops nothing in its trial.
    """
    scaled = _rebound(bound, min(bound.shape.layers, LAYERS), lambda value: value)
    if scaled is not None:
        yield TrialCase(scaled, 2, 0, ties=False)
    yield from _small_cases(_small(bound, min(bound.shape.layers, LAYERS)))


def deepest(bound: Bound) -> TrialCase:
    """The last case, with the longest prompt and several folds, and with all the model's layers."""
    *_, last = _small_cases(_small(bound, bound.shape.layers))
    return last


def _small_cases(small: Bound) -> Iterator[TrialCase]:
    """Cases of a policy with small numbers."""
    window = _window(small)
    long = max(_long(small), 3 * window)
    for tokens, ties in ((1, True), (window, False), (window + 1, True), (long, False)):
        yield TrialCase(small, tokens, _steps(small, tokens), ties)
    several = _rebound(small, small.shape.layers, lambda value: value, fold_interval=4)
    if several is not None:
        yield TrialCase(several, long + 5, _steps(several, long + 5, folds=3), ties=True)


def _small(bound: Bound, layers: int) -> Bound:
    """The policy with so many layers and small numbers of tokens, if it accepts them."""
    ways: list[Callable[[int], int]] = [_by_doublings]
    ways += [partial(_divided, divisor) for divisor in (64, 16, 4, 1)]
    attempts = (
        (number, way) for number in dict.fromkeys((layers, bound.shape.layers)) for way in ways
    )
    candidates = (_rebound(bound, number, way) for number, way in attempts)
    return next((candidate for candidate in candidates if candidate is not None), bound)


def _by_doublings(value: int) -> int:
    """1 to 4 unchanged, then 1 more per doubling: 8 becomes 5, 32 becomes 7, 2048 becomes 13."""
    return value if value <= 4 else value.bit_length() + 1


def _divided(divisor: int, value: int) -> int:
    return -(-value // divisor)


def _rebound(
    bound: Bound, layers: int, tokens: Callable[[int], int], *, fold_interval: int = 1
) -> Bound | None:
    """The policy on a small model, `tokens` applied to its numbers of tokens; None if refused."""
    shape = ModelShape(
        layers,
        min(bound.shape.kv_heads, KV_HEADS) * min(bound.shape.group, GROUP),
        min(bound.shape.kv_heads, KV_HEADS),
        min(bound.shape.head_dim, SIZE),
    )
    share = Fraction(layers, bound.shape.layers)
    try:
        values = _values(bound, share, tokens)
        return bind(sampled(bound.program, shape), shape, values, fold_interval=fold_interval)
    except PolicyError:
        return None


def sampled(program: Program, shape: ModelShape) -> Program:
    """A policy with tensors for a model of any size: numbers it accepts, always the same."""
    tensors = {
        name: Delivered(_numbers(tensor, tensor_shape(tensor, shape), Random(name)), "a trial")
        for name, tensor in program.data.items()
    }
    return program.given(tensors)


def _numbers(tensor: Data, sizes: list[int], random: Random) -> object:
    if sizes:
        return [_numbers(tensor, sizes[1:], random) for _ in range(sizes[0])]
    low, high = tensor.minimum, tensor.maximum
    if low is None:
        low = Fraction(0) if high is None or high > 0 else high - 1
    if high is None:
        high = max(low, Fraction(0)) + 1
    return min(max(random.uniform(float(low), float(high)), float(low)), float(high))


def _values(bound: Bound, share: Fraction, tokens: Callable[[int], int]) -> Mapping[str, str]:
    """Values for `bind`: of the parameters that were set, and of all that count tokens."""
    usual = parameter_values(bound.program, bound.shape, {})
    values = {}
    for name, param in bound.program.params.items():
        value = bound.params[name]
        if param.unit == "tokens" and value > 0:
            values[name] = _text(param, Fraction(tokens(int(value))))
        elif value == usual[name]:
            continue
        elif param.unit == "layers":
            values[name] = _text(param, Fraction(int(value * share)))
        else:
            values[name] = _text(param, value)
    return values


def _text(param: Param, value: Fraction | bool | float) -> str:
    """A value as text, raised to the parameter's minimum and, if need be, to an odd number."""
    if isinstance(value, bool):
        return str(value).lower()
    if param.minimum is not None:
        value = max(value, param.minimum)
    if param.odd and value % 2 == 0:
        value += 1
    return str(value) if value == int(value) else f"{float(value):.12f}"


def _window(bound: Bound) -> int:
    """Number of last queries that the policy reads; 5 if it reads all, one or none."""
    queries = max(bound.queries(_FEW), bound.step_queries(_FEW))
    return queries if 1 < queries < _FEW else 5


def _long(bound: Bound) -> int:
    """The first of `_LENGTHS` at which the policy drops entries; the second if at none."""
    entries = bound.shape.layers * bound.shape.kv_heads
    rules = [x for x in (bound.lowered.prefill, bound.lowered.decode) if x is not None]
    keeps = [x.keep for x in rules if x.keep is not None]
    # What reads `generated` has no bound for a prefill.
    keeps = [keep for keep in keeps if not _of_steps(keep)]
    for tokens in _LENGTHS:
        bounds = Bounds(bound, tokens)
        if any(_least(bounds, keep) < entries * tokens for keep in keeps):
            return tokens
    return _LENGTHS[1]


def _of_steps(keep: Node) -> bool:
    return any(node.op == "size" and node.value == "generated" for node in keep.walk())


def _least(bounds: Bounds, keep: Node) -> int:
    """Bound on the size of a selection; of a choice, that of its smaller branch."""
    if keep.op == "choose":
        return min(_least(bounds, branch) for branch in keep.args[::2])
    return bounds.size(keep).total


def _steps(bound: Bound, tokens: int, folds: int = 2) -> int:
    """Decode steps until entries have left `folds` times, or as often as within `_STEPS`."""
    if bound.folded.decode is None:
        return 0
    fold_steps = [step for step in range(1, _STEPS + 1) if bound.leaves_at(step, tokens)]
    return fold_steps[:folds][-1] if fold_steps else folds
