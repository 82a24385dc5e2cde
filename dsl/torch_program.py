"""The torch program of a policy: keeps exactly what the interpreter keeps, on any device.

A bound policy is compiled once into steps of three phases. What needs only the prompt's length is
computed once per length (`Plan`); steps of a layer run when the layer's tensors are there and free
their results when nothing needs them any more; steps across layers run at the end, on tensors with
the axis `layer` in front. Between layers only what those need is held, never an attention map.

`TorchProgram.start(prompt)`, `Run.observe(layer, q, k, v)` and `Run.finish()` are the interface of
a prefill, so that a program made of other kernels can take its place; what follows a prefill
(`torch_decode.Memory`, merged rows) comes from the finished run. Policies that propagate, remember
or merge are evaluated layer by layer instead, without a plan (`torch_prefill.py`).

Dimensions: L layers, H query heads, G KV heads, N cached tokens, D head size, W window.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from kvpolicy.dsl.bind import Bound
from kvpolicy.dsl.diagnostics import refused
from kvpolicy.dsl.ir import Node
from kvpolicy.dsl.lower import Phase, Phases
from kvpolicy.dsl.torch_direct import Direct
from kvpolicy.dsl.torch_kernels import NONE, Kernels
from kvpolicy.dsl.torch_ops import OPERATIONS
from kvpolicy.dsl.torch_plan import Plan, operands
from kvpolicy.dsl.torch_prefill import DirectRun
from kvpolicy.dsl.torch_run import Run
from kvpolicy.dsl.torch_steps import Steps

# Plans kept for prompt lengths seen last.
_PLANS = 8


@dataclass(frozen=True)
class Step:
    """One node to compute, and the nodes whose last use it is."""

    node: Node
    arguments: tuple[int, ...]
    frees: tuple[int, ...]


class TorchProgram:
    """A bound policy as steps; shared by all requests.

    Args:
        bound: the policy.
        report: also keep budgets and scores, for `Run.result`.
        kernels: that take the place of torch operations, see `torch_kernels`.

    Raises:
        PolicyError: the policy needs data that a prefill does not offer.
    """

    def __init__(self, bound: Bound, *, report: bool = False, kernels: Kernels = NONE) -> None:
        self.bound = bound
        self.kernels = kernels
        self.report = report
        self.keep = bound.lowered.keep
        self.direct = Direct(bound, report)
        self.steps = None if bound.decode is None else Steps(bound, report, kernels)
        self.roots = self.direct.roots
        self.phases = Phases(bound.propagates)
        self.head_steps: list[Step] = []
        if not self.direct.needed:
            self._compile()

    @property
    def accumulates(self) -> bool:
        """Whether earlier chunks of a prompt may be handed over by `Run.accumulate`."""
        return self.direct.accumulates

    def _compile(self) -> None:
        """Divides the work into what a prompt's length decides, layers, and the end."""
        bound = self.bound
        seen: set[int] = set()
        nodes = [node for root in self.roots for node in root.walk(seen)]
        by_phase = {phase: [] for phase in Phase}
        for node in nodes:
            by_phase[self.phases.of(node)].append(node)
        self._check(nodes)
        # Of static scalars only those that others use: their parts are evaluated exactly with them.
        used = {id(x) for n in nodes if bound.static.needs(n) is None for x in operands(n)}
        self.plan_nodes = [
            n
            for n in by_phase[Phase.PLAN]
            if id(n) in used or bound.static.needs(n) is None or n in self.roots
        ]
        self.plan_used = {
            id(x) for n in by_phase[Phase.LAYER] + by_phase[Phase.END] for x in operands(n)
        } | {id(root) for root in self.roots}
        ends = by_phase[Phase.END]
        # What a layer hands over to the end: its part of `keep`, or what the end needs.
        used_at_end = {id(x) for node in ends for x in operands(node)}
        used_at_end |= {id(root) for root in self.roots}
        self.handed_over = [n for n in by_phase[Phase.LAYER] if id(n) in used_at_end]
        self.by_head = self._heads_apart(by_phase[Phase.LAYER])
        outside = [n for n in by_phase[Phase.LAYER] if id(n) not in self.by_head]
        inside = [n for n in by_phase[Phase.LAYER] if id(n) in self.by_head]
        needed = {id(x) for node in outside for x in operands(node)} | {
            id(x) for x in self.handed_over
        }
        self.joined = [n for n in inside if id(n) in needed]
        self.head_steps = _steps(inside, self.joined)
        self.layer_steps = _steps(outside, self.handed_over)
        self.end_steps = _steps(ends, self.roots)
        self._plans: OrderedDict[tuple[int, torch.device], Plan] = OrderedDict()

    def start(self, prompt: int) -> Run:
        """Begins a prefill of `prompt` tokens."""
        # Decoding may begin from nothing: states and budgets are then those of no tokens.
        direct = self.direct.needed or (prompt == 0 and self.steps is not None)
        kind = DirectRun if direct else Run
        return kind(self, prompt, self.bound.queries(prompt) if prompt else 0)

    def plan(self, prompt: int, device: torch.device) -> Plan:
        """What only the prompt's length decides."""
        key = (prompt, device)
        if key not in self._plans:
            while len(self._plans) >= _PLANS:
                self._plans.popitem(last=False)
            self._plans[key] = Plan.make(
                self.bound, self.plan_nodes, self.plan_used, prompt, device, self.kernels
            )
        self._plans.move_to_end(key)
        return self._plans[key]

    def _check(self, nodes: list[Node]) -> None:
        for node in nodes:
            if node.op not in OPERATIONS and self.bound.static.needs(node) is None:
                raise refused(
                    self.bound.program.name,
                    "phase",
                    f"`{node.op}` is not available at the end of a layer's prefill",
                )

    def _heads_apart(self, nodes: list[Node]) -> set[int]:
        """Nodes of a layer that may be computed for each KV head by itself."""
        apart: set[int] = set()
        for node in nodes:
            inner = {id(x) for x in node.args if self.phases.of(x) == Phase.LAYER}
            if "kv" in node.type.axes and "kv" not in node.axes and inner <= apart:
                apart.add(id(node))
        return apart


def _steps(nodes: list[Node], wanted: list[Node]) -> list[Step]:
    """Nodes in order, each with the nodes of the same list that it uses last."""
    own = {id(node) for node in nodes} - {id(node) for node in wanted}
    last: dict[int, int] = {}
    for place, node in enumerate(nodes):
        for argument in operands(node):
            last[id(argument)] = place
    frees: dict[int, list[int]] = {}
    for name, place in last.items():
        if name in own:
            frees.setdefault(place, []).append(name)
    return [
        Step(node, tuple(id(x) for x in operands(node)), tuple(frees.get(place, ())))
        for place, node in enumerate(nodes)
    ]
