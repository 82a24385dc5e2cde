"""Parameters that requests may set, `custom_params.kv_policy_set`, as the front end checks them.

The operator lists them (`--kv-policy-allow-set`). A wrong value is the client's error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kvpolicy.dsl.syntax.diagnostics import PolicyError, listed
from kvpolicy.dsl.tools.cost_limit import check_cost
from kvpolicy.experiments.definition.experiment import NO_POLICY
from kvpolicy.sglang_ext.clients.catalog import Catalog
from kvpolicy.sglang_ext.face import options
from kvpolicy.sglang_ext.face.asked import POLICY, SET, check_values, named, not_served
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.face.policy_files import Policy, Texts, texts_of

_MOST_CHECKED = 1024


class Allowed:
    """The parameters that requests may set."""

    def __init__(self, catalog: Catalog, names: Sequence[str]) -> None:
        """
        Args:
            catalog: the policies that are served.
            names: of --kv-policy-allow-set, `POLICY.NAME`, or `NAME` where there is one policy.

        Raises:
            Refused: a listed policy or parameter does not exist, or its policy is not said.
        """
        self._catalog = catalog
        self._names = _by_policy(list(catalog.policies.values()), names)
        self._check = lru_cache(maxsize=_MOST_CHECKED)(self._problem)

    async def check(self, policy: Any, values: Any) -> Policy:
        """Check that a request may set these parameters of a policy.

        Args:
            policy: the name that the request gives; None for the default.
            values: of the parameters, by name, as the client sent them.

        Returns:
            The policy that was checked; another may have taken its place meanwhile.

        Raises:
            ValueError: it may not; the message is for the client.
        """
        policies = self._catalog.policies
        name = self._catalog.default if policy is None else policy
        check_values(values)
        if name == NO_POLICY:
            raise ValueError(f"custom_params.{SET} sets parameters, and full KV (`none`) has none")
        if not isinstance(name, str) or name not in policies:
            raise not_served(f"custom_params.{POLICY}", name, (*policies, NO_POLICY))
        allowed = self._names.get(name, ())
        for key in values:
            if key not in allowed:
                settable = f"only {listed(allowed, 'and')}" if allowed else "none"
                raise ValueError(
                    f"custom_params.{SET} sets {named(key)}; of `{name}` requests may set "
                    f"{settable} (--kv-policy-allow-set)"
                )
        checked = policies[name]
        # Other requests do not wait while a policy is bound and its cost is counted.
        problem = await asyncio.to_thread(self._check, checked, texts_of(values))
        if problem is not None:
            raise ValueError(f"custom_params.{SET} of `{name}`: {problem}")
        return checked

    def _problem(self, policy: Policy, values: Texts) -> str | None:
        catalog, max_percent = self._catalog, options.max_cost()
        try:
            bound = policy.with_settings(values).bind(catalog.model.shape)
            if max_percent:
                option = "--kv-policy-max-cost"
                check_cost(bound, catalog.model, catalog.length, max_percent / 100, option)
        except (PolicyError, Refused) as error:
            return policy.reason(error)
        return None


def _by_policy(policies: Sequence[Policy], listed_names: Sequence[str]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    by_name = {policy.name: policy for policy in policies}
    for name in listed_names:
        policy, dot, parameter = name.rpartition(".")
        if not dot:
            if len(policies) > 1:
                example = f"{policies[0].name}.{name}"
                raise Refused(f"--kv-policy-allow-set {name}: say of which policy, as in {example}")
            policy = policies[0].name
        if policy not in by_name:
            raise Refused(
                f"--kv-policy-allow-set {name}: no policy is called `{policy}`; there is "
                f"{', '.join(by_name)}"
            )
        parameters = list(by_name[policy].program.params)
        if parameter not in parameters:
            available = listed(parameters, "and") if parameters else "none"
            raise Refused(
                f"--kv-policy-allow-set {name}: `{policy}` has no such parameter; there is "
                f"{available}"
            )
        names.setdefault(policy, []).append(parameter)
    return names
