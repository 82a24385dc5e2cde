"""One prefill: what all runs share, and the run of a planned program.

Dimensions: L layers, H query heads, G KV heads, N cached tokens, D head size, W window.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from kvpolicy.dsl.execute.blocks import block_bytes, concatenated, cut_heads
from kvpolicy.dsl.execute.compiled import Compiled, LayerSteps, Step
from kvpolicy.dsl.execute.kernels import Slots
from kvpolicy.dsl.execute.layout import shift_of
from kvpolicy.dsl.execute.plan import Plan, call, stacked
from kvpolicy.dsl.execute.share import Shared, shared
from kvpolicy.dsl.execute.values import Frame, Value, aligned, of_layer, snapped
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.lower import Phase
from kvpolicy.dsl.ir.nodes import Node


def _floored(x: Value) -> Value:
    """Whole numbers; a number of the host stays one, so that no step waits for the device."""
    if isinstance(x.data, torch.Tensor):
        return Value(snapped(x.data.double()).floor(), x.axes, finite=x.finite)
    return Value(float(counts.floored(x.data)))


@dataclass
class Run:
    """One prefill.

    Attributes:
        prompt: N.
        queries: W: `observe` wants this many last queries of each layer.
        tokens: of a second prefill, how many tokens it has; None: N.
        not_finite: after `finish`: the model's tensors held NaN or infinity, so that everything
            is kept.
        restarted: the prefill is to begin again on the tokens that `observe` returned: `again`.
    """

    program: Compiled
    prompt: int
    queries: int
    tokens: int | None = None
    not_finite: bool = False
    restarted: bool = False
    _checks: list[torch.Tensor] = field(default_factory=list)
    _plan: Plan | None = None
    _layers: dict[int, dict[int, Value]] = field(default_factory=dict)
    _end: dict[int, Value] = field(default_factory=dict)
    _kept: list[torch.Tensor] = field(default_factory=list)
    _tails: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Tokens of this prefill: N, or those of a second one."""
        return self.prompt if self.tokens is None else self.tokens

    def observe(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | Slots,
        v: torch.Tensor | Slots | None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Computes all that one layer decides; the tensors are not kept and not changed.

        Args:
            layer: from 0, each once; in order, where layers read those before them.
            q: [H, T, D] the last `queries` queries of the tokens there, or more; after RoPE.
            k: [G, n, D] keys of the tokens there, after RoPE, or where the pool has them.
            v: [G, n, D] values, the same, or None unless `bound.needs_values`.
            tokens: int64 [n], ascending: positions of the tokens there; None: all N.

        Returns:
            int64 [m], ascending: which of the n tokens deeper layers compute; None: all of them.
            With `restarted`: of which tokens the second prefill consists, maybe all.
        """
        if self.prompt == 0:
            return None
        if self._plan is None:
            self._plan = self.program.plan(self.prompt, k.device)
        plan, program = self._plan, self.program
        values = dict(plan.values[layer])
        frame = replace(plan.frame, layer=layer, checks=self._checks, q=q, k=k, v=v)
        steps = program.layer_steps(frame)
        self._by_head(steps, frame, values)
        self._compute(steps.whole, frame, values)
        self._layers[layer] = {id(n): values[id(n)] for n in program.handed_over}
        self._remember_queries(layer, q)
        return None

    def accumulate(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | Slots,
        v: torch.Tensor | Slots | None = None,
    ) -> None:
        """Takes an earlier chunk's queries, where `program.accumulates`.

        Args:
            layer: from 0; a layer's chunks in order, before its `observe`.
            q: [H, T, D] the chunk's queries; k, v: [G, n, D] of all n tokens up to its end,
                or where the pool has them.
        """
        raise RuntimeError(f"`{self.program.bound.program.name}` has nothing to accumulate")

    def again(self, prompt: int) -> Run:
        """The second prefill, over the chosen tokens, as many as `prompt`, at 0, 1, ..."""
        raise RuntimeError(f"`{self.program.bound.program.name}` does not restart")

    def finish(self, *, wait: bool = True) -> list[torch.Tensor]:
        """What is kept, once every layer has been observed: L bool tensors [G, N].

        A token that did not reach a layer is not kept there.

        Args:
            wait: until the device says whether the model's tensors were finite. Else the caller
                reads `finite` and tells it by `settle` before anything that follows a prefill.
        """
        if not self._kept:
            self._kept = self._finish(wait)
        return list(self._kept)

    @property
    def finite(self) -> torch.Tensor | None:
        """0-d bool: whether the model's tensors were finite; None: nothing looked at them."""
        return torch.stack(self._checks).all() if self._checks else None

    def settle(self, *, finite: bool) -> None:
        """Takes what `finite` held, after `finish` without waiting."""
        self.not_finite |= not finite

    def _finish(self, wait: bool) -> list[torch.Tensor]:
        shape = self.program.bound.shape
        size = (shape.kv_heads, self.prompt)
        if self.prompt == 0:
            return [torch.zeros(size, dtype=torch.bool) for _ in range(shape.layers)]
        if self._plan is None:  # a policy that looks at no tensor
            self._plan = self.program.plan(self.prompt, torch.device("cpu"))
        frame = self._plan.frame
        if wait and not self._is_finite():
            return [torch.ones(size, dtype=torch.bool, device=frame.device)] * shape.layers
        self._at_end(frame)
        finite = self.finite
        kept = [
            aligned(x.data, x.axes, ("kv", "token")).expand(size)
            for x in self.result(self.program.keep)
        ]
        return kept if wait or finite is None else [own | ~finite for own in kept]

    def _is_finite(self) -> bool:
        finite = self.finite
        if finite is not None and not finite.item():
            self.not_finite = True
        return not self.not_finite

    def result(self, root: Node) -> list[Value]:
        """The value of one of the program's roots at every layer, after `finish`."""
        layers = range(self.program.bound.shape.layers)
        if id(root) in self._end:
            return [of_layer(self._end[id(root)], layer) for layer in layers]
        return [
            (self._layers.get(layer) or {}).get(id(root)) or self._plan.values[layer][id(root)]
            for layer in layers
        ]

    def budgets(self) -> list[Value]:
        """The budget's whole numbers at every layer, after `finish`: one, or one per KV head."""
        bound, root = self.program.bound, self.program.bound.lowered.budget
        static = bound.static.needs(root) is not None
        made = []
        for layer, x in enumerate(self.result(root)):
            if static:
                length = self.frame(layer).tokens
                x = Value(bound.number(root, self.prompt, layer, length=length))
            made.append(_floored(x))
        return made

    def decided(self) -> dict[str, list[Value]]:
        """What decode reads of the prefill's lets, by name and layer, after `finish`."""
        return {
            name: self.result(node) for name, node in self.program.bound.lowered.decided.items()
        }

    # After `finish`.

    def there(self, layer: int) -> torch.Tensor:
        """int64 [n]: positions of the tokens that reached a layer."""
        return torch.arange(self.size, device=self._kept[layer].device)

    def frame(self, layer: int) -> Frame:
        """Where a layer's values live."""
        return self._plan.frame

    def shift(self, layer: int) -> torch.Tensor | None:
        """int64 [G, N]: by how many positions each kept key moves, for `positions: slots`."""
        if self.program.bound.positions != "slots" or self.prompt == 0:
            return None
        kept = self._kept[layer]
        # Tokens that did not reach the layer take no slot there either.
        return shift_of(kept, torch.ones_like(kept))

    def merged(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, most: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values after the merge, where `bound.rules.merge`; all others in float64.

        Args:
            layer: from 0, each once.
            k, v: [G, N, D] of all tokens; rows of tokens that are not there mean nothing.
            most: how many entries the KV head drops that drops most; None: the host waits for the
                device.
        """
        return k.double(), v.double()

    def shared(
        self,
        layer: int,
        below_k: torch.Tensor,
        below_v: torch.Tensor,
        own_k: torch.Tensor,
        own_v: torch.Tensor,
    ) -> Shared | None:
        """What this layer and the one below store together; None where each has its own."""
        below, own = (below_k, below_v), (own_k, own_v)
        kernels = self.program.kernels
        return shared(self.program.bound, self.prompt, layer, below, own, kernels)

    def states(self, layer: int) -> dict[str, Value]:
        """States of a layer's tokens after the prefill."""
        return {}

    def merge_states(self, layer: int) -> dict[str, Value]:
        """States of a layer's merge, as far as there are any yet."""
        return {}

    def last_queries(self, layer: int) -> torch.Tensor | None:
        """[H, n, D] queries of the prompt's end that decode steps may read."""
        return self._tails.get(layer)

    def _remember_queries(self, layer: int, q: torch.Tensor) -> None:
        if self.program.bound.decode is not None:
            number = self.program.bound.step_queries(self.prompt) - 1
            if number > 0:
                self._tails[layer] = q[:, -number:].clone()

    # The plan.

    def _at_end(self, frame: Frame) -> None:
        """The steps that look across layers."""
        if not self.program.end_steps:
            return
        values = dict(self._plan.at_end)
        for node in self.program.handed_over:
            own = [self._layers[layer][id(node)] for layer in range(frame.bound.shape.layers)]
            values[id(node)] = stacked(own, frame.device)
        handed = {id(node) for node in self.program.handed_over}
        if not handed & {id(root) for root in self.program.roots}:
            self._layers.clear()
        self._compute(self.program.end_steps, frame, values)
        self._end = {
            id(root): values[id(root)]
            for root in self.program.roots
            if self.program.phases.of(root) == Phase.END
        }

    def _by_head(self, steps: LayerSteps, frame: Frame, values: dict[int, Value]) -> None:
        """The steps that need one KV head at a time, in blocks of heads that fit in memory."""
        kv, shape = frame.kv, self.program.bound.shape
        if not steps.heads:
            return
        group = shape.group
        per_head = 8 * max(group * self.queries * self.prompt, self.prompt * shape.head_dim)
        block = max(1, min(kv, block_bytes(frame.device) // per_head))
        parts: list[dict[int, Value]] = []
        for start in range(0, kv, block):
            end = min(start + block, kv)
            part = replace(
                frame,
                kv=end - start,
                kv_start=start,
                k=frame.keys[start:end],
                v=None if frame.v is None else frame.values[start:end],
                q=frame.q[start * group : end * group],
            )
            own = values if block == kv else cut_heads(values, start, end - start)
            self._compute(steps.heads, part, own)
            parts.append({id(n): own[id(n)] for n in steps.joined})
        for node in steps.joined:
            values[id(node)] = concatenated([part[id(node)] for part in parts])

    def _compute(self, steps: list[Step], frame: Frame, values: dict[int, Value]) -> None:
        for step in steps:
            if step.bundle is not None:
                made = self.program.generated.values(
                    step.bundle, frame, lambda node: values[id(node)]
                )
                values.update(made)
            else:
                arguments = [values[name] for name in step.arguments]
                values[id(step.node)] = call(step.node, frame, arguments)
            for name in step.frees:
                del values[name]
