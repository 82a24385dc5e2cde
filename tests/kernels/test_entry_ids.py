"""Places of entries: the reference against looking each up, Triton against the reference."""

import pytest
import torch
from kvpolicy.kernels.attention import entry_ids as reference
from kvpolicy.kernels.attention import entry_ids_triton
from kvpolicy.kernels.entries.requests import Requests
from test_compact_in_place import DEVICE, SMALL, case, in_one_pool

BOTH = [reference.entry_ids, entry_ids_triton.entry_ids]


def padded(each, width):
    """bool [L * G, width], the newest entries of all layers in the last columns."""
    own = each.there if each.there is not None else [torch.ones_like(k) for k in each.kept]
    rows = [torch.nn.functional.pad(x, (width - x.shape[1], 0)) for x in own]
    return torch.cat(rows)


def one_by_one(each, there):
    """Key entries of each list, 0 where nothing is there."""
    _, _, slots, kv_heads, _ = each.storage.shape
    made = torch.zeros(there.shape, dtype=torch.int64)
    for number, held in enumerate(there):
        layer, head = divmod(number, kv_heads)
        found = [
            (rows * 2 * slots + slot) * kv_heads + at
            for rows, slot, at in each.entries(layer, head)
        ]
        made[number, held] = torch.tensor(found, dtype=torch.int64)
    return made


def asked(entry_ids, storage, tables, rows, lengths, table, there, **options):
    on_device = type(tables)(*(t.to(DEVICE) for t in vars(tables).values()))
    numbers = (torch.tensor(x, device=DEVICE) for x in (rows, lengths))
    requests = Requests(storage.to(DEVICE), on_device, *numbers, table.to(DEVICE))
    return entry_ids(requests, there.to(DEVICE), **options).cpu()


@pytest.mark.parametrize("entry_ids", BOTH)
@pytest.mark.parametrize("name", SMALL)
def test_every_entry_is_found(entry_ids, name):
    each = SMALL[name]
    there = padded(each, max(k.shape[1] for k in each.kept) + 3)
    options = {} if entry_ids is reference.entry_ids else {"block": 16}
    made = asked(
        entry_ids, each.storage, each.tables, [each.row], [each.length], each.req_to_token, there,
        **options,
    )  # fmt: skip
    assert torch.equal(made, one_by_one(each, there))


@pytest.mark.parametrize("entry_ids", BOTH)
def test_requests_are_found_beside_each_other(entry_ids):
    one, other = case([[9, 14], [3, 0]], 4, 0.6), case([[0, 0], [0, 0]], 17, 0.4, seed=1)
    storage, tables, table = in_one_pool(one, other)
    there = [padded(each, 26) for each in (one, other)]
    together = [
        asked(
            entry_ids, storage, tables, [2, 3], [one.length, other.length], table, torch.cat(there)
        )
    ]
    for row, each, own in ((2, one, there[0]), (3, other, there[1])):
        together.append(asked(entry_ids, storage, tables, [row], [each.length], table, own))
    assert torch.equal(together[0], torch.cat(together[1:]))
    assert together[0][torch.cat(there)].unique().numel() == int(torch.cat(there).sum())


@pytest.mark.parametrize("entry_ids", BOTH)
def test_wrong_arguments_are_named(entry_ids):
    each = SMALL["usual"]
    there = padded(each, 40)
    given = (each.storage, each.tables, [each.row], [each.length], each.req_to_token)
    for wrong in (there.int(), there[1:], there[0]):
        with pytest.raises(ValueError, match=r"holds: expected bool \[6, M\]"):
            asked(entry_ids, *given, wrong)
    with pytest.raises(ValueError, match=r"rows: expected contiguous int64 \[1\]"):
        asked(entry_ids, each.storage, each.tables, [2.0], [each.length], each.req_to_token, there)


def test_candidates_that_are_not_as_many_as_entries():
    each = SMALL["usual"]
    there = padded(each, 40)
    there[0, 0] = True
    with pytest.raises(ValueError, match=r"holds: expected \[13, 18\] True .* at layer 0"):
        asked(
            reference.entry_ids, each.storage, each.tables, [each.row], [each.length],
            each.req_to_token, there,
        )  # fmt: skip
