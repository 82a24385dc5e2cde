"""One request while it decodes: what it remembers, as a place in a block of requests.

A `Memory` holds no keys and no values; `follow_together` takes it through decode steps.

Dimensions: L layers, H query heads, G KV heads, M cached positions of a layer, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.execute.decode.lists import (
    Folded,
    FoldNumbers,
    LastQueries,
    Remembered,
    RequestBlock,
    padded,
    per_list,
)
from kvpolicy.dsl.execute.layer.choice import Held
from kvpolicy.dsl.execute.planned.steps import Steps
from kvpolicy.dsl.execute.prefill.finished import FinishedPrefill
from kvpolicy.dsl.execute.tensors.values import Value, as_tensor, union, without_heads


@dataclass(frozen=True)
class Known:
    """What the host knows of the entries that a prefill keeps.

    Attributes:
        held: per layer here, for the KV heads here.
        widest: largest number of positions that a layer keeps, on any rank.
    """

    held: Sequence[Held]
    widest: int

    @classmethod
    def after(cls, prefill: FinishedPrefill) -> Known:
        """The same of a finished prefill; the host waits for the device."""
        numbers = Held.of(torch.stack(prefill.kept), prefill.columns())
        widest = prefill.program.heads.per_rank(numbers[:, 0].max()).max()
        return cls(Held.each(numbers), int(widest))


class Memory:
    """What a request remembers while it decodes; tensors are not changed, so copies go on alone.

    Attributes:
        generated: number of decode steps so far.
        not_finite: whether the model's tensors held NaN or infinity; from then on nothing leaves.
            `read_numbers` finds it after the next fold.
        steps: what a decode step computes.
        reported: let -> layer -> value, at the layers where the last step computed it.
    """

    def __init__(self, bound: Bound, prompt: int, block: RequestBlock, steps: Steps) -> None:
        """
        Args:
            block: of this request alone.
        """
        self.bound, self.prompt, self.steps = bound, prompt, steps
        self.generated = 0
        self.not_finite = False
        self._block: Remembered = block
        self._place = 0
        self.reported: dict[str, dict[int, Value]] = {name: {} for name in steps.report}
        self._numbers: FoldNumbers | None = None

    @classmethod
    def after(cls, prefill: FinishedPrefill, known: Known | None = None) -> Memory | None:
        """The memory after a prefill whose entries are `merged`; None: nothing leaves.

        Args:
            known: what the host knows of kept entries; None: the host waits for the device.
        """
        bound, steps = prefill.program.bound, prefill.program.steps
        if steps is None:
            return None
        block = _remembered(prefill, steps, known or Known.after(prefill))
        memory = cls(bound, prefill.prompt, block, steps)
        memory.not_finite = prefill.not_finite
        return memory

    @property
    def block(self) -> tuple[Remembered, int]:
        """The block that holds what is remembered, and the request's place in it."""
        return self._block, self._place

    def joint_key(self, steps: int, *, leaves: bool) -> Hashable:
        """A key, equal for requests that can be taken through `steps` steps together.

        The host waits for numbers, see `read_numbers`.

        Args:
            leaves: whether entries may leave at the last step.
        """
        self.read_numbers()
        generated = self.generated + steps
        leaves = leaves and self.bound.leaves_at(generated, self.prompt)
        numbers = self.steps.joint_key(self.steps.rule(self.prompt), self.prompt, generated)
        return id(self.steps), self.not_finite, steps, leaves, numbers

    @property
    def width(self) -> int:
        """Number of cached positions of the longest layer, on any rank; after `read_numbers`."""
        return self._block.widest_of(self._place)

    def followed(
        self, block: Remembered, place: int, steps: int, reported: dict[str, dict[int, Value]]
    ) -> None:
        """Takes over the result of `steps` steps: block, place in it, and reported lets."""
        self.generated += steps
        self._block, self._place, self._numbers = block, place, None
        self.reported = reported

    def keeps_size(self, counts: Sequence[Sequence[int]]) -> bool:
        """As `Steps.keeps_size`, for counts after a step."""
        return self.steps.keeps_size(self.prompt, counts)

    def numbers_arrived(self) -> bool:
        """Whether `read_numbers` would not wait for the device; the same on all ranks."""
        if not isinstance(self._block, Folded):
            return True
        counts = self._block.counts
        if self.steps.heads.divided:
            return counts.numbers.device.type == "cpu"
        return counts.arrived()

    def read_numbers(self) -> FoldNumbers | None:
        """Reads how many entries left at the last steps; the host waits for the numbers.

        If the model's tensors were not finite, none have.

        Returns:
            The numbers; None if nothing could leave at the last steps.
        """
        if self._numbers is None and isinstance(self._block, Folded):
            self._numbers = self._block.counts.read()[self._place]
            if not self._numbers.finite:
                self.not_finite = True
                self._block, self._place = self._block.block.select([self._place]), 0
        return self._numbers

    def withdraw(self, *, finite: bool) -> None:
        """Keeps all entries that would have left at the last steps.

        Args:
            finite: whether the model's tensors were finite; if not, nothing leaves any more.
        """
        if isinstance(self._block, Folded):
            self._block, self._place = self._block.whole.select([self._place]), 0
        self._numbers = None
        self.not_finite |= not finite

    def numbers(self) -> FoldNumbers:
        """As `read_numbers`, after steps at which entries might leave.

        Raises:
            TypeError: nothing could leave.
        """
        numbers = self.read_numbers()
        if numbers is None:
            raise TypeError("nothing could leave at the last steps")
        return numbers

    def thresholds(self) -> dict[str, list[Value | None]]:
        """State of the merge -> its value at each layer, None where it has not begun."""
        merge = self.steps.rules.merge
        states = merge.states if merge is not None else {}
        return {
            name: [self._threshold(name, layer) for layer in range(len(self.steps.layers))]
            for name in states
        }

    def _threshold(self, name: str, layer: int) -> Value | None:
        block = self._block.block if isinstance(self._block, Folded) else self._block
        merge = self.steps.rules.merge
        x, (heads, _) = block.merge_states[name], block.rows_of(self._place, layer)
        if merge is None or not isinstance(x.data, torch.Tensor):
            return None  # no layer has merged
        threshold = replace(x, data=x.data[heads])
        if threshold.tensor.isnan().all():
            return None
        return threshold if "kv" in merge.states[name].type.axes else without_heads(threshold)


