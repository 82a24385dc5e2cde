"""What differs between generated kernels of a prefill and those of decode steps.

In a prefill token t stands at place t, every KV head holds it, and its row may be named by a slot.
While decoding KV heads may hold different entries: rows are named by ids per head, `holds` says
which entries a head holds, and queries and entries are compared by their positions.

Dimensions: G KV heads, n tokens or entries of a layer, W queries of a window.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """Lines of Triton, and names that kernels take.

    Attributes:
        steps: whether it is that of decode steps.
        rows: ends the name of the pointer that says where rows lie.
        flag: a constant of all kernels; `heads`: how many KV heads there are, which at decode
            steps may be those of one layer or of all together.
        block_at: which tokens a block has: at decode steps counted from the newest, so that what
            stands in front of a list, for the sake of longer ones, changes none of its sums.
        entries: which tokens of a block there are; `held` the same in a tile.
        last: where the keys end that the row pass reads.
        places: where a block's rows lie, and the mask that reads them.
        row_at, line_at: positions of queries, in a tile and of its lines.
        seen, line_seen: what a query sees, in a tile and of its lines.
        some: accumulates whether a line sees anything; the row pass then knows lines without keys
            from those whose sum is not finite.
        pass_marks, marks, tail_marks: pointers about tokens that the row pass, kernels over queries
            and the tail take.
        window: how the window's queries are passed.
        parts: pointers into the middle of tensors, for which nothing is compiled anew.
        reserved: names that no value may have.
    """

    steps: bool
    rows: str
    flag: str
    heads: str
    block_at: str
    entries: str
    held: str
    last: str
    places: str
    mask: str
    row_at: str
    line_at: str
    seen: str
    line_seen: str
    some: tuple[str, str]
    none: str
    pass_marks: tuple[str, ...]
    marks: tuple[str, ...]
    tail_marks: tuple[str, ...]
    window: tuple[str, ...]
    parts: frozenset[str] = frozenset()
    reserved: frozenset[str] = frozenset()

    def tile(self, name: str) -> str:
        """Loads a block's keys (`k`) or values (`v`)."""
        whole = {"k": "key", "v": "value"}[name]
        return _TILE.format(
            tile=name,
            gathered=f"{whole.upper()}S_GATHERED",
            rows=self.places.format(names=f"{whole}_{self.rows}"),
            mask=self.mask,
        )

    def block(self) -> str:
        """The loop over a program's blocks of tokens."""
        lines = f"{self.block_at}\ntoken = entry[None, None, :]\n{self.entries}{self.held}"
        return _BLOCK + "".join(f"    {line}\n" for line in lines.rstrip("\n").split("\n"))

    def ranks(self, lines: list[str]) -> list[str]:
        """Definitions of the places among a head's own entries that the lines use."""
        words = {word for line in lines for word in re.findall(r"\w+", line)}
        tiles = {name: text for name, text in _RANKS.items() if name in words}
        if not tiles and "own_entries" not in words:
            return []
        return [*_RANK.rstrip("\n").split("\n"), *tiles.values()]


_BLOCK = """\
begin = tl.program_id(0) * blocks
end = tl.minimum(begin + blocks, tl.cdiv(tokens, BLOCK_N))
for turn in range(begin, end):
    # From the end, which the pass before read last: it may still be in the GPU's cache.
    block = begin + end - 1 - turn
"""

_TILE = """\
{tile}_place = entry.to(tl.int64)
if {gathered}:
    {tile}_place = {rows}
{tile}_place = {tile}_place * {tile}_row + head * {tile}_head
{tile}_there = {mask}[:, None] & (dim < HEAD_DIM)[None, :]
{tile}_tile = tl.load({tile} + {tile}_place[:, None] + dim[None, :], mask={tile}_there, other=0.0)
if UPCAST:
    {tile}_tile = {tile}_tile.to(tl.float32)
"""

_RANK = """\
# Places among the head's own entries, from 1 on.
entry_rank = entry + 1
own_entries = tokens
if RAGGED:
    entry_rank = tl.load(ranks + head * tokens + entry, mask=owned, other=0)
    own_entries = tl.load(ranks + head * tokens + tokens - 1)
"""
_RANKS = {
    "token_rank": "token_rank = entry_rank[None, None, :]",
    "entry_column_rank": "entry_column_rank = entry_rank[:, None]",
}

PREFILL = Form(
    steps=False,
    rows="slots",
    flag="POSITIONS",
    heads="KV: tl.constexpr",
    block_at="entry = block * BLOCK_N + tl.arange(0, BLOCK_N)",
    entries="",
    held="held = token < tokens\n",
    last="""\
# Keys after the tile's last query are seen by none of it.
seen_last = tl.minimum(tokens - queries + start + BLOCK_W, tokens)
last = tl.minimum((part + 1) * blocks, tl.cdiv(seen_last, BLOCK_N))
""",
    places="tl.load({names} + entry, mask=entry < tokens, other=0).to(tl.int64)",
    mask="(entry < tokens)",
    row_at="",
    line_at="",
    seen="(row < queries) & (token <= tokens - queries + row)",
    line_seen="line_there[:, None] & (entry[None, :] <= (tokens - queries + line_row)[:, None])",
    some=("", ""),
    none='lse = tl.where(none, float("-inf"), top + tl.log(tl.where(none, 1.0, total)))\n',
    pass_marks=(),
    marks=("positions",),
    tail_marks=("positions",),
    window=("q",),
)

STEPS = Form(
    steps=True,
    rows="ids",
    flag="RAGGED",
    heads="KV",
    block_at="entry = tokens - (block + 1) * BLOCK_N + tl.arange(0, BLOCK_N)",
    entries="""\
owned = (entry >= 0) & (entry < tokens)
if RAGGED:
    owned = tl.load(holds + head * tokens + entry, mask=owned, other=0) != 0
at = tl.load(positions + entry, mask=owned, other=0).to(tl.int32)
""",
    held="held = owned[None, None, :]\n",
    last="last = tl.minimum((part + 1) * blocks, tl.cdiv(tokens, BLOCK_N))\n",
    places="tl.load({names} + head * tokens + entry, mask=owned, other=0).to(tl.int64)",
    mask="owned",
    row_at="asked_at = tl.load(query_positions + row, mask=row < queries, other=-1).to(tl.int32)\n",
    line_at="""\
line_at = tl.load(query_positions + line_row, mask=line_there, other=-1).to(tl.int32)
""",
    seen="held & (at[None, None, :] <= asked_at)",
    line_seen="owned[None, :] & (at[None, :] <= line_at[:, None])",
    some=(
        "some = tl.zeros([GROUP_P * BLOCK_W], tl.int32)\n",
        "some = tl.maximum(some, tl.max(seen.to(tl.int32), 1))\n",
    ),
    none="""\
# An older query may see nothing: all entries before it have left.
empty = tl.where(some > 0, float("nan"), float("-inf"))
lse = tl.where(none, empty, top + tl.log(tl.where(none, 1.0, total)))
""",
    pass_marks=("positions", "holds"),
    marks=("positions", "holds", "ranks"),
    tail_marks=("positions", "holds", "ranks", "order"),
    window=("q", "query_positions"),
    parts=frozenset("query_positions key_ids value_ids positions holds".split()),
    reserved=frozenset(
        "query_positions key_ids value_ids holds ranks order owned inside at asked_at line_at some "
        "empty entry_rank own_entries token_rank entry_column_rank".split()
    ),
)
