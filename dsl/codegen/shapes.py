"""Sizes of the tiles of generated kernels, chosen when a source is written.

They fit into the shared memory that a program may use: 227 KiB on a Hopper GPU, and 99 KiB on Ada
if keys have two bytes. Two programs that go over many queries fit on a multiprocessor, also on
Ampere with its 164 KiB: while one waits for a product of tensor cores, the other computes
exponentials.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.dsl.ir.nodes import ModelShape

# Most bytes of a tile of queries; of it with the tiles of keys in flight; of a block of keys with
# the tiles of queries in flight.
_QUERIES, _ALL, _HALF = 64 << 10, 200 << 10, 80 << 10
_MOST_ROWS, _LONG_ROWS, _LOOP_ROWS, _STAGES = 256, 128, 64, 3


@dataclass(frozen=True)
class TileShape:
    """How a kernel is cut into tiles.

    Attributes:
        group, dim: query heads of a KV head and head size, rounded up to powers of two.
        query_tile: queries of a tile, which has `group * query_tile` rows.
        one_tile: whether one tile holds the window.
        block: tokens of a tile, on a GPU.
        warps, stages: of a launch.
        row_pass: query_tile, warps and stages of the kernel that goes over the keys for each row:
            the more queries it holds, the less often it reads the keys.
    """

    group: int
    dim: int
    query_tile: int
    one_tile: bool
    block: int
    warps: int
    stages: int
    row_pass: tuple[int, int, int]

    @classmethod
    def of(
        cls, shape: ModelShape, window: int | None, float32: bool, simple: bool, few: bool = False
    ) -> TileShape:
        """The tiles for a window.

        Args:
            window: number of queries; None: it depends on the prompt or the layer.
            float32: whether keys are float32, which tensor cores take in two parts; else two bytes.
            simple: whether so little is computed per tile that registers hold a large one.
            few: whether queries are hardly more than one tile holds, and so much is computed of
                them that registers hold only a small one.
        """
        group, dim = _power(shape.group), max(16, _power(shape.head_dim))
        size = dim * (8 if float32 else 2)
        most, least = _QUERIES // size, max(1, 16 // group)  # a product of tiles has 16 rows
        fit = max(least, _power(window or 1))
        one_tile = window is not None and group * fit <= min(most, _MOST_ROWS)
        rows = min(most, _LOOP_ROWS if few else _LONG_ROWS)
        query_tile = fit if one_tile else max(least, rows // group)
        rows = group * query_tile
        large = not (one_tile or few) and simple and dim <= 128
        full = one_tile and rows * size == _QUERIES  # with 64 tokens it takes 100 KiB
        small = float32 or few or rows > _LONG_ROWS or (dim > 128 and (full or not simple))
        block = 32 if small else 128 if large else 64
        warps = 8 if rows * block >= 8192 else 4
        stages = max(1, min(_STAGES, (_ALL - rows * size) // (block * size)))
        row_pass = (query_tile, warps, stages)
        if not one_tile:
            query_tile = max(least, min(most, _LOOP_ROWS) // group)
            tile = group * query_tile * size
            warps, stages = 4, max(2, min(_STAGES, (_HALF - block * size) // tile))
        return cls(group, dim, query_tile, one_tile, block, warps, stages, row_pass)


def _power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
