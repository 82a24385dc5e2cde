"""One request while it decodes: what stays in the cache after each step.

A `Memory` holds, for every layer, which positions are cached and by which KV head, the states of
these entries, the prefill's budget numbers and, where a policy reads them, the last queries. It
holds no keys and no values.

Dimensions: L layers, H query heads, G KV heads, M cached positions of a layer, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from kvpolicy.dsl.bind import Bound
from kvpolicy.dsl.torch_across import known_before
from kvpolicy.dsl.torch_evaluate import Evaluation
from kvpolicy.dsl.torch_merge import Merging, merged_rows
from kvpolicy.dsl.torch_steps import Steps
from kvpolicy.dsl.torch_values import Frame, Value

if TYPE_CHECKING:
    from kvpolicy.dsl.torch_run import Run


def shift_of(kept: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """How many entries after each kept one are dropped.

    Args:
        kept, there: bool [G, n], in order of position.

    Returns:
        int64 [G, n]; 0 where nothing is kept.
    """
    dropped = (there & ~kept).long()
    after = dropped.flip(-1).cumsum(-1).flip(-1)
    return after * kept


@dataclass(frozen=True)
class Held:
    """What the host knows of a layer's kept entries.

    Attributes:
        positions: M, how many positions some KV head keeps.
        alike: whether all KV heads keep the same.
    """

    positions: int
    alike: bool

    @staticmethod
    def of(kept: torch.Tensor) -> torch.Tensor:
        """int64 [..., 2], positions and alike, on the device of kept: bool [..., G, N]."""
        some = kept.any(-2)
        alike = (kept == some.unsqueeze(-2)).all(-1).all(-1)
        return torch.stack([some.sum(-1), alike.long()], -1)


@dataclass(frozen=True)
class Layout:
    """The cached entries of a layer.

    Entry j of KV head g is at the j-th position that `there[g]` holds.

    Attributes:
        positions: int64 [M], ascending: positions that some KV head holds.
        there: bool [G, M], or None where all KV heads hold all.
    """

    positions: torch.Tensor
    there: torch.Tensor | None


@dataclass(frozen=True)
class Choice:
    """What stays at a layer after a step.

    Attributes:
        kept: bool [G, M], of the layout before the step's entries left.
        k, v: float64 [G, M, D] rows after a merge; None where no row changes.
        shift: int64 [G, M]: by how many positions each kept key moves forward, for `positions:
            slots`; None otherwise.
    """

    kept: torch.Tensor
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    shift: torch.Tensor | None = None


@dataclass
class _Layer:
    """What one layer remembers.

    Attributes:
        positions, there: as of `Layout`, without the tokens that came since.
        since: positions of these.
        states, merge_states: values after the last step.
        queries: [H, n, D] last queries, at `query_positions`; None where no step reads them.
        budget: the prefill's whole numbers.
    """

    positions: torch.Tensor
    there: torch.Tensor | None
    since: list[int] = field(default_factory=list)
    states: dict[str, Value] = field(default_factory=dict)
    merge_states: dict[str, Value] = field(default_factory=dict)
    queries: torch.Tensor | None = None
    query_positions: torch.Tensor | None = None
    budget: Value | None = None

    def clone(self) -> _Layer:
        """A copy; tensors are never changed in place."""
        return replace(
            self,
            since=list(self.since),
            states=dict(self.states),
            merge_states=dict(self.merge_states),
        )

    def settle(self) -> None:
        """Takes up the tokens that came since."""
        if not self.since:
            return
        device = self.positions.device
        new = torch.tensor(self.since, dtype=torch.int64, device=device)
        self.positions = torch.cat([self.positions, new])
        if self.there is not None:
            held = self.there.new_ones(self.there.shape[0], len(self.since))
            self.there = torch.cat([self.there, held], 1)
        self.since.clear()

    def leave(self, kept: torch.Tensor, held: Held) -> None:
        """Forgets the entries that are not kept."""
        # In order, the positions that some KV head keeps; `nonzero` would wait for the device.
        some = (~kept.any(0)).to(torch.uint8).argsort(stable=True)[: held.positions]
        self.positions = self.positions[some]
        self.there = None if held.alike else kept[:, some]
        for name, x in self.states.items():
            if "token" in x.axes:
                data = x.data.index_select(x.axes.index("token"), some)
                self.states[name] = replace(x, data=data, mask=None, mask_axes=())


def _held(kept: torch.Tensor) -> Held:
    positions, alike = Held.of(kept).tolist()
    return Held(positions, bool(alike))


class Memory:
    """What a request remembers while it decodes.

    Attributes:
        generated: decode steps so far.
        not_finite: the model's tensors held NaN or infinity; from then on nothing leaves. It is
            known when entries may leave next.
    """

    def __init__(self, bound: Bound, prompt: int, layers: list[_Layer], steps: Steps) -> None:
        self.bound, self.prompt = bound, prompt
        self.generated = 0
        self.not_finite = False
        self._reported: dict[str, dict[int, Value]] = {name: {} for name in steps.report}
        self._layers = layers
        self._steps = steps
        self._leaves = False
        self._window = bound.step_queries(prompt)
        self._finite: torch.Tensor | None = None  # of the steps since entries left last

    @classmethod
    def after(cls, run: Run, held: Sequence[Held] | None = None) -> Memory:
        """The memory that a finished prefill leaves.

        Args:
            held: of every layer, if the caller knows it; else the host waits for the device.
        """
        program = run.program
        bound, steps = program.bound, program.steps
        kept = run.finish()
        budgets = run.budgets() if steps.reads_budget and not run.not_finite else None
        layers = []
        for number, own in enumerate(kept):
            places = run.there(number)
            layer = _Layer(places, None)
            layer.states = {
                name: replace(x, mask=None, mask_axes=())
                for name, x in run.states(number).items()
                if name in steps.inherited
            }
            layer.merge_states = dict(run.merge_states(number)) if steps.merge_goes_on else {}
            own = own[:, places]
            layer.leave(own, _held(own) if held is None else held[number])
            layer.budget = None if budgets is None else budgets[number]
            layer.queries = run.last_queries(number)
            if layer.queries is not None:
                layer.query_positions = places[len(places) - layer.queries.shape[1] :]
            layers.append(layer)
        memory = cls(bound, run.prompt, layers, steps)
        memory.not_finite = run.not_finite
        return memory

    def clone(self) -> Memory:
        """A copy that goes on by itself."""
        made = Memory(self.bound, self.prompt, [x.clone() for x in self._layers], self._steps)
        made.generated, made.not_finite = self.generated, self.not_finite
        made._leaves, made._finite = self._leaves, self._finite
        return made

    def layout(self, layer: int) -> Layout:
        """The entries of a layer, those of the current step included."""
        own = self._layers[layer]
        own.settle()
        return Layout(own.positions, own.there)

    def step(self, position: int, *, leaves: bool = True) -> None:
        """Begins a decode step: its token is appended in every layer.

        Args:
            position: of the token.
            leaves: False: nothing leaves at this step, even if it may.
        """
        self.generated += 1
        self._leaves = leaves and self.bound.leaves_at(self.generated, self.prompt)
        for values in self._reported.values():
            values.clear()
        for layer in self._layers:
            layer.since.append(position)

    @property
    def wants(self) -> str:
        """What `observe` needs at this step.

        `nothing`: it need not be called. `queries`: without keys and values. `entries`: with them.
        """
        if self.not_finite:
            return "nothing"
        steps = self._steps
        if steps.advancing_reads or (self._leaves and steps.leaving_reads):
            return "entries"
        return "queries" if self._leaves or steps.advances or self._window > 1 else "nothing"

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
        own = self._layers[layer]
        own.settle()
        self._remember_query(own, q)
        evaluation = self._evaluation(layer, q, k, v)
        own.states = evaluation.advance(self._steps.rules)
        if not self._leaves:
            self._note(evaluation.frame.checks)
            return None
        return self._leave(own, evaluation, self._kept(evaluation))

    def _note(self, checks: list[torch.Tensor]) -> None:
        """Adds to what is known about NaN and infinity, without waiting for the device."""
        if self._finite is not None:
            checks = [*checks, self._finite]
        if checks:
            self._finite = torch.stack(checks).all()

    def _remember_query(self, own: _Layer, q: torch.Tensor) -> None:
        number = self._window
        if number <= 1:
            return
        newest = own.positions[-1:]
        earlier = own.queries
        if earlier is not None:
            earlier = earlier[:, max(0, earlier.shape[1] - number + 1) :]
            newest = torch.cat([own.query_positions[-earlier.shape[1] :], newest])
            q = torch.cat([earlier, q.to(earlier.dtype)], 1)
        own.queries, own.query_positions = q, newest

    def _evaluation(
        self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None
    ) -> Evaluation:
        own, steps = self._layers[layer], self._steps
        if own.queries is not None:
            q = own.queries
        if own.there is not None:
            k, v = (None if x is None else x.masked_fill(~own.there[..., None], 0) for x in (k, v))
        frame = Frame(
            self.bound, len(own.positions), own.positions.device, self.bound.shape.kv_heads,
            prompt=self.prompt, layer=layer, q=q, k=k, v=v, positions=own.positions,
            there=own.there, generated=self.generated,
            kernels=steps.kernels,
            query_positions=own.query_positions if own.queries is not None else own.positions[-1:],
        )  # fmt: skip
        return Evaluation(
            frame, steps.updates, before=own.states, others=known_before, budget=own.budget
        )

    def _kept(self, evaluation: Evaluation) -> torch.Tensor:
        kept = evaluation.tensor(self._steps.rules.keep, ("kv", "token"))
        for name, node in self._steps.report.items():
            self._reported[name][evaluation.frame.layer] = evaluation.value(node)
        there = evaluation.frame.there
        return kept if there is None else kept & there

    def _leave(self, own: _Layer, evaluation: Evaluation, kept: torch.Tensor) -> Choice | None:
        frame, steps = evaluation.frame, self._steps
        there = torch.ones_like(kept) if frame.there is None else frame.there
        self._note([*frame.checks, *self._merged_checks(frame)])
        most = (there & ~kept).sum(-1).amax()  # dropped by one KV head
        finite = torch.ones_like(most) if self._finite is None else self._finite.long()
        numbers = torch.cat([Held.of(kept), torch.stack([most, finite])]).tolist()
        positions, alike, most, is_finite = numbers
        self.not_finite |= not is_finite
        if self.not_finite or not most:
            return None
        keys = values = None
        if steps.rules.merge is not None:
            merging = Merging.of(
                steps.rules.merge, evaluation, kept, steps.merge_updates, own.merge_states, most
            )
            own.merge_states = merging.states
            keys, values = merged_rows(merging, frame)
        shift = shift_of(kept, there) if self.bound.positions == "slots" else None
        own.leave(kept, Held(positions, bool(alike)))
        return Choice(kept, keys, values, shift)

    def _merged_checks(self, frame: Frame) -> list[torch.Tensor]:
        """A merge reads keys and values, whatever else does."""
        read = (frame.k, frame.v) if self._steps.rules.merge is not None else ()
        return [x.double().sum().isfinite() for x in read]

    def reported(self) -> dict[str, dict[int, Value]]:
        """Per reported let its value at the layers where this step computed it."""
        return self._reported

    def thresholds(self) -> dict[str, list[Value | None]]:
        """Per state of the merge its value at every layer, None where it has not begun."""
        merge = self._steps.rules.merge
        names = merge.states if merge is not None else {}
        return {name: [x.merge_states.get(name) for x in self._layers] for name in names}
