"""Selection: the reference against sorting in Python, Triton against the reference."""

import pytest
import torch
from kvpolicy.kernels.scoring import select, select_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ABSENT = -(2**31)


def keys_of(kind, rows, size, generator):
    """Sort keys, int32 [rows, size]."""
    if kind == "random":
        keys = torch.randint(-(2**31), 2**31, (rows, size), generator=generator)
    elif kind == "scores":  # as a policy makes them: the bits of float32
        bits = torch.rand(rows, size, generator=generator).view(torch.int32)
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    elif kind == "ties":  # and only the last of four digits tells them apart
        keys = torch.randint(0, 3, (rows, size), generator=generator)
    else:
        keys = torch.full((rows, size), 7)
    keys = keys.to(torch.int32)
    absent = torch.rand(rows, size, generator=generator) < 0.2
    return keys.masked_fill(absent, ABSENT)


def by_definition(keys, numbers):
    chosen = torch.zeros(keys.shape, dtype=torch.bool)
    for row, number in enumerate(numbers):
        values = keys[row].tolist()
        order = sorted(range(len(values)), key=lambda at, v=values: (-v[at], at))
        there = [at for at in order if values[at] > ABSENT]
        chosen[row, there[: max(number, 0)]] = True
    return chosen


@pytest.mark.parametrize("kind", ["random", "scores", "ties", "equal"])
@pytest.mark.parametrize("size", [1, 63, 200])
def test_reference_equals_sorting(kind, size):
    generator = torch.Generator().manual_seed(size)
    numbers = [-3, 0, 1, size // 3, size - 1, size, size + 9, 2**31]
    keys = keys_of(kind, len(numbers), size, generator)
    wanted = by_definition(keys, numbers)
    assert torch.equal(select.top(keys, torch.tensor(numbers)[:, None]), wanted)
    for row, number in enumerate(numbers):
        assert torch.equal(select.top(keys[row : row + 1], number), wanted[row : row + 1])


CASES = [
    # size, block: rows of one program, or cut into parts of so many keys.
    (1, 2048),
    (63, 2048),
    (63, 8),
    (1000, 128),
    (2049, 512),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "scores", "ties", "equal"])
@pytest.mark.parametrize(("size", "block"), CASES)
def test_triton_equals_reference(kind, size, block):
    generator = torch.Generator().manual_seed(size)
    numbers = [-1, 0, 1, size // 3, size - 1, size, 2**31]
    keys = keys_of(kind, len(numbers), size, generator).to(DEVICE)
    number = torch.tensor(numbers, device=DEVICE)[:, None]
    # Few programs, so that a part has several blocks, and the last part fewer than the others.
    got = select_triton.top(keys, number, block=block, programs=3 * len(numbers))
    assert torch.equal(got, select.top(keys, number))


@pytest.mark.parametrize(("size", "block"), [(63, 8), (1000, 2048), (4097, 256)])
def test_one_known_number(size, block):
    generator = torch.Generator().manual_seed(size)
    for number in (-1, 0, 1, 16, size // 2, size, size + 1):
        keys = keys_of("ties", 1, size, generator).to(DEVICE)
        got = select_triton.top(keys, number, block=block, programs=5)
        assert torch.equal(got, select.top(keys, number))


def test_nothing_to_choose_from():
    for rows, size in ((0, 5), (3, 0)):
        keys = torch.zeros(rows, size, dtype=torch.int32, device=DEVICE)
        for number in (2, torch.full((rows, 1), 2, device=DEVICE)):
            for top in (select.top, select_triton.top):
                assert top(keys, number).shape == (rows, size)
    keys = torch.full((2, 9), ABSENT, dtype=torch.int32, device=DEVICE)
    assert not select_triton.top(keys, 4).any()


def test_rows_that_do_not_lie_together():
    generator = torch.Generator().manual_seed(0)
    keys = keys_of("ties", 6, 70, generator).to(DEVICE)[:, ::2]
    number = torch.arange(12, device=DEVICE).view(6, 2)[:, :1]
    assert torch.equal(select_triton.top(keys, number), select.top(keys, number))


@pytest.mark.parametrize("top", [select.top, select_triton.top])
def test_wrong_arguments_are_named(top):
    keys = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"keys: expected int32 \[R, n\], got torch.int64 \[2, 3\]"
    ):
        top(keys.long(), 1)
    with pytest.raises(ValueError, match=r"number: expected int64 \[2, 1\], got torch.int64 \[2\]"):
        top(keys, torch.tensor([1, 2]))