def _remembered(prefill: FinishedPrefill, steps: Steps, known: Known) -> RequestBlock:
    """The block of one request after its prefill, without the dropped entries."""
    bound, layers = prefill.program.bound, prefill.program.layers
    kv = prefill.program.heads.number(bound.shape.kv_heads)
    held_masks, positions, states = [], [], []
    per_layer = zip(layers, prefill.kept, prefill.columns(), known.held, strict=True)
    for layer, kept, columns, held in per_layer:
        places = prefill.reached(layer)
        kept_here = kept[:, places]
        # The positions in order; `nonzero` would wait for the device.
        indices = (~columns[places]).to(torch.uint8).argsort(stable=True)[: held.positions]
        positions.append(places[indices])
        held_masks.append(kept_here[:, indices])
        states.append({
            name: _chosen(value, indices)
            for name, value in prefill.states(layer).items()
            if name in steps.inherited
        })  # fmt: skip
    device, lengths = held_masks[0].device, [len(x) for x in positions]
    width = max(*lengths, 1)

    def all_layers(values: list[Value]) -> Value:
        return per_list(values, [kv] * len(values), device)

    all_held = torch.cat([padded(mask, 1, width, False) for mask in held_masks])
    block = RequestBlock(
        1, kv, lengths, [x.alike for x in known.held], [max(known.widest, 1)],
        torch.stack([padded(x, 0, width, -1) for x in positions]), all_held,
        {
            name: _as_wide(all_layers([layer_states[name] for layer_states in states]), width)
            for name in states[0]
        },
    )  # fmt: skip
    if steps.columns_of_all_ranks:
        block.columns = block.positions >= 0
    shape = bound.shape
    sizes = {"kv": len(all_held), "group": shape.group, "token": width, "dim": shape.head_dim}
    for name, initial in steps.initial_values.items():
        if name not in block.states and not math.isnan(initial):
            axes = union(("kv",), steps.updates[name].type.axes)
            size = [sizes[axis] for axis in axes]
            data = torch.full(size, initial, dtype=torch.float64, device=device)
            block.states[name] = Value(data, axes, finite=True)
    not_begun = Value(math.nan, finite=True)  # marks a state that has not begun
    merge_states = [prefill.merge_states(layer) if steps.merge_goes_on else {} for layer in layers]
    block.merge_states = {
        name: all_layers([layer_states.get(name, not_begun) for layer_states in merge_states])
        for name in steps.merge_updates
    }
    if prefill.not_finite:
        return block
    block.decided = {name: all_layers(values) for name, values in prefill.decided().items()}
    if steps.reads_budget:
        budgets = all_layers(prefill.budgets())
        block.budgets = as_tensor(budgets.data, device).double().expand(len(all_held))
    block.last_queries = _last_queries(prefill)
    return block


def _as_wide(x: Value, width: int) -> Value:
    """A state padded in front to `width` columns."""
    if "token" not in x.axes:
        return x
    return replace(x, data=padded(x.tensor, x.axes.index("token"), width, 0.0))


def _chosen(x: Value, indices: torch.Tensor) -> Value:
    """A state at the tokens with the indices `indices`."""
    data = x.tensor
    if "token" in x.axes:
        data = data.index_select(x.axes.index("token"), indices)
    return replace(x, data=data, mask=None, mask_axes=())


def _last_queries(prefill: FinishedPrefill) -> LastQueries | None:
    """The prompt's last queries; None where decode steps read none of them."""
    layers = prefill.program.layers
    tails = [prefill.last_queries(layer) for layer in layers]
    queries = [x for x in tails if x is not None]
    if not queries:
        return None
    lengths = [x.shape[1] for x in queries]
    positions = [prefill.reached(layer)[-n:] for layer, n in zip(layers, lengths, strict=True)]
    width = max(lengths)
    return LastQueries(
        torch.cat([padded(x, 1, width, 0.0) for x in queries]),
        torch.stack([padded(x, 0, width, -1) for x in positions]), lengths,
    )  # fmt: skip
