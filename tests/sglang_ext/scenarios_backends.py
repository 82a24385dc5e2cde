"""Scenarios for `test_backends.py`: `python scenarios_backends.py NAME OUT.json MODEL '{...}'`.

Each runs one real scheduler (see in_process.py) on a checkpoint with random weights and writes its
observations as JSON, on which the tests make assertions.
"""

from __future__ import annotations

import json
import os
import random
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import scenarios
import torch
from host_waits import HostWaits

POLICIES = {
    "snapkv": ["capacity=24", "window=8"],
    "adakv": ["capacity=20", "window=8"],
    "streamingllm": ["start=2", "window=18"],
    "h2o": ["heavy=12", "window=10"],  # reads the queries of every step
    "minicache": ["start=0"],
}
scenarios.POLICIES = POLICIES
scenarios.SETTINGS = [f"{name}.{value}" for name, values in POLICIES.items() for value in values]


def answers(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Tokens and logits of requests that join and leave batches, and of prefix hits."""
    driver = scenarios.start(model, flags)
    logits = _note_logits(driver)
    rnd = random.Random(11)
    shared = scenarios.prompt(rnd, 40)
    requests = [
        ("plain", "none", scenarios.prompt(rnd, 45), 6),
        ("snapkv", "snapkv", shared + scenarios.prompt(rnd, 21), 7),
        ("adakv", "adakv", scenarios.prompt(rnd, 50), 7),
        ("minicache", "minicache", scenarios.prompt(rnd, 31), 4),
        ("h2o", "h2o", scenarios.prompt(rnd, 30), 5),
        ("streamingllm", "streamingllm", scenarios.prompt(rnd, 33), 10),
    ]
    for rid, policy, tokens, output in requests:
        driver.send(rid, tokens, policy=policy, max_new_tokens=output)
        driver.step()
    driver.finish()
    hit = shared + scenarios.prompt(rnd, 9)
    driver.send("hit", hit, policy="snapkv", max_new_tokens=3)
    driver.send("plain hit", hit, policy="none", max_new_tokens=3)
    driver.finish()
    found = {rid: vars(answer) | {"logits": logits[rid]} for rid, answer in driver.answers.items()}
    return {"requests": found, "mixed": driver.mixed, **driver.left_over()}


def _note_logits(driver: Any) -> dict[str, dict[int, list[float]]]:
    """Notes the logits of every forward: request -> its length -> logits."""
    worker, seen = driver.scheduler.tp_worker, {}
    original = worker.forward_batch_generation

    def noting(batch: Any, *args: Any, **options: Any) -> Any:
        result = original(batch, *args, **options)
        rows = zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True)
        for (request, length), values in zip(
            rows, result.logits_output.next_token_logits.tolist(), strict=True
        ):
            seen.setdefault(request.rid, {})[length] = values
        return result

    worker.forward_batch_generation = noting
    return seen


def steps(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Decode forwards of several batches: where the host waits, graphs, and streams."""
    driver = scenarios.start(model, flags)
    seen = {"steps": _note_steps(driver), "slots": _note_streams(driver)}
    rnd = random.Random(12)
    for batch in (
        ["none", "none"],
        ["none", "snapkv", "adakv"],
        ["none", "streamingllm"],
        ["h2o", "snapkv"],
        ["minicache", "none"],
    ):
        for i, policy in enumerate(batch):
            rid, tokens = f"{'+'.join(batch)} {i}", scenarios.prompt(rnd, 28)
            driver.send(rid, tokens, policy=policy, max_new_tokens=4)
        driver.finish()
    for step in seen["steps"]:
        if "captured_error" in step:
            step["captured_error"] = float(step["captured_error"])
    return seen | driver.left_over()


def _note_steps(driver: Any) -> list[dict[str, Any]]:
    """Notes of each decode forward its requests, waits of the host, and its graph if any."""
    from kvpolicy.sglang_ext.face import compat
    from kvpolicy.sglang_ext.runtime import Runtime

    seen: list[dict[str, Any]] = []
    forward, runner = Runtime.forward, driver.scheduler.tp_worker.model_runner
    compute, graphs = runner.forward, _graph_runner(runner)
    if graphs is not None:
        runner.attn_backend.init_cuda_graph_state(8, 8)
    backend = type(compat.backends_in_use(runner)[-1])
    decode, runtimes = backend.forward_decode, []

    def noting_forward(self: Any, run: Any, batch: Any) -> Any:
        if not batch.forward_mode.is_decode():
            return forward(self, run, batch)
        batch.seq_lens_cpu.made_on_the_host = True
        names = sorted(request.rid for request in batch.reqs)
        seen.append({"requests": names})
        runtimes[:] = [self]
        with HostWaits() as waits:
            result = forward(self, run, batch)
        seen[-1]["waits"] = waits.found
        return result

    def noting_compute(batch: Any, *args: Any, **options: Any) -> Any:
        if graphs is not None and batch.forward_mode.is_decode():
            seen[-1] |= {
                "replays": graphs.can_run_graph(batch),
                "graph": graphs._resolve_attention_variant(batch, batch.batch_size),
                "reads_end": runner.attn_backend.shared_read_ends(batch.forward_mode).name,
            }
        return compute(batch, *args, **options)

    def noting_decode(self: Any, *args: Any, **options: Any) -> Any:
        out = decode(self, *args, **options)
        # One layer is enough: layer 2, which MiniCache stores in a pair with layer 3.
        if args[3].layer_id == 2 and seen[-1]["graph"] == "kv_policy_compressed":
            captured = _as_captured(runtimes[0].services, partial(decode, self), *args)
            seen[-1]["captured_error"] = (captured[: len(out)] - out).abs().max()
        return out

    Runtime.forward, runner.forward = noting_forward, noting_compute
    backend.forward_decode = noting_decode
    return seen


def _as_captured(services: Any, decode: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any) -> Any:
    """Result of a graph for a batch with two rows of padding."""
    from sglang.srt.model_executor.runner_utils.capture_mode import _set_capture_attention_variant

    def padded(tensor: torch.Tensor, value: int = 0) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_full((2, *tensor.shape[1:]), value)])

    names = ("req_pool_indices", "out_cache_loc")
    static = SimpleNamespace(**{name: padded(getattr(batch, name)) for name in names})
    static.seq_lens = padded(batch.seq_lens, 1)  # as SGLang's Triton backend fills them
    step, services.step = services.step, None
    _set_capture_attention_variant("kv_policy_compressed")
    try:
        return decode(padded(q), padded(k), padded(v), layer, static)
    finally:
        _set_capture_attention_variant(None)
        services.step = step


