"""The command `kvpolicy`.

Exit codes: 0 well, 1 something differs or fails, 2 input that cannot be used. What executes
policies is imported only by the commands that do, so that `check` needs neither numpy nor torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from kvpolicy.dsl.syntax.diagnostics import PolicyError, refused, render_all

if TYPE_CHECKING:
    from kvpolicy.dsl.check.policy import Checked
    from kvpolicy.dsl.ir.nodes import ModelShape

# Commands whose module has another name.
_MODULES = {"test": "policy_tests"}

_FILE = "path of a policy, or the name of a shipped one"


def main(arguments: Sequence[str] | None = None, more: Mapping[str, Command] | None = None) -> int:
    """Runs a command; returns the exit code.

    Args:
        arguments: words of the command line; None: those of the process.
        more: commands of other folders, by name.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
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
    except BrokenPipeError:  # the reader of a pipe has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _check(args: argparse.Namespace) -> int:
    from kvpolicy.dsl.check.policy import load
    from kvpolicy.dsl.syntax.library import TEST_SUFFIX

    if args.model is not None and not args.trial:
        raise refused("--model", "arguments", "it says what `--trial` is made for", "add `--trial`")
    shape = _tried_shape(args.model) if args.trial else None
    code = 0
    for file in args.files:
        if file.endswith(TEST_SUFFIX):
            code = max(code, _check_tests(file))
            continue
        try:
            checked = load(file)
        except PolicyError as error:
            print(error)
            code = 2
            continue
        if checked.diagnostics:
            print(render_all(checked.diagnostics, checked.source))
        if checked.errors:
            code = max(code, 1)
        elif shape and not checked.unserved:
            code = max(code, _tried(checked, shape))
        else:
            print(f"{checked.source.name}: ok")
            for sentence in checked.unserved:
                print(f"{checked.source.name}: note: {sentence}")
    return code


def _tried_shape(model: str | None) -> ModelShape:
    """The sizes that policies are tried for."""
    from kvpolicy.dsl.bind.model_config import USUAL, read_config

    return USUAL if model is None else read_config(model).shape


def _tried(checked: Checked, shape: ModelShape) -> int:
    """Tries a policy without defects, with its defaults."""
    from kvpolicy.dsl.bind.bind import bind

    try:
        from kvpolicy.dsl.tools.trial import trial
    except ModuleNotFoundError as error:
        return _missing("check --trial", error)
    began = perf_counter()
    try:
        trial(bind(checked.require(), shape))
    except PolicyError as error:
        print(error)
        return 1
    print(f"{checked.source.name}: ok, tried in {perf_counter() - began:.2f} s")
    return 0


def _check_tests(file: str) -> int:
    """Checks a file of tests, so that `kvpolicy check policies/*.yaml` means what it says."""
    from kvpolicy.dsl.syntax.library import read_source
    from kvpolicy.dsl.tools.test_format import read_cases

    try:
        source = read_source(file)
    except PolicyError as error:
        print(error)
        return 2
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
        format_file: from a path, and whether to `write`, to whether anything changes; raises
            `PolicyError`.
        check: nothing is written, and a file that would change is a failure.
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

    return _generated(schema_text(), args)


def _docs(args: argparse.Namespace) -> int:
    from kvpolicy.dsl.tools.docs import reference

    return _generated(reference(), args)


def _generated(text: str, args: argparse.Namespace) -> int:
    """Prints generated text, writes it to a file, or compares it with one."""
    if args.out is None:
        sys.stdout.write(text)
        return 0
    path = Path(args.out)
    try:
        if args.check:
            current = path.read_text(encoding="utf-8") if path.exists() else ""
            if current != text:
                print(f"{path}: differs from what `kvpolicy {args.name}` generates")
            return int(current != text)
        path.write_text(text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        print(f"{path}: error[file]: {reason.lower()}", file=sys.stderr)
        return 2
    return 0


def _delegate(args: argparse.Namespace) -> int:
    """Commands that execute policies."""
    try:
        module = import_module(f"kvpolicy.dsl.tools.{_MODULES.get(args.name, args.name)}")
        code: int = module.main(args)
        return code
    except ModuleNotFoundError as error:
        return _missing(args.name, error)


def _missing(command: str, error: ModuleNotFoundError) -> int:
    """Says which package a command needs; what is no package of its own is raised again."""
    if (error.name or "").partition(".")[0] not in ("numpy", "torch"):
        raise error
    message = f"kvpolicy {command}: error[file]: this command needs {error.name}"
    print(f"{message}\n = help: pip install 'kvpolicy[run]'", file=sys.stderr)
    return 2


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trial", action="store_true", help="also carry them out, on tiny tensors; needs torch"
    )
    parser.add_argument(
        "--model",
        metavar="CONFIG",
        help="of --trial: config.json of a model, or its folder; default: Llama 3.1 8B's sizes",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help=_FILE)


