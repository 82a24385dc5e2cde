"""Moving keys against rotating unrotated keys to the new position, as complex numbers."""

import pytest
import torch
from kvpolicy.kernels.entries.rotate import rotate


def rope(x, position, inv_freq, interleaved):
    """Rows [M, D] rotated to positions [M] in float64: each pair is multiplied by exp(i angle)."""
    pairs = inv_freq.shape[0]
    x = x.double()
    out = x.clone()
    for i in range(pairs):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        angle = position.double() * inv_freq[i].double()
        turned = torch.complex(x[:, a], x[:, b]) * torch.polar(torch.ones_like(angle), angle)
        out[:, a], out[:, b] = turned.real, turned.imag
    return out


def frequencies(pairs):
    return 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / max(pairs, 1))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("size", "pairs"), [(2, 1), (3, 1), (64, 32), (64, 16), (128, 64), (5, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_equals_the_key_at_the_later_position(size, pairs, dtype, interleaved):
    generator = torch.Generator().manual_seed(size)
    inv_freq = frequencies(pairs)
    raw = torch.randn(17, size, generator=generator)
    position = torch.randint(0, 30000, (17,), generator=generator)
    shift = torch.randint(-100, 3000, (17,), generator=generator)
    shift[3] = 0
    at = rope(raw, position, inv_freq, interleaved)
    wanted = rope(raw, position + shift, inv_freq, interleaved)

    stored = at.to(dtype)
    got = rotate(stored, shift, inv_freq, interleaved=interleaved)

    assert got.dtype == dtype
    tolerance = {
        torch.float64: 1e-10,
        torch.float32: 1e-6,
        torch.float16: 4e-3,
        torch.bfloat16: 3e-2,
    }
    torch.testing.assert_close(got.double(), wanted, atol=tolerance[dtype], rtol=0)
    assert torch.equal(got[3], stored[3])
    assert torch.equal(got[:, 2 * pairs :], stored[:, 2 * pairs :])


def test_distances_are_what_attention_sees():
    """q.k after the move is q.k of a key nearer by that distance."""
    generator = torch.Generator().manual_seed(0)
    inv_freq = frequencies(8)
    raw_k, raw_q = torch.randn(2, 1, 16, generator=generator)
    k = rope(raw_k, torch.tensor([7]), inv_freq, False)
    q = rope(raw_q, torch.tensor([40]), inv_freq, False)
    near = rope(raw_k, torch.tensor([19]), inv_freq, False)
    moved = rotate(k, torch.tensor([12]), inv_freq)
    torch.testing.assert_close((moved * q).sum(), (near * q).sum(), atol=1e-12, rtol=0)
    assert abs(float((k * q).sum() - (near * q).sum())) > 0.1


def test_leading_axes_and_float32_frequencies():
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(2, 3, 5, 8, generator=generator)
    shift = torch.randint(0, 50, (2, 3, 5), generator=generator)
    inv_freq = frequencies(4).float()
    together = rotate(k, shift, inv_freq)
    for i in range(2):
        for g in range(3):
            assert torch.equal(together[i, g], rotate(k[i, g], shift[i, g], inv_freq))
    assert rotate(k[:, :, :0], shift[:, :, :0], inv_freq).shape == (2, 3, 0, 8)


def test_the_argument_is_not_changed():
    k = torch.ones(3, 4)
    rotate(k, torch.tensor([1, 2, 3]), frequencies(2))
    assert torch.equal(k, torch.ones(3, 4))


def test_wrong_arguments_are_named():
    k = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"shift: expected \[2, 3\], got \[3\]"):
        rotate(k, torch.zeros(3, dtype=torch.int64), frequencies(2))
    with pytest.raises(ValueError, match=r"inv_freq: expected \[<= 2\], got \[3\]"):
        rotate(k, torch.zeros(2, 3, dtype=torch.int64), frequencies(3))
