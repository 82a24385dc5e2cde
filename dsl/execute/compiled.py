"""What all requests of a bound policy share: what is to be computed, kernels, plans.

Dimensions: N tokens of the prompt.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.stages import exchanged
from kvpolicy.dsl.execute.generated import Generated
from kvpolicy.dsl.execute.heads import ALL, Heads
from kvpolicy.dsl.execute.kernels import Kernels, Slots, installed
from kvpolicy.dsl.execute.plan import Plan
from kvpolicy.dsl.execute.prefill import Prefill
from kvpolicy.dsl.execute.steps import Steps
from kvpolicy.dsl.ir.heads import heads_last
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ir.once import once

# Plans kept for prompt lengths seen last.
_PLANS = 8
# Of a model with 32 layers of 8 KV heads: scores of 131,072 tokens; or of 32,768, and all that
# `snapkv` computes for them and the queries of its window.
_DEFERRED_BYTES = 256 << 20


class Compiled:
    """A bound policy, ready to be evaluated; shared by all requests.

    Args:
        bound: the policy.
        report: also keep budgets and scores, for `Run.result`.
        kernels: what computes, see `execute/kernels.py`; None: torch, as installed.
        heads: which of the model's KV heads are here, and how the others are reached.
        layers: of the model that are here; None: all. A part of them can be computed as
            `bind/stages.py` says.
        keys_stay: keys and values of all layers can be read when the last one has been computed.
        deferred_bytes: that may be held of all layers until then, and what is computed of them at
            once.

    Attributes:
        bound: the policy, reductions across KV heads as `ir/heads.py` writes them where others are
            elsewhere.
        steps: what decode steps compute; None without `decode:`.
        exchanged: numbers of each layer that have to be known of all layers of the model, where
            some of these are elsewhere.
        accumulates: whether earlier chunks of a prompt may be handed over by `Run.accumulate`.
        generated: the prefill's generated kernels.
        reads_lse: whether a prefill that is given the log-sum-exp of its logits computes less.

    Raises:
        PolicyError: the policy needs data that a prefill does not offer; or as of `installed`.
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
        deferred_bytes: int = _DEFERRED_BYTES,
    ) -> None:
        kernels = installed() if kernels is None else kernels
        if heads.divided:
            bound = replace(bound, lowered=heads_last(bound.lowered))
        self.bound, self.kernels, self.report, self.heads = bound, kernels, report, heads
        self.layers = range(bound.shape.layers) if layers is None else layers
        whole = len(self.layers) == bound.shape.layers
        self.exchanged: tuple[Node, ...] = () if whole else exchanged(bound)
        self._deferred_bytes = deferred_bytes
        self._prefill = Prefill(bound, report, heads, defers=False)
        # Where a layer chooses what deeper ones compute, nothing can wait for those.
        self._deferring = None if bound.propagates else Prefill(bound, report, heads, defers=True)
        self.accumulates = self._prefill.accumulates
        self.steps = None
        if bound.folded.decode is not None:
            self.steps = Steps(bound, report, kernels, heads, self.layers)
        self.generated = Generated.of(
            bound, self._prefill.everything, kernels, self._prefill.updates
        )
        self.reads_lse = self.generated is not None and self.generated.reads_lse
        self.keys_stay = keys_stay

    def prefill(self, prompt: int) -> Prefill:
        """What the prefill of a prompt of so many tokens computes."""
        held = 8 * self._lists * prompt
        if self._deferring is None or held > self._deferred_bytes:
            return self._prefill
        return self._deferring

    @property
    def _lists(self) -> int:
        """KV heads of all layers that are here."""
        return len(self.layers) * self.heads.number(self.bound.shape.kv_heads)

    def scores_at_end(self, prompt: int) -> bool:
        """Whether a prompt's layers are scored together, after the last one; see `Run.score`.

        That takes as many launches as one layer.
        """
        if not prompt or not self.keys_stay or not self.prefill(prompt).layers_alike:
            return False
        if self.generated is None or self.generated.fusion.reasons:
            return False
        shape = self.bound.shape
        # Queries have two bytes as a rule, and four at most.
        queries = 4 * self.bound.queries(prompt) * shape.group * shape.head_dim
        held = self._lists * (self.generated.token_bytes * prompt + queries)
        return held <= self._deferred_bytes

    @once.at_most(_PLANS)
    def plan(self, prompt: int, device: torch.device) -> Plan:
        """What only the prompt's length N decides."""
        nodes = self.prefill(prompt).planned
        return Plan.make(self.bound, nodes, prompt, device, self.kernels, self.heads)

    def warm(self, keys: Slots, values: Slots, queries: torch.dtype) -> None:
        """Compiles the generated kernels before a request waits for them.

        Args:
            keys, values: rows of a pool as a server hands them over, whatever they hold; they stay
                as they are.
            queries: their type.
        """
        decode = () if self.steps is None else (self.steps.advancing, self.steps.leaving)
        for generated in (self.generated, *decode):
            if generated is not None:
                generated.warm(keys, values, queries)
