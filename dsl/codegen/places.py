"""What follows from a token's place, in generated kernels."""

from __future__ import annotations

from kvpolicy.dsl.codegen.expressions import Writer
from kvpolicy.dsl.codegen.tiles import Tile
from kvpolicy.dsl.ir.nodes import Node

_TOKEN = frozenset(("token",))


def position(writer: Writer, node: Node) -> Tile:
    """Read where entries may have moved."""
    load = f"tl.load(positions + {writer.token}, mask={writer.held}, other=0).to(tl.float32)"
    if writer.steps:
        return Tile(writer.named("position", load), _TOKEN)
    name = writer.named("position", f"{writer.token}.to(tl.float32)")
    writer.line("if positions is not None:")
    writer.line(f"    {name} = {load}")
    return Tile(name, _TOKEN)


def everything(writer: Writer, node: Node) -> Tile:
    return Tile(f"({writer.token} >= 0)", _TOKEN)


def newest(writer: Writer, node: Node) -> Tile:
    """In a prefill all tokens, at decode steps the last."""
    if writer.steps:
        return Tile(f"({writer.token} == tokens - 1)", _TOKEN)
    return everything(writer, node)


def index(writer: Writer, node: Node) -> Tile:
    """Along tokens."""
    return Tile(writer.named("index", f"{writer.token}.to(tl.float32)"), _TOKEN)


def end(writer: Writer, node: Node) -> Tile:
    """`recent(n)` or `sinks(n)`."""
    return writer.end(node)
