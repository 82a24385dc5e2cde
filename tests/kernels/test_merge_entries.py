"""What merges entries of many lists at once: references beside loops, Triton beside them."""

import pytest
import torch
from kvpolicy.dsl.ir import counts
from kvpolicy.kernels.entries.rounding import FLOAT8, rounded
from kvpolicy.kernels.merging import (
    following,
    following_triton,
    links,
    links_triton,
    merge_entries,
    merge_entries_triton,
    merge_rows,
    target,
    target_triton,
)
from kvpolicy.kernels.scoring import draws, draws_triton, finite, finite_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FOLLOWING = [following.following, following_triton.following]
LINKS = [links.links, links_triton.links]
TARGETS = [target.target, target_triton.target]
MERGES = [merge_entries.merge_entries, merge_entries_triton.merge_entries]
DRAWS = [draws.draws, draws_triton.draws]
FINITE = [finite.finite, finite_triton.finite]
SIZES = [(3, 37, 0.5), (2, 9, 1.0), (4, 20, 0.0), (1, 1, 0.5), (2, 0, 0.5)]  # R, M, share kept


def masks(lists, width, share):
    generator = torch.Generator().manual_seed(width)
    there = torch.rand(lists, width, generator=generator) < 0.8
    kept = torch.rand(lists, width, generator=generator) < share
    return kept.to(DEVICE), there.to(DEVICE)


def leaving(kept, there):
    """Per list the places that leave and those that stay, in order."""
    rows = zip(kept.tolist(), there.tolist(), strict=True)
    return [
        tuple([i for i, held in enumerate(own) if held and stays[i] == which] for which in (0, 1))
        for stays, own in rows
    ]


def small(function, references):
    """Options with which a Triton kernel needs several iterations."""
    if function in references[:1]:
        return {}
    name = function.__name__
    return {
        "following": {"block": 8, "rows": 4}, "links": {"block": 8, "tile": 4},
        "target": {"rows": 4, "steps": 2}, "merge_entries": {"receivers": 4, "tile": 2},
        "draws": {"block": 8}, "finite": {"tile": 4},
    }[name]  # fmt: skip


@pytest.mark.parametrize("steps", [0, 1, 3, 20])
@pytest.mark.parametrize("function", FOLLOWING)
@pytest.mark.parametrize(("lists", "width", "share"), SIZES)
def test_what_leaves_and_what_follows(function, lists, width, share, steps):
    kept, there = masks(lists, width, share)
    wanted = leaving(kept, there)
    for more in (0, 2):
        most = min(max(len(gone) for gone, _ in wanted) + more, width)
        dropped, present, receivers, found = function(
            kept, there, most, steps, **small(function, FOLLOWING)
        )
        assert receivers.shape == found.shape == (lists, most, steps)
        for each, (gone, stays) in enumerate(wanted):
            assert present[each].sum() == len(gone)
            assert dropped[each].tolist() == gone + [0] * (most - len(gone))
            for place in range(most):
                after = [c for c in stays if place < len(gone) and c > gone[place]][:steps]
                assert found[each, place].tolist() == [i < len(after) for i in range(steps)]
                assert receivers[each, place].tolist() == after + [0] * (steps - len(after))


