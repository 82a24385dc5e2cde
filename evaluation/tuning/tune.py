"""`kvpolicy tune`: chooses a parameter of `propagate` by its effect on prompts of the user.

Each prompt is computed in full and, for every value, with only the tokens that the policy lets go
deeper. The best value is the one with which the last token's final hidden state is closest to the
full one; of equally close ones, the first.
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.model_config import read_config
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.data.given import with_data
from kvpolicy.dsl.execute.prefill.run import Run
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.ir.host import Value
from kvpolicy.dsl.ir.ranges import shown
from kvpolicy.dsl.syntax.diagnostics import refused, why
from kvpolicy.dsl.tools.commands import overrides
from kvpolicy.evaluation.text_files import check_place
from kvpolicy.evaluation.tuning.candidates import candidates
from kvpolicy.evaluation.tuning.layered_model import LayeredModel
from kvpolicy.evaluation.tuning.prompts import read_prompts
from torch import Tensor

# Most values written below a plot.
_LABELS = 20


@dataclass(frozen=True)
class Candidate:
    """One value of the parameter, tried on every prompt.

    Attributes:
        value: the parameter's value.
        distance: mean squared difference to the full final hidden state, mean over prompts.
        relative: the same, as a share of the full state's mean square.
        computed: token rows computed, as a share of those of a full prefill.
    """

    value: Value
    distance: float
    relative: float
    computed: float


@dataclass(frozen=True)
class Limits:
    """What may be chosen: values up to `most`, and no more token rows than the share `rows`."""

    most: Fraction | None
    rows: float | None

    def allow(self, each: Candidate) -> bool:
        """Whether a candidate may be chosen."""
        small = self.most is None or each.value <= self.most
        return small and (self.rows is None or each.computed <= self.rows)


def main(args: argparse.Namespace) -> int:
    """Runs the command; raises PolicyError where the input cannot be used."""
    if args.out is not None:
        check_place(Path(args.out))
    [program], name = with_data([load(args.file).executable()], args.data), args.parameter
    settings = overrides(args.set)
    if name in settings:
        raise refused("--set", "arguments", f"`{name}` is what `tune` chooses; leave it out")
    shape = read_config(args.model).shape
    bounds = candidates(program, name, shape, settings, args.values)
    most = args.most
    if most is None and program.params[name].unit == "layers":
        most = Fraction(shape.layers // 2)
    limits = Limits(most, args.rows)
    prompts = read_prompts(args.prompts)
    with torch.no_grad():
        results = measure(bounds, name, LayeredModel(args.model, args.device), prompts)
    best = chosen(results, limits)
    _print(results, best, limits, name, len(prompts))
    if best is None:
        message = "no value is small enough, or none computes few enough rows"
        raise refused("tune", "range", message, "raise `--most` or `--rows`")
    print(f"\nin the policy file:    {name}: {shown(best.value)}")
    print(f"for the server:        {_server_options(args, name, best.value)}")
    if args.out is not None:
        plot(results, best, limits, name, args.out)
        print(f"plot:                  {args.out}")
    return 0


def _server_options(args: argparse.Namespace, name: str, value: Value) -> str:
    """The options of a server with the chosen value and all else as it was tried."""
    words = ["--kv-policy-set", *args.set, f"{name}={shown(value)}"]
    if args.data:
        words += ["--kv-policy-data", *args.data]
    return shlex.join(words)


def measure(
    bounds: Sequence[Bound], name: str, model: LayeredModel, prompts: list[Any]
) -> list[Candidate]:
    """Every value on every prompt, with a progress bar.

    Args:
        bounds: the policy bound to each value.
        name: the parameter.
        model: the checkpoint.
        prompts: (place, prompt) pairs from `read_prompts`.

    Raises:
        PolicyError: a prompt that cannot be used.
    """
    from tqdm import tqdm  # comes with transformers

    programs = [TorchProgram(bound) for bound in bounds]
    totals = torch.zeros(3, len(programs), dtype=torch.float64)
    with tqdm(total=len(prompts) * model.layers, desc="prompts x layers", disable=None) as bar:
        for place, prompt in prompts:
            ids = model.tokens(prompt) if isinstance(prompt, str) else prompt
            totals += _one_prompt(programs, model, place, ids, bar)
    means = (totals / len(prompts)).T.tolist()
    return [Candidate(b.params[name], *row) for b, row in zip(bounds, means, strict=True)]


def _one_prompt(
    programs: list[TorchProgram], model: LayeredModel, place: str, ids: list[int], bar: Any
) -> Tensor:
    """`distance`, `relative` and `computed` of every candidate, [3, candidates] float64."""
    total = len(ids)
    runs = [program.start(total) for program in programs]
    positions = torch.arange(total)
    hidden = model.embed(ids)
    # Candidate that has lost tokens -> final state, and number of rows computed.
    early_ends: dict[int, tuple[Tensor, int]] = {}
    for layer in range(model.layers):
        hidden = model.layer(layer, hidden, positions)
        qkv = model.seen()
        for number, run in enumerate(runs):
            if number not in early_ends:
                deeper = run.observe(layer, *qkv)
                if deeper is not None and len(deeper) < total:
                    final, rows = _continued(model, run, layer, hidden, deeper)
                    early_ends[number] = final, (layer + 1) * total + rows
        bar.update()
    if not early_ends:
        message = f"all of the prompt's {total} tokens go deeper"
        raise refused(place, "range", message, "use longer prompts, like those that will be served")
    full = model.final(hidden)
    ends = [early_ends.get(number, (full, model.layers * total)) for number in range(len(runs))]
    squares = torch.stack([(final - full).pow(2).mean() for final, _ in ends])
    share = torch.tensor([rows for _, rows in ends], dtype=torch.float64) / (model.layers * total)
    return torch.stack([squares, squares / full.pow(2).mean(), share])


def _continued(
    model: LayeredModel, run: Run, layer: int, hidden: Tensor, deeper: Tensor
) -> tuple[Tensor, int]:
    """The final hidden state [C] if only the tokens `deeper` [m] go past a layer.

    Also the number of rows computed from there on. `propagate.every` goes on choosing among them.
    """
    propagate = run.program.bound.folded.propagate
    repeats = propagate is not None and propagate.repeats
    positions, rows = torch.arange(hidden.shape[1], device=hidden.device), 0
    selected: Tensor | None = deeper
    for index in range(layer + 1, model.layers):
        if selected is not None:
            selected = selected.to(hidden.device)
            hidden, positions = hidden[:, selected], positions[selected]
        hidden = model.layer(index, hidden, positions)
        rows += len(positions)
        selected = run.observe(index, *model.seen(), positions) if repeats else None
    return model.final(hidden), rows


def chosen(found: list[Candidate], limits: Limits) -> Candidate | None:
    """The closest candidate that may be chosen, the first of equally close ones; None if none."""
    allowed = [
        candidate
        for candidate in found
        if limits.allow(candidate) and math.isfinite(candidate.distance)
    ]
    return min(allowed, key=lambda candidate: candidate.distance, default=None)


def _print(
    results: list[Candidate], best: Candidate | None, limits: Limits, name: str, prompts: int
) -> None:
    words = [shown(candidate.value) for candidate in results]
    width = max(5, *map(len, (name, *words)))
    print(f"final hidden state of the last token; prompts: {prompts}")
    print(f"{name:>{width}}  {'distance':>10}  {'relative':>8}  rows computed")
    for candidate, word in zip(results, words, strict=True):
        note = "  <- closest" if candidate is best else "  (more than asked)"
        note = note if candidate is best or not limits.allow(candidate) else ""
        print(
            f"{word:>{width}}  {candidate.distance:>10.4g}  {candidate.relative:>8.2%}  "
            f"{candidate.computed:>13.1%}{note}"
        )


def plot(found: list[Candidate], best: Candidate, limits: Limits, name: str, path: str) -> None:
    """Plots distance and rows computed over the values, as a PNG file.

    Raises:
        PolicyError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        message = "`--out` draws with matplotlib, which is not installed"
        raise refused("tune", "file", message, "pip install matplotlib") from None
    places, words = range(len(found)), [shown(candidate.value) for candidate in found]
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left_axes = figure.add_subplot()
    # Distances fall over several orders of magnitude; an exact 0 is drawn at the lower edge.
    left_axes.set_yscale("log", nonpositive="clip")
    left_axes.plot(
        places, [100 * candidate.relative for candidate in found], "o-", color="tab:blue"
    )
    left_axes.plot([found.index(best)], [100 * best.relative], "o", color="tab:red", markersize=11)
    left_axes.set_title(f"{name} = {shown(best.value)}", color="tab:red")
    left_axes.set_xlim(-0.5, len(found) - 0.5)
    refused_places = [place for place in places if not limits.allow(found[place])]
    bands = [left_axes.axvspan(place - 0.5, place + 0.5, color="0.93") for place in refused_places]
    if bands:
        left_axes.legend(bands[:1], ["more than asked"], loc="upper right")
    left_axes.set_xlabel(name)
    left_axes.set_ylabel("squared distance to the full state, %", color="tab:blue")
    step = -(-len(found) // _LABELS)
    left_axes.set_xticks(places[::step], words[::step])
    right_axes = left_axes.twinx()
    right_axes.plot(
        places, [100 * candidate.computed for candidate in found], "--", color="tab:gray"
    )
    right_axes.set_ylabel("token rows computed, %", color="tab:gray")
    right_axes.set_ylim(0, 100)
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise refused(path, "file", why(error, "cannot be written")) from None
