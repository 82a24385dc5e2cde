"""Where generated kernels put their results."""

from __future__ import annotations

import re

from kvpolicy.dsl.codegen.expressions import Writer
from kvpolicy.dsl.codegen.forms import Form
from kvpolicy.dsl.codegen.tiles import Tile


def store(writer: Writer, name: str, axes: tuple[str, ...], tile: Tile, *, truth: bool) -> None:
    """One block of a value per token; at decode steps 0 where a KV head does not hold it."""
    steps = writer.form.steps
    place, mask = ("at_head", "real") if "group" in axes else ("at_kv", "held")
    mask = "inside" if steps and mask == "held" else mask
    if truth:
        text = f"tl.where({f'held & ({tile.text})' if steps else tile.text}, 1, 0).to(tl.int8)"
    else:
        text = f"tl.where(held, {tile.text}, 0.0)" if steps else tile.text
    writer.line(f"tl.store({name} + {place}, {text}, mask={mask})")


def places(lines: list[str], indent: str, form: Form) -> list[str]:
    """Definitions of the places that the lines store to."""
    inside = "(token >= 0) & (token < tokens)"
    known = {
        "inside": inside,
        "at_kv": "head * tokens + token",
        "at_head": "(head * GROUP + group) * tokens + token",
        "real": f"(group < GROUP) & {inside if form.steps else 'held'}",
    }
    words = {word for line in lines for word in re.findall(r"\w+", line)}
    return [f"{indent}{name} = {text}" for name, text in known.items() if name in words]


def store_row(writer: Writer, name: str, axes: tuple[str, ...], text: str, kind: str) -> None:
    heads = "GROUP" if "group" in axes else "1"
    group = " + group" if "group" in axes else ""
    place = f"((part * KV + head) * {heads}{group}) * queries + row"
    mask = "(group < GROUP) & (row < queries)" if "group" in axes else "row < queries"
    text = f"{text}.to(tl.int8)" if kind == "any" else text
    writer.line(f"tl.store({name} + {place}, {text}, mask={mask})")
