"""Random policy files, made by the rules of the language: most are accepted, some are refused.

An expression is made for given axes, so that it may be deep and still have types that fit. Sections
are those of the papers and compositions of them. The same seed gives the same text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.ops.table import FUNCTIONS
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.tools.trial_cases import sampled

Axes = frozenset[str]

HEADER = "policy: random\nlanguage: 1\nabout: random\n"
# Tensors of the model, some by layer, and the axes that they have at one.
DATA = (
    "data:\n  gate: {axes: [layer, kv]}\n  part: {axes: [layer]}\n"
    "  weight: {axes: [kv, group], min: -2, max: 2}\n"
)
DATA_AXES = {"gate": ("kv",), "part": (), "weight": ("kv", "group")}
SCALAR: Axes = frozenset()
ENTRY: Axes = frozenset(("kv", "token"))
VECTOR: Axes = ENTRY | {"dim"}
MAP: Axes = ENTRY | {"group", "query"}
# Axes in the order in which they are written.
ORDER = ("kv", "group", "query", "token", "dropped", "dim")

UNARY = (
    "abs({x})", "-({x})", "exp(-abs({x}))", "log({x})", "sqrt({x})", "floor(4 * {x})", "{x} ^ 2",
    "round({x} * 2)", "ceil({x} / 3)", "{x} % 3", "{x} // 2", "cos({x})", "{x} ^ 0.5", "({x} - 1)",
    "acos({x})", "{x} / 0", "2 ^ {x}", "1 / {x}",
)  # fmt: skip
BINARY = (
    "{x} + {y}", "{x} - {y}", "{x} * {y}", "{x} / {y}", "max({x}, {y})", "min({x}, {y})",
    "{x} ^ {y}", "{x} // {y}", "{x} % {y}",
)  # fmt: skip
ALONG_TOKENS = (
    "maxpool({x}, 3)", "avgpool({x}, 5)", "softmax[token]({x})", "minmax[token]({x})",
    "normalize[token]({x})", "{x} / sum[token]({x})", "{x} * entropy[token](abs({x}))",
    "{x} + index[token]({x})", "{x} - max[token]({x})", "maxpool({x}, 1)",
    "{x} * count[token](all)", "{x} + sum[token](position where new)",
    *(f"{f.name}[token]({{x}})" for f in FUNCTIONS.values() if f.rule == "along"),
)  # fmt: skip
ALONG_HEADS = (
    "rank[kv]({x})", "{x} / sum[kv]({x})", "{x} - mean[kv]({x})", "{x} + index[kv]({x})",
    "softmax[kv]({x})", "normalize[kv](abs({x}))", "{x} * entropy[kv](abs({x}))", "unit[kv]({x})",
    "({x} where top[kv]({x}, 1))",
)  # fmt: skip
ACROSS_LAYERS = (
    "{x} - max[layer]({x})", "mean[layer]({x}) + {x}", "{x} / sum[layer]({x})",
    "max[past](past({x}, 2))", "sum[past](past({x}, 3))", "var[past](past({x}, 2))",
    "({x} where layer < 1 else at(0, {x}))", "at(layer - 1, {x})", "rank[layer]({x})",
    "({x} where layer > mean[layer](layer) else 2 * {x})",
)  # fmt: skip
REDUCED = ("sum", "mean", "max", "min", "var")
LITERALS = ("0", "1", "2", "0.5", "3", "0.1", "layers", "kv_heads", "(layer * 1)", "prompt", "7")
COUNTS = ("1", "2", "3", "5", "9", "0", "budget // 2", "0.3 * prompt", "layer * 2 + 1")
BY_LAYER = ("layer * 3", "4 - layer * 4", "1 * layer", "5 where layer == 1 else 0", "3 + layer")
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
WINDOWS = ("recent(3)", "recent(2)", "recent(1)", "recent(2 + 1)", "recent(near)", "new")
BUDGETS = (
    "7", "5", "5 + layer * 3", "0.4 * length", "3 where layer < 1 else 8", "0", "prompt",
    "1 + count[token](top[kv, token](score, 9))", "2 + count[token](top[kv](score, 1))",
    "2 + split[layer](20, max[kv, token](score), max = length)",
    "2 + cascade[layer](20, max[kv, token](score), max = length)",
    "1 + 6 * max[token](score) / sum[layer](max[token](score))",
    "3 + cluster[layer](max[kv, token](score), 2)",
    "sum[layer](count[token](top[kv](score, 1)))",
    "1 * max[token](count[layer](top{axes}(score, {count})))",
    "count[{axis}, token](top{axes}(score, {count}))",
    "min(6, count[{axis}]({truth}))", "(1 where {truth} else 9)", "clamp({number}, 0, 9)",
    "1 + floor(abs({number}))", "9 - count[token]({truth})", "2 + 5 * normalize[kv](abs({number}))",
    "1 + 6 * normalize[layer](abs({number}))", "max[past](past({number}, 2)) + 1",
    "rank[layer]({number}) + 2",
)  # fmt: skip
# Of winners at all layers, each of which has a number of its own.
WINNERS = (
    "1 * {most}[token](count[layer](top{axes}(score, {by_layer})))",
    "1 * {most}[kv, token](count[layer](top{axes}(score, {by_layer})))",
    "{most}[layer](count[token](top{axes}(score, {by_layer})))",
)
TOPS = (
    "top(score)", "top[kv, token](score)", "top[token, kv](score)", "top[layer, kv, token](score)",
    "top[layer, token](score)",
)  # fmt: skip
SETS = (
    "recent(3)", "sinks(2)", "recent(near)", "top(score, 2)", "top[kv, token](score, 7)",
    "top(max[kv](score), 3)", "top[kv](score, 1)", "top[layer, kv, token](score, 11)",
    "score > mean[token](score)", "(recent(1) or sinks(1))", "not top(score, 2)", "new",
    "(sinks(1) where layer > 0 else recent(2))", "top[layer](score, 1)",
    "top(score where not top(score, 2), 3)", "top[kv, token](score, {count})",
    "top(score, {count})", "({other} where {truth} else {other})", "({other} and {other})",
    "recent({count})", "{truth}", "any[group]({truths})",
)  # fmt: skip
NEXT_HEATS = (
    "heat + sum[group, query](attn(new))",
    "max(0.5 * heat, sum[query](mean[group](attn(new))))",
    "heat + max[group](max[query](attn(new)))",
    "heat + sum[group, query](attn(new) where distance(new) > 1)",
    "heat + count[group, query](attn(new) > 0.1)",
    "heat + sum[group, query](attn(new) where attn(new) > 0.2 else 0.1)",
    "heat + count[group, query](not (attn(new) > 0.1))",
    "heat + sum[group, query](attn(new) * count[token](attn(new) > 0.1))",
    "heat + sum[group, query](attn(new) * position)",
    "heat + mean[kv](sum[group, query](attn(new)))",
    "min(heat, {entries})",
    "(heat where {truth} else {entries})",
)
STARTS = (
    "position", "(1 where sinks(4) else 0)", "(1 where recent(near) else 0)",
    "(1 where new else 0)", "(2 where all else 0)", "exp(position / -9)",
)  # fmt: skip
PROPAGATIONS = (
    "propagate:\n  first: layer == 1\n"
    "  tokens: recent(2) then top(sum[head, query](attn(recent(2))), 6)\n",
    "propagate:\n  every: sum[token](max[kv, group, query](attn(recent(2)))) > 1.1\n"
    "  tokens: recent(2) then top(sum[head, query](attn(new)), length - 3)\n",
    "propagate:\n  first: layer == 1\n  budget: 0.5 * length\n"
    "  tokens: recent(2) then top(sum[head, query](attn(all)))\n  restart: true\n",
    "propagate:\n  first: layer >= mean[layer](layer)\n  tokens: recent(5)\n",
)
MERGES = (
    "merge:\n  into: nearest(key)\n  let:\n    match: cosine[dim](key, target(key))\n  state:\n"
    "    bar:\n      start: mean[kv, dropped](match)\n"
    "      next: 0.5 * bar + 0.5 * mean[kv, dropped](match)\n"
    "  accept: match >= bar\n  weight: exp(match)\n  own: exp(1)\n",
    "merge:\n  into: next(3)\n  accept: uniform(1) < clamp(heat / target(heat), 0, 1)\n"
    "  weight: abs(target(score))\n  divide: members + mass\n  apply: [value]\n",
    "merge:\n  into: nearest(value)\n  weight: 0.2 + heat\n  divide: 1 + mass\n",
    "merge:\n  into: next(1)\n",
)

MOMENTS = ("layer == 1", "layer >= 1", "layer % 2 == 0", "true", "false", "flag", "layer == 0")
PAIRS = ("layer % 2 == 1", "layer == 1", "layer == layers - 1 and layer > 0", "false")
DIRECTIONS = (
    "slerp[dim](below, own, {scalar})", "unit[dim](below + own)", "unit[dim]({vectors})", "own",
    "unit[dim]({entries} * below + {entries} * own)", "unit[dim](below where {truth} else own)",
)  # fmt: skip
RECEIVERS = ("nearest(key)", "nearest(value)", "next(1)", "next(3)", "next(near)", "next(prompt)")
DIVISORS = ("members", "1 + mass", "mass + members", "max(1, abs({entries}))")
NUMBERED = ("generated % 2 == 0", "generated >= 2", "prompt > 5", "flag", "generated == 2")
LATER_BUDGETS = (
    "4 + generated // 2", "max(1, min(cached, 6))", "0.5 * cached", "3 where generated < 3 else 5",
)  # fmt: skip


@dataclass(frozen=True)
class _Scene:
    """What the expressions of a section may read.

    Attributes:
        entries, vectors, maps: values per entry; with `dim`; with `group` and `query`.
        place: the axis of entries.
    """

    entries: tuple[str, ...]
    vectors: tuple[str, ...]
    maps: tuple[str, ...] = ()
    place: str = "token"

    @property
    def per_entry(self) -> Axes:
        """Axes of a value per entry."""
        return frozenset(("kv", self.place))

    def fits(self, axes: Axes) -> bool:
        """Whether some value has these axes: those of attention, or those of vectors."""
        attention = self.per_entry | {"group", "query"}
        return axes <= self.per_entry | {"dim"} or bool(self.maps and axes <= attention)


_ASKED = "sum[group, query](attn({window}))"
PROMPT = _Scene(
    ("norm1[dim](key)", "norm2[dim](value)", "sum[dim](value)", "cosine[dim](key, value)",
     "uniform(3)", "max[dim](abs(key))", _ASKED, _ASKED, "heat"),
    ("key", "value", "key * value"), ("attn({window})", "logits({window})"),
)  # fmt: skip
DROPPED = _Scene(
    ("cosine[dim](key, target(key))", "norm1[dim](key)", "norm2[dim](target(value))", "uniform(1)",
     "heat", "target(heat)", "score", "sum[dim](key * target(key))"),
    ("key", "value", "target(key)", "(key - target(key))"), ("attn(new)",), "dropped",
)  # fmt: skip
PAIR = _Scene(
    ("norm2[dim](own)", "sum[dim](own * below)", "angle[dim](below, own)", "norm1[dim](value)",
     "uniform(2)"),
    ("own", "below", "(own - below)", "key"),
)  # fmt: skip


def policy(random: Random) -> str:
    """Text of a random policy, which the check may refuse."""
    return _File(random).text()


def expression(random: Random, axes: Axes, depth: int = 2) -> str:
    """Text of a random numeric expression with these axes."""
    return _File(random).number(axes, depth)


def accepted(random: Random, shape: tuple[int, int, int, int]) -> Bound:
    """The next random policy that is accepted for (L, H, G, D) and can be served."""
    while True:
        try:
            checked = load(Source("random.yaml", policy(random)))
            if not checked.unserved:
                size = ModelShape(*shape)
                return bind(sampled(checked.require(), size), size)
        except PolicyError:
            continue


@dataclass
class _File:
    """One file: its names, and the observation window of the current expression."""

    random: Random
    lets: dict[str, Axes] = field(default_factory=dict)
    window: str = "recent(3)"
    scene: _Scene = PROMPT
    layers: bool = True  # whether expressions look at other layers

    def text(self) -> str:
        """The whole file."""
        random = self.random
        params = "params:\n  near: {default: 4, min: 1}\n  flag: false\n"
        if random.random() < 0.07:
            return f"{HEADER}{params}{self._share()}"
        self.layers = random.random() < 0.5
        decodes = random.random() < 0.7
        if decodes and random.random() < 0.7:
            self.layers = False  # a decode step cannot look at other layers
        data = DATA if random.random() < 0.25 else ""
        if data:
            self.lets.update({name: frozenset(axes) for name, axes in DATA_AXES.items()})
        lets = self._lets()
        score = self.new_expression(ENTRY, random.randint(1, 3))
        parts = [
            HEADER, params, data,
            self._states(), lets,
            self._propagate() if random.random() < 0.25 else "",
            f"score: |\n  {score}\n", f"budget: |\n  {self._budget()}\n",
            f"keep: |\n  {self._selection()}\n",
            self._merge() if random.random() < 0.35 else "",
            self._decode() if decodes else "",
            "positions: slots\n" if random.random() < 0.15 else "",
        ]  # fmt: skip
        return "".join(parts)

    def _lets(self) -> str:
        lines = []
        for name in ("one", "two", "three")[: self.random.choice((0, 0, 1, 2, 3))]:
            axes = self.random.choice((SCALAR, frozenset(("kv",)), ENTRY, ENTRY | {"group"}))
            lines.append(f"  {name}: |\n    {self.new_expression(axes, 1)}\n")
            self.lets[name] = axes
        return f"let:\n{''.join(lines)}" if lines else ""

    def _states(self) -> str:
        age = "  age: age + 1 + 0 * position\n" if self.random.random() < 0.5 else ""
        self.lets["heat"] = ENTRY
        if age:
            self.lets["age"] = frozenset(("token",))
        layers, self.layers = self.layers, False  # while its layer is computed, no other one is
        heat = f"  heat: |\n    {self._filled(self.random.choice(NEXT_HEATS))}\n"
        self.layers = layers
        return f"state:\n{age}{heat}{self._started() if self.random.random() < 0.5 else ''}"

    def _started(self) -> str:
        """A state with a `start`; what that is of may differ by KV head once their entries do."""
        random, layers = self.random, self.layers
        self.layers = False  # while its layer is computed, no other one is known
        axes = random.choice((SCALAR, frozenset(("kv",)), frozenset(("token",)), ENTRY))
        start = self.new_expression(axes, 1)
        if "token" in axes and random.random() < 0.5:
            start = f"{random.choice(STARTS)} + {start}"
        following = random.choice((None, None, f"0.5 * born + {self.number(axes, 1)}", "born + 1"))
        self.layers = layers
        self.lets["born"] = axes
        update = "" if following is None else f"    next: |\n      {following}\n"
        return f"  born:\n    start: |\n      {start}\n{update}"

    def _budget(self) -> str:
        if self.layers and self.random.random() < 0.3:
            return self._filled(self.random.choice(WINNERS))
        looks = ("layer]", "past", "[layer")
        choices = BUDGETS if self.layers else [x for x in BUDGETS if not any(y in x for y in looks)]
        return self._filled(self.random.choice(choices))

    def _filled(self, form: str, axes: Axes = ENTRY) -> str:
        """A form with parts drawn for its fields; conditions and numbers have any of `axes`."""
        random, made = self.random, form
        parts: dict[str, Callable[[], str]] = {
            "{count}": lambda: random.choice((*COUNTS, "near", f"({self.number(SCALAR, 1)})")),
            "{by_layer}": lambda: random.choice(BY_LAYER),
            "{most}": lambda: random.choice(("max", "max", "sum")),
            "{axes}": lambda: random.choice(("", "[kv]", "[kv, token]", "[layer, token]")),
            "{axis}": lambda: random.choice(("kv", "group")),
            "{other}": lambda: random.choice(
                ("recent(3)", "sinks(2)", "top(score, 3)", "top(-position, 2)", "recent(1)")
            ),
            "{truth}": lambda: self.truth(random.choice((SCALAR, self._some(axes))), 1),
            "{truths}": lambda: self.truth(axes | {"group"}, 1),
            "{number}": lambda: self.new_expression(self._some(axes & {"kv"}), 1),
            "{scalar}": lambda: f"({self.number(SCALAR, 1)})",
            "{entries}": lambda: f"({self.number(self.scene.per_entry, 1)})",
            "{vectors}": lambda: f"({self.number(self.scene.per_entry | {'dim'}, 1)})",
        }
        for field_, part in parts.items():
            while field_ in made:
                made = made.replace(field_, part(), 1)
        return made

    def _propagate(self) -> str:
        random, token = self.random, frozenset(("token",))
        if random.random() < 0.4:
            return random.choice(PROPAGATIONS)
        layers, self.layers = self.layers, False
        once = random.random() < 0.7
        moment = random.choice((*MOMENTS, self.truth(SCALAR, 2)))
        chosen = f"top({self.new_expression(token, 1)}"
        sets = ("recent(3)", "recent(near)", "sinks(2)", f"{chosen}, 4)", self.truth(token, 1))
        terms = [f"({random.choice(sets)})" for _ in range(random.choice((1, 1, 2)))]
        budget = random.choice(("", "5", "0.5 * length", self._filled("clamp({scalar}, 0, 7)")))
        if budget:
            terms.append(f"{chosen})")
        self.layers = layers
        return "".join((
            f"propagate:\n  {'first' if once else 'every'}: |\n    {moment}\n",
            f"  budget: {budget}\n" if budget else "", f"  tokens: |\n    {' then '.join(terms)}\n",
            "  restart: flag\n" if once and random.random() < 0.3 else "",
        ))  # fmt: skip

    def _merge(self) -> str:
        random = self.random
        if random.random() < 0.4:
            return random.choice(MERGES)
        lets, layers, divisor = self.lets, self.layers, self._filled(random.choice(DIVISORS))
        of_dropped = {"token": "dropped"}
        self.lets = {
            name: frozenset(of_dropped.get(axis, axis) for axis in axes)
            for name, axes in lets.items()
        }
        self.scene, self.layers, entry = DROPPED, False, DROPPED.per_entry
        state = self.number(random.choice((SCALAR, frozenset(("kv",)))), 1)
        rules = {
            "state": f"\n    bar: {{start: '{state}', next: '0.5 * bar + 0.5 * ({state})'}}",
            "accept": f"|\n    {self.truth(entry, 2)}",
            "weight": f"|\n    abs({self.number(entry, 2)})",
            "own": f"|\n    {self.number(self._some(frozenset(('kv',))), 1)}",
            "divide": f"|\n    {divisor}", "apply": random.choice(("[key]", "[value]")),
        }  # fmt: skip
        self.lets, self.scene, self.layers = lets, PROMPT, layers
        text = f"merge:\n  into: {random.choice(RECEIVERS)}\n"
        some = [name for name in rules if random.random() < 0.5]
        return text + "".join(f"  {name}: {rules[name]}\n" for name in some)

    def _share(self) -> str:
        random = self.random
        self.scene, self.layers = PAIR, False
        let = ""
        if random.random() < 0.5:
            let = f"  let:\n    one: |\n      {self.number(ENTRY, 2)}\n"
            self.lets["one"] = ENTRY
        some = {
            "direction": f"|\n    {self._filled(random.choice(DIRECTIONS))}",
            "except": f"|\n    {self.truth(ENTRY, 2)}",
            "apply": random.choice(("[key]", "[value]", "[key, value]")),
        }
        names = ["direction", *(x for x in ("except", "apply") if random.random() < 0.5)]
        lines = "".join(f"  {name}: {some[name]}\n" for name in names)
        return f"share:\n  when: {random.choice(PAIRS)}\n{let}{lines}"

    def _selection(self) -> str:
        random = self.random
        tops = TOPS if self.layers else [x for x in TOPS if "layer" not in x]
        sets = SETS if self.layers else [x for x in SETS if "[layer" not in x]
        terms = [random.choice(sets) for _ in range(random.choice((0, 1, 1, 2)))]
        terms.append(random.choice((*tops, *tops, random.choice(sets))))
        text = " then ".join(map(self._filled, terms))
        if random.random() < 0.15:
            text += f" where {self.truth(SCALAR, 1)} else {self._filled(random.choice(sets))}"
        return text

    def _decode(self) -> str:
        random = self.random
        if random.random() < 0.5:
            return "decode: same\n"
        self.layers, parts = False, []
        if random.random() < 0.4:
            parts.append(f"  score: |\n    {self.new_expression(ENTRY, 2)}\n")
        if random.random() < 0.3:
            parts.append(f"  budget: {random.choice(LATER_BUDGETS)}\n")
        if random.random() < 0.4:
            parts.append(f"  keep: |\n    {self._selection()}\n")
        if random.random() < 0.3 or not parts:
            parts.append(f"  when: {random.choice(NUMBERED)}\n")
        return f"decode:\n{''.join(parts)}"

    # Expressions.

    def new_expression(self, axes: Axes, depth: int) -> str:
        """A numeric expression with a newly drawn observation window."""
        self.window = self.random.choice(WINDOWS)
        return self.number(axes, depth)

    def number(self, axes: Axes, depth: int) -> str:
        """A numeric expression with these axes, nested at most `depth` deep."""
        if depth <= 0:
            return self._leaf(axes)
        makers = [self._unary, self._binary, self._masked, self._chosen, self._reduced, self._leaf]
        if "token" in axes:
            makers += [self._along(ALONG_TOKENS)] * 2
        if "kv" in axes:
            makers.append(self._along(ALONG_HEADS))
        if self.layers and "query" not in axes:
            makers.append(self._along(ACROSS_LAYERS))
        maker = self.random.choice(makers)
        return maker(axes) if maker == self._leaf else maker(axes, depth - 1)

    def _along(self, forms: tuple[str, ...]):
        def made(axes: Axes, depth: int) -> str:
            return self.random.choice(forms).format(x=f"({self.number(axes, depth)})")

        return made

    def _unary(self, axes: Axes, depth: int) -> str:
        return self.random.choice(UNARY).format(x=f"({self.number(axes, depth)})")

    def _binary(self, axes: Axes, depth: int) -> str:
        both = [self.number(axes, depth), self.number(self._some(axes), depth)]
        self.random.shuffle(both)
        return self.random.choice(BINARY).format(x=f"({both[0]})", y=f"({both[1]})")

    def _masked(self, axes: Axes, depth: int) -> str:
        return f"({self.number(axes, depth)} where {self.truth(self._some(axes), depth)})"

    def _chosen(self, axes: Axes, depth: int) -> str:
        x, y = self.number(axes, depth), self.number(self._some(axes), depth)
        if self.random.random() < 0.5:
            x, y = y, x
        return f"({x} where {self.truth(self._some(axes), depth)} else {y})"

    def _reduced(self, axes: Axes, depth: int) -> str:
        more = [x for x in ORDER if x not in axes and self.scene.fits(axes | {x})]
        if not more:
            return self.number(axes, depth)
        over = {self.random.choice(more)}
        over |= {
            x for x in more if self.random.random() < 0.2 and self.scene.fits(axes | over | {x})
        }
        name, joined = self.random.choice((*REDUCED, "count")), ", ".join(sorted(over))
        if name == "count" and self.random.random() < 0.5:
            return f"count[{joined}]({self.truth(axes | over, depth)})"
        if over <= {"kv", "token"} and self.random.random() < 0.1:
            return f"entropy[{joined}](abs({self.number(axes | over, depth)}))"
        return f"{name}[{joined}]({self.number(axes | over, depth)})"

    def _some(self, axes: Axes) -> Axes:
        return frozenset(axis for axis in sorted(axes) if self.random.random() < 0.7)

    def truth(self, axes: Axes, depth: int) -> str:
        """A condition with at most these axes."""
        random = self.random
        kind = random.randrange(6)
        if axes <= SCALAR:
            simple = ("flag", "not flag", "layer < 1", "layer == 1", "prompt > 9", "true")
            if kind < 4:
                return random.choice(simple)
        if "token" in axes and kind == 0:
            return random.choice(("not recent(2)", "recent(near)", "sinks(1)", "position % 3 < 2"))
        if "token" in axes and kind == 1 and depth > 0:
            return f"top({self.number(axes, depth - 1)}, {random.choice(COUNTS[:6])})"
        if kind == 2 and depth > 0:
            x, y = (self.truth(self._some(axes), depth - 1) for _ in range(2))
            return f"({x} {random.choice(('and', 'or'))} {y})"
        if kind == 3 and depth > 0:
            return f"not ({self.truth(axes, depth - 1)})"
        x, y = self.number(axes, depth - 1), self.number(self._some(axes), 0)
        return f"({x} {random.choice(COMPARISONS)} {y})"

    # Leaves.

    def _leaf(self, axes: Axes) -> str:
        named = [name for name, own in self.lets.items() if own == axes]
        if named and self.random.random() < 0.3:
            return self.random.choice(named)
        if axes == SCALAR:
            return self.random.choice(LITERALS)
        scene, own = self.scene, self.scene.per_entry
        if "dim" in axes:
            return self._of(self.random.choice(scene.vectors), own | {"dim"}, axes)
        if "query" in axes or "group" in axes:
            if axes <= {"query", "token"} and self.random.random() < 0.5:
                return self._of(f"distance({self.window})", frozenset(("query", "token")), axes)
            asked = self.random.choice(scene.maps).format(window=self.window)
            return self._of(asked, own | {"group", "query"}, axes)
        if axes == {"token"} and self.random.random() < 0.5:
            return self.random.choice(("position", "index[token](position)", "(0 - position)"))
        entries = self.random.choice(scene.entries).format(window=self.window)
        return entries if axes == own else self._of(f"({entries})", own, axes)

    def _of(self, text: str, own: Axes, axes: Axes) -> str:
        """`text` with axes `own`, reduced to those in `axes`."""
        gone = [axis for axis in ORDER if axis in own - axes]
        if not gone:
            return text
        return f"{self.random.choice(REDUCED)}[{', '.join(gone)}]({text})"
