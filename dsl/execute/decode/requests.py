"""Requests of one policy taken through decode steps together, as one layer with B x L x G KV heads.

What their layers remember stands side by side in one `RequestBlock`, kept from fold to fold: the
newest entries of every layer are in the last columns, and shorter layers have empty columns in
front. Steps cost as many operations for many requests as for one. What a request keeps does not
depend on the others, since no number of one request enters another's.

This serves policies that do not compare layers, and whose sums kernels compute (`Steps.rule`).
Where `keep` takes the ends of a list and the best of the rest (bind/ends.py), one kernel decides;
else `keep` is evaluated as it is, with a kernel for each further set of entries (keep_stages.py).
Numbers that follow from the prompt's length may differ between requests, unless they are sizes or
a generated kernel takes them (`Steps.joint_key`). All other policies are evaluated one layer of the
block after the other (follow.py).

Dimensions: B requests, L layers, G KV heads, H query heads, M columns of a block, T steps, D head
size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from kvpolicy.dsl.bind.ends import Ends
from kvpolicy.dsl.execute.decode.follow import ListsAtOnce, StepInputs
from kvpolicy.dsl.execute.decode.lists import (
    ArrivingNumbers,
    Folded,
    LastQueries,
    RequestBlock,
    Tallied,
    joined_block,
    padded,
    per_list,
    tally_gathered_later,
)
from kvpolicy.dsl.execute.decode.memory import Memory
from kvpolicy.dsl.execute.layer.choice import Choice, Rows, shift_of
from kvpolicy.dsl.execute.layer.evaluate import Evaluation, spread
from kvpolicy.dsl.execute.layer.merge import Merging
from kvpolicy.dsl.execute.tensors.kernels import Entries
from kvpolicy.dsl.execute.tensors.values import PER_ENTRY, Value, without_heads
from kvpolicy.dsl.ir.nodes import Node

# From bool [B * L * G, M], the entries of each list, to the keys and values of all lists.
Read = Callable[[torch.Tensor], tuple[Entries, Entries]]
# From a layer and `held` [G, M] or None to its keys and values [G, M, D].
ReadLayer = Callable[[int, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


def follow_together(
    memories: Sequence[Memory],
    positions: Sequence[Sequence[int]],
    newest: torch.Tensor,
    queries: Callable[[], torch.Tensor],
    read: Read,
    *,
    leaves: bool,
) -> Staying | None:
    """Takes B requests through T decode steps; entries may leave at the last step only.

    A request loses nothing if numbers of any of its layers are not finite. The host waits for the
    device only to read the numbers of the last fold and, where entries are merged layer by layer,
    those of this one. If it raises, nothing has changed.

    Args:
        memories: of the requests, for which `Memory.joint_key` is equal.
        positions: [B][T] of the steps' tokens, all cached, consecutive.
        newest: int64 [B] on the device, the last position of each request.
        queries: gives [B * L * H, T, D] after RoPE, or those of the last steps that the policy
            reads; called at most once, and only if something reads them.
        read: gives keys and values of the lists; called likewise.
        leaves: whether entries may leave at the last step, if the policy allows it.

    Returns:
        What stays; None if nothing may leave. The tensors that `read` gave must remain until merged
        rows have been read.
    """
    return _Following(memories, positions, newest, queries, read, leaves).go()


@dataclass(frozen=True)
class Merges:
    """What leaving entries add to those that stay.

    Attributes:
        merging: the merge of `lists`.
        entries: the keys, the values or both, in their pool, that it changes.
        lists: those of all requests, or of one layer of a request.
    """

    merging: Merging
    entries: list[Entries]
    lists: ListsAtOnce

    def states(self, before: Mapping[str, Value], kv: int) -> dict[str, Value]:
        """The merge's states after it.

        Args:
            before: the block's merge states before it.
            kv: G.
        """
        if self.lists.layer is not None:
            return self.merging.states
        return self.merging.of_layers(before, kv)

    def write(self, proceed: torch.Tensor) -> None:
        """See `Staying.merge`."""
        if self.lists.layer is not None:
            proceed = proceed[self.lists.request : self.lists.request + 1]
        for entries in self.entries:
            self.merging.write(entries, proceed)

    def of(self, request: int, layer: int) -> Merging | None:
        """The merge of a layer of a request; None if that is not among the lists."""
        if self.lists.layer is None:
            return self.merging.of_some(*self.lists.inputs.block.rows_of(request, layer))
        return self.merging if (self.lists.request, self.lists.layer) == (request, layer) else None


@dataclass(frozen=True)
class Staying:
    """What stays of the lists of B requests, in order.

    Attributes:
        folded: the block after the steps.
        proceed: bool [B, L], whether numbers of a layer are finite; a request loses entries only if
            all of its values are true.
        checks_counts: whether `proceed` also says that each list keeps as many entries as at the
            last fold.
        in_place: whether staying entries may be merged in the pool by `merge` and turned there.
        merges: what leaving entries add to those that stay.
    """

    folded: Folded
    proceed: torch.Tensor
    checks_counts: bool
    in_place: bool
    merges: list[Merges]

    @property
    def kept(self) -> torch.Tensor:
        """bool [B * L * G, M], the entries of `held_mask` that stay."""
        return self.folded.staying

    @property
    def block(self) -> RequestBlock:
        """The block as if no entry had left."""
        return self.folded.block

    @property
    def held_mask(self) -> torch.Tensor:
        """bool [B * L * G, M], all entries before some leave."""
        return self.block.held_mask

    def merge(self, proceed: torch.Tensor) -> None:
        """Adds leaving entries to staying ones in the pool; to be called before any entry moves.

        Args:
            proceed: bool [B, P]; a request with a false value is not changed.
        """
        for merges in self.merges:
            merges.write(proceed)

    def choices(self, request: int, read: ReadLayer, *, slots: bool) -> list[Choice]:
        """What stays of a request at each layer; its entries in the pool must not have changed.

        Args:
            read: from a layer and `held` [G, M] or None to its keys and values [G, M, D]; called
                when merged rows are read.
            slots: whether keys turn to their positions in the cache.
        """
        block, choices = self.block, []
        for layer in range(block.layers):
            kept, entries = (block.part(x, request, layer) for x in (self.kept, self.held_mask))
            shift = shift_of(kept, entries) if slots else None
            held = None if block.alike[request * block.layers + layer] else entries
            choice = Choice(kept, shift, held)
            for merges in self.merges:
                merging = merges.of(request, layer)
                if merging is not None:
                    choice.merged = partial(_rows, merging, partial(read, layer, held))
            choices.append(choice)
        return choices


def _rows(merging: Merging, read: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Rows:
    (k, v), apply = read(), merging.merge.apply
    keys = merging.rows(k) if "key" in apply else None
    return keys, merging.rows(v) if "value" in apply else None


@dataclass(frozen=True)
class _Decision:
    """What stays of lists, before entries are merged.

    Attributes:
        kept: bool, per list and column.
        evaluation: the last step's, from which a merge goes on; None without a merge.
        reported: values of reported `let`s, by name.
    """

    lists: ListsAtOnce
    kept: torch.Tensor
    evaluation: Evaluation | None
    reported: dict[str, Value]


class _Following:
    """One call of `follow_together`."""

    def __init__(
        self,
        memories: Sequence[Memory],
        positions: Sequence[Sequence[int]],
        newest: torch.Tensor,
        queries: Callable[[], torch.Tensor],
        read: Read,
        leaves: bool,
    ) -> None:
        self.memories, self.newest = memories, newest
        self.step_count, self.queries, self.read = len(positions[0]), queries, read
        first = memories[0]
        self.steps, self.bound, self.rule = first.steps, first.bound, first.steps.rule(first.prompt)
        active = not first.not_finite  # if not, nothing leaves any more
        generated = first.generated + self.step_count
        self.leaves = active and leaves and self.bound.leaves_at(generated, first.prompt)
        self.advances = active and self.steps.advances
        self.heads = self.steps.heads.joined()
        windows = [self.bound.step_queries(memory.prompt) for memory in memories]
        self.window = max(windows) if active else 0
        self.block = self._extended(joined_block([memory.block for memory in memories]))

    def go(self) -> Staying | None:
        block, inputs = self.block, self._inputs()
        if inputs.last_queries is not None and min(inputs.last_queries.lengths) < self.window:
            self.rule = None  # some layers have fewer queries than the window
        if self.advances:
            all_lists = self._lists(inputs, alike=self.steps.states_alike)
            states = [lists.advanced() for lists in all_lists]
            block.states = {
                name: _together(all_lists, [values[name] for values in states])
                for name in states[0]
            }
            self._note(all_lists)
        if inputs.last_queries is not None:
            block.last_queries = inputs.last_queries.last(self.window)
        decisions: list[_Decision] = []
        staying = None
        if self.leaves:
            all_lists = self._lists(inputs, alike=self.rule is not None)
            decisions = [self._decided(lists) for lists in all_lists]
            staying = self._staying(decisions, whole=replace(block))
        self.heads.agree()
        remembered = block if staying is None else staying.folded
        for place, memory in enumerate(self.memories):
            reported: dict[str, dict[int, Value]] = {name: {} for name in self.steps.report}
            for decision in decisions:
                if decision.lists.layer is not None and decision.lists.request == place:
                    for name, value in decision.reported.items():
                        reported[name][decision.lists.layer] = value
            memory.followed(remembered, place, self.step_count, reported)
        return staying

    def _extended(self, block: RequestBlock) -> RequestBlock:
        """The block without the entries that have left, and with those of the steps."""
        number = self.step_count
        followed = {name: x for name, x in block.states.items() if "token" in x.axes}
        positions, held, new_states = self.steps.kernels["carry"](
            block.held_mask, block.columns, block.positions, block.on_device, self.newest,
            [_per_entry(x) for x in followed.values()],
            [self.steps.initial_values[name] for name in followed],
            steps=number, width=max(block.lengths) + number,
        )  # fmt: skip
        states = dict(block.states)
        for (name, x), new_state in zip(followed.items(), new_states, strict=True):
            states[name] = _with_entries(x, new_state)
        lengths = [n + number for n in block.lengths]
        return replace(
            block,
            lengths=lengths,
            widest=[n + number for n in block.widest],
            positions=positions,
            held_mask=held,
            states=states,
            used=None,
            columns=positions >= 0 if self.steps.columns_of_all_ranks else None,
            steps_since_cut=None
            if block.steps_since_cut is None
            else block.steps_since_cut + number,
        )

    def _inputs(self) -> StepInputs:
        block, steps = self.block, self.steps
        k, v, q, last_queries = None, None, None, None
        if (self.advances and steps.advancing_reads) or (self.leaves and steps.leaving_reads):
            k, v = self.read(block.held_mask)
        if (
            self.window > 1
            or (self.advances and steps.advancing_reads_queries)
            or (self.leaves and steps.leaving_reads_queries)
        ):
            q = self.queries()
        if q is not None and self.window > 1:
            earlier_queries = block.last_queries or LastQueries.none(q, block.positions)
            last_queries = earlier_queries.and_then(q, block.positions)
        return StepInputs(
            self.bound, steps, block, [memory.prompt for memory in self.memories],
            [memory.generated + self.step_count for memory in self.memories], self.step_count,
            k, v, q, last_queries, self.heads,
        )  # fmt: skip

    def _lists(self, inputs: StepInputs, *, alike: bool) -> list[ListsAtOnce]:
        """All lists at once, or, where layers are not alike, those of each layer."""
        if alike:
            return [ListsAtOnce(inputs)]
        layers = range(inputs.block.layers)
        requests = range(len(self.memories))
        return [ListsAtOnce(inputs, request, layer) for request in requests for layer in layers]

    def _decided(self, lists: ListsAtOnce) -> _Decision:
        """What stays of lists at the last step."""
        steps, evaluation = self.steps, lists.deciding()
        if isinstance(self.rule, Ends):
            kept = lists.best(evaluation, self._ends())
        else:
            frame = evaluation.frame
            kept = spread(frame.present(evaluation.value(steps.keep)), PER_ENTRY, frame)
        reported = {name: _as_reported(evaluation.value(x), x) for name, x in steps.report.items()}
        merge_evaluation = None if steps.rules.merge is None else self._merging(lists, evaluation)
        return _Decision(lists, kept, merge_evaluation, reported)

    def _ends(self) -> list[Ends]:
        """The rule of each request."""
        rules = [self.steps.rule(memory.prompt) for memory in self.memories]
        return [rule for rule in rules if isinstance(rule, Ends)]

    def _merging(self, lists: ListsAtOnce, evaluation: Evaluation) -> Evaluation:
        """The evaluation from which a merge goes on; nothing large is held."""
        frame = evaluation.frame
        stored = {
            name: Entries(x.pool, x.ids, x.scale)
            for name, x in frame.vectors.items()
            if isinstance(x, Entries)
        }
        k, v, held = stored["key"], stored["value"], frame.held_mask
        if held is None:
            held = torch.ones_like(k.ids, dtype=torch.bool)
        # A merge reads keys and values, even if nothing else does.
        lists.finite_checks.extend([self.steps.kernels["finite"](k.pool, v.pool, k.ids, held)])
        known = {
            name: x for name, x in evaluation.known.items() if not {"query", "dim"} & set(x.axes)
        }
        frame = replace(frame, vectors={**frame.vectors, **stored})
        return replace(evaluation, frame=frame, known=known)

    def _note(self, all_lists: list[ListsAtOnce]) -> None:
        """Adds the lists' checks for NaN and infinity to the block's, on the device."""
        block = self.block
        checks = [lists.finite for lists in all_lists]
        if all(check is None for check in checks):
            return
        parts = [
            block.held_mask.new_ones(lists.count) if check is None else check
            for lists, check in zip(all_lists, checks, strict=True)
        ]
        finite = parts[0] if len(parts) == 1 else torch.cat(parts)
        block.finite = finite if block.finite is None else finite & block.finite

    def _staying(self, decisions: list[_Decision], whole: RequestBlock) -> Staying:
        """What stays and what is added to it.

        Args:
            whole: as in `Folded`.
        """
        block, all_lists = self.block, [decision.lists for decision in decisions]
        at_once, last_numbers = self.rule is not None, block.numbers
        parts = [padded(decision.kept, 1, block.width, False) for decision in decisions]
        kept = parts[0] if len(parts) == 1 else torch.cat(parts)
        tallied = self._tallied(last_numbers, kept, all_lists)
        merges: list[Merges] = []
        if at_once:
            # The exchange of ranks for a merge of all lists takes the numbers along.
            check_counts = [len(lists.finite_checks.results) for lists in all_lists]
            merges = self._merges(decisions, None)
            if check_counts != [len(lists.finite_checks.results) for lists in all_lists]:
                tallied = self._tallied(last_numbers, kept, all_lists)
        numbers, good, columns = tallied()
        counts = ArrivingNumbers(numbers, block.requests, self.bound.shape.kv_heads)
        block.steps_since_cut = 0 if all(lists.cut for lists in all_lists) else None
        block.finite = None  # in `numbers` now; a request that is not finite loses nothing
        folded = Folded(block, kept, counts, columns, whole)
        if not at_once:
            # Merges layer by layer need the numbers: how many entries leave each layer.
            merges = self._merges(decisions, counts)
        merge, checks_counts = self.steps.rules.merge, last_numbers is not None
        # Merged keys would be rounded twice, before they turn and after.
        turns = merge is not None and "key" in merge.apply and self.bound.positions == "slots"
        proceed = good.view(block.requests, -1)
        return Staying(folded, proceed, checks_counts, not turns, merges)

    def _tallied(
        self,
        last_numbers: torch.Tensor | None,
        kept: torch.Tensor,
        all_lists: list[ListsAtOnce],
    ) -> Callable[[], Tallied]:
        """Counts the staying entries of this rank's lists, and asks other ranks.

        See `tally_gathered_later`.

        Args:
            last_numbers: those of the last fold; None at the first.
        """
        self._note(all_lists)
        block = self.block
        arguments = (kept, block.held_mask, block.finite, last_numbers, block.kv)
        block.numbers, good = self.steps.kernels["tally"](*arguments)
        alike = self.steps.ranks_alike and all(lists.finite_checks.all_asked for lists in all_lists)
        columns = None
        if self.steps.columns_of_all_ranks:
            columns = (kept & block.held_mask).unflatten(0, (-1, block.kv)).any(1)
        return tally_gathered_later(self.heads, block.numbers, good, columns, alike=alike)

    def _merges(self, decisions: list[_Decision], counts: ArrivingNumbers | None) -> list[Merges]:
        """What leaving entries add to others.

        Args:
            counts: of staying entries; None if not known yet.
        """
        if self.steps.rules.merge is None:
            return []
        results = [self._merged(decision, counts) for decision in decisions]
        merges = [result for result in results if result is not None]
        self._take_up(decisions, merges)
        return merges

    def _merged(self, decision: _Decision, counts: ArrivingNumbers | None) -> Merges | None:
        """The merge of some lists; None if no entry leaves, or the policy merges none."""
        steps, lists, evaluation = self.steps, decision.lists, decision.evaluation
        merge = steps.rules.merge
        most = self._most(lists, counts)
        if merge is None or evaluation is None or most <= 0:
            return None
        frame = evaluation.frame
        states = {name: lists.part(x) for name, x in self.block.merge_states.items()}
        # `most` is that of all ranks, whose lists may have more columns.
        arguments = (decision.kept, steps.merge_updates, states, min(most, decision.kept.shape[1]))
        merging = Merging.begun(merge, evaluation, *arguments).finished()
        vectors = [frame.vectors[name] for name in merge.apply]
        return Merges(merging, [x for x in vectors if isinstance(x, Entries)], lists)

    def _most(self, lists: ListsAtOnce, counts: ArrivingNumbers | None) -> int:
        """Upper bound of the entries that leave a list; for one layer the host reads the number."""
        if lists.layer is not None and counts is not None:
            return counts.read()[lists.request].dropped[lists.layer]
        block, rule, fewest_kept = self.block, self.rule, 0
        if isinstance(rule, Ends) and rule.score is None:
            rows = [row for memory in self.memories for row in self.steps.rows(memory.prompt)]
            fewest_kept = min(map(sum, rows))
        most = max(block.widest) - fewest_kept
        if block.steps_since_cut is None or not lists.cut:
            return most
        # A list that was cut by this rule before loses no more entries than have come since.
        return min(block.steps_since_cut, most)

    def _take_up(self, decisions: list[_Decision], merges: list[Merges]) -> None:
        """Takes over the merge's states of the layers that have merged."""
        block = self.block
        states_before, all_lists = block.merge_states, [decision.lists for decision in decisions]
        by_place = {result.lists.place: result for result in merges}
        if not states_before or not by_place:
            return
        states_after = [
            by_place[lists.place].states(states_before, block.kv) if lists.place in by_place
            else {name: lists.part(value) for name, value in states_before.items()}
            for lists in all_lists
        ]  # fmt: skip
        block.merge_states = {
            name: _together(all_lists, [states[name] for states in states_after])
            for name in states_before
        }


