"""Requests of one policy taken through decode steps together, as one layer with B x L x G KV heads.

What their layers remember stands side by side in one `Block`, kept from fold to fold: of every
layer the newest entries are in the last columns, and nothing is in front of those of shorter ones.
Steps cost as many operations for many requests as for one; what a request gets does not depend on
the others, since no number of one list enters another's.

Only policies that do not compare layers, and for whose sums there are kernels, are taken so
(`Steps.rule`). One kernel decides for those whose `keep` takes the ends of a list and the best of
the rest (bind/ends.py), whatever their prompts; of others requests with equal numbers go together,
if `keep` reads no tensors of the model.

Dimensions: B requests, L layers, G KV heads, H query heads, M columns of a block, T steps, D head
size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from kvpolicy.dsl.bind.ends import Ends
from kvpolicy.dsl.execute.block import AXES, Block, Carried, Counts, carried
from kvpolicy.dsl.execute.decode import Memory
from kvpolicy.dsl.execute.evaluate import Evaluation, spread
from kvpolicy.dsl.execute.kernels import Entries
from kvpolicy.dsl.execute.layout import Choice, Rows, shift_of
from kvpolicy.dsl.execute.merge import Merging, merged_rows
from kvpolicy.dsl.execute.values import Frame, Value, aligned, sent
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node

# From bool [B * L * G, M], what each list holds, to its keys and values.
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
    """Takes the policy of B requests through T decode steps; entries may leave at the last only.

    What becomes of each is what `Memory.follow` makes of it alone. The host does not wait for the
    device, but for the numbers of the last fold. If it raises, nothing has changed.

    Args:
        memories: of requests whose `Memory.together` say the same.
        positions: [B][T] of the steps' tokens, which are all cached and follow each other.
        newest: int64 [B], the last of them, on the device.
        queries: makes [B * L * H, T, D], as `Memory.observe` takes them, or of the last steps those
            that the policy reads; asked for at most once.
        read: makes keys and values of the lists; asked for at most once.
        leaves: whether entries may leave at the last step, if the policy allows it.

    Returns:
        What stays; None if nothing may leave.
    """
    return _Following(memories, positions, newest, queries, read, leaves).go()


@dataclass(frozen=True)
class Merges:
    """What the leaving entries of B requests add to those that stay.

    Attributes:
        merging: of B * L * G KV heads.
        entries: keys or values, or both, that it changes, in their pool.
    """

    merging: Merging
    entries: list[Entries]


@dataclass(frozen=True)
class Staying:
    """What stays of the lists of B requests, in order.

    Attributes:
        proceed: bool [B, L], whether a request's numbers are finite: all of its are true.
        repeats: whether `proceed` says as well that as many entries of each list stay as at the
            last fold.
        merges: what leaving entries add to those that stay; None: nothing.
    """

    block: Block
    proceed: torch.Tensor
    repeats: bool
    merges: Merges | None = None

    @property
    def kept(self) -> torch.Tensor:
        """bool [B * L * G, M]."""
        return self.block.staying

    @property
    def there(self) -> torch.Tensor:
        """bool [B * L * G, M], what there was."""
        return self.block.there

    def merge(self, proceed: torch.Tensor) -> None:
        """Adds what leaves to what stays, where it lies in the pool; before anything moves.

        Args:
            proceed: bool [B, P]; nothing changes of requests of which one is false.
        """
        if self.merges is not None:
            for entries in self.merges.entries:
                self.merges.merging.write(entries, proceed)

    def choices(self, request: int, read: ReadLayer, *, slots: bool) -> list[Choice]:
        """What stays of a request, layer by layer, whose entries in the pool have not changed.

        Args:
            read: from a layer and `there` [G, M] or None to its keys and values [G, M, D]; asked
                when merged rows are.
            slots: keys turn to the positions that they have in the cache.
        """
        block, made = self.block, []
        for layer in range(block.layers):
            kept, there = (block.part(x, request, layer) for x in (self.kept, self.there))
            shift = shift_of(kept, there) if slots else None
            held = None if block.alike[request * block.layers + layer] else there
            merged = None
            if self.merges is not None:
                own = self.merges.merging.of_some(*block.where(request, layer))
                merged = partial(_rows, own, partial(read, layer, held))
            made.append(Choice(kept, shift=shift, there=held, merged=merged))
        return made


def _rows(merging: Merging, read: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Rows:
    return merged_rows(merging, *read())


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
        self.memories, self.first, self.newest = memories, memories[0], newest
        self.number, self.queries, self.read = len(positions[0]), queries, read
        self.steps, self.bound = self.first.steps, self.first.bound
        self.generated = self.first.generated + self.number
        rule = self.first.rule
        assert rule is not None
        self.rule = rule
        self.leaves = leaves and self.bound.leaves_at(self.generated, self.first.prompt)
        self.checks: list[torch.Tensor] = []

    def go(self) -> Staying | None:
        block, steps = self._extended(carried([each.block() for each in self.memories])), self.steps
        reads = steps.advances and steps.advancing_reads
        reads |= self.leaves and steps.leaving_reads
        frame = self._frame(block, reads)
        if steps.advances:
            block.states = self._advanced(block, frame)
        made = None
        if self.leaves:
            evaluation = self._evaluation(block, frame)
            block.kept = self._kept(block, evaluation)
            made = self._merges(block, evaluation)
        self._note(block)
        staying = self._counted(block, made) if self.leaves else None
        for place, memory in enumerate(self.memories):
            memory.followed(block, place, self.number)
        return staying

    def _extended(self, old: Carried) -> Block:
        """Entries that have left are forgotten, and those of the steps appended."""
        number = self.number
        width = max(old.lengths) + number
        fresh = self.steps.fresh
        positions, there, states = self.steps.kernels["carry"](
            old.kept, old.positions, old.used, self.newest,
            [old.states[name].tensor for name in fresh], list(fresh.values()),
            steps=number, width=width,
        )  # fmt: skip
        states = {
            name: replace(old.states[name], data=x, mask=None, mask_axes=())
            for name, x in zip(fresh, states, strict=True)
        }
        return Block(
            old.requests, old.kv, [n + number for n in old.lengths], old.alike, positions, there,
            states, old.budgets, old.finite, old.numbers, rule=old.rule,
        )  # fmt: skip

    def _frame(self, block: Block, reads: bool) -> Frame:
        k = v = q = places = None
        if reads:
            k, v = self.read(block.there)
            q = self.queries()
            # The order of the entries is enough to say which come after a query.
            places = self.steps.places(block.width, block.there.device)
        return Frame(
            self.bound, block.width, block.there.device, len(block.there),
            prompt=self.first.prompt, q=q, k=k, v=v, positions=places, there=block.there,
            generated=self.generated, kernels=self.steps.kernels, checks=self.checks,
            heads=block.kv,
        )  # fmt: skip

    def _advanced(self, block: Block, frame: Frame) -> dict[str, Value]:
        """The states after the steps."""
        if frame.q is not None:
            places = self.steps.places(block.width, block.there.device)
            frame = replace(frame, steps=self.number, query_positions=places[-self.number :])
        evaluation = Evaluation(
            frame, self.steps.updates, before=block.states, generated=self.steps.advancing
        )
        return evaluation.states_of(self.steps.updates.states)

    def _evaluation(self, block: Block, frame: Frame) -> Evaluation:
        """Of the last step, its states advanced."""
        if frame.q is not None:
            places = self.steps.places(block.width, block.there.device)
            frame = replace(frame, q=frame.q[:, -1:], query_positions=places[-1:])
        budget = None
        if block.budgets is not None and isinstance(self.rule, Node):
            budget = Value(block.budgets.double(), ("kv",), finite=True)
        return Evaluation(
            frame, self.steps.updates, before=block.states, after=dict(block.states),
            budget=budget, generated=self.steps.leaving,
            extra={"position": block.position, "uniform": partial(self._drawn, block)},
        )  # fmt: skip

    def _drawn(self, block: Block, node: Node, evaluation: Evaluation) -> Value:
        """The operation `uniform`."""
        seed = counts.seed(evaluation.frame.number(node.args[0]))
        generated = torch.tensor([each.generated + self.number for each in self.memories])
        generated = sent(generated, block.there.device)
        data = self.steps.kernels["draws"](seed, block.positions, generated, block.kv)
        return Value(data, AXES, finite=True)

    def _kept(self, block: Block, evaluation: Evaluation) -> torch.Tensor:
        """What the rule keeps, bool [B * L * G, M]."""
        rule, score, present = self.rule, None, None
        if isinstance(rule, Node):
            return evaluation.tensor(rule, AXES) & block.there
        if rule.score is not None:
            x = evaluation.value(rule.score)
            score = spread(x, AXES, evaluation.frame)
            if x.mask is not None and x.mask is not block.there:
                present = aligned(x.mask, x.mask_axes, AXES).expand(score.shape)
        if block.rule is None:
            block.rule = self._numbers(block, rule)
        kept: torch.Tensor = self.steps.kernels["best"](score, present, block.there, block.rule)
        return kept

    def _merges(self, block: Block, evaluation: Evaluation) -> Merges | None:
        """What leaving entries add to others; None where none leave, or they add nothing."""
        steps, frame = self.steps, evaluation.frame
        merge = None if steps.rules is None else steps.rules.merge
        rule, least = self.rule, 0
        if isinstance(rule, Ends) and rule.score is None:
            least = min(sum(rule.numbers(self.bound, each.prompt)) for each in self.memories)
        if merge is None or block.width <= least:
            return None
        k, v = frame.k, frame.v
        assert isinstance(k, Entries)
        assert isinstance(v, Entries)
        # A merge reads keys and values, whatever else does.
        self.checks.append(steps.kernels["finite"](k.pool, v.pool, k.ids, block.there))
        most = block.width - least
        made = Merging.of(merge, evaluation, block.staying, steps.merge_updates, {}, most)
        made.keep_links()
        entries = {"key": k, "value": v}
        return Merges(made, [entries[name] for name in merge.apply])

    def _numbers(self, block: Block, rule: Ends) -> torch.Tensor:
        """int64 [N, 3], the rule's numbers of all requests, or of all lists."""
        rules = [each.rule for each in self.memories]
        own = [
            each.numbers(self.bound, memory.prompt)
            for each, memory in zip(rules, self.memories, strict=True)
            if isinstance(each, Ends)
        ]
        if all(each == own[0] for each in own):
            own = own[:1]
        numbers = sent(torch.tensor(own), block.there.device)
        if rule.score is None or rule.budget is not None or block.budgets is None:
            return numbers
        ends = numbers[:, :2].repeat_interleave(len(block.budgets) // len(own), 0)
        return torch.cat([ends, block.budgets[:, None]], 1)

    def _note(self, block: Block) -> None:
        """Adds to what is known about NaN and infinity, without waiting for the device."""
        own = self.checks if block.finite is None else [*self.checks, block.finite]
        if len(own) > 2:
            own = [torch.stack(own).all(0)]
        if own:
            block.finite = own[0] if len(own) == 1 else torch.logical_and(*own)

    def _counted(self, block: Block, merges: Merges | None) -> Staying:
        numbers, good = self.steps.kernels["tally"](
            block.kept, block.there, block.finite, block.numbers, block.kv
        )
        repeats = block.numbers is not None
        block.numbers, block.counts = numbers, Counts(numbers, block.requests)
        block.finite = None  # the numbers say it; a request whose are not goes on alone
        return Staying(block, good.view(block.requests, -1), repeats, merges)
