"""Keys turned in place after a fold: beside reading, rotating and writing them one by one."""

from dataclasses import replace

import pytest
import torch
from kvpolicy.kernels.entries import turn as reference
from kvpolicy.kernels.entries import turn_triton
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.kernels.entries.rotate import rotate
from kvpolicy.kernels.entries.tables import Tables
from test_compact_in_place import BF16, DEVICE, E4M3, F32, case, in_one_pool

INV_FREQ = 100.0 ** (-torch.arange(3, dtype=torch.float64) / 3)


def padded(each, masks, width):
    return torch.cat([torch.nn.functional.pad(x, (width - x.shape[1], 0)) for x in masks])


def finite(each):
    """The case with finite numbers in its pool."""
    generator = torch.Generator().manual_seed(1)
    storage = torch.randn(each.storage.shape, generator=generator).to(each.storage.dtype)
    return replace(each, storage=storage)


def one_by_one(each, interleaved):
    storage = each.one_by_one()[0]
    for layer, kept in enumerate(each.kept):
        for head, own in enumerate(kept):
            stays = own[each.there[layer][head]]
            after = (~stays).flip(0).cumsum(0).flip(0)
            for place, shift in enumerate(after[stays]):
                rows, slot, at = each.entry(layer, head, place)
                key = storage[rows, 0, slot, at]
                turned = rotate(key[None], shift[None], INV_FREQ, interleaved=interleaved)
                storage[rows, 0, slot, at] = turned[0]
    return storage


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, E4M3])
@pytest.mark.parametrize("turn", [reference.turn, turn_triton.turn])
def test_keys_turn_as_one_by_one(turn, dtype, interleaved):
    one = finite(case([[9, 14], [3, 0]], 4, 0.6, size=7, dtype=dtype))
    other = finite(case([[0, 0], [0, 0]], 17, 0.4, seed=1, size=7, dtype=dtype))
    _, tables, table = in_one_pool(one, other)
    before = one.storage.shape[2]
    for proceed in ((True, True), (False, True)):
        moved = torch.cat([one.one_by_one()[0], other.one_by_one()[0]], 2).to(DEVICE)
        masks = [
            torch.cat([padded(x, getattr(x, name), 30) for x in (one, other)]).to(DEVICE)
            for name in ("kept", "there")
        ]
        flags = torch.tensor(proceed)[:, None].repeat(1, 3)
        options = {"tile": 8} if turn is turn_triton.turn else {}
        turn(
            Requests(
                moved, Tables(*(t.to(DEVICE) for t in vars(tables).values())),
                torch.tensor([2, 3], device=DEVICE),
                torch.tensor([one.length, other.length], device=DEVICE), table.to(DEVICE),
            ),
            *masks, flags.to(DEVICE), INV_FREQ.to(DEVICE), interleaved=interleaved,
            **options,
        )  # fmt: skip
        parts = moved.cpu()[:, :, :before], moved.cpu()[:, :, before:]
        for each, made, does in zip((one, other), parts, proceed, strict=True):
            wanted = one_by_one(each, interleaved) if does else each.one_by_one()[0]
            made, wanted = made.double(), wanted.double()
            error = {F32: 1e-5, BF16: 2e-2, E4M3: 0.07}[dtype]
            torch.testing.assert_close(made, wanted, rtol=error, atol=error)
            assert torch.equal(made[:, 1], wanted[:, 1])
            assert does == (not torch.equal(made, each.one_by_one()[0].double()))


@pytest.mark.parametrize("turn", [reference.turn, turn_triton.turn])
def test_wrong_arguments_are_named(turn):
    each = case([[9, 14], [3, 0]], 4, 0.6)
    there = padded(each, each.there, 30)
    row, proceed = torch.tensor([2]), torch.tensor([[True]])
    length = torch.tensor([each.length])
    requests = Requests(each.storage, each.tables, row, length, each.req_to_token)
    for wrong, message in (
        ((there.int(), there, proceed, INV_FREQ), r"kept: expected bool \[4, M\]"),
        ((there, there[:, :3], proceed, INV_FREQ), r"holds: expected bool \[4, M\]"),
        ((there, there, proceed[0], INV_FREQ), r"proceed: expected bool \[1, P\]"),
        ((there, there, proceed, torch.ones(5)), r"inv_freq: expected \[<= 4\], got \[5\]"),
    ):
        with pytest.raises(ValueError, match=message):
            turn(requests, *wrong)
