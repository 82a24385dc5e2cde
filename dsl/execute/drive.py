"""Runs a whole prefill, for commands, warming and benchmarks; servers show layers one by one.

Dimensions: L layers, H query heads, G KV heads, N tokens of the prompt, n tokens of one layer, T
queries, D head size.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from kvpolicy.dsl.execute.kernels import Slots
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.run import Run
from kvpolicy.dsl.execute.values import HOST


class Prompt(Protocol):
    """Queries, keys and values of a prompt, at the tokens asked for."""

    def queries(self, layer: int, tokens: torch.Tensor, number: int) -> torch.Tensor:
        """Queries after RoPE, [H, T, D], of the last `number` of int64 [n] tokens, or of more."""
        ...

    def entries(
        self, layers: range, tokens: torch.Tensor
    ) -> tuple[torch.Tensor | Slots, torch.Tensor | Slots]:
        """Keys after RoPE and values, [l * G, n, D] of l `layers`, or where a pool has them."""
        ...


class InPools(NamedTuple):
    """A prompt with queries [L, H, N, D], and keys and values in pools [L, N, G, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def queries(self, layer: int, tokens: torch.Tensor, number: int) -> torch.Tensor:
        """As in `Prompt`."""
        own = self.q[layer]
        return own if len(tokens) == own.shape[1] else own[:, tokens]

    def entries(self, layers: range, tokens: torch.Tensor) -> tuple[Slots, Slots]:
        """As in `Prompt`."""
        k, v = (Slots(pool[layers.start : layers.stop], tokens) for pool in (self.k, self.v))
        return k, v


class Within(Protocol):
    """Makes a context in which a layer is shown, or several are scored `together`."""

    def __call__(self, *, together: bool = False) -> AbstractContextManager[None]: ...


def _anywhere(*, together: bool = False) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Driven:
    """A prefill whose layers have all been observed, or noted and scored.

    Attributes:
        run: the last prefill.
        first_run: the prefill before a restart; without one, `run`.
        tokens: int64 [n], positions in the prompt of the tokens of `run`.
    """

    run: Run
    first_run: Run
    tokens: torch.Tensor


def drive(
    program: TorchProgram,
    prompt: int,
    shown: Prompt,
    device: torch.device = HOST,
    within: Within = _anywhere,
) -> Driven:
    """Runs the prefill of a prompt, and a second one where the policy restarts.

    Args:
        prompt: N.
        shown: gives the prompt's tensors.
        within: makes the context in which each layer is shown, and several are scored together.
    """
    first_run = run = program.start(prompt)
    chosen = torch.arange(prompt, device=device)
    there = _observed(run, shown, chosen, within)
    if run.restarted:
        chosen = chosen[there]
        run = run.again(len(chosen))
        _observed(run, shown, chosen, within)
    return Driven(run, first_run, chosen)


def _observed(
    run: Run,
    shown: Prompt,
    chosen: torch.Tensor,
    within: Within,
) -> torch.Tensor:
    """Shows a run its layers; int64 [m], which of its tokens pass the last one, or begin again."""
    there = torch.arange(run.size, device=chosen.device)
    for layer in run.program.layers:
        tokens = chosen if len(there) == run.size else chosen[there]
        number = min(run.queries, len(there))
        own = None if len(there) == run.size else there
        if run.notes(layer, len(there)):
            with within():
                q = shown.queries(layer, tokens, number)
                run.note(layer, q[:, q.shape[1] - number :], len(there))
            if run.due:
                with within(together=True):
                    k, v = shown.entries(run.due, tokens)
                    run.score(k, v if run.program.bound.needs_values else None, own)
            continue
        with within():
            q = shown.queries(layer, tokens, number)
            k, v = shown.entries(range(layer, layer + 1), tokens)
            values = v if run.program.bound.needs_values else None
            deeper = run.observe(layer, q, k, values, own)
        there = there if deeper is None else there[deeper]
        if run.restarted:
            break
    return there
