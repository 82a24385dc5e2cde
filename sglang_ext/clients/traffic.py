"""In the front end: which policy each request gets, decided before SGLang sees it.

A policy that the request names comes first, where the operator allows it (`--kv-policy-override`):
in `custom_params.kv_policy`, in the header `x-kv-policy`, or after the model's name
(`name:policy`). Else an experiment assigns an arm by the hash of a key. The choice is written into
the request, so all ranks of the server agree on it. While policies are switched off, every request
gets full KV.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from kvpolicy.experiments.definition.experiment import NO_POLICY, KeySource
from kvpolicy.experiments.replica.assignment import AssignmentReason
from kvpolicy.sglang_ext.clients.allowed import Allowed
from kvpolicy.sglang_ext.clients.prepared import Prepared
from kvpolicy.sglang_ext.experiment.live import Live
from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.face.asked import ASSIGNED, POLICY, SET, named, not_served, quoted
from kvpolicy.sglang_ext.face.options import ANY, LISTED, NOBODY

HEADER = "x-kv-policy"  # in a request it names a policy, in an answer it holds the facts
_LONGEST_KEY = 1024  # characters that are hashed


class Traffic:
    """The requests of one server.

    Attributes:
        enabled: whether policies are applied at all; an operator may switch them off and on.
        live: the experiment, if there is one.
    """

    def __init__(
        self,
        policies: Mapping[str, Any],
        override: str = ANY,
        live: Live | None = None,
        allowed: Allowed | None = None,
        labels: Collection[str] = (),
    ) -> None:
        """
        Args:
            policies: name -> policy that is served now; the catalog changes it.
            override: what clients may name, one of `options.OVERRIDES`.
            allowed: parameters that clients may set; None for no check.
            labels: labels of SGLang's histograms that requests may have.
        """
        self.enabled = True
        self.live = live
        self._policies, self._override = policies, override
        self._allowed, self._labels = allowed, labels
        self._prepared = Prepared()

    async def choose(self, manager: Any, obj: Any, request: Any) -> bool:
        """Write the policy that a client names, or that policies are off, into a request.

        If it sets parameters, wait until the schedulers have its variant.

        Args:
            manager: SGLang's tokenizer manager.
            obj: SGLang's request, as its route has made it; a single one or a batch.
            request: the HTTP request; None for one that a program makes.

        Returns:
            Whether the experiment decides for parts of it: then `draw`.

        Raises:
            ValueError: the client asks for what it may not have; the message is for the client.
        """
        parts = _parts(obj)
        write = partial(_write, obj, compat.preferred_custom_params(manager))
        customs = [custom for custom in map(_custom, parts) if custom is not None]
        if any(ASSIGNED in custom for custom in customs):
            raise ValueError(f"custom_params.{ASSIGNED} is the server's own")
        alias = self._alias(manager, obj)
        if self.live is not None:
            compat.set_labels(obj, self.live.labels(None), self._labels)
        if not self.enabled:
            write(parts, NO_POLICY, {"reason": AssignmentReason.DISABLED.value})
            return False
        header = None if request is None else request.headers.get(HEADER)
        outer_policy = alias if header is None else header
        naming_parts: list[dict[str, Any]] = []
        other_parts: list[dict[str, Any]] = []
        for part in parts:
            custom = _custom(part) or {}
            if POLICY in custom:
                self._check(custom[POLICY], f"custom_params.{POLICY}")
            (naming_parts if POLICY in custom else other_parts).append(part)
        if other_parts and outer_policy is not None:
            after_model = "the policy after the model's name"
            self._check(outer_policy, after_model if header is None else f"header {HEADER}")
        if await self._prepare(manager, customs, outer_policy, _rids(obj)):  # that took some time
            if await _has_gone(obj, request):
                raise ValueError("the client has gone")
            if not self.enabled:
                write(parts, NO_POLICY, {"reason": AssignmentReason.DISABLED.value})
                return False
        if naming_parts or outer_policy is not None:
            note = {} if self.live is None else self.live.named_itself()
            write(naming_parts, None, note)
            if outer_policy is not None:
                write(other_parts, outer_policy, note)
        return bool(other_parts) and outer_policy is None and self.live is not None

    async def draw(self, live: Live, manager: Any, obj: Any, request: Any) -> None:
        """Write the policy of its arm into the parts of a request that name none.

        Args:
            manager, obj, request: as of `choose`.
        """
        parts = _parts(obj)
        write = partial(_write, obj, compat.preferred_custom_params(manager))
        other_parts = [part for part in parts if POLICY not in (_custom(part) or {})]
        drawn_parts = [part for part in other_parts if part.get("max_new_tokens") != 0]
        silent_parts = [part for part in other_parts if part.get("max_new_tokens") == 0]
        if silent_parts:
            write(silent_parts, *live.generates_nothing())
        if not drawn_parts:
            return
        place, key = await self._key(obj, request, live.experiment.targeting_key)
        answers = _answers(obj, drawn_parts)
        policy, assigned = live.assign(place, key, time.time(), answers)
        write(drawn_parts, policy, assigned)
        if len(drawn_parts) == len(parts) and assigned.get("arm") is not None:  # they share labels
            compat.set_labels(obj, live.labels(assigned["arm"]), self._labels)

    def abort(self, rid: str, *, all_requests: bool) -> None:
        """End requests that SGLang does not know yet, as they wait for their policy."""
        self._prepared.abort(rid, all_requests=all_requests)

    def is_policy(self, name: str) -> bool:
        """Whether a name stands for a served policy or for none."""
        return name == NO_POLICY or name in self._policies

    @property
    def _names(self) -> list[str]:
        """What clients may name, where they may name something."""
        return [*self._policies, *([] if self._override == LISTED else [NO_POLICY])]

    def _alias(self, manager: Any, obj: Any) -> str | None:
        """The policy after the model's name, which SGLang takes for a LoRA adapter; or None."""
        name = getattr(obj, "lora_path", None)
        if not name or not isinstance(name, str) or compat.is_adapter(manager, name):
            return None
        if not self.is_policy(name):
            if compat.has_adapters(manager):
                return None  # SGLang says which there are
            raise ValueError(
                f"the request names {named(name)}, after the model's name or in lora_path; LoRA is "
                f"not enabled, and the policies are {quoted(self._names)}"
            )
        obj.lora_path = None
        return name

    def _check(self, name: Any, where: str) -> None:
        """Check that clients may name a policy, and that it is served.

        Args:
            where: what holds the name, for the message.

        Raises:
            ValueError: they may not, or there is none of this name.
        """
        if self._override == NOBODY:
            raise ValueError(
                f"{where} is {named(name)}, but this server chooses the policy of "
                "every request (--kv-policy-override none)"
            )
        if self._override == LISTED and name == NO_POLICY:
            raise ValueError(
                f"{where} is `{NO_POLICY}`, but this server gives no request full "
                f"KV on demand (--kv-policy-override listed); it has {quoted(self._names)}"
            )
        if not isinstance(name, str) or not self.is_policy(name):
            raise not_served(where, name, self._names)

    async def _prepare(
        self,
        manager: Any,
        customs: Sequence[dict[str, Any]],
        outer_policy: str | None,
        rids: Collection[str],
    ) -> bool:
        """Check the parameters that a request sets, and wait for its variants.

        Returns:
            Whether it sets any.

        Raises:
            ValueError: it may not set them, or a variant cannot be made; the message is for the
                client.
        """
        sets = False
        for custom in customs:
            if SET not in custom:
                continue
            name = custom.get(POLICY, outer_policy)
            if name is None and (self.live is not None or self._override == NOBODY):
                raise ValueError(
                    f"custom_params.{SET} sets parameters, but the server chooses the policy of "
                    f"this request; name one in custom_params.{POLICY}"
                )
            sets = True
            while self._allowed is not None:
                policy = await self._allowed.check(name, custom[SET])
                if custom[SET]:
                    await self._prepared.wait(manager, policy, custom[SET], rids)
                if self._policies.get(policy.name) is policy:
                    break  # else replaced meanwhile, and other values may be allowed
        return sets

    async def _key(
        self, obj: Any, request: Any, keys: Sequence[KeySource]
    ) -> tuple[int | None, str]:
        """Place among `keys`, and text, of the first one that the request has; else None and ""."""
        body: Mapping[str, Any] | None = None
        for place, key in enumerate(keys):
            value: Any = None
            if key.kind == "header" and request is not None:
                value = request.headers.get(key.name)
            elif key.kind == "body" and request is not None:
                if body is None:
                    content = await request.json()  # it has been read already
                    body = content if isinstance(content, dict) else {}
                value = _field(body, key.name)
            elif key.kind == "session_id":
                value = compat.session_of(obj)
            elif key.kind == "rid":
                value = obj.rid[0] if isinstance(obj.rid, list) and obj.rid else obj.rid
                value = value or uuid4().hex
            if isinstance(value, (str, int)) and value != "" and not isinstance(value, bool):
                return place, str(value)[:_LONGEST_KEY]
        return None, ""


