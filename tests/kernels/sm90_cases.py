"""What is compiled for an H200: every kernel on the shapes of Llama-3.1-8B, as a server calls it.

Run by test_sm90.py in a process without Triton's interpreter; prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch
from kvpolicy.kernels.compact_layers_triton import compact_layers
from kvpolicy.kernels.decode_attention_triton import decode_attention
from kvpolicy.kernels.select_triton import top
from kvpolicy.kernels.tables import Tables
from sm90 import compiled

L, H, G, D = 32, 32, 8, 128
N, B, SLOTS = 32768, 16, 1 << 19


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def ids(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return empty(*shape, dtype=dtype)


def selection(rows: int, size: int) -> None:
    top(ids(rows, size, dtype=torch.int32), ids(rows, 1))


def compaction() -> None:
    kept = empty(L, G, N, dtype=torch.bool)
    first = ids(L, G, dtype=torch.int32)
    compact_layers(empty(L, 2, SLOTS, G, D), ids(N), kept, ids(2048, dtype=torch.int32), first)


def decode(dtype: torch.dtype = torch.bfloat16, size: int = D, group: int = 4) -> None:
    tables = Tables.empty(4097, L, G, SLOTS, "cuda")
    rows, lengths = ids(B, dtype=torch.int32), ids(B, dtype=torch.int32)
    storage = empty(L, 2, SLOTS, G, size, dtype=dtype)
    q = empty(B, G * group, size, dtype=dtype)
    table = ids(4097, 131076, dtype=torch.int32)
    decode_attention(q, storage, tables, rows, lengths, table, layer=3, scale=0.1)


CASES: dict[str, Callable[[], object]] = {
    "selection per head": lambda: selection(G, N),
    "selection in a short row": lambda: selection(L * G, 4096),
    "compaction": compaction,
    "decode attention": decode,
    "decode attention, fp16, D 64, no groups": lambda: decode(torch.float16, 64, 1),
    "decode attention, bf16, D 80, groups of 8": lambda: decode(size=80, group=8),
    "decode attention, D 256": lambda: decode(size=256, group=2),
}


def main() -> None:
    json.dump(
        {name: [asdict(x) for x in compiled(call)] for name, call in CASES.items()}, sys.stdout
    )


if __name__ == "__main__":
    main()
