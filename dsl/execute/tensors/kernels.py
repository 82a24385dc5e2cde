"""The kernels that a program calls by name, and where its keys and values lie.

A table has a kernel for each of these names; "generated" may be missing. The torch table
(`kernels/table.py`) defines what other tables, such as Triton's, compute. From the same values
every table keeps the same entries, ties included.

keys(x, present) -> int32
    Integers that sort as float64 scores do when rounded to float32, with -0 as 0; the lowest int32
    where bool `present`, which broadcasts to x, is false (None: true everywhere). The shape of x,
    contiguous.

rank(keys) -> float64 [R, n]
    The rank of each of int32 keys [R, n] in its row: 1 for the highest, among equal keys the first.

mean(x, present, over), var(x, present, over), entropy(x, present, over) -> float64
    Over the present values of float64 x along the dimensions `over` (`present` as above): the mean;
    the variance, divided by the number of values; -sum(p log p) with p = x / sum(x). NaN counts as
    0, in a share, its logarithm, their product and a result; 0 of no values. The sums are float64
    and the same for the same arguments.

var_of_layers(values, present, first) -> float64, any_of_layers(values, present, first) -> bool
    Variance, or whether any is true, place by place over a list of layers' values of one shape
    (float64, bool); the first `first` layers do not count. `present` is a list of bool masks of
    that shape, or None.

top(keys, number) -> bool [R, n]
    The `number` (int, or int64 [R, 1]) highest of int32 keys [R, n] per row, among equal keys the
    first. The lowest int32 marks an absent key, which is never chosen.

best(score, present, holds, limits) -> bool [R, M]
    Of the entries in bool `holds` [R, M]: the first and last ones, and of the rest the highest
    float64 scores, compared as float32, among equal scores the first; all entries, if they are no
    more than wanted. limits is int64 [N, 3], a row for R / N lists each: first entries, last
    entries, entries in all. Scores are absent where bool `present` is false (None: nowhere).
    Without scores only the first and last entries stay.

then(taken, score, present, holds, number, *, in_all) -> bool [R, M]
    The entries of `holds` in bool `taken` [R, M], and of the rest the highest scores, as above:
    float64 `number` [N] of them, for R / N lists each, counted as by "whole". With in_all the
    number includes those taken, and all entries stay if they are no more.

whole(x) -> int64
    float64 numbers of entries, floored, at least 0 and at most 2**31; NaN is 0, and a number that
    misses a multiple of 1/2 by rounding errors alone is that multiple. The shape of x.

carry(kept, columns, positions, used, newest, states, fresh, *, steps, width)
        -> positions, holds, states
    Of S layers of G KV heads: the entries that some head of bool `kept` [S * G, M] keeps, or those
    in bool `columns` [S, M], in order, then `steps` new ones, which end in the last of `width`
    columns. The results are int64 [S, width] positions, -1 where there is no entry; bool
    [S * G, width], the entries of each list; and each float64 state [S * G, C, width] of C numbers
    per entry, its float in `fresh` for new entries. int64 `newest` [N] is the last position of
    S / N layers each, int64 `used` [S] the number of columns of a layer that are collected.

tally(kept, holds, finite, expected, kv_heads) -> int64 [S, 3 + 2 * G], bool [S]
    For each of S layers: positions that some KV head keeps; whether all heads keep the same;
    whether bool `finite` [S * G] is true (None: it is); entries of each KV head, and how many of
    these stay. Then whether a layer is finite and each head keeps as many entries as `expected`,
    numbers of the same form, says (None: any number).

nearest(x, dropped, present, kept, ids) -> int64 [G, P], bool [G, P]
    For each dropped entry the column of the kept one with the highest cosine, among equal ones the
    first, and whether there is one; column 0 if not. Cosines are of float64 unit vectors (zero for
    vectors of zeros, and for those with NaN or infinity), compared as float32. dropped are
    int64 [G, P] columns of dropped entries, valid where bool `present` [G, P] is true; kept is bool
    [G, n]. x is [G, n, D] of any float dtype; with int64 `ids` [G, n], else None, x is a pool
    [E, D] and ids are the rows.

inner_products(x, dropped, present, receivers, receivers_present, ids) -> float64 [4, G, P]
    Inner products of a dropped entry with itself, of it with its receiver, and of the receiver with
    itself, and the cosine of both (0 where it is NaN). dropped and receivers are columns as for
    "nearest"; where bool `present` or `receivers_present` [G, P] is false, that vector counts as
    zeros.

means(x, present, kv_heads) -> float64 [R]
    For each list the mean of float64 x [R, P] where bool `present` [R, P] is true, over the
    `kv_heads` lists of its layer; 0 of none. The same bits for the same numbers, whatever P is.

means_of_columns(x, present, kv_heads) -> float64 [R, P]
    The same column by column.

updated_where_left(new, old, present, kv_heads) -> float64 [R]
    For each list its number in float64 `new` [R] if bool `present` [R, P] is true anywhere in the
    `kv_heads` lists of its layer, else its number in `old`.

following(kept, holds, most, steps) -> dropped, present, receivers, receivers_present
    Of bool [R, M] lists: the columns of leaving entries in order, and whether there is one, int64
    and bool [R, most]; the columns of the next `steps` staying entries after each, and whether
    there is one, int64 and bool [R, most, steps]. Columns are 0 where there is none. No list loses
    more than `most` entries.

target(x, receivers, receivers_present) -> float64 [R, P]
    The mean of float64 x [R, M] over int64 columns [R, P, S] where bool `receivers_present`
    is true; 0 where that is NaN.

links(dropped, receivers, receivers_present, accepted, weights, tokens) -> links
    What is added to each receiver: int64 [R, K] columns of sources, float64 [R, K] weights and
    int32 [R, tokens + 1] offsets; the links of column c start at offsets[c] and end before
    offsets[c + 1]. An entry at int64 `dropped` [R, P] is linked to its `receivers` [R, P, S] where
    bool `receivers_present` [R, P, S] and `accepted` [R, P] are true, with its float64 weight
    [R, P]. Links of one receiver are in the order of P, then S.

draws(seed, positions, generated, kv_heads, first) -> float64 [S * G, M]
    `uniform(seed)` (`ir/counts.py`) for the entries at int64 [S, M] positions of S layers of G KV
    heads, after int64 [N] decode steps of N requests with S / N layers each, the first of which has
    the number `first`.

finite(keys, values, ids, holds) -> bool [R]
    Whether the rows int64 ids [R, M] of two pools [E, D], where bool `holds` [R, M] is true, hold
    neither NaN nor infinity.

merge_rows(x, links, own, divide) -> float64 [G, n, D]
    Receiver c of a KV head becomes (own * x[c] + the sum of weight * x[source] over its links) /
    divide. It stays x[c] without links, and where the divisor is 0 or not finite, or the sum is not
    finite. x is [G, n, D] of any float dtype; own is float64 [G, n], or None for 1; divide is
    float64 [G, n], or None for "merge_mass". Sums are float64 and the same for the same arguments.

merge_entries(pool, ids, links, own, divide, proceed)
    The same in the pool itself, rounded once, for R lists with rows int64 ids [R, n] of pool
    [E, D]. bool `proceed` [B, P] has a row for R / B lists each; if any value of it is false,
    nothing is written to these lists.

merge_mass(links, own) -> float64 [G, n]
    own plus the weights of each receiver's links.

members(links) -> float64 [G, n]
    1 plus the number of each receiver's links.

gram(below, own) -> float64 [3, G, n]
    Inner products of pairs of vectors from two [G, n, D] of one float dtype: below with below,
    below with own, own with own.

blend(below, own, a, b) -> float64 [G, n, D]
    a * below + b * own with a, b float64 [G, n]; a product or sum that is NaN is 0.

split(total, weights, maxima, *, cascade=False) -> float64 [L]
    `split[layer]` or `cascade[layer]` (`ir/split.py`) of an int from 0 by float64 weights [L],
    which are rounded to float32. No layer takes more than its maximum: an int for all, int64 [L],
    or None for no limit.

generated(name, source) -> run
    Completes kernels with the Triton functions that `codegen/source.py` wrote for the policy of
    that name. run(window, keys, values, marks, tokens, inputs, numbers) launches them without
    waiting for the device. The first five say where queries, keys and values lie and what is known
    of tokens (`execute/layer/generated.py`). It gives the source's results, and truth values that
    are false where the model's tensors held NaN or infinity.
    Where a table lacks it, torch computes what such kernels would.

Dimensions: G KV heads, n tokens of a layer, D head size, R lists (one per KV head of a layer), S
layers of N requests, or in `Slots` S slots, E rows of a pool, M cached positions of a layer, P
dropped entries, K links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import entry_points
from typing import Any

import torch
from kvpolicy.dsl.syntax.diagnostics import refused

Kernels = Mapping[str, Callable[..., Any]]

GROUP, NAME = "kvpolicy.kernels", "torch"  # entry point of the torch table, which serves any device


@cache
def installed() -> Kernels:
    """The installed torch table, for programs that are given no table.

    Raises:
        PolicyError: no installed package has the entry point.
    """
    for point in entry_points(group=GROUP, name=NAME):
        table: Kernels = point.load()
        return table
    raise refused(
        "kvpolicy", "file", f"no installed package has the entry point `{NAME}` of `{GROUP}`",
        "install kvpolicy, as with `pip install .`: a folder on the path is not enough",
    )  # fmt: skip


@dataclass(frozen=True)
class Slots:
    """Keys or values in a server's pool: token t of layer l's KV head g is pool[l, slots[t], g].

    As [L * G, n, D] the KV heads follow each other layer by layer.

    Attributes:
        pool: [L, S, G, D].
        slots: int64 [n].
        scale: float32 [L * G], factors of the pool's numbers, as 8-bit caches have them; None: no
            factors.
    """

    pool: torch.Tensor
    slots: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.pool.dtype

    @property
    def device(self) -> torch.device:
        return self.slots.device

    @property
    def shape(self) -> tuple[int, int, int]:
        """(L * G, n, D), that of the dense tensor."""
        layers, _, heads, size = self.pool.shape
        return layers * heads, self.slots.shape[0], size

    @cached_property
    def dense(self) -> torch.Tensor:
        """[L * G, n, D], a copy; float32 if there is a scale."""
        rows = self.pool[:, self.slots].transpose(1, 2)
        return _scaled(rows.reshape(self.shape), self.scale)


@dataclass(frozen=True)
class Entries:
    """Keys or values of a request that decodes: entry j of KV head g is row pool[ids[g, j]].

    Attributes:
        pool: [E, D].
        ids: int64 [G, M]; any row of the pool for an entry that the KV head does not hold: its
            content does not matter.
        scale: float32 [G], see `Slots`.
    """

    pool: torch.Tensor
    ids: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.pool.dtype

    @cached_property
    def dense(self) -> torch.Tensor:
        """[G, M, D], a copy; undefined for entries that a KV head does not hold."""
        return _scaled(self.pool[self.ids], self.scale)


def _scaled(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """[G, n, D] unchanged, or times its scale, in float32."""
    return x if scale is None else x.float() * scale[:, None, None]


# Keys or values [G, n, D]: a tensor, or rows of a server's pool.
Keys = torch.Tensor | Slots | Entries


def dense(x: Keys) -> torch.Tensor:
    """Keys or values as a dense tensor [G, n, D]."""
    return x if isinstance(x, torch.Tensor) else x.dense
