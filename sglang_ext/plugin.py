"""The entry point that SGLang calls in each of its processes (`sglang.srt.plugins`).

SGLang logs an exception of a plugin, also one of its import, and goes on without it. A server that
was asked for a policy must not start without it, so nothing that may fail is imported here at
module level, and once a policy is asked for a failure raises SystemExit, which is no Exception.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from kvpolicy.sglang_ext.errors import Refused

_KEY = "kv_policy"  # in an answer's meta_info
_FACTS = "kv_policy_facts"


def register() -> None:
    """Add the command line options; with policies given, install what this process needs."""
    try:
        from kvpolicy.sglang_ext import compat, options

        compat.register(compat.ADD_CLI_ARGS, _add_cli_args, "after")
        compat.register(compat.FROM_CLI_ARGS, _from_cli_args, "after")
        paths, settings = options.requested()
        if paths or settings:
            _install(paths, settings)
    except Exception as error:
        if any(name.startswith("SGLANG_KV_POLICY") for name in os.environ):
            raise _stop(error) from error
        raise


def _stop(error: Exception) -> SystemExit:
    """Stops the process with one message."""
    what = error if isinstance(error, Refused) else f"the plugin failed to start: {error!r}"
    return SystemExit(f"kvpolicy: {what}")


def _install(paths: list[str], settings: list[str]) -> None:
    from kvpolicy.sglang_ext import compat, refusals
    from kvpolicy.sglang_ext.options import load_policies

    refusals.check_version()
    if compat.in_scheduler():
        from kvpolicy.sglang_ext.hooks import install
        from kvpolicy.sglang_ext.runtime import Runtime

        install(Runtime(load_policies(paths, settings)))
    # The process of `sgl.Engine` has the scheduler's module loaded too, but no command line.
    compat.register(compat.PUBLISH, _after_publish, "after")


def _add_cli_args(result: Any, parser: ArgumentParser, *args: Any, **kwargs: Any) -> None:
    """After ServerArgs.add_cli_args, which SGLang may call more than once on a parser."""
    from kvpolicy.sglang_ext import options

    if "--kv-policy" not in parser._option_string_actions:
        options.add_arguments(parser)


def _from_cli_args(server_args: Any, cls: type, arguments: Namespace, *args: Any) -> None:
    """After ServerArgs.from_cli_args: check the policies before anything is loaded."""
    from kvpolicy.sglang_ext import compat, options, refusals

    try:
        options.export(arguments)
        paths, settings = options.requested()
        if not paths and not settings:
            return
        refusals.check_version()
        options.load_policies(paths, settings)
    except Refused as error:
        raise _stop(error) from None
    if not compat.in_scheduler():
        compat.register(compat.PUBLISH, _after_publish, "after")
        compat.apply_hooks()


def _after_publish(result: Any, server_args: Any, *, role: str, **kwargs: Any) -> None:
    """After runtime_context.publish in the launcher: options are resolved, nothing is loaded."""
    from kvpolicy.sglang_ext import compat, options, refusals

    if role != "tokenizer":
        return
    try:
        refusals.check_options(compat.resolved(server_args))
        config = compat.model_config(server_args)
        refusals.check_model(config)
        policies = options.load_policies(*options.requested())
        for policy in policies:
            policy.bind(refusals.model_shape(config))
        options.log_warnings(policies)
    except Refused as error:
        raise _stop(error) from None
    if compat.has_tokenizer():
        compat.register(compat.META_INFO, _around_meta_info, "around")
        compat.apply_hooks()


def _around_meta_info(
    original: Callable,
    manager: Any,
    meta_info: dict,
    state: Any,
    info: dict,
    index: int,
    *args: Any,
) -> None:
    """Around TokenizerManager.update_request_meta_info.

    SGLang collects such facts per output token; those of a policy are one value per request, of
    which later elements bring what has changed.
    """
    original(manager, meta_info, state, {k: v for k, v in info.items() if k != _KEY}, index, *args)
    for facts in info[_KEY][index] if _KEY in info else ():
        if facts is not None:
            setattr(state, _FACTS, {**getattr(state, _FACTS, {}), **facts})
    if hasattr(state, _FACTS):
        meta_info[_KEY] = getattr(state, _FACTS)
