"""The command `kvpolicy`: the commands of `dsl/`, of `evaluation/`, and of experiments."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from kvpolicy.dsl.tools import cli
from kvpolicy.dsl.tools.cli import Command

# Packages that the commands of dsl/ do not need.
_OPTIONAL = ("matplotlib", "numpy", "requests", "tqdm", "transformers")


def _report(args: argparse.Namespace) -> int:
    from kvpolicy.evaluation.reporting import report

    return report.main(args)


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="folder that `kvpolicy eval --out` wrote")


def _fidelity(args: argparse.Namespace) -> int:
    from kvpolicy.evaluation.looking import fidelity

    return fidelity.main(args)


def _fidelity_arguments(parser: argparse.ArgumentParser) -> None:
    from kvpolicy.evaluation.looking import look_arguments

    look_arguments.of_fidelity(parser)


def _inspect(args: argparse.Namespace) -> int:
    from kvpolicy.evaluation.looking import inspect_prompt

    return inspect_prompt.main(args)


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    from kvpolicy.evaluation.looking import look_arguments

    look_arguments.of_inspect(parser)


def _eval(args: argparse.Namespace) -> int:
    args.started = time.monotonic()
    from kvpolicy.evaluation.asking import eval

    return eval.main(args)


def _eval_arguments(parser: argparse.ArgumentParser) -> None:
    from kvpolicy.evaluation.asking import eval_arguments

    eval_arguments.add(parser)


def _experiment(args: argparse.Namespace) -> int:
    from kvpolicy.experiments import commands

    return commands.main(args)


def _experiment_arguments(parser: argparse.ArgumentParser) -> None:
    from kvpolicy.experiments import commands

    commands.add(parser)


def _fleet(args: argparse.Namespace) -> int:
    from kvpolicy.evaluation import fleet

    return fleet.main(args)


def _fleet_arguments(parser: argparse.ArgumentParser) -> None:
    from kvpolicy.evaluation import fleet

    fleet.add(parser)


def _tune(args: argparse.Namespace) -> int:
    try:
        from kvpolicy.evaluation.tuning import tune
    except ModuleNotFoundError as error:
        return cli.missing(args.name, error)
    return tune.main(args)


def _tune_arguments(parser: argparse.ArgumentParser) -> None:
    from kvpolicy.evaluation.tuning import tune_arguments

    tune_arguments.add(parser)


COMMANDS: dict[str, Command] = {
    "eval": Command(
        "what policies cost in quality: tasks, asked of a server", _eval, [_eval_arguments]
    ),
    "experiment": Command(
        "policies on live traffic: files, what servers have seen, the way back",
        _experiment,
        [_experiment_arguments],
    ),
    "fidelity": Command(
        "how far policies move next-token distributions from full KV, on any text",
        _fidelity,
        [_fidelity_arguments],
    ),
    "fleet": Command(
        "whether the replicas of a fleet serve the same policies", _fleet, [_fleet_arguments]
    ),
    "inspect": Command(
        "what each layer and head kept of one prompt, with the text", _inspect, [_inspect_arguments]
    ),
    "report": Command(
        "make the tables, pictures and page of an evaluation again", _report, [_report_arguments]
    ),
    "tune": Command(
        "choose a parameter of a propagation with a model and prompts", _tune, [_tune_arguments]
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
