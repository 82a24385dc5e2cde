"""The command `kvpolicy`.

Exit codes: 0 well, 1 something differs or fails, 2 unusable input or incomplete output, 130
interrupted. Only the commands that execute policies import the executions, so that `check` needs
neither numpy nor torch.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpolicy.dsl.bind.gpu import GPUS
from kvpolicy.dsl.syntax.diagnostics import PolicyError, refused, render_all

if TYPE_CHECKING:
    from kvpolicy.dsl.check.policy import Checked
    from kvpolicy.dsl.ir.nodes import ModelShape

# Commands whose module has another name.
_MODULES = {"test": "policy_tests"}

EXECUTIONS = ("interpreter", "torch")
_POLICY = "path of a policy, or the name of a shipped one"
_CONFIG = "config.json of a model, or its folder"
_EXECUTES = "what executes the policy"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the device, quota or file is full


def main(arguments: Sequence[str] | None = None, more: Mapping[str, Command] | None = None) -> int:
    """Runs a command; returns the exit code.

    Args:
        arguments: words of the command line; None for those of the process.
        more: further commands by name, from other folders.
    """
    _prepare_streams()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    commands = {**COMMANDS, **(more or {})}
    args = _parser(arguments[0] if arguments else "", commands).parse_args(arguments)
    try:
        code: int = args.command(args)
        sys.stdout.flush()
        return code
    except PolicyError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the pipe has closed it
        _discard_output()
        return 0
    except OSError as error:
        if error.errno not in _FULL:
            raise
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        _discard_output()
        reason = os.strerror(error.errno).lower()
        print(f"kvpolicy: error[file]: the output is not complete: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _prepare_streams() -> None:
    """Lets both streams take any character; one closed by the shell (`>&-`) drops its output."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Sends the output that is still buffered to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check(args: argparse.Namespace) -> int:
    from kvpolicy.dsl.syntax.library import TEST_SUFFIX

    for option in ("model", "set"):
        if getattr(args, option) and not args.trial:
            message = "it says what `--trial` is made for"
            raise refused(f"--{option}", "arguments", message, "add `--trial`")
    tried = _trial(args) if args.trial else None
    code = 0
    for file in args.files:
        try:
            tests = file.endswith(TEST_SUFFIX)
            code = max(code, _check_tests(file) if tests else _check_policy(file, tried))
        except PolicyError as error:  # the file cannot be read
            print(error)
            code = 2
    return code


def _check_policy(file: str, tried: Callable[[Checked], int] | None) -> int:
    """Reports the defects of a policy; if it has none, runs its trial, if one is asked for."""
    from kvpolicy.dsl.check.policy import load

    checked = load(file)
    if checked.diagnostics:
        print(render_all(checked.diagnostics, checked.source))
    if checked.errors:
        return 1
    if tried is not None and not checked.unserved:
        return tried(checked)
    print(f"{checked.source.name}: ok")
    for diagnostic in checked.unserved:
        print(replace(diagnostic, severity="note").render(checked.source))
    return 0


def _trial(args: argparse.Namespace) -> Callable[[Checked], int]:
    """What tries a policy without defects for a model, with the values of `--set`."""
    from kvpolicy.dsl.bind.model_config import USUAL, read_config
    from kvpolicy.dsl.tools.commands import overrides

    shape = USUAL if args.model is None else read_config(args.model).shape
    return partial(_tried, shape=shape, values=overrides(args.set))


def _tried(checked: Checked, shape: ModelShape, values: Mapping[str, str]) -> int:
    """Runs the trial of a policy without defects."""
    from kvpolicy.dsl.bind.bind import bind

    try:
        from kvpolicy.dsl.tools.trial import trial
        from kvpolicy.dsl.tools.trial_cases import sampled
    except ModuleNotFoundError as error:
        return missing("check --trial", error)
    began = perf_counter()
    try:
        trial(bind(sampled(checked.require(), shape), shape, values))
    except PolicyError as error:
        print(error)
        return 1
    print(f"{checked.source.name}: ok, tried in {perf_counter() - began:.2f} s")
    return 0


def _check_tests(file: str) -> int:
    """Checks a test file, which `kvpolicy check policies/*.yaml` names too."""
    from kvpolicy.dsl.syntax.library import read_source
    from kvpolicy.dsl.tools.reading_tests import read_cases

    source = read_source(file)
    try:
        read_cases(source)
    except PolicyError as error:
        print(error)
        return 1
    print(f"{file}: ok")
    return 0


