"""`kvpolicy diff A B`: what changes between two policies for a model and a length."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.bind.bounds import Bounds, max_entries
from kvpolicy.dsl.bind.lengths import lengths
from kvpolicy.dsl.bind.model_config import ModelConfig, read_config
from kvpolicy.dsl.bind.named import FOLD_INTERVAL
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.data.given import with_data
from kvpolicy.dsl.ir.nodes import ModelShape, Program
from kvpolicy.dsl.ir.ranges import shown
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.dsl.tools.commands import execute, overrides_of_each
from kvpolicy.dsl.tools.explain_sections import decode_words, layers_text, runs
from kvpolicy.dsl.tools.trial_cases import sampled
from kvpolicy.dsl.tools.units import size_text

# Largest layers, tokens and head size of the sample, so that it takes seconds.
_LAYERS, _TOKENS, _SIZE = 4, 4096, 32
_SEED = 0


def main(args: argparse.Namespace) -> int:
    """Runs the command: 0 if both mean the same, else 1; raises PolicyError for unusable input."""
    programs = with_data([load(x).executable() for x in (args.first, args.second)], args.data)
    config = read_config(args.model)
    values = overrides_of_each(programs, args.set)
    first, second = (
        bind(program, config.shape, given, fold_interval=FOLD_INTERVAL)
        for program, given in zip(programs, values, strict=True)
    )
    if first.digest == second.digest:
        print(f"{args.first} and {args.second} mean the same")
        return 0
    print("\n".join(_difference(first, second, values, config, args.length)))
    return 1


def _difference(
    first: Bound,
    second: Bound,
    values: Sequence[Mapping[str, str]],
    config: ModelConfig,
    length: int,
) -> Iterator[str]:
    """Lines on what changes from the first policy to the second; `values` of both's parameters."""
    yield f"{first.program.name} -> {second.program.name}, {config.name}, {length:,} tokens"
    yield from _section("Parameters", _parameters(first, second))
    yield from _section("Entries kept per KV head, at most", _entries(first, second, length))
    reached = [lengths(bound, length)[-1][1] for bound in (first, second)]
    change = _change(reached, "at most {} -> {}", "{:,}".format)
    yield from _section("Tokens that reach the last layer", change)
    words = [decode_words(bound) for bound in (first, second)]
    yield from _section("While decoding", _change(words))
    sizes = [config.kv_size(max_entries(bound, length)) for bound in (first, second)]
    yield from _section("KV cache, at most", _change(sizes, as_text=size_text))
    programs = (first.program, second.program)
    yield from _section("Overlap on a sample", _overlap(programs, values, config.shape, length))


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    yield from ("", title)
    empty = True
    for line in lines:
        empty = False
        yield f"  {line}"
    if empty:
        yield "  no difference"


def _parameters(first: Bound, second: Bound) -> Iterator[str]:
    names = list(dict.fromkeys([*first.params, *second.params]))
    width = max((len(name) for name in names), default=0)
    for name in names:
        a, b = (
            shown(bound.params[name]) if name in bound.params else "-" for bound in (first, second)
        )
        if a != b:
            yield f"{name:<{width}}  {a} -> {b}"


def _entries(first: Bound, second: Bound, length: int) -> Iterator[str]:
    sizes = [Bounds(bound, length).kept for bound in (first, second)]
    kv_heads = first.shape.kv_heads
    pairs = list(zip(*([n / kv_heads for n in size.layer] for size in sizes), strict=True))
    for layers in runs(pairs):
        a, b = pairs[layers[0]]
        if a != b:
            yield f"{layers_text(*layers):<14} {a:>11,.1f} -> {b:,.1f}"
    means = [size.total / (first.shape.layers * kv_heads) for size in sizes]
    if means[0] != means[1]:
        yield f"{'mean':<14} {means[0]:>11,.1f} -> {means[1]:,.1f}"


def _change(
    values: Sequence[object], text: str = "{} -> {}", as_text: Callable[[Any], str] = str
) -> Iterator[str]:
    if values[0] != values[1]:
        yield text.format(*map(as_text, values))


def _overlap(
    programs: Sequence[Program],
    values: Sequence[Mapping[str, str]],
    shape: ModelShape,
    length: int,
) -> Iterator[str]:
    """What both keep of random tensors; queries are doubled, so that scores differ clearly."""
    small = replace(shape, layers=min(shape.layers, _LAYERS), head_dim=min(shape.head_dim, _SIZE))
    tokens = min(length, _TOKENS)

    def bound_to(shape: ModelShape) -> list[Bound]:
        policies = zip(programs, values, strict=True)
        return [bind(sampled(program, shape), shape, given) for program, given in policies]

    try:
        bounds = bound_to(small)
    except PolicyError:  # one requires more layers: all of them, with fewer tokens
        small = replace(small, layers=shape.layers)
        tokens = min(length, max(1, _TOKENS * _LAYERS // shape.layers))
        bounds = bound_to(small)
    # With propagation, the queries that deeper layers read are not known before: all are made.
    propagate = any(bound.propagates for bound in bounds)
    queries = tokens if propagate else max(bound.queries(tokens) for bound in bounds)
    rng = np.random.default_rng(_SEED)
    q = 2 * rng.standard_normal((small.layers, small.heads, queries, small.head_dim), np.float32)
    size = (small.layers, small.kv_heads, tokens, small.head_dim)
    k, v = rng.standard_normal(size, np.float32), rng.standard_normal(size, np.float32)
    a, b = (np.stack(execute(bound, "torch", q, k, v).kept) for bound in bounds)
    both = int((a & b).sum())
    yield (
        f"random tensors (seed {_SEED}): {small.layers} layers, {small.heads} heads, "
        f"{small.kv_heads} KV heads, {tokens:,} tokens"
    )
    yield f"kept: {int(a.sum()):,} -> {int(b.sum()):,}; by both {both:,}"
    yield (
        f"the second keeps {both / max(1, a.sum()):.1%} of what the first keeps, "
        f"the first {both / max(1, b.sum()):.1%} of what the second keeps"
    )
