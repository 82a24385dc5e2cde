"""`kvpolicy experiment`: files of experiments, and servers that run one.

Exit codes: 0 success; 1 a file has errors, an experiment has ended badly or cannot be compared, or
a server declines; 2 a file or a server cannot be used. Each action imports the modules that it
needs, so that `check` needs no numpy.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvpolicy.dsl.syntax.diagnostics import PolicyError, in_order, refused, render_all, why
from kvpolicy.dsl.tools.cli import GENERATED, format_files, generated, whole

if TYPE_CHECKING:
    from kvpolicy.experiments.definition.experiment import Experiment
    from kvpolicy.experiments.fleet.client import Replica
    from kvpolicy.experiments.fleet.overview import Overview, ReplicaAnswer

ADMIN_KEY = "SGLANG_ADMIN_KEY"  # environment variable
_FILE = "path of an experiment"
_number = partial(whole, most=10**9)
_OPTIONAL = ("numpy", "tqdm")  # packages that `check`, `fmt` and `schema` do without


class Action(NamedTuple):
    """An action of `kvpolicy experiment`.

    Attributes:
        help: its help text.
        run: runs it and returns the exit code.
        arguments: adds its arguments to a parser.
    """

    help: str
    run: Callable[[argparse.Namespace], int]
    arguments: Callable[[argparse.ArgumentParser], None]


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the actions to the parser of `kvpolicy experiment`."""
    below = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, action in ACTIONS.items():
        subparser = below.add_parser(name, help=action.help, description=action.help)
        action.arguments(subparser)
        subparser.set_defaults(run_action=action.run)


def main(args: argparse.Namespace) -> int:
    """Runs an action; returns the exit code.

    Raises:
        PolicyError: input or a server cannot be used.
    """
    try:
        code: int = args.run_action(args)
    except ModuleNotFoundError as error:
        if error.name not in _OPTIONAL:
            raise
        message = f"this action needs {error.name}"
        help_ = "pip install '.[experiments]' in the checkout"
        raise refused("kvpolicy experiment", "file", message, help_) from None
    return code


# Files


def _check(args: argparse.Namespace) -> int:
    from kvpolicy.experiments.definition import arms, reading

    served = arms.given(args.kv_policy, args.kv_policy_set)
    code = 0
    for file in args.files:
        try:
            read = reading.load(file)
        except PolicyError as error:
            print(error)
            code = 2
            continue
        problems, aside = list(read.diagnostics), ""
        if read.experiment is not None:
            programs = served or arms.shipped_programs(read.experiment)
            problems += arms.check_settings(read, programs)
            if served:
                problems += reading.check_policies(read, list(served))
            elif names := arms.unknown(read.experiment, programs):
                aside = f"; not looked at, for want of --kv-policy: {', '.join(names)}"
        if problems:
            print(render_all(in_order(problems), read.source))
        if read.experiment is None or any(d.severity == "error" for d in problems):
            code = max(code, 1)
        else:
            print(f"{read.source.name}: ok: {summary(read.experiment)}{aside}")
    return code


def summary(experiment: Experiment) -> str:
    """One line about an experiment: name, arms, coverage, steps, design and revision."""
    from kvpolicy.experiments.definition.quantities import percent_text

    shares = experiment.shares()
    arms = ", ".join(
        f"{arm.name} ({arm.policy}) {100 * shares[arm.name]:.3g} %" for arm in experiment.arms
    )
    grows = [step.coverage for step in experiment.steps if step.coverage is not None]
    steps = f", by steps {' -> '.join(percent_text(share) for share in grows)}" if grows else ""
    design = "" if experiment.design is None else "; switchback"
    enabled = "" if experiment.enabled else "; disabled"
    return (
        f"{experiment.name}: {arms}; coverage {percent_text(experiment.coverage)}{steps}{design}"
        f"{enabled}; revision {experiment.revision}"
    )


def _fmt(args: argparse.Namespace) -> int:
    from kvpolicy.experiments.definition.fmt import format_file

    return format_files(args.files, format_file, check=args.check)


def _schema(args: argparse.Namespace) -> int:
    from kvpolicy.experiments.definition.schema import schema_text

    return generated(schema_text(), args)


