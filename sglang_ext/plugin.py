"""The entry point that SGLang calls in each of its processes (`sglang.srt.plugins`).

SGLang logs an exception of a plugin and goes on without it. A server that was asked for a policy
must not start without it, so everything here that fails raises SystemExit, which is no Exception.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from kvpolicy.sglang_ext import compat, options

_KEY = "kv_policy"  # in an answer's meta_info
_FACTS = "kv_policy_facts"


def register() -> None:
    """Add the command line options; with policies given, install what this process needs."""
    compat.register(compat.ADD_CLI_ARGS, _add_cli_args, "after")
    compat.register(compat.FROM_CLI_ARGS, _from_cli_args, "after")
    try:
        paths, settings = options.requested()
        if not paths and not settings:
            return
        _install(paths, settings)
    except options.Refused as error:
        raise SystemExit(f"kvpolicy: {error}") from None
    except Exception as error:
        # Without this SGLang would log it and serve without the policy that was asked for.
        raise SystemExit(f"kvpolicy: the plugin failed to start: {error!r}") from error


def _install(paths: list[str], settings: list[str]) -> None:
    from kvpolicy.sglang_ext import refusals

    refusals.check_version()
    if compat.in_scheduler():
        from kvpolicy.sglang_ext.hooks import install
        from kvpolicy.sglang_ext.runtime import Runtime

        install(Runtime(options.load_policies(paths, settings)))
    else:
        compat.register(compat.PUBLISH, _after_publish, "after")


def _add_cli_args(result: Any, parser: ArgumentParser, *args: Any, **kwargs: Any) -> None:
    """After ServerArgs.add_cli_args, which SGLang may call more than once on a parser."""
    if "--kv-policy" not in parser._option_string_actions:
        options.add_arguments(parser)


def _from_cli_args(server_args: Any, cls: type, arguments: Namespace, *args: Any) -> None:
    """After ServerArgs.from_cli_args: check the policies before anything is loaded."""
    from kvpolicy.sglang_ext import refusals

    try:
        options.export(arguments)
        paths, settings = options.requested()
        if not paths and not settings:
            return
        refusals.check_version()
        options.load_policies(paths, settings)
    except options.Refused as error:
        raise SystemExit(f"kvpolicy: {error}") from None
    if not compat.in_scheduler():
        compat.register(compat.PUBLISH, _after_publish, "after")
        compat.apply_hooks()


def _after_publish(result: Any, server_args: Any, *, role: str, **kwargs: Any) -> None:
    """After runtime_context.publish in the launcher: options are resolved, nothing is loaded."""
    from kvpolicy.sglang_ext import refusals

    if role != "tokenizer":
        return
    try:
        refusals.check_options(compat.resolved(server_args))
        config = compat.model_config(server_args)
        refusals.check_model(config)
        for policy in options.load_policies(*options.requested()):
            policy.bind(refusals.model_shape(config))
    except options.Refused as error:
        raise SystemExit(f"kvpolicy: {error}") from None
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

    SGLang collects such facts per output token; those of a policy are one value per request.
    """
    original(manager, meta_info, state, {k: v for k, v in info.items() if k != _KEY}, index, *args)
    for facts in info[_KEY][index] if _KEY in info else ():
        if facts is not None:
            setattr(state, _FACTS, facts)
    if hasattr(state, _FACTS):
        meta_info[_KEY] = getattr(state, _FACTS)