def _fmt(args: argparse.Namespace) -> int:
    from kvpolicy.dsl.syntax.fmt import format_file
    from kvpolicy.dsl.syntax.library import TEST_SUFFIX

    # Tests have no canonical form.
    files = [file for file in args.files if not file.endswith(TEST_SUFFIX)]
    return format_files(files, format_file, check=args.check)


def format_files(files: Sequence[str], format_file: Callable[..., bool], *, check: bool) -> int:
    """Formats files, or says which would change; returns the exit code.

    Args:
        format_file: takes a path and `write`, returns whether the file changes, raises
            `PolicyError`.
        check: whether nothing is written and a file that would change is a failure.
    """
    code = 0
    for file in files:
        try:
            changed = format_file(Path(file), write=not check)
        except PolicyError as error:
            print(error, file=sys.stderr)
            code = 2
            continue
        if changed:
            print(f"{file}: {'would be formatted' if check else 'formatted'}")
            code = max(code, 1 if check else 0)
    return code


def _list(args: argparse.Namespace) -> int:
    from kvpolicy.dsl.check.policy import load
    from kvpolicy.dsl.syntax.library import shipped

    policies = [(name, load(path).program) for name, path in shipped().items()]
    width = max((len(name) for name, _ in policies), default=0)
    for name, program in policies:
        print(f"{name:<{width}}  {program.about if program else 'has errors'}")
    return 0


def _schema(args: argparse.Namespace) -> int:
    from kvpolicy.dsl.syntax.schema import schema_text

    return generated(schema_text(), args)


def _docs(args: argparse.Namespace) -> int:
    from kvpolicy.dsl.tools.docs import reference

    return generated(reference(), args)


