"""`split[layer]` in exact fractions, as the language defines it: reference and kernel."""

from __future__ import annotations

import math
import random
from ctypes import c_float

import pytest
import torch
from kvpolicy.dsl.ir import counts
from kvpolicy.kernels.scoring import split, split_triton
from kvpolicy.kernels.scoring.split_triton import LARGEST, LAYERS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = math.inf, math.nan


def divided(total, weights, maxima, *, cascade=False):
    on_device = torch.tensor(weights, dtype=torch.float64, device=DEVICE)
    if isinstance(maxima, list):
        maxima = torch.tensor(maxima, dtype=torch.int64, device=DEVICE)
    made = [m.split(total, on_device, maxima, cascade=cascade) for m in (split, split_triton)]
    assert all(x.dtype == torch.float64 for x in made)
    assert torch.equal(*made)
    return made[0].tolist()


def expected(total, weights, maxima, *, cascade=False):
    if isinstance(maxima, int):
        maxima = [maxima] * len(weights)
    return counts.split(total, [float(x) for x in weights], maxima, cascade=cascade)


@pytest.mark.parametrize(
    ("total", "weights", "maxima"),
    [
        (7, [0, 0, 0], None),
        (6, [INF, 1, INF], None),
        (6, [NAN, 1, 1], None),
        (6, [-5, 1, 1], None),
        (0, [1, 2], 5),
        (100, [1, 1, 1, 1], None),  # shares are whole: float64 alone could miss them
        (99, [1 / 3] * 9, None),
        (9, [1.0, 0.9, 0.6, 0.02], 4),
        (30, [20.0, 5.0, 2.0], [12, 3, 0]),
        (100, [5.0, 1.0], [3, 4]),  # more than all together take
        (LARGEST, [1.0] * 32, None),
        (LARGEST, [2.0**-149, 2.0**127, 1.0, 3 * 2.0**-140], None),
        (LARGEST, [2.0**-149, 2.0**-148, 3 * 2.0**-149], None),
        (1000, [1e39, 1.0], None),  # infinite as a float32
        (1000, [1e-60, 1.0], None),  # 0 as a float32
        (5, [3.0], 4),
        (LARGEST + 1, [1.0, 2.0], None),
        (2**40, [3.0, 1.0, 2.0], [2**39, 5, 2**40]),
        (5 * LAYERS, [float(i % 7) for i in range(LAYERS + 1)], 11),
    ],
)
@pytest.mark.parametrize("cascade", [False, True])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # 1e39, in the interpreter
def test_corners(total, weights, maxima, cascade):
    wanted = expected(total, weights, maxima, cascade=cascade)
    assert divided(total, weights, maxima, cascade=cascade) == wanted


@pytest.mark.parametrize("seed", range(40))
def test_random_weights(seed):
    rnd = random.Random(seed)
    layers = rnd.choice([1, 2, 28, 32, 33, 80])
    small = [float(rnd.randrange(5)) for _ in range(layers)]
    wide = [rnd.random() * 2.0 ** rnd.randrange(-60, 60) for _ in range(layers)]
    weights = rnd.choice([small, wide, [rnd.random() ** 4 for _ in range(layers)]])
    total = rnd.randrange(rnd.choice([50, 4000, LARGEST]))
    maxima = rnd.choice([None, rnd.randrange(1, 300), [rnd.randrange(200) for _ in range(layers)]])
    cascade = layers < 33 and rnd.random() < 0.3
    wanted = expected(total, weights, maxima, cascade=cascade)
    assert divided(total, weights, maxima, cascade=cascade) == wanted


def test_shares_next_to_whole_numbers():
    # A weight one unit in the last place of float32 below or above the whole share.
    for direction in (-INF, INF):
        third = c_float(1 / 3).value
        near = math.nextafter(third, direction)
        step = c_float(third + (third - near) * 2.0**29).value
        weights = [third, step, third]
        assert divided(3 * 10**6, weights, None) == expected(3 * 10**6, weights, None)


@pytest.mark.parametrize("module", [split, split_triton])
def test_wrong_arguments(module):
    weights = torch.ones(3, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match=r"total: expected 0 or more, got -1"):
        module.split(-1, weights, None)
    with pytest.raises(ValueError, match=r"weights: expected float64 \[L\], got torch.float32"):
        module.split(1, weights.float(), None)
    with pytest.raises(ValueError, match=r"maxima: expected int64 \[3\], got torch.int64 \[2\]"):
        module.split(1, weights, torch.ones(2, dtype=torch.int64, device=DEVICE))
