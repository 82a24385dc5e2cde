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
ones. `kept` has the positions that stay, for each layer a list with a text per KV head; one text
stands for all. `budgets` are tested the same way if given. `refused` instead of `kept` is a part
of the message with which the settings are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpolicy.dsl import yaml_nodes
from kvpolicy.dsl.diagnostics import Diagnostic, PolicyError, did_you_mean, listed
from kvpolicy.dsl.ir import ModelShape
from kvpolicy.dsl.source import Source

MAX_VALUES = 1 << 22  # numbers in one tensor
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?(e[+-]?[0-9]{1,2})?")
_CASE_KEYS = (
    *("name", "about", "set", "model", "tokens", "q", "k", "v"),
    *("kept", "budgets", "refused"),
)
_MODEL_KEYS = ("layers", "heads", "kv_heads", "head_size")
_SEED_KEYS = ("seed", "stride", "scale", "step")

Numbers = float | list["Numbers"]


@dataclass(frozen=True)
class Seed:
    """A generated tensor: layer l is `generated(seed + stride * l)` times `scale + step * l`."""

    seed: int
    stride: int = 1
    scale: float = 1.0
    step: float = 0.0


@dataclass(frozen=True)
class Case:
    """One test.

    Attributes:
        line: where it stands in the file.
        settings: `name=value` strings.
        tensors: `q`, `k`, `v`: numbers, a seed, or None for zeros.
        kept: [L][G] sorted positions, or None.
        budgets: [L][G], or None.
        refused: part of the message expected, or None.
    """

    name: str
    line: int
    settings: tuple[str, ...]
    shape: ModelShape
    tokens: int
    tensors: Mapping[str, Numbers | Seed | None]
    kept: list[list[list[int]]] | None
    budgets: list[list[int]] | None
    refused: str | None


def read_cases(source: Source) -> tuple[str, list[Case]]:
    """The policy's name and the tests of a file.

    Raises:
        PolicyError: with every defect.
    """
    return _Reader(source).file()