def generated(text: str, args: argparse.Namespace) -> int:
    """Prints generated text, writes it to a file, or compares it with one; returns the exit code.

    Args:
        args: with the options `GENERATED`.

    Raises:
        PolicyError: `--check` without `--out`.
    """
    if args.out is None:
        if args.check:
            message = "it compares with the file that `--out` names"
            raise refused("--check", "arguments", message, "add `--out`")
        sys.stdout.write(text)
        return 0
    path = Path(args.out)
    try:
        if args.check:
            current = path.read_text(encoding="utf-8") if path.exists() else ""
            if current != text:
                print(f"{path}: differs from what this command generates")
            return int(current != text)
        path.write_text(text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        print(f"{path}: error[file]: {reason.lower()}", file=sys.stderr)
        return 2
    return 0


def _delegate(args: argparse.Namespace) -> int:
    """Runs a command that executes policies: `main` of the module of its name."""
    try:
        module = import_module(f"kvpolicy.dsl.tools.{_MODULES.get(args.name, args.name)}")
        code: int = module.main(args)
        return code
    except ModuleNotFoundError as error:
        return missing(args.name, error)


def missing(command: str, error: ModuleNotFoundError) -> int:
    """Says that a command needs numpy or torch; raises the error again if another is missing."""
    if (error.name or "").partition(".")[0] not in ("numpy", "torch"):
        raise error
    message = f"kvpolicy {command}: error[file]: this command needs {error.name}"
    print(f"{message}\n = help: pip install '.[run]' in the checkout", file=sys.stderr)
    return 2


def whole(text: str, least: int = 1, most: int = 10**8) -> int:
    """A whole number from `least` to `most`."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number from {least} on")
    # Python does not read thousands of digits.
    digits = text.lstrip("0") or "0"
    if len(digits) > len(str(most)) or int(digits) > most:
        raise argparse.ArgumentTypeError(f"`{text}` is more than {most:,}, the most it can be")
    if int(digits) < least:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number from {least} on")
    return int(digits)


_UP_TO_A_MILLION = partial(whole, most=10**6)
Adds = Callable[[argparse.ArgumentParser], object]


def _option(name: str, metavar: str | None, help: str, **settings: Any) -> Adds:
    """A function that adds an argument; `settings` go to `ArgumentParser.add_argument`."""
    return lambda parser: parser.add_argument(name, metavar=metavar, help=help, **settings)


def _flag(name: str, help: str) -> Adds:
    return lambda parser: parser.add_argument(name, action="store_true", help=help)


class Command(NamedTuple):
    """A command: its help text, the function that runs it, those that add its arguments."""

    help: str
    run: Callable[[argparse.Namespace], int]
    arguments: Sequence[Adds] = ()


FILE, _FILES = _option("file", "FILE", _POLICY), _option("files", "FILE", _POLICY, nargs="+")
_MODEL = _option("--model", "CONFIG", _CONFIG, required=True)
_LENGTH = _option("--length", "N", "tokens of the prompt", required=True, type=whole)


def _settings(help: str) -> Adds:
    return _option("--set", "NAME=VALUE", help, action="append", default=[])


SET = _settings("value of a parameter")
_DELIVERED = "file of a tensor of the model that the policy lists under `data`"
DATA = _option("--data", "NAME=FILE", _DELIVERED, action="append", default=[])

# Arguments of commands, in the order in which `--help` shows them.
_CHECK = (
    _flag("--trial", "also carry them out, on tiny tensors; needs torch"),
    _option("--model", "CONFIG", f"of --trial: {_CONFIG}; default: Llama 3.1 8B's sizes"),
    _settings("of --trial: value of a parameter, which every FILE has; default: its own"),
    _FILES,
)
_EXPLAIN = (
    *(FILE, _MODEL, _LENGTH),
    _option("--gpu", None, "also what is expected of a server on it", choices=tuple(GPUS)),
    _option(
        "--batch", "B", "of --gpu: requests that decode together; default 16", type=_UP_TO_A_MILLION
    ),
    _option(
        "--max-new-tokens", "T", "of --gpu: tokens of an answer; default 512", type=_UP_TO_A_MILLION
    ),
    _flag("--json", "of --gpu: print what is expected, as JSON"),
    *(SET, DATA),
)
_SHOW = (
    *(FILE, _MODEL),
    _flag("--triton", "print the generated kernels instead of the intermediate representation"),
    *(SET, DATA),
)
_TENSORS = "q [L,H,N,D], k and v [L,G,N,D]; q_step, k_step, v_step [T,L,H|G,D]; float32"
_LEAVES = "entries leave at every K-th decode step, unless the policy says when"
_RUN = (
    FILE,
    _option("--tensors", "X.npz", _TENSORS, required=True),
    _flag("--scores", "write the scores too"),
    _flag("--merged", "write how far merging moved keys and values"),
    _option("--fold-interval", "K", _LEAVES, type=int, default=1),
    _option("--out", "R.json", "where the result goes", required=True),
    *(SET, DATA),
    _option("--execution", None, _EXECUTES, choices=EXECUTIONS, default=EXECUTIONS[0]),
)
_TEST = (
    _option("files", "FILE", "policies, tests or folders; default: all shipped", nargs="*"),
    _option("--execution", None, f"{_EXECUTES}; default: each", choices=EXECUTIONS),
)
_FMT = (
    _flag("--check", "only say which files would change"),
    _option("files", "FILE", "path of a policy", nargs="+"),
)
_DIFF = (
    *(_option("first", "A", _POLICY), _option("second", "B", _POLICY), _MODEL, _LENGTH),
    _settings("value of a parameter, of both if both have it"),
    DATA,
)
GENERATED = (
    _option("--out", "FILE", "write to a file instead"),
    _flag("--check", "with --out: compare, do not write"),
)

_EXPLAINS = "what a policy computes, keeps and costs for a model and a length"
_SHOWS = "print what a policy becomes: its values, or the kernels generated for a model"
COMMANDS = {
    "check": Command("report every defect of policy files", _check, _CHECK),
    "explain": Command(_EXPLAINS, _delegate, _EXPLAIN),
    "show": Command(_SHOWS, _delegate, _SHOW),
    "run": Command("apply a policy to recorded tensors", _delegate, _RUN),
    "test": Command("run the tests beside policies (NAME.test.yaml)", _delegate, _TEST),
    "fmt": Command("write policy files in their canonical form", _fmt, _FMT),
    "diff": Command("what changes between two policies", _delegate, _DIFF),
    "list": Command("list the shipped policies", _list),
    "schema": Command("print the JSON Schema of policy files, for editors", _schema, GENERATED),
    "docs": Command("print the reference of sections, names and functions", _docs, GENERATED),
}


class _Version(argparse.Action):
    """`--version`; other commands do not look it up."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **options: Any) -> None:
        from importlib.metadata import version

        print(f"kvpolicy {version('kvpolicy')}")
        parser.exit()


def _parser(chosen: str, known: Mapping[str, Command]) -> argparse.ArgumentParser:
    """A parser of the chosen command alone, which is quicker; of all if it is not known."""
    parser = argparse.ArgumentParser(
        prog="kvpolicy", description="KV-cache policies for SGLang, written in YAML."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    for name in [chosen] if chosen in known else known:
        command = known[name]
        subparser = commands.add_parser(name, help=command.help)
        for add in command.arguments:
            add(subparser)
        subparser.set_defaults(command=command.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
