"""A limit on what a policy may cost, as a share of the prefill's time."""

from __future__ import annotations

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.model_config import ModelConfig
from kvpolicy.dsl.tools.cost import cost


def check_cost(bound: Bound, config: ModelConfig, length: int, most: float, option: str) -> None:
    """Refuses a policy that takes more than a share of a prefill's time; see `cost`.

    Attention is taken to return no log-sum-exp, as the server's backend is not known yet.

    Args:
        length: tokens of the longest prompt, at least 1.
        most: the largest share allowed, 0.5 for half of the prefill's time.
        option: the option that sets the limit in percent, for the message.

    Raises:
        PolicyError: it takes more; the message names the most expensive expression and its place.
    """
    costs = cost(bound, config, length, attended=False)
    if costs.share <= most:
        return
    program, dearest = bound.program, costs.parts[0]
    reason = f": {dearest.squared}" if dearest.squared else ""
    message = (
        f"`{program.name}` takes {_percent(costs.share)} of the time of a prefill of {length:,} "
        f"tokens, more than the {_percent(most)} that are allowed; `{dearest.name}` takes "
        f"{_percent(costs.share_of(dearest))}{reason}"
    )
    advice = f"allow it with `{option} {int(100 * costs.share) + 1}`, or compute less here"
    if dearest.squared:
        advice += ", for example the attention of `recent(64)` alone"
    raise program.refused("cost", message, dearest.span, advice)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"
