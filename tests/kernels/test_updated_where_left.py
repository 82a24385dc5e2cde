"""States of merges per list: the reference beside a loop, Triton beside it."""

import pytest
import torch
from kvpolicy.kernels.merging import updated_where_left, updated_where_left_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = [updated_where_left.updated_where_left, updated_where_left_triton.updated_where_left]


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize(
    ("lists", "kv_heads", "width"), [(1, 1, 1), (6, 2, 7), (6, 3, 300), (4, 1, 0), (0, 2, 5)]
)
def test_layers_go_on_in_which_anything_left(function, lists, kv_heads, width):
    generator = torch.Generator().manual_seed(lists + width)
    new, old = torch.randn(2, lists, generator=generator, dtype=torch.float64)
    old[1::2] = torch.nan
    there = torch.rand(lists, width, generator=generator) < 0.5 / max(width, 1)
    there[lists - 1 :, width - 1 :] = True
    there = there.T.contiguous().T  # as a slice of a wider mask, not row by row
    made = function(*(x.to(DEVICE) for x in (new, old, there)), kv_heads).cpu()
    for each in range(lists):
        first = each - each % kv_heads
        left = bool(there[first : first + kv_heads].any())
        torch.testing.assert_close(made[each], (new if left else old)[each], equal_nan=True)


@pytest.mark.parametrize("function", BOTH)
def test_one_number_of_all_lists_is_not_copied(function):
    one = torch.ones((), dtype=torch.float64, device=DEVICE)
    there = torch.tensor([[False, True], [False, False]], device=DEVICE)
    made = function(2 * one.expand(2), one.expand(2), there, 1)
    assert made.tolist() == [2.0, 1.0]


@pytest.mark.parametrize("function", BOTH)
def test_wrong_arguments_are_named(function):
    new, there = torch.zeros(4, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.bool)
    for given, message in (
        ((new, new, there.long(), 2), r"present: expected bool \[R, P\]"),
        ((new[1:], new, there, 2), r"new: expected torch.float64 \[4\]"),
        ((new, new.float(), there, 2), r"old: expected torch.float64 \[4\]"),
        ((new, new, there, 3), "kv_heads: expected a part of 4, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            function(*given)
