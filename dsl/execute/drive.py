"""Runs a whole prefill, for commands, warming and benchmarks; servers show layers one by one.

Dimensions: L layers, H query heads, G KV heads, N tokens of the prompt, n tokens of one layer, T
queries, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from kvpolicy.dsl.execute.prefill.run import KeysValues, Run
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.tensors.kernels import Slots
from kvpolicy.dsl.execute.tensors.values import HOST


class PromptTensors(Protocol):
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
        """As in `PromptTensors`."""
        q = self.q[layer]
        return q if len(tokens) == q.shape[1] else q[:, tokens]

    def entries(self, layers: range, tokens: torch.Tensor) -> tuple[Slots, Slots]:
        """As in `PromptTensors`."""
        k, v = (Slots(pool[layers.start : layers.stop], tokens) for pool in (self.k, self.v))
        return k, v


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
    shown: PromptTensors,
    device: torch.device = HOST,
    within: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Driven:
    """Runs the prefill of a prompt, and a second one where the policy restarts.

    Args:
        prompt: N.
        shown: gives the prompt's tensors.
        within: makes the context in which a layer is shown.
    """
    first_run = run = program.start(prompt)
    chosen = torch.arange(prompt, device=device)
    places = _observed(run, shown, chosen, within)
    if run.restarted:
        chosen = chosen[places]
        run = run.again(len(chosen))
        _observed(run, shown, chosen, within)
    return Driven(run, first_run, chosen)


def _observed(
    run: Run,
    shown: PromptTensors,
    chosen: torch.Tensor,
    within: Callable[[], AbstractContextManager[None]],
) -> torch.Tensor:
    """Shows a run its layers; int64 [m], which of its tokens pass the last one, or begin again."""
    places = torch.arange(run.size, device=chosen.device)
    needs_values = run.program.bound.needs_values

    def entries(layers: range, tokens: torch.Tensor) -> KeysValues:
        k, v = shown.entries(layers, tokens)
        return k, v if needs_values else None

    for layer in run.program.layers:
        all_tokens = len(places) == run.size
        tokens = chosen if all_tokens else chosen[places]
        with within():
            q = shown.queries(layer, tokens, min(run.queries, len(places)))
            read_entries = partial(entries, tokens=tokens)
            deeper_places = run.show(layer, q, read_entries, None if all_tokens else places)
        places = places if deeper_places is None else places[deeper_places]
        if run.restarted:
            break
    return places
