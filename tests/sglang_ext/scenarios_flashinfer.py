"""Scenarios for `test_flashinfer.py`: `python scenarios_flashinfer.py NAME OUT.json MODEL '{...}'`.

Each runs one real scheduler (see in_process.py) with SGLang's own backend for FlashInfer, whose
wrappers compute in torch (flashinfer_stand_in.py), and writes its observations as JSON, on which
the tests make assertions.
"""

from __future__ import annotations

import bisect
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import flashinfer_stand_in as stand_in
import torch
from flashinfer_stand_in import BatchDecodeWithPagedKVCacheWrapper as Wrapper
from flashinfer_stand_in import Tape
from in_process import Driver
from scenarios_propagate import prompt, start

SIZES = (1, 2, 4, 8)  # batch sizes of graphs


def answers(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Answers to prompts served together, and FlashInfer's plans at each decode step.

    Free slots hold NaN before each policy's prompts. `graphs`: decode attention runs as in graphs.
    """
    stand_in.install()
    policies, lengths = flags.pop("policies"), flags.pop("lengths")
    output, graphs = flags.pop("output"), flags.pop("graphs", False)
    driver = start(model, policies, {"attention_backend": "flashinfer", **flags})
    steps = _watch(driver)
    replays = _Graphs(driver) if graphs else None
    found: dict[str, Any] = {}
    for policy in policies:
        name, steps[:] = Path(policy).stem, []
        driver.poison()
        driver.send(f"{name} none", prompt(40, 99), policy="none", max_new_tokens=output)
        for i, length in enumerate(lengths):
            # Each ends at a different step.
            more = {"policy": name, "max_new_tokens": output + 3 * i}
            driver.send(f"{name} {i}", prompt(length, i), **more)
        driver.finish()
        found[name] = {
            "answers": [
                (each.tokens, {k: v for k, v in each.facts.items() if k != "compression_seconds"})
                for rid, each in driver.answers.items()
                if rid.startswith(f"{name} ") and each.facts
            ],
            "tokens": [
                each.tokens for rid, each in driver.answers.items() if rid.startswith(f"{name} ")
            ],
            "steps": list(steps),
        }
        driver.flush()
    counted = {} if replays is None else replays.counted
    return {"policies": found, "replays": counted, **driver.left_over()}


def _watch(driver: Driver) -> list[dict[str, Any]]:
    """Notes of each decode forward layout versions of its rows, plans of private pages and tails.

    `ghosts`: number of tokens in SGLang's plans beyond those read in ordinary slots.
    """
    from kvpolicy.sglang_ext.runtime import Runtime

    steps: list[dict[str, Any]] = []
    forward = Runtime.forward
    kv_heads = driver.store.arena.kv_heads

    def noting(self, run, batch):
        Wrapper.plans.clear()
        made = forward(self, run, batch)
        if batch.forward_mode.is_decode():
            page = [each for each in Wrapper.plans if each._shape[1] == 1 and kv_heads > 1]
            tails = [each for each in Wrapper.plans if each not in page]
            tables = self.services.tables
            rows = [req.kv.req_pool_idx for req in batch.reqs]
            lengths = batch.seq_lens_cpu.tolist()
            starts = tables.tables.tail_start[rows].tolist()
            planned = [sum(each._planned()[: len(rows)]) for each in tails]
            steps.append(
                {
                    "versions": [tables.version(row) for row in rows],
                    "private": len(page),
                    "tails": len(tails),
                    "ghosts": [number - sum(lengths) + sum(starts) for number in planned],
                }
            )
        return made

    Runtime.forward = noting
    return steps


class _Graphs:
    """Decode attention as in SGLang's graph runner: captured by batch size, and replayed.

    Only attention is captured, with a graph per layer; the rest runs eagerly.
    """

    def __init__(self, driver: Driver) -> None:
        from kvpolicy.sglang_ext.attention import graphs
        from sglang.srt.model_executor.runner_utils import capture_mode

        self.runner = driver.scheduler.tp_worker.model_runner
        self.backend = backend = self.runner.attn_backend
        self.counted = {"replayed": 0, "others": 0}
        (self.services,) = {
            cell.cell_contents
            for cell in type(backend).forward_extend.__closure__
            if type(cell.cell_contents).__name__ == "Services"
        }
        self.graphs, self.variants = graphs, graphs.GraphVariants(self.services)
        assert self.variants.capture_labels == (graphs.COMPRESSED, graphs.PAGES, graphs.PLAIN)
        self.eager = backend.init_forward_metadata, backend.forward_decode
        self.layers = {
            m.layer_id: m
            for m in self.runner.model.modules()
            if type(m).__name__ == "RadixAttention"
        }
        self.captured: dict[tuple[int, int], tuple] = {}
        most = max(SIZES)
        self.rows, self.lengths = (
            torch.zeros(most, dtype=torch.int64),
            torch.ones(most, dtype=torch.int64),
        )
        backend.init_cuda_graph_state(most, most)
        for size in reversed(SIZES):
            for label in self.variants.capture_labels:
                capture_mode._set_capture_attention_variant(label)
                self._capture(size, label)
        capture_mode._set_capture_attention_variant(None)
        backend.init_forward_metadata = self._plan
        backend.forward_decode = self._decode
        self.replaying: int | None = None

    def _view(self, size: int, **more: Any) -> SimpleNamespace:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        rows, lengths = self.rows[:size], self.lengths[:size]
        view = SimpleNamespace(
            batch_size=size, forward_mode=ForwardMode.DECODE, req_pool_indices=rows,
            seq_lens=lengths, seq_lens_cpu=lengths.clone(), seq_lens_sum=int(lengths.sum()),
            encoder_lens=None, spec_info=None, out_cache_loc=torch.zeros(size, dtype=torch.int64),
            positions=lengths, kv_loc_plan=None,
        )  # fmt: skip
        for name, value in more.items():
            setattr(view, name, value)
        return view

    def _capture(self, size: int, label: str) -> None:
        self.rows.zero_()
        self.lengths.fill_(1)
        view = self._view(size)
        self.runner.kv_index_translator.bind_own_plan(view)
        self.backend.init_forward_metadata_out_graph(view, in_capture=True)
        if label != self.graphs.PAGES:
            return
        for number, layer in self.layers.items():
            q = torch.zeros(size, layer.tp_q_head_num * layer.qk_head_dim)
            with Tape() as tape:
                out = self.eager[1](q, None, None, layer, view)
            self.captured[size, number] = q, out, tape

    def _plan(self, batch: Any) -> None:
        self.replaying = None
        if not batch.forward_mode.is_decode():
            return self.eager[0](batch)
        if self.variants.select(batch) != self.graphs.PAGES:
            self.counted["others"] += 1
            return self.eager[0](batch)
        number = batch.batch_size
        self.replaying = size = SIZES[bisect.bisect_left(SIZES, number)]
        self.counted["replayed"] += 1
        self.rows.zero_()[:number] = batch.req_pool_indices
        self.lengths.fill_(1)[:number] = batch.seq_lens
        view = self._view(size, kv_loc_plan=batch.kv_loc_plan)
        self.runner.kv_index_translator.bind_own_plan(view)
        return self.backend.init_forward_metadata_out_graph(view)

    def _decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True):
        from kvpolicy.sglang_ext.face import compat

        if self.replaying is None:
            return self.eager[1](q, k, v, layer, batch, save_kv_cache)
        compat.save_kv(self.backend, layer, batch, k, v)
        static, out, tape = self.captured[self.replaying, layer.layer_id]
        static.zero_()[: len(q)] = q.view(len(q), -1)
        tape.replay()
        if self.graphs.notes_queries(self.services):
            heads = q.view(len(q), layer.tp_q_head_num, -1)
            self.services.queries.write(layer, heads, self.services.arena.span)
        return out[: len(q)].clone().view(q.shape)


if __name__ == "__main__":
    name, out, model, flags = sys.argv[1:]
    found = {"answers": answers}[name](model, json.loads(flags))
    Path(out).write_text(json.dumps(found))
    os._exit(0)  # the scheduler's threads would keep the process alive
