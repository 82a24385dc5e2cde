"""Which leaving entries are added to which others, listed by receiver as `merge_rows` takes it."""

from __future__ import annotations

import torch
from kvpolicy.kernels.launch.arguments import check_tensors

# Of R lists of n columns int64 [R, K] sources, the column of what leaves, float64 [R, K] weights,
# and int32 [R, n + 1] offsets: the links of column c are from offsets[c] to offsets[c + 1].
Links = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def links(
    places: torch.Tensor,
    receivers: torch.Tensor,
    joins: torch.Tensor,
    accepted: torch.Tensor,
    weights: torch.Tensor,
    tokens: int,
) -> Links:
    """The links of R lists; those of one receiver in the order of the entries that it gets.

    Args:
        places: int64 [R, P], columns of leaving entries.
        receivers: int64 [R, P, S], columns of the entries that may receive each.
        joins: bool [R, P, S], which of these there are.
        accepted: bool [R, P], which leaving entries are added to others.
        weights: float64 [R, P], what each counts.
        tokens: n, columns.

    Returns:
        K = P * S of each list; what follows the last one is no link.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(places, receivers, joins, accepted, weights)
    to = torch.where(joins & accepted[..., None], receivers, tokens).flatten(1)
    to, order = to.sort(dim=1, stable=True)
    bounds = torch.arange(tokens + 1, device=to.device).repeat(len(to), 1)
    offsets = torch.searchsorted(to, bounds, out_int32=True)
    place = order // max(receivers.shape[2], 1)
    return places.gather(1, place), weights.gather(1, place), offsets


def check(
    places: torch.Tensor,
    receivers: torch.Tensor,
    joins: torch.Tensor,
    accepted: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Refuses wrong shapes and dtypes; reads no tensor.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    if places.dtype != torch.int64 or places.dim() != 2:
        raise ValueError(f"places: expected int64 [R, P], got {places.dtype} {list(places.shape)}")
    if receivers.dtype != torch.int64 or receivers.dim() != 3:
        actual = f"{receivers.dtype} {list(receivers.shape)}"
        raise ValueError(f"receivers: expected int64 [R, P, S], got {actual}")
    given = (
        ("receivers", receivers, torch.int64, (*places.shape, receivers.shape[2])),
        ("joins", joins, torch.bool, receivers.shape),
        ("accepted", accepted, torch.bool, places.shape),
        ("weights", weights, torch.float64, places.shape),
    )
    check_tensors(given)