def _together(all_lists: list[ListsAtOnce], values: list[Value]) -> Value:
    """The lists' values as one value of all lists, undefined where absent."""
    values = [replace(x, mask=None, mask_axes=()) for x in values]
    if len(all_lists) == 1 and all_lists[0].layer is None:
        return values[0]
    return per_list(
        values, [lists.count for lists in all_lists], all_lists[0].inputs.block.held_mask.device
    )


def _per_entry(x: Value) -> torch.Tensor:
    """A state of entries as [B * L * G, C, M], C numbers of each entry."""
    rows = x.tensor.movedim(x.axes.index("token"), -1)
    return rows.reshape(len(rows), math.prod(rows.shape[1:-1]), rows.shape[-1])


def _with_entries(x: Value, rows: torch.Tensor) -> Value:
    """A state as before, with the numbers [B * L * G, C, M'] of the entries that there are now."""
    sizes = [size for axis, size in zip(x.axes, x.tensor.shape, strict=True) if axis != "token"]
    data = rows.reshape(*sizes, rows.shape[-1]).movedim(-1, x.axes.index("token"))
    return Value(data, x.axes, finite=x.finite)


def _as_reported(x: Value, node: Node) -> Value:
    """A reported value, without the axis of lists if the `let` is one number of the layer."""
    return x if {"kv", "token"} & {*node.type.axes, *x.axes[1:]} else without_heads(x)
