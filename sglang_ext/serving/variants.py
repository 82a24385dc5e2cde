"""In a scheduler: variants of policies, with parameters that requests set (allowed.py).

The front end has checked the values, and asks all schedulers for the variant before it sends them
the first request that needs it (prepared.py): it is bound, and its kernels compiled, while the
scheduler's loop goes on. A request whose variant is not there makes everybody wait for it. That
happens if the variant was dropped meanwhile, whose kernels are still there; and in stages, which
handle a message at different times. The variants used last are kept.

What a server reserves at its start depends on a policy's text, not on its parameters, so a variant
needs no more.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.sglang_ext.face.asked import SET
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.face.options import Policy, Texts, texts_of
from kvpolicy.sglang_ext.face.ranks import FailedElsewhere, Ranks
from kvpolicy.sglang_ext.request.request import Served
from kvpolicy.sglang_ext.serving.background import Background
from kvpolicy.sglang_ext.serving.messages import MOST_VARIANTS

logger = logging.getLogger(__name__)


class Variants:
    """The variants of a scheduler's policies; those used last are kept."""

    def __init__(
        self,
        shape: ModelShape,
        make: Callable[[Policy, Any], Served],
        ranks: Ranks,
        background: Background,
    ) -> None:
        """
        Args:
            shape: of the model.
            make: from a policy and its binding to a `Served`.
            ranks: of which all keep the same variants.
            background: where variants are made that no request waits for yet.
        """
        self._shape, self._make, self._ranks = shape, make, ranks
        self._background = background
        self._kept: OrderedDict[tuple[str, Texts], Served] = OrderedDict()
        self._begun: dict[tuple[str, Texts], Future[Served]] = {}

    def of(self, base: Served, values: Mapping[str, Any]) -> Served:
        """A policy with other values of some parameters; made now if it is not there.

        Raises:
            ValueError: it cannot be bound with them, or a rank cannot make it.
        """
        key = (base.name, texts_of(values))
        if key not in self._kept:
            self._keep(base, values)
        self._kept.move_to_end(key)
        return self._kept[key]

    def is_ready(self, base: Served, values: Mapping[str, Any]) -> bool:
        """Begin to make a variant in the background, if that has not begun; whether it is there.

        All ranks ask at the same point, and it is there on all of them or on none.

        Raises:
            ValueError: as of `of`.
        """
        key = (base.name, texts_of(values))
        if key in self._kept:
            return True
        if key not in self._begun:
            self._begun[key] = self._background.begin(partial(self._variant, base, key[1]))
        (waits,) = self._ranks.worst([not self._begun[key].done()])
        if not waits:
            self._keep(base, values)
        return not waits

    def _keep(self, base: Served, values: Mapping[str, Any]) -> None:
        key = (base.name, texts_of(values))
        future = self._begun.pop(key, None)
        make = partial(self._variant, base, key[1]) if future is None else future.result
        variant = self._on_all_ranks(base, make)
        variant.standing = base.standing
        variant.set = dict(values)
        self._kept[key] = variant
        while len(self._kept) > MOST_VARIANTS:
            self._kept.popitem(last=False)

    def _on_all_ranks(self, base: Served, make: Callable[[], Served]) -> Served:
        """The variant, if every rank can make it: otherwise one of them would serve another."""
        outcome: Served | ValueError
        try:
            outcome = make()
        except Refused as error:
            outcome = ValueError(f"custom_params.{SET}: {error}")
        except Exception:
            logger.exception("A variant of KV-cache policy %s cannot be served.", base.name)
            outcome = _failed(base)
        try:
            self._ranks.meet(failed=isinstance(outcome, ValueError))
        except FailedElsewhere:
            outcome = _failed(base)
        if isinstance(outcome, ValueError):
            raise outcome
        return outcome

    def _variant(self, base: Served, texts: Texts) -> Served:
        policy = base.policy.with_settings(texts)
        return self._make(policy, policy.bind(self._shape))

    def forget(self, name: str) -> None:
        """Drop the variants of a policy that has changed or is gone."""
        for by_key in (self._kept, self._begun):
            for key in [key for key in by_key if key[0] == name]:
                del by_key[key]


def _failed(base: Served) -> ValueError:
    return ValueError(
        f"custom_params.{SET}: `{base.name}` failed with these values; the server's log says why"
    )