def _field(body: Any, path: str) -> Any:
    """A field of a JSON object, `a.b` for `b` within `a`; None if it is missing."""
    for name in path.split("."):
        body = body.get(name) if isinstance(body, Mapping) else None
    return body


async def _has_gone(obj: Any, request: Any) -> bool:
    """Whether nobody waits for a request's answer; one in the background is asked for later."""
    if request is None or getattr(obj, "background", False):
        return False
    gone: bool = await request.is_disconnected()
    return gone


def _rids(obj: Any) -> list[str]:
    """Ids of a request's parts, where the client has given them."""
    rids = obj.rid if isinstance(obj.rid, list) else [obj.rid]
    return [rid for rid in rids if isinstance(rid, str)]


def _custom(part: Mapping[str, Any]) -> dict[str, Any] | None:
    """`custom_params` of a part, if it has some; the scheduler refuses other types."""
    custom = part.get("custom_params")
    return custom if isinstance(custom, dict) else None


def _parts(obj: Any) -> list[dict[str, Any]]:
    """Sampling parameters of each part of a request; a single element where parts share them.

    They are made the request's own first, to be written into: a program may send its again.
    """
    params = obj.sampling_params
    if params is None:
        return [{}]  # becomes the request's when something is written
    param_list = params if isinstance(params, list) else [params]
    copies = [dict(part) if isinstance(part, dict) else part for part in param_list]
    obj.sampling_params = copies if isinstance(params, list) else copies[0]
    return [part for part in copies if isinstance(part, dict)]


def _answers(obj: Any, drawn_parts: Sequence[Mapping[str, Any]]) -> int:
    """Number of answers that the drawn parts of a request get."""
    numbers = [part.get("n") for part in drawn_parts]
    answers = sum(n if isinstance(n, int) and n > 1 else 1 for n in numbers)
    # Parts without a list of parameters share them.
    return answers if isinstance(obj.sampling_params, list) else answers * compat.prompts(obj)


def _write(
    obj: Any,
    preferred: Any,
    parts: Sequence[dict[str, Any]],
    policy: str | None,
    assigned: Mapping[str, Any],
) -> None:
    """Write into parts of a request a policy (None: leave it) and how it was chosen.

    Args:
        preferred: `custom_params` that SGLang gives to parts without.
    """
    fields: dict[str, Any] = {} if policy is None else {POLICY: policy}
    if assigned:
        fields[ASSIGNED] = dict(assigned)
    if not fields:
        return
    for params in parts:
        if obj.sampling_params is None:
            obj.sampling_params = params
        custom = params.get("custom_params", preferred)
        if custom is None or isinstance(custom, dict):
            params["custom_params"] = {**(custom or {}), **fields}
