"""Binding a checked policy to a model and to parameter values.

Everything that can be wrong with an override is refused here, with one message that names the
parameter, the value and what is accepted. Nothing here imports torch or numpy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from kvpolicy.dsl.bounds import Bounds
from kvpolicy.dsl.counts import whole
from kvpolicy.dsl.diagnostics import PolicyError, refused
from kvpolicy.dsl.exact import Value, evaluator
from kvpolicy.dsl.fit import does_not_fit
from kvpolicy.dsl.ir import ModelShape, Node, Program, Rules, When
from kvpolicy.dsl.lower import Phase, Phases, Static, fold, lower
from kvpolicy.dsl.parameters import environment, parameter_values
from kvpolicy.dsl.print_ir import print_program
from kvpolicy.dsl.source import Source
from kvpolicy.dsl.verify import verify

# Prompt lengths whose numbers are remembered; a server asks for one several times in a row.
_PROMPTS = 4
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
    params: Mapping[str, Value]
    rules: Rules
    lowered: Rules
    static: Static
    _numbers: dict[int, list[Callable[[Node], Value]]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def number(self, node: Node, prompt: int, layer: int = 0) -> Value:
        """Value of a static scalar at a layer, for a prompt of `prompt` tokens."""
        if prompt not in self._numbers:
            while len(self._numbers) >= _PROMPTS:
                self._numbers.pop(next(iter(self._numbers)))
            environments = (
                environment(self.shape, self.params, prompt, each)
                for each in range(self.shape.layers)
            )
            self._numbers[prompt] = [evaluator(each) for each in environments]
        return self._numbers[prompt][layer](node)

    def nodes(self) -> Iterator[Node]:
        """Every node that score, budget and keep of `rules` need, once."""
        return _nodes(self.rules)

    def queries(self, prompt: int) -> int:
        """How many of the last queries of a layer any `attn`, `logits` or `distance` reads (W)."""
        return self._queries(prompt)

    @cached_property
    def _queries(self) -> Callable[[int], int]:
        windows = [node for node in self.nodes() if node.op in _ATTENTION]
        layers = range(self.shape.layers)

        @lru_cache(maxsize=4096)
        def most(prompt: int) -> int:
            counts = (self.window(node, prompt, layer) for node in windows for layer in layers)
            return max(counts, default=0)

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
    verify(program)
    _check_shape(shape)
    params = parameter_values(program, shape, overrides or {})
    too_much = does_not_fit(program, None, environment(shape, params))
    if too_much:
        raise PolicyError(too_much, Source(program.name, ""))
    # Only the prefill decides here; `load` refuses to serve what decides elsewhere.
    rules = fold(program.prefill, environment(shape, params))
    if rules.keep is None:
        rules = replace(rules, keep=Node("all", when=When.PROMPT))
    return Bound(program, shape, params, rules, lower(rules), Static())


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
