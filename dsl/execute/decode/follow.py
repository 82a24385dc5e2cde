"""Takes lists of a block through decode steps: all lists at once, or those of one layer.

Nothing leaves between folds, so at a fold states can advance through all pending steps, from their
queries: keys and values are still cached, and each step leaves out entries after its token.

All lists are evaluated as KV heads of one layer if a list's values depend on it alone, or on lists
of its layer. Otherwise, or if that takes too much memory, layers are evaluated one by one.

Dimensions: B requests, L layers, H query heads, G KV heads, M columns of a block, T steps, W last
queries, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.ends import Ends, end_of
from kvpolicy.dsl.execute.decode.keep_stages import KeepStage
from kvpolicy.dsl.execute.decode.lists import LastQueries, RequestBlock
from kvpolicy.dsl.execute.layer.across import known_before
from kvpolicy.dsl.execute.layer.evaluate import Evaluation, alone, spread
from kvpolicy.dsl.execute.layer.generated import Generated
from kvpolicy.dsl.execute.operations.leaves import table_of_layers
from kvpolicy.dsl.execute.planned.steps import Steps
from kvpolicy.dsl.execute.tensors.checks import FiniteChecks
from kvpolicy.dsl.execute.tensors.heads import Heads
from kvpolicy.dsl.execute.tensors.kernels import Entries, Keys
from kvpolicy.dsl.execute.tensors.values import (
    PER_ENTRY,
    Frame,
    Step,
    Value,
    aligned,
    as_tensor,
    sent,
)
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node


@dataclass(frozen=True)
class StepInputs:
    """The data of T decode steps of B requests.

    Attributes:
        block: with the entries of the steps; its states are at first those before the steps.
        prompts: [B], tokens; generated: [B], decode steps so far, these included; step_count: T.
        k, v: of all lists; None where nothing reads them.
        q: [B * L * H, T, D], or the last of these, as far as they are read; None where none are.
        last_queries: the last queries, the steps' included; None where no step reads earlier ones.
        heads: `steps.heads`, joined.
    """

    bound: Bound
    steps: Steps
    block: RequestBlock
    prompts: Sequence[int]
    generated: Sequence[int]
    step_count: int
    k: Entries | None
    v: Entries | None
    q: torch.Tensor | None
    last_queries: LastQueries | None
    heads: Heads

    @cached_property
    def per_list_values(self) -> dict[Node, Value]:
        """Node -> number of the host per list, where requests or layers differ; sent at once."""
        by_node = {}
        _, per_list = self.steps.numbers(self.steps.rule(self.prompts[0]))
        for node in per_list:
            numbers = [
                number
                for prompt, generated in zip(self.prompts, self.generated, strict=True)
                for number in self.steps.host_numbers(node, prompt, generated)
            ]
            if any(number != numbers[0] for number in numbers):
                repeats = self.block.layers * len(self.prompts) // len(numbers)
                by_node[node] = [number for number in numbers for _ in range(repeats)]
        if not by_node:
            return {}
        data = sent(
            torch.tensor(list(by_node.values()), dtype=torch.float64), self.block.held_mask.device
        )
        pairs = zip(by_node, data.repeat_interleave(self.block.kv, 1).unbind(0), strict=True)
        return {
            node: Value(
                x.bool() if node.type.kind == "truth" else x, ("kv",),
                finite=all(map(math.isfinite, by_node[node])),
            )
            for node, x in pairs
        }  # fmt: skip


class ListsAtOnce:
    """Lists that are evaluated at once.

    Args:
        request: place in the block.
        layer: from 0, among the layers here; None: all lists of all requests.

    Attributes:
        rows: of these lists in the block; first_column: theirs.
        cut: whether each list has been cut to at most the number of entries that its rule keeps.
        finite_checks: whether the model's tensors are finite, per list.
    """

    def __init__(self, inputs: StepInputs, request: int = 0, layer: int | None = None) -> None:
        self.inputs, self.request, self.layer = inputs, request, layer
        self.rows, self.first_column = slice(0, len(inputs.block.held_mask)), 0
        if layer is not None:
            self.rows, self.first_column = inputs.block.rows_of(request, layer)
        self.cut = False
        self.finite_checks = FiniteChecks()
        # Sent with the next exchange.
        if inputs.heads.divided and inputs.block.finite is not None:
            self.finite_checks.extend([inputs.block.finite[self.rows]])

    @property
    def place(self) -> tuple[int, int | None]:
        """The request and layer."""
        return self.request, self.layer

    @property
    def count(self) -> int:
        """Number of lists."""
        return self.rows.stop - self.rows.start

    @property
    def finite(self) -> torch.Tensor | None:
        """Bool per list, see `FiniteChecks`: whether what was read is finite; None: nothing was."""
        heads, total = self.inputs.heads, self.inputs.bound.shape.kv_heads
        if heads.divided and self.finite_checks.all_asked:
            return self.finite_checks.everywhere(heads, self.count, total)
        return self.finite_checks.here(self.count)

    def advanced(self) -> dict[str, Value]:
        """Name -> state after the steps."""
        inputs = self.inputs
        steps, number = inputs.steps, inputs.step_count
        if steps.at_once:
            frame = self._frame(0, steps=number)
            evaluation = self._evaluation(frame, steps.advancing, self._before())
            return evaluation.states_of(steps.updates)
        states = self._before(number)
        for newer in reversed(range(number)):
            evaluation = self._evaluation(self._frame(newer), steps.advancing, states)
            states = evaluation.states_of(steps.updates)
        return states

    def deciding(self) -> Evaluation:
        """The evaluation of the last step, after its states have advanced."""
        states = {name: self.part(x) for name, x in self.inputs.block.states.items()}
        evaluation = self._evaluation(self._frame(0), self.inputs.steps.leaving, states)
        return replace(evaluation, after=dict(states))

    def best(self, evaluation: Evaluation, rules: Sequence[Ends]) -> torch.Tensor:
        """The ends of lists and the best of the rest, bool [B * L * G, M].

        Args:
            evaluation: of the last step, of all lists.
            rules: [B], all with the same score.
        """
        score, present = None, None
        if rules[0].score is not None:
            score, present = self._competing(rules[0].score, evaluation)
        self.cut = present is None
        return self._by_place(self.inputs.steps.keep, rules, evaluation, score, present)

    def _top(self, node: Node, evaluation: Evaluation) -> Value | None:
        """The operation `top`, where it takes the first or last entries."""
        ends = end_of(self.inputs.bound, node)
        if ends is None:
            return None
        return self._chosen(self._by_place(node, [ends] * len(self.inputs.prompts), evaluation))

    def _then(self, node: Node, evaluation: Evaluation) -> Value | None:
        """The operations `or` and `fill`, where they are a `KeepStage`."""
        stage, held = KeepStage.of(node), self.inputs.block.held_mask
        if stage is None:
            return None
        selected = evaluation.tensor(stage.taken, PER_ENTRY)
        score, present = self._competing(stage.score, self._narrowed(stage, evaluation))
        number = self._number_of(stage, evaluation)
        kernel = self.inputs.steps.kernels["then"]
        return self._chosen(kernel(selected, score, present, held, number, in_all=stage.in_all))

    def _narrowed(self, stage: KeepStage, evaluation: Evaluation) -> Evaluation:
        """An evaluation of a score for which ranks exchange only tokens that compete."""
        frame, span = evaluation.frame, None
        if frame.heads.divided:
            span = stage.competing(self.inputs.bound, self.inputs.prompts)
        if span is None:
            return evaluation
        start, stop = (max(frame.tokens - distance, 0) for distance in span)
        # A copy of `known`: other nodes may read more tokens.
        frame = replace(frame, wanted=slice(min(start, stop), stop))
        return replace(evaluation, frame=frame, known=dict(evaluation.known))

    def _competing(
        self, node: Node, evaluation: Evaluation
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A score per list and column, and where it is present; None: at all entries."""
        x = evaluation.value(node)
        score = spread(x, PER_ENTRY, evaluation.frame)
        if x.mask is None or x.mask is self.inputs.block.held_mask:
            return score, None
        return score, aligned(x.mask, x.mask_axes, PER_ENTRY).expand(score.shape)

    def _number_of(self, stage: KeepStage, evaluation: Evaluation) -> torch.Tensor:
        """float64 [N], the number of a stage; made once per block if steps do not change it."""
        node, ends, static = stage.number, self.inputs.block.ends, self.inputs.bound.static
        if node.op == "floor" and not stage.in_all and static.needs(node) is None:
            (node,) = node.args  # the kernel rounds it down
        constant = static.follows(node, "prompt")
        if constant and node in ends:
            return ends[node]
        data = as_tensor(evaluation.value(node).data, evaluation.frame.device).double().reshape(-1)
        if constant:
            ends[node] = data
        return data

    def _chosen(self, kept: torch.Tensor) -> Value:
        """The set of kept entries as a value."""
        return Value(
            kept,
            PER_ENTRY,
            self.inputs.block.held_mask,
            PER_ENTRY,
            zero_where_absent=True,
            finite=True,
        )

    def _by_place(
        self,
        node: Node,
        rules: Sequence[Ends],
        evaluation: Evaluation,
        score: torch.Tensor | None = None,
        present: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Result of the kernel "best", whose `limits` are made once for a block.

        Args:
            node: selects entries by their place; rules: [B], its rule for each request.
            score, present: from `_competing`; without a score only the ends stay.
        """
        block = self.inputs.block
        if node not in block.ends:
            block.ends[node] = self._limits(rules, evaluation)
        limits, kernel = block.ends[node], self.inputs.steps.kernels["best"]
        kept: torch.Tensor = kernel(score, present, block.held_mask, limits)
        return kept

    def _limits(self, rules: Sequence[Ends], evaluation: Evaluation) -> torch.Tensor:
        """int64 [N, 3], `limits` of the kernel "best"; N is 1, B, B * L or B * L * G."""
        inputs = self.inputs
        block, pairs = inputs.block, zip(rules, inputs.prompts, strict=True)
        all_rows = [rule.rows(inputs.bound, prompt, inputs.steps.layers) for rule, prompt in pairs]
        if any(len(rows) > 1 for rows in all_rows):
            all_rows = [rows if len(rows) > 1 else rows * block.layers for rows in all_rows]
        rows = [row for request_rows in all_rows for row in request_rows]
        rows = rows[:1] if all(row == rows[0] for row in rows) else rows
        limits = sent(torch.tensor(rows), block.held_mask.device)
        data_nodes = rules[0].of_data(inputs.bound)
        if data_nodes:
            limits = limits.repeat_interleave(len(block.held_mask) // len(rows), 0)
        for place, node in data_nodes.items():
            data_limits = inputs.steps.kernels["whole"](evaluation.value(node).tensor.double())
            # Where the rule does not hold, the row says that all entries stay.
            limits[:, place] = torch.maximum(limits[:, place], data_limits)
        return limits

    def part(self, x: Value, newer: int = 0) -> Value:
        """A value of the block, cut to these lists, without the last `newer` columns."""
        if self.layer is None and not newer:
            return x

        def columns(tensor: torch.Tensor, dim: int) -> torch.Tensor:
            return tensor.narrow(
                dim, self.first_column, tensor.shape[dim] - self.first_column - newer
            )

        return x.along("kv", lambda tensor, dim: tensor[self.rows]).along("token", columns)

    def _before(self, newer: int = 0) -> dict[str, Value]:
        """The states before the steps; without new entries whose first value is not known.

        Args:
            newer: number of last columns to leave out of all states.
        """
        inputs = self.inputs
        initial, states = inputs.steps.initial_values, inputs.block.states
        return {
            name: self.part(x, max(newer, inputs.step_count if math.isnan(initial[name]) else 0))
            for name, x in states.items()
        }

    def _evaluation(
        self, frame: Frame, generated: Generated | None, before: Mapping[str, Value]
    ) -> Evaluation:
        inputs = self.inputs
        block, of_all_lists = inputs.block, self.layer is None
        budget = None
        if block.budgets is not None:
            budget = Value(block.budgets[self.rows], ("kv",))
        own_operations = {
            "position": self._position,
            "uniform": self._uniform,
            "head_table": self._head_table,
            "top": self._top,
            "or": self._then,
            "fill": self._then,
        }
        return Evaluation(
            frame, inputs.steps.updates, before, budget=budget, generated=generated,
            known=dict(inputs.per_list_values) if of_all_lists else {},
            decided={name: self.part(x) for name, x in block.decided.items()},
            across_layers=alone if of_all_lists else known_before,
            own_operations=own_operations if of_all_lists else {},
        )  # fmt: skip

    def _frame(self, newer: int, steps: int | None = None) -> Frame:
        """The frame of the step that `newer` steps follow, or of all `steps` at once."""
        inputs, block = self.inputs, self.inputs.block
        columns = slice(self.first_column, block.width - newer)
        tokens = columns.stop - columns.start
        uncut = self.layer is None and not newer  # keeps the tensor: masks are told by identity
        whole = block.held_mask
        held: torch.Tensor | None = whole if uncut else whole[self.rows, columns]
        if self.layer is None:
            # Columns stand for positions: only the order of entries and queries matters.
            positions = inputs.steps.places(block.width, block.held_mask.device)[columns]
        else:
            row = self.request * block.layers + self.layer
            positions = block.positions[row, columns]
            # Where ranks exchange values, these have the same axes on each of them.
            apart = inputs.heads.divided and not inputs.steps.ranks_alike
            held = None if block.alike[row] and not apart else held
        vectors: dict[str, Keys] = {
            name: Entries(
                entries.pool,
                entries.ids[self.rows, columns],
                None if entries.scale is None else entries.scale[self.rows],
            )
            for name, entries in (("key", inputs.k), ("value", inputs.v))
            if entries is not None
        }
        prompt = inputs.prompts[self.request]
        number = max(1, inputs.bound.step_queries(prompt)) if steps is None else steps
        q, places = self._queries(number, newer, steps=steps is not None)
        if q is not None:
            vectors["query"] = q
        places = positions[-number:] if places is None else places
        return Frame(
            inputs.bound, tokens, block.held_mask.device, self.count, prompt,
            layer=inputs.steps.layers[self.layer or 0], layered=self.layer is None,
            vectors=vectors, positions=positions, held_mask=held,
            step=Step(inputs.generated[self.request] - newer, places, steps or 1),
            kernels=inputs.steps.kernels, finite_checks=self.finite_checks, heads=inputs.heads,
        )  # fmt: skip

    def _queries(
        self, number: int, newer: int, *, steps: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The `number` queries before the last `newer` ones, and their positions.

        With all lists at once columns stand for positions. None: the frame's last positions.

        Args:
            steps: take the queries of these steps alone.
        """
        q, last_queries, places = self.inputs.q, self.inputs.last_queries, None
        if q is None:
            return None, None
        first, end = 0, q.shape[1] - newer
        if last_queries is not None and not steps:
            q = last_queries.queries
            first, end = 0, q.shape[1] - newer
            if self.layer is None:
                places = self._columns(last_queries.positions[:, max(first, end - number) : end])
            else:
                row = self.request * self.inputs.block.layers + self.layer
                first = q.shape[1] - last_queries.lengths[row]
                places = last_queries.positions[row, max(first, end - number) : end]
        if self.layer is not None:
            group = self.inputs.bound.shape.group
            q = q[self.rows.start * group : self.rows.stop * group]
        return q[:, max(first, end - number) : end], places

    def _columns(self, positions: torch.Tensor) -> torch.Tensor:
        """int64 [B * L, W], the last column that queries at `positions` see."""
        return (
            torch.searchsorted(self.inputs.block.positions, positions.contiguous(), right=True) - 1
        )

    def _position(self, node: Node, evaluation: Evaluation) -> Value:
        """The operation `position`; -1 in front of a layer's first entry."""
        block = self.inputs.block
        return Value(
            block.positions.repeat_interleave(block.kv, 0).double(), PER_ENTRY, finite=True
        )

    def _head_table(self, node: Node, evaluation: Evaluation) -> Value:
        """The operation `head_table`."""
        x = table_of_layers(node, self.inputs.steps.layers, evaluation.frame)
        requests = len(self.inputs.prompts)
        return x.along("kv", lambda data, dim: torch.cat([data] * requests, dim))

    def _uniform(self, node: Node, evaluation: Evaluation) -> Value:
        """The operation `uniform`."""
        block, seed = self.inputs.block, counts.seed(evaluation.frame.number(node.args[0]))
        generated = sent(torch.tensor(list(self.inputs.generated)), block.held_mask.device)
        steps, total = self.inputs.steps, self.inputs.bound.shape.kv_heads
        arguments = (seed, block.positions, generated, total, steps.layers.start)
        data = steps.heads.part(steps.kernels["draws"](*arguments), 0)
        return Value(data, PER_ENTRY, finite=True)
