"""What binding a policy claims of what it will keep, held against what is kept.

Dimensions: L layers, G KV heads, N tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.bounds import Bounds, max_entries
from kvpolicy.dsl.bind.entries import known_counts
from kvpolicy.dsl.bind.kept import keep_of
from kvpolicy.dsl.bind.lengths import lengths
from kvpolicy.dsl.data.result import Result
from kvpolicy.dsl.execute.planned.steps import Steps
from kvpolicy.kernels.table import REFERENCE


def assert_claims(bound: Bound, prompt: int, result: Result) -> None:
    """Checks every claim for a result of a prompt of N tokens."""
    for claim in CLAIMS:
        claim(bound, prompt, result)


def no_more_is_kept_than_promised(bound: Bound, prompt: int, result: Result) -> None:
    """Per KV head, per layer and in total."""
    bounds = Bounds(bound, prompt)
    most, counts = bounds.kept, [own.sum(1).tolist() for own in result.kept]
    total = sum(map(sum, counts))
    for layer, own in enumerate(counts):
        assert max(own) <= most.head[layer], f"layer {layer}: {own}, not {most.head[layer]} each"
        assert sum(own) <= most.layer[layer], f"layer {layer}: {own}, not {most.layer[layer]} in it"
    assert total <= most.total == max_entries(bound, prompt), (
        f"{total} entries are kept, at most {most.total} were promised"
    )
    if bounds.is_exact(keep_of(bound.lowered.prefill)):
        assert total == most.total, f"{total} entries are kept, not {most.total}"


def numbers_of_entries_are_known(bound: Bound, prompt: int, result: Result) -> None:
    numbers = known_counts(bound, prompt)
    if numbers is not None:
        assert [set(own.sum(1)) for own in result.kept] == [{number} for number in numbers]


def so_many_tokens_reach_a_layer(bound: Bound, prompt: int, result: Result) -> None:
    reached, claimed = _reached(bound, prompt, result), lengths(bound, prompt)
    for (least, most), number in zip(claimed, reached, strict=True):
        assert least <= number <= most, f"{reached} tokens reach the layers, not {claimed}"


def _reached(bound: Bound, prompt: int, result: Result) -> list[int]:
    """[L] tokens at each layer, in the pass whose entries are kept."""
    deeper, layers = result.propagated, bound.shape.layers
    if deeper is None:
        deeper = {}
    elif not isinstance(deeper, dict):
        if bound.restarts:
            return [len(deeper)] * layers
        deeper = {result.selected_layer: deeper}
    reached = [prompt]
    for layer in range(layers - 1):
        reached.append(len(deeper[layer]) if layer in deeper else reached[-1])
    return reached


def lists_grow_where_nothing_leaves(bound: Bound, prompt: int, result: Result) -> None:
    before = [own.sum(1).tolist() for own in result.kept]
    for number, counts in enumerate(_counts(result), 1):
        if not bound.leaves_at(number, prompt):
            grown = [[count + 1 for count in own] for own in before]
            assert counts == grown, f"step {number}: {counts} from {before}"
        before = counts


def sizes_stay(bound: Bound, prompt: int, result: Result) -> None:
    """Lists that all lost entries to a lasting budget have the same size after later folds."""
    if bound.folded.decode is None:
        return
    steps, stays = Steps(bound, report=False, kernels=REFERENCE), None
    before = [own.sum(1).tolist() for own in result.kept]
    for number, counts in enumerate(_counts(result), 1):
        if bound.leaves_at(number, prompt):
            assert stays in (None, counts), f"step {number}: {counts} instead of {stays}"
            pairs = [x for own in zip(counts, before, strict=True) for x in zip(*own, strict=True)]
            cut = all(count <= earlier for count, earlier in pairs)
            stays = counts if stays or (cut and steps.keeps_size(prompt, counts)) else None
        before = counts


def _counts(result: Result) -> list[list[list[int]]]:
    """[T][L][G] entries after each step."""
    return [[[len(own) for own in layer] for layer in step.kept] for step in result.steps]


CLAIMS: tuple[Callable[[Bound, int, Result], None], ...] = (
    no_more_is_kept_than_promised, numbers_of_entries_are_known, so_many_tokens_reach_a_layer,
    lists_grow_where_nothing_leaves, sizes_stay,
)  # fmt: skip
