"""`kvpolicy show`: a policy's values for a model, or the kernels that a server compiles for it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.bind.model_config import read_config
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.codegen.source import generate
from kvpolicy.dsl.data.given import with_data
from kvpolicy.dsl.execute.planned.compiled import Compiled
from kvpolicy.dsl.ir.text import print_program
from kvpolicy.dsl.tools.commands import overrides
from kvpolicy.dsl.tools.explain_kernels import reasons


def main(args: argparse.Namespace) -> int:
    """Runs the command; raises PolicyError where the input cannot be used."""
    shape = read_config(args.model).shape
    [program] = with_data([load(args.file).executable()], args.data)
    bound = bind(program, shape, overrides(args.set))
    if args.triton:
        print("\n\n".join(sources(bound)), end="")
    else:
        print(print_program(bound.folded), end="")
    return 0


def sources(bound: Bound) -> Iterator[str]:
    """The texts of the generated files, the prefill's first; if none, a comment that says why."""
    fusions = Compiled(bound).fusions
    for fusion in fusions:
        for bundle in fusion.bundles:
            yield generate(bundle, bound, steps=fusion.steps).text
    if not any(fusion.bundles for fusion in fusions):
        lines = [f"# {line}" for line in dict.fromkeys(reasons(fusions))]
        first = "# This policy reduces no attention and no vectors in a kernel."
        yield "\n".join([first, *lines]) + "\n"
