"""Binding a checked policy to a model and to parameter values.

Everything that can be wrong with an override is refused here, with one message that names the
parameter, the value and what is accepted. Nothing here imports torch or numpy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial

from kvpolicy.dsl.bind.parameters import environment, parameter_values
from kvpolicy.dsl.bind.tensors import tensors_of
from kvpolicy.dsl.check.fit import does_not_fit
from kvpolicy.dsl.ir.counts import whole
from kvpolicy.dsl.ir.host import Evaluator, Value, evaluate, evaluator, truth
from kvpolicy.dsl.ir.lower import Env, Static, fold, lower, settled
from kvpolicy.dsl.ir.nodes import (
    HeadTable,
    ModelShape,
    Node,
    Program,
    Propagate,
    Rules,
    Type,
    When,
)
from kvpolicy.dsl.ir.once import once, once_at_most
from kvpolicy.dsl.ir.text import print_program
from kvpolicy.dsl.ir.traverse import (
    Sections,
    merge_roots,
    nodes_of,
    propagate_roots,
    rules_roots,
    state_roots,
    states_needed,
)
from kvpolicy.dsl.ir.verify import verify
from kvpolicy.dsl.syntax.diagnostics import PolicyError, refused
from kvpolicy.dsl.syntax.source import Source

# Remembered environments, each with the values of all layers: what lives longer than a few prompts
# is moved by Python to the objects of which a full collection, a long one, looks at all.
_ENVIRONMENTS = 2**4
# Remembered results per method.
_REMEMBERED = 2**12
_MOST_QUERIES = 2**31  # more than any request has


@dataclass(frozen=True)
class Bound:
    """A policy bound to a model and parameter values: what an execution runs.

    Attributes:
        program: the checked policy.
        params: value of every parameter, defaults included.
        tensors: those that come with the model (`data`), by name.
        folded: the sections, folded (see `ir/lower.py`), with only the `states` that something
            reads and the `lets` that are reported. `decode` is None if nothing leaves while
            decoding, `propagate` if nothing is propagated.
        lowered: `folded` without `then`, unsized `top` and the name `budget` (see `ir/lower.py`).
        static: which nodes are scalars that the host knows without data.
        fold_interval: entries may leave at every `fold_interval`-th decode step, unless
            `decode.when` is given.
    """

    program: Program
    shape: ModelShape
    params: Mapping[str, Value]
    tensors: Mapping[str, HeadTable]
    folded: Sections
    lowered: Sections
    static: Static
    fold_interval: int = 1

    @property
    def positions(self) -> str:
        """`original`, or `slots`: keys are rotated to their place in the cache."""
        return self.program.positions

    @property
    def prefill_changes_vectors(self) -> bool:
        """Whether keys or values may differ from the model's once a prompt is prefilled."""
        merges = self.folded.prefill.merge is not None or self.folded.share is not None
        return merges or self.positions == "slots"

    @property
    def changes_vectors(self) -> bool:
        """Whether keys or values may differ from the model's once entries left while decoding."""
        decode = self.folded.decode
        merges = decode is not None and decode.merge is not None
        return merges or self.prefill_changes_vectors

    def number(
        self,
        node: Node,
        prompt: int,
        layer: int = 0,
        *,
        length: int | None = None,
        generated: int | None = None,
    ) -> Value:
        """Value of a scalar that the host knows, at a layer.

        Args:
            node: a number or condition without axes.
            prompt: N tokens.
            layer: from 0.
            length: number of tokens that reached this layer; None: `prompt`.
            generated: number of the decode step, from 1; None in the prefill.

        Raises:
            NotStatic: data or an argument not given decide the value.
        """
        needs = self.static.needs(node)
        if needs is None:
            needs = frozenset({"prompt", "layer", "length", "generated"})
        value_of = self._evaluator(
            prompt if needs & {"prompt", "length"} else None,
            length if "length" in needs else None,
            generated if "generated" in needs else None,
        )
        return value_of(node, layer if "layer" in needs else None)

    @once_at_most(_ENVIRONMENTS)
    def _evaluator(
        self, prompt: int | None, length: int | None, generated: int | None
    ) -> Evaluator:
        """Gives values of scalars where a prompt, a layer's tokens and a step are known."""
        env = environment(self.shape, self.params, prompt, length=length, generated=generated)
        return evaluator(env)

    def nodes(self) -> Iterator[Node]:
        """Every node of the prefill's rules, states and propagation, once."""
        rules = self.folded.prefill
        roots = (rules.budget, rules.score, *rules.lets.values())
        return nodes_of([*rules_roots(rules), *roots, *propagate_roots(self.folded.propagate)])

    def decode_nodes(self) -> Iterator[Node]:
        """Every node that a decode step needs, once."""
        return nodes_of([] if self.folded.decode is None else _decode_roots(self.folded.decode))

    @once_at_most(_REMEMBERED)
    def queries(self, prompt: int) -> int:
        """Number of last queries that any layer of the prefill reads, or keeps for decode (W)."""
        counts, layers = self._windows(decoding=False), range(self.shape.layers)
        sizes = (self._window_size(count, prompt, layer) for count in counts for layer in layers)
        # The prompt's last queries are among those that the first decode steps read.
        decode_queries = min(prompt, max(0, self.step_queries(prompt) - 1))
        return max(decode_queries, max(sizes, default=0))

    @once_at_most(_REMEMBERED)
    def step_queries(self, prompt: int) -> int:
        """Number of last queries that any layer of a decode step reads, the step's own included."""
        counts, layers = self._windows(decoding=True), range(self.shape.layers)
        sizes = (self.number(count, prompt, layer) for count in counts if count for layer in layers)
        return max(
            int(None in counts), max((whole(size, _MOST_QUERIES) for size in sizes), default=0)
        )

    @once
    def _windows(self, decoding: bool) -> list[Node | None]:
        """Counts of the windows in the prefill or in a decode step; None for `all` and `new`."""
        nodes = self.decode_nodes() if decoding else self.nodes()
        windows = dict.fromkeys(node.type.window for node in nodes if node.type.window)
        return [window.count for window in windows]

    def window(self, node: Node, prompt: int, layer: int, length: int | None = None) -> int:
        """Number of last queries of one `attn`, `logits` or `distance` of the prefill at a layer.

        Args:
            node: the `attn`, `logits` or `distance`.
            prompt: N tokens.
            layer: from 0.
            length: number of tokens that reached this layer; None: `prompt`.
        """
        return self._window_size(node.args[0] if node.args else None, prompt, layer, length)

    def _window_size(
        self, count: Node | None, prompt: int, layer: int, length: int | None = None
    ) -> int:
        tokens = prompt if length is None else length
        if count is None or self.static.needs(count) is None:
            return tokens
        return whole(self.number(count, prompt, layer), tokens)

    def leaves_at(self, generated: int, prompt: int) -> bool:
        """Whether entries may leave at a decode step (from 1) after a prompt of N tokens."""
        rules = self.folded.decode
        if rules is None or rules.when is None:
            return rules is not None and generated % self.fold_interval == 0
        return bool(self.number(rules.when, prompt, generated=generated))

    def next_leaving(self, generated: int, prompt: int, most: int) -> int | None:
        """First of `most` decode steps from `generated` on at which entries may leave, or None."""
        rules, interval = self.folded.decode, self.fold_interval
        if rules is None:
            return None
        if rules.when is None:
            step = -(-generated // interval) * interval
            return step if step < generated + most else None
        # A rule that does not read the prompt shares its remembered results among prompts.
        ignores_prompt = self.static.follows(rules.when, "generated")
        return self._next_holding(rules.when, generated, 0 if ignores_prompt else prompt, most)

    @once_at_most(_REMEMBERED)
    def _next_holding(self, when: Node, generated: int, prompt: int, most: int) -> int | None:
        rule, numbers = self._rule(when, prompt)
        steps = range(generated, generated + most)
        matches = (
            step for step in steps if evaluate(rule, {**numbers, "generated": Fraction(step)})
        )
        return next(matches, None)

    @once_at_most(_REMEMBERED)
    def _rule(self, when: Node, prompt: int) -> tuple[Node, Env]:
        """`when` with values for what the prompt decides, and the environment for the rest."""
        numbers = environment(self.shape, self.params, prompt)
        return settled(when, numbers, self.static, "prompt", "length"), numbers

    @property
    def propagates(self) -> bool:
        """Whether deeper layers may see fewer tokens than the prompt has."""
        return self.folded.propagate is not None

    @property
    def restarts(self) -> bool:
        """Whether the prefill begins again on the propagated tokens."""
        propagate = self.folded.propagate
        return propagate is not None and propagate.restart is not None

    @cached_property
    def propagation_lets(self) -> tuple[str, ...]:
        """Names of the reported lets that `first` or `every` of `propagate` reads."""
        if self.folded.propagate is None:
            return ()
        read_nodes = {*self.folded.propagate.moment.walk()}
        return tuple(name for name, node in self.folded.prefill.lets.items() if node in read_nodes)

    def propagation_layer(self, prompt: int) -> int | None:
        """The layer after which fewer tokens are computed: the first at which `first` holds.

        L, the number of layers, if `first` never holds; None if data decide, for `every`, and
        without `propagate`.
        """
        first = None if self.folded.propagate is None else self.folded.propagate.first
        if first is None:
            return None
        layers = range(self.shape.layers)
        if self.static.needs(first) is None:
            answers = (truth(first, partial(self._known, prompt, layer)) for layer in layers)
            return self.shape.layers if all(answer is False for answer in answers) else None
        matches = (layer for layer in layers if self.number(first, prompt, layer, length=prompt))
        return next(matches, self.shape.layers)

    def _known(self, prompt: int, layer: int, node: Node) -> Value | None:
        """Value of a scalar at a layer that sees the whole prompt; None: data decide it."""
        is_static = self.static.needs(node) is not None
        return self.number(node, prompt, layer, length=prompt) if is_static else None

    @cached_property
    def upper_layers(self) -> list[int]:
        """Layers that are stored with the one below (`share:`), ascending."""
        share, layers = self.folded.share, range(self.shape.layers)
        return [] if share is None else [n for n in layers if self.number(share.when, 0, n)]

    @cached_property
    def needs_values(self) -> bool:
        """Whether the prefill reads the tensor `value` before entries leave."""
        return any("value" in node.operation.tensors for node in self.nodes())

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of the printed program, what it was given, and a fold interval in use."""
        values = "".join(f"{name} = {self.params[name]}\n" for name in sorted(self.params))
        for name in sorted(self.tensors):
            values += f"{name} = {self.tensors[name].layers}\n"
        if self.folded.decode is not None and self.folded.decode.when is None:
            values += f"fold interval {self.fold_interval}\n"
        return hashlib.sha256((print_program(self.program) + values).encode()).hexdigest()


def bind(
    program: Program,
    shape: ModelShape,
    overrides: Mapping[str, str] | None = None,
    *,
    fold_interval: int = 1,
) -> Bound:
    """Binds a policy to a model.

    Args:
        program: from `check.load`.
        overrides: parameter name -> value as text: `12`, `0.25`, `1e-3`, `true`, `false`.
        fold_interval: entries leave at every `fold_interval`-th decode step, unless the policy has
            `decode.when`; at least 1.

    Raises:
        PolicyError: impossible sizes or fold interval, unknown parameter, value not accepted, a
            tensor that is missing or not accepted, `require` false, `keep` takes more than the
            budget holds, or `share.when` holds at layer 0 or at adjacent layers.
        MalformedProgram: no checked file gives this program.
    """
    verify(program)
    _check_shape(shape)
    if fold_interval < 1:
        raise refused(program.name, "range", f"a fold interval is at least 1, not {fold_interval}")
    params = parameter_values(program, shape, overrides or {})
    tensors = tensors_of(program, shape)
    env = environment(shape, params)
    diagnostics = does_not_fit(program, env)
    if diagnostics:
        raise PolicyError(diagnostics, program.file or Source(program.name, ""))
    sections = Sections(program.prefill, program.decode, program.propagate, program.share)
    folded = _needed(fold(sections, env, shape, tensors), program.report)
    static = Static(folded.propagate is not None)
    bound = Bound(program, shape, params, tensors, folded, lower(folded), static, fold_interval)
    _check_shared(bound)
    return bound


def _check_shared(bound: Bound) -> None:
    """Refuses `share.when` that holds at layer 0 or at adjacent layers."""
    upper_layers = bound.upper_layers
    conflicts = [layer for layer in upper_layers if layer - 1 in (-1, *upper_layers)]
    if conflicts:
        reason = (
            f"layer {conflicts[0] - 1} shares already"
            if conflicts[0]
            else "there is no layer below"
        )
        message = f"`share.when` holds at layer {conflicts[0]}, but {reason}"
        when = None if bound.program.share is None else bound.program.share.when.span
        raise bound.program.refused("share", message, when, "for example `layer % 2 == 1`")


def _needed(folded: Sections, report: tuple[str, ...]) -> Sections:
    """The sections without rules that do nothing, and without states and lets that nothing reads.

    Args:
        report: names of the lets that are reported.
    """
    all_tokens = Node("all", type=Type("truth", ("token",)), when=When.PROMPT)
    prefill, decode = folded.prefill, folded.decode
    prefill = replace(prefill, keep=prefill.keep or all_tokens)
    if decode is not None:
        if decode.keep is None or decode.keep.op == "all":
            decode = None
        else:
            decode = _read(decode, _decode_roots(replace(decode, states={})), report)
    propagate = folded.propagate
    if propagate is not None:
        propagate = None if _never(propagate) else _without_restart(propagate)
    decode_nodes = nodes_of([] if decode is None else _decode_roots(decode))
    names = {node.symbol for node in decode_nodes if node.op == "decided"}
    decided = {name: node for name, node in prefill.decided.items() if name in names}
    prefill = replace(prefill, decided=decided)
    roots = [prefill.keep, prefill.budget, prefill.score, *merge_roots(prefill.merge)]
    roots += [*propagate_roots(propagate), *decided.values()]
    inherited = [] if decode is None else [x.name for x in decode.states.values() if x.inherited]
    prefill = _read(prefill, roots, report, inherited)
    return Sections(prefill, decode, propagate, folded.share)


def _read(
    rules: Rules,
    roots: list[Node | None],
    report: tuple[str, ...],
    state_names: Iterable[str] = (),
) -> Rules:
    """The rules with only the states and reported lets that the roots and `state_names` need.

    A reported let that nothing reads is left out unless it is known before the prefill.
    """
    extra_roots = state_roots({name: rules.states[name] for name in state_names})
    names = {*state_names} | states_needed([*roots, *extra_roots], rules.states)
    states = {name: state for name, state in rules.states.items() if name in names}
    read_nodes = {*nodes_of([*roots, *state_roots(states)])}
    lets = {name: rules.lets[name] for name in report if name in rules.lets}
    lets = {n: x for n, x in lets.items() if x in read_nodes or x.when <= When.PROMPT}
    return replace(rules, states=states, lets=lets)


def _decode_roots(decode: Rules) -> list[Node | None]:
    """Values that a decode step computes; its budget only where `keep` or `merge` reads it."""
    return [*rules_roots(decode), decode.budget if _fills(decode) else None]


def _fills(rules: Rules) -> bool:
    """Whether `keep` or `merge` reads the budget, by its name or an unsized `top`."""
    parts = [rules.keep, *merge_roots(rules.merge)]
    return any(
        node.op == "budget" or (node.op == "top" and len(node.args) == 1)
        for node in nodes_of(parts)
    )


def _never(propagate: Propagate) -> bool:
    """Whether parameters alone say that nothing is propagated."""
    return propagate.moment.op == "truth" and not propagate.moment.value


def _without_restart(propagate: Propagate) -> Propagate:
    """The section without a `restart` that is false."""
    restarts = propagate.restart is not None and bool(propagate.restart.value)
    return propagate if restarts else replace(propagate, restart=None)


def _check_shape(shape: ModelShape) -> None:
    sizes = (shape.layers, shape.heads, shape.kv_heads, shape.head_dim)
    if min(sizes) < 1 or shape.heads % shape.kv_heads:
        raise refused(
            "model",
            "range",
            f"{shape.layers} layers, {shape.heads} heads, {shape.kv_heads} KV heads, head size "
            f"{shape.head_dim}: all are at least 1 and the KV heads divide the heads",
        )
