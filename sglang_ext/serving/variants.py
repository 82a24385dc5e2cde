"""In a scheduler: variants of policies, with parameters that requests set (allowed.py).

The front end has checked the values; the scheduler binds the policy with them once and keeps the
variants used last. What a server reserves at its start depends on a policy's text, not on its
parameters, so a variant needs no more.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.sglang_ext.face.asked import SET
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.face.options import Policy, text_of
from kvpolicy.sglang_ext.face.ranks import FailedElsewhere, Ranks
from kvpolicy.sglang_ext.request.request import Served

logger = logging.getLogger(__name__)

MOST = 64  # variants that a scheduler keeps
Texts = tuple[tuple[str, str], ...]  # names of parameters and their values as text


class Variants:
    """The variants of a scheduler's policies; those used last are kept."""

    def __init__(
        self, shape: ModelShape, make: Callable[[Policy, Any], Served], ranks: Ranks
    ) -> None:
        """
        Args:
            shape: of the model.
            make: from a policy and its binding to a `Served`.
            ranks: of which all keep the same variants.
        """
        self._shape, self._make, self._ranks = shape, make, ranks
        self._kept: OrderedDict[tuple[str, Texts], Served] = OrderedDict()

    def of(self, base: Served, values: Mapping[str, Any]) -> Served:
        """A policy with other values of some parameters.

        Raises:
            ValueError: it cannot be bound with them, or a rank cannot make it.
        """
        texts = tuple(sorted((key, text_of(value)) for key, value in values.items()))
        key = (base.name, texts)
        if key not in self._kept:
            variant = self._on_all_ranks(base, texts)
            variant.standing = base.standing
            variant.set = dict(values)
            self._kept[key] = variant
            while len(self._kept) > MOST:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _on_all_ranks(self, base: Served, texts: Texts) -> Served:
        """The variant, if every rank can make it: otherwise one of them would serve another."""
        made: Served | ValueError
        try:
            made = self._variant(base, texts)
        except ValueError as error:
            made = error
        try:
            self._ranks.meet(failed=isinstance(made, ValueError))
        except FailedElsewhere:
            made = _failed(base)
        if isinstance(made, ValueError):
            raise made
        return made

    def _variant(self, base: Served, texts: Texts) -> Served:
        policy = base.policy.with_settings(texts)
        try:
            return self._make(policy, policy.bind(self._shape))
        except Refused as error:
            raise ValueError(f"custom_params.{SET}: {error}") from None
        except Exception as error:
            logger.exception("KV-cache policy %s cannot be served with %s.", base.name, texts)
            raise _failed(base) from error

    def forget(self, name: str) -> None:
        """Drop the variants of a policy that has changed or is gone."""
        for key in [key for key in self._kept if key[0] == name]:
            del self._kept[key]


def _failed(base: Served) -> ValueError:
    return ValueError(
        f"custom_params.{SET}: `{base.name}` failed with these values; the server's log says why"
    )
