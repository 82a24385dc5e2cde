"""Endpoints on SGLang's own HTTP server: looking at the experiment, changing it, and the switch.

    GET  /kv_policy                        what is served, and whether policies are applied
    POST /kv_policy/disable, /enable       full KV for every request from the next one on, and back
    PUT  /kv_policy/policies/NAME?dry_run= add a policy or replace one: YAML, or {"policy", "set"}
    DELETE /kv_policy/policies/NAME        serve it no longer; requests that run keep it
    GET  /kv_policy/experiment?keys=       where the experiment stands and what was seen
    PUT  /kv_policy/experiment?dry_run=    another version of it, as YAML or JSON
    POST /kv_policy/experiment/abort, /pause, /resume, /promote?dry_run=

All but GET need the admin key (`--admin-api-key`), and are refused where none is configured.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from kvpolicy.dsl.bind.parameters import text_of
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.experiments.replica.lifecycle import ENDED
from kvpolicy.experiments.replica.promotion import incomparable, not_cleared
from kvpolicy.sglang_ext.clients.catalog import Catalog, Claim
from kvpolicy.sglang_ext.clients.front_end import FrontEnd
from kvpolicy.sglang_ext.experiment.live import InUse, Live
from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.face.errors import Refused

logger = logging.getLogger(__name__)

_LONGEST = 1_000_000  # most bytes of a policy or an experiment
_LONGEST_REASON = 500  # most characters


class Control:
    """The endpoints of one server."""

    def __init__(self, server: FrontEnd, catalog: Catalog) -> None:
        self._server, self._catalog = server, catalog

    def install(self) -> None:
        """Add the routes to SGLang's application."""
        for method, path, endpoint, *flags in (
            ("GET", "/kv_policy", self.show),
            ("POST", "/kv_policy/disable", self.disable),
            ("POST", "/kv_policy/enable", self.enable),
            ("PUT", "/kv_policy/policies/{name}", self.put_policy, "dry_run"),
            ("DELETE", "/kv_policy/policies/{name}", self.withdraw_policy),
            ("GET", "/kv_policy/experiment", self.experiment, "keys"),
            ("PUT", "/kv_policy/experiment", self.replace, "dry_run"),
            ("POST", "/kv_policy/experiment/abort", self.abort),
            ("POST", "/kv_policy/experiment/pause", self.pause),
            ("POST", "/kv_policy/experiment/resume", self.resume),
            ("POST", "/kv_policy/experiment/promote", self.promote, "dry_run"),
        ):
            checked = partial(_with_flags, endpoint, flags)
            compat.add_route(path, method, checked, admin=method != "GET")

    async def show(self, request: Any) -> tuple[int, Any]:
        """What is served."""
        live = self._server.live
        return 200, {
            "enabled": self._server.traffic.enabled,
            "policies": self._catalog.describe(),
            "experiment": None if live is None else live.experiment.name,
        }

    async def disable(self, request: Any) -> tuple[int, Any]:
        """Give every request full KV from the next one on."""
        return self._switch(False)

    async def enable(self, request: Any) -> tuple[int, Any]:
        """Apply policies again from the next request on."""
        return self._switch(True)

    def _switch(self, on: bool) -> tuple[int, Any]:
        if self._server.apply(on):
            logger.warning(
                "KV-cache policies are %s: %s.",
                "enabled" if on else "disabled",
                "requests get theirs again"
                if on
                else "every request gets full KV from the next one on; those that run go on",
            )
        return 200, {"enabled": on}

    async def put_policy(self, request: Any) -> tuple[int, Any]:
        """Add a policy, or replace one; with `dry_run`, do not take it up."""
        name, dry = request.path_params["name"], _flag(request, "dry_run")
        content, live = await request.body(), self._server.live
        if dry is None:
            return _problem(400, "dry_run is neither true nor false")
        if len(content) > _LONGEST:
            return _problem(413, f"a policy has at most {_LONGEST} bytes")
        if name in self._catalog.policies and live is not None and live.uses(name):
            return _problem(
                409,
                f"experiment `{live.experiment.name}` compares `{name}`; add the new version under "
                "another name, and give it an arm of its own",
            )
        try:
            text, settings = _policy_in(content)
            arguments = (compat.manager(), name, text, settings)
            if dry:
                policy = await self._catalog.rehearse(*arguments)
            else:
                policy = await self._catalog.put(*arguments, _claim(live, name))
        except InUse as error:
            return _problem(409, f"{error}; add the new version under another name")
        except Refused as error:
            return _problem(400, str(error))
        return 200, {"name": name, "dry_run": dry, "warnings": policy.warnings or None}

    async def withdraw_policy(self, request: Any) -> tuple[int, Any]:
        """Serve a policy no longer."""
        name, live = request.path_params["name"], self._server.live
        if live is not None and live.uses(name):
            return _problem(409, f"experiment `{live.experiment.name}` serves `{name}`")
        if name not in self._catalog.policies:
            return _problem(404, f"no policy is called `{name[:60]}`")
        try:
            await self._catalog.withdraw(compat.manager(), name, _claim(live, name, withdrawn=True))
        except Refused as error:
            return _problem(409, str(error))
        return 200, {"name": name, "withdrawn": True}

    async def experiment(self, request: Any) -> tuple[int, Any]:
        """Where the experiment stands."""
        live = self._server.live
        keys = _flag(request, "keys", "true")
        if keys is None:
            return _problem(400, "keys is neither true nor false")
        return _absent() if live is None else (200, live.document(with_keys=keys))

    async def replace(self, request: Any) -> tuple[int, Any]:
        """Another version of the experiment; with `dry_run`, only what it would change."""
        live = self._server.live
        if live is None:
            return _absent()
        dry = _flag(request, "dry_run")
        if dry is None:
            return _problem(400, "dry_run is neither true nor false")
        content = await request.body()
        if len(content) > _LONGEST:
            return _problem(413, f"an experiment has at most {_LONGEST} bytes")
        if not dry:
            await live.follow()  # what has changed in the file by now is older than this
        try:
            text = _text(content)
            definition = live.read(text, "request")
            experiment = definition.require()
        except (PolicyError, Refused) as error:
            return _problem(400, str(error))
        if experiment.name != live.experiment.name:
            return _problem(
                409,
                f"the server runs experiment `{live.experiment.name}`, and this one is "
                f"`{experiment.name}`; start the server with it",
            )
        anew = experiment.revision != live.experiment.revision
        coverage = live.lifecycle.covered_by(experiment)
        if not dry:
            live.put(experiment, text)
        return 200, {
            "revision": experiment.revision,
            "begins_anew": anew,
            "dry_run": dry,
            "state": live.lifecycle.state.value,
            "coverage": coverage,
            "warnings": [diagnostic.message for diagnostic in definition.diagnostics],
        }

    async def abort(self, request: Any) -> tuple[int, Any]:
        """End the experiment, or one arm of it: requests get the default."""
        return await self._end(request, _abort, "arm", "reason")

    async def promote(self, request: Any) -> tuple[int, Any]:
        """End the experiment: requests get an arm's policy; with `dry_run`, only whether it may."""
        dry = _flag(request, "dry_run")
        if dry is None:
            return _problem(400, "dry_run is neither true nor false")
        act = _promotes if dry else _promote
        return await self._end(request, act, "arm", "reason", "pooled", "force")

    async def pause(self, request: Any) -> tuple[int, Any]:
        """Take no further steps."""
        return await self._end(request, lambda live, body: live.pause())

    async def resume(self, request: Any) -> tuple[int, Any]:
        """Take steps again."""
        return await self._end(request, lambda live, body: live.resume())

    async def _end(self, request: Any, act: Any, *keys: str) -> tuple[int, Any]:
        """Let `act` change the experiment; the body may have `keys`."""
        live = self._server.live
        if live is None:
            return _absent()
        content = await request.body()
        try:
            body = json.loads(content) if content.strip() else {}
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            return _problem(400, "the body is not a JSON object")
        if unknown := _unknown("the body", body, keys):
            return _problem(400, unknown)
        state = live.lifecycle.state
        if state in ENDED:
            return _problem(
                409,
                f"experiment `{live.experiment.name}` (revision {live.experiment.revision}) is "
                f"{state} already: {live.lifecycle.reason}; another revision begins anew",
            )
        try:
            new = act(live, body)
        except ValueError as error:
            return _problem(409, str(error))
        return 200, {"state": live.lifecycle.state.value, "changed": new}


