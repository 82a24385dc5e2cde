"""The trial: a policy is carried out by both executions on tiny random tensors before it is served.

What passes the checker should run. If it does not, because of a fault of an execution, the policy
is refused before any request uses it. The torch program is driven as a server drives it: nothing is
computed only to be reported, and decode steps between which nothing leaves are taken at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from traceback import walk_tb
from typing import TypeVar

import numpy as np
import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.bounds import max_entries
from kvpolicy.dsl.data.result import Result
from kvpolicy.dsl.execute.apply import apply
from kvpolicy.dsl.interpret.interpreter import interpret
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.dsl.tools.agreement import Difference, difference
from kvpolicy.dsl.tools.trial_cases import TrialCase, cases

T = TypeVar("T")

_HELP = (
    "this is a fault of kvpolicy, not of your file: please report it, with the file; until it is "
    "mended, write the expression in another way or leave the policy out"
)


def trial(bound: Bound) -> None:
    """Carries out a policy on some prompts by the interpreter and by the torch program.

    Prompts have one token, two, an observation window, one token more, and a few windows; some have
    many equal scores. All but that of two tokens have decode steps until entries have left twice;
    the last one until they have left three times, with several steps taken at once. Tensors are
    float32 from fixed seeds, so a policy is accepted always or never. `trial_cases.cases` scales
    models down, so that any is tried in well under a second.

    Args:
        bound: the policy with the model and the parameters with which it will be served.

    Raises:
        PolicyError: the executions disagree, one raises an exception, or more is kept than is
            reserved; the message says which, where, and on which prompt.
    """
    with torch.no_grad(), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prompts = _carried_out(bound, "the bound on its entries", "", lambda: list(cases(bound)))
        for number, case in enumerate(prompts):
            _Attempt(bound, case, number).go()


class _Attempt:
    """The trial on one prompt.

    Args:
        bound: the policy as it will be served, for messages.
        case: the prompt, and the policy bound to a small model.
        number: the seed of its tensors.
    """

    def __init__(self, bound: Bound, case: TrialCase, number: int) -> None:
        self.bound, self.case = bound, case
        self.tensors, self.steps = _tensors(case, number)
        size = case.bound.shape.head_dim
        self.inv_freq = None if size % 2 else 100.0 ** (-np.arange(size // 2) / (size // 2))
        shape, tokens = case.bound.shape, case.tokens
        self.prompt = (
            f" on a trial prompt of {tokens} token{'s' * (tokens != 1)} ({shape.layers} layers, "
            f"{shape.heads} heads, {shape.kv_heads} KV heads)"
        )

    def go(self) -> None:
        """Runs both executions and compares their results."""
        case = self.case
        expected = self._result("the interpreter", interpret)
        actual = self._result("the torch program", partial(apply, report=False))
        mismatch = difference(expected, actual)
        if mismatch is not None:
            mismatch = self._cause(expected, mismatch)
            moment = f" after decode step {mismatch.step}" if mismatch.step else ""
            message = (
                f"is not the same in the interpreter and in the torch program{self.prompt}: "
                f"`{mismatch.section}`{moment}, {mismatch.text}"
            )
            raise _refused(self.bound, message, self._deciding(mismatch))
        kept = sum(int(x.sum()) for x in actual.kept)
        most = self._run("the bound on its entries", lambda: max_entries(case.bound, case.tokens))
        if kept > most:
            message = f"keeps {kept} entries{self.prompt}, but {most} are reserved for it"
            raise _refused(self.bound, message, case.bound.folded.prefill.keep)

    def _result(self, who: str, execution: Callable[..., Result]) -> Result:
        run = partial(execution, self.case.bound, *self.tensors, self.steps, self.inv_freq)
        return self._run(who, run)

    def _run(self, who: str, make: Callable[[], T]) -> T:
        return _carried_out(self.bound, who, self.prompt, make)

    def _cause(self, expected: Result, mismatch: Difference) -> Difference:
        """The difference in a budget or score behind one in entries after the prefill, if any.

        The torch program runs again, as its first result has no budgets and no scores.
        """
        if mismatch.section != "keep" or mismatch.step:
            return mismatch
        return difference(expected, self._result("the torch program", apply)) or mismatch

    def _deciding(self, mismatch: Difference) -> Node | None:
        """The value of the policy that decides what differs."""
        bound = self.case.bound
        rules = (bound.folded.decode if mismatch.step else None) or bound.folded.prefill
        if mismatch.section == "propagate":
            return None if bound.folded.propagate is None else bound.folded.propagate.tokens
        if mismatch.section == "merge" and rules.merge is not None:
            return rules.merge.into
        if mismatch.section == "merge" and bound.folded.share is not None:
            return bound.folded.share.direction
        return {"budget": rules.budget, "score": rules.score, "keep": rules.keep}.get(
            mismatch.section
        )


def _carried_out(bound: Bound, who: str, prompt: str, make: Callable[[], T]) -> T:
    """The result of `make`.

    Raises:
        PolicyError: `make` raises an exception; a `PolicyError` is passed on as it is.
    """
    try:
        return make()
    except PolicyError:
        raise
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        what = type(error).__name__ + (f": {lines[0].strip()}" if lines else "")
        raise _refused(bound, f"makes {who} fail{prompt}: {what}", _node_of(error)) from error


def _refused(bound: Bound, message: str, node: Node | None) -> PolicyError:
    span = None if node is None else node.span
    return bound.program.refused("trial", f"`{bound.program.name}` {message}", span, _HELP)


Tensors = tuple[np.ndarray, np.ndarray, np.ndarray]


def _tensors(case: TrialCase, seed: int) -> tuple[Tensors, Tensors]:
    """q, k, v of the prompt [L, H|G, N, D] and of the decode steps [T, L, H|G, D], float32.

    With ties, many tokens have the same key and value, and so the same scores. Queries all differ:
    if nothing differed at all, rounding would decide. Queries of decode steps are long and similar:
    they attend to the same few tokens, so that a few steps change the order that sums over the
    whole prompt have given.
    """
    shape, rng = case.bound.shape, np.random.default_rng(seed)
    total = case.tokens + case.steps
    different = min(total, max(2, 1 + total // 4))
    tokens = rng.integers(0, different, total) if case.ties else np.arange(total)

    def random(heads: int) -> np.ndarray:
        numbers = rng.standard_normal((shape.layers, heads, total, shape.head_dim))
        return numbers.astype(np.float32)

    q, k, v = random(shape.heads), random(shape.kv_heads), random(shape.kv_heads)
    q[:, :, case.tokens :] += 3 * random(shape.heads)[:, :, :1]
    k, v = k[:, :, tokens], v[:, :, tokens]

    def first(x: np.ndarray) -> np.ndarray:
        return x[:, :, : case.tokens]

    def later(x: np.ndarray) -> np.ndarray:
        return x[:, :, case.tokens :].transpose(2, 0, 1, 3)

    return (first(q), first(k), first(v)), (later(q), later(k), later(v))


def _node_of(error: Exception) -> Node | None:
    """The innermost value of the policy that was being computed when an exception was raised."""
    innermost = None
    for frame, _ in walk_tb(error.__traceback__):
        nodes = [frame.f_locals.get("node"), *frame.f_locals.values()]
        candidates = (x for x in nodes if isinstance(x, Node) and x.span is not None)
        innermost = next(candidates, innermost)
    return innermost
