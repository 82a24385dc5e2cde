"""Which layers a policy with a section `share` stores in pairs, and whether that is served."""

from __future__ import annotations

from kvpolicy.dsl.bind.bind import Bound


def upper_layers(bound: Bound) -> list[int]:
    """Layers that are stored with the one below, from the bottom."""
    if bound.lowered.share is None:
        return []
    return [n for n in range(bound.shape.layers) if bound.number(bound.lowered.share.when, 1, n)]


def unserved(bound: Bound) -> str | None:
    """Why sharing would save nothing, in one sentence; None if it does or is not asked for."""
    if bound.lowered.share is None:
        return None
    if not upper_layers(bound):
        layers = bound.shape.layers
        return (
            f"`share.when` holds at none of the model's {layers} layers; nothing would be shared."
        )
    if set(bound.lowered.share.apply) != {"key", "value"}:
        return "`share.apply` leaves out keys or values; a server shares both or saves nothing."
    return None
