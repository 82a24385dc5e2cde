"""What is remembered of entries goes on with those that stay, and makes room for new ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kvpolicy.kernels.launch.arguments import check_tensors


def carry(
    kept: torch.Tensor,
    positions: torch.Tensor,
    used: torch.Tensor,
    newest: torch.Tensor,
    states: Sequence[torch.Tensor],
    fresh: Sequence[float],
    *,
    steps: int,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The entries of S layers of G KV heads that some head of the layer keeps, and new ones.

    Of every layer the newest entries stand in the last columns, and what it has fewer of than
    others is missing in front.

    Args:
        kept: bool [S * G, M], the entries that stay of each list.
        positions: int64 [S, M] of the entries of a layer.
        used: int64 [S], at how many positions some head of the layer keeps an entry.
        newest: int64 [N], of S / N layers each, one behind the other: the position of the last of
            the new entries, which follow each other.
        states: each float64 [S * G, M], a number of every entry, or [S * G, C, M], C numbers.
        fresh: its value for new entries.
        steps: T, new entries.
        width: M', at least every `used` and T.

    Returns:
        int64 [S, M'] positions, -1 where nothing is; bool [S * G, M'], what each list holds, the
        new entries included; and states, each float64 [S * G, ..., M'], 0 where no entry of the
        layer is.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(kept, positions, used, newest, states, fresh)
    layers = len(positions)
    group, device = len(kept) // max(layers, 1), kept.device
    made = torch.full((layers, width), -1, dtype=torch.int64, device=device)
    there = torch.zeros((layers, group, width), dtype=torch.bool, device=device)
    later = [
        torch.zeros((layers, group, *x.shape[1:-1], width), dtype=torch.float64, device=device)
        for x in states
    ]
    made[:, width - steps :] = newest.repeat_interleave(layers // max(len(newest), 1))[:, None]
    made[:, width - steps :] += torch.arange(1 - steps, 1, device=device)
    there[:, :, width - steps :] = True
    for new, value in zip(later, fresh, strict=True):
        new[..., width - steps :] = value
    stays = kept.view(layers, group, kept.shape[1])
    some = stays.any(1)
    layer, column = some.nonzero(as_tuple=True)
    place = (width - steps - used)[layer] + some.cumsum(1)[layer, column] - 1
    made[layer, place] = positions[layer, column]
    there[layer, :, place] = stays[layer, :, column]
    for new, old in zip(later, states, strict=True):
        new[layer, ..., place] = old.unflatten(0, (layers, group))[layer, ..., column]
    return made, there.flatten(0, 1), [new.flatten(0, 1) for new in later]


def check(
    kept: torch.Tensor,
    positions: torch.Tensor,
    used: torch.Tensor,
    newest: torch.Tensor,
    states: Sequence[torch.Tensor],
    fresh: Sequence[float],
) -> None:
    """Refuses wrong shapes and dtypes; reads no tensor.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    if kept.dim() != 2 or kept.dtype != torch.bool:
        raise ValueError(f"kept: expected bool [S * G, M], got {kept.dtype} {list(kept.shape)}")
    layers = len(used)
    given = [
        ("positions", positions, torch.int64, (layers, kept.shape[1])),
        ("used", used, torch.int64, (layers,)),
        *(
            (f"states[{i}]", x, torch.float64, (len(kept), *x.shape[1:-1][:1], kept.shape[1]))
            for i, x in enumerate(states)
        ),
    ]
    check_tensors(given)
    if newest.dtype != torch.int64 or not len(newest) or layers % len(newest):
        raise ValueError(
            f"newest: expected int64 [N], N a part of {layers}, "
            f"got {newest.dtype} {list(newest.shape)}"
        )
    if len(fresh) != len(states):
        raise ValueError(f"fresh: expected {len(states)} numbers, got {len(fresh)}")
