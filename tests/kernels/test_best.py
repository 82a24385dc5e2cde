"""Entries that stay in lists: the reference beside its definition, Triton beside it."""

import math

import pytest
import torch
from kvpolicy.kernels.scoring import best as reference
from kvpolicy.kernels.scoring import best_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def by_definition(score, present, there, limits):
    """One list after the other, one entry after the other."""
    made = torch.zeros_like(there)
    share = len(there) // len(limits)
    for row in range(len(there)):
        first, last, budget = limits[row // share].tolist()
        own = there[row].nonzero()[:, 0].tolist()
        ends = {*own[:first], *own[max(len(own) - last, 0) :]}
        chosen = set(ends)
        if score is not None:
            free = [i for i in own if i not in ends]
            if len(own) <= max(budget, len(ends)) and len(free) <= max(budget - len(ends), 0):
                chosen |= set(own)
            scored = [i for i in free if present is None or present[row, i]]
            order = sorted(scored, key=lambda i: (-(score[row, i].float() + 0.0).item(), i))
            chosen |= set(order[: max(budget - len(ends), 0)])
        made[row, list(chosen)] = True
    return made


def random_case(seed, rows=6, width=70, groups=3):
    generator = torch.Generator().manual_seed(seed)
    score = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    score = (score * 2).round() / 2  # many are equal, some are -0
    score[torch.rand(score.shape, generator=generator) < 0.05] = math.inf
    score[torch.rand(score.shape, generator=generator) < 0.05] = -math.inf
    there = torch.rand(rows, width, generator=generator) < 0.7
    there[0], there[1] = False, True
    present = torch.rand(rows, width, generator=generator) < 0.8
    limits = torch.randint(0, 25, (groups, 3), generator=generator)
    limits[0, 2] = 200
    score[~(there & present)] = math.nan  # means nothing
    return score, present, there, limits


@pytest.mark.parametrize("best", [reference.best, best_triton.best])
@pytest.mark.parametrize("seed", range(6))
def test_lists_keep_what_the_definition_says(best, seed):
    score, present, there, limits = random_case(seed)
    every = score.nan_to_num(0.25)
    for given in ((score, present), (every, None), (None, None)):
        arguments = [x if x is None else x.to(DEVICE) for x in (*given, there, limits)]
        options = {"block": 32} if best is best_triton.best else {}
        made = best(*arguments, **options).cpu()
        assert torch.equal(made, by_definition(*given, there, limits))


@pytest.mark.parametrize("best", [reference.best, best_triton.best])
def test_numbers_of_every_list_and_huge_ones(best):
    score, present, there, _ = random_case(9)
    limits = torch.tensor(
        [[0, 0, 5], [1, 0, 4], [0, 0, 0], [2**40, 0, 3], [3, 2**40, 1], [2, 2, 2**40]]
    )
    made = best(*(x.to(DEVICE) for x in (score, present, there, limits))).cpu()
    assert torch.equal(made, by_definition(score, present, there, limits))


def test_rows_longer_than_a_block():
    score, present, there, limits = random_case(3, rows=2, width=2100, groups=1)
    limits[0] = torch.tensor([4, 30, 700])
    made = best_triton.best(*(x.to(DEVICE) for x in (score, present, there, limits))).cpu()
    assert torch.equal(made, reference.best(score, present, there, limits))


@pytest.mark.parametrize("best", [reference.best, best_triton.best])
def test_wrong_arguments_are_named(best):
    score, present, there, limits = random_case(0)
    with pytest.raises(ValueError, match=r"holds: expected bool \[R, M\]"):
        best(score, present, there.int(), limits)
    with pytest.raises(ValueError, match=r"score: expected torch.float64 \[6, 70\]"):
        best(score.float(), present, there, limits)
    with pytest.raises(ValueError, match=r"present: expected torch.bool \[6, 70\]"):
        best(score, present[:2], there, limits)
    for wrong in (limits.int(), limits[:, :2], torch.zeros(4, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"limits: expected int64 \[N, 3\], N a part of 6"):
            best(score, present, there, wrong)
