"""What to write for words that other languages have and this one has not."""

from __future__ import annotations

_NOISE = "write `uniform(seed)`, a number from 0 to 1 for each entry"
_QUERIES = "queries are read by `attn(recent(n))` and `logits(recent(n))`"

INSTEAD = {
    "std": "write `sqrt(var[...](x))`",
    "pow": "write `x ^ n`",
    "sigmoid": "write `1 / (1 + exp(-x))`",
    "random": _NOISE,
    "rand": _NOISE,
    "noise": _NOISE,
    "hash": _NOISE,
    "q": _QUERIES,
    "queries": _QUERIES,
    "k": "write `key`",
    "keys": "write `key`",
    "v": "write `value`",
    "values": "write `value`",
    "inf": "to leave entries out, write `x where condition`",
    "infinity": "to leave entries out, write `x where condition`",
    "same": "leave out what stays as in the prefill",
}
