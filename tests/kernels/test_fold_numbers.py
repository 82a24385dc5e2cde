"""`tally` and `carry`: references beside loops over entries, Triton beside them."""

import pytest
import torch
from kvpolicy.kernels.entries import carry, carry_triton, tally, tally_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TALLIES = [tally.tally, tally_triton.tally]
CARRIES = [carry.carry, carry_triton.carry]
SIZES = [(4, 2, 37), (3, 1, 20), (2, 3, 70), (6, 8, 1), (1, 5, 0)]  # S, G, M


def masks(layers, kv_heads, width, seed=0):
    generator = torch.Generator().manual_seed(seed + width)
    there = torch.rand(layers * kv_heads, width, generator=generator) < 0.8
    kept = torch.rand(layers * kv_heads, width, generator=generator) < 0.6
    if layers > 1:
        kept[:kv_heads] = kept[0] & there[:kv_heads].all(0)  # all heads alike
        there[:kv_heads] = there[0] | kept[:kv_heads]
    return kept, there


def on_device(*tensors):
    return [x if x is None else x.to(DEVICE) for x in tensors]


@pytest.mark.parametrize("counted", TALLIES)
@pytest.mark.parametrize(("layers", "kv_heads", "width"), SIZES)
def test_numbers_of_layers(counted, layers, kv_heads, width):
    kept, there = masks(layers, kv_heads, width)
    options = {} if counted is tally.tally else {"block": 16}
    numbers, good = counted(*on_device(kept, there, None, None), kv_heads, **options)
    assert good.all()
    for layer in range(layers):
        own = slice(layer * kv_heads, (layer + 1) * kv_heads)
        stays, held = (kept & there)[own], there[own]
        positions = sum(bool(column.any()) for column in stays.T)
        alike = all(torch.equal(each, stays[0]) for each in stays)
        wanted = [positions, int(alike), 1, *map(int, held.sum(1)), *map(int, stays.sum(1))]
        assert numbers[layer].tolist() == wanted


@pytest.mark.parametrize("counted", TALLIES)
def test_what_is_not_finite_or_not_expected_is_found(counted):
    kept, there = on_device(*masks(4, 3, 30))
    finite = torch.ones(12, dtype=torch.bool, device=DEVICE)
    finite[7] = False
    numbers, good = counted(kept, there, finite, None, 3)
    assert numbers[:, 2].tolist() == [1, 1, 0, 1]
    assert good.tolist() == [True, True, False, True]
    expected = numbers.clone()
    expected[:, :6] += 1  # only what is kept counts
    assert counted(kept, there, None, expected, 3)[1].all()
    expected[1, 8] += 1
    assert counted(kept, there, None, expected, 3)[1].tolist() == [True, False, True, True]
    assert counted(kept, there, finite, expected, 3)[1].tolist() == [True, False, False, True]


@pytest.mark.parametrize("counted", TALLIES)
def test_wrong_numbers_are_named(counted):
    kept, there = masks(2, 3, 9)
    for wrong, message in (
        ((kept[:5], there, None, None), r"kept: expected bool \[S \* 3, M\]"),
        ((kept, there[:, :4], None, None), r"holds: expected torch.bool \[6, 9\]"),
        ((kept, there, kept, None), r"finite: expected torch.bool \[6\]"),
        ((kept, there, None, kept), r"expected: expected torch.int64 \[2, 9\]"),
    ):
        with pytest.raises(ValueError, match=message):
            counted(*wrong, 3)


