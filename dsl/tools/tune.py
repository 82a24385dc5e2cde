"""`kvpolicy tune`: chooses the layer of a propagation with prompts of one's own (FastKV's Eq. 3).

For every candidate layer each prompt is computed twice: in full, and with the tokens that the
policy chooses at this layer alone going deeper. The best layer is the one after which the last
token's final hidden state stays closest to the full one, the earliest of equals.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.bind.model_config import read_config
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.ir.nodes import ModelShape, Program
from kvpolicy.dsl.syntax.diagnostics import refused
from kvpolicy.dsl.tools.commands import executable, guarded, overrides
from kvpolicy.dsl.tools.tune_model import LayeredModel
from kvpolicy.dsl.tools.tune_prompts import read_prompts
from torch import Tensor

GOALS = ("fastkv-layer",)


@dataclass(frozen=True)
class Candidate:
    """One layer, tried on every prompt.

    Attributes:
        layer: from 0; the last one that computes all tokens.
        distance: mean squared difference to the full final hidden state, mean over prompts.
        relative: the same, as a share of the full state's mean square.
        computed: token rows computed, as a share of those of a full prefill.
    """

    layer: int
    distance: float
    relative: float
    computed: float


def main(args: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        args: `file`, `goal` (`fastkv-layer`), `model` (a folder), `prompts` (files), `set`,
            `deepest` (a layer or None), `out` (a PNG to write, or None), `device` (or None).

    Returns:
        0, or 2 if the input cannot be used.
    """
    return guarded(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    program = executable(args.file)
    name = tuned_parameter(program)
    settings = overrides(args.set)
    if name in settings:
        raise refused("--set", "arguments", f"`{name}` is what `tune` chooses; leave it out")
    shape = read_config(args.model).shape
    if shape.layers < 3:
        raise refused(str(args.model), "range", "a choice of layers needs at least 3 layers")
    deepest = shape.layers // 2 if args.deepest is None else args.deepest
    if not 0 <= deepest < shape.layers - 1:
        message = f"`--deepest {deepest}`: the layers to choose from are 0 to {shape.layers - 2}"
        raise refused("tune", "range", message)
    prompts = read_prompts(args.prompts)
    with torch.no_grad():
        found = measure(program, name, settings, LayeredModel(args.model, args.device), prompts)
    best = chosen(found, deepest)
    _print(found, best, deepest, len(prompts))
    print(f"\nin the policy file:    {name}: {best.layer}")
    print(f"for the server:        --kv-policy-set {name}={best.layer}")
    if args.out is not None:
        plot(found, best, deepest, name, args.out)
        print(f"plot:                  {args.out}")
    return 0


def tuned_parameter(program: Program) -> str:
    """The parameter that the policy's `propagate.first` compares with `layer`.

    Raises:
        PolicyError: there is none.
    """
    propagate = program.propagate
    if propagate is None or propagate.first is None:
        message = "`--for fastkv-layer` needs a policy with `propagate` and `first`"
        raise refused(program.name, "arguments", message)
    for node in propagate.first.walk():
        operands = {each.op: each for each in node.args}
        if node.op == "equal" and operands.keys() == {"size", "param"}:
            if operands["size"].value == "layer":
                name = operands["param"].name or str(operands["param"].value)
                break
    else:
        message = "`propagate.first` does not compare `layer` with a parameter"
        raise refused(program.name, "arguments", message, "as `layer == tsp_layer` does")
    if propagate.restart is not None:
        message = "this policy begins the prefill again, so that its final states are others"
        raise refused(program.name, "arguments", message)
    return name


def measure(
    program: Program,
    name: str,
    settings: Mapping[str, str],
    model: LayeredModel,
    prompts: list,
) -> list[Candidate]:
    """Every candidate layer on every prompt, with a progress bar.

    Args:
        program: the policy.
        name: of the parameter that is varied.
        settings: values of other parameters.
        model: the checkpoint.
        prompts: from `read_prompts`.

    Raises:
        PolicyError: a prompt that cannot be used.
    """
    shape = read_config(model.folder).shape
    programs = [
        TorchProgram(bind(program, shape, {**settings, name: str(layer)}))
        for layer in range(shape.layers - 1)
    ]
    totals = torch.zeros(3, len(programs), dtype=torch.float64)
    with _progress(len(prompts) * shape.layers) as bar:
        for place, prompt in prompts:
            ids = model.tokens(prompt) if isinstance(prompt, str) else prompt
            totals += _one_prompt(programs, shape, model, place, ids, bar)
    means = (totals / len(prompts)).T.tolist()
    return [Candidate(layer, *values) for layer, values in enumerate(means)]


def _one_prompt(
    programs: list[TorchProgram],
    shape: ModelShape,
    model: LayeredModel,
    place: str,
    ids: list[int],
    bar: object,
) -> Tensor:
    """distance, relative and computed of every candidate, [3, candidates]."""
    total = len(ids)
    if programs[0].bound.queries(total) >= total:
        message = f"{total} tokens are no more than the policy's window"
        raise refused(place, "range", message, "use prompts like those that will be served")
    runs = [program.start(total) for program in programs]
    positions = torch.arange(total)
    hidden = model.embed(ids)
    finals, rows = [], []
    for layer in range(shape.layers):
        hidden = model.layer(layer, hidden, positions)
        seen = model.seen()
        for candidate in range(layer, len(programs)):
            deeper = runs[candidate].observe(layer, *seen)
            if candidate == layer:
                if deeper is None or len(deeper) == total:
                    message = f"all of the prompt's {total} tokens go deeper"
                    raise refused(place, "range", message, "use longer prompts")
                finals.append(_continued(model, layer, hidden, deeper))
                rows.append((layer + 1) * total + (shape.layers - layer - 1) * len(deeper))
        bar.update()
    full = model.final(hidden)
    squares = torch.stack([(final - full).pow(2).mean() for final in finals])
    share = torch.tensor(rows, dtype=torch.float64) / (shape.layers * total)
    return torch.stack([squares, squares / full.pow(2).mean(), share])


def _continued(model: LayeredModel, layer: int, hidden: Tensor, deeper: Tensor) -> Tensor:
    """The final hidden state [C] if only the tokens `deeper` [m] go past a layer."""
    hidden = hidden[:, deeper.to(hidden.device)]
    for index in range(layer + 1, model.layers):
        hidden = model.layer(index, hidden, deeper)
    return model.final(hidden)


def chosen(found: list[Candidate], deepest: int) -> Candidate:
    """The closest candidate up to a layer, the earliest of equals."""
    return min(found[: deepest + 1], key=lambda each: each.distance)


def _print(found: list[Candidate], best: Candidate, deepest: int, prompts: int) -> None:
    print(f"final hidden state of the last token; prompts: {prompts}")
    print(f"{'layer':>5}  {'distance':>10}  {'relative':>8}  rows computed")
    for each in found:
        note = "  <- closest" if each is best else "  (deeper than asked)"
        note = note if each is best or each.layer > deepest else ""
        print(
            f"{each.layer:>5}  {each.distance:>10.4g}  {each.relative:>8.2%}  "
            f"{each.computed:>13.1%}{note}"
        )


def plot(found: list[Candidate], best: Candidate, deepest: int, name: str, path: str) -> None:
    """Writes distance and rows computed over the layers as a PNG.

    Raises:
        PolicyError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        message = "`--out` draws with matplotlib, which is not installed"
        raise refused("tune", "file", message, "pip install matplotlib") from None
    layers = [each.layer for each in found]
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.add_subplot()
    # Distances fall over several orders of magnitude; an exact 0 is drawn at the lower edge.
    left.set_yscale("log", nonpositive="clip")
    left.plot(layers, [100 * each.relative for each in found], "o-", color="tab:blue")
    left.plot([best.layer], [100 * best.relative], "o", color="tab:red", markersize=11)
    left.set_title(f"{name} = {best.layer}", color="tab:red")
    left.set_xlim(layers[0] - 0.5, layers[-1] + 0.5)
    if deepest < layers[-1]:
        left.axvspan(deepest + 0.5, layers[-1] + 0.5, color="0.93", label="deeper than asked")
        left.legend(loc="upper right")
    left.set_xlabel("last layer that computes all tokens")
    left.set_ylabel("squared distance to the full state, %", color="tab:blue")
    left.xaxis.get_major_locator().set_params(integer=True)
    right = left.twinx()
    right.plot(layers, [100 * each.computed for each in found], "--", color="tab:gray")
    right.set_ylabel("token rows computed, %", color="tab:gray")
    right.set_ylim(0, 100)
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise refused(path, "file", (error.strerror or "cannot be written").lower()) from None


def _progress(total: int):
    """A progress bar on the error stream; tqdm comes with transformers."""
    from tqdm import tqdm

    return tqdm(total=total, desc="prompts x layers", disable=None)
