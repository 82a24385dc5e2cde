"""A policy taken through decode steps: one layer at a time, several steps at once.

Between two steps at which entries may leave nothing leaves, so that the states of a layer can be
brought up to date later, from the queries alone: the keys and values of all steps are then cached,
and what came after a step's token is left out of that step.

Dimensions: L layers, H query heads, G KV heads, M cached positions of a layer, T steps, D head
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.execute.across import known_before
from kvpolicy.dsl.execute.evaluate import Evaluation
from kvpolicy.dsl.execute.kernels import Entries, Keys, dense
from kvpolicy.dsl.execute.layout import Held, Remembered
from kvpolicy.dsl.execute.steps import Steps
from kvpolicy.dsl.execute.together import Together, present, side_by_side
from kvpolicy.dsl.execute.values import Frame, Value


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

    def light(self) -> Given:
        """The same, without copies that were made of a pool's rows."""
        return replace(self, k=afresh(self.k), v=afresh(self.v))


def afresh(x: Keys | None) -> Keys | None:
    """The same keys or values, without a copy that was made of a pool's rows."""
    return replace(x) if isinstance(x, Entries) else x


@dataclass(frozen=True)
class Decided:
    """What decides at a layer what stays.

    Attributes:
        step: evaluation of the last step, its states advanced; None where nothing needs it.
        kept: bool [G, M], if that is known already.
    """

    step: Evaluation | None
    kept: torch.Tensor | None = None

    @property
    def evaluation(self) -> Evaluation:
        """Of the last step.

        Raises:
            TypeError: nothing was to need it.
        """
        if self.step is None:
            raise TypeError("the last step has not been evaluated")
        return self.step


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
        if steps.advances and not steps.at_once:
            places = own.positions[len(own.positions) - number :]
            for step in range(number):
                own.remember(given.q[:, step : step + 1], places[step : step + 1], self.window)
                made = self._step(own, given, later=number - 1 - step)
                own.states = made.advance(steps.rules)
            return self._decides(made)
        after: Mapping[str, Value] = {}
        if steps.advances and number > 1:
            own.states = after = self._all_steps(own, given).advance(steps.rules)
        self._remember(own, given)
        if not leaves and (after or not steps.advances):
            return None
        made = self._step(own, given)
        made.after.update(after)
        own.states = made.advance(steps.rules)
        return self._decides(made)

    def all_through(
        self, layers: Sequence[Remembered], given: Callable[[int], Given], *, leaves: bool
    ) -> Iterator[Decided]:
        """Takes all layers through the steps, in as few operations as the policy allows.

        Args:
            layers: what each remembers, the tokens of the steps included.
            given: what a layer is shown; asked for once per layer.
            leaves: whether entries may leave at the last step.

        Yields:
            If `leaves`, what decides at every layer.
        """
        steps, numbers, done = self.steps, range(len(layers)), False
        if steps.advances and steps.states_alike:
            shown = [given(number) for number in numbers]
            given = shown.__getitem__
            done = self.advance_together(layers, shown)
        if not leaves or steps.keep_alike:
            shown = []
            for own, number in zip(layers, numbers, strict=True):
                each = given(number)
                if done:
                    self._remember(own, each)
                else:
                    self.through(own, each, leaves=False)
                if leaves:
                    shown.append(each.light())
            if leaves:
                yield from self._keep_together(layers, shown)
            return
        for own, number in zip(layers, numbers, strict=True):
            if done:
                self._remember(own, given(number))
                yield Decided(self._last(own, given(number)))
            else:
                yield Decided(self.through(own, given(number), leaves=True))

    def advance_together(self, layers: Sequence[Remembered], shown: Sequence[Given]) -> bool:
        """Advances the states of all layers at once, if their entries are in one pool."""
        steps, first = self.steps, shown[0]
        together = Together(layers, self.bound.shape.kv_heads)
        k, v = (together.entries(x) for x in zip(*((x.k, x.v) for x in shown), strict=True))
        if steps.advancing_reads and (k is None or v is None):
            return False
        # The order of the entries is enough to say which come after a query.
        device = together.there.device
        places = torch.arange(together.tokens, device=device)
        number = first.q.shape[1]
        frame = Frame(
            self.bound, together.tokens, device, len(together.there), prompt=self.prompt,
            q=torch.cat([x.q for x in shown]), k=k, v=v, positions=places, there=together.there,
            generated=first.generated, steps=number, kernels=steps.kernels,
            query_positions=places[together.tokens - number :], checks=first.checks,
        )  # fmt: skip
        evaluation = Evaluation(
            frame, steps.updates, before=together.states(), decided=together.decided(),
            generated=steps.advancing,
        )  # fmt: skip
        together.put(evaluation.advance(steps.rules))
        return True

    def _keep_together(
        self, layers: Sequence[Remembered], shown: Sequence[Given]
    ) -> Iterator[Decided]:
        """What stays at all layers, where `keep` reads neither attention nor keys and values."""
        steps, first = self.steps, shown[0]
        together = Together(layers, self.bound.shape.kv_heads)
        frame = Frame(
            self.bound, together.tokens, together.there.device, len(together.there),
            prompt=self.prompt, there=together.there, generated=first.generated,
            kernels=steps.kernels, checks=first.checks,
        )  # fmt: skip
        states = together.states()
        evaluation = Evaluation(
            frame, steps.updates, before=states, after=states if steps.advances else {},
            extra={"position": together.position}, budget=together.budget(),
            decided=together.decided(),
        )  # fmt: skip
        kept = evaluation.tensor(steps.keep, ("kv", "token")) & together.there
        together.put(evaluation.advance(steps.rules))
        for own, each, part in zip(layers, shown, together.kept(kept), strict=True):
            yield Decided(self._last(own, each) if steps.rules.merge is not None else None, part)

    def _remember(self, own: Remembered, given: Given) -> None:
        own.remember(given.q, own.positions[len(own.positions) - given.q.shape[1] :], self.window)

    def _last(self, own: Remembered, given: Given) -> Evaluation:
        """The evaluation of the last step, after its states have advanced."""
        made = self._step(own, given)
        made.after.update(own.states)
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
        if own.queries is not None and own.query_positions is not None:
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
            decided=own.decided, generated=steps.advancing,
        )  # fmt: skip


def _first(x: Keys, tokens: int) -> Keys:
    """The first tokens of keys or values."""
    if x.shape[1] == tokens:
        return x
    if isinstance(x, Entries):
        return replace(x, ids=x.ids[:, :tokens])
    return dense(x)[:, :tokens]


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

    Attributes:
        kept: int64 [L, G], how many stay, on the device.
    """

    def __init__(
        self,
        kept: Sequence[torch.Tensor],
        there: Sequence[torch.Tensor | None],
        finite: torch.Tensor,
    ) -> None:
        self._shape = (len(kept), kept[0].shape[0])
        stay: torch.Tensor = side_by_side(kept, 1, False).unflatten(0, self._shape)
        were = side_by_side(list(map(present, kept, there)), 1, False).unflatten(0, self._shape)
        self.kept = stay.sum(-1)
        counts = [Held.of(stay), were.sum(-1), self.kept, finite.long()]
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