def _simulate(args: argparse.Namespace) -> int:
    from kvpolicy.experiments.definition.reading import load
    from kvpolicy.experiments.simulate.simulation import simulate
    from kvpolicy.experiments.simulate.text import lines

    experiment = load(args.file).require()
    rows = simulate(
        experiment,
        runs=args.runs,
        values=args.values,
        requests=args.requests,
        seed=args.seed,
        progress=sys.stderr.isatty(),
    )
    print("\n".join(lines(experiment, rows, _width())))
    return int(any(row.bound is not None and row.low > row.bound for row in rows))


# Servers


def _status(args: argparse.Namespace) -> int:
    from kvpolicy.experiments.fleet.overview import Overview

    if args.watch is not None and not args.url:
        raise refused("--watch", "arguments", "a file does not change; this belongs to --url")
    replicas = _replicas(args)
    overview = Overview(_answers(args, replicas))
    print(_shown(args, overview), end="", flush=True)
    while args.watch is not None:
        time.sleep(args.watch)
        try:
            text = _shown(args, Overview(_answers(args, replicas)))
        except PolicyError as error:  # a server may be restarting: ask again next time
            text = f"{error}\n"
        clear = "\033[2J\033[H" if sys.stdout.isatty() else "\n"
        print(f"{clear}{text}", end="", flush=True)
    return int(wrong(overview))


def wrong(overview: Overview) -> bool:
    """Whether the experiment is aborted, an arm rolled back or breached, or there is a warning."""
    from kvpolicy.experiments.replica.lifecycle import ExperimentState

    breached = any(verdict.outcome == "breached" for verdict in overview.guardrails)
    given_up = ExperimentState.ABORTED in overview.states or bool(overview.rolled_back)
    return given_up or breached or bool(overview.warnings)


def _shown(args: argparse.Namespace, overview: Overview) -> str:
    if args.json:
        import json

        return json.dumps(overview.as_document(), indent=1, ensure_ascii=False) + "\n"
    from kvpolicy.experiments.reporting.status import screen

    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return screen(overview, width=_width(), colours=colours)


def _report(args: argparse.Namespace) -> int:
    from kvpolicy.experiments.fleet.overview import Overview
    from kvpolicy.experiments.reporting.headline import headline
    from kvpolicy.experiments.reporting.page import page

    overview = Overview(_answers(args, _replicas(args)))
    path = Path(args.out)
    try:
        path.write_text(page(overview), encoding="utf-8")
    except OSError as error:
        raise refused(args.out, "file", why(error, "it cannot be written")) from None
    print(f"{path}: {headline(overview).sentence}")
    return 0


def _steer(args: argparse.Namespace) -> int:
    from kvpolicy.experiments.fleet import steering

    body = {name: getattr(args, name, None) for name in ("arm", "reason", "force")}
    asked = {name: value for name, value in body.items() if value}
    if args.action == "promote":
        return steering.promote(_replicas(args), asked, dry_run=args.dry_run)
    return steering.act(_replicas(args), args.action, asked)


def _put(args: argparse.Namespace) -> int:
    from kvpolicy.experiments.definition.reading import load
    from kvpolicy.experiments.fleet import steering

    reading = load(args.file)
    if reading.diagnostics:
        print(render_all(reading.diagnostics, reading.source), file=sys.stderr)
    if reading.experiment is None:
        return 1
    return steering.put(_replicas(args), reading.source.text, dry_run=args.dry_run)


def _replicas(args: argparse.Namespace) -> list[Replica]:
    from kvpolicy.experiments.fleet.client import Replica

    api_key = _key("--api-key-env", args.api_key_env)
    admin_key = None
    if "admin_key_env" in args:
        admin_key = _key("--admin-key-env", args.admin_key_env)
    replicas = [Replica(url, api_key=api_key, admin_key=admin_key) for url in args.url or ()]
    return list({replica.url: replica for replica in replicas}.values())


def _key(option: str, variable: str | None) -> str | None:
    if variable is None:
        return None
    value = os.environ.get(variable, "").strip()
    if not value:
        help_ = None
        if option == "--admin-key-env":
            help_ = "it holds the value of the server's --admin-api-key"
        raise refused(option, "arguments", f"the variable `{variable}` is not set", help_)
    return value


def _answers(args: argparse.Namespace, replicas: list[Replica]) -> list[ReplicaAnswer]:
    from kvpolicy.experiments.fleet import saved
    from kvpolicy.experiments.fleet.overview import ReplicaAnswer

    if args.saved:
        return saved.read_all(args.saved)
    return [ReplicaAnswer(_name(replica.url), replica.document()) for replica in replicas]


