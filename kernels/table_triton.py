"""The Triton kernels that a policy's program calls on a GPU.

A kernel that cannot serve a call passes it to its reference.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpolicy.kernels.entries import carry_triton, tally_triton
from kvpolicy.kernels.merging import (
    following_triton,
    inner_products_triton,
    links_triton,
    means_triton,
    merge_entries_triton,
    merge_rows_triton,
    nearest_triton,
    share_triton,
    target_triton,
    updated_where_left_triton,
)
from kvpolicy.kernels.scoring import (
    best_triton,
    draws_triton,
    finite_triton,
    generated,
    order_triton,
    over_layers_triton,
    select_triton,
    split_triton,
    spread_triton,
    then_triton,
    whole_triton,
)

TRITON: dict[str, Callable] = {
    "generated": generated.generated,
    "keys": order_triton.keys,
    "best": best_triton.best,
    "then": then_triton.then,
    "whole": whole_triton.whole,
    "carry": carry_triton.carry,
    "tally": tally_triton.tally,
    "top": select_triton.top,
    "rank": order_triton.rank,
    "mean": spread_triton.mean,
    "var": spread_triton.var,
    "entropy": spread_triton.entropy,
    "var_of_layers": over_layers_triton.var_of_layers,
    "any_of_layers": over_layers_triton.any_of_layers,
    "split": split_triton.split,
    "nearest": nearest_triton.nearest,
    "inner_products": inner_products_triton.inner_products,
    "means": means_triton.means,
    "means_of_columns": means_triton.means_of_columns,
    "updated_where_left": updated_where_left_triton.updated_where_left,
    "draws": draws_triton.draws,
    "finite": finite_triton.finite,
    "following": following_triton.following,
    "links": links_triton.links,
    "target": target_triton.target,
    "merge_entries": merge_entries_triton.merge_entries,
    "merge_rows": merge_rows_triton.merge_rows,
    "merge_mass": merge_rows_triton.merge_mass,
    "members": merge_rows_triton.members,
    "gram": share_triton.gram,
    "blend": share_triton.blend,
}
