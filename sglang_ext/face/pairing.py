"""Whether it is served that a policy with a section `share` stores layers in pairs."""

from __future__ import annotations

from kvpolicy.dsl.bind.bind import Bound


def unserved(bound: Bound) -> str | None:
    """Why sharing would save nothing, in one sentence; None if it does or is not asked for."""
    if bound.lowered.share is None:
        return None
    if not bound.upper_layers:
        layers = bound.shape.layers
        return (
            f"`share.when` holds at none of the model's {layers} layers; nothing would be shared."
        )
    if set(bound.lowered.share.apply) != {"key", "value"}:
        return "`share.apply` leaves out keys or values; a server shares both or saves nothing."
    return None
