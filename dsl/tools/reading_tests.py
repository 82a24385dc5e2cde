"""Reads `NAME.test.yaml`: small inputs of a policy and what must be kept of them.

    policy: snapkv
    tests:
      - name: the window alone
        set: {capacity: 3, window: 3}
        model: {layers: 1, heads: 4, kv_heads: 2, head_size: 4}
        tokens: 12
        q: {seed: 1}
        k: {seed: 101}
        kept: "9-11"

`q`, `k` and `v` are numbers written out, or made from a seed by `generated`; left out, they are 0.
Numbers of fewer dimensions than [layers, heads, tokens, head size] are repeated along the first
ones. `kept` has the positions that stay: a list of layers, each a list with a text per KV head; one
text instead of a list stands for all. `budgets` has the same form. `refused` instead of `kept` is
part of the message with which the settings are refused.

    steps: 3
    q_step: {seed: 5}
    k_step: {seed: 105}
    after: {1: "0-3 9-12", 3: {kept: "0-3 11-14", thresholds: [0.5]}}
    selected_layer: 1
    propagated: "0-3 9-11"

`steps` decode steps follow; `q_step`, `k_step`, `v_step` are [steps, layers, heads, head size], a
seed growing by 1 from step to step. `after` says what is cached after some steps, whose tokens
follow the prompt's: in the form of `kept`, or as a mapping with `kept`, `merged`, `thresholds` and
`reported`. `selected_layer` is a layer or `none`; `propagated` the positions that go deeper, for
`propagate.every` by layer. `merged`, `thresholds` and, by name, `reported` are values of the output
of `kvpolicy run`, compared to 1e-5; one value stands for all layers. `fold_interval` is its option
of that name, `inv_freq` the array of its input, `data` what it reads with `--data`, by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvpolicy.dsl.bind.parameters import NUMBER
from kvpolicy.dsl.data.result import LayerValue
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax import yaml_nodes
from kvpolicy.dsl.syntax.diagnostics import Diagnostic, PolicyError, did_you_mean, listed
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.syntax.yaml_nodes import YamlNode

MAX_VALUES = 1 << 22  # numbers in one tensor
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
# What a test may expect of a decode step, and of the prefill.
_AFTER_KEYS = ("kept", "merged", "thresholds", "reported")
_EXPECTED_KEYS = (*_AFTER_KEYS, "budgets", "selected_layer", "propagated", "after")
_STEP_TENSORS = ("q_step", "k_step", "v_step")
_STEPS = "give `steps: N`; the first step is 1"
_CASE_KEYS = (
    *("name", "about", "set", "data", "model", "tokens", "q", "k", "v"),
    *("steps", *_STEP_TENSORS, "inv_freq", "fold_interval", "refused"),
    *_EXPECTED_KEYS,
)
_MODEL_KEYS = ("layers", "heads", "kv_heads", "head_size")
_SEED_KEYS = ("seed", "stride", "scale", "step")

Numbers = float | list["Numbers"]
_T = TypeVar("_T")
_D = TypeVar("_D")
Reads = Callable[[YamlNode], _T]


@dataclass(frozen=True)
class Seed:
    """A generated tensor: layer l is `generated(seed + stride * l)` times `scale + step * l`."""

    seed: int
    stride: int = 1
    scale: float = 1.0
    step: float = 0.0


@dataclass(frozen=True)
class PolicyTest:
    """One test.

    Attributes:
        line: its line in the file, from 1.
        settings: `name=value` strings.
        data: tensors of the model by name.
        tokens: N tokens of the prompt.
        steps: T decode steps.
        tensors: `q`, `k`, `v`, `q_step`, `k_step`, `v_step`: numbers, a seed, or None for zeros.
        inv_freq: [D / 2] numbers, or None.
        fold_interval: decode steps from fold to fold, at least 1.
        expected: values expected of the prefill, by key of the output of `kvpolicy run`: `kept`
            [L][G] positions, `budgets` [L][G], `thresholds` [L], `merged` [L] with `key` and
            `value`, and so on; under `reported` by name.
        after: the same, by decode step from 1.
        refused: expected part of the message, or None.
    """

    name: str
    line: int
    settings: tuple[str, ...]
    data: Mapping[str, Numbers]
    shape: ModelShape
    tokens: int
    steps: int
    tensors: Mapping[str, Numbers | Seed | None]
    inv_freq: list[float] | None
    fold_interval: int
    expected: Mapping[str, object]
    after: Mapping[int, Mapping[str, object]]
    refused: str | None


def read_cases(source: Source) -> tuple[str, list[PolicyTest]]:
    """The policy's name and the tests of a file.

    Raises:
        PolicyError: with the first defect of each test, or those of the file's form.
    """
    return _TestReader(source).file()


class _TestReader:
    """Turns YAML nodes into cases; the first defect of each case is reported."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.diagnostics: list[Diagnostic] = []

    def file(self) -> tuple[str, list[PolicyTest]]:
        root = yaml_nodes.read_yaml(self.source, self.diagnostics.append)
        policy = ""
        cases: list[PolicyTest] = []
        if root is not None and not self.diagnostics:
            try:
                keys = self.mapping(root, ("policy", "tests"), required=("policy", "tests"))
                policy = self.text(keys["policy"])
                for node in self.sequence(self.filled(keys["tests"], "tests"), "tests").items:
                    for case in self.case(node):
                        if case.name in [other.name for other in cases]:
                            raise self.defect(f"two tests are called `{case.name}`", node)
                        cases.append(case)
            except PolicyError as error:
                self.diagnostics += error.diagnostics
        if self.diagnostics:
            raise PolicyError(self.diagnostics, self.source)
        return policy, cases

    def case(self, node: YamlNode) -> list[PolicyTest]:
        try:
            return [self._case(node)]
        except PolicyError as error:
            self.diagnostics += error.diagnostics
            return []

    def _case(self, node: YamlNode) -> PolicyTest:
        keys = self.mapping(node, _CASE_KEYS, required=("name", "model"))
        sizes = self.mapping(keys["model"], _MODEL_KEYS, required=_MODEL_KEYS)
        model = {name: self.whole(value) for name, value in sizes.items()}
        shape = ModelShape(*(model[name] for name in _MODEL_KEYS))
        tokens = self.given(keys, "tokens", self.whole, 0)
        steps = self.given(keys, "steps", self.whole, 0)
        fold_interval = self.given(keys, "fold_interval", self.whole, 1)
        if shape.layers * shape.heads * (tokens + steps) * shape.head_dim > MAX_VALUES:
            raise self.defect(f"the tensors have more than {MAX_VALUES:,} numbers", keys["model"])
        settings, data = (self.mapping(keys[x]) if x in keys else {} for x in ("set", "data"))
        if bool(keys.keys() & set(_EXPECTED_KEYS)) == ("refused" in keys):
            message = (
                "a test says either what is expected (`kept`, `budgets`, `after` and so on) or how "
                "it is `refused`"
            )
            raise self.defect(message, node)
        for name in _STEP_TENSORS:
            if name in keys and not steps:
                raise self.defect(f"`{name}` is read at steps; the test has 0", keys[name], _STEPS)
        inv_freq = self.given(keys, "inv_freq", self.inv_freq, None)
        return PolicyTest(
            name=self.text(keys["name"]),
            line=self.source.place(node.span.start)[0],
            settings=tuple(f"{name}={self.text(value)}" for name, value in settings.items()),
            data={name: self.numbers(value) for name, value in data.items()},
            shape=shape,
            tokens=tokens,
            steps=steps,
            tensors={n: self.tensor(keys.get(n)) for n in ("q", "k", "v", *_STEP_TENSORS)},
            inv_freq=inv_freq,
            fold_interval=fold_interval,
            expected=self.expected(keys, shape),
            after=self.after(keys["after"], shape, steps) if "after" in keys else {},
            refused=self.given(keys, "refused", self.refusal, None),
        )

    def given(
        self, keys: Mapping[str, YamlNode], name: str, read: Reads[_T], default: _D
    ) -> _T | _D:
        """The value under a key; the default if the key is missing."""
        return read(keys[name]) if name in keys else default

    def inv_freq(self, node: YamlNode) -> list[float]:
        return [self.number(item) for item in self.sequence(node, "inv_freq").items]

    def refusal(self, node: YamlNode) -> str:
        return self.text(self.filled(node, "refused"))

    def reported(self, node: YamlNode, read: Reads[_T]) -> dict[str, _T]:
        values = self.mapping(self.filled(node, "reported"))
        return {name: read(value) for name, value in values.items()}

    def expected(self, keys: dict[str, YamlNode], shape: ModelShape) -> dict[str, object]:
        """What is expected of the prefill or of a step, by key."""
        per_layer = partial(self.layers, shape=shape, read=self.value)
        reads: dict[str, Reads[object]] = {
            "kept": partial(self.heads, shape=shape, read=self.positions),
            "budgets": partial(self.heads, shape=shape, read=self.whole),
            "thresholds": per_layer,
            "reported": partial(self.reported, read=per_layer),
            "merged": partial(self.layers, shape=shape, read=self.difference),
            "selected_layer": lambda node: None if self.is_none(node) else self.whole(node),
            "propagated": self.propagated,
        }
        return {name: read(keys[name]) for name, read in reads.items() if name in keys}

    def after(self, node: YamlNode, shape: ModelShape, steps: int) -> dict[int, dict[str, object]]:
        """What is expected after decode steps, by step."""
        if not isinstance(node, yaml_nodes.Mapping):
            raise self.defect("`after` says by step what is cached", node)
        self.filled(node, "after")
        by_step: dict[int, dict[str, object]] = {}
        for key, value in node.entries:
            step = self.whole(key)
            if not 1 <= step <= steps:
                message = f"`{key.text}` is no step; the test has {steps}"
                raise self.defect(message, key, _STEPS)
            if step in by_step:
                raise self.defect(f"step {step} is given twice", key)
            entry = {"kept": value}
            if isinstance(value, yaml_nodes.Mapping):
                entry = self.mapping(self.filled(value, f"after.{step}"), _AFTER_KEYS)
            by_step[step] = self.expected(entry, shape)
        return by_step

    def propagated(self, node: YamlNode) -> object:
        """Positions; for `propagate.every`, layer -> positions; None for `none`."""
        if isinstance(node, yaml_nodes.Mapping):
            return {self.whole(key): self.positions(value) for key, value in node.entries}
        return None if self.is_none(node) else self.positions(node)

    def layers(self, node: YamlNode, shape: ModelShape, read: Reads[_T]) -> list[_T]:
        """A value per layer; one that is no list stands for all."""
        if not isinstance(node, yaml_nodes.Sequence):
            return [read(node)] * shape.layers
        return self.listed(node, "layers", shape.layers, read)

    def listed(self, node: yaml_nodes.Sequence, what: str, count: int, read: Reads[_T]) -> list[_T]:
        """The values of a list that must have `count` items, layers or KV heads."""
        if len(node.items) != count:
            message = f"{len(node.items)} {what} are listed, the model has {count}"
            raise self.defect(message, node)
        return [read(item) for item in node.items]

    def value(self, node: YamlNode) -> LayerValue | str:
        """A number, `inf`, `none`, or a list of values, one level of lists for each axis."""
        if isinstance(node, yaml_nodes.Sequence):
            return [self.value(item) for item in node.items]
        if self.text(node) in ("inf", "-inf"):
            return self.text(node)
        return None if self.is_none(node) else self.number(node)

    def difference(self, node: YamlNode) -> dict[str, float]:
        """`{key: 0.25, value: 1.5}`; what is left out is 0."""
        keys = self.mapping(node, ("key", "value"))
        return {name: self.given(keys, name, self.number, 0.0) for name in ("key", "value")}

    def tensor(self, node: YamlNode | None) -> Numbers | Seed | None:
        if not isinstance(node, yaml_nodes.Mapping):
            return None if node is None else self.numbers(node)
        keys = self.mapping(node, _SEED_KEYS, required=("seed",))
        scale = self.given(keys, "scale", self.number, 1.0)
        step = self.given(keys, "step", self.number, 0.0)
        stride = self.given(keys, "stride", self.whole, 1)
        return Seed(self.whole(keys["seed"]), stride, scale, step)

    def numbers(self, node: YamlNode) -> Numbers:
        if isinstance(node, yaml_nodes.Sequence):
            return [self.numbers(item) for item in node.items]
        return self.number(node)

    def heads(self, node: YamlNode, shape: ModelShape, read: Reads[_T]) -> list[list[_T]]:
        """A value per layer and KV head; one value stands for all."""

        def layer(node: YamlNode) -> list[_T]:
            if isinstance(node, yaml_nodes.Scalar):
                return [read(node)] * shape.kv_heads
            items = self.sequence(node, "a list with an entry per KV head")
            return self.listed(items, "KV heads", shape.kv_heads, read)

        if isinstance(node, yaml_nodes.Scalar):
            return [layer(node)] * shape.layers
        layers = self.sequence(node, "a list with an entry per layer")
        return self.listed(layers, "layers", shape.layers, layer)

    def positions(self, node: YamlNode) -> list[int]:
        """Positions such as `0 3-5 11`."""
        positions: list[int] = []
        for word in self.text(node).split():
            match = _RANGE.fullmatch(word)
            if not match:
                raise self.defect(f"`{word}` is no position; write for example `0 3-5 11`", node)
            first = int(match[1])
            last = int(match[2] or first)
            if last - first > MAX_VALUES or (positions and first <= positions[-1]) or last < first:
                raise self.defect("positions are written in ascending order", node)
            positions.extend(range(first, last + 1))
        return positions

    # YAML values.

    def filled(self, node: YamlNode, key: str) -> YamlNode:
        """The value of a key that may not be empty: nothing would be compared."""
        if isinstance(node, yaml_nodes.Mapping):
            empty = not node.entries
        elif isinstance(node, yaml_nodes.Sequence):
            empty = not node.items
        else:
            empty = not self.text(node)
        if empty:
            raise self.defect(f"`{key}` is empty, so that nothing is compared", node)
        return node

    def mapping(
        self, node: YamlNode, known: Sequence[str] = (), required: Sequence[str] = ()
    ) -> dict[str, YamlNode]:
        if not isinstance(node, yaml_nodes.Mapping):
            raise self.defect("a mapping of keys to values is needed here", node)
        for key, _ in node.entries:
            if known and key.text not in known:
                help_ = did_you_mean(key.text, known) or f"the keys are {listed(known, 'and')}"
                raise self.defect(f"unknown key `{key.text}`", key, help_)
        keys = {key.text: value for key, value in node.entries}
        for name in required:
            if name not in keys:
                raise self.defect(f"the key `{name}` is missing", node)
        return keys

    def sequence(self, node: YamlNode, what: str) -> yaml_nodes.Sequence:
        if not isinstance(node, yaml_nodes.Sequence):
            raise self.defect(f"{what} is needed" if " " in what else f"`{what}` is a list", node)
        return node

    def is_none(self, node: YamlNode) -> bool:
        return self.text(node) == "none"

    def text(self, node: YamlNode) -> str:
        if not isinstance(node, yaml_nodes.Scalar):
            raise self.defect("a text is needed here", node)
        return node.text

    def number(self, node: YamlNode) -> float:
        text = self.text(node)
        if not NUMBER.fullmatch(text):
            raise self.defect(f"`{text}` is no number", node)
        return float(text)

    def whole(self, node: YamlNode) -> int:
        text = self.text(node)
        if not text.isascii() or not text.isdigit() or len(text) > 9:
            raise self.defect(f"`{text}` is no whole number", node)
        return int(text)

    def defect(self, message: str, node: YamlNode, help: str | None = None) -> PolicyError:
        return PolicyError([Diagnostic("test", message, node.span, help)], self.source)
