"""What computes for a program: a table of kernels by name; and where keys and values lie.

A table has all of these names, but for "generated": it is of torch, which defines what others give
(`kernels/table.py`), or of Triton. From the same values the same is kept, ties included, whatever
the table.

keys(x, there) -> int32
    float64 scores as integers that sort as their float32 do, -0 being 0, and the lowest int32 where
    bool `there`, which broadcasts to x, is false (None: nowhere). The shape of x, contiguous.

rank(keys) -> float64 [R, n]
    1 for the highest of int32 keys [R, n] per row, of equal ones for the first.

mean(x, there, over), var(x, there, over), entropy(x, there, over) -> float64
    Of what is present of float64 x along the dimensions `over` (`there` as above): mean, variance
    divided by the number of values, and -sum(p log p) with p = x / sum(x), where what is NaN counts
    as 0 (a share, its logarithm, their product, a result). 0 of no values. The sums are float64 and
    the same for the same arguments.

var_of_layers(values, there, first) -> float64, any_of_layers(values, there, first) -> bool
    The same place by place over a list of layers' values of one shape (float64, bool), the first
    `first` of which do not count. `there` lists where each is present, or is None.

top(keys, number) -> bool [R, n]
    The `number` (int, or int64 [R, 1]) highest of int32 keys [R, n] per row, of equal ones the
    first; the lowest int32 is absent and never chosen.

best(score, present, there, numbers) -> bool [R, M]
    Of the entries that bool `there` [R, M] holds the first and last ones, and of the rest the
    highest float64 scores, compared as float32, of equal ones the first; all, if they are no more
    than wanted. numbers is int64 [N, 3], for R / N rows each: first entries, last entries, entries
    in all. Scores are absent where bool `present` is false (None: nowhere); without scores only the
    ends stay.

then(taken, score, present, there, number, *, in_all) -> bool [R, M]
    What bool `taken` [R, M] holds of `there`, and of the rest the highest scores, as above: as many
    as float64 `number` [N] says, for R / N rows each, counted as by "whole". With in_all so many
    together with those taken, and all, if the rest are no more.

whole(x) -> int64
    float64 numbers of entries, floored, at least 0 and at most 2**31; NaN is 0, and what misses a
    multiple of 1/2 by rounding errors alone is that multiple. The shape of x.

carry(kept, positions, used, newest, states, fresh, *, steps, width) -> positions, there, states
    Of S layers of G KV heads the entries that some head of bool `kept` [S * G, M] keeps, in order,
    and `steps` new ones, in the last columns of `width`: int64 [S, width] positions, -1 where
    nothing is, the new ones up to int64 `newest` [N], of S / N layers each; bool [S * G, width],
    what each list holds; and each float64 state [S * G, width], or [S * G, C, width] of C numbers
    per entry, the float `fresh` of new entries.
    int64 `used` [S] says how many positions of a layer are kept.

tally(kept, there, finite, expected, group) -> int64 [S, 3 + 2 * G], bool [S]
    Of S layers how many positions some KV head keeps, whether all keep the same, whether bool
    `finite` [S * G] is true, how many entries there are per KV head and how many stay. And whether
    a layer is finite and as many stay as the numbers `expected` say, if given.

nearest(x, places, real, kept, ids) -> int64 [G, P], bool [G, P]
    For each dropped entry the column of the kept one of the highest cosine, of equal ones the
    first, and whether there is one; 0 where there is none. Cosines are of float64 unit vectors
    (zero for vectors of zeros, and for those with NaN or infinity), compared as float32. places are
    int64 [G, P] columns of dropped entries, of which there are those where bool `real` is true;
    kept is bool [G, n]. x is [G, n, D] of any float dtype; with ids, which may be None, [E, D], a
    pool of which int64 [G, n] says the rows.

pairs(x, places, real, receivers, found, ids) -> float64 [4, G, P]
    Inner products of a dropped entry with itself, with its receiver, of this with itself, and the
    cosine of both (0 where it is NaN). Both are columns as of `nearest`; what bool [G, P] says is
    not there is zeros.

means(x, there, group) -> float64 [R]
    For each list the mean of float64 x [R, P] where bool `there` [R, P] is true over the `group`
    lists of its layer, 0 of none; the same bits for the same numbers, whatever P is.

means_of_columns(x, there, group) -> float64 [R, P]
    The same column by column.

updated(new, old, there, group) -> float64 [R]
    For each list the float64 [R] new where bool `there` [R, P] is true of any of the `group` lists
    of its layer, else the old.

following(kept, there, most, steps) -> places, real, receivers, found
    Of bool [R, M] lists the columns of what leaves, int64 and bool [R, most], in order, and of the
    next `steps` entries that stay after each, int64 and bool [R, most, steps]; 0 where there are
    none. No list loses more than `most`.

target(x, receivers, joins) -> float64 [R, P]
    The mean of float64 x [R, M] over int64 columns [R, P, S] where bool `joins` is true; 0 where
    that is NaN.

links(places, receivers, joins, accepted, weights, tokens) -> links
    Three tensors that say by receiver what is added to it: of int64 places [R, P] and their
    receivers [R, P, S], where bool `joins` [R, P, S] and `accepted` [R, P] are true, with float64
    weights [R, P]. Links of one receiver are in the order of P, then S. They are int64 [R, K]
    columns of sources, float64 [R, K] weights and int32 [R, tokens + 1] offsets: those of column c
    are from offsets[c] to offsets[c + 1].

draws(seed, positions, generated, group, first) -> float64 [S * G, M]
    `uniform(seed)` (`ir/counts.py`) for the entries at int64 [S, M] positions of S layers of G KV
    heads, after int64 [N] decode steps of N requests, of S / N layers each, from number `first` on.

finite(keys, values, ids, there) -> bool [R]
    Whether the rows int64 ids [R, M] of two pools [E, D], where bool `there` [R, M] is true, hold
    neither NaN nor infinity.

merge_rows(x, links, own, divide) -> float64 [G, n, D]
    Receiver c of a KV head becomes (own * x[c] + the sum of weight * x[source] over its links) /
    divide; x[c] where it has no links, where the divisor is 0 or not finite and where the sum is
    not finite. x is [G, n, D] of any float dtype, own and divide float64 [G, n]; without own it is
    1, without divide as of `merge_mass`. Sums are float64 and the same for the same arguments.

merge_entries(pool, ids, links, own, divide, proceed)
    The same in the pool itself, for R lists of rows int64 ids [R, n] of pool [E, D], rounded once;
    nothing is written of R / B lists each of whose bool `proceed` [B, P] one is false.

merge_mass(links, own) -> float64 [G, n]
    own and the sum of the weights of each receiver's links.

members(links) -> float64 [G, n]
    1 and the number of each receiver's links.

gram(below, own) -> float64 [3, G, N]
    Inner products of pairs of vectors of two [G, N, D] of any one float dtype: of below with
    itself, of below with own, of own with itself.

blend(below, own, a, b) -> float64 [G, N, D]
    a * below + b * own with a, b float64 [G, N]; a product or sum that is NaN is 0.

split(total, weights, maxima, *, cascade=False) -> float64 [L]
    `split[layer]` or `cascade[layer]` (`ir/split.py`) of an int from 0 by float64 [L], which it
    rounds to float32; no layer takes more than its maximum, an int for all or int64 [L], None for
    no limit.

generated(name, source) -> run
    Triton functions that `codegen/source.py` wrote for the policy of that name complete kernels,
    which run(window, keys, values, marks, tokens, inputs, numbers) launches without waiting for the
    device. The first five say where queries, keys and values lie and what is known of tokens
    (`execute/generated.py`); it gives the source's results, and truth values that are false where
    the model's tensors held NaN or infinity.
    Where a table lacks it, torch computes what such kernels would.

Dimensions: G KV heads, n tokens of a layer, D head size, S slots, E rows of a pool, M cached
positions of a layer, P dropped entries, K links.
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

GROUP, NAME = "kvpolicy.kernels", "torch"  # the entry point of the table for any device


@cache
def installed() -> Kernels:
    """The table of torch that is installed with this package, for programs that are given none.

    Raises:
        PolicyError: the installation does not say where it is.
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

    KV heads of several layers stand one after the other, layer by layer.

    Attributes:
        pool: [L, S, G, D].
        slots: int64 [n].
        scale: float32 [L * G], by which numbers of the pool are multiplied, as those of 8 bits are;
            None: they stand as they are.
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
        """(L * G, n, D), as of the dense tensor."""
        layers, _, heads, size = self.pool.shape
        return layers * heads, self.slots.shape[0], size

    def dense(self) -> torch.Tensor:
        """[L * G, n, D], a copy, made once."""
        return self.copied

    @cached_property
    def copied(self) -> torch.Tensor:
        """As `dense`."""
        rows = self.pool[:, self.slots].transpose(1, 2)
        return _scaled(rows.reshape(self.shape), self.scale)


