"""`kvpolicy eval`: measures what policies cost in quality, with questions to a server.

All mistakes in the command are found before a server is started or a file is written. Answers are
kept when a run ends early: the same command goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.evaluation.asking.answers import Answers
from kvpolicy.evaluation.asking.asking import Asking, Gone
from kvpolicy.evaluation.asking.client import Failed
from kvpolicy.evaluation.asking.eval_maps import write_maps
from kvpolicy.evaluation.asking.eval_setup import Setup, opened, prepare
from kvpolicy.evaluation.asking.plan import Folder
from kvpolicy.evaluation.serving import ServerFailed
from tqdm import tqdm


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM."""


def main(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        The exit code: 0; 1 if questions got no answer; 2 if the input cannot be used or the server
        does not start; 130 if interrupted.
    """
    command = shlex.join(["kvpolicy", *sys.argv[1:]])
    with _interruptible():
        try:
            return _run(args, command)
        except (PolicyError, ServerFailed) as error:
            print(error, file=sys.stderr)  # a server does not start by a wrong model or option
            return 2
        except (Gone, Failed) as error:
            print(f"{error}\n{_goes_on(args.out)}", file=sys.stderr)
            return 1
        except (Interrupted, KeyboardInterrupt):
            print(f"\ninterrupted; {_goes_on(args.out)}", file=sys.stderr)
            return 130


def _goes_on(out: str) -> str:
    if not Path(out, "plan.json").exists():
        return "nothing has been asked yet"
    return f"what was answered so far is in {out}; the same command goes on from there"


def _run(args: argparse.Namespace, command: str) -> int:
    setup = prepare(args, command)
    setup.plan.stages["preparation"] = time.monotonic() - args.started
    for note in setup.plan.notes:
        print(f"note: {note}", file=sys.stderr)
    folder = Folder(Path(args.out), setup.plan)
    with contextlib.closing(folder):
        folder.write()
        answers = Answers(folder.path)
        try:
            _ask_all(args, setup, folder, answers)
        finally:
            answers.close()
            folder.write()
        if answers.failed and not answers.keys:
            message = f"none of {answers.failed} questions got an answer: {answers.last_error}"
            print(f"{message}\n{answers.errors} has them all", file=sys.stderr)
            return 1
        with setup.plan.stage("report"):
            # Imported late, since plots take a second to import and a command may be refused.
            from kvpolicy.evaluation.reporting import report

            paths = report.write(folder.path)
        folder.write()
    _closing_words(folder.path, paths, setup.plan.stages)
    if answers.failed:
        print(
            f"{answers.failed} questions got no answer ({answers.errors} says why); they count "
            "nowhere, and the same command asks them again",
            file=sys.stderr,
        )
    return 1 if answers.failed else 0


def _ask_all(args: argparse.Namespace, setup: Setup, folder: Folder, answers: Answers) -> None:
    """Asks every question that has no answer yet, and for the maps."""
    plan = setup.plan
    blocks = [(task, length) for task in plan.tasks for length in plan.lengths]
    total = sum(setup.questions(*block) for block in blocks)
    maps_missing = setup.missing_maps(folder.path, args.maps)
    if len(answers.keys) >= total and not maps_missing:
        return
    with contextlib.ExitStack() as stack:
        with plan.stage("server start"):
            client, memory = stack.enter_context(opened(args, setup))
        folder.write()
        bar = stack.enter_context(_bar(total, len(answers.keys), args.quiet))
        asking = Asking(client, setup.tokens, answers, memory, args.concurrency, bar.update)
        for task, length in blocks:
            with plan.stage("samples"):
                samples = setup.samples(task, length)
            for variant in setup.variants_at(length):
                bar.set_description(f"{variant.label}, {task} {length}", refresh=False)
                with plan.stage(f"questions {variant.label}"):
                    asking.ask(variant, samples)
            folder.write()
        if maps_missing and answers.keys:
            with plan.stage("maps"):
                bar.set_description("maps", refresh=False)
                write_maps(folder.path, maps_missing, client, setup.tokens, args.concurrency)


def _bar(total: int, done: int, quiet: bool) -> tqdm:
    """A progress bar of questions; a line every 20 s where stderr is not a terminal."""
    interval = 0.2 if sys.stderr.isatty() else 20
    return tqdm(total=total, initial=done, unit="question", disable=quiet, mininterval=interval,
                smoothing=0.05)  # fmt: skip


def _closing_words(folder: Path, paths: list[Path], stages: dict[str, float]) -> None:
    summary = (folder / "summary.md").read_text(encoding="utf-8")
    print("\n".join(_first_table(summary)))
    print("\nseconds by stage:")
    for name, seconds in stages.items():
        print(f"  {name:<40} {seconds:8.1f}")
    print(f"  {'in all':<40} {sum(stages.values()):8.1f}")
    print("\n" + "\n".join(str(path) for path in paths))


def _first_table(text: str) -> Iterator[str]:
    in_table = False
    for line in text.splitlines():
        if line.startswith("|"):
            in_table = True
            yield line
        elif in_table:
            return


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Makes SIGTERM end a run as Ctrl-C does: the server stops, and the answers stay."""

    def interrupt(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one would interrupt the clean-up
        raise Interrupted

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in handlers:
            signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
