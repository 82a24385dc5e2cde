"""Accuracy of an embedded model on all tasks, with intervals, and where each layer looks.

    python examples/train/measure.py                            # task x length, model-small
    python examples/train/measure.py --looks 512                # also the attention per layer

Answers are generated greedily until <end> and judged by `more_tasks.right`. The intervals are
Wilson's, 95 %.

Letters: L layers, H query heads, G KV heads, N cached tokens, D head size.
"""

from __future__ import annotations

from pathlib import Path

import evaluate
import export
import more_tasks
import numpy as np
import tasks
import torch
import torch.nn.functional as F
from evaluate import BATCH_TOKENS, interval
from model import Llama, rotary_tables
from torch import Tensor

MODEL = Path(__file__).parents[1] / "model-small"
LENGTHS = (128, 256, 512, 1024, 2048)
LOOKED_AT = ("niah", "mk", "mq", "mv", "vt", "hop", "kv")


def questions(task: str, length: int, count: int, seed: int) -> list[tasks.Sample]:
    """`count` samples; sample i depends on the seed and i alone."""
    return [more_tasks.sample(task, length, np.random.default_rng([seed, i])) for i in range(count)]


@torch.no_grad()
def generate(model: Llama, prompts: Tensor, count: int) -> Tensor:
    """The best next tokens after prompts [B, N], each given those before it: [B, count].

    Fewer than `count` when all sequences have come to <end>.
    """
    ended = torch.zeros(len(prompts), 1, dtype=torch.bool)
    cache: list[tuple[Tensor, Tensor]] = []
    new, out = prompts, []
    while len(out) < count and not ended.all():
        before = cache[0][0].shape[2] if cache else 0
        x = model.model.embed_tokens(new)
        cos, sin = rotary_tables(model.config, torch.arange(before, before + new.shape[1]))
        for index, layer in enumerate(model.model.layers):
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
            if before:
                k = torch.cat([cache[index][0], k], 2)
                v = torch.cat([cache[index][1], v], 2)
                cache[index] = (k, v)
            else:
                cache.append((k, v))
            attended = F.scaled_dot_product_attention(
                q, k, v, is_causal=not before, enable_gqa=True
            )
            x = x + layer.self_attn.merge(attended)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        new = model.logits(model.model.norm(x[:, -1:])).argmax(-1)
        out.append(new)
        ended |= new == tasks.END
    return torch.cat(out, 1)


def answers(model: Llama, samples: list[tasks.Sample]) -> list[list[int]]:
    """What the model says until <end>, at most 4 tokens more than the right answers have."""
    said: list[list[int]] = []
    longest = max(len(sample.answer_ids) for sample in samples) + 4
    size = max(1, BATCH_TOKENS // len(samples[0].prompt_ids))
    for first in range(0, len(samples), size):
        prompts = torch.tensor([s.prompt_ids for s in samples[first : first + size]])
        for row in generate(model, prompts, longest).tolist():
            said.append(row[: row.index(tasks.END)] if tasks.END in row else row)
    return said


def right_count(model: Llama, samples: list[tasks.Sample]) -> int:
    """Answers that are right and stop where they should; the prompts have one length."""
    said = answers(model, samples)
    return sum(more_tasks.right(s, a) for s, a in zip(samples, said, strict=True))


def report(model: Llama, lengths: tuple[int, ...], count: int, seed: int = 0) -> str:
    """A Markdown table: right answers in percent, and their interval, by task and length."""
    lines = ["| task | " + " | ".join(map(str, lengths)) + " |", "|---|" + "---:|" * len(lengths)]
    for name, title in more_tasks.TITLES.items():
        cells = []
        for length in lengths:
            right = right_count(model, questions(name, length, count, seed))
            low, high = interval(right, count)
            cells.append(f"{100 * right / count:.0f} ({100 * low:.0f}-{100 * high:.0f})")
        lines.append(f"| {title} (`{name}`) | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def looks(model: Llama, samples: list[tasks.Sample]) -> Tensor:
    """Mean attention [L, H] on the word to say next, where the asked statements have it.

    Mean over all words of the answers that stand in the statements asked for.
    """
    masses = []
    for sample in samples:
        ids = sample.prompt_ids + sample.answer_ids
        caches, _ = evaluate.prefill(model, ids)
        attention = torch.stack([cache.attention for cache in caches])
        inside = [at for start, stop in sample.needles for at in range(start, stop)]
        for step, word in enumerate(sample.answer_ids):
            places = [at for at in inside if ids[at] == word]
            if places and not (sample.task in ("vt", "hop") and step == 0):
                row = len(sample.prompt_ids) - 1 + step
                masses.append(attention[:, :, row, places].sum(-1))
    return torch.stack(masses).mean(0)


def looks_report(model: Llama, length: int, count: int, seed: int = 0) -> str:
    """A Markdown table: by task and layer, the largest of the heads' attentions on the word."""
    layers = range(model.config.num_hidden_layers)
    lines = ["| task | " + " | ".join(f"layer {i}" for i in layers) + " |"]
    lines.append("|---|" + "---:|" * len(layers))
    for name in LOOKED_AT:
        table = looks(model, questions(name, length, count, seed))
        lines.append(f"| `{name}` | " + " | ".join(f"{x:.2f}" for x in table.amax(1)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = evaluate.arguments(__doc__, MODEL, LENGTHS)
    parser.add_argument("--looks", type=int, help="prompt length of the table of attentions")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = export.read(options.model)
    print("Right answers in percent (95 % interval), by prompt length\n")
    print(report(model, tuple(options.lengths), options.count, options.seed))
    if options.looks:
        print(f"\nAttention on the word to say next, {options.looks} tokens\n")
        print(looks_report(model, options.looks, 20, options.seed))


if __name__ == "__main__":
    main()
