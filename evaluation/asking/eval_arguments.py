"""Options of `kvpolicy eval`; imports nothing heavy."""

from __future__ import annotations

import argparse
import math
import shlex

from kvpolicy.dsl.tools.cli import DATA, whole


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    _what(parser)
    _where(parser)
    parser.add_argument("--concurrency", type=whole, default=8, help="requests out at a time")
    parser.add_argument(
        "--maps",
        type=at_least_0,
        default=0,
        metavar="M",
        help="show which entries were kept of M prompts of each task",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on the terminal")


def _what(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="FILE|NAME|none|all",
        help="path of a policy, name of a shipped one, `all` of these, or `none` for full KV; may "
        "be repeated. Full KV is always asked too, as what the others are compared with",
    )
    parser.add_argument("--no-full", action="store_true", help="do not ask full KV")
    parser.add_argument(
        "--budget",
        action="append",
        default=[],
        type=share,
        metavar="SHARE",
        help="share of the prompt's entries to keep, as in 0.125; may be repeated",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="[POLICY.]NAME=VALUE",
        help="value of a parameter; without POLICY for every policy that has it, but for those "
        "whose share it sets",
    )
    DATA(parser)
    parser.add_argument(
        "--tasks",
        required=True,
        type=names,
        metavar="TASK,...",
        help="names of tasks, or data:FILE for questions of your own",
    )
    parser.add_argument(
        "--lengths", type=lengths, default=[512], metavar="N,...", help="tokens of the prompts"
    )
    parser.add_argument("--samples", type=whole, default=100, help="per task and length")
    parser.add_argument("--seed", type=at_least_0, default=0)
    parser.add_argument("--out", required=True, metavar="DIR", help="where the report goes")


def _where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="DIR", help="folder of a checkpoint; a server is started"
    )
    parser.add_argument(
        "--server-args", type=words, default=[], metavar="WORDS", help="more options for it"
    )
    parser.add_argument(
        "--url",
        help="a server that runs already, instead of --model; its radix cache is emptied between "
        "policies, so none that serves others",
    )
    parser.add_argument("--api", choices=("sglang", "openai"), help="what --url is; default: asked")
    parser.add_argument("--model-name", metavar="NAME", help="the model's name at --url")
    parser.add_argument("--tokenizer", metavar="DIR", help="default: the model's folder")
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the key for --url"
    )
    parser.add_argument(
        "--admin-key-env",
        metavar="NAME",
        help="environment variable with its --admin-api-key, by which the cache is emptied",
    )


def share(text: str) -> float:
    """A share above 0 and up to 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a share above 0 and up to 1")
    return value


def at_least_0(text: str) -> int:
    """A whole number from 0 on."""
    return whole(text, least=0)


def lengths(text: str) -> list[int]:
    """Numbers of tokens separated by commas, each once, in rising order."""
    return sorted({whole(number.strip()) for number in text.split(",")})


def words(text: str) -> list[str]:
    """Words of a command line."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"`{text}`: {str(error).lower()}") from None


def names(text: str) -> list[str]:
    """Names separated by commas, each once."""
    task_names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not task_names:
        raise argparse.ArgumentTypeError("there is no name of a task")
    return task_names
