"""Train an embedded model from nothing, on a CPU.

    python examples/train/train.py                  # model-tiny, 20 minutes on one free core
    python examples/train/train.py --recipe small   # model-small, 50 minutes
    python examples/train/train.py --resume         # go on after Ctrl-C

Steps, not minutes, decide what is trained, and every draw is seeded: the same machine gives the
same model, interrupted or not. The run's state (weights, optimizers, random generator) stands in
`--state`; at the end the model folder is written to `--out`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import evaluate
import export
import lessons
import listing
import numpy as np
import structured_start
import tasks
import torch
from model import Config, Llama
from optimizer import Optimizers
from torch import Tensor
from tqdm import tqdm

ROOT = Path(__file__).parents[2]
WARM_UP_STEPS = 100
STRETCHED_SHARE = 0.1
SHORTER_SHARE = 0.2


@dataclass(frozen=True)
class Stage:
    """`steps` batches of `tokens` tokens in sequences of `length`.

    `mix` gives the shares of the kinds of lessons. `retrieving` is the number of retrieval layers
    that take part, drawn for each batch; None means all. At the first stage with `listing`, the
    layer of `listing.py` is put in before the last one. With `any_order`, the words that
    `lessons.also_right` returns are right too, beside the one in the lesson.
    """

    length: int
    tokens: int
    steps: int
    mix: Mapping[str, float] = field(default_factory=lambda: tasks.MIX)
    retrieving: int | None = None
    listing: bool = False
    any_order: bool = False


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run, except the seed.

    `rates` are points, (step, factor on the learning rates), with linear interpolation between.
    Sequences are trained without the attention of some retrieval layers, as otherwise the first
    layer that can retrieve would do all of it: `skipped_share` of the batches lack one layer's or,
    with `by_sequence`, that share of all pairs of sequence and layer is dropped. For `unread_share`
    of these pairs, what the layer adds is left out of the final states, though later layers see it.
    With `even_rows`, a sequence weighs as the square root of its number of answer tokens, not as
    the number.
    """

    config: Config
    roles: Mapping[int, structured_start.Roles]
    batch: Callable[[int, int, np.random.Generator], tuple[np.ndarray, np.ndarray]]
    stages: tuple[Stage, ...]
    rates: tuple[tuple[float, float], ...]
    skipped_share: float
    unread_share: float
    by_sequence: bool
    even_rows: bool
    minutes: int


TINY = Recipe(
    config=Config(),
    roles=structured_start.TINY,
    batch=tasks.batch,
    stages=(
        Stage(64, 2048, 600),
        Stage(128, 2048, 1200),
        Stage(256, 4096, 700),
        Stage(512, 4096, 1000),
        Stage(1024, 4096, 250),
    ),
    rates=((0.45 * 3750, 1.0), (3750, 0.02)),
    skipped_share=0.2,
    unread_share=0.0,
    by_sequence=False,
    even_rows=False,
    minutes=20,
)
SMALL = Recipe(
    config=Config(
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        rope_theta=1e7,
    ),
    roles=structured_start.SMALL,
    batch=lessons.batch,
    stages=(
        Stage(128, 2048, 450, lessons.MIX, retrieving=1),
        Stage(128, 2048, 200, lessons.MIX, retrieving=2),
        Stage(256, 4096, 120, lessons.LATER_MIX, retrieving=2),
        Stage(256, 4096, 110, lessons.LATER_MIX),
        Stage(512, 4096, 120, lessons.LATER_MIX),
        Stage(128, 2048, 200, lessons.COUNTING_MIX),
        Stage(512, 4096, 90, lessons.LONG_MIX),
        Stage(1024, 4096, 80, lessons.LONG_MIX),
        Stage(2048, 4096, 35, lessons.LONG_MIX),
        Stage(128, 2048, 250, lessons.LISTING_MIX, listing=True),
        Stage(128, 2048, 1000, lessons.LISTING_MIX, listing=True, any_order=True),
        Stage(512, 4096, 400, lessons.LAST_MIX, listing=True, any_order=True),
        Stage(128, 2048, 400, lessons.COUNTING_LISTS_MIX, listing=True, any_order=True),
        Stage(1024, 4096, 300, lessons.LAST_MIX, listing=True, any_order=True),
        Stage(128, 2048, 300, lessons.COUNTING_LISTS_MIX, listing=True, any_order=True),
        Stage(2048, 4096, 130, lessons.LAST_MIX, listing=True, any_order=True),
    ),
    # As trained: prolonged after steps 1,000, 1,200 and 1,405, and five times from 1,655 on.
    rates=(
        (649.6, 1.0),
        (1000, 0.02 + 0.98 * 160 / 510.4),
        (1200, 0.32),
        (1405, 0.02),
        (1425, 0.4),
        (1805, 0.4),
        (1815, 0.2),
        (2105, 0.15),
        (2655, 0.12),
        (3055, 0.1),
        (3065, 0.14),
        (3455, 0.1),
        (3755, 0.06),
        (4055, 0.04),
        (4185, 0.01),
    ),
    skipped_share=0.15,
    unread_share=0.25,
    by_sequence=True,
    even_rows=True,
    minutes=50,
)
RECIPES = {"tiny": TINY, "small": SMALL}


