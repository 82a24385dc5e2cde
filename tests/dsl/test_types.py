"""Types of expressions: named axes, units, absent values, and the phase in which they are known."""

import pytest
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.ir.nodes import AXES, When
from kvpolicy.dsl.ops.table import BUILTINS, FUNCTIONS, OPERATIONS, RESERVED
from kvpolicy.dsl.syntax.source import Source

HEAD = "policy: x\nlanguage: 1\nparams: {rate: {default: 0.5, unit: ratio}, few: 4, flag: true}\n"


def checked(expression, rest="keep: recent(4)\n"):
    """The check of a file whose let `v` is the expression."""
    text = expression.replace("\n", "\n    ")
    return load(Source("x.yaml", f"{HEAD}let:\n  v: |\n    {text}\n{rest}"))


def node(expression):
    """The node of an expression at the end of the prefill."""
    result = checked(expression, "keep: recent(4) where rate > 0.1 and few > 1 and flag else all\n")
    return result.require().prefill.lets["v"]


@pytest.mark.parametrize(
    ("expression", "type_"),
    [
        ("1", "number"),
        ("true", "truth"),
        ("prompt", "number tokens"),
        ("layer", "number layers"),
        ("kv_heads", "number"),
        ("position", "number[token] tokens"),
        ("key", "number[kv, token, dim]"),
        ("attn(recent(4))", "number[head, query, token]?"),
        ("distance(recent(4))", "number[query, token] tokens?"),
        ("all", "truth[token]"),
        # reductions remove axes and absence
        ("sum[query](attn(recent(4)))", "number[head, token]"),
        ("sum[group](attn(recent(4)))", "number[kv, query, token]"),
        ("mean[head, query](attn(recent(4)))", "number[token]"),
        ("max[token](position)", "number tokens"),
        ("var[token](position)", "number"),
        ("count[token](recent(4))", "number tokens"),
        ("count[dim](value > 0)", "number[kv, token]"),
        ("count[layer](layer > 2)", "number layers"),
        ("any[dim](key > 0)", "truth[kv, token]"),
        ("sum[layer](norm1[dim](value))", "number[kv, token]"),
        # broadcasting is by name
        ("sum[query](attn(recent(4))) * norm1[dim](value)", "number[head, token]"),
        ("position * norm1[token, dim](value)", "number[kv, token] tokens"),
        ("distance(recent(4)) <= few", "truth[query, token]"),
        # absent values
        ("position where recent(4)", "number[token] tokens?"),
        ("(position where recent(4)) + 1", "number[token] tokens?"),
        ("(position where recent(4)) > 1", "truth[token]"),
        ("position where recent(4) else 0", "number[token] tokens"),
        ("maxpool(position where recent(4), 3)", "number[token] tokens?"),
        ("rank(position where recent(4))", "number[token]?"),
        ("top(position where recent(4), 2)", "truth[token]"),
        ("past(position, 2)", "number[past, token] tokens?"),
        ("at(0, position)", "number[token] tokens?"),
        ("mean[past](past(position, 2))", "number[token] tokens"),
        # units
        ("rate * prompt", "number tokens"),
        ("prompt / 2", "number tokens"),
        ("prompt / prompt", "number"),
        ("prompt * prompt", "number"),
        ("prompt * layer", "number"),
        ("prompt ^ 2", "number"),
        ("prompt % 7", "number tokens"),
        ("layer % 2", "number layers"),
        ("floor(prompt + 1)", "number tokens"),
        ("min(prompt, 9)", "number tokens"),
        ("sqrt(prompt)", "number"),
        ("8 where layer == 1 else prompt", "number tokens"),
        ("split[layer](prompt, layer)", "number tokens"),
        # selections
        ("recent(4)", "truth[token]"),
        ("top(norm1[dim](value), 4)", "truth[kv, token]"),
        ("top[kv, token](norm1[dim](value), 4)", "truth[kv, token]"),
        ("top(position, count[token](norm1[dim](value) > 1))", "truth[kv, token]"),
        ("top[layer, kv](norm1[token, dim](value), 4)", "truth[kv]"),
        ("sinks(4) then top(norm1[dim](value), 4)", "truth[kv, token]"),
        ("rank[kv](norm1[token, dim](value))", "number[kv]"),
        ("index[query](attn(recent(4)))", "number[query]"),
        # derived functions
        ("entropy[kv, token](norm1[dim](value))", "number"),
        ("softmax[layer](norm2[kv, token, dim](key))", "number"),
        ("cosine[dim](key, value)", "number[kv, token]"),
        ("slerp[dim](key, value, 0.5)", "number[kv, token, dim]"),
        ("minmax[head](sum[query, token](attn(recent(4))))", "number[head]"),
        ("uniform(1)", "number[kv, token]"),
    ],
)
def test_type(expression, type_):
    assert str(node(expression).type) == type_


@pytest.mark.parametrize(
    ("expression", "when"),
    [
        ("layer + few", When.LOAD),
        ("rate * prompt", When.PROMPT),
        ("length", When.PROMPT),
        ("sum[layer](prompt)", When.PROMPT),
        ("split[layer](prompt, layer)", When.PROMPT),
        ("sum[query](attn(recent(4)))", When.LAYER),
        ("past(norm1[dim](value), 2)", When.LAYER),
        ("at(0, norm1[dim](value))", When.LAYER),
        ("sum[layer](norm1[dim](value))", When.END),
        ("top[layer, kv, token](norm1[dim](value), 4)", When.END),
        ("rank[layer](norm1[kv, token, dim](value))", When.END),
        ("cluster[layer](norm1[kv, token, dim](value), 2)", When.END),
    ],
)
def test_when(expression, when):
    assert node(expression).when == when


