"""What propagation saves of the prefill: FastKV beside stock SGLang, and beside the operations.

From the middle layer on only a share of the prompt's tokens is computed. Both servers run in this
run and take turns; the model has random weights and is large enough that arithmetic, not Python,
takes the time. The count of operations is of matrix products and attention, scoring included.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import report
from kvpolicy.evaluation.serving import Server, serve
from tqdm import tqdm


@dataclass(frozen=True)
class Size:
    """A Llama: L layers, C channels, I inner channels, H query heads, G KV heads, D head size."""

    layers: int = 8
    channels: int = 768
    inner: int = 2048
    heads: int = 12
    kv_heads: int = 4
    head_dim: int = 64

    def config(self) -> dict:
        """config.json of a checkpoint without weights."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.channels,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": 512,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "torch_dtype": "float32",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
        }

    def operations(self, tokens: int) -> float:
        """Operations of one layer's forward over `tokens` tokens, causal attention included."""
        wide = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        linear = 2 * self.channels * (wide + 3 * self.inner)
        return tokens * linear + 2 * tokens * tokens * self.heads * self.head_dim

    def scoring(self, tokens: int, window: int) -> float:
        """Operations of one layer's window attention."""
        return 2 * tokens * window * self.heads * self.head_dim


def counted(size: Size, tokens: int, chosen: int, last: int, window: int) -> float:
    """Operations of the propagated prefill / operations of the full one."""
    layers, deeper = size.layers, size.layers - last - 1
    part = (last + 1) * size.operations(tokens) + deeper * size.operations(chosen)
    part += (last + 1) * size.scoring(tokens, window) + deeper * size.scoring(chosen, window)
    return part / (layers * size.operations(tokens))


def prefill(server: Server, prompt: list[int], policy: str | None = None) -> tuple[float, dict]:
    """Seconds from the first forward's start to the first token, and the answer's facts."""
    meta = server.generate(input_ids=prompt, policy=policy, max_new_tokens=2)["meta_info"]
    return meta["prefill_finished_time"] - meta["forward_entry_time"], meta


def compare(stock: Server, ours: Server, options) -> dict[str, list[float]]:
    """Seconds of each server and policy, in rotating order; the first turn warms up."""
    rng = np.random.default_rng(options.seed)
    chosen = int(options.rate * options.tokens)
    asked = [("stock", stock, None), ("none", ours, "none"), ("fastkv", ours, "fastkv")]
    seconds: dict[str, list[float]] = {name: [] for name, _, _ in asked}
    for turn in tqdm(range(options.rounds + 1), desc="rounds"):
        asked = [*asked[1:], asked[0]]
        for name, server, policy in asked:
            server.flush()
            prompt = rng.integers(20, 500, options.tokens).tolist()
            taken, meta = prefill(server, prompt, policy)
            went = meta["kv_policy"].get("propagated_tokens") if name == "fastkv" else chosen
            if went != chosen:
                raise SystemExit(f"propagation: {went} tokens went deeper, not {chosen}")
            if turn:
                seconds[name].append(taken)
    return seconds


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=2000, help="prompt tokens")
    parser.add_argument("--rate", type=float, default=0.2, help="share that goes deeper")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    size = Size(layers=options.layers)
    last = size.layers // 2 - 1
    window = 8
    settings = [f"tsp_layer={last}", f"tsp_rate={options.rate}", f"kv_rate={options.rate / 2}"]
    settings.append(f"window={window}")
    flags = {"skip_tokenizer_init": True, "load_format": "dummy", "enable_metrics": True}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(size.config()))
        policy = report.ROOT / "policies" / "fastkv.yaml"
        with serve(folder, **flags) as stock, serve(folder, [policy], settings, **flags) as ours:
            seconds = compare(stock, ours, options)
    count = counted(size, options.tokens, int(options.rate * options.tokens), last, window)
    rows, ratios = [], {}
    for name, label in (
        ("stock", "stock SGLang"),
        ("none", "the same server, no policy"),
        ("fastkv", f"fastkv: {options.rate:.0%} of the tokens after layer {last}"),
    ):
        ratios[name] = [a / b for a, b in zip(seconds[name], seconds["stock"], strict=True)]
        expected = f"{100 * count:.1f}" if name == "fastkv" else "100"
        spread = report.spread(ratios[name], 1, 100)
        rows.append([label, report.spread(seconds[name], 0, 1000), spread, expected])
    gap = 100 * abs(float(np.median(ratios["fastkv"])) - count)
    text = (
        f"{options.tokens} tokens, {size.layers} layers of {size.channels} channels, random "
        f"weights; median (min-max) of {options.rounds} rounds.\n\n"
        + report.table(["server", "prefill, ms", "of stock, %", "of the operations, %"], rows)
        + f"\n\nThe measured share is {gap:.1f} points from the count."
    )
    data = {"seconds": seconds, "counted": count}
    report.publish("propagation", "Prefill with propagation", text, data, options.save)


if __name__ == "__main__":
    main()
