"""Whether a server can store layers in pairs as a policy's section `share` asks."""

from __future__ import annotations

from kvpolicy.dsl.bind.bind import Bound


def unserved(bound: Bound) -> str | None:
    """One sentence on why `share` would save nothing; None if it saves or the policy has none."""
    if bound.folded.share is None:
        return None
    if not bound.upper_layers:
        layers = bound.shape.layers
        return (
            f"`share.when` holds at none of the model's {layers} layers; nothing would be shared."
        )
    if set(bound.folded.share.apply) != {"key", "value"}:
        return "`share.apply` leaves out keys or values; a server shares both or saves nothing."
    return None