def _name(url: str) -> str:
    return url.removeprefix("http://")


def _width() -> int:
    return shutil.get_terminal_size((80, 24)).columns


# Arguments


def _files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help=_FILE)


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    for option, metavar, help in (
        ("--kv-policy", "[NAME=]FILE", "policies of the server, which arms may name"),
        ("--kv-policy-set", "NAME=VALUE", "values of their parameters, as the server has them"),
    ):
        parser.add_argument(
            option, action="extend", nargs="+", default=[], metavar=metavar, help=help
        )
    _files(parser)


def _fmt_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="only say which files would change")
    _files(parser)


def _schema_arguments(parser: argparse.ArgumentParser) -> None:
    for option in GENERATED:
        option(parser)


def _simulate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help=_FILE)
    for option, kind, default, help in (
        ("--runs", _number, 2_000, "simulated runs of each row with a bound"),
        ("--values", _number, 4_000, "requests of each arm that are scored again, or windows"),
        ("--requests", _number, 20_000, "requests of each arm where every one counts"),
        ("--seed", partial(_number, least=0), 0, "of the random numbers"),
    ):
        parser.add_argument(
            option, type=kind, default=default, metavar="N", help=f"{help}; default {default:,}"
        )


def _status_arguments(parser: argparse.ArgumentParser) -> None:
    _where(parser)
    parser.add_argument(
        "--watch", type=_seconds, metavar="SECONDS", help="look again and again, until Ctrl+C"
    )
    parser.add_argument(
        "--json", action="store_true", help="everything as JSON; --from reads it again"
    )


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    _where(parser)
    parser.add_argument("--out", required=True, metavar="FILE.html", help="where the page goes")


def _where(parser: argparse.ArgumentParser) -> None:
    places = parser.add_mutually_exclusive_group(required=True)
    _url(places)
    places.add_argument(
        "--from",
        dest="saved",
        action="append",
        metavar="FILE.json",
        help="what `status --json` printed, or a server answered; several are pooled",
    )
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the servers' --api-key"
    )


def _url(parser: argparse._ActionsContainer, required: bool = False) -> None:
    parser.add_argument(
        "--url",
        action="append",
        required=required,
        metavar="URL",
        help="address of a server; given again for each replica",
    )


def _admin(parser: argparse.ArgumentParser) -> None:
    _url(parser, required=True)
    parser.add_argument(
        "--admin-key-env",
        default=ADMIN_KEY,
        metavar="NAME",
        help=f"environment variable with the servers' --admin-api-key; default {ADMIN_KEY}",
    )
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the servers' --api-key"
    )


def _abort_arguments(parser: argparse.ArgumentParser) -> None:
    _admin(parser)
    parser.add_argument("--arm", help="roll back this arm alone; its requests get the default")
    _reason(parser)


def _reason(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reason", help="is shown and logged")


def _promote_arguments(parser: argparse.ArgumentParser) -> None:
    _admin(parser)
    _reason(parser)
    parser.add_argument("--arm", required=True, help="whose policy every request gets")
    parser.add_argument(
        "--force",
        action="store_true",
        help="even if a guardrail is not cleared yet, or arms cannot be compared",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only ask the servers whether they would"
    )


def _put_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help=_FILE)
    _admin(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="only ask the servers what it would change"
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of seconds from 0.1 to 86400")
    return value


ACTIONS = {
    "check": Action("report every defect of experiment files", _check, _check_arguments),
    "fmt": Action("write experiment files in their canonical form", _fmt, _fmt_arguments),
    "schema": Action(
        "print the JSON Schema of experiment files, for editors", _schema, _schema_arguments
    ),
    "simulate": Action(
        "how often an experiment would err, and how many samples its decisions take",
        _simulate,
        _simulate_arguments,
    ),
    "status": Action("where an experiment stands, on one screen", _status, _status_arguments),
    "report": Action("one page about an experiment", _report, _report_arguments),
    "abort": Action("end it: requests get the default from now on", _steer, _abort_arguments),
    "pause": Action("take no further steps", _steer, _admin),
    "resume": Action("take steps again", _steer, _admin),
    "promote": Action(
        "end it: requests get an arm's policy from now on", _steer, _promote_arguments
    ),
    "put": Action("hand over another version of the experiment", _put, _put_arguments),
}
