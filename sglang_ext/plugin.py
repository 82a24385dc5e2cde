"""The entry point that SGLang calls in each of its processes (`sglang.srt.plugins`).

SGLang logs a plugin's exceptions, those of its import included, and goes on without the plugin. But
a server that was asked for a policy must not start without it. So nothing that may fail is imported
here at module level, and once a policy is asked for, an error is raised where it stops SGLang: when
the command line is parsed or the options are published. On the command line it is SystemExit with
one message; elsewhere, as in a program that makes an `sgl.Engine`, an ordinary exception.
"""

from __future__ import annotations

import multiprocessing
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvpolicy.sglang_ext.face.errors import Refused

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.face.options import Requested

WORKER_APP = "kvpolicy.sglang_ext.worker:app"

_command_line = False  # whether SGLang has parsed its command line in this process


def register() -> None:
    """Add the command line options; with policies given, install what this process needs."""
    from kvpolicy.sglang_ext.face import compat

    try:
        from kvpolicy.sglang_ext.face import options

        compat.register(compat.ADD_CLI_ARGS, _add_cli_args, "after")
        compat.register(compat.FROM_CLI_ARGS, _from_cli_args, "after")
        asked = options.requested()
        if any(asked):
            _install(asked)
        elif compat.in_scheduler() and multiprocessing.parent_process() is None:
            # A program that makes engines may ask for policies later; plugins are loaded once.
            compat.register(compat.PUBLISH, _after_publish, "after")
    except Exception as error:
        if not any(name.startswith("SGLANG_KV_POLICY") for name in os.environ):
            raise
        compat.register(compat.FROM_CLI_ARGS, _raising(_stop(error, command_line=True)), "before")
        in_program = _stop(error, command_line=False)
        if isinstance(error, Refused) and multiprocessing.parent_process() is None:
            # A later engine of the same program may ask for something else.
            compat.register(compat.PUBLISH, _checked_again(in_program), "after")
        else:
            compat.register(compat.PUBLISH, _raising(in_program), "before")


def _raising(error: BaseException) -> Callable[..., None]:
    def stop(*_: Any, **__: Any) -> None:
        raise error

    return stop


def _checked_again(error: BaseException) -> Callable[..., None]:
    """For an engine, the check of the environment as it then is; elsewhere, `error`."""

    def check(result: Any, server_args: Any, *, role: str, **kwargs: Any) -> None:
        if role != "tokenizer":
            raise error
        _after_publish(result, server_args, role=role, **kwargs)

    return check


def _stop(error: Exception, *, command_line: bool) -> BaseException:
    """The exception that stops this process with one message.

    Args:
        command_line: whether it ends SGLang's command line (SystemExit) or a program (Refused).
    """
    what = error if isinstance(error, Refused) else f"the plugin failed to start: {error!r}"
    return (SystemExit if command_line else Refused)(f"kvpolicy: {what}")


def _install(asked: Requested) -> None:
    from kvpolicy.sglang_ext.face import compat, options, policy_files, refusals

    refusals.check_version()
    if compat.in_scheduler():
        from kvpolicy.sglang_ext.hooks import install
        from kvpolicy.sglang_ext.runtime import Runtime

        install(
            Runtime(
                policy_files.load_policies(*asked),
                max_failures=options.max_failures(),
                inspection=options.allows_inspection(),
            )
        )
    # In either case: `sgl.Engine`'s process has the scheduler's module loaded, but is no scheduler.
    compat.register(compat.PUBLISH, _after_publish, "after")


def _add_cli_args(result: Any, parser: ArgumentParser, *args: Any, **kwargs: Any) -> None:
    """After ServerArgs.add_cli_args, which SGLang may call more than once on a parser."""
    from kvpolicy.sglang_ext.face import options

    if "--kv-policy" not in parser._option_string_actions:
        options.add_arguments(parser)


def _from_cli_args(result: Any, cls: type, arguments: Namespace, *args: Any) -> None:
    """After ServerArgs.from_cli_args: check the policies before anything is loaded."""
    from kvpolicy.sglang_ext.experiment import loading
    from kvpolicy.sglang_ext.face import compat, options, policy_files, refusals

    global _command_line
    _command_line = True
    try:
        options.export(arguments)
        asked = options.requested()
        if not any(asked):
            options.refuse_experiment("there is no --kv-policy")
            return
        refusals.check_version()
        policy_files.load_policies(*asked)
        loading.prepare(result)
    except Refused as error:
        raise _stop(error, command_line=True) from None
    if not compat.in_scheduler():
        compat.register(compat.PUBLISH, _after_publish, "after")
        compat.apply_hooks()


def _after_publish(result: Any, server_args: Any, *, role: str, **kwargs: Any) -> None:
    """After runtime_context.publish in the launcher: options are resolved, nothing is loaded."""
    from kvpolicy.sglang_ext.face import compat, options, policy_files, refusals

    if role != "tokenizer" or not any(options.requested()):
        return
    try:
        refusals.check_version()
        if not _command_line:
            options.check_variables()
            options.refuse_experiment(
                "experiments are served by `python -m sglang.launch_server` only; unset the "
                "variable."
            )
        server_options = compat.resolved(server_args)
        refusals.check_options(server_options)
        config = compat.model_config(server_args)
        refusals.check_model(config)
        policies = policy_files.load_policies(*options.requested())
        refusals.check_preferred(server_options, [policy.name for policy in policies])
        policy_files.check_policies(policies, refusals.model_sizes(config), config.context_len)
        policy_files.log_warnings(policies)
        if server_options.tokenizer_worker_num > 1 and not compat.use_worker_app(WORKER_APP):
            raise Refused(
                f"--tokenizer-worker-num {server_options.tokenizer_worker_num} cannot be combined "
                "with --kv-policy: this SGLang loads no plugins in its workers; 0.5.23 can, where "
                "SGLANG_HTTP_SERVER_APP_PATH is not set."
            )
        if compat.has_tokenizer():
            _serve_clients(policies, config, server_options.tokenizer_worker_num)
    except Refused as error:
        raise _stop(error, command_line=_command_line) from None


def _serve_clients(policies: Sequence[Any], config: Any, workers: int) -> None:
    """Install the plugin's part in a process that talks to clients.

    Args:
        config: SGLang's model config.
        workers: number of processes that talk to clients.
    """
    from kvpolicy.sglang_ext import frontend
    from kvpolicy.sglang_ext.clients.allowed import Allowed
    from kvpolicy.sglang_ext.clients.catalog import Catalog
    from kvpolicy.sglang_ext.clients.control import Control
    from kvpolicy.sglang_ext.clients.front_end import FrontEnd
    from kvpolicy.sglang_ext.clients.traffic import Traffic
    from kvpolicy.sglang_ext.experiment import loading
    from kvpolicy.sglang_ext.face import compat, options, refusals

    live = loading.live(policies, workers)
    catalog = Catalog(policies, refusals.model_sizes(config), config.context_len)
    allowed = Allowed(catalog, options.ALLOW_SET.values)
    labels = compat.allowed_labels()
    traffic = Traffic(catalog.policies, options.override(), live, allowed, labels)
    server = FrontEnd(traffic, context=config.context_len)
    frontend.install(server)
    if workers == 1:  # several processes would have to be switched together
        Control(server, catalog).install()
