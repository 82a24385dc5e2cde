"""Links from leaving entries to their receivers, listed by receiver as `merge_rows` takes them."""

from __future__ import annotations

import torch
from kvpolicy.kernels.launch.arguments import check_axes, check_tensors

# For R lists of n columns: sources, int64 [R, K], columns of leaving entries; weights, float64
# [R, K]; offsets, int32 [R, n + 1]: links to column c are offsets[c] to offsets[c + 1] - 1.
Links = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def links(
    dropped: torch.Tensor,
    receivers: torch.Tensor,
    receivers_present: torch.Tensor,
    accepted: torch.Tensor,
    weights: torch.Tensor,
    tokens: int,
) -> Links:
    """List the links of R lists by receiver, those of one receiver in the order of P, then S.

    Args:
        dropped: int64 [R, P], columns of leaving entries.
        receivers: int64 [R, P, S], columns of the entries that may receive each.
        receivers_present: bool [R, P, S], which of these receivers exist.
        accepted: bool [R, P], which leaving entries are merged.
        weights: float64 [R, P], weight of each leaving entry.
        tokens: n, columns of a list.

    Returns:
        Room for K = P * S links of each list; those from offsets[n] on are no links.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(dropped, receivers, receivers_present, accepted, weights)
    receiver = torch.where(receivers_present & accepted[..., None], receivers, tokens).flatten(1)
    receiver, order = receiver.sort(dim=1, stable=True)
    bounds = torch.arange(tokens + 1, device=receiver.device).repeat(len(receiver), 1)
    offsets = torch.searchsorted(receiver, bounds, out_int32=True)
    place = order // max(receivers.shape[2], 1)
    return dropped.gather(1, place), weights.gather(1, place), offsets


def check(
    dropped: torch.Tensor,
    receivers: torch.Tensor,
    receivers_present: torch.Tensor,
    accepted: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    check_axes("dropped", dropped, torch.int64, "[R, P]")
    check_axes("receivers", receivers, torch.int64, "[R, P, S]")
    arguments = (
        ("receivers", receivers, torch.int64, (*dropped.shape, receivers.shape[2])),
        ("receivers_present", receivers_present, torch.bool, receivers.shape),
        ("accepted", accepted, torch.bool, dropped.shape),
        ("weights", weights, torch.float64, dropped.shape),
    )
    check_tensors(arguments)
