"""The torch references that a policy's program calls by name (dsl/execute/tensors/kernels.py).

They define what the kernels of `table_triton.py` compute, and need no Triton.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpolicy.kernels.entries import carry, tally
from kvpolicy.kernels.merging import (
    following,
    inner_products,
    links,
    means,
    merge_entries,
    merge_rows,
    nearest,
    share,
    target,
    updated_where_left,
)
from kvpolicy.kernels.scoring import (
    best,
    draws,
    finite,
    order,
    over_layers,
    select,
    split,
    spread,
    then,
    whole,
)

REFERENCE: dict[str, Callable] = {
    "keys": order.keys,
    "best": best.best,
    "then": then.then,
    "whole": whole.whole,
    "carry": carry.carry,
    "tally": tally.tally,
    "top": select.top,
    "rank": order.rank,
    "mean": spread.mean,
    "var": spread.var,
    "entropy": spread.entropy,
    "var_of_layers": over_layers.var_of_layers,
    "any_of_layers": over_layers.any_of_layers,
    "split": split.split,
    "nearest": nearest.nearest,
    "inner_products": inner_products.inner_products,
    "means": means.means,
    "means_of_columns": means.means_of_columns,
    "updated_where_left": updated_where_left.updated_where_left,
    "draws": draws.draws,
    "finite": finite.finite,
    "following": following.following,
    "links": links.links,
    "target": target.target,
    "merge_entries": merge_entries.merge_entries,
    "merge_rows": merge_rows.merge_rows,
    "merge_mass": merge_rows.merge_mass,
    "members": merge_rows.members,
    "gram": share.gram,
    "blend": share.blend,
}
