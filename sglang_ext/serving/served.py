"""The policies that a scheduler serves now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpolicy.experiments.definition.experiment import NO_POLICY
from kvpolicy.sglang_ext.face import asked
from kvpolicy.sglang_ext.report.metrics import Metrics
from kvpolicy.sglang_ext.request import request
from kvpolicy.sglang_ext.request.request import Served
from kvpolicy.sglang_ext.serving.variants import Variants


class ServedPolicies:
    """Policies by name; the first one is the default of requests that name none."""

    def __init__(self, served: Sequence[Served], variants: Variants, metrics: Metrics) -> None:
        self._served = {policy.name: policy for policy in served}
        self._previous = self._served  # what was served before the latest change
        self._variants, self._metrics = variants, metrics

    def choose(self, wanted: Mapping[str, Any]) -> Served | None:
        """The policy that a request asks for; None for full KV.

        Args:
            wanted: the plugin's keys of its `custom_params`.

        Raises:
            ValueError: there is no such policy, or it cannot be served with the request's values;
                the message is for the client.
        """
        served = request.choose(self._served, self._default, wanted)
        values = wanted.get(asked.SET)
        return served if served is None or not values else self._variants.of(served, values)

    def has_variant(self, name: str, values: Mapping[str, Any], front_end: str) -> bool:
        """Whether a policy's variant is there; see `Variants.is_ready`.

        Raises:
            ValueError: there is no such policy, or it cannot be served with these values; the
                message is for the client.
        """
        if name not in self._served:
            names = (*self._served, NO_POLICY)
            raise asked.not_served(f"custom_params.{asked.POLICY}", name, names)
        return self._variants.is_ready(self._served[name], values, front_end)

    @property
    def _default(self) -> str:
        return next(iter(self._served))

    def describe(self) -> list[dict[str, Any]]:
        """The policies, for clients that ask the server."""
        return [
            {
                "name": served.name,
                "path": served.policy.path,
                "settings": dict(served.policy.settings),
                "default": served.name == self._default,
                "enabled": served.standing.enabled,
                "failures": served.standing.failures,
                "digest": served.bound.digest[:12],
            }
            for served in self._served.values()
        ]

    def replace(self, served: Served) -> None:
        """Serve a policy from the next request on, in place of the one of its name, if any."""
        self._change({**self._served, served.name: served}, served.name)

    def withdraw(self, name: str) -> None:
        """Serve a policy no longer; requests that have it keep it."""
        self._change({key: served for key, served in self._served.items() if key != name}, name)

    def undo(self, name: str) -> None:
        """Serve what was served before the latest change, which was of this policy."""
        self._change(self._previous, name)

    def _change(self, served: dict[str, Served], name: str) -> None:
        self._variants.forget(name)
        self._metrics.begin(name)
        # A withdrawn policy has not failed.
        self._metrics.enabled(name, on=name not in served or served[name].standing.enabled)
        self._previous, self._served = self._served, served