def linked(lists, width, most, steps, seed=0):
    """Arguments of `links`: most entries of a list have few receivers."""
    generator = torch.Generator().manual_seed(seed)

    def at_random(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    dropped = (at_random(lists, most) * width).long()
    receivers = (at_random(lists, most, steps) ** 2 * width).long()
    found = at_random(lists, most, steps) < 0.8
    accepted, weights = at_random(lists, most) < 0.7, at_random(lists, most) - 0.3
    return [x.to(DEVICE) for x in (dropped, receivers, found, accepted, weights)]


@pytest.mark.parametrize("function", LINKS)
@pytest.mark.parametrize(
    ("lists", "width", "most", "steps"), [(3, 30, 17, 5), (1, 1, 9, 1), (2, 70, 1, 3), (2, 9, 0, 4)]
)
def test_links_stand_by_receiver_in_order(function, lists, width, most, steps):
    dropped, receivers, found, accepted, weights = given = linked(lists, width, most, steps)
    sources, own, offsets = function(*given, width, **small(function, LINKS))
    assert offsets.dtype == torch.int32
    for each in range(lists):
        wanted = [[] for _ in range(width)]
        for place in range(most):
            for step in range(steps):
                if found[each, place, step] and accepted[each, place]:
                    one = (int(dropped[each, place]), float(weights[each, place]))
                    wanted[int(receivers[each, place, step])].append(one)
        for column, entries in enumerate(wanted):
            part = slice(*offsets[each, column : column + 2].tolist())
            made = zip(sources[each, part].tolist(), own[each, part].tolist(), strict=True)
            assert list(made) == entries
        assert offsets[each, -1] == sum(map(len, wanted))


def test_links_of_one_weight():
    """The weight is one number, expanded."""
    *given, _ = linked(3, 30, 17, 5)
    weights = torch.full((), 0.25, dtype=torch.float64, device=DEVICE).expand(3, 17)
    one, other = (function(*given, weights, 30) for function in LINKS)
    assert torch.equal(one[2], other[2])
    for each, number in enumerate(one[2][:, -1].tolist()):
        assert other[1][each, :number].unique().tolist() == [0.25]
        assert torch.equal(one[0][each, :number], other[0][each, :number])


@pytest.mark.parametrize("function", TARGETS)
def test_means_over_receivers(function):
    _, receivers, found, _, _ = linked(3, 30, 17, 5)
    found[1, 4] = False
    x = torch.randn(3, 30, dtype=torch.float64, device=DEVICE)
    x[0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    made = function(x, receivers, found, **small(function, TARGETS))
    for each in range(3):
        for place in range(17):
            own = x[each, receivers[each, place][found[each, place]]]
            wanted = own.mean().nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
            torch.testing.assert_close(made[each, place], wanted, rtol=1e-14, atol=1e-14)
    assert made[1, 4] == 0


def pooled(lists, width, dim, dtype, seed=0):
    """A pool with more rows than the lists, in random order, and merges of leaving entries."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(lists * width + 5, dim, generator=generator).to(dtype)
    ids = torch.randperm(lists * width, generator=generator).view(lists, width) + 5
    kept = torch.rand(lists, width, generator=generator) < 0.6
    most = int((~kept).sum(1).max())
    dropped, present, receivers, found = following.following(kept, torch.ones_like(kept), most, 3)
    accepted = present & (torch.rand(present.shape, generator=generator) < 0.7)
    weights = torch.rand(present.shape, generator=generator, dtype=torch.float64)
    made = links.links(dropped, receivers, found, accepted, weights, width)
    own, divide = torch.rand(2, lists, width, generator=generator, dtype=torch.float64) + 0.1
    divide[0, :3] = torch.tensor([0.0, torch.inf, torch.nan])
    pool, ids, *made, own, divide = (x.to(DEVICE) for x in (pool, ids, *made, own, divide))
    return pool, ids, tuple(made), own, divide


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, *FLOAT8])
@pytest.mark.parametrize("function", MERGES)
def test_receivers_are_merged_where_they_lie(function, dtype):
    pool, ids, *given = pooled(6, 23, 10, dtype)
    links, own, divide = given
    proceed = torch.tensor([[True, True], [True, False], [True, True]], device=DEVICE)
    before, wanted = pool.double(), pool.double()
    for each in (0, 1, 4, 5):
        one = slice(each, each + 1)
        part = (tuple(x[one] for x in links), own[one], divide[one])
        rows = merge_rows.merge_rows(pool[ids[each]][None], *part)[0]
        receives = links[2][each].diff() > 0
        wanted[ids[each, receives]] = rounded(rows[receives], dtype).double()
    function(pool, ids, *given, proceed, **small(function, MERGES))
    made = pool.double()
    assert not torch.equal(made, before)
    # Float64 sums in another order, rounded to what is stored.
    torch.testing.assert_close(made, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-12)
    assert torch.equal(made[ids[2:4]], before[ids[2:4]])


@pytest.mark.parametrize("function", MERGES)
def test_numbers_that_are_all_the_same_are_not_copied(function):
    pool, ids, links, *_ = pooled(4, 23, 8, torch.float32)
    one = torch.ones((), dtype=torch.float64, device=DEVICE).expand(4, 23)
    proceed = torch.ones(1, 1, dtype=torch.bool, device=DEVICE)
    other = pool.clone()
    function(pool, ids, links, one, one, proceed)
    merge_entries.merge_entries(other, ids, links, one.clone(), one.clone(), proceed)
    torch.testing.assert_close(pool, other, rtol=3e-7, atol=1e-12)


@pytest.mark.parametrize("function", MERGES)
def test_own_weights_are_1_and_the_divisor_is_the_mass_if_there_are_none(function):
    pool, ids, links, *_ = pooled(4, 23, 8, torch.float32)
    proceed = torch.ones(1, 1, dtype=torch.bool, device=DEVICE)
    other = pool.clone()
    function(pool, ids, links, None, None, proceed)
    one = torch.ones(4, 23, dtype=torch.float64, device=DEVICE)
    given = (links, one, merge_rows.merge_mass(links, one))
    merge_entries.merge_entries(other, ids, *given, proceed)
    torch.testing.assert_close(pool, other, rtol=3e-7, atol=1e-12)


@pytest.mark.parametrize("seed", [0, 7, -3, 2**40 + 5])
@pytest.mark.parametrize("function", DRAWS)
def test_draws_are_those_of_the_language(function, seed):
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(-1, 2**31 - 1, (6, 13), generator=generator).to(DEVICE)
    generated = torch.tensor([16, 70000], device=DEVICE)
    made = function(seed, positions, generated, 2, **small(function, DRAWS)).view(6, 2, 13)
    for each in range(6):
        heads = torch.arange(2, device=DEVICE)[:, None]
        step = int(generated[each // 3])
        wanted = counts.hashed(seed, each % 3, heads, positions[each], step)
        assert torch.equal(made[each], wanted.double() / 2.0**32)
    assert made.min() >= 0
    assert made.max() < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, *FLOAT8])
@pytest.mark.parametrize("function", FINITE)
def test_what_is_not_finite_is_found_where_it_is_read(function, dtype):
    keys, values = torch.randn(2, 60, 10)
    ids = torch.arange(50, device=DEVICE).view(5, 10)
    there = torch.ones(5, 10, dtype=torch.bool, device=DEVICE)
    there[3, 4] = False
    keys[12, 9], values[25, 0], keys[34, 1], values[55] = torch.nan, torch.inf, torch.nan, torch.nan
    if dtype == torch.float8_e4m3fn:  # it has no infinity
        values[25, 0] = torch.nan
    keys, values = keys.to(dtype).to(DEVICE), values.to(dtype).to(DEVICE)
    made = function(keys, values, ids, there, **small(function, FINITE))
    assert made.tolist() == [True, False, False, True, True]


@pytest.mark.parametrize("pair", [FOLLOWING, LINKS, TARGETS, MERGES, DRAWS, FINITE])
def test_wrong_arguments_are_named(pair):
    kept, there = masks(3, 7, 0.5)
    dropped, receivers, found, accepted, weights = linked(3, 7, 2, 2)
    pool, ids, *links_of = pooled(3, 7, 4, torch.float32)
    proceed = torch.ones(3, 1, dtype=torch.bool, device=DEVICE)
    positions, generated = torch.zeros(2, 6, 5, dtype=torch.int64, device=DEVICE)[0], dropped[0, :1]
    cases = {
        "following": (
            ((kept.long(), there, 2, 1), r"kept: expected bool \[3, 7\]"),
            ((kept, there[0], 2, 1), r"holds: expected bool \[R, M\]"),
            ((kept, there, 8, 1), "most: expected 0 to 7, got 8"),
            ((kept, there, 2, -1), "steps: expected 0 or more, got -1"),
        ),
        "links": (
            ((weights, receivers, found, accepted, weights, 7), r"dropped: .* \[R, P\]"),
            ((dropped, dropped, found, accepted, weights, 7), r"receivers: .* \[R, P, S\]"),
            ((dropped, receivers, found[0], accepted, weights, 7), "receivers_present: .*bool"),
            ((dropped, receivers, found, dropped, weights, 7), "accepted: expected torch.bool"),
            ((dropped, receivers, found, accepted, dropped, 7), "weights: expected torch.float64"),
        ),
        "target": (
            ((dropped, receivers, found), r"x: expected float64 \[R, M\]"),
            ((weights, dropped, found), r"receivers: expected int64 \[3, P, S\]"),
            ((weights, receivers, found[0]), r"receivers_present: expected bool \[3, 2, 2\]"),
        ),
        "merge_entries": (
            ((ids, ids, *links_of, proceed), r"pool: expected floats \[E, D\]"),
            ((pool, pool, *links_of, proceed), r"ids: expected int64 \[R, n\]"),
            ((pool, ids[:, 1:], *links_of, proceed), r"offsets: expected torch.int32 \[3, 7\]"),
            ((pool, ids, *links_of, proceed[:2]), r"proceed: .* B a part of 3"),
            ((pool, ids, *links_of, ids), "proceed: expected bool"),
        ),
        "draws": (
            ((0, weights, generated, 2), r"positions: expected int64 \[S, M\]"),
            ((0, positions, generated.repeat(4), 2), r"generated: expected int64 \[N\], N a part"),
            ((0, positions, generated, 0), "kv_heads: expected 1 or more, got 0"),
        ),
        "finite": (
            ((ids, pool, ids, ids > 0), "keys: expected floats"),
            ((pool, pool[:, 1:], ids, ids > 0), "values: expected floats"),
            ((pool, pool, pool, ids > 0), r"ids: expected int64 \[R, M\]"),
            ((pool, pool, ids, ids), r"holds: expected bool \[3, 7\]"),
        ),
    }  # fmt: skip
    for function in pair:
        for wrong, message in cases[function.__name__]:
            with pytest.raises(ValueError, match=message):
                function(*wrong)