class _Reader:
    """Turns YAML nodes into cases; the first defect of each case is reported."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.diagnostics: list[Diagnostic] = []

    def file(self) -> tuple[str, list[Case]]:
        root = yaml_nodes.read_yaml(self.source, self.diagnostics.append)
        policy, cases = "", []
        if root is not None and not self.diagnostics:
            try:
                keys = self.mapping(root, ("policy", "tests"), required=("policy", "tests"))
                policy = self.text(keys["policy"])
                for node in self.sequence(keys["tests"], "tests"):
                    cases.extend(self.case(node))
            except _Defect as defect:
                self.diagnostics.append(defect.diagnostic)
        if self.diagnostics:
            raise PolicyError(self.diagnostics, self.source)
        return policy, cases

    def case(self, node: yaml_nodes.Node) -> list[Case]:
        try:
            return [self._case(node)]
        except _Defect as defect:
            self.diagnostics.append(defect.diagnostic)
            return []

    def _case(self, node: yaml_nodes.Node) -> Case:
        keys = self.mapping(node, _CASE_KEYS, required=("name", "model"))
        sizes = self.mapping(keys["model"], _MODEL_KEYS, required=_MODEL_KEYS)
        model = {name: self.whole(value) for name, value in sizes.items()}
        shape = ModelShape(*(model[name] for name in _MODEL_KEYS))
        tokens = self.whole(keys["tokens"]) if "tokens" in keys else 0
        if shape.layers * shape.heads * tokens * shape.head_dim > MAX_VALUES:
            raise self.defect(f"the tensors have more than {MAX_VALUES:,} numbers", keys["model"])
        settings = self.mapping(keys["set"]) if "set" in keys else {}
        if ("kept" in keys) == ("refused" in keys):
            raise self.defect("a test says either what is `kept` or how it is `refused`", node)
        kept = budgets = None
        if "kept" in keys:
            kept = self.heads(keys["kept"], shape, self.positions)
        if "budgets" in keys:
            budgets = self.heads(keys["budgets"], shape, self.whole)
        return Case(
            name=self.text(keys["name"]),
            line=self.source.place(node.span.start)[0],
            settings=tuple(f"{name}={self.text(value)}" for name, value in settings.items()),
            shape=shape,
            tokens=tokens,
            tensors={name: self.tensor(keys.get(name)) for name in ("q", "k", "v")},
            kept=kept,
            budgets=budgets,
            refused=self.text(keys["refused"]) if "refused" in keys else None,
        )

    def tensor(self, node: yaml_nodes.Node | None) -> Numbers | Seed | None:
        if not isinstance(node, yaml_nodes.Mapping):
            return None if node is None else self.numbers(node)
        keys = self.mapping(node, _SEED_KEYS, required=("seed",))
        scale = self.number(keys["scale"]) if "scale" in keys else 1.0
        step = self.number(keys["step"]) if "step" in keys else 0.0
        stride = self.whole(keys["stride"]) if "stride" in keys else 1
        return Seed(self.whole(keys["seed"]), stride, scale, step)

    def numbers(self, node: yaml_nodes.Node) -> Numbers:
        if isinstance(node, yaml_nodes.Sequence):
            return [self.numbers(item) for item in node.items]
        return self.number(node)

    def heads(self, node: yaml_nodes.Node, shape: ModelShape, read) -> list[list]:
        """A value per layer and KV head; one value stands for all."""
        if isinstance(node, yaml_nodes.Scalar):
            return [[read(node)] * shape.kv_heads for _ in range(shape.layers)]
        layers = self.sequence(node, "a list with an entry per layer")
        if len(layers) != shape.layers:
            raise self.defect(
                f"{len(layers)} layers are listed, the model has {shape.layers}", node
            )
        return [self._layer(layer, shape, read) for layer in layers]

    def _layer(self, node: yaml_nodes.Node, shape: ModelShape, read) -> list:
        if isinstance(node, yaml_nodes.Scalar):
            return [read(node)] * shape.kv_heads
        items = self.sequence(node, "a list with an entry per KV head")
        if len(items) != shape.kv_heads:
            message = f"{len(items)} KV heads are listed, the model has {shape.kv_heads}"
            raise self.defect(message, node)
        return [read(item) for item in items]

    def positions(self, node: yaml_nodes.Node) -> list[int]:
        """Positions such as `0 3-5 11`."""
        found: list[int] = []
        for word in self.text(node).split():
            match = _RANGE.fullmatch(word)
            if not match:
                raise self.defect(f"`{word}` is no position; write for example `0 3-5 11`", node)
            first = int(match[1])
            last = int(match[2] or first)
            if last - first > MAX_VALUES or (found and first <= found[-1]) or last < first:
                raise self.defect("positions are written in ascending order", node)
            found.extend(range(first, last + 1))
        return found

    # YAML values.

    def mapping(
        self, node: yaml_nodes.Node, known: Sequence[str] = (), required: Sequence[str] = ()
    ) -> dict[str, yaml_nodes.Node]:
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

    def sequence(self, node: yaml_nodes.Node, what: str) -> tuple[yaml_nodes.Node, ...]:
        if not isinstance(node, yaml_nodes.Sequence):
            raise self.defect(
                f"`{what}` is a list" if " " not in what else f"{what} is needed", node
            )
        return node.items

    def text(self, node: yaml_nodes.Node) -> str:
        if not isinstance(node, yaml_nodes.Scalar):
            raise self.defect("a text is needed here", node)
        return node.text

    def number(self, node: yaml_nodes.Node) -> float:
        text = self.text(node)
        if not _NUMBER.fullmatch(text):
            raise self.defect(f"`{text}` is no number", node)
        return float(text)

    def whole(self, node: yaml_nodes.Node) -> int:
        text = self.text(node)
        if not text.isascii() or not text.isdigit() or len(text) > 9:
            raise self.defect(f"`{text}` is no whole number", node)
        return int(text)

    def defect(self, message: str, node: yaml_nodes.Node, help_: str | None = None) -> _Defect:
        return _Defect(Diagnostic("test", message, node.span, help_))


class _Defect(Exception):
    """What is wrong with a case; reported by the reader."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        self.diagnostic = diagnostic
