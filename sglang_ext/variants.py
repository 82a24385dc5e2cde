"""Policies with parameters that a request sets: `custom_params.kv_policy_set`.

Which parameters a request may set the operator lists (`--kv-policy-allow-set`). The front end
checks the values, so that a wrong one is the client's error; the scheduler binds the policy with
them once and keeps what was used last. What a server reserves at its start depends on a policy's
text, not on its parameters, so a variant needs nothing more.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from kvpolicy.dsl.cost_limit import check_cost
from kvpolicy.dsl.diagnostics import PolicyError, listed
from kvpolicy.dsl.ir import ModelShape
from kvpolicy.sglang_ext import options
from kvpolicy.sglang_ext.asked import SET, named, shown
from kvpolicy.sglang_ext.catalog import Catalog
from kvpolicy.sglang_ext.errors import Refused
from kvpolicy.sglang_ext.options import Policy
from kvpolicy.sglang_ext.request import Served

logger = logging.getLogger(__name__)

MOST = 64  # variants that a scheduler keeps
_MOST_CHECKED = 1024


def text_of(value: float | bool) -> str:
    """A parameter's value as settings write it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:.17g}"


class Allowed:
    """The parameters that requests may set."""

    def __init__(self, catalog: Catalog, names: Sequence[str]) -> None:
        """
        Args:
            catalog: the policies that are served.
            names: of --kv-policy-allow-set, `POLICY.NAME`, or `NAME` where there is one policy.

        Raises:
            Refused: a policy or parameter that is listed is not there.
        """
        self._catalog = catalog
        self._names = _by_policy(list(catalog.policies.values()), names)
        self._check = lru_cache(maxsize=_MOST_CHECKED)(self._problem)

    def check(self, policy: Any, values: Any) -> None:
        """Whether a request may set these values of a policy.

        Args:
            policy: that the request names; None for the default.

        Raises:
            ValueError: it may not; the message is for the client.
        """
        policies = self._catalog.policies
        name = self._catalog.default if policy is None else policy
        if not isinstance(values, dict):
            raise ValueError(f"custom_params.{SET} is {shown(values)}; expected a JSON object")
        if not isinstance(name, str) or name not in policies:
            raise ValueError(f"custom_params.{SET} sets parameters of {named(name)}")
        allowed = self._names.get(name, ())
        for key, value in values.items():
            if key not in allowed:
                known = f"only {listed(allowed, 'and')}" if allowed else "none"
                raise ValueError(
                    f"custom_params.{SET} sets {named(key)}; of `{name}` requests may set {known} "
                    "(--kv-policy-allow-set)"
                )
            if not isinstance(value, bool | int | float):
                raise ValueError(
                    f"custom_params.{SET}.{key} is {shown(value)}; expected a number, true or false"
                )
        texts = tuple(sorted((key, text_of(value)) for key, value in values.items()))
        problem = self._check(policies[name], texts)
        if problem is not None:
            raise ValueError(f"custom_params.{SET} of `{name}`: {problem}")

    def _problem(self, policy: Policy, values: tuple[tuple[str, str], ...]) -> str | None:
        catalog, most = self._catalog, options.max_cost()
        try:
            bound = _with(policy, values).bind(catalog.model.shape)
            if most:
                option = "--kv-policy-max-cost"
                check_cost(bound, catalog.model, catalog.length, most / 100, option)
        except (PolicyError, Refused) as error:
            first = error.diagnostics[0].message if isinstance(error, PolicyError) else str(error)
            return first.splitlines()[0]
        return None


class Variants:
    """Policies with parameters of requests, in a scheduler; those used last are kept."""

    def __init__(self, shape: ModelShape, make: Callable[[Policy, Any], Served]) -> None:
        """
        Args:
            shape: of the model.
            make: from a policy and its binding to what is served.
        """
        self._shape, self._make = shape, make
        self._kept: OrderedDict[tuple[str, tuple[tuple[str, str], ...]], Served] = OrderedDict()

    def of(self, base: Served, values: Mapping[str, Any]) -> Served:
        """A policy with other values of some parameters.

        Raises:
            ValueError: it cannot be bound with them.
        """
        texts = tuple(sorted((key, text_of(value)) for key, value in values.items()))
        key = (base.name, texts)
        if key not in self._kept:
            policy = _with(base.policy, texts)
            try:
                variant = self._make(policy, policy.bind(self._shape))
            except Refused as error:
                raise ValueError(f"custom_params.{SET}: {error}") from None
            except Exception as error:
                logger.exception("KV-cache policy %s cannot be served with %s.", base.name, texts)
                raise ValueError(
                    f"custom_params.{SET}: `{base.name}` failed with these values; the server's "
                    "log says why"
                ) from error
            variant.standing = base.standing
            variant.set = dict(values)
            self._kept[key] = variant
            while len(self._kept) > MOST:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def forget(self, name: str) -> None:
        """The policy of this name has changed, or gone."""
        for key in [key for key in self._kept if key[0] == name]:
            del self._kept[key]


def _with(policy: Policy, values: Sequence[tuple[str, str]]) -> Policy:
    return replace(policy, settings={**policy.settings, **dict(values)})


def _by_policy(policies: Sequence[Policy], given: Sequence[str]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    known = {policy.name: policy for policy in policies}
    for each in given:
        policy, dot, parameter = each.rpartition(".")
        if not dot:
            if len(policies) > 1:
                example = f"{policies[0].name}.{each}"
                raise Refused(f"--kv-policy-allow-set {each}: say of which policy, as in {example}")
            policy = policies[0].name
        if policy not in known:
            raise Refused(
                f"--kv-policy-allow-set {each}: no policy is called `{policy}`; there is "
                f"{', '.join(known)}"
            )
        parameters = list(known[policy].program.params)
        if parameter not in parameters:
            there = listed(parameters, "and") if parameters else "none"
            raise Refused(
                f"--kv-policy-allow-set {each}: `{policy}` has no such parameter; there is {there}"
            )
        names.setdefault(policy, []).append(parameter)
    return names
