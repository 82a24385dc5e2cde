"""Compaction against copying one entry at a time."""

import pytest
import torch
from kvpolicy.kernels.compact import compact


def copied(entries, slots, kept, pages, key_base, value_offset):
    """The same by definition."""
    entries = entries.clone()
    group, length = kept.shape
    page = 0
    for head in range(group):
        place = 0
        for position in range(length):
            if not kept[head, position]:
                continue
            source = key_base + int(slots[position]) * group + head
            target = int(pages[page + place // group]) * group + place % group
            entries[target] = entries[source]
            entries[target + value_offset] = entries[source + value_offset]
            place += 1
        page += -(-place // group)
    return entries


@pytest.mark.parametrize("group", [1, 2, 3, 8])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("length", [1, 63])
def test_equals_copying_one_at_a_time(group, share, length):
    generator = torch.Generator().manual_seed(group * 100 + length)
    rows = 4 * length + 4 * group  # of one layer; the layer before holds the pages
    value_offset = rows * group
    entries = torch.randn(4 * value_offset, 4, generator=generator)
    kept = torch.rand(group, length, generator=generator) < share
    slots = torch.randperm(rows, generator=generator)[:length]
    pages = torch.randperm(rows, generator=generator)[: group * (length // group + 1)]
    key_base = 2 * value_offset
    wanted = copied(entries, slots, kept, pages, key_base, value_offset)

    counts = compact(entries, slots, kept, pages, key_base=key_base, value_offset=value_offset)

    assert counts.tolist() == kept.sum(1).tolist()
    assert torch.equal(entries, wanted)


def test_dropped_and_foreign_entries_are_not_touched():
    entries = torch.full((64, 2), float("nan"))
    slots = torch.tensor([3, 5])
    entries[32 + torch.tensor([6, 10])] = 1.0  # head 0 of slots 3 and 5: keys ...
    entries[48 + torch.tensor([6, 10])] = 2.0  # ... and values
    kept = torch.tensor([[True, True], [False, False]])
    counts = compact(entries, slots, kept, torch.tensor([4]), key_base=32, value_offset=16)
    assert counts.tolist() == [2, 0]
    assert entries[8:10].tolist() == [[1.0, 1.0]] * 2
    assert entries[24:26].tolist() == [[2.0, 2.0]] * 2
    assert int(entries.isfinite().all(1).sum()) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kept": torch.ones(2, 3)}, r"kept: expected bool \[G, N\], got torch.float32 \[2, 3\]"),
        ({"prompt_slots": torch.arange(4)}, r"prompt_slots: expected \[3\], got \[4\]"),
        ({"pages": torch.arange(3)}, r"pages: expected \[>= 4\], got \[3\]"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "entries": torch.zeros(64, 2),
        "prompt_slots": torch.arange(3),
        "kept": torch.ones(2, 3, dtype=torch.bool),
        "pages": torch.arange(4),
    } | change
    with pytest.raises(ValueError, match=message):
        compact(**arguments, key_base=32, value_offset=16)
