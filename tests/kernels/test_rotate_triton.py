"""Moving keys: Triton against complex numbers in float64, within its bound."""

import pytest
import torch
from kvpolicy.kernels.entries import rotate as reference
from kvpolicy.kernels.entries import rotate_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def frequencies(pairs):
    return 10000.0 ** (-torch.arange(pairs, dtype=F64) / max(pairs, 1))


def exact(k, shift, inv_freq, interleaved):
    """The moved keys in float64, and the allowed error."""
    pairs, size = inv_freq.shape[0], k.shape[-1]
    at = torch.arange(pairs)
    first, second = (2 * at, 2 * at + 1) if interleaved else (at, at + pairs)
    x = k.double()
    angle = shift[..., None].double() * inv_freq.double()
    turned = torch.complex(x[..., first], x[..., second]) * torch.polar(
        torch.ones_like(angle), angle
    )
    out, far = x.clone(), torch.zeros_like(x)
    out[..., first], out[..., second] = turned.real, turned.imag
    unit = 2.0**-53 if k.dtype == F64 else 2.0**-24
    both = x[..., first].abs() + x[..., second].abs()
    bound = (8 * unit + angle.abs() * 2.0**-52) * both
    far[..., first], far[..., second] = bound, bound
    info = torch.finfo(k.dtype)
    assert size == out.shape[-1]
    # Half a unit in the last place of what is rounded: at most eps / 2 of it, or half the least.
    half = torch.maximum(
        (out.abs() + far) * info.eps / 2, torch.tensor(info.smallest_normal / 2) * info.eps
    )
    return out, far + torch.where(far > 0, half, 0)


CASES = [
    # leading axes and rows, head size, pairs, dtype, interleaved, longest shift
    ((1,), 64, 32, F32, False, 100),
    ((63,), 80, 40, BF16, False, 100_000),
    ((2, 63), 96, 48, F16, True, 100_000),
    ((8, 40), 128, 64, BF16, False, 100_000),
    ((2, 2, 9), 256, 128, F32, True, 1_000_000),
    ((2, 63), 128, 32, F32, False, 100_000),
    ((3, 20), 80, 10, BF16, True, 3000),
    ((63,), 64, 32, F64, False, 100_000),
    ((1000,), 64, 32, F16, False, 131_072),
    ((4097,), 64, 16, BF16, False, 131_072),
    ((5,), 7, 0, F32, False, 9),
    ((2, 63), 80, 40, E4M3, False, 100_000),
    ((63,), 128, 32, E5M2, True, 3000),
    ((2, 0), 64, 32, F32, False, 9),
]


@pytest.mark.parametrize(("rows", "size", "pairs", "dtype", "interleaved", "longest"), CASES)
def test_within_its_bound(rows, size, pairs, dtype, interleaved, longest):
    generator = torch.Generator().manual_seed(size)
    k = torch.randn(*rows, size, generator=generator, dtype=F64).to(dtype)
    shift = torch.randint(-longest, longest + 1, rows, generator=generator)
    inv_freq = frequencies(pairs)
    wanted, far = exact(k, shift, inv_freq, interleaved)
    for rotate in (rotate_triton.rotate, reference.rotate):
        got = rotate(
            k.to(DEVICE), shift.to(DEVICE), inv_freq.to(DEVICE), interleaved=interleaved
        ).cpu()
        assert got.dtype == dtype
        assert got.shape == k.shape
        beyond = (got.double() - wanted).abs() > far
        assert not beyond.any(), f"{int(beyond.sum())} beyond the bound"
        assert torch.equal(got[..., 2 * pairs :].double(), k[..., 2 * pairs :].double())


def test_angles_in_float32_would_be_beyond_the_bound():
    """So the bound is sharp enough."""
    k, shift, inv_freq = torch.ones(1, 64), torch.tensor([99_999]), frequencies(32)
    wanted, far = exact(k, shift, inv_freq, False)
    angle = shift.float()[:, None] * inv_freq.float()
    wrong = torch.cat([angle.cos() - angle.sin(), angle.sin() + angle.cos()], -1)
    assert ((wrong.double() - wanted).abs() > far).any()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64, E4M3, E5M2])
@pytest.mark.parametrize("rotate", [reference.rotate, rotate_triton.rotate])
def test_rows_that_stay_are_unchanged(rotate, dtype):
    k = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    k[1, 2], k[1, 5], k[1, 7], k[2, 0] = float("inf"), -0.0, -float("inf"), float("nan")
    k, shift = k.to(dtype).to(DEVICE), torch.tensor([4, 0, 0], device=DEVICE)
    got = rotate(k, shift, frequencies(4).to(DEVICE))
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[k.element_size()]
    assert torch.equal(got[1:].view(bits), k[1:].view(bits))
    assert not torch.equal(got[0].double(), k[0].double())


def test_rows_that_do_not_lie_together_and_float32_frequencies():
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(9, 2, 16, generator=generator).transpose(0, 1)
    shift = torch.randint(0, 500, (9, 2), generator=generator).t()
    inv_freq = frequencies(8).float()
    strided = torch.stack([frequencies(8), torch.zeros(8, dtype=F64)], 1).to(DEVICE)[:, 0]
    assert torch.equal(
        rotate_triton.rotate(k.to(DEVICE), shift.to(DEVICE), strided),
        rotate_triton.rotate(k.to(DEVICE), shift.to(DEVICE), frequencies(8).to(DEVICE)),
    )
    for keys in (k, k.transpose(1, 2).contiguous().transpose(1, 2)):
        before = keys.clone()
        got = rotate_triton.rotate(keys.to(DEVICE), shift.to(DEVICE), inv_freq.to(DEVICE)).cpu()
        wanted, far = exact(keys, shift, inv_freq, False)
        assert ((got.double() - wanted).abs() <= far).all()
        assert torch.equal(keys, before)


@pytest.mark.parametrize("rotate", [reference.rotate, rotate_triton.rotate])
def test_wrong_arguments_are_named(rotate):
    k = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"k: expected \[\.\.\., M, D\], got \[4\]"):
        rotate(k[0, 0], torch.zeros((), dtype=torch.int64), frequencies(2))
    with pytest.raises(ValueError, match=r"shift: expected \[2, 3\], got \[3\]"):
        rotate(k, torch.zeros(3, dtype=torch.int64), frequencies(2))
    with pytest.raises(ValueError, match=r"inv_freq: expected \[<= 2\], got \[3\]"):
        rotate(k, torch.zeros(2, 3, dtype=torch.int64), frequencies(3))
