"""The numbers of a batch's entries, beside the lists of the reference."""

from dataclasses import replace

import pytest
import torch
from kvpolicy.kernels.attention.decode_attention import lists_of
from kvpolicy.kernels.attention.entry_table_triton import entry_table
from kvpolicy.kernels.entries.tables import Tables
from test_decode_attention import MIXED, SHAPES, case


def given_of(made):
    return made.q, made.storage, made.tables, made.rows, made.lengths, made.req_to_token


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize(
    ("requests", "heads", "groups"), [(MIXED, 4, 2), *(shape[:3] for shape in SHAPES)]
)
def test_rows_are_the_lists_of_the_reference(requests, heads, groups, layer):
    made = case(requests, heads=heads, groups=groups, size=16, layer=layer)
    wanted = (made.storage, made.tables, made.rows, made.lengths, made.req_to_token, layer)
    indptr, indices, _ = lists_of(*wanted)
    lengths = indptr.diff()
    for longest in (int(lengths.max()), int(lengths.max()) + 1030):
        table, entries = entry_table(*given_of(made), layer=layer, longest=longest)
        assert table.dtype == entries.dtype == torch.int32
        assert table.shape == (len(requests) * groups, longest)
        assert torch.equal(entries.long(), lengths)
        inside = torch.arange(longest, device=table.device) < lengths[:, None]
        assert torch.equal(table[inside].long(), indices)
        assert not table[~inside].any()


def test_what_is_beyond_the_columns_is_not_written():
    made = case([([40, 3], 5)], heads=4, groups=2, size=16)
    whole, lengths = entry_table(*given_of(made), layer=1, longest=45)
    part, same = entry_table(*given_of(made), layer=1, longest=20)
    assert torch.equal(part, whole[:, :20])
    assert torch.equal(same, lengths)


def test_no_columns_and_no_requests():
    made = case([None], heads=4, groups=2, size=16)
    made.tables.tail_start.fill_(9)  # nothing in any list
    made.tables.counts.zero_()
    table, entries = entry_table(*given_of(made), layer=1, longest=0)
    assert table.shape == (2, 0)
    assert entries.tolist() == [0, 0]
    q, storage, tables, rows, lengths, slots = given_of(made)
    nobody = (q[:0], storage, tables, rows[:0], lengths[:0], slots)
    assert entry_table(*nobody, layer=1, longest=3)[0].shape == (0, 3)


def test_what_has_no_number_is_refused():
    made = case([None], heads=4, groups=2, size=16)
    q, storage, tables, *rest = given_of(made)
    rows = tables.tail_start.shape[0]
    paired = replace(tables, paired=torch.zeros(rows, 3, dtype=torch.int32, device=q.device))
    with pytest.raises(ValueError, match=r"tables.paired: lists of layers in pairs cannot"):
        entry_table(q, storage, paired, *rest, layer=1, longest=1)
    large = torch.empty(2, 2, 2**28 + 1, 2, 16, device="meta")
    tables = Tables.empty(rows, 2, 2, 3, q.device)
    with pytest.raises(ValueError, match=r"storage: expected at most 2\^31 entries"):
        entry_table(q, large, tables, *rest, layer=1, longest=1)
