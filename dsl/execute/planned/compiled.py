"""What all requests of a bound policy share: what is to be computed, kernels, plans.

Dimensions: N tokens of the prompt.
"""

from __future__ import annotations

from dataclasses import replace

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.stages import exchanged
from kvpolicy.dsl.codegen.fusion import Fusion
from kvpolicy.dsl.execute.layer.generated import Generated
from kvpolicy.dsl.execute.planned.prefill import Prefill
from kvpolicy.dsl.execute.planned.steps import Steps
from kvpolicy.dsl.execute.tensors.heads import ALL, Heads
from kvpolicy.dsl.execute.tensors.kernels import Kernels, installed
from kvpolicy.dsl.ir.heads import heads_last
from kvpolicy.dsl.ir.nodes import Node

# With 32 layers of 8 KV heads: the scores of 131,072 tokens; or of 32,768 tokens all that `snapkv`
# computes, and the queries of its window.
DEFERRED_BYTES = 256 << 20


class Compiled:
    """A bound policy, ready to be evaluated; shared by all requests.

    Args:
        bound: the policy.
        report: also compute budgets, scores and reported lets, for `FinishedPrefill.result`.
        kernels: the table of `execute/tensors/kernels.py`; None: the installed one of torch.
        heads: which of the model's KV heads are here, and how the others are reached.
        layers: the model's layers that are here; None: all. `bind/stages.py` says whether a part
            can be computed apart.
        keys_stay: whether keys and values of all layers can still be read after the last one.
        deferred_bytes: most bytes of a prompt that are held until the last layer, or taken by
            scoring several layers together.

    Attributes:
        bound: the policy; where other ranks hold KV heads, with reductions across heads rewritten
            by `ir/heads.py`.
        steps: what decode steps compute; None without `decode:`.
        exchanged: numbers of each layer that stages tell each other; empty if all layers are here.
        accumulates: whether earlier chunks of a prompt may be passed to `Run.accumulate`.
        fusions: what is fused of the prefill, then of decode steps, see `Steps.fusions`.
        generated: the prefill's generated kernels; None if there are none.
        reads_lse: whether a prefill computes less if it is given the log-sum-exp of its logits.

    Raises:
        PolicyError: the policy needs data that a prefill does not offer; or as in `installed`.
    """

    def __init__(
        self,
        bound: Bound,
        *,
        report: bool = False,
        kernels: Kernels | None = None,
        heads: Heads = ALL,
        layers: range | None = None,
        keys_stay: bool = False,
        deferred_bytes: int = DEFERRED_BYTES,
    ) -> None:
        kernels = installed() if kernels is None else kernels
        if heads.divided:
            bound = replace(bound, lowered=heads_last(bound.lowered))
        self.bound, self.kernels, self.report, self.heads = bound, kernels, report, heads
        self.layers = range(bound.shape.layers) if layers is None else layers
        all_layers_here = len(self.layers) == bound.shape.layers
        self.exchanged: tuple[Node, ...] = () if all_layers_here else exchanged(bound)
        self._deferred_bytes = deferred_bytes
        self._prefill = Prefill(bound, report, heads, defers=False)
        # Where a layer chooses the tokens of deeper layers, nothing can wait for the last one.
        self._deferring = None if bound.propagates else Prefill(bound, report, heads, defers=True)
        self.accumulates = bool(self._prefill.sums)
        self.steps = None
        if bound.folded.decode is not None:
            self.steps = Steps(bound, report, kernels, heads, self.layers)
        prefill_fusion = Fusion(bound, self._prefill.everything, self._prefill.updates)
        self.fusions = (prefill_fusion, *(() if self.steps is None else self.steps.fusions))
        self.generated = Generated.of(prefill_fusion, kernels)
        self.reads_lse = self.generated is not None and self.generated.reads_lse
        self.keys_stay = keys_stay

    def prefill(self, prompt: int) -> Prefill:
        """What the prefill of a prompt of `prompt` tokens computes."""
        held_bytes = 8 * self._list_count * prompt
        if self._deferring is None or held_bytes > self._deferred_bytes:
            return self._prefill
        return self._deferring

    @property
    def _list_count(self) -> int:
        """Number of KV heads here, over all layers here."""
        return len(self.layers) * self.heads.number(self.bound.shape.kv_heads)

    def layers_together(self, prompt: int) -> int:
        """Largest number of a prompt's layers scored together, see `Run.show`; 1: none are.

        Together they take as many launches as one layer.
        """
        layers = len(self.layers)
        if not prompt or not self.keys_stay or self.prefill(prompt).alike_by is None:
            return 1
        if self.generated is None or self.generated.fusion.reasons:
            return 1
        if self.generated.fusion.reads_of_layers:
            return 1
        shape = self.bound.shape
        # Numbers of two bytes; queries in float32 take twice as much.
        query_bytes = 2 * self.bound.queries(prompt) * shape.group * shape.head_dim
        total_bytes = self._list_count * (self.generated.token_bytes * prompt + query_bytes)
        groups = max(1, -(-total_bytes // max(1, self._deferred_bytes)))
        return -(-layers // groups)
