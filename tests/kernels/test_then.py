"""Further entries of lists: the reference beside its definition, Triton beside the reference."""

import math

import pytest
import torch
from kvpolicy.dsl.ir import counts
from kvpolicy.kernels.scoring import then as reference
from kvpolicy.kernels.scoring import then_triton, whole, whole_triton
from test_best import random_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
THEN = (reference.then, then_triton.then)


def by_definition(taken, score, present, there, number, *, in_all):
    """The definition: one list and one entry at a time."""
    made = torch.zeros_like(there)
    share = len(there) // len(number)
    for row in range(len(there)):
        own = there[row].nonzero()[:, 0].tolist()
        kept = [i for i in own if taken[row, i]]
        free = [i for i in own if not taken[row, i]]
        wanted = number[row // share].item()
        wanted = max(wanted - len(kept), 0) if in_all else wanted
        if in_all and len(free) <= wanted:
            made[row, own] = True
            continue
        scored = [i for i in free if present is None or present[row, i]]
        order = sorted(scored, key=lambda i: (-(score[row, i].float() + 0.0).item(), i))
        made[row, kept + order[: counts.whole(wanted, 2**31)]] = True
    return made


def case(seed, rows=6, width=70):
    score, present, there, _ = random_case(seed, rows, width)
    generator = torch.Generator().manual_seed(seed)
    taken = torch.rand(rows, width, generator=generator) < 0.3
    return taken, score, present, there


NUMBERS = (
    [20.0], [0.0, 33.0], [-3.0, 5.5, 2.0**40], [7.0 - 2**-34, 6.5, 6.999, 1.0, math.inf, 0.3]
)  # fmt: skip


@pytest.mark.thorough(every=3)
@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize("in_all", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_lists_keep_what_the_definition_says(then, number, in_all, seed):
    taken, score, present, there = case(seed)
    number = torch.tensor(number, dtype=torch.float64)
    options = {"block": 32} if then is then_triton.then else {}
    for given in ((taken, score, present), (taken, score.nan_to_num(0.25), None)):
        arguments = [x if x is None else x.to(DEVICE) for x in (*given, there, number)]
        made = then(*arguments, in_all=in_all, **options).cpu()
        assert torch.equal(made, by_definition(*given, there, number, in_all=in_all))


def test_rows_longer_than_a_block():
    given = [x.to(DEVICE) for x in case(3, rows=2, width=2100)]
    number = torch.tensor([700.0], dtype=torch.float64, device=DEVICE)
    made = then_triton.then(*given, number, in_all=True)
    assert torch.equal(made, reference.then(*given, number, in_all=True))


@pytest.mark.parametrize("then", THEN)
def test_wrong_arguments_are_named(then):
    taken, score, present, there = case(0)
    number = torch.ones(3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"holds: expected bool \[R, M\]"):
        then(taken, score, present, there.int(), number, in_all=True)
    with pytest.raises(ValueError, match=r"taken: expected torch.bool \[6, 70\]"):
        then(taken[:2], score, present, there, number, in_all=True)
    with pytest.raises(ValueError, match=r"score: expected torch.float64 \[6, 70\]"):
        then(taken, score.float(), present, there, number, in_all=True)
    for wrong in (number.int(), number[:, None], torch.ones(4, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"number: expected float64 \[N\], N a part of 6"):
            then(taken, score, present, there, wrong, in_all=True)


@pytest.mark.parametrize("kernel", [whole.whole, whole_triton.whole])
def test_numbers_are_counted_as_the_host_counts(kernel):
    edges = [
        n / 2 + side * 2.0**-p for n in range(-3, 9) for p in (20, 31, 33, 40) for side in (-1, 1)
    ]
    large = [2.0**30 + 0.75, 2.0**31 - 2.0**-3, 2.0**31 - 0.6, 2.0**31, 2.0**40, 2.0**60, 1e300]
    numbers = [*edges, *large, math.inf, -math.inf, -5.0, -0.0, 0.0, *map(float, range(300))]
    x = torch.tensor(numbers, dtype=torch.float64).to(DEVICE)
    expected = [counts.whole(each, 2**31) for each in numbers]
    assert kernel(x).tolist() == expected
    assert kernel(x[:0]).tolist() == []
    assert kernel(x[7]).item() == expected[7]
    assert kernel(x.new_tensor([math.nan])).tolist() == [0]
    with pytest.raises(ValueError, match="x: expected float64"):
        kernel(x.float())