class Run:
    """A training run, with all the state needed to resume it bit for bit."""

    def __init__(self, stages: tuple[Stage, ...], seed: int, recipe: Recipe = TINY) -> None:
        self.stages, self.seed, self.recipe, self.step = stages, seed, recipe, 0
        self.model = Llama(recipe.config)
        structured_start.start(self.model, seed, recipe.roles)
        self.optimizers = Optimizers(self.model)
        self.rng = np.random.default_rng(seed)
        self.listing = False

    @property
    def total(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def plan(self) -> dict:
        """The settings that must be equal for a run to be resumed."""
        return {
            "stages": [asdict(stage) for stage in self.stages],
            "seed": self.seed,
            "config": self.recipe.config.as_dict(),
        }

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "plan": self.plan(),
            "step": self.step,
            "listing": self.listing,
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "rng": self.rng.bit_generator.state,
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, path)

    def load(self, path: Path) -> None:
        """Resume from a saved state; SystemExit with one sentence if that is impossible."""
        if not path.exists():
            sys.exit(f"nothing to resume: {path} does not exist; start without --resume")
        state = torch.load(path, weights_only=True)
        if state["plan"] != self.plan():
            sys.exit(f"{path} is of a run with another plan or seed; start without --resume")
        self.step = state["step"]
        if state["listing"]:
            self._put_in_listing()
        self.model.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])
        self.rng.bit_generator.state = state["rng"]

    def stage_index(self) -> int:
        ends = np.cumsum([stage.steps for stage in self.stages])
        return int(np.searchsorted(ends, self.step, side="right"))

    def rate(self) -> float:
        """Factor on learning rates: warm-up, then the recipe's `rates`, scaled to this run."""
        steps, factors = zip(*self.recipe.rates, strict=True)
        factor = float(np.interp(self.step / self.total * steps[-1], steps, factors))
        return min(1.0, (self.step + 1) / WARM_UP_STEPS) * factor

    def advance(self) -> tuple[float, float]:
        """Take one step; return its loss and the share of answer tokens that were right."""
        if self.stages[self.stage_index()].listing and not self.listing:
            self._put_in_listing()
        ids, is_answer, positions = self.next_batch()
        layers = self._layers()
        attended, read = self._parts(len(ids)) if layers is None else (None, None)
        hidden = self.model.hidden(ids, positions, attended, read, layers)
        asked = is_answer[:, 1:]
        logits = self.model.logits(hidden[:, :-1][asked])
        right = self.right_words(ids, is_answer)[:, 1:][asked]
        log_probabilities = logits.log_softmax(-1).gather(1, right.clamp(min=0))
        loss = -log_probabilities.masked_fill(right < 0, -torch.inf).logsumexp(1)
        loss = (loss * self.word_weights(asked)).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizers.set_rate(self.rate())
        self.optimizers.step()
        self.step += 1
        best = logits.argmax(-1, keepdim=True)
        return loss.item(), (best == right).any(1).float().mean().item()

    def right_words(self, ids: Tensor, is_answer: Tensor) -> Tensor:
        """Words that are right at each place, int64 [B, T, 1 or more]; -1 for none."""
        right = ids[..., None]
        if not self.stages[self.stage_index()].any_order:
            return right
        also = lessons.also_right(ids.numpy(), is_answer.numpy())
        return torch.cat([right, torch.from_numpy(also)], -1)

    def _put_in_listing(self) -> None:
        listing.put_in(self.model, len(self.model.model.layers) - 1, self.seed)
        self.optimizers = Optimizers(self.model)
        self.listing = True

    def _layers(self) -> set[int] | None:
        """The layers that take part in this batch; None for all."""
        retrieving = self.stages[self.stage_index()].retrieving
        if retrieving is None:
            return None
        layers = list(self.recipe.roles)
        drawn = self.rng.choice(layers, retrieving, replace=False).tolist()
        return {*drawn, *range(self.recipe.config.num_hidden_layers)} - (set(layers) - set(drawn))

    def _parts(self, count: int) -> tuple[Tensor | None, Tensor | None]:
        """`attended` and `read` of `Llama.hidden` for this batch, 0 or 1; None for all 1."""
        recipe, layers = self.recipe, list(self.recipe.roles)
        every = self.model.config.num_hidden_layers
        if not recipe.by_sequence:
            if self.rng.random() >= recipe.skipped_share:
                return None, None
            attended = torch.ones(every, 1)
            attended[int(self.rng.choice(layers))] = 0
            return attended, None
        parts = torch.ones(2, every, count)
        drawn = self.rng.random((2, len(layers), count))
        parts[0, layers] = torch.from_numpy(drawn[0] >= recipe.skipped_share).float()
        parts[1, layers] = torch.from_numpy(drawn[1] >= recipe.unread_share).float()
        return parts[0], parts[1]

    def word_weights(self, asked: Tensor) -> Tensor:
        """Weights of the answer tokens marked in `asked` [B, T]; they sum to 1."""
        each = asked.sum(1)[asked.nonzero()[:, 0]].float()
        weights = each**-0.5 if self.recipe.even_rows else torch.ones_like(each)
        return weights / weights.sum()

    def next_batch(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids and is_answer [B, T], and positions [B, T] if the batch is stretched, else None."""
        index = self.stage_index()
        tokens = self.stages[index].tokens
        # Stages without the listing layer teach other answers.
        first = next(
            i for i, s in enumerate(self.stages) if s.listing == self.stages[index].listing
        )
        if index > first and self.rng.random() < SHORTER_SHARE:
            index = int(self.rng.integers(first, index))
        length = self.stages[index].length
        mix = self.stages[index].mix
        ids, is_answer = self.recipe.batch(max(1, tokens // length), length, self.rng, mix)
        positions = None
        if self.rng.random() < STRETCHED_SHARE:
            positions = torch.from_numpy(stretched(*ids.shape, self.rng))
        return torch.from_numpy(ids), torch.from_numpy(is_answer), positions


def stretched(count: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Positions [count, length] with a few random gaps: long distances at a short length."""
    gaps = np.zeros((count, length), np.int64)
    for row in gaps:
        for place in rng.integers(1, length, rng.integers(1, 6)):
            row[place] += rng.integers(0, length)
    return np.arange(length) + gaps.cumsum(1)


@contextmanager
def stop_on_interrupt() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM in a list, so that a step is never cut in two."""
    received: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, lambda number, _: received.append(number)) for each in signals]
    try:
        yield received
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)


def train(run: Run, state: Path, every: int) -> bool:
    """Advance `run` to its end; False if interrupted. Saved every `every` steps and at the end."""
    smooth_loss = smooth_right = None
    with (
        stop_on_interrupt() as interrupts,
        tqdm(total=run.total, initial=run.step, desc="training", unit="step") as bar,
    ):
        while run.step < run.total and not interrupts:
            loss, right = run.advance()
            smooth_loss = loss if smooth_loss is None else 0.98 * smooth_loss + 0.02 * loss
            smooth_right = right if smooth_right is None else 0.98 * smooth_right + 0.02 * right
            length = run.stages[min(run.stage_index(), len(run.stages) - 1)].length
            bar.set_postfix_str(
                f"length {length}, loss {smooth_loss:.3f}, right {smooth_right:.3f}", refresh=False
            )
            bar.update()
            if run.step % every == 0:
                run.save(state)
    run.save(state)
    return not interrupts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", choices=RECIPES, default="tiny")
    parser.add_argument("--out", type=Path, help="default: examples/model-RECIPE")
    parser.add_argument("--state", type=Path, help="default: .cache/train/RECIPE.pt")
    parser.add_argument("--resume", action="store_true", help="go on from --state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the steps, for a trial")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    recipe = RECIPES[options.recipe]
    out = options.out or ROOT / "examples" / f"model-{options.recipe}"
    state = options.state or ROOT / ".cache" / "train" / f"{options.recipe}.pt"
    stages = tuple(
        replace(stage, steps=max(1, round(stage.steps * options.scale))) for stage in recipe.stages
    )
    run = Run(stages, options.seed, recipe)
    if options.resume:
        run.load(state)
    minutes = recipe.minutes * options.scale
    print(f"{run.total} steps; about {minutes:.0f} minutes on one free core", file=sys.stderr)
    if not train(run, state, every=200):
        sys.exit(f"stopped after step {run.step}; go on with --resume")
    export.write(run.model, out)
    print(evaluate.report(run.model, lengths=(512,), count=50))


if __name__ == "__main__":
    main()
