"""Compaction of all layers: the reference against copies one by one, Triton against it."""

import pytest
import torch
from kvpolicy.kernels.entries import compact_layers as reference
from kvpolicy.kernels.entries import compact_layers_triton, compact_within

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHARES = {"none": 0.0, "few": 0.05, "half": 0.5, "all": 1.0}


def bits(x):
    """The stored bits: NaN equals NaN, and -0 is not 0."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])


class Case:
    """A pool of NaN with numbers only in the prompt's slots."""

    def __init__(self, layers, kv_heads, size, length, dtype, share, seed=0, spare=0):
        generator = torch.Generator().manual_seed(seed + length)
        self.kept = torch.rand(layers, kv_heads, length, generator=generator) < share
        self.kept[layers // 2, kv_heads - 1] = False  # an empty list between others
        counts = self.kept.sum(2)
        used = (counts + kv_heads - 1) // kv_heads
        self.first_page = (used.flatten().cumsum(0) - used.flatten()).view(layers, kv_heads).int()
        needed = -(-int(used.sum()) // layers) + spare
        order = torch.randperm(length + needed + 3, generator=generator)
        self.prompt, self.private = order[:length], order[length : length + needed].int()
        self.storage = torch.full(
            (layers, 2, len(order), kv_heads, size), float("nan"), dtype=dtype
        )
        rows = torch.randn(layers, 2, length, kv_heads, size, generator=generator)
        self.storage[:, :, self.prompt] = rows.to(dtype)

    def run(self, function, **knobs):
        arguments = [self.storage.clone(), self.prompt, self.kept, self.private, self.first_page]
        arguments = [each.to(DEVICE) for each in arguments]
        function(*arguments, **knobs)
        return arguments[0].cpu()


def one_by_one(case):
    storage = case.storage.clone()
    layers, _, padded, kv_heads, size = storage.shape
    entries = storage.view(-1, size)
    for layer in range(layers):
        for head in range(kv_heads):
            for j, position in enumerate(case.kept[layer, head].nonzero()[:, 0].tolist()):
                page = int(case.first_page[layer, head]) + j // kv_heads
                row = (page % layers) * 2 * padded + int(case.private[page // layers])
                target = row * kv_heads + j % kv_heads
                source = (layer * 2 * padded + int(case.prompt[position])) * kv_heads + head
                for value in (0, padded * kv_heads):
                    entries[target + value] = entries[source + value]
    return storage


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("layers", "kv_heads", "length"), [(1, 1, 1), (3, 2, 63), (2, 3, 20)])
def test_reference_equals_copying_one_by_one(layers, kv_heads, length, share):
    case = Case(layers, kv_heads, 5, length, F32, SHARES[share])
    got = case.run(reference.compact_layers)
    assert torch.equal(bits(got), bits(one_by_one(case)))
    changed = int((~got.isnan()).all(-1).sum()) - int((~case.storage.isnan()).all(-1).sum())
    assert changed == 2 * int(case.kept.sum())


CASES = [
    # layers, kv_heads, size, length, dtype, share
    (2, 2, 64, 0, F32, "all"),
    (2, 1, 64, 1, F16, "all"),
    (3, 2, 80, 63, BF16, "half"),
    (2, 3, 96, 63, F32, "all"),
    (1, 8, 128, 1000, BF16, "few"),
    (2, 2, 128, 1000, F16, "half"),
    (2, 8, 256, 63, BF16, "all"),
    (2, 1, 64, 4097, F32, "few"),
    (1, 4, 80, 4097, BF16, "few"),
    (3, 2, 64, 1000, BF16, "none"),
    (3, 2, 80, 63, E4M3, "half"),
    (1, 8, 7, 130, E5M2, "few"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "kv_heads", "size", "length", "dtype", "share"), CASES)
@pytest.mark.parametrize("part", [64, 4096])
def test_triton_equals_reference(layers, kv_heads, size, length, dtype, share, part):
    case = Case(layers, kv_heads, size, length, dtype, SHARES[share], spare=1)
    got = case.run(compact_layers_triton.compact_layers, part=part)
    assert torch.equal(bits(got), bits(case.run(reference.compact_layers)))


def test_lists_may_begin_anywhere():
    """Later lists before earlier ones, with unused pages between."""
    case = Case(2, 2, 8, 40, F32, 0.5)
    case.first_page = torch.tensor([[30, 0], [15, 45]])
    case.private = torch.arange(30) + 40
    case.storage = torch.cat([case.storage[:, :, :40], torch.zeros(2, 2, 31, 2, 8)], dim=2)
    case.prompt = torch.randperm(40)
    got = case.run(compact_layers_triton.compact_layers)
    assert torch.equal(bits(got), bits(one_by_one(case)))
    assert torch.equal(bits(got), bits(case.run(reference.compact_layers)))


@pytest.mark.parametrize(
    "function", [reference.compact_layers, compact_layers_triton.compact_layers]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_may_be_columns_of_a_table(function, dtype):
    case = Case(2, 2, 8, 40, F32, 0.5)
    wanted = case.run(function)
    case.prompt, case.private = (
        torch.stack([x, torch.zeros_like(x)], 1).to(dtype)[:, 0]
        for x in (case.prompt, case.private)
    )
    assert torch.equal(bits(case.run(function)), bits(wanted))


def test_what_has_no_page_is_not_written():
    """If the reference raises, Triton writes nothing outside the private pages."""
    case = Case(2, 2, 8, 40, F32, 1.0)
    enough = case.private
    case.private = enough[:-3]
    with pytest.raises(ValueError, match=r"private_slots: expected \[>= 60\] pages, got 54"):
        case.run(reference.compact_layers)
    got = case.run(compact_layers_triton.compact_layers)
    inside = torch.zeros(case.storage.shape[2], dtype=torch.bool)
    inside[case.private.long()] = True
    assert torch.equal(bits(got[:, :, ~inside]), bits(case.storage[:, :, ~inside]))
    case.private = enough
    whole = case.run(reference.compact_layers)
    assert torch.equal(bits(got[:, :, inside]), bits(whole[:, :, inside]))


@pytest.mark.parametrize(
    "function", [reference.compact_layers, compact_layers_triton.compact_layers]
)
@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, torch.zeros(2, 1, 9, 2, 4), r"storage: expected contiguous \[L, 2, padded, G, D\]"),
        (1, torch.zeros(3), r"prompt_slots: expected int32 or int64 \[S\], got torch.float32 \[3"),
        (2, torch.ones(2, 2, 3), r"kept: expected bool \[2, 2, 3\], got torch.float32 \[2, 2, 3"),
        (3, torch.zeros(3, 1).int(), r"private_slots: expected int32 or int64 \[S\], got torch.i"),
        (4, torch.zeros(2, 3).int(), r"first_page: expected \[2, 2\], got \[2, 3\]"),
    ],
)
def test_wrong_arguments_are_named(function, place, change, message):
    arguments = [
        torch.zeros(2, 2, 9, 2, 4),
        torch.arange(3),
        torch.ones(2, 2, 3, dtype=torch.bool),
        torch.arange(3, 9).int(),
        torch.zeros(2, 2, dtype=torch.int32),
    ]
    arguments[place] = change
    with pytest.raises(ValueError, match=message):
        function(*arguments)


@pytest.mark.parametrize("dtype", [F32, F16, BF16, E4M3], ids=str)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("layers", "kv_heads", "length"), [(1, 1, 1), (3, 2, 63), (2, 3, 20)])
def test_within_the_prompts_own_slots_the_same_is_found(layers, kv_heads, length, share, dtype):
    """Apart and within leave the same entries in the pages; what is no page stays as it was."""
    apart = Case(layers, kv_heads, 5, length, dtype, SHARES[share], spare=0)
    within = Case(layers, kv_heads, 5, length, dtype, SHARES[share], spare=0)
    needed = len(apart.private)
    if needed > length:
        pytest.skip("more pages than slots: a page for each of few entries")
    for private in (within.prompt[:needed], within.prompt[torch.randperm(length)[:needed]]):
        within.private = private.int()
        total = int(within.kept.sum())
        arguments = [within.prompt, within.kept, total, within.private, within.first_page]
        storage = within.storage.clone().to(DEVICE)
        moved = [each if isinstance(each, int) else each.to(DEVICE) for each in arguments]
        compact_within.compact_within(storage, *moved)
        found, expected = storage.cpu(), one_by_one(apart)
        assert torch.equal(bits(read(within, found)), bits(read(apart, expected)))
        others = torch.ones(found.shape[2], dtype=torch.bool)
        others[within.private.long()] = False
        assert torch.equal(bits(found[:, :, others]), bits(within.storage[:, :, others]))


def read(case, storage):
    """[2, E, D] what the pages of all lists hold, in order."""
    layers, _, padded, kv_heads, size = storage.shape
    entries, targets = storage.view(-1, size), []
    for (layer, head), first in zip(
        torch.cartesian_prod(torch.arange(layers), torch.arange(kv_heads)).view(-1, 2).tolist(),
        case.first_page.flatten().tolist(),
        strict=True,
    ):
        for j in range(int(case.kept[layer, head].sum())):
            page = first + j // kv_heads
            row = (page % layers) * 2 * padded + int(case.private[page // layers])
            targets.append(row * kv_heads + j % kv_heads)
    targets = torch.tensor(targets, dtype=torch.int64)
    return torch.stack([entries[targets], entries[targets + padded * kv_heads]])
