"""Train the embedded model from nothing, on a CPU.

    python examples/train/train.py                # about 20 minutes on one free core
    python examples/train/train.py --resume       # go on after Ctrl-C

Steps, not minutes, decide what is trained, and every draw is seeded: the same machine gives the
same model, interrupted or not. The run's state (weights, optimizers, random generator) stands in
`--state`; at the end the model folder is written to `--out`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import evaluate
import export
import numpy as np
import structured_start
import tasks
import torch
import torch.nn.functional as F
from model import Config, Llama
from optimizer import Optimizers
from torch import Tensor
from tqdm import tqdm

ROOT = Path(__file__).parents[2]
MINUTES = 20
WARM_UP_STEPS = 100
STRETCHED_SHARE = 0.1
SHORTER_SHARE = 0.2
# A share of the batches goes without the attention of one retrieval layer, so that more than one
# layer learns to retrieve; otherwise the first that can does all of it.
SKIPPED_SHARE = 0.2


@dataclass(frozen=True)
class Stage:
    """`steps` batches of `tokens` tokens in sequences of `length`."""

    length: int
    tokens: int
    steps: int


STAGES = (
    Stage(64, 2048, 600),
    Stage(128, 2048, 1200),
    Stage(256, 4096, 700),
    Stage(512, 4096, 1000),
    Stage(1024, 4096, 250),
)


class Run:
    """A training run: everything that has to be kept to go on bit for bit."""

    def __init__(self, stages: tuple[Stage, ...], seed: int) -> None:
        self.stages, self.seed, self.step = stages, seed, 0
        self.model = Llama(Config())
        structured_start.start(self.model, seed)
        self.optimizers = Optimizers(self.model)
        self.rng = np.random.default_rng(seed)

    @property
    def total(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def plan(self) -> dict:
        """What must be equal for a run to be resumed."""
        return {
            "stages": [asdict(stage) for stage in self.stages],
            "seed": self.seed,
            "config": self.model.config.as_dict(),
        }

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "plan": self.plan(),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "rng": self.rng.bit_generator.state,
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, path)

    def load(self, path: Path) -> None:
        """Go on from a saved state; SystemExit with one sentence when that cannot be."""
        if not path.exists():
            sys.exit(f"nothing to resume: {path} does not exist; start without --resume")
        state = torch.load(path, weights_only=True)
        if state["plan"] != self.plan():
            sys.exit(f"{path} is of a run with another plan or seed; start without --resume")
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])
        self.rng.bit_generator.state = state["rng"]

    def stage_index(self) -> int:
        ends = np.cumsum([stage.steps for stage in self.stages])
        return int(np.searchsorted(ends, self.step, side="right"))

    def rate(self) -> float:
        """Warm-up, level until 45 % of the steps, then linear to 2 %."""
        done = self.step / self.total
        decay = 1.0 if done < 0.45 else 0.02 + 0.98 * (1 - done) / 0.55
        return min(1.0, (self.step + 1) / WARM_UP_STEPS) * decay

    def advance(self) -> tuple[float, float]:
        """One step; returns its loss and the share of answer tokens that were right."""
        ids, is_answer, positions = self._batch()
        without = None
        if self.rng.random() < SKIPPED_SHARE:
            without = int(self.rng.choice(structured_start.RETRIEVAL_LAYERS))
        hidden = self.model.hidden(ids, positions, without)
        asked = is_answer[:, 1:]
        logits = self.model.logits(hidden[:, :-1][asked])
        wanted = ids[:, 1:][asked]
        loss = F.cross_entropy(logits, wanted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizers.set_rate(self.rate())
        self.optimizers.step()
        self.step += 1
        return loss.item(), (logits.argmax(-1) == wanted).float().mean().item()

    def _batch(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids and is_answer [B, T], and positions [B, T] where the batch is stretched."""
        index = self.stage_index()
        tokens = self.stages[index].tokens
        if index and self.rng.random() < SHORTER_SHARE:
            index = int(self.rng.integers(0, index))
        length = self.stages[index].length
        ids, is_answer = tasks.batch(max(1, tokens // length), length, self.rng)
        positions = None
        if self.rng.random() < STRETCHED_SHARE:
            positions = torch.from_numpy(stretched(*ids.shape, self.rng))
        return torch.from_numpy(ids), torch.from_numpy(is_answer), positions


def stretched(count: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Positions [count, length] with a few random gaps: far distances at the price of near ones."""
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
    """Advance `run` to its end; False when interrupted. Saved to `state` now and then and last."""
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
    parser.add_argument("--out", type=Path, default=ROOT / "examples" / "model-tiny")
    parser.add_argument("--state", type=Path, default=ROOT / ".cache" / "train" / "state.pt")
    parser.add_argument("--resume", action="store_true", help="go on from --state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the steps, for a trial")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    stages = tuple(
        Stage(stage.length, stage.tokens, max(1, round(stage.steps * options.scale)))
        for stage in STAGES
    )
    run = Run(stages, options.seed)
    if options.resume:
        run.load(options.state)
    minutes = MINUTES * options.scale
    print(f"{run.total} steps; about {minutes:.0f} minutes on one free core", file=sys.stderr)
    if not train(run, options.state, every=200):
        sys.exit(f"stopped after step {run.step}; go on with --resume")
    export.write(run.model, options.out)
    print(evaluate.report(run.model, lengths=(512,), count=50))


if __name__ == "__main__":
    main()
