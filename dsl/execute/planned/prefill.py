"""What a prefill computes, found once per bound policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.kept import keep_of
from kvpolicy.dsl.bind.sum_states import SumStates
from kvpolicy.dsl.codegen.causal import skips
from kvpolicy.dsl.execute.layer.evaluate import updating
from kvpolicy.dsl.execute.operations.operands import operands
from kvpolicy.dsl.execute.operations.table import is_computed
from kvpolicy.dsl.execute.planned.alike import like_heads
from kvpolicy.dsl.execute.tensors.heads import Heads
from kvpolicy.dsl.ir.heads import across_heads
from kvpolicy.dsl.ir.lower import Phase, Phases
from kvpolicy.dsl.ir.nodes import Node, When
from kvpolicy.dsl.ir.once import once
from kvpolicy.dsl.ir.traverse import merge_roots, nodes_of, propagate_roots, state_roots
from kvpolicy.dsl.ops.operations import Kind, Operation


class Prefill:
    """The values that a prefill has to compute, and when.

    Args:
        report: also compute budgets, scores and reported `let`s.
        heads: the model's KV heads that are here.
        defers: whether selections among a layer's tokens are made for all layers at once, after the
            last one; scores are held until then.

    Attributes:
        roots: nodes whose values `FinishedPrefill.result` gives.
        propagation_lets: name -> reported `let` on which propagation is decided.
        updates, merge_updates: states of the prefill and of its merge, see `updating`.
        layer_roots: nodes that each layer computes while its tensors are at hand, and keeps.
        later: nodes that are computed after the last layer, or in a merge.
        shared: numbers and values per token that the prompt's length decides, alike in all layers.
        unheld_nodes: nodes whose values are not held: one other node reads them, nothing else does.
        read_later: node that later layers read by `past` or `at` -> how many layers back `past`
            reads, as nodes; None: any layer may be read.
        read_before_scoring: the same, of what propagation or states read; recorded as long as
            propagation is tested.
        needs_ranks: whether layers look across KV heads, or propagate tokens, before the last one.
        merges_need_ranks: whether merges look across KV heads.
        sums: names of the states that chunks of a prompt may add to, see `Run.accumulate`; empty
            if something else needs all queries at once.
        alike_by: layers with the same values of these numbers of the host can be computed together,
            as more KV heads of one; None: no layers can.

    Raises:
        PolicyError: the policy needs data that a prefill does not offer.
    """

    def __init__(self, bound: Bound, report: bool, heads: Heads, *, defers: bool) -> None:
        self.bound, self._defers, rules = bound, defers, bound.lowered.prefill
        self._heads = heads
        self.roots = [keep_of(rules), *rules.decided.values()]
        if rules.budget is not None and (report or reads_budget(bound)):
            self.roots.append(rules.budget)
        early_lets, lets = bound.propagation_lets, rules.lets if report else {}
        self.roots += [rules.score] if report and rules.score is not None else []
        self.roots += [node for name, node in lets.items() if name not in early_lets]
        self.propagation_lets = {name: lets[name] for name in early_lets if report}
        merge_states = {} if rules.merge is None else rules.merge.states
        self.updates, self.merge_updates = updating(rules.states), updating(merge_states)
        early_roots = propagate_roots(bound.lowered.propagate)
        merge = merge_roots(rules.merge)
        self.merges_need_ranks = any(map(across_heads, nodes_of(merge)))
        all_nodes = list(nodes_of([*self.roots, *state_roots(rules.states), *merge, *early_roots]))
        self._check(all_nodes)
        known_nodes = [*all_nodes, *nodes_of(self.propagation_lets.values())]
        self._planned, self.shared = _planned(bound, known_nodes)
        self.layer_roots = self._layer_roots(self.roots, merge)
        # All that the prefill computes of its layers, merges apart.
        self.everything = [
            *self.roots,
            *self.layer_roots,
            *self.propagation_lets.values(),
            *early_roots,
        ]
        update_roots = state_roots(self.updates)
        self.everything += update_roots
        # What the propagation and the rest read is held for as long as either needs it.
        all_read = _read_later([*self.layer_roots, *update_roots, *early_roots])
        self.read_before_scoring = {
            node: all_read[node] for node in _read_later([*early_roots, *update_roots])
        }
        self.read_later = {
            node: all_read[node] for node in _read_later([*self.layer_roots, *update_roots])
        }
        computed = list(nodes_of(self.everything))
        layer_nodes = nodes_of([*self.layer_roots, *update_roots, *early_roots])
        self.needs_ranks = bound.propagates or any(map(across_heads, layer_nodes))
        self.later = self._planned.union(node for node in computed if self._is_later(node))
        readers = Counter(x for node in computed for x in operands(node) if not x.across_layers)
        result_nodes = {*self.everything, *self.read_later, *self.read_before_scoring}
        self.unheld_nodes = frozenset(node for node in readers if readers[node] == 1) - result_nodes
        others = [*self.roots, *merge, *early_roots]
        self.sums = () if bound.propagates or _reads_all(others) else self._sums()
        self.alike_by = self._alike_by()

    def _alike_by(self) -> tuple[Node, ...] | None:
        roots = [*self.layer_roots, *state_roots(self.updates)]
        if self.read_later or not roots:
            return None
        seen, static = {*self.shared}, self.bound.static
        nodes = [node for root in roots for node in root.walk(seen)]
        per_layer = not self._heads.divided
        if not like_heads(nodes, static, _of_any_layer, per_layer=per_layer, numbers=True):
            return None
        if any(node.across_layers for node in nodes):
            return None
        tensor_nodes = [node for node in nodes if static.needs(node) is None]
        numbers = [*roots, *(x for node in tensor_nodes for x in (*node.args, *operands(node)))]
        return tuple(dict.fromkeys(x for x in numbers if "layer" in (static.needs(x) or ())))

    def _check(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if not is_computed(node) and self.bound.static.needs(node) is None:
                message = f"`{node.op}` is not available at the end of a layer's prefill"
                raise self.bound.program.refused("phase", message, node.span)

    def _layer_roots(self, roots: list[Node], merge: list[Node]) -> list[Node]:
        """The outermost nodes that need only their own layer and those before it."""
        layer_roots = [node for root in roots for node in self._now(root)]
        for root in merge:
            # Keys and values are there again when entries are merged, attention is not.
            layer_roots += [
                node
                for node in self._now(root)
                if any(descendant.operation.gone_after_layer for descendant in node.walk())
            ]
        return list(dict.fromkeys(layer_roots))

    def _now(self, node: Node) -> Iterable[Node]:
        if self.bound.static.needs(node) is not None or node in self._planned:
            return
        if not self._is_later(node):
            yield node
            return
        for argument in operands(node):
            yield from self._now(argument)

    @once
    def _is_later(self, node: Node) -> bool:
        merge = node.operation.kind is Kind.MERGE or (
            node.op == "state" and node.value in self.merge_updates
        )
        return (
            merge
            or node.when >= When.END
            or (self._defers and _chooses(node))
            or self._gathers_later(node)
            or any(self._is_later(operand) for operand in operands(node))
        )

    def _gathers_later(self, node: Node) -> bool:
        """Whether a node across KV heads of other ranks waits for one exchange of all layers."""
        if not self._heads.divided or not across_heads(node):
            return False
        return self._defers or all("token" not in operand.type.axes for operand in operands(node))

    def _sums(self) -> tuple[str, ...]:
        """The states that read all queries, if chunks of a prompt may add to each of them."""
        states = {name: x for name, x in self.updates.items() if _reads_all(state_roots({name: x}))}
        sum_states = SumStates(self.bound.static, ("new", "all"))
        # A chunk's queries do not see the tokens of later chunks.
        whole = all(map(skips, filter(_of_queries_and_tokens, nodes_of(state_roots(states)))))
        return tuple(states) if whole and all(map(sum_states.state, states.values())) else ()


def _planned(bound: Bound, nodes: Iterable[Node]) -> tuple[frozenset[Node], frozenset[Node]]:
    """Numbers and values per token that the prompt's length decides; those alike in all layers.

    They read only such values: what differs by KV head, as random numbers do, may by layer too.

    Args:
        nodes: operands before the nodes that read them.
    """
    phases = Phases(bound.propagates)
    by_layer: set[Node] = set()
    planned: set[Node] = set()
    for node in nodes:
        needs = bound.static.needs(node)
        differs = node.across_layers or node.op == "head_table" or by_layer & {*operands(node)}
        if differs if needs is None else "layer" in needs:
            by_layer.add(node)
        if needs is None and phases.of(node) == Phase.PLAN and {*node.type.axes} <= {"token"}:
            if all(x in planned or bound.static.needs(x) is not None for x in operands(node)):
                planned.add(node)
    return frozenset(planned), frozenset(planned - by_layer)


def _reads_all(roots: Iterable[Node]) -> bool:
    """Whether something in a prefill reads all queries of the prompt."""
    return any(node.operation.is_window and not node.args for node in nodes_of(roots))


def _of_queries_and_tokens(node: Node) -> bool:
    """Whether a node reduces values per query and token over one of these axes."""
    axes = {"query", "token"}
    reduces = node.operation.is_reduction and axes & {*node.axes}
    return bool(reduces) and axes <= {*node.args[0].type.axes}


def _of_any_layer(row: Operation) -> bool:
    """Whether a leaf is known per KV head, or equal for all, if every layer has all tokens."""
    return row.reads_tensors or row.kind in (Kind.PLACE, Kind.WINDOW)


def _chooses(node: Node) -> bool:
    """Whether a node orders one layer's tokens, or its KV heads, by numbers that data decide."""
    orders = node.operation.sorts and node.when is When.LAYER
    if not orders or set(node.args[0].type.axes) - {"kv", "token"}:
        return False
    rows = [descendant.operation for descendant in node.args[0].walk()]
    return any(row.reads_tensors or row.kind is Kind.REMEMBERED for row in rows)


def reads_budget(bound: Bound) -> bool:
    """Whether decode reads the numbers of the prefill's budget."""
    return bound.lowered.decode is not None and any(
        node.op == "budget"
        for node in nodes_of([bound.lowered.decode.keep, *merge_roots(bound.lowered.decode.merge)])
    )


def _read_later(roots: Iterable[Node]) -> dict[Node, list[Node] | None]:
    """The nodes that `past` and `at` read of earlier layers, see `Prefill.read_later`."""
    read: dict[Node, list[Node] | None] = {}
    for node in nodes_of(roots):
        if node.operation.kind is not Kind.LOOK or node.when > When.LAYER:
            continue
        target = node.args[0 if node.op == "past" else 1]
        numbers = read.get(target, [])
        if node.op == "at" or numbers is None:
            read[target] = None
        else:
            read[target] = [*numbers, node.args[1]]
    return read
