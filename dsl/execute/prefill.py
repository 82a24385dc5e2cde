"""One prefill evaluated layer by layer: propagation, states, merges.

Dimensions: L layers, H query heads, G KV heads, N tokens of the prompt, n tokens of one layer,
D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from kvpolicy.dsl.execute.across import History, Layers, known_before, look_back
from kvpolicy.dsl.execute.evaluate import Evaluation
from kvpolicy.dsl.execute.kernels import Slots
from kvpolicy.dsl.execute.merge import Merging
from kvpolicy.dsl.execute.run import Run
from kvpolicy.dsl.execute.values import Frame, Value
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node, When


@dataclass
class DirectRun(Run):
    """A prefill whose layers may have different tokens.

    Attributes:
        selected_layer: where `propagate.first` held; None: nowhere (yet).
        propagated: per layer that acted, int64 [m] positions of the tokens that went deeper.
        tested: per layer where the propagation was tested, reported lets that decided, by name.
    """

    selected_layer: int | None = None
    propagated: dict[int, torch.Tensor] = field(default_factory=dict)
    tested: dict[int, dict[str, Value]] = field(default_factory=dict)
    _second: bool = False
    _evaluations: dict[int, Evaluation] = field(default_factory=dict)
    _history: History = field(default_factory=History)
    _sums: dict[int, _Sums] = field(default_factory=dict)
    _merge_states: dict[int, dict[str, Value]] = field(default_factory=dict)

    def observe(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | Slots,
        v: torch.Tensor | Slots | None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """As `Run.observe`; layers come in order."""
        frame = self._frame(layer, k.device, k.shape[1], tokens)
        evaluation = self._evaluation(replace(frame, q=q, k=k, v=v))
        if layer in self._sums:
            self._sums.pop(layer).finish(evaluation)
        deeper = self._propagate(evaluation)
        if not self._scores_later():
            self._hand_over(evaluation)
            self._remember_queries(layer, q)
        return deeper

    def accumulate(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | Slots,
        v: torch.Tensor | Slots | None = None,
    ) -> None:
        """As `Run.accumulate`."""
        if not self.program.accumulates:
            super().accumulate(layer, q, k, v)
        sums = self._sums.setdefault(layer, _Sums(self.program.direct.sums))
        frame = self._frame(layer, k.device, k.shape[1], None)
        sums.add(self._evaluation(replace(frame, q=q, k=k, v=v)), q.shape[1])

    def again(self, prompt: int) -> Run:
        """As `Run.again`."""
        if not self.program.bound.restarts:
            return super().again(prompt)
        queries = min(self.program.bound.queries(self.prompt), prompt)
        return DirectRun(self.program, self.prompt, queries, tokens=prompt, _second=True)

    def _frame(
        self, layer: int, device: torch.device, tokens: int, positions: torch.Tensor | None
    ) -> Frame:
        bound = self.program.bound
        if tokens == self.size:
            positions = None
        return Frame(
            bound, tokens, device, bound.shape.kv_heads, prompt=self.prompt, layer=layer,
            positions=positions, checks=self._checks, kernels=self.program.kernels,
        )  # fmt: skip

    def _evaluation(self, frame: Frame) -> Evaluation:
        return Evaluation(
            frame, self.program.direct.updates, others=self._others,
            generated=self.program.generated,
        )  # fmt: skip

    def _others(self, node: Node, evaluation: Evaluation) -> Value:
        """A node that looks at layers done so far, or at none's data."""
        if node.when <= When.PROMPT:
            return known_before(node, evaluation)
        return look_back(node, evaluation, self._history)

    # Propagation.

    def _may_propagate(self) -> bool:
        propagate = self.program.bound.propagate_lowered
        if propagate is None or self._second or self.not_finite or self.prompt == 0:
            return False
        return propagate.first is None or self.selected_layer is None

    def _scores_later(self) -> bool:
        """Whether only a second pass is scored: it is known that one comes."""
        bound = self.program.bound
        if not bound.restarts or self._second or self.not_finite:
            return False
        layer = bound.propagation_layer(self.prompt)
        return self.restarted or (layer is not None and layer < bound.shape.layers)

    def _propagate(self, evaluation: Evaluation) -> torch.Tensor | None:
        """Which of a layer's tokens go deeper; None: all."""
        direct, frame = self.program.direct, evaluation.frame
        if not self._may_propagate():
            return None
        propagate = self.program.bound.propagate_lowered
        self.tested[frame.layer] = {n: evaluation.value(x) for n, x in direct.tested.items()}
        chosen = None
        if evaluation.holds(propagate.first or propagate.every):
            chosen = evaluation.tensor(propagate.tokens, ("token",))
        for x, numbers in direct.early_looks:
            self._history.record(x, evaluation, _layers(numbers, evaluation))
        if chosen is None:
            return None
        number = self._number(chosen)
        if number is None:
            return None
        # An empty selection drops nothing.
        places = (~chosen).to(torch.uint8).argsort(stable=True)
        chosen = places[:number] if number else torch.arange(frame.tokens, device=frame.device)
        if propagate.first is not None:
            self.selected_layer = frame.layer
        self.propagated[frame.layer] = frame.places[chosen]
        # A restart happens even with all tokens: layers so far may have been left unscored.
        self.restarted = self.program.bound.restarts
        return chosen if self.restarted or len(chosen) < frame.tokens else None

    def _number(self, chosen: torch.Tensor) -> int | None:
        """How many tokens are chosen; None where tensors are not finite, so that nothing leaves.

        The host waits for the device, once.
        """
        finite = self.finite
        if finite is None:
            return int(chosen.sum())
        number, is_finite = torch.stack([chosen.sum(), finite.long()]).tolist()
        self.not_finite |= not is_finite
        return number if is_finite else None

    # What a layer keeps for later.

    def _hand_over(self, evaluation: Evaluation) -> None:
        """Computes what needs the layer's tensors, and lets go of these."""
        direct, frame = self.program.direct, evaluation.frame
        kept = {id(node): evaluation.value(node) for node in direct.handed}
        evaluation.advance(self.program.bound.lowered)
        for x, numbers in direct.looks:
            self._history.record(x, evaluation, _layers(numbers, evaluation))
        frame = replace(frame, q=None, k=None, v=None)
        self._evaluations[frame.layer] = replace(evaluation, frame=frame, known=kept)

    def _finish(self, wait: bool) -> list[torch.Tensor]:
        bound = self.program.bound
        self._history.values.clear()
        device = next((x.frame.device for x in self._evaluations.values()), torch.device("cpu"))
        for layer in range(bound.shape.layers):
            if layer not in self._evaluations:  # a policy that looks at no tensor
                frame = self._frame(layer, device, self.size, None)
                self._evaluations[layer] = self._evaluation(frame)
        evaluations = [self._evaluations[layer] for layer in range(bound.shape.layers)]
        finite = self._is_finite() if wait else not self.not_finite
        later = None if wait else self.finite
        Layers(evaluations, self.size)
        kept = []
        for each in evaluations:
            own = torch.ones(each.frame.kv, each.frame.tokens, dtype=torch.bool, device=device)
            if finite:
                own = each.tensor(self.program.keep, ("kv", "token"))
            if later is not None:
                own = own | ~later
            kept.append(self._placed(each.frame, own))
        return kept

    def _placed(self, frame: Frame, own: torch.Tensor) -> torch.Tensor:
        """Values of a layer's tokens at the prompt's positions, 0 elsewhere."""
        if frame.positions is None:
            return own
        placed = own.new_zeros(own.shape[0], self.size, *own.shape[2:])
        placed[:, frame.positions] = own
        return placed

    def result(self, root: Node) -> list[Value]:
        """As `Run.result`, at each layer's own tokens."""
        layers = range(self.program.bound.shape.layers)
        return [self._evaluations[layer].value(root) for layer in layers]

    # After `finish`.

    def frame(self, layer: int) -> Frame:
        """As `Run.frame`."""
        return self._evaluations[layer].frame

    def there(self, layer: int) -> torch.Tensor:
        """As `Run.there`."""
        return self._evaluations[layer].frame.places

    def merged(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, most: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Run.merged`."""
        rules = self.program.bound.lowered
        if rules.merge is None or self.not_finite:
            return super().merged(layer, k, v)
        evaluation, kept = self._evaluations[layer], self._kept[layer]
        places, own = evaluation.frame.positions, replace(evaluation.frame, k=k, v=v)
        if places is not None:
            kept = kept[:, places]
            own = replace(own, k=k[:, places], v=v[:, places])
        if most is None:
            most = int((~kept).sum(-1).max())
        if not most:
            return super().merged(layer, k, v)
        updates = self.program.direct.merge_updates
        evaluation = replace(evaluation, frame=own)
        merging = Merging.of(rules.merge, evaluation, kept, updates, {}, most)
        self._merge_states[layer] = merging.states
        made = []
        for name, whole, rows in (("key", k, own.k), ("value", v, own.v)):
            if name not in rules.merge.apply:
                made.append(whole.double())
            elif places is None:
                made.append(merging.rows(rows))
            else:
                made.append(whole.double().index_copy(1, places, merging.rows(rows)))
        return made[0], made[1]

    def states(self, layer: int) -> dict[str, Value]:
        """As `Run.states`."""
        return self._evaluations[layer].after

    def merge_states(self, layer: int) -> dict[str, Value]:
        """As `Run.merge_states`."""
        return self._merge_states.get(layer, {})


def _layers(numbers: list[Node] | None, evaluation: Evaluation) -> int | None:
    """How many layers, this one included, are read later; None: any."""
    if numbers is None:
        return None
    layers = evaluation.frame.bound.shape.layers
    return max(counts.whole(evaluation.number(each), layers) for each in numbers)


class _Sums:
    """Additive states of a layer over the chunks of a prompt done so far."""

    def __init__(self, totals: dict[str, Node]) -> None:
        self.totals = totals
        self.queries = 0
        self.values: dict[str, Value] = {}

    def add(self, evaluation: Evaluation, queries: int) -> None:
        """Adds the reductions over the last `queries` queries of those so far."""
        part = replace(evaluation, frame=replace(evaluation.frame, last=queries), known={})
        for name, total in self.totals.items():
            x = part.value(total)
            self.values[name] = _added(self.values.get(name), x)
        self.queries += queries

    def finish(self, evaluation: Evaluation) -> None:
        """Adds the rest of the prompt; the evaluation finds the whole sums."""
        self.add(evaluation, evaluation.frame.tokens - self.queries)
        for name, total in self.totals.items():
            evaluation.known[id(total)] = self.values[name]


def _added(a: Value | None, b: Value) -> Value:
    """A sum per token over fewer tokens added to one over more."""
    if a is None:
        return b
    data = b.data.clone()
    if "token" in a.axes:
        at = a.axes.index("token")
        data.narrow(at, 0, a.data.shape[at]).add_(a.data)
    else:
        data += a.data
    return replace(b, data=data)
