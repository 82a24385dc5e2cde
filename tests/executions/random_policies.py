"""Random policy files with states, propagation, merging and decode steps."""

from __future__ import annotations

from random import Random

HEADER = "policy: random\nlanguage: 1\nabout: random\n"
HEADS = (
    "{r}[query](attn(recent(3)))",
    "{r}[query](attn(new))",
    "{r}[query](attn(recent(3)) where not recent(3))",
    "{r}[query](logits(recent(2)))",
    "mean[query](attn(recent(4)) * distance(recent(4)))",
    "var[query](attn(recent(3)))",
    "count[query](attn(recent(3)) > 0.1)",
    "index[token](position) * sum[query](attn(recent(2)))",
)
LEAVES = (
    "sum[dim](value)",
    "norm1[dim](key)",
    "norm2[dim](value)",
    "cosine[dim](key, value)",
    "heat",
    "heat",
    "age + 0 * heat",
    "uniform(3)",
)
UNARY = (
    "abs({x})",
    "-({x})",
    "exp(-abs({x}))",
    "log({x})",
    "floor(4 * {x})",
    "maxpool({x}, 3)",
    "avgpool({x}, 5)",
    "rank({x})",
    "softmax[token]({x})",
    "minmax[token]({x})",
    "({x} where position % 3 < 2)",
    "({x} where not recent(2))",
    "{x} / sum[token]({x})",
    "{x} * entropy[token](abs({x}))",
    "({x} where layer < 1 else position + 0 * {x})",
    "{x} * count[token](all)",
    "{x} + sum[token](position where new)",
)
BINARY = ("{x} + {y}", "{x} * {y}", "{x} / {y}", "max({x}, {y})", "{x} - {y}")
KEEPS = (
    "recent(3) then top(score)",
    "sinks(2) then recent(2) then top[kv, token](score)",
    "top(score)",
    "top(score, 5)",
    "top(score, budget // 2) then recent(2) then top(score)",
    "recent(2) then top(score, 2) then top(score)",
    "score > mean[token](score) or recent(1)",
    "recent(2) then top(score) where 0 < layer else sinks(3)",
    "recent(1) then top(score, 3) then sinks(2)",
    "top(score where not top(score, 2), 3) then recent(2)",
    "not top(score, 2) then recent(1)",
)
BUDGETS = (
    "7",
    "5 + layer * 3",
    "0.4 * length",
    "1 + count[token](top[kv, token](score, 9))",
    "2 + split[layer](20, max[kv, token](score), max = length)",
)
STATES = (
    "heat: heat + sum[group, query](attn(new))",
    "heat: max(0.5 * heat, sum[query](mean[group](attn(new))))",
    "heat: |\n    heat + max[group](max[query](attn(new)))",
)
PROPAGATIONS = (
    "",
    "",
    "propagate:\n  first: layer == 1\n"
    "  tokens: recent(2) then top(sum[head, query](attn(recent(2))), 6)\n",
    "propagate:\n  every: sum[token](max[kv, group, query](attn(recent(2)))) > 1.1\n"
    "  tokens: recent(2) then top(sum[head, query](attn(new)), length - 3)\n",
    "propagate:\n  first: layer == 1\n  budget: 0.5 * length\n"
    "  tokens: recent(2) then top(sum[head, query](attn(all)))\n  restart: true\n",
)
MERGES = (
    "",
    "",
    "merge:\n  into: nearest(key)\n  let:\n    match: cosine[dim](key, target(key))\n  state:\n"
    "    bar:\n      start: mean[kv, dropped](match)\n"
    "      next: 0.5 * bar + 0.5 * mean[kv, dropped](match)\n"
    "  accept: match >= bar\n  weight: exp(match)\n  own: exp(1)\n",
    "merge:\n  into: next(3)\n  accept: uniform(1) < clamp(heat / target(heat), 0, 1)\n"
    "  weight: abs(target(score))\n  divide: members + mass\n  apply: [value]\n",
    "merge:\n  into: nearest(value)\n  weight: 0.2 + heat\n  divide: 1 + mass\n",
)


def policy(random: Random) -> str:
    """The text of a policy; it may be refused."""
    decode = (
        "decode: same\n",
        "decode: same\n",
        "decode:\n  when: generated % 2 == 0\n",
        f"decode:\n  score: |\n    {_score(random, 1)}\n",
        f"decode:\n  budget: 4 + generated // 2\n  keep: |\n    {random.choice(KEEPS[:6])}\n",
    )
    return (
        f"{HEADER}state:\n  age: age + 1 + 0 * position\n  {random.choice(STATES)}\n"
        f"{random.choice(PROPAGATIONS)}score: |\n  {_score(random, 2)}\n"
        f"budget: |\n  {random.choice(BUDGETS)}\nkeep: |\n  {random.choice(KEEPS)}\n"
        f"{random.choice(MERGES)}{random.choice(decode)}"
        f"{random.choice(('', 'positions: slots' + chr(10)))}"
    )


def _heads(random: Random) -> str:
    return random.choice(HEADS).format(r=random.choice(("sum", "mean", "max")))


def _score(random: Random, depth: int) -> str:
    kind = random.randrange(4)
    if depth == 0:
        if kind == 0:
            return random.choice(LEAVES)
        if kind == 1:
            reduced = random.choice(("sum", "mean", "max", "min", "var"))
            return f"{reduced}[group]({_heads(random)})"
        if kind == 2:
            return f"max[group](maxpool({_heads(random)}, 3))"
        return f"sum[head]({_heads(random)})" + random.choice((" + 0 * heat", ""))
    if kind == 0:
        return _score(random, 0)
    x, y = (f"({_score(random, depth - 1)})" for _ in range(2))
    if kind == 1:
        return random.choice(UNARY).format(x=x)
    if kind == 2:
        return random.choice(BINARY).format(x=x, y=y)
    return f"({x} where {y} > 0.2 else sum[dim](value))"
