"""Binding a checked policy to a model and to parameter values.

Everything that can be wrong with an override is refused here, with one message that names the
parameter, the value and what is accepted. Nothing here imports torch or numpy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from kvpolicy.dsl.bounds import Bounds
from kvpolicy.dsl.counts import whole
from kvpolicy.dsl.diagnostics import refused
from kvpolicy.dsl.exact import evaluate
from kvpolicy.dsl.ir import ModelShape, Node, Program, Rules, When
from kvpolicy.dsl.lower import Env, Phase, Phases, Static, fold, lower
from kvpolicy.dsl.parameters import environment, parameter_values
from kvpolicy.dsl.print_ir import print_program

_ATTENTION = ("attn", "logits", "distance")


@dataclass(frozen=True)
class Bound:
    """A policy with a model and parameter values: what an execution runs.

    Attributes:
        program: the checked policy.
        shape: sizes of the model.
        params: value of every parameter, defaults included.
        rules: prefill rules with everything folded that parameters and sizes decide.
        lowered: the same without `then` and unsized `top` (see `lower.py`).
        static: which nodes of `rules` and `lowered` are known before the prefill.
    """

    program: Program
    shape: ModelShape
    params: Mapping[str, Fraction | bool | float]
    rules: Rules
    lowered: Rules
    static: Static

    def env(self, prompt: int | None = None, layer: int | None = None) -> Env:
        """What `exact.evaluate` needs to evaluate a static node."""
        return environment(self.shape, self.params, prompt, layer)

    def number(self, node: Node, prompt: int, layer: int = 0) -> Fraction | bool | float:
        """Value of a static scalar at a layer, for a prompt of `prompt` tokens."""
        return evaluate(node, self.env(prompt, layer))

    def nodes(self) -> Iterator[Node]:
        """Every node that score, budget and keep of `rules` need, once."""
        return _nodes(self.rules)

    def queries(self, prompt: int) -> int:
        """How many of the last queries of a layer any `attn`, `logits` or `distance` reads (W)."""
        most = 0
        for node in self.nodes():
            if node.op in _ATTENTION:
                most = max(most, *(self.window(node, prompt, i) for i in range(self.shape.layers)))
        return most

    def window(self, node: Node, prompt: int, layer: int) -> int:
        """Number of last queries of one `attn`, `logits` or `distance` at a layer."""
        if not node.args or self.static.needs(node.args[0]) is None:
            return prompt
        return whole(self.number(node.args[0], prompt, layer), prompt)

    def max_entries(self, prompt: int) -> int:
        """Upper bound on the entries kept for a prompt, summed over layers and KV heads.

        Exact where budgets are known before the prefill; a proven bound where they depend on data
        (normalised shares, `split`, competition between heads); else everything.
        """
        return Bounds(self, prompt).kept()

    @cached_property
    def needs_values(self) -> bool:
        """Whether the rules read the tensor `value`."""
        return any(node.op == "value" for node in self.nodes())

    @cached_property
    def crosses_layers(self) -> bool:
        """Whether what is kept is known only after the last layer."""
        phases = Phases()
        return phases.of(self.lowered.keep) == Phase.END

    @cached_property
    def digest(self) -> str:
        """64 hex digits that name the meaning: the printed program and the parameter values."""
        values = "".join(f"{name} = {self.params[name]}\n" for name in sorted(self.params))
        return hashlib.sha256((print_program(self.program) + values).encode()).hexdigest()


def bind(program: Program, shape: ModelShape, overrides: Mapping[str, str] | None = None) -> Bound:
    """Binds a policy to a model.

    Args:
        program: from `check.load`.
        shape: sizes of the model.
        overrides: parameter name to value as text: `12`, `0.25`, `1e-3`, `true`, `false`.

    Raises:
        PolicyError: unknown parameter, value not accepted, `require` false, or `keep` takes more
            than the budget holds.
    """
    _check_shape(shape)
    params = parameter_values(program, shape, overrides or {})
    # Only the prefill decides here; `load` refuses to serve what decides elsewhere.
    rules = fold(program.prefill, environment(shape, params))
    if rules.keep is None:
        rules = replace(rules, keep=Node("all", when=When.PROMPT))
    bound = Bound(program, shape, params, rules, lower(rules), Static())
    _check_fits(bound)
    return bound


def _nodes(rules: Rules) -> Iterator[Node]:
    seen: set[int] = set()
    for root in (rules.keep, rules.budget, rules.score):
        if root is not None:
            yield from root.walk(seen)


def _check_shape(shape: ModelShape) -> None:
    sizes = (shape.layers, shape.heads, shape.kv_heads, shape.head_dim)
    if min(sizes) < 1 or shape.heads % shape.kv_heads:
        raise refused(
            "model",
            "range",
            f"{shape.layers} layers, {shape.heads} heads, {shape.kv_heads} KV heads, head size "
            f"{shape.head_dim}: all are at least 1 and the KV heads divide the heads",
        )


def _check_fits(bound: Bound) -> None:
    """Refuses sized terms of `keep` that exceed a budget known at load."""
    budget = bound.rules.budget
    if budget is None or not _known_at_load(bound, budget):
        return
    for node in bound.rules.keep.walk():
        if node.op != "then" or len(node.args[-1].args) != 1 or node.args[-1].op != "top":
            continue
        counts = [a.args[1] for a in node.args[:-1] if a.op == "top" and "kv" not in a.axes]
        counts = [count for count in counts if _known_at_load(bound, count)]
        for layer in range(bound.shape.layers):
            taken = sum(whole(bound.number(count, 0, layer), 2**62) for count in counts)
            allowed = whole(bound.number(budget, 0, layer), 2**62)
            if taken > allowed:
                raise refused(
                    bound.program.name,
                    "does-not-fit",
                    f"`keep` always takes {taken} entries per KV head at layer {layer}, but the "
                    f"budget there is {allowed}",
                    "raise the budget, or lower the counts of `recent`, `sinks` and `top`",
                )


def _known_at_load(bound: Bound, node: Node) -> bool:
    needs = bound.static.needs(node)
    return needs is not None and "prompt" not in needs
