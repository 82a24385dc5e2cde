"""Whether entries of a pool hold neither NaN nor infinity."""

from __future__ import annotations

import torch
from kvpolicy.kernels.launch.arguments import check_axes, refused


def finite(
    keys: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, holds: torch.Tensor
) -> torch.Tensor:
    """Whether the keys and values of each of R lists are all finite.

    Args:
        keys, values: [E, D] and [E', D] of one float dtype, each row contiguous.
        ids: int64 [R, M], rows of both pools, the entries of each list.
        holds: bool [R, M], columns at which a list holds an entry; others are not read.

    Returns:
        bool [R].

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(keys, values, ids, holds)
    rows, column = holds.nonzero(as_tuple=True)
    entries = ids[rows, column]
    good = torch.stack([pool[entries].double().isfinite().all(1) for pool in (keys, values)]).all(0)
    result = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    return result.index_put((rows[~good],), torch.zeros_like(result[:1]))


def check(keys: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, holds: torch.Tensor) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    for name, x in (("keys", keys), ("values", values)):
        fits = x.dtype == keys.dtype and x.shape[1:] == keys.shape[1:] and x.stride(-1) == 1
        if x.dim() != 2 or not x.is_floating_point() or not fits:
            raise refused(name, x, "floats [E, D] as of keys, rows contiguous")
    check_axes("ids", ids, torch.int64, "[R, M]")
    if holds.dtype != torch.bool or holds.shape != ids.shape:
        raise refused("holds", holds, f"bool {list(ids.shape)}")
