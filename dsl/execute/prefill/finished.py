"""A finished prefill: what its layers keep, store and remember.

Dimensions: l layers that are here, H query heads, G KV heads, N tokens of the prompt, n tokens of
one layer, T queries, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from kvpolicy.dsl.execute.layer.across import Layers
from kvpolicy.dsl.execute.layer.choice import shift_of
from kvpolicy.dsl.execute.layer.evaluate import Evaluation
from kvpolicy.dsl.execute.layer.merge import Merging
from kvpolicy.dsl.execute.layer.share import Pair, Shared, shared
from kvpolicy.dsl.execute.planned.compiled import Compiled
from kvpolicy.dsl.execute.tensors.kernels import Keys
from kvpolicy.dsl.execute.tensors.values import Value
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ir.once import once


@dataclass
class FinishedPrefill:
    """A prefill whose layers have all been observed, and have chosen what they keep.

    Attributes:
        prompt: N.
        kept: [l], kept tokens of each layer that is here, bool [G, N]. A token that did not reach a
            layer is not kept there.
        finite: 0-d bool, whether the model's tensors were finite; None: none were read.
        not_finite: whether the model's tensors held NaN or infinity, so that everything is kept;
            final after `settle`, if the host has not waited for `finite`.
    """

    program: Compiled
    prompt: int
    kept: list[torch.Tensor]
    finite: torch.Tensor | None
    not_finite: bool
    _layers: Layers
    _last_queries: Mapping[int, torch.Tensor]
    _merging: dict[int, Merging | None] = field(default_factory=dict)
    _merge_states: dict[int, dict[str, Value]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of tokens of this prefill: N, or those of a second one."""
        return self._layers.frame.tokens

    def settle(self, *, finite: bool) -> None:
        """Takes the value that `finite` held, if the host has not waited for it."""
        self.not_finite |= not finite

    # What was chosen.

    def result(self, root: Node) -> list[Value]:
        """The value of a node of `Prefill.roots` at every layer, on its tokens."""
        return self._layers.of_each(root)

    def budgets(self) -> list[Value]:
        """The floored budget at every layer, one number or one per KV head.

        Raises:
            TypeError: the policy has no budget.
        """
        bound, root = self.program.bound, self.program.bound.lowered.prefill.budget
        if root is None:
            raise TypeError(f"`{bound.program.name}` has no budget")
        return self.result(root)

    def decided(self) -> dict[str, list[Value]]:
        """Values of the prefill's `let`s that decode reads, by name and layer."""
        return {
            name: self.result(node)
            for name, node in self.program.bound.lowered.prefill.decided.items()
        }

    @once
    def columns(self) -> torch.Tensor:
        """bool [l, N]: positions that some KV head keeps at each layer.

        Ranks are asked if decode steps compare entries of their KV heads.
        """
        columns, steps = torch.stack(self.kept).any(1), self.program.steps
        if steps is None or not steps.columns_of_all_ranks:
            return columns
        return self._layers.frame.heads.per_rank(columns).any(0)

    def reached(self, layer: int) -> torch.Tensor:
        """int64 [n]: positions of the tokens that reached a layer."""
        return self._evaluation(layer).frame.places

    def shift(self, layer: int) -> torch.Tensor | None:
        """int64 [G, N], how far each kept key moves forward; None unless `positions: slots`."""
        if self.program.bound.positions != "slots" or self.prompt == 0:
            return None
        kept = self.kept[self._place(layer)]
        # Tokens that did not reach the layer take no slot there either.
        return shift_of(kept, torch.ones_like(kept))

    def states(self, layer: int) -> dict[str, Value]:
        """States of a layer's tokens after the prefill."""
        return self._evaluation(layer).after

    def last_queries(self, layer: int) -> torch.Tensor | None:
        """[H, T, D], the prompt's last queries, which decode steps read; None if they read none."""
        return self._last_queries.get(layer)

    # Keys and values of what was chosen.

    @property
    def merges_need_ranks(self) -> bool:
        """Whether merges need other ranks, so that `begin_merge` of all layers comes first."""
        return self.program.heads.divided and self.program.prefill(self.prompt).merges_need_ranks

    def begin_merge(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, most: int | None = None
    ) -> None:
        """Asks other ranks for what `merged` needs, so that one exchange serves all layers.

        Args:
            layer, k, v, most: as in `merged`.
        """
        merging = self._begun_merge(layer, self._layer_rows(layer, k, v), most)
        self._merging[layer] = None if merging is None else merging.waiting()

    def merged(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, most: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Float64 keys and values [G, N, D] after the merge, or unchanged if nothing is merged.

        Args:
            layer: from 0, each once.
            k, v: [G, N, D] of all tokens; rows of tokens that did not reach the layer mean nothing.
            most: upper bound of the entries that a KV head drops; None: the host waits for the
                device to count them.
        """
        vectors = self._layer_rows(layer, k, v)
        if layer in self._merging:
            merging = self._merging.pop(layer)
        else:
            merging = self._begun_merge(layer, vectors, most)
        if merging is None:
            return k.double(), v.double()
        merging.finished(vectors)
        self._merge_states[layer] = merging.states
        rows, places = [], self._evaluation(layer).frame.positions
        for name, all_rows in (("key", k), ("value", v)):
            if name not in merging.merge.apply:
                rows.append(all_rows.double())
            elif places is None:
                rows.append(merging.rows(vectors[name]))
            else:
                rows.append(all_rows.double().index_copy(1, places, merging.rows(vectors[name])))
        return rows[0], rows[1]

    def _layer_rows(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        """Keys and values [G, n, D] of the tokens that reached a layer."""
        places = self._evaluation(layer).frame.positions
        if places is not None:
            k, v = k[:, places], v[:, places]
        return {"key": k, "value": v}

    def _begun_merge(
        self, layer: int, vectors: Mapping[str, Keys], most: int | None
    ) -> Merging | None:
        """A layer's merge; None where nothing is merged."""
        merge = self.program.bound.lowered.prefill.merge
        if merge is None or self.not_finite:
            return None
        evaluation, kept = self._evaluation(layer), self.kept[self._place(layer)]
        if evaluation.frame.positions is not None:
            kept = kept[:, evaluation.frame.positions]
        if most is None:
            most = int(self.program.heads.per_rank((~kept).sum(-1).max()).max())
        if not most:
            return None
        frame = replace(evaluation.frame, vectors=dict(vectors))
        updates = self.program.prefill(self.prompt).merge_updates
        return Merging.begun(merge, replace(evaluation, frame=frame), kept, updates, {}, most)

    def shared(self, layer: int, below: Pair, own: Pair) -> dict[str, Shared]:
        """What a layer and the one below store together, see `share.shared`; empty: nothing."""
        program = self.program
        return shared(program.bound, self.prompt, layer, below, own, program.kernels, program.heads)

    def _place(self, layer: int) -> int:
        return layer - self.program.layers.start

    def _evaluation(self, layer: int) -> Evaluation:
        return self._layers.evaluations[self._place(layer)]

    def merge_states(self, layer: int) -> dict[str, Value]:
        """States of a layer's merge; empty if it has not merged."""
        return self._merge_states.get(layer, {})
