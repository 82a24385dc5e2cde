"""Leaves of expressions: numbers as written, names of the language, attention."""

from __future__ import annotations

from typing import Any

from kvpolicy.dsl.ops.operations import Builtin, Kind, Operation, Parameter, called
from kvpolicy.dsl.ops.ranges import SHARE

_VECTOR = ("kv", "token", "dim")
_HEADS = ("kv", "group", "query", "token")
_SCORED = ("query", "key")


def _name(
    name: str, where: str, meaning: str, axes: tuple[str, ...] = (), unit: str | None = None,
    *, op: str = "size", **fields: Any,
) -> Builtin:  # fmt: skip
    """A name of the language that an operation holds as `Node.value`."""
    return Builtin(name, op, axes, unit, where, meaning, **{"value": name, **fields})


def _named(
    name: str, kind: Kind, where: str, meaning: str, axes: tuple[str, ...],
    unit: str | None = None, *, result: str = "number", unserved: bool = False, **traits: Any,
) -> Operation:  # fmt: skip
    """The row of a name of the language that is an operation of its own."""
    builtin = Builtin(name, name, axes, unit, where, meaning, result, unserved=unserved)
    return Operation(name, kind, names=(builtin,), result=result, **traits)


def _vector(name: str, meaning: str) -> Operation:
    return _named(
        name, Kind.VECTOR, "tensors", meaning, _VECTOR, result_axes=_VECTOR, always_finite=True,
        same_at_each_step=True, tensors=(name,), interpret=f"leaves.{name}",
        torch=f"leaves.{name}",
    )  # fmt: skip


def _hidden(name: str, meaning: str) -> Operation:
    axes = ("token", "channel")
    return _named(name, Kind.MODEL, "prefill", meaning, axes, result_axes=axes, unserved=True)


def _window(
    name: str, meaning: str, cost: str, axes: tuple[str, ...], unit: str | None = None,
    **traits: Any,
) -> Operation:  # fmt: skip
    """Its queries are "recent" (argument: count), "all" or "new" (no argument)."""
    shape = f"number[{', '.join(axes).replace('kv, group', 'head')}]{f' {unit}' if unit else ''}"
    return called(
        name, "attention", (Parameter("queries", "queries"),), meaning, cost, kind=Kind.WINDOW,
        group="Attention", shape=shape, unit=unit or "none", least=0, value="queries",
        result="number", result_axes=axes, always_finite=True, interpret=f"leaves.{name}",
        torch=f"leaves.{name}", **traits,
    )  # fmt: skip


ROWS = (
    Operation("number", Kind.LITERAL, value="number", result="number", result_axes=(),
              exact=True, always_finite=True),
    Operation("truth", Kind.LITERAL, value="truth", result="truth", result_axes=(),
              exact=True, names=(
        _name("true", "always", "the condition that always holds", op="truth", kind="truth",
              value=True),
        _name("false", "always", "the condition that never holds", op="truth", kind="truth",
              value=False))),
    Operation("param", Kind.GIVEN, value="parameter", result_axes=(),
              exact=True),
    Operation("size", Kind.GIVEN, value="name", interpret="leaves.size",
              torch="leaves.size", names=(
        _name("pi", "always", "3.14159..., a float64", exact=False),
        _name("layers", "always", "number of layers", unit="layers"),
        _name("layer", "layer", "this layer, counted from 0", unit="layers"),
        _name("heads", "always", "query heads per layer"),
        _name("kv_heads", "always", "KV heads per layer"),
        _name("prompt", "prompt", "tokens of the prompt", unit="tokens"),
        _name("length", "prefill", "tokens that reach this layer", unit="tokens"),
        _name("generated", "decode", "decode steps, this one included", unit="tokens"),
        _name("cached", "decode", "entries of each KV head, the new one included", ("kv",),
              "tokens"))),
    Operation("data", Kind.MODEL, meaning="delivered with the model", value="tensor",
              interpret="leaves.data"),
    Operation("head_table", Kind.MODEL, meaning="what `data` decides, at each layer and head",
              value="head_table", made_by_lowering=True, per_head=True,
              torch="leaves.head_table"),
    Operation("state", Kind.REMEMBERED, meaning="before this step's update inside its own `next`, "
              "after it elsewhere", value="state", per_head=True, gone_after_layer=True,
              interpret="leaves.state"),
    Operation("before", Kind.REMEMBERED, meaning="of a state, before this step's update",
              value="state", made_by_lowering=True, per_head=True, gone_after_layer=True),
    Operation("budget", Kind.REMEMBERED, meaning="the numbers of the section `budget` of the "
              "enclosing rules, or of `propagate`", value="rules", per_head=True,
              interpret="select.budget"),
    Operation("decided", Kind.REMEMBERED, meaning="of the prefill, see `Rules.decided`",
              value="let", per_head=True, interpret="leaves.decided"),
    _named("position", Kind.PLACE, "tensors", "original position, counted from 0", ("token",),
           "tokens", result_axes=("token",), always_finite=True, whole=True,
           of_tokens_there=True, same_at_each_step=True, interpret="leaves.position",
           torch="leaves.position", triton="leaves.position"),
    _named("all", Kind.PLACE, "tensors", "every candidate", ("token",), result="truth",
           per_head=True, of_tokens_there=True, same_at_each_step=True,
           interpret="leaves.everything", torch="leaves.everything", triton="leaves.everything"),
    _named("new", Kind.PLACE, "tensors", "the tokens of this step: the whole prompt in prefill, "
           "one token in decode", ("token",), result="truth", per_head=True,
           interpret="leaves.newest", torch="leaves.newest", triton="leaves.newest"),
    _vector("key", "cached keys, after RoPE at their original positions"),
    _vector("value", "cached values"),
    _hidden("hidden_in", "residual stream that enters the layer"),
    _hidden("hidden_mid", "residual stream after attention, before the MLP"),
    _window("attn", "softmax over all candidates of q.k / sqrt(D), causal, in float32; absent "
            "where the token comes after the query", "O(w N D); all queries: O(N^2 D)", _HEADS,
            tensors=_SCORED, softmax=True, gone_after_layer=True,
            interval=SHARE),
    _window("logits", "the same before the softmax", "O(w N D)", _HEADS, tensors=_SCORED,
            gone_after_layer=True),
    _window("distance", "position of the query minus position of the token; absent where negative",
            "O(w N)", ("query", "token"), "tokens", whole=True, of_tokens_there=True),
    called("uniform", "uniform", (Parameter("seed"),),
           "pseudo-random number in [0, 1) per KV head and entry, from a hash of seed, layer, "
           "head, position and decode step; the same on every device", kind=Kind.OTHER,
           group="Other", shape="number[kv, token]", result="number", interval=SHARE,
           interpret="leaves.uniform", torch="leaves.uniform"),
    # Only in `merge` or `share`.
    Operation("special", Kind.MERGE, value="name", names=(
        _name("mass", "merge", "own weight plus the weights of the entries merged into a receiver",
              ("kv", "token"), op="special"),
        _name("members", "merge", "1 plus the number of entries merged into a receiver",
              ("kv", "token"), op="special"),
        _name("own", "share", "key or value of this layer", _VECTOR, op="special"),
        _name("below", "share", "key or value of the layer below", _VECTOR, op="special"))),
)  # fmt: skip
