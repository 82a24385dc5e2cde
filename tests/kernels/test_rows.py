"""Rows taken out and put back: the reference against Python, Triton against the reference."""

import pytest
import torch
from kvpolicy.kernels.entries import rows as reference
from kvpolicy.kernels.entries import rows_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def bits(x):
    return x.contiguous().view(BITS[x.element_size()])


def made(length, generator):
    """Tensors of several shapes and dtypes; five, so more than one launch takes."""
    hidden = torch.randn(length, 200, generator=generator).to(torch.bfloat16)
    residual = torch.randn(length, 3, 100, generator=generator)
    residual[::3] = float("nan")
    positions = torch.randint(0, 2**40, (length,), generator=generator)
    flags = torch.rand(length, 2, generator=generator) < 0.5
    turns = torch.randn(length, 2, dtype=torch.complex128, generator=generator)
    tensors = [hidden, residual, positions, flags, turns]
    return [each.to(DEVICE) for each in tensors]


@pytest.mark.parametrize("module", [reference, rows_triton])
@pytest.mark.parametrize(("length", "number"), [(1, 1), (63, 20), (63, 0), (0, 0), (1000, 40)])
def test_equals_one_at_a_time(module, length, number):
    generator = torch.Generator().manual_seed(length)
    tensors = made(length, generator)
    rows = torch.randperm(length, generator=generator)[:number].to(DEVICE)
    knobs = {"block": 128} if module is rows_triton else {}

    taken = module.take_rows(tensors, rows, **knobs)
    others = [torch.flip(each, (0,)) for each in taken]
    written = [each.clone() for each in tensors]
    module.put_rows(written, rows, others, **knobs)

    for tensor, own, other, now in zip(tensors, taken, others, written, strict=True):
        assert own.dtype == tensor.dtype
        assert own.shape == (number, *tensor.shape[1:])
        wanted = tensor.clone()
        for place, row in enumerate(rows.tolist()):
            assert torch.equal(bits(own[place : place + 1]), bits(tensor[row : row + 1]))
            wanted[row] = other[place]
        assert torch.equal(bits(now), bits(wanted))


@pytest.mark.parametrize("module", [reference, rows_triton])
@pytest.mark.parametrize("places", [[], [3], [5, 0, 2]])
def test_a_subset_of_the_rows(module, places):
    tensors = made(9, torch.Generator().manual_seed(1))
    rows, subset = (torch.tensor(x, device=DEVICE).long() for x in ([7, 0, 3, 8, 2, 5], places))
    taken = module.take_rows(tensors, rows, subset)
    written, wanted = ([x.clone() for x in tensors] for _ in range(2))
    module.put_rows(written, rows, [x.flip(0) for x in taken], subset)
    reference.put_rows(wanted, rows[subset], [x.flip(0) for x in taken])
    for own, other in zip(taken, reference.take_rows(tensors, rows[subset]), strict=True):
        assert torch.equal(bits(own), bits(other))
    for own, other in zip(written, wanted, strict=True):
        assert torch.equal(bits(own), bits(other))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_any_number_of_tensors(count):
    generator = torch.Generator().manual_seed(count)
    tensors = made(9, generator)[:count]
    rows = torch.tensor([7, 0, 3], device=DEVICE)
    got = rows_triton.take_rows(tensors, rows)
    assert len(got) == count
    for a, b in zip(got, reference.take_rows(tensors, rows), strict=True):
        assert torch.equal(bits(a), bits(b))


def test_a_row_may_be_taken_twice():
    x = torch.arange(12.0, device=DEVICE).view(4, 3)
    (got,) = rows_triton.take_rows([x], torch.tensor([2, 2, 0], device=DEVICE))
    assert got.tolist() == [[6, 7, 8], [6, 7, 8], [0, 1, 2]]


def test_tensors_that_do_not_lie_together():
    x = torch.arange(24.0, device=DEVICE).view(4, 6)[:, ::2]
    rows = torch.arange(8, device=DEVICE)[1::3] // 2
    assert torch.equal(rows_triton.take_rows([x], rows)[0], x[rows])
    with pytest.raises(ValueError, match=r"tensors\[0\]: expected a contiguous tensor"):
        rows_triton.put_rows([x], rows, [x[rows]])


@pytest.mark.parametrize("module", [reference, rows_triton])
def test_wrong_arguments_are_named(module):
    x, rows = torch.zeros(3, 2), torch.tensor([1])
    with pytest.raises(ValueError, match=r"rows: expected int64 \[m\], got torch.int32 \[1\]"):
        module.take_rows([x], rows.int())
    with pytest.raises(ValueError, match=r"tensors: expected one length, got \[3, 2\]"):
        module.take_rows([x, x[:2]], rows)
    with pytest.raises(ValueError, match=r"sources: expected 1 tensors, got 2"):
        module.put_rows([x], rows, [x[:1], x[:1]])
    with pytest.raises(ValueError, match=r"sources\[0\]: expected torch.float32 \[1, 2\], got tor"):
        module.put_rows([x], rows, [x[:1].double()])
