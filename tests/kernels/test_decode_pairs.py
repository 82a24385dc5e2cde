"""Decode attention where some requests store layers in pairs, against float64."""

from dataclasses import replace

import pytest
import torch
from decode_cases import Case, assert_exact
from kvpolicy.kernels.attention.decode_attention import decode_attention
from kvpolicy.kernels.attention.decode_attention_triton import decode_attention as decode_triton
from kvpolicy.kernels.attention.paged_attention_tiles_triton import SplitTile
from kvpolicy.kernels.entries import layer_pairs
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.kernels.entries.rounding import FLOAT8
from kvpolicy.kernels.entries.tables import Tables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = [decode_attention, decode_triton]
LAYERS, UPPERS = 5, (2, 4)  # layer 0 is whole


class Pool:
    """Requests in a pool where every entry outside their lists is NaN.

    Requests are ("pairs", N, tail), ("lists", entries of each list, tail), or ("plain", 0, tail).
    """

    def __init__(self, requests, *, heads, kv_heads, size, dtype, share_of=0.3, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.kv_heads, self.size, self.dtype = kv_heads, size, dtype
        self.floats = layer_pairs.floats_of_row(size, dtype)
        padded = 40 + sum(3 * n + tail for _, n, tail in requests)
        self.free = (torch.randperm(padded - 1, generator=self.generator) + 1).tolist()
        shape = (LAYERS, 2, padded, kv_heads, size)
        self.storage = torch.full(shape, float("nan"), dtype=dtype)
        rows = len(requests) + 2
        self.tables = Tables.empty(rows, LAYERS, kv_heads, padded, "cpu", pairs=True)
        for tensor in (self.tables.counts, self.tables.first_page, self.tables.paired):
            tensor.fill_(7)  # of rows that are nobody's
        context = 50 + max(tail for *_, tail in requests)
        self.table = torch.zeros(rows, context, dtype=torch.int32)
        self.lists = [[] for _ in range(LAYERS)]  # [L][B][G] float64 [2, n, D]
        self.lengths, self.at = [], 1
        for row, (kind, n, tail) in enumerate(requests, start=1):
            restored = self._private(row, kind, n, share_of)
            self._tail(row, restored, tail)
        asked = torch.float32 if dtype in FLOAT8 else dtype
        self.q = torch.randn(len(requests), heads, size, generator=self.generator).to(asked)

    def at_layer(self, layer) -> Case:
        return Case(
            self.q.to(DEVICE),
            self.storage.to(DEVICE),
            Tables(*(t.to(DEVICE) for t in vars(self.tables).values())),
            torch.arange(1, len(self.lengths) + 1, device=DEVICE),
            torch.tensor(self.lengths, device=DEVICE),
            self.table.to(DEVICE),
            layer,
            self.lists[layer],
        )

    def _random(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def _private(self, row, kind, n, share_of):
        """Lays out and writes private pages; [L][G] float64 [2, N, D] what is read of them."""
        tables, kv_heads = self.tables, self.kv_heads
        for tensor in (tables.counts, tables.first_page, tables.paired):
            tensor[row] = 0
        restored = [[torch.zeros(2, 0, self.size).double()] * kv_heads for _ in range(LAYERS)]
        written, page = [], 0  # (list's first page, rows [2, M, D]) and pages in all
        if kind == "plain":
            self.lengths.append(0)
            return restored
        for layer in range(LAYERS):
            lower = kind == "pairs" and layer + 1 in UPPERS
            upper = kind == "pairs" and layer in UPPERS
            tables.paired[row, layer] = int(lower) + 2 * int(upper)
            tables.counts[row, layer] = n
            if lower:
                continue  # the same list as the layer above
            for g in range(kv_heads):
                tables.first_page[row, layer, g] = page
                if upper:
                    tables.first_page[row, layer - 1, g] = page
                    rows, both = self._pair(n, share_of)
                    restored[layer - 1][g], restored[layer][g] = both
                else:
                    rows = self._random(2, n, self.size).to(self.dtype)
                    restored[layer][g] = rows.double()
                written.append((page, rows))
                page += -(-rows.shape[1] // kv_heads)
        own = [self.free.pop() for _ in range(-(-page // LAYERS))]
        tables.slots_start[row] = self.at
        tables.slots[self.at : self.at + len(own)] = torch.tensor(own, dtype=torch.int32)
        self.at += len(own) + 1
        for first, rows in written:
            place = torch.arange(rows.shape[1])
            number = first + place // kv_heads
            slot = torch.tensor(own)[number // LAYERS]
            for which in range(2):
                # Bits, because rows of codes are no numbers of the pool's dtype.
                target = self.storage.view(torch.uint8)
                source = rows[which].contiguous().view(torch.uint8)
                target[number % LAYERS, which, slot, place % kv_heads] = source
        self.lengths.append(20 + row)
        tables.tail_start[row] = 20 + row
        return restored

    def _pair(self, n, share_of):
        """Rows [2, M, D] of a pair's list; float64 [2, N, D] read from it for (lower, upper)."""
        directions = torch.nn.functional.normalize(self._random(2, n, self.size), dim=-1)
        directions = directions.to(self.dtype)
        originals = self._random(2, 2, n, self.size).to(self.dtype)  # of (lower, upper)
        scales = self._random(2, 2, n).abs() + 0.5
        excepted = torch.rand(2, n, generator=self.generator) < share_of
        code_rows, more = -(-n // self.floats), int(excepted.sum(1).max()) if n else 0
        rows = torch.full((2, 2 * code_rows + n + more, self.size), float("nan"), dtype=self.dtype)
        both = torch.zeros(2, 2, n, self.size).double()
        for tensor in range(2):
            codes = torch.full((2, code_rows * self.floats), float("nan"))
            r = 0
            for t in range(n):
                out = bool(excepted[tensor, t])
                place = 2 * code_rows + t
                rows[tensor, place] = originals[1, tensor, t] if out else directions[tensor, t]
                for which in range(2):
                    codes[which, t] = 1.0 if out else scales[which, tensor, t]
                    row = originals[which, tensor, t] if out else directions[tensor, t]
                    both[which, tensor, t] = row.double() * codes[which, t].double()
                if out:
                    rows[tensor, place - t + n + r] = originals[0, tensor, t]
                    codes[0, t] = -float(n + r)
                    r += 1
            bits = codes.view(2 * code_rows, self.floats).view(self.dtype)
            rows[tensor, : 2 * code_rows] = bits
            # What a code row has left over is not read.
        return rows, both

    def _tail(self, row, restored, tail):
        start = self.lengths[-1]
        self.lengths[-1] += tail
        ordinary = torch.tensor([self.free.pop() for _ in range(tail)], dtype=torch.int64)
        self.table[row, start : start + tail] = ordinary.int()
        kv = self._random(LAYERS, 2, tail, self.kv_heads, self.size).to(self.dtype)
        self.storage[:, :, ordinary] = kv
        for layer in range(LAYERS):
            mine = [
                torch.cat([before, kv[layer, :, :, g].double()], 1)
                for g, before in enumerate(restored[layer])
            ]
            self.lists[layer].append(mine)


MIXED = [("pairs", 40, 3), ("plain", 0, 17), ("lists", 9, 1), ("pairs", 1, 1), ("pairs", 67, 30)]


@pytest.mark.thorough(every=3)
@pytest.mark.slow
@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize("layer", [0, 3, 4])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype"),
    [
        (4, 2, 16, torch.float32),
        (3, 1, 80, torch.float16),
        (6, 3, 64, torch.bfloat16),
        (8, 8, 2, torch.bfloat16),
        (6, 3, 64, torch.float8_e4m3fn),
        (4, 2, 20, torch.float8_e5m2),
    ],
)
def test_equals_attention_in_float64(attention, layer, heads, kv_heads, size, dtype):
    given = Pool(MIXED, heads=heads, kv_heads=kv_heads, size=size, dtype=dtype).at_layer(layer)
    assert_exact(given.run(attention), given)


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize("share_of", [0.0, 1.0])
def test_nothing_and_everything_is_excepted(attention, share_of):
    pool = Pool(MIXED, heads=4, kv_heads=2, size=16, dtype=torch.float32, share_of=share_of)
    for layer in (1, 2):
        assert_exact(pool.at_layer(layer).run(attention), pool.at_layer(layer))


@pytest.mark.slow
@pytest.mark.parametrize("splits", [None, 1, 3, 40])
def test_splits_agree(splits):
    requests = [("pairs", 700, 3), ("lists", 130, 0), ("pairs", 129, 64)]
    given = Pool(requests, heads=4, kv_heads=2, size=16, dtype=torch.float32).at_layer(3)
    tile = SplitTile(entries=32, warps=4, stages=2)
    assert_exact(given.run(decode_triton, splits=splits, tile=tile), given)


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_batches_without_pairs_are_as_without_tables_for_them(attention):
    given = Pool(
        [("plain", 0, 40), ("lists", 30, 7)], heads=4, kv_heads=2, size=16, dtype=torch.float32
    ).at_layer(2)
    without = replace(given, tables=replace(given.tables, paired=given.tables.paired[:0]))
    torch.testing.assert_close(without.run(attention), given.run(attention), atol=0, rtol=0)


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_wrong_tables_are_named(attention):
    pool = Pool(MIXED, heads=4, kv_heads=2, size=16, dtype=torch.float32)
    given = pool.at_layer(0)
    given.tables = replace(given.tables, paired=given.tables.paired[:3])
    with pytest.raises(ValueError, match=r"tables.paired: expected \[7, 5\] or \[0, 5\], got \[3,"):
        given.run(attention)
    odd = torch.zeros(1, 1, 3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="rows of whole float32 for layers in pairs, got 3 of"):
        attention(
            odd,
            Requests(
                torch.zeros(1, 2, 4, 1, 3, dtype=torch.bfloat16),
                Tables.empty(2, 1, 1, 3, "cpu", pairs=True),
                torch.ones(1).long(),
                torch.ones(1).long(),
                torch.zeros(2, 4).int(),
            ),
            layer=0,
            scale=1.0,
        )


def test_codes_say_what_they_were_made_from():
    excepted = torch.tensor([[False, True, True, False], [True, False, False, False]])
    scales = torch.rand(2, 2, 4)
    scales[0, 0, 0] = 0  # a vector of zeros
    codes = layer_pairs.encode(scales, excepted)
    tokens = torch.arange(4).expand(2, 4)
    places, found = layer_pairs.decode(codes[layer_pairs.BELOW], tokens)
    assert places.tolist() == [[0, 4, 5, 3], [4, 1, 2, 3]]
    assert torch.equal(found, scales[0].masked_fill(excepted, 1.0))
    places, found = layer_pairs.decode(codes[layer_pairs.OWN], tokens)
    assert torch.equal(places, tokens)
    assert torch.equal(found, scales[1].masked_fill(excepted, 1.0))
