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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from kvpolicy.dsl.bind.ends import Ends
from kvpolicy.dsl.execute.decode.follow import ListsAtOnce, StepInputs
from kvpolicy.dsl.execute.decode.lists import (
    Counts,
    Folded,
    LastQueries,
    RequestBlock,
    Tallied,
    joined_block,
    listed,
    padded,
    tally_gathered_later,
    without_heads,
)
from kvpolicy.dsl.execute.decode.memory import Memory
from kvpolicy.dsl.execute.layer.choice import Choice, Rows, shift_of
from kvpolicy.dsl.execute.layer.evaluate import Evaluation, spread
from kvpolicy.dsl.execute.layer.merge import Merging
from kvpolicy.dsl.execute.tensors.kernels import Entries
from kvpolicy.dsl.execute.tensors.values import OF_HEADS, OF_LISTS, Value, aligned
from kvpolicy.dsl.ir.nodes import Node

# From bool [B * L * G, M], the entries of each list, to the keys and values of all lists.
Read = Callable[[torch.Tensor], tuple[Entries, Entries]]
# From a layer and `there` [G, M] or None to its keys and values [G, M, D].
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
            return self.merging.of_some(*self.lists.inputs.block.where(request, layer))
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
        """bool [B * L * G, M], the entries of `there` that stay."""
        return self.folded.staying

    @property
    def block(self) -> RequestBlock:
        """The block as if no entry had left."""
        return self.folded.block

    @property
    def there(self) -> torch.Tensor:
        """bool [B * L * G, M], all entries before some leave."""
        return self.block.there

    def merge(self, proceed: torch.Tensor) -> None:
        """Adds leaving entries to staying ones in the pool; to be called before any entry moves.

        Args:
            proceed: bool [B, P]; a request with a false value is not changed.
        """
        for each in self.merges:
            each.write(proceed)

    def choices(self, request: int, read: ReadLayer, *, slots: bool) -> list[Choice]:
        """What stays of a request at each layer; its entries in the pool must not have changed.

        Args:
            read: from a layer and `there` [G, M] or None to its keys and values [G, M, D]; called
                when merged rows are read.
            slots: whether keys turn to their positions in the cache.
        """
        block, made = self.block, []
        for layer in range(block.layers):
            kept, there = (block.part(x, request, layer) for x in (self.kept, self.there))
            shift = shift_of(kept, there) if slots else None
            held = None if block.alike[request * block.layers + layer] else there
            choice = Choice(kept, shift, held)
            for each in self.merges:
                own = each.of(request, layer)
                if own is not None:
                    choice.merged = partial(_rows, own, partial(read, layer, held))
            made.append(choice)
        return made


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
        self.number, self.queries, self.read = len(positions[0]), queries, read
        first = memories[0]
        self.steps, self.bound, self.rule = first.steps, first.bound, first.steps.rule(first.prompt)
        looks = not first.not_finite  # if not, nothing leaves any more
        generated = first.generated + self.number
        self.leaves = looks and leaves and self.bound.leaves_at(generated, first.prompt)
        self.advances = looks and self.steps.advances
        self.heads = self.steps.heads.joined()
        windows = [self.bound.step_queries(each.prompt) for each in memories]
        self.window = max(windows) if looks else 0

    def go(self) -> Staying | None:
        block = self._extended(joined_block([each.block for each in self.memories]))
        inputs = self._inputs(block)
        if inputs.last_queries is not None and min(inputs.last_queries.lengths) < self.window:
            self.rule = None  # some layers have fewer queries than the window
        if self.advances:
            lists = self._lists(inputs, alike=self.steps.states_alike)
            states = [own.advanced() for own in lists]
            block.states = {name: _together(lists, [x[name] for x in states]) for name in states[0]}
            self._note(block, lists)
        if inputs.last_queries is not None:
            block.last_queries = inputs.last_queries.last(self.window)
        decisions: list[_Decision] = []
        staying = None
        if self.leaves:
            lists = self._lists(inputs, alike=self.rule is not None)
            decisions = [self._decided(own) for own in lists]
            staying = self._staying(block, replace(block), decisions)
        self.heads.agree()
        remembered = block if staying is None else staying.folded
        for place, memory in enumerate(self.memories):
            reported: dict[str, dict[int, Value]] = {name: {} for name in self.steps.report}
            for each in decisions:
                if each.lists.layer is not None and each.lists.request == place:
                    for name, x in each.reported.items():
                        reported[name][each.lists.layer] = x
            memory.followed(remembered, place, self.number, reported)
        return staying

    def _extended(self, old: RequestBlock) -> RequestBlock:
        """The block without the entries that have left, and with those of the steps."""
        number, lists = self.number, len(old.there)
        width = max(old.lengths) + number
        plain = {name: x for name, x in old.states.items() if x.axes in (OF_LISTS, OF_HEADS)}
        others = {name: x for name, x in old.states.items() if name not in plain}
        given = [x.tensor for x in plain.values()]
        initial = [self.steps.initial_values[name] for name in plain]
        if others:  # states that are gathered from the entries' old columns
            places = self.steps.places(old.width, old.there.device)
            given, initial = [*given, places.double().expand(lists, -1)], [*initial, 0.0]
        positions, there, made = self.steps.kernels["carry"](
            old.there, old.columns, old.positions, old.on_device, self.newest, given, initial,
            steps=number, width=width,
        )  # fmt: skip
        states = {
            name: Value(x, plain[name].axes, finite=True)
            for name, x in zip(plain, made, strict=False)
        }
        for name, x in others.items():
            states[name] = _moved(x, made[-1], number, self.steps.initial_values[name])
        lengths = [n + number for n in old.lengths]
        return replace(
            old,
            lengths=lengths,
            widest=[n + number for n in old.widest],
            positions=positions,
            there=there,
            states=states,
            used=None,
            columns=positions >= 0 if self.steps.columns_of_all_ranks else None,
            since=None if old.since is None else old.since + number,
        )

    def _inputs(self, block: RequestBlock) -> StepInputs:
        steps, k, v, q, last_queries = self.steps, None, None, None, None
        if (self.advances and steps.advancing_reads) or (self.leaves and steps.leaving_reads):
            k, v = self.read(block.there)
        if (
            self.window > 1
            or (self.advances and steps.advancing_reads_queries)
            or (self.leaves and steps.leaving_reads_queries)
        ):
            q = self.queries()
        if q is not None and self.window > 1:
            before = block.last_queries or LastQueries.none(q, block.positions)
            last_queries = before.and_then(q, block.positions)
        return StepInputs(
            self.bound, steps, block, [each.prompt for each in self.memories],
            [each.generated + self.number for each in self.memories], self.number, k, v, q,
            last_queries, self.heads,
        )  # fmt: skip

    def _lists(self, inputs: StepInputs, *, alike: bool) -> list[ListsAtOnce]:
        """All lists at once, or, where layers are not alike, those of each layer."""
        if alike:
            return [ListsAtOnce(inputs)]
        layers = range(inputs.block.layers)
        requests = range(len(self.memories))
        return [ListsAtOnce(inputs, request, layer) for request in requests for layer in layers]

    def _decided(self, own: ListsAtOnce) -> _Decision:
        """What stays of lists at the last step."""
        steps, evaluation = self.steps, own.deciding()
        if isinstance(self.rule, Ends):
            kept = own.best(evaluation, self._ends())
        else:
            frame = evaluation.frame
            kept = spread(frame.present(evaluation.value(steps.keep)), OF_LISTS, frame)
        reported = {name: _told(evaluation.value(x), x) for name, x in steps.report.items()}
        goes_on = None if steps.rules.merge is None else self._merging(own, evaluation)
        return _Decision(own, kept, goes_on, reported)

    def _ends(self) -> list[Ends]:
        """The rule of each request."""
        rules = [self.steps.rule(each.prompt) for each in self.memories]
        return [each for each in rules if isinstance(each, Ends)]

    def _merging(self, own: ListsAtOnce, evaluation: Evaluation) -> Evaluation:
        """The evaluation from which a merge goes on; nothing large is held."""
        frame = evaluation.frame
        stored = {
            name: Entries(x.pool, x.ids, x.scale)
            for name, x in frame.vectors.items()
            if isinstance(x, Entries)
        }
        k, v, there = stored["key"], stored["value"], frame.there
        if there is None:
            there = torch.ones_like(k.ids, dtype=torch.bool)
        # A merge reads keys and values, even if nothing else does.
        own.finite_checks.extend([self.steps.kernels["finite"](k.pool, v.pool, k.ids, there)])
        known = {
            name: x for name, x in evaluation.known.items() if not {"query", "dim"} & set(x.axes)
        }
        frame = replace(frame, vectors={**frame.vectors, **stored})
        return replace(evaluation, frame=frame, known=known)

    def _note(self, block: RequestBlock, lists: list[ListsAtOnce]) -> None:
        """Adds the lists' checks for NaN and infinity to the block's, on the device."""
        found = [own.finite for own in lists]
        if all(x is None for x in found):
            return
        each = [
            block.there.new_ones(own.number) if x is None else x
            for own, x in zip(lists, found, strict=True)
        ]
        finite = each[0] if len(each) == 1 else torch.cat(each)
        block.finite = finite if block.finite is None else finite & block.finite

    def _staying(
        self, block: RequestBlock, whole: RequestBlock, decisions: list[_Decision]
    ) -> Staying:
        """What stays and what is added to it.

        Args:
            whole: see `Folded`.
        """
        lists = [each.lists for each in decisions]
        at_once, before = self.rule is not None, block.numbers
        each = [padded(own.kept, 1, block.width, False) for own in decisions]
        kept = each[0] if len(each) == 1 else torch.cat(each)
        tallied = self._tallied(block, before, kept, lists)
        merges: list[Merges] = []
        if at_once:
            # The exchange of ranks for a merge of all lists takes the numbers along.
            read = [len(own.finite_checks.results) for own in lists]
            merges = self._merges(block, decisions, None)
            if read != [len(own.finite_checks.results) for own in lists]:
                tallied = self._tallied(block, before, kept, lists)
        of_all, good, columns = tallied()
        counts = Counts(of_all, block.requests, self.bound.shape.kv_heads)
        block.since = 0 if all(own.cut for own in lists) else None
        block.finite = None  # in `numbers` now; a request that is not finite loses nothing
        folded = Folded(block, kept, counts, columns, whole)
        if not at_once:
            # Merges layer by layer need the numbers: how many entries leave each layer.
            merges = self._merges(block, decisions, counts)
        merge, checks_counts = self.steps.rules.merge, before is not None
        # Merged keys would be rounded twice, before they turn and after.
        turns = merge is not None and "key" in merge.apply and self.bound.positions == "slots"
        proceed = good.view(block.requests, -1)
        return Staying(folded, proceed, checks_counts, not turns, merges)

    def _tallied(
        self,
        block: RequestBlock,
        before: torch.Tensor | None,
        kept: torch.Tensor,
        lists: list[ListsAtOnce],
    ) -> Callable[[], Tallied]:
        """Counts the staying entries of this rank's lists, and asks other ranks.

        See `tally_gathered_later`.

        Args:
            before: the numbers of the last fold; None at the first.
        """
        self._note(block, lists)
        given = (kept, block.there, block.finite, before, block.kv)
        block.numbers, good = self.steps.kernels["tally"](*given)
        alike = self.steps.ranks_alike and all(own.finite_checks.all_asked for own in lists)
        columns = None
        if self.steps.columns_of_all_ranks:
            columns = (kept & block.there).unflatten(0, (-1, block.kv)).any(1)
        return tally_gathered_later(self.heads, block.numbers, good, columns, alike=alike)

    def _merges(
        self, block: RequestBlock, decisions: list[_Decision], counts: Counts | None
    ) -> list[Merges]:
        """What leaving entries add to others.

        Args:
            counts: of staying entries; None if not known yet.
        """
        if self.steps.rules.merge is None:
            return []
        found = [self._merged(block, each, counts) for each in decisions]
        made = [own for own in found if own is not None]
        self._take_up(block, decisions, made)
        return made

    def _merged(
        self, block: RequestBlock, decision: _Decision, counts: Counts | None
    ) -> Merges | None:
        """The merge of some lists; None if no entry leaves, or the policy merges none."""
        steps, lists, evaluation = self.steps, decision.lists, decision.evaluation
        merge = steps.rules.merge
        most = self._most(block, lists, counts)
        if merge is None or evaluation is None or most <= 0:
            return None
        frame = evaluation.frame
        before = {name: lists.part(x) for name, x in block.merge_states.items()}
        # `most` is that of all ranks, whose lists may have more columns.
        given = (decision.kept, steps.merge_updates, before, min(most, decision.kept.shape[1]))
        made = Merging.begun(merge, evaluation, *given).finished()
        kept = [frame.vectors[name] for name in merge.apply]
        return Merges(made, [x for x in kept if isinstance(x, Entries)], lists)

    def _most(self, block: RequestBlock, lists: ListsAtOnce, counts: Counts | None) -> int:
        """Upper bound of the entries that leave a list; for one layer the host reads the number."""
        if lists.layer is not None and counts is not None:
            return counts.read()[lists.request].dropped[lists.layer]
        rule, least = self.rule, 0
        if isinstance(rule, Ends) and rule.score is None:
            rows = [row for each in self.memories for row in self.steps.rows(each.prompt)]
            least = min(map(sum, rows))
        most = max(block.widest) - least
        if block.since is None or not lists.cut:
            return most
        # A list that was cut by this rule before loses no more entries than have come since.
        return min(block.since, most)

    def _take_up(self, block: RequestBlock, decisions: list[_Decision], made: list[Merges]) -> None:
        """Takes over the merge's states of the layers that have merged."""
        before, lists = block.merge_states, [each.lists for each in decisions]
        merged = {each.lists.place: each for each in made}
        if not before or not merged:
            return
        after = [
            merged[each.place].states(before, block.kv) if each.place in merged
            else {name: each.part(x) for name, x in before.items()}
            for each in lists
        ]  # fmt: skip
        block.merge_states = {
            name: _together(lists, [own[name] for own in after]) for name in before
        }


def _together(lists: list[ListsAtOnce], values: list[Value]) -> Value:
    """The lists' values as one value of all lists, undefined where absent."""
    values = [replace(x, mask=None, mask_axes=()) for x in values]
    if len(lists) == 1 and lists[0].layer is None:
        return values[0]
    return listed(values, [own.number for own in lists], lists[0].inputs.block.there.device)


def _moved(x: Value, columns: torch.Tensor, number: int, first: float) -> Value:
    """A state that follows its entries, and begins for new ones.

    Args:
        columns: float64 [B * L * G, M], the column in which each entry was.
        number: number of new entries; first: their value.
    """
    if "token" not in x.axes:
        return x
    at, shape = x.axes.index("token"), list(x.tensor.shape)
    shape[at] = columns.shape[1]
    data = x.tensor.gather(at, aligned(columns.long(), OF_LISTS, x.axes).expand(shape))
    data.narrow(at, shape[at] - number, number).fill_(first)
    return Value(data, x.axes, finite=x.finite)


def _told(x: Value, node: Node) -> Value:
    """A reported value, without the axis of lists if the `let` is one number of the layer."""
    return x if {"kv", "token"} & {*node.type.axes, *x.axes[1:]} else without_heads(x)
