"""What a decode step computes, found once per bound policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.ends import Ends, end_of
from kvpolicy.dsl.bind.entries import entries_taken
from kvpolicy.dsl.bind.kept import entries_compared, heads_differ
from kvpolicy.dsl.bind.sum_states import SumStates
from kvpolicy.dsl.codegen.fusion import Fusion
from kvpolicy.dsl.execute.layer.evaluate import updating
from kvpolicy.dsl.execute.layer.generated import Generated
from kvpolicy.dsl.execute.operations.table import is_computed
from kvpolicy.dsl.execute.planned.alike import like_heads
from kvpolicy.dsl.execute.planned.prefill import reads_budget
from kvpolicy.dsl.execute.tensors.heads import ALL, Heads
from kvpolicy.dsl.execute.tensors.kernels import Kernels
from kvpolicy.dsl.execute.tensors.values import PER_ENTRY, PER_ENTRY_AND_HEAD
from kvpolicy.dsl.ir.nodes import Node, When
from kvpolicy.dsl.ir.once import PROMPTS, once, once_at_most
from kvpolicy.dsl.ir.traverse import merge_roots, nodes_of, state_roots
from kvpolicy.dsl.ops.operations import Kind, Operation


def _only_orders(node: Node) -> bool:
    """Whether a node uses positions only to order entries."""
    return node.op in ("top", "negate") or not any(_is_place(argument) for argument in node.args)


def _is_place(node: Node) -> bool:
    return node.op == "position" or (node.op == "negate" and _is_place(node.args[0]))


def _of_each_head(node: Node) -> bool:
    """Whether a node reduces `dropped` of many layers as if each layer were alone.

    Other layers may drop more entries: the padding of the axis must count as no entry, and must not
    change the order of a sum.
    """
    if "dropped" not in node.axes:
        return True
    type_ = node.args[0].type
    mean = node.op == "mean" and not type_.absent and set(type_.axes) == {"kv", "dropped"}
    return mean or ("kv" in type_.axes and node.op not in ("sum", "mean", "var"))


def _joins_layer(node: Node) -> bool:
    """Whether a node works along tokens on values per token that combine a layer's KV heads.

    They are present wherever some head of the layer has an entry; a list has only the entries of
    its head. What a set leaves over is each head's own in any case.
    """
    if "token" not in (*node.axes, *node.operation.reads_along):
        return False
    return any(
        "token" in argument.type.axes
        and "kv" not in argument.type.axes
        and not argument.left_over
        and any("kv" in descendant.axes for descendant in argument.walk())
        for argument in node.args
    )


def _is_position(row: Operation) -> bool:
    return row.name == "position"


def _takes_any(node: Node, place: int) -> bool:
    """Whether an argument may be a number per KV head instead of one of the host."""
    if node.op in ("top", "missing"):
        return place == {"top": 1, "missing": 0}[node.op]
    return node.operation.elementwise


class Steps:
    """The rules of decode, ready to be evaluated.

    Attributes:
        rules: lowered rules of decode; keep: their `keep`.
        updates, merge_updates: states, and those of the merge, see `updating`.
        inherited: names of the states that go on from the prefill.
        merge_goes_on: whether the states of the merge do.
        report: `let`s whose values `kvpolicy run` shows, by name.
        advances: whether states change from step to step.
        at_once: whether several steps advance the states as one sum over their queries.
        advancing_reads, leaving_reads: whether keys or values are read to advance the states, and
            where entries leave.
        advancing_reads_queries, leaving_reads_queries: whether queries are read there.
        initial_values: state, by name -> its value for new entries; NaN if data or the request
            decide it.
        layers: layers of the model that are here.
        kernels: table of kernels, see `execute/tensors/kernels.py`.
        fusions: what is fused for the states, and for what is read where entries leave.
        advancing, leaving: the generated kernels of both; None if there are none.
        advancing_roots: nodes that advance the states.
        ranks_alike: whether all KV heads of a layer hold the same entries, so that ranks do.
        columns_of_all_ranks: whether a layer has a column for every position that a KV head of any
            rank holds, since entries of KV heads are compared; else for those of the heads here.
        states_alike, keep_alike: whether layers may stand for more KV heads of one (`like_heads`):
            where several steps advance the states, and where `keep` decides.

    Raises:
        ValueError: nothing leaves while decoding.
        PolicyError: the policy needs what a decode step does not offer.
    """

    def __init__(
        self,
        bound: Bound,
        report: bool,
        kernels: Kernels,
        heads: Heads = ALL,
        layers: range | None = None,
    ) -> None:
        self._bound, self.kernels, self.heads = bound, kernels, heads
        self.layers = range(bound.shape.layers) if layers is None else layers
        rules = bound.lowered.decode
        if rules is None or rules.keep is None:
            raise ValueError(f"by `{bound.program.name}` nothing leaves while decoding")
        self.rules, self.keep = rules, rules.keep
        merge_states = {} if rules.merge is None else rules.merge.states
        self.updates, self.merge_updates = updating(rules.states), updating(merge_states)
        self.inherited = {name for name, state in rules.states.items() if state.inherited}
        self.merge_goes_on = any(state.inherited for state in merge_states.values())
        self.report = dict(rules.lets) if report else {}
        self.reads_budget = reads_budget(bound)
        self.ranks_alike = not heads_differ(bound.lowered)
        state_nodes = list(nodes_of(state_roots(rules.states)))
        self.advancing_roots = state_roots(self.updates)
        leaving_roots = [self.keep, *merge_roots(rules.merge), *self.report.values()]
        leaving_nodes = list(nodes_of(leaving_roots))
        self._check([*state_nodes, *leaving_nodes])
        self.columns_of_all_ranks = heads.divided and entries_compared(bound.lowered)
        sums = SumStates(bound.static)
        states = self.updates.values()
        self.initial_values = self._initial_values()
        initial_known = not any(map(math.isnan, self.initial_values.values()))
        self.advances = not initial_known or any(state.next is not None for state in states)
        self.at_once = all(map(sums.state, states))
        self.advancing_reads = any(node.operation.reads_tensors for node in state_nodes)
        reads_tensors = any(node.operation.reads_tensors for node in leaving_nodes)
        self.leaving_reads = reads_tensors or rules.merge is not None
        self.advancing_reads_queries = any(node.type.window for node in state_nodes)
        self.leaving_reads_queries = any(node.type.window for node in leaving_nodes)
        self.fusions = (
            Fusion(bound, self.advancing_roots, self.updates, steps=True),
            Fusion(bound, leaving_roots, steps=True),  # states are known by then
        )
        self.advancing, self.leaving = (Generated.of(fusion, kernels) for fusion in self.fusions)
        # What reads tensors needs the order of the entries, not their positions.
        self.states_alike = (
            self.at_once
            and initial_known
            and (self.by_kernels or not self.advancing_reads)
            and self._alike(self.advancing_roots, lambda row: row.reads_tensors)
        )
        self.keep_alike = not report and self._alike([self.keep], _is_position)
        self._places: torch.Tensor | None = None

    @property
    def by_kernels(self) -> bool:
        """Whether generated kernels do all reads that advance the states."""
        return self.advancing is not None and not self.advancing.fusion.reasons

    def _initial_values(self) -> dict[str, float]:
        """The attribute `initial_values`."""
        initial_values = {}
        for name, state in self.updates.items():
            value = 0.0
            if state.start is not None and self._bound.static.needs(state.start) == frozenset():
                value = float(self._bound.number(state.start, 1))
            elif state.start is not None:
                value = math.nan
            initial_values[name] = value
        return initial_values

    @once_at_most(PROMPTS)
    def rule(self, prompt: int) -> Ends | Node | None:
        """The rule by which the lists of several layers and requests are decided at once.

        `Ends` where `keep` has that form; else the node `keep`, which is evaluated as it is. None:
        after a prompt of so many tokens, layers are decided one after the other.
        """
        bound, states = self._bound, self.updates.values()
        if not self.states_alike:
            return None
        per_entry = all(state.type.axes in (PER_ENTRY, PER_ENTRY_AND_HEAD) for state in states)
        if self.report or not per_entry or not self._merges_alike():
            return None
        rule = Ends.of(bound, prompt)
        if rule is not None and self._of_heads(list(nodes_of(self._deciding(rule))), _is_position):
            return rule
        keep = [self.keep]
        if self.keep_alike or self._of_heads(list(nodes_of(keep)), _is_position, numbers=True):
            shared, _ = self.numbers(self.keep)
            if not any("layer" in (bound.static.needs(node) or ()) for node in shared):
                return self.keep
        return None

    @once_at_most(PROMPTS)
    def rows(self, prompt: int) -> list[tuple[int, int, int]]:
        """`Ends.rows` of the rule after a prompt of N tokens, of the layers here.

        Raises:
            TypeError: the rule has another form.
        """
        rule = self.rule(prompt)
        if not isinstance(rule, Ends):
            raise TypeError(f"the rule after a prompt of {prompt} tokens does not take ends")
        return rule.rows(self._bound, prompt, self.layers)

    def keeps_size(self, prompt: int, counts: Sequence[Sequence[int]]) -> bool:
        """Whether every list keeps the same number of entries whenever entries leave from now on.

        Valid if the model's tensors are finite.

        Args:
            prompt: N tokens.
            counts: [L][G] entries that each list kept at a step at which all lists lost some.
        """
        pairs = zip(self._taken(prompt), counts, strict=True)
        return all(taken is not None and taken < min(kept) for taken, kept in pairs)

    @once_at_most(PROMPTS)
    def _taken(self, prompt: int) -> list[int | None]:
        return [entries_taken(self._bound, self.rules, prompt, layer) for layer in self.layers]

    def host_numbers(self, node: Node, prompt: int, generated: int) -> tuple[float, ...]:
        """A number of the host at a request's step: of each layer here, or one if it reads none.

        Args:
            generated: number of the step, from 1.
        """
        needs = self._bound.static.needs(node) or ()
        if "generated" in needs:
            return self._host_numbers(node, prompt, generated)
        return self._lasting_numbers(node, prompt)

    @once_at_most(PROMPTS)
    def _lasting_numbers(self, node: Node, prompt: int) -> tuple[float, ...]:
        return self._host_numbers(node, prompt, None)

    def _host_numbers(self, node: Node, prompt: int, generated: int | None) -> tuple[float, ...]:
        number = partial(self._bound.number, node, prompt, generated=generated)
        per_layer = "layer" in (self._bound.static.needs(node) or ())
        return tuple(float(number(layer)) for layer in (self.layers if per_layer else range(1)))

    def _deciding(self, rule: Ends | Node | None) -> list[Node]:
        """The nodes of a rule that data decide."""
        if not isinstance(rule, Ends):
            return [] if rule is None else [rule]
        score = [] if rule.score is None else [rule.score]
        return score + list(rule.of_data(self._bound).values())

    def _merges_alike(self) -> bool:
        """Whether the entries of many layers can be merged as those of one, in their pool."""
        merge = self.rules.merge
        if merge is None:
            return True
        if self._bound.positions == "slots" and "key" in merge.apply:
            return False  # keys would be rounded before they turn, and after
        if any(state.type.axes or state.type.absent for state in merge.states.values()):
            return False
        nearest, (into_argument,) = merge.into.op == "nearest", merge.into.args
        if nearest and into_argument.operation.kind is not Kind.VECTOR:
            return False
        if not nearest and self._bound.static.needs(into_argument) is None:
            return False
        roots = [node for node in merge_roots(merge) if node is not merge.into]
        # A kernel finds inner products of entries and their receivers.
        seen = {node for node in nodes_of(roots) if node.operation.of_two_vectors}
        nodes = [node for root in roots for node in root.walk(seen)]
        if any(node.operation.kind is Kind.VECTOR or not _of_each_head(node) for node in nodes):
            return False
        if any({"query", "dropped"} <= {*node.type.axes} for node in nodes):
            return False  # no kernel gives attention to single entries
        return self._of_heads(
            nodes, lambda row: row.kind is Kind.MERGE or row.name in ("position", "uniform")
        )

    def _of_heads(
        self, nodes: list[Node], reads: Callable[[Operation], bool], *, numbers: bool = False
    ) -> bool:
        """Whether values at a step can be computed for many layers as for one.

        Args:
            reads: whether a leaf may be read besides tensors of the model.
            numbers: see `like_heads`.
        """
        static = self._bound.static
        reads_leaf = lambda row: row.reads_tensors or reads(row)  # noqa: E731
        alike = like_heads(nodes, static, reads_leaf, per_layer=True, numbers=numbers)
        if not alike or not all(_only_orders(node) for node in nodes):
            return False
        if not self.ranks_alike and any(_joins_layer(node) for node in nodes):
            return False
        if not any(node.operation.reads_tensors for node in nodes):
            return True
        if self.leaving is None or self.leaving.fusion.reads_of_layers:
            return False
        return not any(node in self.leaving.fusion.reasons for node in nodes)

    def places(self, width: int, device: torch.device) -> torch.Tensor:
        """int64 [width], 0 to width - 1: a view of a tensor that is made once."""
        if self._places is None or len(self._places) < width or self._places.device != device:
            self._places = torch.arange(max(width, 1024) * 2, device=device)
        return self._places[:width]

    def joint_key(self, rule: Ends | Node | None, prompt: int, generated: int) -> Hashable:
        """A key that is equal for requests that may be taken through a step together.

        It holds the rule, and the numbers of the host that all lists of a computation share.
        """
        shared, _ = self.numbers(rule)
        numbers = [self._bound.number(node, prompt, generated=generated) for node in shared]
        return rule is None, tuple(map(id, self._deciding(rule))), tuple(numbers)

    def numbers(self, rule: Ends | Node | None) -> tuple[list[Node], list[Node]]:
        """Numbers of the host in states, scores and merges: those that lists share, and others."""
        roots = list(self.advancing_roots) if self.states_alike else []
        if rule is not None:
            roots += [*self._deciding(rule), *merge_roots(self.rules.merge)]
        return self._divided(*roots)

    @once
    def _divided(self, *roots: Node) -> tuple[list[Node], list[Node]]:
        """As `numbers`: what is computed entry by entry takes a number per list, all else one."""
        static = self._bound.static
        compiled = {
            node
            for generated in (self.advancing, self.leaving)
            for node in (() if generated is None else generated.fusion.inside())
        }
        shared: dict[Node, None] = {}
        per_list = dict.fromkeys(node for node in roots if static.needs(node))
        for node in nodes_of(roots):
            if static.needs(node) is not None or end_of(self._bound, node):
                continue
            for place, argument in enumerate(node.args):
                if static.needs(argument):
                    may_differ = node not in compiled and _takes_any(node, place)
                    (per_list if may_differ else shared)[argument] = None
        return list(shared), [node for node in per_list if node not in shared]

    def _alike(self, roots: list[Node], reads: Callable[[Operation], bool]) -> bool:
        states = self.updates.values()
        each_head = all(state.type.axes[:1] == ("kv",) for state in states)
        alike = like_heads(list(nodes_of(roots)), self._bound.static, reads)
        return each_head and alike and not (states and self._bound.propagates)

    def _check(self, nodes: list[Node]) -> None:
        for node in nodes:
            other_layers = node.across_layers and node.when > When.PROMPT
            is_static = self._bound.static.needs(node) is not None
            if not is_static and (other_layers or not is_computed(node)):
                message = f"`{node.op}` is not available at a decode step"
                raise self._bound.program.refused("phase", message, node.span)
