"""Carry positions and states of entries over to those that stay, and append new entries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kvpolicy.kernels.launch.arguments import check_axes, check_tensors, refused


def carry(
    kept: torch.Tensor,
    columns: torch.Tensor | None,
    positions: torch.Tensor,
    used: torch.Tensor,
    newest: torch.Tensor,
    states: Sequence[torch.Tensor],
    fresh: Sequence[float],
    *,
    steps: int,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Collect the entries that any KV head of a layer keeps, for S layers of G heads, and new ones.

    New entries stand in the last columns, kept ones before them; a layer with fewer entries than
    others has empty columns in front.

    Args:
        kept: bool [S * G, M], the entries that stay in each list.
        columns: bool [S, M], the columns that are collected, among them all with a kept entry;
            None: only these.
        positions: int64 [S, M], positions of a layer's entries.
        used: int64 [S], number of columns of a layer that are collected.
        newest: int64 [N], position of the last new entry of each of N requests, which have S / N
            consecutive layers each; positions of new entries are consecutive.
        states: each float64 [S * G, C, M], C > 0 numbers per entry.
        fresh: value of each state for new entries.
        steps: T, number of new entries.
        width: M', at least T plus the largest of `used`.

    Returns:
        int64 [S, M'] positions, -1 in empty columns; bool [S * G, M'], the entries that each list
        holds, new ones included; states, each float64 [S * G, C, M'], 0 in empty columns.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(kept, columns, positions, used, newest, states, fresh)
    layers = len(positions)
    kv_heads, device = len(kept) // max(layers, 1), kept.device
    new_positions = torch.full((layers, width), -1, dtype=torch.int64, device=device)
    holds = torch.zeros((layers, kv_heads, width), dtype=torch.bool, device=device)
    new_states = [
        torch.zeros((layers, kv_heads, x.shape[1], width), dtype=torch.float64, device=device)
        for x in states
    ]
    new_positions[:, width - steps :] = newest.repeat_interleave(layers // max(len(newest), 1))[
        :, None
    ]
    new_positions[:, width - steps :] += torch.arange(1 - steps, 1, device=device)
    holds[:, :, width - steps :] = True
    for new_state, value in zip(new_states, fresh, strict=True):
        new_state[..., width - steps :] = value
    stays = kept.view(layers, kv_heads, kept.shape[1])
    collected = stays.any(1) if columns is None else columns
    layer, column = collected.nonzero(as_tuple=True)
    place = (width - steps - used)[layer] + collected.cumsum(1)[layer, column] - 1
    new_positions[layer, place] = positions[layer, column]
    holds[layer, :, place] = stays[layer, :, column]
    for new_state, state in zip(new_states, states, strict=True):
        new_state[layer, ..., place] = state.unflatten(0, (layers, kv_heads))[layer, ..., column]
    return new_positions, holds.flatten(0, 1), [new_state.flatten(0, 1) for new_state in new_states]


def check(
    kept: torch.Tensor,
    columns: torch.Tensor | None,
    positions: torch.Tensor,
    used: torch.Tensor,
    newest: torch.Tensor,
    states: Sequence[torch.Tensor],
    fresh: Sequence[float],
) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    check_axes("kept", kept, torch.bool, "[S * G, M]")
    layers = len(used)
    arguments = [
        ("columns", columns, torch.bool, (layers, kept.shape[1])),
        ("positions", positions, torch.int64, (layers, kept.shape[1])),
        ("used", used, torch.int64, (layers,)),
        *(
            (f"states[{i}]", x, torch.float64, (len(kept), *x.shape[1:2], kept.shape[1]))
            for i, x in enumerate(states)
        ),
    ]
    check_tensors(arguments)
    for i, x in enumerate(states):
        if not x.shape[1]:
            raise refused(f"states[{i}]", x, "float64 [S * G, C, M], C > 0")
    if newest.dtype != torch.int64 or not len(newest) or layers % len(newest):
        raise refused("newest", newest, f"int64 [N], N a part of {layers}")
    if len(fresh) != len(states):
        raise ValueError(f"fresh: expected {len(states)} numbers, got {len(fresh)}")