def carried(layers, kv_heads, width, states, requests, steps, extra, seed=0, *, more=False):
    """Arguments of `carry`, and the result by definition; `more`: columns without entries, too."""
    kept, there = masks(layers, kv_heads, width, seed)
    kept = kept & there
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randperm(500, generator=generator)[: layers * width].view(layers, width)
    positions = positions.sort(1).values
    values = [
        torch.randn(layers * kv_heads, 1, width, generator=generator, dtype=torch.float64)
        for _ in range(states)
    ]
    for value in values:
        number = value[:, 0]
        number[~kept & (number < 0)] = float("nan")  # of what no head keeps it is nothing
        number[kept] = number[kept].nan_to_num(1.0)
    fresh = [0.7 * i for i in range(states)]  # no numbers of 32 bits
    newest = torch.tensor([[600 + 10 * i, 7] for i in range(requests)])[:, 0]  # a column, too
    some = kept.view(layers, kv_heads, width).any(1)
    if more:
        some = some | (torch.rand(some.shape, generator=generator) < 0.3)
    used = torch.stack([some.sum(1), some.sum(1)], 1)[:, 1]  # a column of a table
    wide = int(used.max()) + steps + extra
    made = torch.full((layers, wide), -1)
    held = torch.zeros(layers * kv_heads, wide, dtype=torch.bool)
    later = [torch.zeros(layers * kv_heads, 1, wide, dtype=torch.float64) for _ in values]
    for layer in range(layers):
        columns = some[layer].nonzero()[:, 0].tolist()
        first = wide - steps - len(columns)
        for place, column in enumerate(columns, first):
            made[layer, place] = positions[layer, column]
            for row in range(layer * kv_heads, (layer + 1) * kv_heads):
                held[row, place] = kept[row, column]
                for old, new in zip(values, later, strict=True):
                    new[row, 0, place] = old[row, 0, column]
        for step in range(steps):
            end = int(newest[layer // (layers // requests)])
            made[layer, wide - 1 - step] = end - step
            own = slice(layer * kv_heads, (layer + 1) * kv_heads)
            held[own, wide - 1 - step] = True
            for new, value in zip(later, fresh, strict=True):
                new[own, 0, wide - 1 - step] = value
    given = (kept, some if more else None, positions, used, newest)
    return given, values, fresh, {"steps": steps, "width": wide}, (made, held, later)


@pytest.mark.parametrize("moved", CARRIES)
@pytest.mark.parametrize(("layers", "kv_heads", "width"), SIZES)
def test_numbers_of_an_entry_are_carried_as_of_more_lists(moved, layers, kv_heads, width):
    given, values, _, options, wanted = carried(layers, kv_heads, width, 3, 1, 4, 1)
    more = {} if moved is carry.carry else {"block": 16}
    several = torch.cat(values, 1)
    alone = [moved(*on_device(*given), on_device(x), [0.5], **options, **more) for x in values]
    made = moved(*on_device(*given), on_device(several), [0.5], **options, **more)
    assert torch.equal(made[0].cpu(), wanted[0])
    assert torch.equal(made[1].cpu(), wanted[1])
    for i, (*_, (own,)) in enumerate(alone):
        assert torch.equal(made[2][0][:, i : i + 1].nan_to_num(7.0), own.nan_to_num(7.0))


@pytest.mark.parametrize("moved", CARRIES)
@pytest.mark.parametrize("states", [0, 1, 2])
@pytest.mark.parametrize(("layers", "kv_heads", "width"), SIZES)
def test_what_stays_is_carried_on(moved, states, layers, kv_heads, width):
    sizes = ((1, 0, 1, False), (16, 5, layers, False), (0, 3, 1, True), (16, 5, layers, True))
    for steps, extra, requests, also in sizes:
        case = carried(layers, kv_heads, width, states, requests, steps, extra, more=also)
        given, values, fresh, options, wanted = case
        more = {} if moved is carry.carry else {"block": 16}
        made = moved(*on_device(*given), on_device(*values), fresh, **options, **more)
        assert torch.equal(made[0].cpu(), wanted[0])
        assert torch.equal(made[1].cpu(), wanted[1])
        for mine, its in zip(made[2], wanted[2], strict=True):
            assert torch.equal(mine.cpu().nan_to_num(7.0), its.nan_to_num(7.0))


@pytest.mark.parametrize("moved", CARRIES)
def test_wrong_memories_are_named(moved):
    given, values, fresh, options, _ = carried(4, 2, 30, 1, 2, 3, 0)
    kept, _, positions, used, newest = given
    for wrong, message in (
        ((kept.int(), None, positions, used, newest, values, fresh), r"kept: expected bool"),
        ((kept, kept, positions, used, newest, values, fresh), r"columns: expected torch.bool"),
        (
            (kept, None, positions[:3], used, newest, values, fresh),
            r"positions: expected torch.int64",
        ),
        (
            (kept, None, positions, used, newest[[0, 0, 1]], values, fresh),
            r"newest: .* a part of 4",
        ),
        (
            (kept, None, positions, used, newest, [kept], fresh),
            r"states\[0\]: expected torch.float64",
        ),
        (
            (kept, None, positions, used, newest, [values[0][:, :0]], fresh),
            r"states\[0\]: expected float64 \[S \* G, C, M\], C > 0",
        ),
        ((kept, None, positions, used, newest, values, []), r"fresh: expected 1 numbers, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            moved(*wrong, **options)
