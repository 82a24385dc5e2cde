"""Accuracy of the embedded model, with all of its KV cache and with a part of it.

    python examples/train/evaluate.py                        # task x length
    python examples/train/evaluate.py --kept 0.125           # also what compression loses at 512

An answer counts when every word of it is right; `stops` counts those followed by <end>. Decoding is
greedy. For compression the prompt is read in full, as a server does, so the first word of the
answer is computed from the whole cache and only the following words from the kept part. This is an
independent check in 100 lines, not the policies' implementation.

Letters: L layers, H query heads, G KV heads, N cached tokens, T new tokens, D head size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import export
import numpy as np
import tasks
import torch
import torch.nn.functional as F
from kvpolicy.evaluation.questions import embedded
from model import Llama, rotary_tables
from torch import Tensor
from tqdm import tqdm

MODEL = Path(__file__).parents[1] / "model-tiny"
LENGTHS = (128, 256, 512, 1024, 1536)
SINKS = 4
WINDOW = 8
KERNEL = 7
BATCH_TOKENS = 16384


def questions(task: str, length: int, count: int, seed: int) -> list[tasks.Sample]:
    """`count` samples; sample i depends only on the seed and i."""
    return [tasks.sample(task, length, np.random.default_rng([seed, i])) for i in range(count)]


def expected(sample: tasks.Sample) -> list[int]:
    return [*sample.answer_ids, embedded.END]


@torch.no_grad()
def accuracy(model: Llama, samples: list[tasks.Sample]) -> tuple[float, float]:
    """Shares of answers that are right, and that are right and then stop; prompts of one length.

    One pass over prompt and answer: greedy decoding gives exactly the answer if and only if every
    token of it is the best one after the tokens before it.
    """
    answer = len(expected(samples[0]))
    right: list[Tensor] = []
    size = max(1, BATCH_TOKENS // len(samples[0].prompt_ids))
    for first in range(0, len(samples), size):
        part = samples[first : first + size]
        ids = torch.tensor([s.prompt_ids + expected(s) for s in part])
        logits = model.logits(model.hidden(ids)[:, -answer - 1 : -1])
        right.append(logits.argmax(-1) == ids[:, -answer:])
    table = torch.cat(right)
    words_right = table[:, :-1].all(1)
    return words_right.float().mean().item(), table.all(1).float().mean().item()


@dataclass
class Cache:
    """One layer after the prefill: keys and values [G, N, D], attention [H, N, N]."""

    keys: Tensor
    values: Tensor
    attention: Tensor


Keep = Callable[[Cache, int], Tensor]
"""From a layer's cache and a capacity to the kept entries [G, N], bool."""


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Output [H, T, D] and probabilities [H, T, N] of q on k, v [G, N, D]; seen [G, T, N] bool."""
    group = q.shape[0] // k.shape[0]
    k, v, seen = (x.repeat_interleave(group, 0) for x in (k, v, seen))
    logits = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    probabilities = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    return probabilities @ v, probabilities


@torch.no_grad()
def prefill(model: Llama, ids: list[int]) -> tuple[list[Cache], int]:
    """The cache of every layer after a prompt, and the best next token."""
    x, caches = model.model.embed_tokens(torch.tensor([ids])), []
    cos, sin = rotary_tables(model.config, torch.arange(len(ids)))
    causal = torch.ones(1, len(ids), len(ids), dtype=torch.bool).tril()
    for layer in model.model.layers:
        q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
        out, attention = attend(q[0], k[0], v[0], causal.expand(k.shape[1], -1, -1))
        caches.append(Cache(k[0], v[0], attention))
        x = x + layer.self_attn.merge(out[None])
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return caches, int(model.logits(model.model.norm(x))[0, -1].argmax())


@torch.no_grad()
def decode(model: Llama, ids: list[int], caches: list[Cache], kept: list[Tensor]) -> list[int]:
    """The best next token after each of `ids`, which follow the prompt, on the kept entries."""
    before, new = caches[0].keys.shape[1], len(ids)
    x = model.model.embed_tokens(torch.tensor([ids]))
    cos, sin = rotary_tables(model.config, torch.arange(before, before + new))
    for layer, cache, keep in zip(model.model.layers, caches, kept, strict=True):
        q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
        causal = torch.ones(len(keep), new, new, dtype=torch.bool).tril()
        seen = torch.cat([keep[:, None].expand(-1, new, -1), causal], 2)
        keys, values = torch.cat([cache.keys, k[0]], 1), torch.cat([cache.values, v[0]], 1)
        x = x + layer.self_attn.merge(attend(q[0], keys, values, seen)[0][None])
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.logits(model.model.norm(x))[0].argmax(-1).tolist()


def keep_all(cache: Cache, capacity: int) -> Tensor:
    return torch.ones(cache.keys.shape[:2], dtype=torch.bool)


def keep_sinks_recent(cache: Cache, capacity: int) -> Tensor:
    """The first SINKS and the last capacity - SINKS tokens (StreamingLLM's cut, applied once)."""
    kept = torch.zeros(cache.keys.shape[:2], dtype=torch.bool)
    kept[:, :SINKS] = True
    kept[:, -(capacity - SINKS) :] = True
    return kept


def keep_attended(cache: Cache, capacity: int) -> Tensor:
    """Entries with the most attention of the last WINDOW queries, max-pooled (SnapKV's rule)."""
    groups, length = cache.keys.shape[:2]
    votes = cache.attention[:, -WINDOW:, :-WINDOW].sum(1)
    pooled = F.max_pool1d(votes, KERNEL, 1, KERNEL // 2).view(groups, -1, length - WINDOW).sum(1)
    kept = torch.zeros(groups, length, dtype=torch.bool)
    kept[:, -WINDOW:] = True
    kept.scatter_(1, pooled.topk(capacity - WINDOW).indices, True)
    return kept


METHODS: dict[str, Keep] = {
    "all": keep_all,
    "attended": keep_attended,
    "sinks and recent": keep_sinks_recent,
}


def compressed_accuracy(
    model: Llama, samples: list[tasks.Sample], share: float, methods: dict[str, Keep]
) -> dict[str, float]:
    """Share of right answers by method, with `share` of the prompt kept per layer and KV head."""
    right = dict.fromkeys(methods, 0)
    for sample in tqdm(samples, desc="compressed", unit="question", leave=False):
        caches, first = prefill(model, sample.prompt_ids)
        capacity = int(share * len(sample.prompt_ids))
        for name, keep in methods.items():
            kept = [keep(cache, capacity) for cache in caches]
            answer = [first, *decode(model, sample.answer_ids[:-1], caches, kept)]
            right[name] += answer == sample.answer_ids
    return {name: count / len(samples) for name, count in right.items()}


def report(model: Llama, lengths: tuple[int, ...], count: int, seed: int = 0) -> str:
    """A Markdown table: right answers in percent by task and prompt length."""
    lines = ["| task | " + " | ".join(f"{length}" for length in lengths) + " |"]
    lines.append("|---|" + "---:|" * len(lengths))
    for name, task in tasks.TASKS.items():
        cells = []
        for length in lengths:
            right, stops = accuracy(model, questions(name, length, count, seed))
            cells.append(f"{100 * right:.0f} ({100 * stops:.0f})")
        lines.append(f"| {task.title} (`{name}`) | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def compressed_report(model: Llama, length: int, count: int, share: float, seed: int = 0) -> str:
    """A Markdown table: right answers in percent by task and by what is kept."""
    lines = ["| task | " + " | ".join(METHODS) + " |", "|---|" + "---:|" * len(METHODS)]
    for name, task in tasks.TASKS.items():
        row = compressed_accuracy(model, questions(name, length, count, seed), share, METHODS)
        cells = " | ".join(f"{100 * row[method]:.0f}" for method in METHODS)
        lines.append(f"| {task.title} (`{name}`) | {cells} |")
    return "\n".join(lines)


def arguments(about: str, model: Path, lengths: Sequence[int]) -> argparse.ArgumentParser:
    """Options of every measurement of an embedded model."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=model)
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help="prompt tokens")
    parser.add_argument("--count", type=int, default=100, help="questions per task and length")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    parser = arguments(__doc__, MODEL, LENGTHS)
    parser.add_argument("--kept", type=float, help="share of a 512-token prompt to keep")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = export.read(options.model)
    print("Right answers in percent (right and then stopping), by prompt length\n")
    print(report(model, tuple(options.lengths), options.count, options.seed))
    if options.kept:
        print(f"\nRight answers in percent at 512 tokens, {100 * options.kept:g} % kept\n")
        print(compressed_report(model, 512, options.count, options.kept, options.seed))


if __name__ == "__main__":
    main()
