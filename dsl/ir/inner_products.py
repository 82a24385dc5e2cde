"""Rewrites expressions over two vectors per entry, so that few passes over the vectors give them.

The two vectors are those of two layers in `share`, of a dropped entry and its receiver in `merge`.
A vector that adds them, multiplies and divides them by numbers per entry is

    blend(a, b)            a * first + b * second

and what multiplies such vectors with each other only below `sum[dim]` follows from three numbers
per entry, which a kernel finds together:

    inner_product(x, y)    the inner product of two of the vectors
    inner_cosine(x, y)     in `merge`, the cosine of both, as `cosine` writes it out

`angle`, `slerp`, `cosine`, `unit` and `norm2` are of this kind; torch computes all others.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial, reduce
from itertools import product

from kvpolicy.dsl.ir.graph import union
from kvpolicy.dsl.ir.nodes import Merge, Node, Share, Type, When
from kvpolicy.dsl.ir.once import once
from kvpolicy.dsl.ir.traverse import Sections, rewritten

# The first and the second vector: of `share`, and of `merge` around `key` or `value`.
_LAYERS, _ENTRIES = ("below", "own"), ("dropped", "target")


def _literal(number: int) -> Node:
    kind = Type("number", exact=True)
    return Node("number", value=Fraction(number), type=kind, when=When.LOAD)


_ZERO, _ONE = _literal(0), _literal(1)


def with_inner_products(sections: Sections) -> Sections:
    """Lowered sections whose merges and `share` read inner products where they can."""
    prefill, decode, share = sections.prefill, sections.decode, sections.share
    if prefill.merge is not None:
        prefill = replace(prefill, merge=_merge(prefill.merge))
    if decode is not None and decode.merge is not None:
        decode = replace(decode, merge=_merge(decode.merge))
    share = None if share is None else _share(share)
    return replace(sections, prefill=prefill, decode=decode, share=share)


def side(node: Node) -> int | None:
    """0 for a first vector, 1 for a second one, None for any other node."""
    if node.op in _ENTRIES and node.args[0].op in ("key", "value"):
        return _ENTRIES.index(node.op)
    return _LAYERS.index(node.symbol) if node.op == "special" and node.value in _LAYERS else None


def place(node: Node) -> int:
    """Where a kernel puts an inner product: of the first vector with itself, of both, of the second
    with itself, and then the cosine.
    """
    return 3 if node.op == "inner_cosine" else [side(vector) for vector in node.args].count(1)


def _merge(merge: Merge) -> Merge:
    into = merge.into
    if into.op == "next" and (into.args[0].op != "number" or into.args[0].literal != 1):
        return merge  # the vector of several receivers is their mean
    return rewritten(merge, _InnerProducts().visit)


def _share(share: Share) -> Share:
    rewriting = _InnerProducts()
    share = rewritten(share, rewriting.visit)
    weights = rewriting.weights(share.direction)
    if weights is None:
        return share
    by_side = {side(vector): weight for vector, weight in weights.items()}
    args = by_side.get(0, _ZERO), by_side.get(1, _ZERO)
    return replace(share, direction=replace(share.direction, op="blend", args=args, value=None))


class _InnerProducts:
    @once
    def visit(self, node: Node) -> Node:
        """The node rewritten."""
        result = _cosine(node) or self._inner_product(node)
        if result is not None:
            return result
        args = tuple(self.visit(arg) for arg in node.args)
        return node if args == node.args else replace(node, args=args)

    @once
    def weights(self, node: Node) -> dict[Node, Node] | None:
        """The vectors whose sum a vector is, each with its number; None: it is no such sum."""
        if side(node) is not None:
            return {node: _ONE}
        if node.type.absent or not _is_linear(node):
            return None
        parts: list[dict[Node, Node]] = []
        for arg in node.args:
            part = self.weights(arg) if "dim" in arg.type.axes else {}
            if part is None:
                return None
            parts.append(part)
        vectors = dict.fromkeys(vector for part in parts for vector in part)
        return {
            vector: _of_numbers(
                node,
                *(
                    part.get(vector, _ZERO) if part else self.visit(arg)
                    for part, arg in zip(parts, node.args, strict=True)
                ),
            )
            for vector in vectors
        }

    def _inner_product(self, node: Node) -> Node | None:
        """The inner product of two sums of vectors, written out; None: it is none."""
        factors = _factors(node)
        if factors is None:
            return None
        x, y = map(self.weights, factors)
        if x is None or y is None or len({_tensor(vector) for vector in (*x, *y)}) != 1:
            return None
        multiply, add = (partial(_of_numbers, node, op=op) for op in ("multiply", "add"))
        terms = []
        for (first, a), (second, b) in product(x.items(), y.items()):
            inner = _inner("inner_product", node, (first, second))
            terms.append(reduce(multiply, [w for w in (a, b) if w is not _ONE] + [inner]))
        return reduce(add, terms)


def _is_linear(node: Node) -> bool:
    """Whether a vector is linear in those of its arguments that are vectors."""
    vectors = ["dim" in arg.type.axes for arg in node.args]
    row = node.operation
    if row.scales:
        return vectors == [True, False] or (row.commutative and vectors == [False, True])
    if node.op == "choose":
        return vectors == [True, False, True]
    return row.sums and all(vectors)


def _of_numbers(node: Node, *args: Node, op: str | None = None) -> Node:
    """An operation of a node, of numbers per entry instead of vectors."""
    kind = Type(node.type.kind, union(args))
    return Node(op or node.op, args, type=kind, when=node.when, span=node.span)


def _factors(node: Node) -> tuple[Node, ...] | None:
    """The two vectors whose inner product a node is; None: it is none."""
    if node.op != "sum" or node.axes != ("dim",):
        return None
    base = _squared(node.args[0])
    if base is not None:
        return base, base
    return node.args[0].args if node.args[0].op == "multiply" else None


def _squared(node: Node) -> Node | None:
    """The x of `x ^ 2`; None of another node."""
    if node.op != "power" or node.args[1].op != "number" or node.args[1].value != 2:
        return None
    return node.args[0]


def _cosine(node: Node) -> Node | None:
    """What stands for the cosine of an entry and its receiver; None: the node is none."""
    if node.op != "divide" or node.args[1].op != "multiply":
        return None
    vectors = _factors(node.args[0])
    if vectors is None or {x.op for x in vectors} != {*_ENTRIES} or None in map(side, vectors):
        return None
    if len({_tensor(x) for x in vectors}) != 1:
        return None
    lengths = tuple(_factors(x.args[0]) if x.op == "sqrt" else None for x in node.args[1].args)
    if lengths != tuple((x, x) for x in vectors):
        return None
    return _inner("inner_cosine", node, vectors)


def _inner(op: str, node: Node, vectors: tuple[Node, ...]) -> Node:
    axes = tuple(axis for axis in union(vectors) if axis != "dim")
    return Node(op, vectors, type=Type("number", axes), when=node.when, span=node.span)


def _tensor(vector: Node) -> str:
    """What vectors must have in common to be multiplied: the tensor that they are rows of."""
    return vector.args[0].op if vector.args else vector.op
