"""A policy taken through decode steps: one layer at a time, several steps at once.

Between two steps at which entries may leave nothing leaves, so that the states of a layer can be
brought up to date later, from the queries alone: the keys and values of all steps are then cached,
and what came after a step's token is left out of that step.

Dimensions: L layers, H query heads, G KV heads, M cached positions of a layer, T steps, D head
size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from kvpolicy.dsl.bind import Bound
from kvpolicy.dsl.torch_across import known_before
from kvpolicy.dsl.torch_evaluate import Evaluation
from kvpolicy.dsl.torch_kernels import Entries, Keys
from kvpolicy.dsl.torch_layout import Held, Remembered
from kvpolicy.dsl.torch_steps import Steps
from kvpolicy.dsl.torch_values import Frame, Value


@dataclass(frozen=True)
class Given:
    """What one layer is shown of T decode steps.

    Attributes:
        layer: from 0.
        generated: decode steps so far, these included.
        q: [H, T, D] their queries.
        k, v: [G, M, D], of the layout after these steps, or None where nothing reads them.
        there: bool [G, M] or None, of that layout.
        checks: gathers 0-d bool tensors, false if the model's tensors hold NaN or infinity.
    """

    layer: int
    generated: int
    q: torch.Tensor
    k: Keys | None
    v: Keys | None
    there: torch.Tensor | None
    checks: list[torch.Tensor]


class Walk:
    """Takes the layers of one request through decode steps.

    Attributes:
        window: last queries that a step reads.
    """

    def __init__(self, bound: Bound, steps: Steps, prompt: int) -> None:
        self.bound, self.steps, self.prompt = bound, steps, prompt
        self.window = bound.step_queries(prompt)

    def through(self, own: Remembered, given: Given, *, leaves: bool) -> Evaluation | None:
        """Takes a layer through the steps; its states and last queries are then those after them.

        Args:
            own: of the layer, the tokens of the steps included.
            given: what it is shown.
            leaves: whether the last step is evaluated in any case.

        Returns:
            The evaluation of the last step; None if it did not have to be evaluated.
        """
        number, steps = given.q.shape[1], self.steps
        places = own.positions[len(own.positions) - number :]
        if steps.advances and not steps.at_once:
            for step in range(number):
                own.remember(given.q[:, step : step + 1], places[step : step + 1], self.window)
                made = self._step(own, given, later=number - 1 - step)
                own.states = made.advance(steps.rules)
            return self._decides(made)
        after: Mapping[str, Value] = {}
        if steps.advances and number > 1:
            own.states = after = self._all_steps(own, given).advance(steps.rules)
        own.remember(given.q, places, self.window)
        if not leaves and (after or not steps.advances):
            return None
        made = self._step(own, given)
        made.after.update(after)
        own.states = made.advance(steps.rules)
        return self._decides(made)

    def _decides(self, made: Evaluation) -> Evaluation:
        """The evaluation of a step whose states are known."""
        made.generated = self.steps.leaving
        return made

    def _step(self, own: Remembered, given: Given, later: int = 0) -> Evaluation:
        """The evaluation of a step after which `later` more tokens came."""
        steps, bound = self.steps, self.bound
        tokens, step = len(own.positions) - later, given.q.shape[1] - later
        positions, there = own.positions[:tokens], given.there
        there = None if there is None else there[:, :tokens]
        k, v = (None if x is None else _first(x, tokens) for x in (given.k, given.v))
        q, query_positions = given.q[:, step - 1 : step], positions[-1:]
        if own.queries is not None:
            q, query_positions = own.queries, own.query_positions
        frame = Frame(
            bound, tokens, positions.device, bound.shape.kv_heads, prompt=self.prompt,
            layer=given.layer, q=q, k=k, v=v, positions=positions, there=there,
            generated=given.generated - later, kernels=steps.kernels,
            query_positions=query_positions, checks=given.checks,
        )  # fmt: skip
        return self._evaluation(own, frame)

    def _all_steps(self, own: Remembered, given: Given) -> Evaluation:
        """The evaluation of all steps at once, of states that they only add to."""
        bound, number = self.bound, given.q.shape[1]
        frame = Frame(
            bound, len(own.positions), own.positions.device, bound.shape.kv_heads,
            prompt=self.prompt, layer=given.layer, q=given.q, k=given.k, v=given.v,
            positions=own.positions, there=given.there, generated=given.generated,
            steps=number, kernels=self.steps.kernels,
            query_positions=own.positions[len(own.positions) - number :], checks=given.checks,
        )  # fmt: skip
        return self._evaluation(own, frame)

    def _evaluation(self, own: Remembered, frame: Frame) -> Evaluation:
        steps = self.steps
        return Evaluation(
            frame, steps.updates, before=own.states, others=known_before, budget=own.budget,
            generated=steps.advancing,
        )  # fmt: skip


def _first(x: Keys, tokens: int) -> Keys:
    """The first tokens of keys or values."""
    if x.shape[1] == tokens:
        return x
    return replace(x, ids=x.ids[:, :tokens]) if isinstance(x, Entries) else x[:, :tokens]


def without_absent(x: Keys | None, there: torch.Tensor | None) -> Keys | None:
    """Keys or values [G, M, D] with 0 where a KV head does not hold the entry."""
    if there is None or not isinstance(x, torch.Tensor):
        return x
    return x.masked_fill(~there[..., None], 0)


@dataclass(frozen=True)
class Landed:
    """How many entries there were and how many stay, on the host.

    Attributes:
        there, kept: int64 [L, G]; the same where nothing leaves.
        finite: whether the model's tensors held neither NaN nor infinity; if not, nothing leaves.
        held: per layer, what stays if all is finite.
    """

    there: torch.Tensor
    kept: torch.Tensor
    finite: bool
    held: list[Held]

    @property
    def dropped(self) -> list[int]:
        """Per layer, how many entries the KV head drops that drops most."""
        return (self.there - self.kept).amax(-1).tolist()


class Landing:
    """What stays at all layers, as numbers on their way to the host, which does not wait.

    Args:
        kept: of every layer bool [G, M].
        there: of every layer bool [G, M], or None where all KV heads held all.
        finite: 0-d bool, whether the numbers by which this was chosen are finite.
    """

    def __init__(
        self,
        kept: Sequence[torch.Tensor],
        there: Sequence[torch.Tensor | None],
        finite: torch.Tensor,
    ) -> None:
        self._shape = (len(kept), kept[0].shape[0])
        most = max(x.shape[1] for x in kept)
        pairs = zip(kept, there, strict=True)
        present = [torch.ones_like(x) if own is None else own for x, own in pairs]
        kept, present = (torch.stack([_wide(x, most) for x in all_]) for all_ in (kept, present))
        counts = [Held.of(kept), present.sum(-1), kept.sum(-1), finite.long()]
        numbers = torch.cat([x.reshape(-1) for x in counts])
        self._event: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers = host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        self._numbers = numbers

    def arrived(self) -> bool:
        """Whether the numbers can be read without waiting."""
        return self._event is None or self._event.query()

    def read(self) -> Landed:
        """The numbers; the host waits for them."""
        if self._event is not None:
            self._event.synchronize()
        layers, kv = self._shape
        numbers = torch.tensor(self._numbers.tolist(), dtype=torch.int64)
        held, there, kept, finite = numbers.split([2 * layers, layers * kv, layers * kv, 1])
        there, kept = there.view(layers, kv), kept.view(layers, kv)
        finite = bool(finite)
        own = [Held(number, bool(alike)) for number, alike in held.view(layers, 2).tolist()]
        return Landed(there, kept if finite else there, finite, own)


def _wide(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """Bool [G, M] with more columns, all false."""
    return x if x.shape[1] == tokens else F.pad(x, (0, tokens - x.shape[1]))