async def _with_flags(
    endpoint: compat.Function, flags: Sequence[str], request: Any
) -> tuple[int, Any]:
    """An endpoint's answer; a misspelt flag is refused, lest `dry_run` do the real thing."""
    unknown = _unknown("the URL's query", request.query_params, flags)
    return _problem(400, unknown) if unknown else await endpoint(request)


def _unknown(where: str, names: Collection[str], known_names: Sequence[str]) -> str | None:
    """A sentence about the first name given that is not known; None if there is none."""
    for name in names:
        if name not in known_names:
            takes = ", ".join(f"`{known_name}`" for known_name in known_names) or "nothing"
            return f"`{name[:60]}` is not known in {where}, which takes {takes}"
    return None


def _claim(live: Live | None, name: str, *, withdrawn: bool = False) -> Claim:
    """A context that keeps an experiment from beginning to use a policy that is being changed."""
    return nullcontext if live is None else partial(live.changing, name, withdrawn=withdrawn)


def _flag(request: Any, name: str, otherwise: str = "false") -> bool | None:
    """Whether a flag of the URL's query is set; None if it is neither true nor false."""
    text = request.query_params.get(name, otherwise).lower()
    return {"true": True, "1": True, "false": False, "0": False}.get(text)


def _text(content: bytes) -> str:
    """The text of a body.

    Raises:
        Refused: it is not UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused("the body is not text in UTF-8") from None


def _policy_in(content: bytes) -> tuple[str, dict[str, str]]:
    """Text and settings of a policy: a body is its YAML, or a JSON object with `policy` and `set`.

    Raises:
        Refused: the body is other JSON, or not UTF-8.
    """
    text = _text(content)
    try:
        document = json.loads(text)
    except ValueError:
        return text, {}
    except RecursionError:
        raise Refused("the body is nested too deeply") from None
    values = document.get("set", {}) if isinstance(document, dict) else None
    if not isinstance(values, dict) or not isinstance(document.get("policy"), str):
        raise Refused('expected a policy, or {"policy": "its YAML", "set": {"name": value}}')
    if unknown := _unknown("the body", document, ("policy", "set")):
        raise Refused(unknown)
    for key, value in values.items():
        if not isinstance(value, bool | int | float):
            raise Refused(f"set.{key[:60]}: expected a number, true or false")
    return document["policy"], {key: text_of(value) for key, value in values.items()}


def _abort(live: Live, body: Mapping[str, Any]) -> bool:
    reason = _reason(body, "an operator")
    if "arm" not in body:
        return live.abort(reason)
    names = [arm.name for arm in live.experiment.arms[1:]]
    if body["arm"] not in names:
        raise ValueError(f"there is no such arm beside control; there is {', '.join(names)}")
    return live.roll_back(body["arm"], reason)


def _promote(live: Live, body: Mapping[str, Any]) -> bool:
    return _promotes(live, body) and live.promote(
        live.experiment.arm(body["arm"]), _reason(body, "an operator")
    )


def _promotes(live: Live, body: Mapping[str, Any]) -> bool:
    """Whether an arm may be promoted, which a running experiment does.

    Raises:
        ValueError: it may not; the message says why.
    """
    name = body.get("arm")
    names = [arm.name for arm in live.experiment.arms]
    if name not in names:
        arms_text = ", ".join(f"`{arm}`" for arm in names)
        raise ValueError(f'say which arm, as in {{"arm": "{names[-1]}"}}; there are {arms_text}')
    if body.get("force") is True or name == live.experiment.control.name:
        return True
    why = incomparable(live.analysis, live.lifecycle.rolled_back, name)
    if why is None and body.get("pooled") is not True:
        why = not_cleared(live.analysis, name)
    if why is not None:
        advice = 'send {"force": true} with it (`--force`)'
        raise ValueError(f"{why}; to promote `{name}` all the same, {advice}")
    return True


def _reason(body: Mapping[str, Any], otherwise: str) -> str:
    reason = body.get("reason")
    if not isinstance(reason, str) or not reason:
        return otherwise
    # Half a character, as of another encoding, could be in no answer.
    return reason[:_LONGEST_REASON].encode("utf-8", "replace").decode()


def _problem(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message}}


def _absent() -> tuple[int, Any]:
    return _problem(404, "the server was started without --kv-experiment")