def _fmt_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="only say which files would change")
    parser.add_argument("files", nargs="+", metavar="FILE", help="path of a policy")


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help=_FILE)
    _add_model(parser)
    parser.add_argument(
        "--ir", action="store_true", help="print the intermediate representation instead"
    )
    _add_set(parser)


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help=_FILE)
    _add_config(parser)
    parser.add_argument(
        "--triton",
        action="store_true",
        help="print the generated kernels instead of the intermediate representation",
    )
    _add_set(parser)


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help=_FILE)
    parser.add_argument(
        "--tensors",
        required=True,
        metavar="X.npz",
        help="q [L,H,N,D], k and v [L,G,N,D]; q_step, k_step, v_step [T,L,H|G,D]; float32",
    )
    parser.add_argument("--scores", action="store_true", help="write the scores too")
    parser.add_argument(
        "--merged", action="store_true", help="write how far merging moved keys and values"
    )
    parser.add_argument(
        "--fold-interval",
        type=int,
        default=1,
        metavar="K",
        help="entries leave at every K-th decode step, unless the policy says when",
    )
    parser.add_argument("--out", required=True, metavar="R.json", help="where the result goes")
    _add_set(parser)
    _add_execution(parser)


def _test_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="policies, tests or folders; default: all shipped"
    )
    _add_execution(parser, default=None)


def _tune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help=_FILE)
    parser.add_argument(
        "--for",
        dest="parameter",
        required=True,
        metavar="PARAMETER",
        help="what to choose: a parameter that `propagate` depends on",
    )
    parser.add_argument(
        "--values",
        nargs="+",
        metavar="VALUE",
        help="values to try; default: those that the policy declares",
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of a checkpoint")
    parser.add_argument(
        "--prompts",
        required=True,
        nargs="+",
        metavar="FILE",
        help="*.jsonl with a prompt per line (text or input_ids); other files are one text each",
    )
    parser.add_argument(
        "--most",
        type=_number,
        metavar="VALUE",
        help="largest value to choose; default: of layers the middle one",
    )
    parser.add_argument(
        "--rows", type=float, metavar="SHARE", help="most token rows that may be computed, 0 to 1"
    )
    parser.add_argument("--device", help="where the model runs; default: a GPU if there is one")
    parser.add_argument("--out", metavar="PLOT.png", help="draw the distances")
    _add_set(parser)


def _diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help=_FILE)
    parser.add_argument("second", metavar="B", help=_FILE)
    _add_model(parser)


def _generated_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", help="write to a file instead")
    parser.add_argument("--check", action="store_true", help="with --out: compare, do not write")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="CONFIG", help="config.json of a model, or its folder"
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--length", required=True, type=_length, metavar="N", help="tokens of the prompt"
    )


def _number(text: str) -> Fraction:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"`{text}` is not a number") from None


def _length(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= 10**8:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of tokens")
    return int(text)


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="value of a parameter"
    )


def _add_execution(parser: argparse.ArgumentParser, default: str | None = "interpreter") -> None:
    choices = ("interpreter", "torch")
    help = "what executes the policy" + ("" if default else "; default: each")
    parser.add_argument("--execution", choices=choices, default=default, help=help)


class Command(NamedTuple):
    """A command: what it does, what runs it, and what adds its arguments to a parser."""

    help: str
    run: Callable[[argparse.Namespace], int]
    arguments: Callable[[argparse.ArgumentParser], None]


COMMANDS = {
    "check": Command("report every defect of policy files", _check, _check_arguments),
    "explain": Command(
        "what a policy computes, keeps and costs for a model and a length",
        _delegate,
        _explain_arguments,
    ),
    "show": Command(
        "print what a policy becomes: its values, or the kernels generated for a model",
        _delegate,
        _show_arguments,
    ),
    "run": Command("apply a policy to recorded tensors", _delegate, _run_arguments),
    "test": Command("run the tests beside policies (NAME.test.yaml)", _delegate, _test_arguments),
    "tune": Command(
        "choose a parameter of a propagation with a model and prompts", _delegate, _tune_arguments
    ),
    "fmt": Command("write policy files in their canonical form", _fmt, _fmt_arguments),
    "diff": Command("what changes between two policies", _delegate, _diff_arguments),
    "list": Command("list the shipped policies", _list, lambda parser: None),
    "schema": Command(
        "print the JSON Schema of policy files, for editors", _schema, _generated_arguments
    ),
    "docs": Command(
        "print the reference of sections, names and functions", _docs, _generated_arguments
    ),
}


def _parser(chosen: str, known: Mapping[str, Command]) -> argparse.ArgumentParser:
    """The parser of the chosen command alone, which is quicker, or of all."""
    parser = argparse.ArgumentParser(
        prog="kvpolicy", description="KV-cache policies for SGLang, written in YAML."
    )
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    for name in [chosen] if chosen in known else known:
        command = known[name]
        below = commands.add_parser(name, help=command.help)
        command.arguments(below)
        below.set_defaults(command=command.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
