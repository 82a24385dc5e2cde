"""`kvpolicy inspect`: the entries that each layer and KV head kept of one prompt, with the text."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from kvpolicy.dsl.syntax.diagnostics import listed, refused, why
from kvpolicy.evaluation.looking import inspect_page, terminal
from kvpolicy.evaluation.looking.kept import Kept, pieces, unpacked
from kvpolicy.evaluation.looking.look import Look, opened, text_of
from kvpolicy.evaluation.text_files import check_place

_PIPE_WIDTH = 100  # columns where the output is not a terminal


def main(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code.

    Raises:
        PolicyError: an option, the text or the server cannot be used.
    """
    if len(args.policies) > 1:
        raise refused("--policy", "arguments", "inspect looks at one policy at a time")
    if args.head is not None and args.layer is None:
        raise refused("--head", "arguments", "a head is of a layer", "add --layer")
    for path in filter(None, (args.html, args.json)):
        check_place(path)
    text = text_of(args.prompt)
    with opened(args, lambda _, shape: _check_place(args, shape.layers, shape.kv_heads)) as look:
        kept = asked(look, text, args.new)
    _check_place(args, *kept.held.shape[:2])
    # Files come before the output, whose reader may close it early, as `head` does.
    for path, render in ((args.html, inspect_page.page), (args.json, _as_json)):
        if path is not None:
            _write(path, render(kept))
    _print(kept, args)
    return 0


def asked(look: Look, text: str, new: int) -> Kept:
    """The entries that the first policy of `look` keeps of a text.

    Args:
        new: number of tokens to generate.

    Raises:
        PolicyError: the server refuses the prompt, or does not say which entries were kept.
    """
    policy, ids = look.policies[0], look.tokens.encode(text)
    answer = look.ask(ids, policy.alias, new, custom={"kv_policy_kept": True})
    facts = dict(answer["meta_info"].get("kv_policy") or {})
    packed = facts.pop("kept", None)
    missing = [] if facts.get("uncompressed") else [n for n in terminal.SHOWN if n not in facts]
    if packed is None or missing:
        what = "what was kept" if packed is None else listed(missing, "and")
        raise look.unusable(f"it does not say {what}")
    try:
        held = unpacked(packed, len(ids))
    except ValueError as error:
        raise look.unusable(str(error)) from None
    words = tuple(pieces(look.tokens.decode_all, ids))
    return Kept(policy.alias, policy.setting, words, held, facts, answer["text"])


def _check_place(args: argparse.Namespace, layers: int, kv_heads: int) -> None:
    for option, index, count, unit in (
        ("--layer", args.layer, layers, "layers"),
        ("--head", args.head, kv_heads, "KV heads"),
    ):
        if index is not None and not 0 <= index < count:
            message = f"{index} is none of the model's {count} {unit}, counted from 0"
            raise refused(option, "range", message)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise refused(str(path), "file", why(error, "cannot be written")) from None
    print(f"{path}: written", file=sys.stderr)


def _print(kept: Kept, args: argparse.Namespace) -> None:
    style = style_of_output()
    places = {"layer": args.layer, "head": args.head}
    for line in terminal.view(kept, style, heads=args.heads, whole=args.whole, **places):
        print(line)
    print(f"\nanswer: {terminal.printable(kept.answer.strip())}")


def style_of_output() -> terminal.Style:
    """The style for the standard output; a pipe gets plain marks and a fixed width."""
    tty = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if tty else _PIPE_WIDTH
    ansi = tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return terminal.Style(width, ansi, unicode=encoding == "utf8")


def _as_json(kept: Kept) -> str:
    """All of it as JSON; the mask as `numpy.packbits` in base64, rows padded to whole bytes."""
    kept_map = kept.as_map()
    document = {
        "policy": kept.policy,
        "settings": dict(kept.settings),
        "shape": list(kept.held.shape),
        "bits": kept_map["bits"],
        "tokens": list(kept.tokens),
        "facts": dict(kept.facts),
        "answer": kept.answer,
    }
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"
