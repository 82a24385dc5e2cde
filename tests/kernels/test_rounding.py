"""Rounding to narrow floats: Triton as torch, and torch once."""

import pytest
import torch
import triton
import triton.language as tl
from kvpolicy.kernels.entries import rounding
from kvpolicy.kernels.entries.rounding_triton import rounded, widened

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F64, F32 = torch.float64, torch.float32
NARROW = [torch.float16, torch.bfloat16, *rounding.FLOAT8]


@triton.jit
def _rounded(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    made = rounded(tl.load(x + at, mask=at < n), out.dtype.element_ty)
    tl.store(out + at, made, mask=at < n)


@triton.jit
def _widened(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, widened(tl.load(x + at, mask=at < n)), mask=at < n)


def by_triton(kernel, x, dtype):
    out = torch.zeros(x.shape, dtype=dtype, device=DEVICE)
    kernel[(triton.cdiv(x.numel(), 1024),)](x.to(DEVICE), out, x.numel(), BLOCK=1024)
    return out.cpu()


def every(dtype):
    """All numbers of a narrow dtype."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def same(a, b):
    """Whether two tensors are equal, signs of zero included, NaN as NaN."""
    a, b = a.double(), b.double()
    bits = (a == b) & (a.signbit() == b.signbit())
    return bool((bits | (a.isnan() & b.isnan())).all())


def between(dtype):
    """Numbers of a narrow dtype, ties between neighbours, and numbers close to ties."""
    numbers = every(dtype).double()
    numbers = numbers[numbers.isfinite()].unique()
    ties = (numbers[1:] + numbers[:-1]) / 2
    largest = numbers[-1] + (numbers[-1] - numbers[-2]) * torch.tensor([0.49, 0.5, 0.51, 1.0, 9e3])
    near = [ties * (1 + by) for by in (0, 2.0**-40, -(2.0**-40), 2.0**-20, -(2.0**-20))]
    odd = torch.tensor([float("inf"), float("nan"), -0.0, 1e-30])
    x = torch.cat([numbers, *near, largest, odd])
    return torch.cat([x, -x])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("source", [F64, F32])
@pytest.mark.parametrize("dtype", NARROW)
def test_triton_rounds_as_torch(dtype, source):
    x = between(dtype).to(source)
    assert same(by_triton(_rounded, x, dtype), rounding.rounded(x, dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_every_number_is_widened_exactly(dtype):
    x = every(dtype)
    assert same(by_triton(_widened, x, F32), x)
    assert same(rounding.rounded(x.float(), dtype), x)


@pytest.mark.parametrize("dtype", NARROW)
def test_to_the_nearest_once(dtype):
    """By definition: the nearest representable number; of two, the even one."""
    numbers = every(dtype).double()
    numbers = numbers[numbers.isfinite()].unique()
    # Zero is there twice; the bits of a number say whether it is even.
    even = torch.arange(len(numbers)) % 2 == int((numbers < 0).sum()) % 2
    x = between(dtype)
    x = x[(x.abs() <= numbers[-1])]
    above = torch.searchsorted(numbers, x).clamp(1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    upper = (high - x < x - low) | ((high - x == x - low) & even[above])
    assert bool((rounding.rounded(x, dtype).double() == torch.where(upper, high, low)).all())


def test_what_is_too_large_for_e4m3_becomes_its_largest():
    x = torch.tensor([449.0, 1e30, -1e30, float("inf")], dtype=F64)
    assert rounding.rounded(x, torch.float8_e4m3fn).tolist() == [448.0, 448.0, -448.0, 448.0]
