"""One prefill: what its layers decide, one after the other or all together.

Dimensions: L layers, l layers that are here, H query heads, G KV heads, N tokens of the prompt, n
tokens of one layer, T queries, D head size, W window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

import torch
from kvpolicy.dsl.bind.kept import keep_of
from kvpolicy.dsl.execute.layer.across import Layers, PastValues, known_before, look_back
from kvpolicy.dsl.execute.layer.evaluate import Evaluation, alone, spread
from kvpolicy.dsl.execute.layer.exchange import decoded, encoded, entries_of_layers
from kvpolicy.dsl.execute.planned.compiled import Compiled
from kvpolicy.dsl.execute.planned.prefill import Prefill
from kvpolicy.dsl.execute.prefill.finished import FinishedPrefill
from kvpolicy.dsl.execute.prefill.waiting import WaitingLayers
from kvpolicy.dsl.execute.tensors.checks import FiniteChecks
from kvpolicy.dsl.execute.tensors.heads import Heads
from kvpolicy.dsl.execute.tensors.kernels import Keys, Slots
from kvpolicy.dsl.execute.tensors.values import Frame, Value, of_layer, with_layer_axis
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node, Propagate, Type, When
from kvpolicy.dsl.ir.traverse import state_roots

# Keys after RoPE and values [l * G, n, D] of l layers, or rows of a pool; None: none are needed.
KeysValues = tuple[torch.Tensor | Slots, torch.Tensor | Slots | None]


@dataclass
class Run:
    """One prefill, whose layers may have different tokens.

    Attributes:
        prompt: N.
        queries: W, number of each layer's last queries that `observe` reads.
        tokens: number of tokens of a second prefill; None in a first one, which has N.
        not_finite: whether the model's tensors held NaN or infinity, as far as the host knows.
        restarted: whether the prefill has to begin again, by `again`, on the tokens that `observe`
            returned.
        selected_layer: first layer at which `propagate.first` held; None if at none so far.
        propagated: layer that propagated -> int64 [m] positions of the tokens that went deeper.
        propagation_lets: layer -> name -> value of the reported `let`s on which propagation was
            decided there.
    """

    program: Compiled
    prompt: int
    tokens: int | None = None
    not_finite: bool = False
    restarted: bool = False
    selected_layer: int | None = None
    propagated: dict[int, torch.Tensor] = field(default_factory=dict)
    propagation_lets: dict[int, dict[str, Value]] = field(default_factory=dict)
    _finite_checks: FiniteChecks = field(default_factory=FiniteChecks)
    _joint_check: tuple[int, torch.Tensor] | None = None  # (number of checks, their joint result)
    _shared: dict[Node, Value] = field(default_factory=dict)  # see `Prefill.shared`
    _evaluations: dict[int, Evaluation] = field(default_factory=dict)
    _history: PastValues = field(default_factory=PastValues)
    # By layer: number of the earlier chunks' queries, and the states that these have added to.
    _earlier: dict[int, tuple[int, dict[str, Value]]] = field(default_factory=dict)
    _layers: Layers | None = None  # once these can be compared
    _last_queries: dict[int, torch.Tensor] = field(default_factory=dict)
    _noted: WaitingLayers | None = None  # layers that wait to be scored together
    _scored_values: dict[Node, Value] = field(default_factory=dict)

    @cached_property
    def queries(self) -> int:
        """Number of the prompt's last queries that `observe` reads."""
        return min(self.program.bound.queries(self.prompt), self.size)

    @cached_property
    def _prefill(self) -> Prefill:
        return self.program.prefill(self.prompt)

    @cached_property
    def _heads(self) -> Heads:
        return self.program.heads.joined()

    @property
    def size(self) -> int:
        """Number of tokens of this prefill: N, or `tokens` of a second one."""
        return self.prompt if self.tokens is None else self.tokens

    def show(
        self,
        layer: int,
        q: torch.Tensor,
        entries: Callable[[range], KeysValues],
        tokens: torch.Tensor | None = None,
        *,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Scores a layer, by itself or together with others that have the same tokens.

        Queries that wait for further layers are copied; they take the launches of one layer then.

        Args:
            layer, q, tokens, lse: as in `observe`.
            entries: gives keys and values of consecutive layers, the last of them this one,
                [l * G, n, D] one layer after the other, or rows of a pool; called when they are
                scored.

        Returns:
            As `observe`.

        Raises:
            RuntimeError: a layer has been left out.
        """
        number = self.size if tokens is None else len(tokens)
        if not self._is_noted(layer, number):
            return self.observe(layer, q, *entries(range(layer, layer + 1)), tokens, lse=lse)
        first_query = q.shape[1] - min(self.queries, number)
        self._note(layer, q[:, first_query:], number, None if lse is None else lse[:, first_query:])
        if due := self._due:
            self._score(*entries(due), tokens)
        return None

    def observe(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | Slots,
        v: torch.Tensor | Slots | None,
        tokens: torch.Tensor | None = None,
        *,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Computes all that one layer decides; the tensors are neither kept nor changed.

        Args:
            layer: from 0, each once; in order, where layers read those before them.
            q: [H, T, D] queries after RoPE of the last T of its tokens, at least min(`queries`, n).
            k: [G, n, D] keys after RoPE of the tokens that reached the layer, or rows of a pool.
            v: [G, n, D] values likewise; may be None unless `bound.needs_values`.
            tokens: int64 [n], ascending: positions of the tokens that reached the layer; None: all.
            lse: float32 [H, T], the natural logarithm of each query's sum of exp(q k / sqrt(D))
                over the tokens that it sees, as attention has found it. Only kernels read it,
                which compute it if it is None.

        Returns:
            int64 [m], ascending: places among the n tokens of those that deeper layers compute;
            None: all. With `restarted`, those that the second prefill computes, perhaps all.
        """
        frame = self._frame(layer, k.device, k.shape[1], tokens, _vectors(q, k, v, lse))
        queries, states = self._earlier.pop(layer, (0, {}))
        if queries:
            frame = replace(frame, last=frame.tokens - queries)
        evaluation = replace(self._evaluation(frame), before=states)
        deeper = self._propagate(evaluation)
        if not self._scores_later():
            self._finish_layer(evaluation)
            self._remember_queries([layer], q[None])
        return deeper

    # Layers that are scored together.

    @cached_property
    def together(self) -> int:
        """Most layers that are scored together; 1: each by itself."""
        return 1 if self._earlier else self.program.layers_together(self.prompt)

    def _is_noted(self, layer: int, tokens: int) -> bool:
        """Whether a layer which `tokens` tokens reach waits, to be scored with others."""
        if self.together == 1 or not self._hands_all_on(layer, tokens):
            return False
        return self._noted is not None or self._goes_with(layer + 1, layer, tokens)

    @property
    def _due(self) -> range:
        """Layers that have been noted and are to be scored now; empty if others come first."""
        if self._noted is None:
            return range(0)
        layers, tokens = self._noted.layers, self._noted.tokens
        full = len(layers) == self._noted.most
        waits = not full and self._goes_with(layers.stop, layers.start, tokens)
        return range(0) if waits else layers

    def _note(self, layer: int, q: torch.Tensor, tokens: int, lse: torch.Tensor | None) -> None:
        """Copies a layer's queries [H, T, D] and log-sum-exp [H, T] for `_score`.

        If one of the layers has no log-sum-exp, kernels compute that of all.
        """
        if self._noted is None:
            most = min(self.together, self.program.layers.stop - layer)
            self._noted = WaitingLayers(range(layer, layer), tokens, most, {})
        if layer != self._noted.layers.stop:
            raise RuntimeError(f"layer {self._noted.layers.stop} comes before {layer}")
        self._noted.add(q, lse)

    def _score(
        self,
        k: torch.Tensor | Slots,
        v: torch.Tensor | Slots | None,
        positions: torch.Tensor | None,
    ) -> None:
        """Computes all that the noted layers decide; arguments as `show` has them."""
        waiting, self._noted = self._noted, None
        if waiting is None:
            raise RuntimeError("no layer has been noted")
        layers, (q, lse) = waiting.layers, waiting.of_all_heads()
        base = self._frame(layers.start, k.device, k.shape[1], positions, _vectors(q, k, v, lse))
        joint = self._evaluation(replace(base, kv=k.shape[0], layered=True))
        kv = k.shape[0] // len(layers)

        def by_layer(x: Value, type_: Type) -> Value:
            return with_layer_axis(x, kv, alike="kv" not in type_.axes)

        values = {
            node: by_layer(joint.value(node), node.type) for node in self._prefill.layer_roots
        }
        states = {
            name: by_layer(joint.state(name), state.type)
            for name, state in self.program.bound.lowered.prefill.states.items()
        }
        if layers == self.program.layers:
            self._scored_values = values
        for index, layer in enumerate(layers):
            frame = self._frame(layer, k.device, k.shape[1], positions, {})
            self._evaluations[layer] = replace(
                self._evaluation(frame), unheld_nodes=frozenset(), across_layers=alone,
                known={node: of_layer(x, index) for node, x in values.items()},
                after={name: of_layer(x, index) for name, x in states.items()},
            )  # fmt: skip
        self._remember_queries(layers, waiting.queries)

    def _hands_all_on(self, layer: int, tokens: int) -> bool:
        """Whether the host knows that a layer hands all its tokens on, and is scored."""
        propagate, bound = self._tested(), self.program.bound
        if propagate is None:
            return True
        if (
            self._scores_later()
            or self._prefill.read_before_scoring
            or self._prefill.propagation_lets
        ):
            return False
        if bound.static.needs(propagate.moment) is None:
            return False
        return not bound.number(propagate.moment, self.prompt, layer, length=tokens)

    def _goes_with(self, layer: int, first: int, tokens: int) -> bool:
        """Whether a layer, if it exists, can be scored together with one before it."""
        if layer not in self.program.layers or not self._hands_all_on(layer, tokens):
            return False
        bound, alike_by = self.program.bound, self._prefill.alike_by or ()
        return all(
            bound.number(node, self.prompt, layer, length=tokens)
            == bound.number(node, self.prompt, first, length=tokens)
            for node in alike_by
        )

    @property
    def needs_ranks(self) -> bool:
        """Whether ranks exchange anything, or have to decide alike, while layers are observed."""
        return self.program.heads.divided and self._prefill.needs_ranks

    def accumulate(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | Slots,
        v: torch.Tensor | Slots | None = None,
        *,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Adds an earlier chunk's queries to the states, where `program.accumulates`.

        Args:
            layer: from 0; a layer's chunks in order, before its `observe`.
            q: [H, T, D] the chunk's queries; k, v: [G, n, D] of all n tokens up to its end,
                or rows of a pool.
            lse: as in `observe`.

        Raises:
            RuntimeError: the policy has nothing to accumulate.
        """
        if not self.program.accumulates:
            raise RuntimeError(f"`{self.program.bound.program.name}` has nothing to accumulate")
        queries, states = self._earlier.get(layer, (0, {}))
        frame = self._frame(layer, k.device, k.shape[1], None, _vectors(q, k, v, lse))
        frame = replace(frame, last=q.shape[1])
        # What is shared per token is for the whole prompt.
        chunk = replace(self._evaluation(frame), before=states, shared_nodes=frozenset())
        self._earlier[layer] = queries + q.shape[1], chunk.states_of(self._prefill.sums)

    def again(self, prompt: int) -> Run:
        """The second prefill, over the `prompt` chosen tokens, at positions 0, 1, ...

        Raises:
            RuntimeError: the policy does not restart.
        """
        if not self.program.bound.restarts:
            raise RuntimeError(f"`{self.program.bound.program.name}` does not restart")
        return Run(self.program, self.prompt, prompt)

    def _frame(
        self,
        layer: int,
        device: torch.device,
        tokens: int,
        positions: torch.Tensor | None,
        vectors: Mapping[str, Keys],
    ) -> Frame:
        program, all_tokens = self.program, tokens in (self.prompt, self.size)
        return Frame(
            program.bound, tokens, device, program.heads.number(program.bound.shape.kv_heads),
            self.prompt, layer=layer, vectors=vectors, positions=None if all_tokens else positions,
            kernels=program.kernels, finite_checks=self._finite_checks, heads=self._heads,
        )  # fmt: skip

    def _evaluation(self, frame: Frame) -> Evaluation:
        prefill = self._prefill
        return Evaluation(
            frame, prefill.updates, unheld_nodes=prefill.unheld_nodes,
            across_layers=self._of_layers_so_far, generated=self.program.generated,
            shared_nodes=prefill.shared, shared=self._shared,
        )  # fmt: skip

    def _of_layers_so_far(self, node: Node, evaluation: Evaluation) -> Value:
        """The value of a node over layers done so far, or over `layer` without data."""
        if node.when <= When.PROMPT:
            return known_before(node, evaluation)
        return look_back(node, evaluation, self._history)

    # Propagation.

    def _tested(self) -> Propagate | None:
        """The rules by which a layer may propagate; None if there are none, or they have acted."""
        propagate = self.program.bound.lowered.propagate
        if propagate is None or self.tokens is not None or self.not_finite or self.prompt == 0:
            return None
        acted = propagate.first is not None and self.selected_layer is not None
        return None if acted else propagate

    def _scores_later(self) -> bool:
        """Whether this pass is not scored, since a second one is known to come."""
        bound = self.program.bound
        if not bound.restarts or self.tokens is not None or self.not_finite or not self.prompt:
            return False
        layer = bound.propagation_layer(self.prompt)
        return self.restarted or (layer is not None and layer < bound.shape.layers)

    def _propagate(self, evaluation: Evaluation) -> torch.Tensor | None:
        """int64 [m], places of a layer's tokens that go deeper; None: all."""
        prefill, frame = self._prefill, evaluation.frame
        propagate = self._tested()
        if propagate is None:
            return None
        lets = prefill.propagation_lets
        self.propagation_lets[frame.layer] = {name: evaluation.value(x) for name, x in lets.items()}
        chosen = None
        if evaluation.holds(propagate.moment):
            # One exchange with other ranks for what goes deeper and for what stays.
            evaluation.ask(
                [propagate.tokens, *([] if self.program.bound.restarts else self._computed_here)]
            )
            chosen = evaluation.tensor(propagate.tokens, ("token",))
        for node, numbers in prefill.read_before_scoring.items():
            self._history.record(node, evaluation, _layers_read_later(numbers, evaluation))
        if chosen is None:
            return None
        number = self._number_chosen(chosen)
        if number is None:
            return None
        # An empty selection drops nothing.
        places = (~chosen).to(torch.uint8).argsort(stable=True)
        deeper = places[:number] if number else torch.arange(frame.tokens, device=frame.device)
        if propagate.first is not None:
            self.selected_layer = frame.layer
        self.propagated[frame.layer] = frame.places[deeper]
        # A restart happens even with all tokens: layers so far may have been left unscored.
        self.restarted = self.program.bound.restarts
        return deeper if self.restarted or len(deeper) < frame.tokens else None

    def _number_chosen(self, chosen: torch.Tensor) -> int | None:
        """Number of chosen tokens; None if tensors are not finite, so that all go deeper.

        The host waits for the device, once.
        """
        finite = self.finite
        if finite is None:
            return int(chosen.sum())
        number, is_finite = torch.stack([chosen.sum(), finite.long()]).tolist()
        self.not_finite |= not is_finite
        return number if is_finite else None

    # What a layer keeps for later.

    @property
    def _computed_here(self) -> list[Node]:
        """Nodes that each layer computes while its tensors are at hand."""
        states = state_roots(self._prefill.updates)
        return [*self._prefill.layer_roots, *states]

    def _finish_layer(self, evaluation: Evaluation) -> None:
        """Computes what needs the layer's tensors, and releases them."""
        prefill, frame = self._prefill, evaluation.frame
        evaluation.ask(self._computed_here)
        known = {node: evaluation.value(node) for node in prefill.layer_roots}
        evaluation.states_of(self.program.bound.lowered.prefill.states)
        for node, numbers in prefill.read_later.items():
            self._history.record(node, evaluation, _layers_read_later(numbers, evaluation))
        frame.vectors = {}  # the frame is this layer's alone
        self._evaluations[frame.layer] = replace(
            evaluation, known=known, unheld_nodes=frozenset(), across_layers=alone
        )

    def layer_numbers(self) -> torch.Tensor:
        """int64 [l, S, 3], numbers of the layers that are here for the other stages.

        Only where numbers are `exchanged`, once all of these layers have been observed.
        """
        return encoded(self.program.exchanged, self._evaluations_here())

    def take_layer_numbers(self, numbers: torch.Tensor) -> None:
        """Takes the `layer_numbers` of all layers of the model, before `finish`.

        Args:
            numbers: int64 [L, S, 3], S numbers of each layer in parts, see exchange.py.
        """
        evaluations = self._evaluations_here()
        known = decoded(self.program.exchanged, numbers, evaluations[0])
        self._layers = self._side_by_side(evaluations, known)

    def entries_kept(self) -> list[int]:
        """[L] entries that each list of a layer keeps, of all layers of the model.

        To be called after `take_layer_numbers`.

        Raises:
            TypeError: all layers of the model are here.
        """
        if self.not_finite:
            return [self.prompt] * self.program.bound.shape.layers
        model = None if self._layers is None else self._layers.model
        if model is None:
            raise TypeError(f"all layers of `{self.program.bound.program.name}` are here")
        return entries_of_layers(self.program.bound, self.prompt, model)

    def finish(self, *, wait: bool = True) -> FinishedPrefill:
        """Chooses what each layer that is here keeps; once all were observed.

        Args:
            wait: whether the host waits for the device to say if the model's tensors were finite.
                If not, the caller tells the result what its `finite` held before it goes on.

        Raises:
            RuntimeError: numbers are `exchanged`, and `take_layer_numbers` has not been called.
        """
        self._history.values.clear()
        evaluations = self._evaluations_here()
        layers = self._compared(evaluations)
        rules = self.program.bound.lowered.prefill
        keep = keep_of(rules)
        layers.ask([keep, *rules.decided.values()])
        if wait and self.finite is not None:
            self.not_finite |= not self.finite.item()
        if self.not_finite:
            kept = [
                torch.ones(x.frame.kv, x.frame.tokens, dtype=torch.bool, device=x.frame.device)
                for x in evaluations
            ]
        else:
            pairs = zip(layers.of_each(keep), evaluations, strict=True)
            kept = [spread(value, ("kv", "token"), evaluation.frame) for value, evaluation in pairs]
        finite = self.finite
        keep_all = None if wait or finite is None else ~finite
        kept = self._placed([x.frame.positions for x in evaluations], kept, keep_all)
        return FinishedPrefill(
            self.program, self.prompt, kept, finite, self.not_finite, layers, self._last_queries,
        )  # fmt: skip

    @property
    def finite(self) -> torch.Tensor | None:
        """0-d bool: whether the model's tensors were finite; None: none were read.

        Ranks that hold other KV heads are asked for theirs.
        """
        number, total = len(self._finite_checks.results), self.program.bound.shape.kv_heads
        if number and (self._joint_check is None or self._joint_check[0] != number):
            heads = self._heads
            per_head = self._finite_checks.everywhere(heads, heads.number(total), total)
            if per_head is not None:
                self._joint_check = number, per_head.all()
        return None if self._joint_check is None else self._joint_check[1]

    def settle(self, *, finite: bool) -> None:
        """Takes the value that `finite` held on all stages, before `entries_kept`."""
        self.not_finite |= not finite

    def _evaluations_here(self) -> list[Evaluation]:
        """The evaluation of each layer that is here, once all have been observed."""
        device = next((x.frame.device for x in self._evaluations.values()), torch.device("cpu"))
        for layer in self.program.layers:
            if layer not in self._evaluations:  # the policy reads no tensor
                frame = self._frame(layer, device, self.size, None, {})
                self._evaluations[layer] = self._evaluation(frame)
        return [self._evaluations[layer] for layer in self.program.layers]

    def _compared(self, evaluations: list[Evaluation]) -> Layers:
        """The layers side by side, of which other stages have told theirs if they need to."""
        if self._layers is not None:
            return self._layers
        if self.program.exchanged:
            raise RuntimeError("nothing has been heard of other stages' layers")
        layers = self.program.bound.shape.layers
        other_stages = len(evaluations) < layers
        return self._side_by_side(evaluations, [{} for _ in range(layers)] if other_stages else [])

    def _side_by_side(
        self, evaluations: list[Evaluation], known: list[dict[Node, Value]]
    ) -> Layers:
        """The layers side by side, so that nodes may look across them.

        Args:
            known: [L] numbers of each layer by node, if other stages have layers; else empty.
        """
        prefill, model = self._prefill, None
        if known:
            frame = replace(evaluations[0].frame, vectors={})
            model_layers = [
                replace(self._evaluation(replace(frame, layer=layer)), known=dict(numbers))
                for layer, numbers in enumerate(known)
            ]
            later = prefill.later - {*self.program.exchanged}
            model = Layers(model_layers, self.size, later, prefill.unheld_nodes)
        layers = Layers(evaluations, self.size, prefill.later, prefill.unheld_nodes, model)
        layers.known.update(self._scored_values)
        return layers

    def _placed(
        self,
        positions: list[torch.Tensor | None],
        kept: list[torch.Tensor],
        keep_all: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """bool [G, N] by layer, from what is kept of its own tokens.

        Layers with the same tokens take as many operations as one.

        Args:
            positions: of each layer's tokens; None: all.
            kept: bool [G, n] by layer.
            keep_all: 0-d, whether all of them are kept instead; None: they are not.
        """
        result: list[torch.Tensor] = []
        pairs = zip(positions, kept, strict=True)
        for _, layers in groupby(pairs, key=lambda pair: id(pair[0])):
            (tokens, *_), layer_kept = zip(*layers, strict=True)
            if keep_all is None and tokens is None:
                result.extend(layer_kept)
                continue
            stacked = torch.stack(layer_kept)
            if keep_all is not None:
                stacked |= keep_all
            if tokens is not None:
                placed = stacked.new_zeros(*stacked.shape[:2], self.size)
                placed[:, :, tokens] = stacked
                stacked = placed
            result.extend(stacked.unbind())
        return result

    def _remember_queries(self, layers: Sequence[int], q: torch.Tensor) -> None:
        """Copies those of [*, H, T, D] queries of some layers that decode steps may read."""
        bound = self.program.bound
        number = 0 if bound.folded.decode is None else bound.step_queries(self.prompt) - 1
        if number > 0:
            self._last_queries.update(zip(layers, q[:, :, -number:].clone(), strict=True))


def _vectors(
    q: torch.Tensor,
    k: torch.Tensor | Slots,
    v: torch.Tensor | Slots | None,
    lse: torch.Tensor | None,
) -> dict[str, Keys]:
    """The tensors that are not None by name, as in `Frame`."""
    vectors = {"query": q, "key": k, "value": v, "lse": lse}
    return {name: x for name, x in vectors.items() if x is not None}


def _layers_read_later(numbers: list[Node] | None, evaluation: Evaluation) -> int | None:
    """How many layers, this one included, are read later; None: any."""
    if numbers is None:
        return None
    layers = evaluation.frame.bound.shape.layers
    return max(counts.whole(evaluation.number(node), layers) for node in numbers)
