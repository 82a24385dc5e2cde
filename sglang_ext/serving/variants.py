"""In a scheduler: variants of policies, with parameters that requests set (allowed.py).

The front end has checked the values, and asks all schedulers for the variant before it sends them
the first request that needs it (prepared.py): it is bound, and its kernels compiled, while the
scheduler's loop goes on. A request whose variant is not there makes everybody wait for it. That
happens if its policy has been replaced since the front end looked.

Stages handle a message at different times. All keep a variant from the first request with it on,
when all have made it.

A scheduler keeps twice as many variants for each front end as that one takes to be there, so that
an order that differs a little between them does not matter.

What a server reserves at its start depends on a policy's text, not on its parameters, so a variant
needs no more.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.sglang_ext.face.asked import SET
from kvpolicy.sglang_ext.face.errors import NotCompiled, Refused
from kvpolicy.sglang_ext.face.policy_files import Policy, Texts, texts_of
from kvpolicy.sglang_ext.face.ranks import FailedElsewhere, Ranks, Stages, Told
from kvpolicy.sglang_ext.request.request import Served
from kvpolicy.sglang_ext.serving.background import Background
from kvpolicy.sglang_ext.serving.messages import MOST_PENDING, MOST_VARIANTS

logger = logging.getLogger(__name__)

_NOBODY = ""  # the front end of variants that were made for a request at hand
_MOST_KEPT = 2 * MOST_VARIANTS  # for one front end
_MOST_FRONT_ENDS = 32  # whose variants are kept; there are more only after some have ended
_MOST_BEGUN = 8 * MOST_PENDING  # and not asked for again yet

VariantKey = tuple[str, Texts]


class _Begun(NamedTuple):
    future: Future[Served]
    told: Told  # whether it is still being made


class Variants:
    """The variants of a scheduler's policies; those that front ends asked for last are kept."""

    def __init__(
        self,
        shape: ModelShape,
        make: Callable[[Policy, Any], Served],
        prepare: Callable[[Served], None],
        ranks: Ranks,
        stages: Stages,
        background: Background,
    ) -> None:
        """
        Args:
            shape: of the model.
            make: from a policy and its binding to a `Served`.
            prepare: compiles its kernels.
            ranks, stages: of which all keep the same variants.
            background: where variants are made that no request waits for yet.
        """
        self._shape, self._make, self._prepare = shape, make, prepare
        self._ranks, self._stages, self._background = ranks, stages, background
        self._kept: dict[VariantKey, Served] = {}
        self._wanted: OrderedDict[str, OrderedDict[VariantKey, None]] = (
            OrderedDict()
        )  # by front end
        self._begun: OrderedDict[VariantKey, _Begun] = OrderedDict()

    def of(self, base: Served, values: Mapping[str, Any]) -> Served:
        """A policy with other values of some parameters; made now if it is not there.

        Raises:
            ValueError: it cannot be bound with them, or a rank cannot make it.
        """
        key = (base.name, texts_of(values))
        if key not in self._kept:
            self._keep(base, values, _NOBODY)
        elif key in self._wanted.get(_NOBODY, ()):
            self._wanted[_NOBODY].move_to_end(key)
        return self._kept[key]

    def is_ready(self, base: Served, values: Mapping[str, Any], front_end: str) -> bool:
        """Begin to make a variant in the background, if that has not begun; whether it is there.

        All ranks ask at the same point, and it is there on all of them or on none. Stages ask at
        different times: it is there when all have said that it is made.

        Args:
            front_end: name of the front end that asks.

        Raises:
            ValueError: as of `of`.
        """
        key = (base.name, texts_of(values))
        if key in self._kept:
            self._want(key, front_end)
            return True
        if key not in self._begun:
            future = self._background.begin(partial(self._variant, base, key[1]))
            self._begun[key] = _Begun(future, Told(self._ranks, self._stages))
            while len(self._begun) > _MOST_BEGUN:
                self._begun.popitem(last=False)[1].future.cancel()
        begun = self._begun[key]
        done = begun.future.done()
        failed = done and begun.future.exception() is not None
        waits, has_failed = begun.told.worst([not done, failed], [True, False])
        if waits:
            return False
        if not self._stages.several:
            self._keep(base, values, front_end)
        elif has_failed:
            del self._begun[key]
            if failed:
                _made(base, begun.future.result)
            raise _failed(base)
        return True

    def _keep(self, base: Served, values: Mapping[str, Any], front_end: str) -> None:
        key = (base.name, texts_of(values))
        begun = self._begun.pop(key, None)
        # What waits behind other variants in the background is made here and now instead.
        if begun is None or begun.future.cancel():
            # Other stages have taken the request or will, and cannot be told in time if kernels
            # fail to compile here. If its policy fails, it fails on all.
            make = self._unprepared if self._stages.several else self._variant
            variant = self._on_all_ranks(base, partial(make, base, key[1]))
        else:
            variant = self._on_all_ranks(base, begun.future.result)
        variant.standing = base.standing
        variant.set = dict(values)
        self._kept[key] = variant
        self._want(key, front_end)

    def _want(self, key: VariantKey, front_end: str) -> None:
        """Note that a front end wants a variant; drop those that it and others want no longer."""
        keys = self._wanted.setdefault(front_end, OrderedDict())
        self._wanted.move_to_end(front_end)
        keys[key] = None
        keys.move_to_end(key)
        dropped = [keys.popitem(last=False)[0]] if len(keys) > _MOST_KEPT else []
        if len(self._wanted) > _MOST_FRONT_ENDS:
            dropped += self._wanted.popitem(last=False)[1]
        for other in dropped:
            if not any(other in wanted for wanted in self._wanted.values()):
                del self._kept[other]

    def _on_all_ranks(self, base: Served, make: Callable[[], Served]) -> Served:
        """The variant, if every rank can make it: otherwise one of them would serve another."""
        try:
            variant = _made(base, make)
        except ValueError:
            self._ranks.meet(failed=True)
            raise
        try:
            self._ranks.meet()
        except FailedElsewhere:
            raise _failed(base) from None
        return variant

    def _variant(self, base: Served, texts: Texts) -> Served:
        variant = self._unprepared(base, texts)
        self._prepare(variant)
        return variant

    def _unprepared(self, base: Served, texts: Texts) -> Served:
        policy = base.policy.with_settings(texts)
        return self._make(policy, policy.bind(self._shape))

    def forget(self, name: str) -> None:
        """Drop the variants of a policy that has changed or is gone."""
        for key in [key for key in self._begun if key[0] == name]:
            self._begun.pop(key).future.cancel()
        for key in [key for key in self._kept if key[0] == name]:
            del self._kept[key]
            for keys in self._wanted.values():
                keys.pop(key, None)


def _made(base: Served, make: Callable[[], Served]) -> Served:
    """The variant.

    Raises:
        ValueError: it cannot be made; the message is for the client.
    """
    try:
        return make()
    except NotCompiled:
        raise _failed(base) from None
    except Refused as error:
        problem = base.policy.reason(error)
        raise ValueError(f"custom_params.{SET} of `{base.name}`: {problem}") from None
    except Exception:
        logger.exception("A variant of KV-cache policy %s cannot be served.", base.name)
        raise _failed(base) from None


def _failed(base: Served) -> ValueError:
    return ValueError(
        f"custom_params.{SET}: `{base.name}` failed with these values; the server's log says why"
    )
