"""A bound policy compiled into steps of three phases, once for all requests.

What needs only the prompt's length is computed once per length (`Plan`); steps of a layer run when
the layer's tensors are there and free their results when nothing needs them any more; steps across
layers run at the end, on tensors with the axis `layer` in front. Between layers only what those
need is held, never an attention map.

Dimensions: L layers, H query heads, G KV heads, N cached tokens, D head size, W window.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.codegen.regions import Bundle
from kvpolicy.dsl.execute.direct import Direct
from kvpolicy.dsl.execute.generated import Generated
from kvpolicy.dsl.execute.kernels import NONE, Kernels, Slots
from kvpolicy.dsl.execute.ops import OPERATIONS
from kvpolicy.dsl.execute.plan import Plan, operands
from kvpolicy.dsl.execute.steps import Steps
from kvpolicy.dsl.execute.values import Frame
from kvpolicy.dsl.ir.lower import Phase, Phases
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.syntax.diagnostics import refused

# Plans kept for prompt lengths seen last.
_PLANS = 8


@dataclass(frozen=True)
class Step:
    """One node to compute, and the nodes whose last use it is."""

    node: Node
    arguments: tuple[int, ...]
    frees: tuple[int, ...]
    bundle: Bundle | None = None  # generated kernels that give the node, and others with it


@dataclass(frozen=True)
class LayerSteps:
    """What is computed of a layer's tensors.

    Attributes:
        heads: steps that may be computed for each KV head by itself; `joined`: their results that
            anything else reads.
        whole: the rest, on all KV heads.
    """

    heads: list[Step]
    joined: list[Node]
    whole: list[Step]


class Compiled:
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
        self.generated = Generated.of(
            bound, self.direct.everything, kernels, self.direct.updates.states
        )
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
        ends = self._ordered(by_phase[Phase.END], {}, self.roots)
        # What a layer hands over to the end: its part of `keep`, or what the end needs.
        used_at_end = {id(x) for node in ends for x in operands(node)}
        used_at_end |= {id(root) for root in self.roots}
        self.handed_over = [n for n in by_phase[Phase.LAYER] if id(n) in used_at_end]
        layer = self._ordered(by_phase[Phase.LAYER], {}, self.handed_over)
        self._plain = self._layer(layer, {})
        self._fused = None
        if self.generated is not None:
            bundles = self.generated.regions.of
            fused = self._ordered(by_phase[Phase.LAYER], bundles, self.handed_over)
            self._fused = self._layer(fused, bundles)
        self.end_steps = _steps(ends, self.roots)
        self._plans: OrderedDict[tuple[int, torch.device], Plan] = OrderedDict()

    def layer_steps(self, frame: Frame) -> LayerSteps:
        """What is computed of a layer: with generated kernels if these can serve its tensors."""
        fused = self._fused
        if fused is None:
            return self._plain
        made = self.generated
        return fused if all(made.serves(x, frame) for x in made.regions.bundles) else self._plain

    def warm(self, keys: Slots, values: Slots) -> None:
        """Compiles the generated kernels before a request waits for them.

        Args:
            keys, values: rows of a pool as a server hands them over, whatever they hold; they stay
                as they are.
        """
        decode = () if self.steps is None else (self.steps.advancing, self.steps.leaving)
        for generated in (self.generated, *decode):
            if generated is not None:
                generated.warm(keys, values)

    def _layer(self, nodes: list[Node], bundles: Mapping[int, Bundle]) -> LayerSteps:
        """The steps of a layer's nodes; of a bundle's nodes only the first is given."""
        apart = self._heads_apart(nodes, bundles)
        outside = [n for n in nodes if id(n) not in apart]
        inside = [n for n in nodes if id(n) in apart]
        needed = {id(x) for node in outside for x in _reads(node, bundles)}
        needed |= {id(x) for x in self.handed_over}
        joined = [n for n in inside if id(n) in needed]
        return LayerSteps(
            _steps(inside, joined, {}), joined, _steps(outside, self.handed_over, bundles)
        )

    def _ordered(
        self, nodes: list[Node], bundles: Mapping[int, Bundle], wanted: list[Node]
    ) -> list[Node]:
        """Those of the nodes that `wanted` needs beside bundles, and one node of each bundle."""
        own = {id(node) for node in nodes}
        ordered: list[Node] = []
        done: set[int] = set()

        def visit(node: Node) -> None:
            bundle = bundles.get(id(node))
            name = id(node) if bundle is None else id(bundle)
            if name in done or id(node) not in own:
                return
            done.add(name)
            for each in _reads(node, bundles):
                visit(each)
            ordered.append(node)

        for node in wanted:
            visit(node)
        return ordered

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

    def _heads_apart(self, nodes: list[Node], bundles: Mapping[int, Bundle]) -> set[int]:
        """Nodes of a layer that may be computed for each KV head by itself."""
        apart: set[int] = set()
        for node in nodes:
            if id(node) in bundles:
                continue
            inner = {id(x) for x in node.args if self.phases.of(x) == Phase.LAYER}
            if "kv" in node.type.axes and "kv" not in node.axes and inner <= apart:
                apart.add(id(node))
        return apart


def _reads(node: Node, bundles: Mapping[int, Bundle]) -> tuple[Node, ...]:
    """What computing a node reads: its arguments, or what its kernels read."""
    bundle = bundles.get(id(node))
    return operands(node) if bundle is None else bundle.inputs


def _steps(
    nodes: list[Node], wanted: list[Node], bundles: Mapping[int, Bundle] = MappingProxyType({})
) -> list[Step]:
    """Nodes in order, each with the nodes of the same list that it uses last."""
    made = {id(node) for node in nodes}
    made |= {id(x) for n in nodes if id(n) in bundles for x in bundles[id(n)].outputs}
    own = made - {id(node) for node in wanted}
    last: dict[int, int] = {}
    for place, node in enumerate(nodes):
        for argument in _reads(node, bundles):
            last[id(argument)] = place
    frees: dict[int, list[int]] = {}
    for name, place in last.items():
        if name in own:
            frees.setdefault(place, []).append(name)
    steps = []
    for place, node in enumerate(nodes):
        arguments = tuple(id(x) for x in _reads(node, bundles))
        freed = tuple(frees.get(place, ()))
        steps.append(Step(node, arguments, freed, bundles.get(id(node))))
    return steps
