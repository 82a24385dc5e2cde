"""One request while it decodes: what stays in the cache after each step.

A `Memory` holds, for every layer, which positions are cached and by which KV head, the states of
these entries, the prefill's budget numbers and, where a policy reads them, the last queries. It
holds no keys and no values.

Dimensions: L layers, H query heads, G KV heads, M cached positions of a layer, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.ends import Ends
from kvpolicy.dsl.execute.block import Block
from kvpolicy.dsl.execute.evaluate import Evaluation
from kvpolicy.dsl.execute.follow import (
    Decided,
    Given,
    Landed,
    Landing,
    Walk,
    afresh,
    without_absent,
)
from kvpolicy.dsl.execute.kernels import Keys
from kvpolicy.dsl.execute.layout import Choice, Held, Layout, Remembered, Rows, shift_of
from kvpolicy.dsl.execute.merge import Merging, merged_rows
from kvpolicy.dsl.execute.run import Run
from kvpolicy.dsl.execute.steps import Steps
from kvpolicy.dsl.execute.together import leave, present, shifts
from kvpolicy.dsl.execute.values import Frame, Value, sent
from kvpolicy.dsl.ir.nodes import Node

# From a layer and `there` [G, M] or None to its keys and values [G, M, D].
Read = Callable[[int, torch.Tensor | None], tuple[Keys, Keys]]


def _held(kept: torch.Tensor) -> Held:
    positions, alike = Held.of(kept).tolist()
    return Held(positions, bool(alike))


def _light(evaluation: Evaluation) -> Evaluation:
    """An evaluation to go on with when those of all layers are there: nothing large is held."""
    frame = evaluation.frame
    known = {name: x for name, x in evaluation.known.items() if not {"query", "dim"} & set(x.axes)}
    frame = replace(frame, k=afresh(frame.k), v=afresh(frame.v))
    return replace(evaluation, frame=frame, known=known)


def _rows(merging: Merging, frame: Frame) -> Rows:
    return merged_rows(merging, frame.keys, frame.values)


@dataclass
class _Decision:
    """What stays at a layer, before entries are merged.

    Attributes:
        own: what the layer remembers.
        kept, there: as of `Choice`.
        evaluation: of the step, where a merge goes on from it.
    """

    own: Remembered
    kept: torch.Tensor
    there: torch.Tensor | None
    evaluation: Evaluation | None = None


@dataclass(frozen=True)
class _Open:
    """A `follow` whose numbers have not been read."""

    decisions: list[_Decision]
    landing: Landing


class Memory:
    """What a request remembers while it decodes.

    Attributes:
        generated: decode steps so far.
        not_finite: the model's tensors held NaN or infinity; from then on nothing leaves. It is
            known when entries may leave next.
        steps: what a decode step computes.
    """

    def __init__(self, bound: Bound, prompt: int, layers: list[Remembered], steps: Steps) -> None:
        self.bound, self.prompt = bound, prompt
        self.generated = 0
        self.not_finite = False
        self._reported: dict[str, dict[int, Value]] = {name: {} for name in steps.report}
        # Layer by layer, or, where requests are taken through steps together, a part of a block.
        self._layers = layers
        self._block: tuple[Block, int] | None = None
        self.steps = steps
        self._walk = Walk(bound, steps, prompt)
        self._leaves = False
        self._finite: torch.Tensor | None = None  # of the steps so far; None: nothing was read
        self._open: _Open | None = None
        self._landed: Landed | None = None

    @classmethod
    def after(cls, run: Run, held: Sequence[Held] | None = None) -> Memory | None:
        """What decoding remembers of a finished prefill (and all `merged`); None: nothing leaves.

        Args:
            held: of every layer, if the caller knows it; else the host waits for the device.
        """
        bound, steps = run.program.bound, run.program.steps
        if steps is None:
            return None
        kept = run.finish()
        budgets = run.budgets() if steps.reads_budget and not run.not_finite else None
        decided = {} if run.not_finite else run.decided()
        layers = []
        for number, own in enumerate(kept):
            places = run.there(number)
            layer = Remembered(places, None)
            layer.states = {
                name: replace(x, mask=None, mask_axes=())
                for name, x in run.states(number).items()
                if name in steps.inherited
            }
            layer.merge_states = dict(run.merge_states(number)) if steps.merge_goes_on else {}
            own = own[:, places]
            layer.leave(own, _held(own) if held is None else held[number])
            layer.budget = None if budgets is None else budgets[number]
            layer.decided = {name: values[number] for name, values in decided.items()}
            layer.queries = run.last_queries(number)
            if layer.queries is not None:
                layer.query_positions = places[len(places) - layer.queries.shape[1] :]
            layers.append(layer)
        memory = cls(bound, run.prompt, layers, steps)
        memory.not_finite = run.not_finite
        return memory

    @property
    def layers(self) -> list[Remembered]:
        """What is remembered of each of the L layers."""
        if self._block is not None:
            self.land()
            self._divide()
        return self._layers

    def _divide(self) -> None:
        """Goes on layer by layer."""
        if self._block is not None:
            block, place = self._block
            self._layers = block.remembered(place, whole=self.not_finite)
            self._finite, self._block = block.finite_of(place), None

    def together(self, steps: int, *, leaves: bool) -> Hashable | None:
        """What is the same of requests that can be taken through so many steps together.

        None: the request goes alone, by `follow`.

        Args:
            leaves: whether entries may leave at the last step.
        """
        self.land()
        rule = self.rule
        if rule is None or self.not_finite:
            return None
        generated = self.generated + steps
        leaves = leaves and self.bound.leaves_at(generated, self.prompt)
        if not leaves and not self.steps.advances:
            return None
        same = self.steps.same(rule, self.prompt, generated)
        # Lists of a block are as wide as the longest: at most twice what a request needs.
        size = (self.width + steps).bit_length()
        return id(self.steps), steps, leaves, same, size

    @property
    def width(self) -> int:
        """Cached positions of the layer that has most; `land` has been called."""
        if self._block is None:
            return max(len(own.positions) + len(own.since) for own in self._layers)
        block, place = self._block
        if block.counts is not None:
            return max(own.positions for own in block.counts.read()[place].held)
        return max(block.lengths[place * block.layers : (place + 1) * block.layers])

    @property
    def rule(self) -> Ends | Node | None:
        """By what entries stay, if the request can be taken through steps with others."""
        return self.steps.rule(self.prompt)

    def block(self) -> tuple[Block, int]:
        """What is remembered, as a place in a block of requests."""
        return self._block or (
            Block.of(self.layers, self.bound.shape.kv_heads, self.steps.fresh),
            0,
        )

    def followed(self, block: Block, place: int, steps: int) -> None:
        """Has been taken through so many steps with others: its place in their block now."""
        self.generated += steps
        self._layers, self._open, self._landed = [], None, None
        self._block = block, place

    def clone(self) -> Memory:
        """A copy that goes on by itself."""
        self.land()
        made = Memory(self.bound, self.prompt, [x.clone() for x in self.layers], self.steps)
        made.generated, made.not_finite = self.generated, self.not_finite
        made._leaves, made._finite = self._leaves, self._finite
        return made

    def layout(self, layer: int) -> Layout:
        """The entries of a layer, those of the current step included."""
        self.land()
        if self._block is not None:
            block, place = self._block
            own = block.remembered(place)[layer]
        else:
            own = self._layers[layer]
            own.settle()
        return Layout(own.positions, own.there)

    def step(self, position: int, *, leaves: bool = True) -> None:
        """Begins a decode step: its token is appended in every layer.

        Args:
            position: of the token.
            leaves: False: nothing leaves at this step, even if it may.
        """
        self._begin(1, leaves)
        for layer in self.layers:
            layer.since.append(position)

    def _begin(self, steps: int, leaves: bool) -> None:
        """Begins decode steps; entries may leave at the last."""
        self.land()
        self._divide()
        self._landed = None
        self.generated += steps
        self._leaves = leaves and self.bound.leaves_at(self.generated, self.prompt)
        for values in self._reported.values():
            values.clear()

    @property
    def wants(self) -> str:
        """What `observe` needs at this step.

        `nothing`: it need not be called. `queries`: without keys and values. `entries`: with them.
        """
        self.land()
        if self.not_finite:
            return "nothing"
        steps = self.steps
        if steps.advancing_reads or (self._leaves and steps.leaving_reads):
            return "entries"
        return "queries" if self._leaves or steps.advances or self._walk.window > 1 else "nothing"

    def observe(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
    ) -> Choice | None:
        """What one layer decides after its attention; the tensors are not kept and not changed.

        Args:
            layer: from 0, each once per step.
            q: [H, 1, D] the step's query.
            k, v: [G, M, D], laid out as `layout`; rows that a KV head does not hold mean nothing.

        Returns:
            What stays, if entries may leave at this step and some do; else None. The layout and
            the states are then those of what stays.
        """
        if self.not_finite:
            return None
        own = self.layers[layer]
        own.settle()
        checks: list[torch.Tensor] = []
        given = self._given(layer, q, k, v, checks)
        evaluation = self._walk.through(own, given, leaves=self._leaves)
        decision = self._decision(own, Decided(evaluation), checks) if self._leaves else None
        self._note(checks)
        if decision is None:
            return None
        landed = Landing([decision.kept], [decision.there], self.finite).read()
        self.not_finite |= not landed.finite
        (dropped,) = landed.dropped
        if not dropped:
            return None
        choice = self._choice(decision, dropped)
        _ = choice.k  # made while the tensors are there
        own.leave(decision.kept, landed.held[0])
        return choice

    def follow(
        self,
        positions: Sequence[int],
        queries: Callable[[int], torch.Tensor],
        read: Read,
        *,
        leaves: bool,
    ) -> list[Choice]:
        """Takes the policy through T decode steps at once; entries may leave at the last only.

        The result is that of T times `step` and `observe`, except that nothing leaves at any layer
        if numbers of one are not finite. The host does not wait for the device, unless entries are
        merged: once, then.

        Args:
            positions: [T] of the tokens, which are all cached.
            queries: from a layer to [H, T, D], as `observe` takes them.
            read: the layer's keys and values, of the layout with all T tokens; asked for at most
                once per layer, and only where something reads them.
            leaves: whether entries may leave at the last step, if `bound.leaves_at` allows it.

        Returns:
            What stays at every layer, good if the numbers are finite: `land`. Empty if nothing may
            leave. Merged rows are made when they are asked for, of the entries as they are then:
            what `read` gave has to be there until that.
        """
        if not positions:
            return []
        self._begin(len(positions), leaves)
        wants = self.wants
        if wants == "nothing":
            for own in self.layers:
                own.since.extend(positions)
            return []
        new = sent(torch.tensor(positions, dtype=torch.int64), self.layers[0].positions.device)
        for own in self.layers:
            own.settle()
            own.extend(new)
        checks: list[torch.Tensor] = []

        def given(layer: int) -> Given:
            there = self.layers[layer].there
            k, v = read(layer, there) if wants == "entries" else (None, None)
            return self._given(layer, queries(layer), k, v, checks)

        made = self._walk.all_through(self.layers, given, leaves=self._leaves)
        decisions: list[_Decision] = []
        for decided in made:
            own = self.layers[len(decisions)]
            decisions.append(self._decision(own, decided, checks))
        self._note(checks)
        return self._choices(decisions) if decisions else []

    def _given(
        self,
        layer: int,
        q: torch.Tensor,
        k: Keys | None,
        v: Keys | None,
        checks: list[torch.Tensor],
    ) -> Given:
        there = self.layers[layer].there
        k, v = (without_absent(x, there) for x in (k, v))
        return Given(layer, self.generated, q, k, v, there, checks)

    def _decision(self, own: Remembered, decided: Decided, checks: list[torch.Tensor]) -> _Decision:
        """What stays at a layer where entries may leave."""
        kept = self._kept(decided.evaluation) if decided.kept is None else decided.kept
        decision = _Decision(own, kept, own.there)
        if self.steps.rules.merge is not None:
            # A merge reads keys and values, whatever else does.
            frame = decided.evaluation.frame
            checks.extend(x.double().sum().isfinite() for x in (frame.keys, frame.values))
            decision.evaluation = _light(decided.evaluation)
        return decision

    def _kept(self, evaluation: Evaluation) -> torch.Tensor:
        kept = evaluation.tensor(self.steps.keep, ("kv", "token"))
        for name, node in self.steps.report.items():
            self._reported[name][evaluation.frame.here] = evaluation.value(node)
        there = evaluation.frame.there
        return kept if there is None else kept & there

    def _note(self, checks: list[torch.Tensor]) -> None:
        """Adds to what is known about NaN and infinity, without waiting for the device."""
        if self._finite is not None:
            checks = [*checks, self._finite]
        if checks:
            self._finite = torch.cat([x.reshape(-1) for x in checks]).all()

    def _choices(self, decisions: list[_Decision]) -> list[Choice]:
        """What stays at every layer; it is forgotten what leaves when the numbers have landed."""
        kept, there = [x.kept for x in decisions], [x.there for x in decisions]
        self._open = _Open(decisions, Landing(kept, there, self.finite))
        if self.steps.rules.merge is None:
            return self._unmerged(decisions)
        dropped = self._open.landing.read().dropped
        return [self._choice(*each) for each in zip(decisions, dropped, strict=True)]

    def _unmerged(self, decisions: list[_Decision]) -> list[Choice]:
        moved: Sequence[torch.Tensor | None] = [None] * len(decisions)
        if self.bound.positions == "slots":
            kept = [x.kept for x in decisions]
            moved = shifts(kept, [present(x.kept, x.there) for x in decisions])
        pairs = zip(decisions, moved, strict=True)
        return [Choice(x.kept, shift=shift, there=x.there) for x, shift in pairs]

    def _choice(self, decision: _Decision, dropped: int) -> Choice:
        """What stays at a layer, merged where the KV head that drops most drops so many."""
        kept, there = decision.kept, decision.there
        shift = None
        if self.bound.positions == "slots":
            shift = shift_of(kept, present(kept, there))
        merged = self._merged(decision, dropped) if dropped else None
        return Choice(kept, shift=shift, there=there, merged=merged)

    def _merged(self, decision: _Decision, dropped: int) -> Callable[[], Rows] | None:
        """Merges a layer's entries; what makes the rows. None: the policy does not merge."""
        steps, own, evaluation = self.steps, decision.own, decision.evaluation
        merge = steps.rules.merge
        if merge is None or evaluation is None:
            return None
        frame = evaluation.frame
        merging = Merging.of(
            merge,
            replace(evaluation, frame=replace(frame, k=frame.keys, v=frame.values)),
            decision.kept,
            steps.merge_updates,
            own.merge_states,
            dropped,
        )
        own.merge_states, decision.evaluation = merging.states, None
        merging.keep_links()
        frame = replace(frame, k=afresh(frame.k), v=afresh(frame.v))
        return partial(_rows, merging, frame)

    @property
    def finite(self) -> torch.Tensor:
        """0-d bool on the device: whether the steps so far read neither NaN nor infinity."""
        if self._finite is None:
            device = self.layers[0].positions.device
            return torch.ones((), dtype=torch.bool, device=device)
        return self._finite

    def lasts(self, counts: Sequence[Sequence[int]]) -> bool:
        """As of `Lasting`, for numbers that a step kept."""
        return self.steps.lasting.lasts(self.prompt, counts)

    def stays(self, counts: torch.Tensor) -> torch.Tensor:
        """0-d bool, before `land`: whether all is finite and lists keep int [L, G] entries.

        Raises:
            TypeError: the numbers have been read.
        """
        if self._open is None:
            raise TypeError("the last follow has landed, or nothing could leave at it")
        return self.finite & (self._open.landing.kept == counts).all()

    def landed(self) -> bool:
        """Whether `land` would not wait for the device."""
        if self._block is not None:
            counts = self._block[0].counts
            return counts is None or counts.arrived()
        return self._open is None or self._open.landing.arrived()

    def land(self) -> Landed | None:
        """Forgets what leaves after the last `follow`; the host waits for the numbers.

        Returns:
            The numbers of the last `follow`; None where nothing could leave at it.
        """
        if self._block is not None and self._landed is None:
            block, place = self._block
            if block.counts is not None:
                self._landed = landed = block.counts.read()[place]
                if not landed.finite:
                    self.not_finite = True
                    self._divide()
        if self._open is not None:
            opened, self._open = self._open, None
            self._landed = landed = opened.landing.read()
            self.not_finite |= not landed.finite
            numbers = zip(opened.decisions, landed.held, landed.dropped, strict=True)
            leaving = [(x.own, x.kept, held) for x, held, dropped in numbers if dropped]
            if leaving:
                leave(*zip(*leaving, strict=True))
        return self._landed

    def numbers(self) -> Landed:
        """As `land`, of a `follow` at which entries might leave.

        Raises:
            TypeError: nothing could leave.
        """
        landed = self.land()
        if landed is None:
            raise TypeError("nothing could leave at the last follow")
        return landed

    def reported(self) -> dict[str, dict[int, Value]]:
        """Per reported let its value at the layers where this step computed it."""
        return self._reported

    def thresholds(self) -> dict[str, list[Value | None]]:
        """Per state of the merge its value at every layer, None where it has not begun."""
        merge = self.steps.rules.merge
        names = merge.states if merge is not None else {}
        return {name: [x.merge_states.get(name) for x in self.layers] for name in names}
