"""Whether a server can store layers in pairs as a policy's section `share` asks."""

from __future__ import annotations

from kvpolicy.dsl.bind.bind import Bound


def check_share(bound: Bound) -> None:
    """Refuses `share` that would save nothing.

    Raises:
        PolicyError: says why, and what to do.
    """
    program, layers = bound.program, bound.shape.layers
    if program.share is None:
        return
    if not bound.upper_layers:
        message = f"`share.when` holds at none of the model's {layers} layers: nothing is shared"
        help = "choose some of them, for example `layer % 2 == 1`"
        raise program.refused("unserved", message, program.share.when.span, help)
    if {*program.share.apply} != {"key", "value"}:
        message = "`share.apply` leaves out keys or values, and a server shares both or none"
        raise program.refused("unserved", message, help="leave out `apply`")
