"""The table of the language's own names."""

from __future__ import annotations

from kvpolicy.dsl.ops.signatures import Builtin

BUILTINS: dict[str, Builtin] = {
    b.name: b
    for b in (
        Builtin("true", "truth", (), None, "always", "the condition that always holds", "truth"),
        Builtin("false", "truth", (), None, "always", "the condition that never holds", "truth"),
        Builtin("pi", "size", (), None, "always", "3.14159..., a float64"),
        Builtin("layers", "size", (), "layers", "always", "number of layers"),
        Builtin("layer", "size", (), "layers", "layer", "this layer, counted from 0"),
        Builtin("heads", "size", (), None, "always", "query heads per layer"),
        Builtin("kv_heads", "size", (), None, "always", "KV heads per layer"),
        Builtin("prompt", "size", (), "tokens", "prompt", "tokens of the prompt"),
        Builtin("length", "size", (), "tokens", "prefill", "tokens that reach this layer"),
        Builtin("generated", "size", (), "tokens", "decode", "decode steps, this one included"),
        Builtin(
            "cached",
            "size",
            ("kv",),
            "tokens",
            "decode",
            "entries of each KV head, the new one included",
        ),
        Builtin(
            "position",
            "position",
            ("token",),
            "tokens",
            "tensors",
            "original position, counted from 0",
        ),
        Builtin("all", "all", ("token",), None, "tensors", "every candidate", "truth"),
        Builtin(
            "new",
            "new",
            ("token",),
            None,
            "tensors",
            "the tokens of this step: the whole prompt in prefill, one token in decode",
            "truth",
        ),
        Builtin(
            "key",
            "key",
            ("kv", "token", "dim"),
            None,
            "tensors",
            "cached keys, after RoPE at their original positions",
        ),
        Builtin("value", "value", ("kv", "token", "dim"), None, "tensors", "cached values"),
        Builtin(
            "hidden_in",
            "hidden_in",
            ("token", "channel"),
            None,
            "prefill",
            "residual stream that enters the layer",
            unserved=True,
        ),
        Builtin(
            "hidden_mid",
            "hidden_mid",
            ("token", "channel"),
            None,
            "prefill",
            "residual stream after attention, before the MLP",
            unserved=True,
        ),
        Builtin(
            "mass",
            "special",
            ("kv", "token"),
            None,
            "merge",
            "own weight plus the weights of the entries merged into a receiver",
        ),
        Builtin(
            "members",
            "special",
            ("kv", "token"),
            None,
            "merge",
            "1 plus the number of entries merged into a receiver",
        ),
        Builtin(
            "own", "special", ("kv", "token", "dim"), None, "share", "key or value of this layer"
        ),
        Builtin(
            "below",
            "special",
            ("kv", "token", "dim"),
            None,
            "share",
            "key or value of the layer below",
        ),
    )
}
