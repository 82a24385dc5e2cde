"""Stores of results in generated functions."""

from __future__ import annotations

from kvpolicy.dsl.codegen.expressions import Writer
from kvpolicy.dsl.codegen.tiles import Tile


def store(writer: Writer, name: str, axes: tuple[str, ...], tile: Tile, *, truth: bool) -> None:
    """Stores a block of a value per token; in decode, 0 at tokens that a KV head does not hold."""
    steps = writer.steps
    place, mask = ("at_head", "real") if "group" in axes else ("at_kv", "inside")
    if truth:
        text = f"tl.where({f'held & ({tile.text})' if steps else tile.text}, 1, 0).to(tl.int8)"
    else:
        text = f"tl.where(held, {tile.text}, 0.0)" if steps else tile.text
    writer.line(f"tl.store({name} + {place}, {text}, mask={mask})")


def store_row(writer: Writer, name: str, axes: tuple[str, ...], text: str, kind: str) -> None:
    """Stores a tile of a value per query of one split; `head` counts KV heads over all splits."""
    place, mask = "head * queries + row", "row < queries"
    if "group" in axes:
        place, mask = "(head * GROUP + group) * queries + row", f"(group < GROUP) & ({mask})"
    text = f"{text}.to(tl.int8)" if kind == "any" else text
    writer.line(f"tl.store({name} + {place}, {text}, mask={mask})")