@pytest.mark.parametrize(
    ("expression", "exact"),
    [
        ("rate * prompt", True),
        ("split[layer](prompt, layer)", True),
        ("prompt where layer > 2 else 4", True),
        ("layer > 2", True),
        ("prompt ^ 2", True),
        ("prompt ^ 0.5", False),
        ("cos(layer)", False),
        ("pi", False),
        ("count[token](all)", False),
    ],
)
def test_exact(expression, exact):
    assert node(expression).type.exact is exact


def test_length_is_not_known_early_where_something_propagates():
    rest = "keep: recent(v)\npropagate:\n  first: layer == 2\n  tokens: recent(64)\n"
    lets = checked("length", rest).require().prefill.lets
    assert lets["v"].when == When.LAYER
    assert not lets["v"].type.exact


def test_parameters_take_unit_and_range_from_their_uses():
    text = (
        "policy: x\nlanguage: 1\n"
        "params: {window: 8, kernel: 7, start: 4, rate: 0.5, layers_kept: 2, half: window // 2}\n"
        "score: mean[head, query](avgpool(attn(recent(window)), kernel)) * rate\n"
        "budget: 64 + half\n"
        "keep: all where layer < layers_kept else sinks(start) then recent(half) then top(score)\n"
    )
    params = load(Source("x.yaml", text)).require().params
    facts = {n: (p.unit, p.minimum, p.whole, p.odd) for n, p in params.items()}
    assert facts == {
        "window": ("tokens", 1, True, False),
        "kernel": (None, 1, True, True),
        "start": ("tokens", 0, True, False),
        "rate": (None, None, False, False),
        "layers_kept": ("layers", None, True, False),
        "half": ("tokens", 0, True, False),
    }


def test_a_parameter_named_as_an_argument_is_another():
    """`recent(n)` is `top(position, n)`, whose `n` is not the policy's."""
    params = "params: {n: {default: 0.1, unit: ratio}}\n"
    keep = "keep: sinks(2) or recent(floor(n * prompt))\n"
    found = load(Source("x.yaml", f"policy: x\nlanguage: 1\n{params}{keep}")).require().params
    assert (found["n"].unit, found["n"].whole) == ("ratio", False)


def test_decode_recomputes_lets_from_its_own_data():
    text = (
        "policy: x\nlanguage: 1\nlet:\n  votes: sum[head, query](attn(recent(4)))\n"
        "budget: 64\nkeep: top(votes)\ndecode: same\n"
    )
    program = load(Source("x.yaml", text)).require()
    assert program.prefill.keep.when == When.LAYER
    assert program.decode.keep.when == When.STEP
    assert program.decode.budget is None


def test_derived_functions_are_expanded():
    keep = (
        load(Source("x.yaml", "policy: x\nlanguage: 1\nkeep: recent(4)\n")).require().prefill.keep
    )
    assert (keep.op, keep.origin, keep.axes) == ("top", "recent", ("token",))
    assert [argument.op for argument in keep.args] == ["position", "number"]


def test_equal_expressions_are_one_node():
    text = (
        "policy: x\nlanguage: 1\n"
        "score: sum[head, query](attn(recent(4))) / sum[token](sum[head, query](attn(recent(4))))\n"
        "budget: 64\nkeep: top(score)\n"
    )
    score = load(Source("x.yaml", text)).require().prefill.score
    assert score.args[0] is score.args[1].args[0]


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=lambda f: f.name)
def test_every_function_makes_known_operations(function):
    arguments = {"queries": "recent(4)", "width": "3", "n": "4", "k": "2", "seed": "1", "t": "0.5",
                 "layer": "0", "low": "0", "high": "1", "total": "64", "weight": "1"}  # fmt: skip
    axes = {"required": "[dim]", "optional": "[token]"}.get(function.axes, "")
    axes = f"[{function.axes}]" if function.axes in ("layer", "token") else axes
    x = {"any": "value > 0", "cluster": "1"}.get(function.name, "value")
    given = ", ".join(
        arguments.get(p.name, x) for p in function.parameters if not p.optional or p.name == "n"
    )
    call = f"{function.name}{axes}({given})"
    if function.rule == "receivers":
        call = call.replace("value", "key")
        rest = f"keep: recent(4)\nmerge:\n  into: {call}\n"
        top = load(Source("x.yaml", f"policy: x\nlanguage: 1\n{rest}")).require().prefill.merge.into
    elif function.rule == "target":
        rest = f"keep: recent(4)\nmerge:\n  into: next(1)\n  weight: max[dim]({call})\n"
        program = load(Source("x.yaml", f"policy: x\nlanguage: 1\n{rest}")).require()
        top = program.prefill.merge.weight
    else:
        top = node(call)
    for part in top.walk():
        assert part.op in OPERATIONS
        row = OPERATIONS[part.op]
        assert row.least <= len(part.args)
        assert row.most is None or len(part.args) <= row.most
        assert list(part.type.axes) == [axis for axis in AXES if axis in part.type.axes]


def test_names_of_the_language_do_not_collide():
    assert not set(BUILTINS) & set(FUNCTIONS)
    assert set(RESERVED) >= {*BUILTINS, *FUNCTIONS, "score", "budget", "token", "head", "layer"}
