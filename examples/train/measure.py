"""Accuracy of an embedded model on all tasks, with intervals, and where each layer looks.

    python examples/train/measure.py                            # task x length, model-small
    python examples/train/measure.py --looks 512                # also the attention per layer
    python examples/train/measure.py --left-out 256             # also without layers' attention

Answers are generated greedily until <end> and judged by `more_tasks.right`. The intervals are
Wilson's, 95 %. For lists in any order, the mean of `more_tasks.share` follows.

Letters: L layers, H query heads, G KV heads, N cached tokens, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

import evaluate
import export
import more_tasks
import numpy as np
import tasks
import torch
import torch.nn.functional as F
from evaluate import BATCH_TOKENS
from kvpolicy.evaluation.questions import embedded
from kvpolicy.evaluation.reporting.statistics import of_share
from model import Llama, rotary_tables
from torch import Tensor

MODEL = Path(__file__).parents[1] / "model-small"
LENGTHS = (128, 256, 512, 1024, 2048)
LOOKED_AT = ("niah", "mk", "mq", "mv", "vt", "kv")
LEFT_OUT_OF = ("mk", "vt", "kv", "mv", "cwe")


def questions(task: str, length: int, count: int, seed: int) -> list[tasks.Sample]:
    """`count` samples; sample i depends only on the seed and i."""
    return [more_tasks.sample(task, length, np.random.default_rng([seed, i])) for i in range(count)]


@torch.no_grad()
def generate(model: Llama, prompts: Tensor, count: int) -> Tensor:
    """Greedy tokens [B, count] after prompts [B, N].

    Fewer than `count` if all sequences have reached <end>.
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
        ended |= new == embedded.END
    return torch.cat(out, 1)


def answers(model: Llama, samples: list[tasks.Sample]) -> list[list[int]]:
    """Greedy answers until <end>, at most 4 tokens longer than the longest right answer."""
    said: list[list[int]] = []
    longest = max(len(sample.answer_ids) for sample in samples) + 4
    size = max(1, BATCH_TOKENS // len(samples[0].prompt_ids))
    for first in range(0, len(samples), size):
        prompts = torch.tensor([s.prompt_ids for s in samples[first : first + size]])
        for row in generate(model, prompts, longest).tolist():
            said.append(row[: row.index(embedded.END)] if embedded.END in row else row)
    return said


def right_count(model: Llama, samples: list[tasks.Sample]) -> int:
    """Number of answers that are right and then stop; prompts of one length."""
    said = answers(model, samples)
    return sum(more_tasks.right(s, a) for s, a in zip(samples, said, strict=True))


def cell(model: Llama, samples: list[tasks.Sample]) -> str:
    """Right answers in percent, their interval, and for lists the share of items named."""
    said = answers(model, samples)
    right = sum(more_tasks.right(s, a) for s, a in zip(samples, said, strict=True))
    mean, low, high = of_share(right / len(samples), len(samples))
    text = f"{100 * mean:.0f} ({100 * low:.0f}-{100 * high:.0f})"
    if samples[0].task not in more_tasks.ANY_ORDER:
        return text
    named = np.mean([more_tasks.share(s, a) for s, a in zip(samples, said, strict=True)])
    return f"{text}; {100 * named:.0f}"


def report(model: Llama, lengths: tuple[int, ...], count: int, seed: int = 0) -> str:
    """A Markdown table: right answers in percent, and their interval, by task and length."""
    lines = ["| task | " + " | ".join(map(str, lengths)) + " |", "|---|" + "---:|" * len(lengths)]
    for name, title in more_tasks.TITLES.items():
        cells = [cell(model, questions(name, length, count, seed)) for length in lengths]
        lines.append(f"| {title} (`{name}`) | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def without(model: Llama, layers: Iterable[int]) -> Llama:
    """A copy in which the attention of `layers` adds nothing."""
    changed = copy.deepcopy(model)
    for index in layers:
        torch.nn.init.zeros_(changed.model.layers[index].self_attn.o_proj.weight)
    return changed


def left_out_report(model: Llama, length: int, count: int, seed: int = 0) -> str:
    """A Markdown table: right answers in percent without the attention of some layers."""
    last = model.config.num_hidden_layers - 1
    sets = [(), *((i,) for i in range(1, last + 1)), (1, 2), (1, 2, 3), (last - 1, last)]
    lines = ["| left out | " + " | ".join(f"`{name}`" for name in LEFT_OUT_OF) + " |"]
    lines.append("|---|" + "---:|" * len(LEFT_OUT_OF))
    for layers in sets:
        changed = without(model, layers)
        rights = [right_count(changed, questions(n, length, count, seed)) for n in LEFT_OUT_OF]
        cells = " | ".join(f"{100 * right / count:.0f}" for right in rights)
        lines.append(f"| {', '.join(map(str, layers)) or 'none'} | {cells} |")
    return "\n".join(lines)


def looks(model: Llama, samples: list[tasks.Sample]) -> Tensor:
    """Mean attention [L, H] on the next word of the answer, at its places in the asked statements.

    The mean is over all words of the answers that occur in these statements.
    """
    masses = []
    for sample in samples:
        ids = sample.prompt_ids + sample.answer_ids
        caches, _ = evaluate.prefill(model, ids)
        attention = torch.stack([cache.attention for cache in caches])
        inside = [at for start, stop in sample.needles for at in range(start, stop)]
        for step, word in enumerate(sample.answer_ids):
            places = [at for at in inside if ids[at] == word]
            if places and not (sample.task == "vt" and step == 0):
                row = len(sample.prompt_ids) - 1 + step
                masses.append(attention[:, :, row, places].sum(-1))
    return torch.stack(masses).mean(0)


def looks_report(model: Llama, length: int, count: int, seed: int = 0) -> str:
    """A Markdown table: the largest attention of a head on the next word, by task and layer."""
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
    parser.add_argument("--left-out", type=int, help="prompt length of the table without layers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = export.read(options.model)
    print("Right answers in percent (95 % interval), by prompt length\n")
    print(report(model, tuple(options.lengths), options.count, options.seed))
    if options.looks:
        print(f"\nAttention on the word to say next, {options.looks} tokens\n")
        print(looks_report(model, options.looks, 20, options.seed))
    if options.left_out:
        print(f"\nRight answers in percent without layers' attention, {options.left_out} tokens\n")
        print(left_out_report(model, options.left_out, 40, options.seed))


if __name__ == "__main__":
    main()
