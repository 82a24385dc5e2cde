"""The options of `kvpolicy inspect` and `kvpolicy fidelity`; imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvpolicy.dsl.tools.cli import DATA, whole
from kvpolicy.evaluation.asking.eval_arguments import words


def of_inspect(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvpolicy inspect`."""
    _add_server(parser, several=False)
    parser.add_argument("--prompt", required=True, metavar="FILE", help="the text; - reads it")
    parser.add_argument("--html", type=Path, metavar="OUT.html", help="write a page with the map")
    parser.add_argument("--json", type=Path, metavar="OUT.json", help="write what was kept")
    parser.add_argument("--new", type=_count, default=8, metavar="N", help="tokens to generate")
    parser.add_argument("--heads", action="store_true", help="a line per KV head too")
    parser.add_argument("--layer", type=int, metavar="I", help="the text by this layer alone")
    parser.add_argument("--head", type=int, metavar="J", help="... and by this KV head of it")
    parser.add_argument("--whole", action="store_true", help="do not cut the text")


def of_fidelity(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvpolicy fidelity`."""
    _add_server(parser, several=True)
    parser.add_argument(
        "--text",
        required=True,
        action="append",
        metavar="FILE",
        help='a text, or *.jsonl with {"text": ...} per line; - reads one; may be repeated',
    )
    split = parser.add_mutually_exclusive_group()
    split.add_argument(
        "--prompt-tokens", type=whole, metavar="N", help="tokens of a text that are the prompt"
    )
    split.add_argument(
        "--prompt-share",
        type=_share,
        default=0.8,
        metavar="SHARE",
        help="... or their share of the text; default 0.8",
    )
    parser.add_argument(
        "--continuation",
        type=_count,
        default=128,
        metavar="T",
        help="tokens after the prompt that are compared, as far as the text goes; default 128",
    )
    parser.add_argument(
        "--top",
        type=whole,
        default=256,
        metavar="K",
        help="tokens of each distribution that are compared, where the vocabulary has more than "
        "2,048 (smaller ones are compared as a whole); default 256",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write fidelity.csv, .jsonl, .png and .html"
    )


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a share between 0 and 1")
    return share


def _count(text: str) -> int:
    # One token needs no decode step, so the prompt would not be compressed.
    return whole(text, least=2, most=10**5)


def _add_server(parser: argparse.ArgumentParser, several: bool) -> None:
    """Adds the options for the server and its policies; `several` allows several policies."""
    parser.add_argument(
        "--policy",
        required=True,
        action="append",
        dest="policies",
        metavar="FILE",
        help="path of a policy, or the name of a shipped one"
        + ("; may be repeated" if several else "")
        + "; with --url also the name of any policy that the server has",
    )
    setting = "[POLICY.]NAME=VALUE" if several else "NAME=VALUE"
    help_ = "value of a parameter; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar=setting, help=help_)
    DATA(parser)
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="folder of a checkpoint: a server is started; with --url: where its tokenizer is",
    )
    parser.add_argument("--url", help="a server that runs already and has the policy")
    parser.add_argument(
        "--server-args",
        type=words,
        default=[],
        metavar="WORDS",
        help="more options for the server that is started",
    )
    key = "environment variable with the key for --url"
    parser.add_argument("--api-key-env", metavar="NAME", help=key)