@dataclass(frozen=True)
class Entries:
    """Keys or values of a request that decodes: entry j of KV head g is row pool[ids[g, j]].

    Attributes:
        pool: [E, D].
        ids: int64 [G, M]; of entries that a KV head does not hold any row of the pool, which is
            not looked at.
        scale: as of `Slots`.
    """

    pool: torch.Tensor
    ids: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.pool.dtype

    @property
    def device(self) -> torch.device:
        return self.ids.device

    @property
    def shape(self) -> tuple[int, int, int]:
        """(G, M, D), as of the dense tensor."""
        return self.ids.shape[0], self.ids.shape[1], self.pool.shape[1]

    def dense(self) -> torch.Tensor:
        """[G, M, D], a copy, made once; what a KV head does not hold means nothing."""
        return self.copied

    @cached_property
    def copied(self) -> torch.Tensor:
        """As `dense`."""
        return _scaled(self.pool[self.ids], self.scale)


def _scaled(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """[G, n, D] as it lies, or in float32."""
    return x if scale is None else x.float() * scale[:, None, None]


# Keys or values [G, n, D]: a tensor, or rows of a server's pool.
Keys = torch.Tensor | Slots | Entries


def dense(x: Keys) -> torch.Tensor:
    """Keys or values [G, n, D] wherever they lie."""
    return x if isinstance(x, torch.Tensor) else x.dense()
