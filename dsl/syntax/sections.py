"""The table of a policy file's keys, for reading, formatting, the JSON Schema and the reference."""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.dsl.syntax.mappings import KnownKey


@dataclass(frozen=True)
class Key(KnownKey):
    """A key of a mapping.

    `form` says what its value may be: "expression", "expressions" (a list), "text", "name" (the
    policy's), "version", "number", "truth", "default" (number, truth or expression), "choice" (one
    of `choices`), "choices" (a list of them), "values" (a list of numbers and truth values),
    "names" (a list of names that the author chose), "keys" (a mapping with `keys`), "same" (the
    word `same`, or a mapping with `keys`), "named" (names that the author chose, each with a value
    as of `item`) or "either" (an expression, or a mapping with `keys`).
    """

    keys: tuple[Key, ...] = ()
    choices: tuple[str, ...] = ()
    item: Key | None = None


UNITS = ("tokens", "layers", "ratio")

PARAM = Key(
    "parameter",
    "keys",
    "a value, or a mapping that describes it",
    keys=(
        Key("default", "default", "number, truth, or expression over model sizes", True),
        Key("unit", "choice", "what it counts", choices=UNITS),
        Key("min", "number", "smallest value"),
        Key("max", "number", "largest value"),
        Key("above", "number", "the value must be larger than this"),
        Key("odd", "truth", "only odd whole numbers"),
        Key("choices", "values", "the only values"),
        Key("about", "text", "one sentence"),
    ),
)
DATA = Key(
    "tensor",
    "keys",
    "a tensor that comes with the model",
    keys=(
        Key("axes", "choices", "its axes", True, choices=("layer", "kv", "group")),
        Key("min", "number", "smallest value"),
        Key("max", "number", "largest value"),
        Key("about", "text", "one sentence"),
    ),
)
STATE_ITEM = Key(
    "state",
    "either",
    "the value after each step; the state's own name is the value before",
    keys=(
        Key("start", "expression", "value before the first update"),
        Key("next", "expression", "value after each step"),
    ),
)
LET = Key("let", "named", "names for values, in any order", item=Key("name", "expression", ""))
STATE = Key("state", "named", "what is remembered between steps", item=STATE_ITEM)
SCORE = Key("score", "expression", "number per token: what counts")
BUDGET = Key("budget", "expression", "entries per KV head at this layer, everything kept included")
KEEP = Key("keep", "expression", "the entries that stay; without it, all")
APPLY = Key("apply", "choices", "what is changed", choices=("key", "value"))
MERGE = Key(
    "merge",
    "keys",
    "what becomes of dropped entries",
    keys=(
        Key("into", "expression", "`nearest(x)` or `next(n)`: who receives", True),
        LET,
        STATE,
        Key("accept", "expression", "which dropped entries are merged; default all"),
        Key("weight", "expression", "weight of a dropped entry; default 1"),
        Key("own", "expression", "weight of the receiver; default 1"),
        Key("divide", "expression", "what the sum is divided by; default `mass`"),
        APPLY,
    ),
)

FILE = (
    Key(
        "policy",
        "name",
        "its name in requests and metrics; by custom the file's name without `.yaml`",
        True,
    ),
    Key("language", "version", "version of the language: 1", True),
    Key("about", "text", "one sentence"),
    Key("source", "text", "paper or repository"),
    Key("params", "named", "values that an operator sets, per server or per run", item=PARAM),
    Key("data", "named", "tensors that come with the model", item=DATA),
    Key("require", "expressions", "conditions over parameters and model sizes"),
    STATE,
    LET,
    Key(
        "propagate",
        "keys",
        "which tokens deeper layers compute",
        keys=(
            Key(
                "first", "expression", "acts at the first layer where this holds, then never again"
            ),
            Key("every", "expression", "acts at every layer where this holds"),
            Key("budget", "expression", "number of tokens that go deeper"),
            Key("tokens", "expression", "the tokens that go deeper", True),
            Key("restart", "expression", "start the prefill again on the chosen tokens alone"),
        ),
    ),
    SCORE,
    BUDGET,
    KEEP,
    MERGE,
    Key(
        "share",
        "keys",
        "two adjacent layers that store one direction per entry",
        keys=(
            Key("when", "expression", "layers that share with the one below", True),
            LET,
            Key("direction", "expression", "the unit vector that both store", True),
            Key("except", "expression", "entries that keep both vectors"),
            APPLY,
        ),
    ),
    Key("read", "expression", "tokens that a decode step attends to; nothing is evicted by it"),
    Key(
        "decode",
        "same",
        "what changes while decoding: `same`, or the rules that differ",
        keys=(
            Key("when", "expression", "the steps at which entries leave; default every step"),
            STATE,
            LET,
            SCORE,
            BUDGET,
            KEEP,
            MERGE,
        ),
    ),
    Key("positions", "choice", "positions that attention sees", choices=("original", "slots")),
    Key("report", "names", "names under `let` whose values `kvpolicy run` and tests show"),
)
