"""The options of the commands that look into what policies do; imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path


def of_inspect(parser: argparse.ArgumentParser) -> None:
    """The options of `kvpolicy inspect`."""
    _add_server(parser, several=False)
    parser.add_argument("--prompt", required=True, metavar="FILE", help="the text; - reads it")
    parser.add_argument("--html", type=Path, metavar="OUT.html", help="write a page with the map")
    parser.add_argument("--json", type=Path, metavar="OUT.json", help="write what was kept")
    parser.add_argument("--new", type=_count, default=8, metavar="N", help="tokens to generate")
    parser.add_argument("--heads", action="store_true", help="a line per KV head too")
    parser.add_argument("--layer", type=int, metavar="I", help="the text by this layer alone")
    parser.add_argument("--head", type=int, metavar="J", help="... and by this KV head of it")
    parser.add_argument("--whole", action="store_true", help="do not cut the text")


def _count(text: str) -> int:
    # One token needs no decode step, so nothing would be compressed.
    if not text.isascii() or not text.isdigit() or not 2 <= int(text) <= 10**5:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of tokens from 2 on")
    return int(text)


def _add_server(parser: argparse.ArgumentParser, several: bool) -> None:
    """The options that say what is asked of which server; `several`: policies."""
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
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="folder of a checkpoint: a server is started; with --url: where its tokenizer is",
    )
    parser.add_argument("--url", help="a server that runs already and has the policy")
    parser.add_argument(
        "--server-args", metavar="WORDS", help="more options for the server that is started"
    )
