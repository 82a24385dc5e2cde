"""What a decode step computes, found once per bound policy."""

from __future__ import annotations

from kvpolicy.dsl.bind.additive import Additive
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.lasting import Lasting
from kvpolicy.dsl.execute.direct import STATES, reads_budget
from kvpolicy.dsl.execute.evaluate import Updates
from kvpolicy.dsl.execute.generated import Generated
from kvpolicy.dsl.execute.kernels import NONE, Kernels
from kvpolicy.dsl.execute.ops import OPERATIONS
from kvpolicy.dsl.execute.plan import across
from kvpolicy.dsl.execute.together import like_heads
from kvpolicy.dsl.ir.nodes import OF_MERGE, Node, When
from kvpolicy.dsl.ir.traverse import merge_roots, nodes_of, state_roots
from kvpolicy.dsl.syntax.diagnostics import refused

_TENSORS = frozenset("attn logits key value".split())
# Of these the order of the entries is enough, not their positions.
_OF_STATES = _TENSORS


class Steps:
    """The rules of decode, ready to be evaluated at every layer.

    Attributes:
        rules: lowered.
        updates, merge_updates: states, and those of the merge.
        inherited: states that go on from the prefill.
        merge_goes_on: whether the states of the merge do.
        report: lets whose values `kvpolicy run` shows.
        advances: whether states differ from step to step.
        at_once: whether several steps are then one sum over their queries.
        advancing_reads, leaving_reads: whether keys or values are read for that, and where entries
            leave.
        kernels: that take the place of torch operations; those generated for the policy:
            `advancing` for its states, `leaving` for what is read where entries leave.
        advancing_roots, leaving_roots: what these compute.
        lasting: how many entries a list takes before it is filled up to its budget.
        states_alike, keep_alike: whether layers may be taken as more KV heads of one, see
            `torch_together`: where several steps advance the states, and where `keep` decides.
    """

    def __init__(self, bound: Bound, report: bool, kernels: Kernels = NONE) -> None:
        self.kernels = kernels
        self.rules = rules = bound.decode_lowered
        merge_states = {} if rules.merge is None else rules.merge.states
        self.updates, self.merge_updates = Updates.of(rules.states), Updates.of(merge_states)
        self.inherited = {name for name, state in rules.states.items() if state.inherited}
        self.merge_goes_on = any(state.inherited for state in merge_states.values())
        self.report = dict(rules.lets) if report else {}
        self.reads_budget = reads_budget(bound)
        remembered = list(nodes_of(state_roots(rules.states)))
        self.advancing_roots = state_roots(self.updates.states)
        self.leaving_roots = [rules.keep, *merge_roots(rules.merge), *self.report.values()]
        leaving = list(nodes_of(self.leaving_roots))
        self._check(bound, [*remembered, *leaving])
        additive = Additive(bound.static)
        states = self.updates.states.values()
        self.advances = any(x.next or (x.start and not additive.constant(x.start)) for x in states)
        self.at_once = all(map(additive.state, states))
        self.lasting = Lasting(bound, states_present=self.at_once)
        self.advancing_reads = any(node.op in _TENSORS for node in remembered)
        self.leaving_reads = rules.merge is not None or any(node.op in _TENSORS for node in leaving)
        self.advancing = Generated.of(
            bound, self.advancing_roots, kernels, self.updates.states, steps=True
        )
        # States are known by then.
        self.leaving = Generated.of(bound, self.leaving_roots, kernels, steps=True)
        self.states_alike = self.at_once and self._alike(bound, self.advancing_roots, _OF_STATES)
        self.states_alike &= not self.advancing_reads or self.by_kernels
        self.keep_alike = not report and self._alike(bound, [rules.keep], frozenset(("position",)))

    @property
    def by_kernels(self) -> bool:
        """Whether generated kernels read all that is read to advance the states."""
        return self.advancing is not None and not self.advancing.regions.reasons

    def _alike(self, bound: Bound, roots: list[Node], leaves: frozenset[str]) -> bool:
        states = self.updates.states.values()
        each_head = all(state.type.axes[:1] == ("kv",) for state in states)
        alike = like_heads(list(nodes_of(roots)), bound.static, leaves)
        return each_head and alike and not bound.propagates

    @staticmethod
    def _check(bound: Bound, nodes: list[Node]) -> None:
        for node in nodes:
            known = node.op in OPERATIONS or node.op in OF_MERGE or node.op in STATES
            other_layers = across(node) and node.when > When.PROMPT
            if bound.static.needs(node) is not None or (known and not other_layers):
                continue
            raise refused(
                bound.program.name, "phase", f"`{node.op}` is not available at a decode step"
            )
