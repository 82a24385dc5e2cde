"""The torch program of a policy: keeps exactly what the interpreter keeps, on any device.

A bound policy is compiled once into steps of three phases. What needs only the prompt's length is
computed once per length (`Plan`); steps of a layer run when the layer's tensors are there and free
their results when nothing needs them any more; steps across layers run at the end, on tensors with
the axis `layer` in front. Between layers only what those need is held, never an attention map.

`TorchProgram.start(prompt)`, `Run.observe(layer, q, k, v)` and `Run.finish()` are the whole
interface, so that a program made of other kernels can take its place.

Dimensions: L layers, H query heads, G KV heads, N cached tokens, D head size, W window.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

import torch
from kvpolicy.dsl.bind import Bound
from kvpolicy.dsl.diagnostics import refused
from kvpolicy.dsl.ir import Node
from kvpolicy.dsl.lower import Phase, Phases
from kvpolicy.dsl.torch_ops import OPERATIONS
from kvpolicy.dsl.torch_plan import Plan, call, of_layer, operands, stacked
from kvpolicy.dsl.torch_values import Frame, Value, aligned

# Plans kept for prompt lengths seen last.
_PLANS = 8
# Bytes of float64 that one attention map may take before the KV heads are done in blocks.
_BLOCK_BYTES = 64 << 20


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

    Raises:
        PolicyError: the policy needs data that a prefill does not offer.
    """

    def __init__(self, bound: Bound, *, report: bool = False) -> None:
        self.bound = bound
        self.keep = bound.lowered.keep
        rules = bound.lowered
        # `kvpolicy run` also shows budgets and scores; a server does not compute them for that.
        self.roots = [self.keep, *(n for n in (rules.budget, rules.score) if report and n)]
        self.phases = Phases()
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
        return Run(self, prompt, self.bound.queries(prompt) if prompt else 0)

    def plan(self, prompt: int, device: torch.device) -> Plan:
        """What only the prompt's length decides."""
        key = (prompt, device)
        if key not in self._plans:
            while len(self._plans) >= _PLANS:
                self._plans.popitem(last=False)
            self._plans[key] = Plan.make(
                self.bound, self.plan_nodes, self.plan_used, prompt, device
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


@dataclass
class Run:
    """One prefill.

    Attributes:
        queries: W: `observe` wants this many last queries of each layer.
        not_finite: after `finish`: the model's tensors held NaN or infinity, so that everything
            is kept.
    """

    program: TorchProgram
    prompt: int
    queries: int
    not_finite: bool = False
    _plan: Plan | None = None
    _layers: dict[int, dict[int, Value]] = field(default_factory=dict)
    _checks: list[torch.Tensor] = field(default_factory=list)
    _end: dict[int, Value] = field(default_factory=dict)

    def observe(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Computes all that one layer decides; the tensors are not kept and not changed.

        Args:
            layer: from 0, in any order, each once.
            q: [H, W, D] the last `queries` queries, or more; after RoPE.
            k: [G, N, D] all keys of the prompt, after RoPE.
            v: [G, N, D] all values, or None unless `bound.needs_values`.
        """
        if self.prompt == 0:
            return
        if self._plan is None:
            self._plan = self.program.plan(self.prompt, k.device)
        plan, program = self._plan, self.program
        values = dict(plan.values[layer])
        frame = replace(plan.frame, layer=layer, checks=self._checks, q=q, k=k, v=v)
        self._by_head(frame, values)
        self._compute(program.layer_steps, frame, values)
        self._layers[layer] = {id(n): values[id(n)] for n in program.handed_over}

    def finish(self) -> list[torch.Tensor]:
        """What is kept, once every layer has been observed: L bool tensors [G, N]."""
        shape = self.program.bound.shape
        size = (shape.kv_heads, self.prompt)
        if self.prompt == 0:
            return [torch.zeros(size, dtype=torch.bool) for _ in range(shape.layers)]
        if self._plan is None:  # a policy that looks at no tensor
            self._plan = self.program.plan(self.prompt, torch.device("cpu"))
        frame = self._plan.frame
        if self._checks and not torch.stack(self._checks).all().item():
            self.not_finite = True
            return [torch.ones(size, dtype=torch.bool, device=frame.device)] * shape.layers
        self._at_end(frame)
        return [
            aligned(x.data, x.axes, ("kv", "token")).expand(size)
            for x in self.result(self.program.keep)
        ]

    def result(self, root: Node) -> list[Value]:
        """The value of one of the program's roots at every layer, after `finish`."""
        layers = range(self.program.bound.shape.layers)
        if id(root) in self._end:
            return [of_layer(self._end[id(root)], layer) for layer in layers]
        return [
            (self._layers.get(layer) or {}).get(id(root)) or self._plan.values[layer][id(root)]
            for layer in layers
        ]

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

    def _by_head(self, frame: Frame, values: dict[int, Value]) -> None:
        """The steps that need one KV head at a time, in blocks of heads that fit in memory."""
        program, kv = self.program, frame.kv
        if not program.head_steps:
            return
        group = program.bound.shape.group
        per_head = 8 * max(group * self.queries * self.prompt, self.prompt * frame.k.shape[-1])
        block = max(1, min(kv, _BLOCK_BYTES // per_head))
        parts: list[dict[int, Value]] = []
        for start in range(0, kv, block):
            end = min(start + block, kv)
            part = replace(
                frame,
                kv=end - start,
                kv_start=start,
                k=frame.k[start:end],
                v=None if frame.v is None else frame.v[start:end],
                q=frame.q[start * group : end * group],
            )
            own = values if block == kv else _heads(values, start, end)
            self._compute(program.head_steps, part, own)
            parts.append({id(n): own[id(n)] for n in program.joined})
        for node in program.joined:
            values[id(node)] = _concatenated([part[id(node)] for part in parts])

    @staticmethod
    def _compute(steps: list[Step], frame: Frame, values: dict[int, Value]) -> None:
        for step in steps:
            arguments = [values[name] for name in step.arguments]
            values[id(step.node)] = call(step.node, frame, arguments)
            for name in step.frees:
                del values[name]


def _heads(values: dict[int, Value], start: int, end: int) -> dict[int, Value]:
    """The values for KV heads [start, end)."""

    def cut(tensor, axes: tuple[str, ...]):
        return tensor.narrow(axes.index("kv"), start, end - start) if "kv" in axes else tensor

    return {
        name: x
        if "kv" not in x.axes
        else replace(x, data=cut(x.data, x.axes), mask=cut(x.mask, x.mask_axes))
        for name, x in values.items()
    }


def _concatenated(parts: list[Value]) -> Value:
    """Blocks of KV heads joined again."""
    first = parts[0]
    if len(parts) == 1 or "kv" not in first.axes:
        return first
    data = torch.cat([x.data for x in parts], first.axes.index("kv"))
    mask = first.mask
    if "kv" in first.mask_axes:
        mask = torch.cat([x.mask for x in parts], first.mask_axes.index("kv"))
    return replace(first, data=data, mask=mask)
