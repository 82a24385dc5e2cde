"""A picture of what policies keep of one prompt: positions across, layers and KV heads down.

python examples/kept_map.py --out kept.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.tools.commands import execute, overrides
from record import record

sys.path.insert(0, str(Path(__file__).parent / "train"))
import tasks

ROOT = Path(__file__).parents[1]
POLICIES = ("snapkv", "adakv", "pyramidkv", "lava", "sinks-recent")


def kept_by(name: str, tensors: dict[str, np.ndarray], settings: list[str]) -> np.ndarray:
    """Entries of a recorded prompt that a shipped policy keeps, bool [L * G, N]."""
    layers, heads, _, size = tensors["q"].shape
    shape = ModelShape(layers, heads, tensors["k"].shape[1], size)
    bound = bind(load(name).executable(), shape, overrides(settings))
    return np.concatenate(execute(bound, "torch", *(tensors[x] for x in "qkv")).kept)


def draw(kept: dict[str, np.ndarray], needle: tuple[int, int], kv_heads: int, path: Path) -> None:
    """Draw a panel per policy over one position axis; the fact asked for is shaded."""
    figure, axes = plt.subplots(len(kept), 1, figsize=(9, 1.35 * len(kept)), sharex=True)
    for axis, (name, mask) in zip(axes, kept.items(), strict=True):
        axis.axvspan(needle[0] - 0.5, needle[1] - 0.5, color="#f0b400", alpha=0.5, lw=0)
        rows, positions = mask.nonzero()
        axis.scatter(positions, rows, marker="|", s=70, linewidths=1.1, color="#1f4e9c")
        axis.set_ylim(len(mask) - 0.4, -0.6)
        axis.set_yticks(range(len(mask)))
        labels = [f"{i // kv_heads}.{i % kv_heads}" for i in range(len(mask))]
        axis.set_yticklabels(labels, fontsize=6)
        share = 100 * mask.mean()
        axis.set_title(f"{name}: {share:.1f} % kept", fontsize=9, loc="left", pad=3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[len(axes) // 2].set_ylabel("layer.KV head", fontsize=8)
    axes[-1].set_xlabel("position in the prompt (shaded: the fact that the last tokens ask for)")
    axes[-1].set_xlim(-3, kept[name].shape[1] + 2)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default=str(ROOT / "examples" / "model-tiny"))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--capacity", type=int, default=64)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    sample = tasks.sample("distractors", options.tokens, np.random.default_rng(options.seed))
    tensors = record(options.model, sample.text)
    kept = {}
    for name in POLICIES:
        settings = [f"capacity={options.capacity}"]
        if name != "sinks-recent":
            settings.append(f"window={options.window}")
        kept[name] = kept_by(name, tensors, settings)
    draw(kept, sample.needles[0], tensors["k"].shape[1], options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
