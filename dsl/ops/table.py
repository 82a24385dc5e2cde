"""The tables of the language, made of the rows of all groups: operations, functions, names.

The checker types calls by them, and the reference is generated from them.

Letters in costs: N cached tokens, w queries, D head size, P dropped entries, C kept entries,
L layers; per layer and KV head unless said otherwise.
"""

from __future__ import annotations

from kvpolicy.dsl.ops import arithmetic, layers, leaves, merging, reductions, tokens
from kvpolicy.dsl.ops.derived import DERIVED
from kvpolicy.dsl.ops.operations import Builtin, Function, Operation

OPERATIONS: dict[str, Operation] = {
    row.name: row
    for group in (leaves, arithmetic, reductions, tokens, layers, merging)
    for row in group.ROWS
}
FUNCTIONS: dict[str, Function] = {
    row.name: row.function for row in OPERATIONS.values() if row.function is not None
} | {function.name: function for function in DERIVED}
BUILTINS: dict[str, Builtin] = {
    builtin.name: builtin for row in OPERATIONS.values() for builtin in row.names
}

# Names that no parameter, state or let may have, with what they are.
RESERVED: dict[str, str] = {
    **dict.fromkeys(
        ("past", "kv", "group", "head", "query", "token", "dropped", "dim", "channel"), "an axis"
    ),
    **dict.fromkeys(BUILTINS, "a name of the language"),
    **dict.fromkeys(FUNCTIONS, "a function"),
    **dict.fromkeys(("score", "budget"), "a section"),
    **dict.fromkeys(
        ("and", "or", "not", "then", "where", "else", "true", "false"), "a word of the language"
    ),
}