def _graph_runner(runner: Any) -> Any:
    """SGLang's runner of decode graphs, without captured graphs; None with torch_native."""
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as module

    if runner.attn_backend.decode_attention_backend_str == "torch_native":
        return None
    graphs = object.__new__(module.DecodeCudaGraphRunner)
    variants = module.create_attention_graph_variants(runner.model_config.hf_config)
    no = (
        "ragged_verify_mode", "require_mlp_tp_gather", "require_mlp_sync", "disable_padding",
        "record_nolora_graph", "enable_pdmux", "is_encoder_decoder", "enable_two_batch_overlap",
    )  # fmt: skip
    vars(graphs).update(dict.fromkeys(no, False))
    graphs.attention_graph_variants, graphs.model_runner, graphs.max_bs = variants, runner, 8
    return graphs


def _note_streams(driver: Any) -> dict[str, int]:
    """Counts allocations and frees of slots: all, off the scheduler's stream, in forwards."""
    scheduler, seen = driver.scheduler, {"changes": 0, "elsewhere": 0, "in_forwards": 0}
    allocator = scheduler.token_to_kv_pool_allocator

    def noting(method: Any) -> Any:
        def run(*args: Any) -> Any:
            current = scheduler.device_module.current_stream()
            seen["changes"] += 1
            seen["elsewhere"] += current is not scheduler.schedule_stream
            seen["in_forwards"] += _in_forward()
            return method(*args)

        return run

    allocator.alloc, allocator.free = noting(allocator.alloc), noting(allocator.free)
    return seen


def memory(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Memory beside a pool of `budget` bytes, estimated and in use, as if graphs were captured.

    The largest captured batch has `captured` requests.
    """
    budget, captured = flags.pop("budget"), flags.pop("captured")
    from kvpolicy.sglang_ext.face import compat
    from kvpolicy.sglang_ext.serving import reserved
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    KVCacheConfigurator._profile_available_bytes = lambda self, before: budget
    compat.captured_requests = lambda options: captured
    computed, compute = [], reserved.bytes_by_part
    reserved.bytes_by_part = lambda *given: (
        computed.append((given[-1], compute(*given))) or computed[-1][1]
    )
    driver = scenarios.start(model, flags)
    runner = driver.scheduler.tp_worker.model_runner
    backend, store = runner.attn_backend, driver.store
    backend.init_cuda_graph_state(captured, captured)
    reader = _closure(backend.init_cuda_graph_state, "tables")
    held = {
        "tables": reader._services.tables.tables.bytes,
        "decode attention": reader.workspace.nbytes,
        "queries": reader._services.queries.captured.nbytes,
    }
    return {
        "computed": computed,
        "held": held,
        "pool": store.arena.storage.nbytes,
        "slot": store.arena.slot_bytes,
        "tokens": driver.scheduler.max_total_num_tokens,
    }


def _closure(function: Any, name: str) -> Any:
    """A variable in the closure of a method."""
    code = function.__func__.__code__
    return function.__func__.__closure__[code.co_freevars.index(name)].cell_contents


def _in_forward() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_code.co_filename.endswith("runtime.py"):
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    name, out, model, flags = sys.argv[1:]
    found = {"answers": answers, "steps": steps, "memory": memory}[name](model, json.loads(flags))
    Path(out).write_text(json.dumps(found))
    os._exit(0)  # the scheduler's threads would keep the process alive
