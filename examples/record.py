"""Record the queries, keys and values of one prompt, for `kvpolicy run`.

    python examples/record.py --prompt prompt.txt --out prompt.npz
    kvpolicy run policies/lava.yaml --tensors prompt.npz --set capacity=64 --out kept.json

Works with every checkpoint whose attention goes through transformers' attention interface.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ROOT = Path(__file__).parents[1]


def record(model_path: str, text: str) -> dict[str, np.ndarray]:
    """Queries, keys and values of a prompt in every attention layer.

    Returns:
        q [L, H, N, D], k and v [L, G, N, D], float32, after RoPE.
    """
    layers: dict[str, list[np.ndarray]] = {"q": [], "k": [], "v": []}

    def attend(module, query, key, value, *args, **options):
        for name, tensor in (("q", query), ("k", key), ("v", value)):
            layers[name].append(tensor[0].float().cpu().numpy().copy())
        return sdpa_attention_forward(module, query, key, value, *args, **options)

    AttentionInterface.register("record", attend)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="record").eval()
    with torch.no_grad():
        model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False))
    return {name: np.stack(tensors) for name, tensors in layers.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default=str(ROOT / "examples" / "model-tiny"))
    parser.add_argument("--prompt", required=True, help="a text file, or - for standard input")
    parser.add_argument("--out", required=True, help="the .npz file to write")
    options = parser.parse_args()
    try:
        text = sys.stdin.read() if options.prompt == "-" else Path(options.prompt).read_text()
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--prompt {options.prompt}: {error}")
    try:
        Path(options.out).absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out}: {error}")
    tensors = record(options.model, text)
    np.savez(options.out, **tensors)
    layers, heads, tokens, _ = tensors["q"].shape
    print(f"{options.out}: {layers} layers, {heads} query heads, {tokens} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
