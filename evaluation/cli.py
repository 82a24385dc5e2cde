"""The command `kvpolicy`: the commands of `dsl/`, of `evaluation/`, and of experiments."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module

from kvpolicy.dsl.tools import cli
from kvpolicy.dsl.tools.cli import Adds, Command

# Packages that the commands of dsl/ do not need.
_OPTIONAL = ("matplotlib", "numpy", "requests", "tqdm", "transformers")


def _run(module: str) -> Callable[[argparse.Namespace], int]:
    """Runs `main` of a module of the package, which is imported only then."""

    def run(args: argparse.Namespace) -> int:
        args.started = time.monotonic()  # imports are a part of the preparation of `eval`
        code: int = import_module(f"kvpolicy.{module}").main(args)
        return code

    return run


def _tune(args: argparse.Namespace) -> int:
    try:
        return _run("evaluation.tuning.tune")(args)
    except ModuleNotFoundError as error:
        return cli.missing(args.name, error)


def _arguments(module: str, function: str = "add") -> Adds:
    """Adds arguments by a function of a module of the package, which is imported only then."""
    return lambda parser: getattr(import_module(f"kvpolicy.{module}"), function)(parser)


def _folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="folder that `kvpolicy eval --out` wrote")


COMMANDS: dict[str, Command] = {
    "eval": Command(
        "what policies cost in quality: tasks, asked of a server",
        _run("evaluation.asking.eval"),
        [_arguments("evaluation.asking.eval_arguments")],
    ),
    "experiment": Command(
        "policies on live traffic: files, what servers have seen, the way back",
        _run("experiments.commands"),
        [_arguments("experiments.commands")],
    ),
    "fidelity": Command(
        "how far policies move next-token distributions from full KV, on any text",
        _run("evaluation.looking.fidelity"),
        [_arguments("evaluation.looking.look_arguments", "of_fidelity")],
    ),
    "fleet": Command(
        "whether the replicas of a fleet serve the same policies",
        _run("evaluation.fleet"),
        [_arguments("evaluation.fleet")],
    ),
    "inspect": Command(
        "what each layer and head kept of one prompt, with the text",
        _run("evaluation.looking.inspect_prompt"),
        [_arguments("evaluation.looking.look_arguments", "of_inspect")],
    ),
    "report": Command(
        "make the tables, pictures and page of an evaluation again",
        _run("evaluation.reporting.report"),
        [_folder],
    ),
    "tune": Command(
        "choose a parameter of a propagation with a model and prompts",
        _tune,
        [_arguments("evaluation.tuning.tune_arguments")],
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    try:
        return cli.main(arguments, COMMANDS)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _OPTIONAL:
            raise
        print(f"kvpolicy: error[file]: this command needs {package}", file=sys.stderr)
        print(" = help: pip install '.[eval]' in the checkout", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
