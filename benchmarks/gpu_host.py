"""What a decode step asks of the host in a server: torch's profiler over steps of full batches.

    python benchmarks/gpu_host.py --out FOLDER
    python benchmarks/gpu_host.py --toy --out FOLDER     the embedded model on a CPU

Stock SGLang and a server with policies start at once, which a GPU has to hold, and are asked one
at a time. Per step: microseconds in which
the scheduler does not wait for the device, launches (a replayed graph is one), and the share of
the time in which the device has nothing to do; how many kernels Triton compiled once the server was
ready. The profiler itself takes time, of both servers.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import checkout  # noqa: F401
import numpy as np
import report
from gpu_checks import compiled
from kvpolicy.evaluation.serving import Server, serve, started, together
from serving_report import STOCK
from serving_setup import EMBEDDED, NO_PLUGIN, Model, flags_of, gpu_flags, model_of
from shipped import settings
from tqdm import tqdm

SHARE = 0.125  # share of the prompt that policies keep
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync")
Interval = tuple[float, float]


def covered(intervals: Iterable[Interval]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(intervals):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def of_trace(path: Path, steps: int) -> dict[str, float | None]:
    """Figures per step of a trace that torch's profiler wrote.

    Raises:
        SystemExit: nothing was profiled.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]

    def of(*kinds: str) -> list[dict]:
        return [event for event in events if event.get("cat") in kinds]

    def spans(chosen: list[dict]) -> list[Interval]:
        return [(event["ts"], event["ts"] + event["dur"]) for event in chosen]

    host, calls = of("cpu_op"), of("cuda_runtime", "cuda_driver")
    if not host + calls:
        raise SystemExit(f"gpu_host: {path.name} has no operations")
    ends = spans(host + calls)
    window = max(last for _, last in ends) - min(first for first, _ in ends)
    waits = [event for event in calls if "Synchronize" in event["name"]]
    device = spans(of("kernel", "gpu_memcpy", "gpu_memset"))
    return {
        "host_us": (window - covered(spans(waits))) / steps,
        "step_us": window / steps,
        "launches": sum(event["name"].startswith(LAUNCHES) for event in calls) / steps,
        "idle": 1 - covered(device) / window if device else None,
    }


def profiled(server: Server, prompts: list, policy: str | None, options, folder: Path) -> dict:
    """Figures per step while all prompts decode together."""
    server.flush()
    seen = len(server.log_text())

    def ask(prompt: list[int]) -> dict:
        return server.generate(
            input_ids=prompt, policy=policy, max_new_tokens=options.new, ignore_eos=True
        )

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(ask, prompt) for prompt in prompts]
        while f"Decode batch, #running-req: {len(prompts)}," not in server.log_text()[seen:]:
            if any(answer.done() for answer in answers):
                raise SystemExit(f"gpu_host: {len(prompts)} requests never decoded together")
            time.sleep(0.02)
        kinds = ["CPU"] if options.toy else ["CPU", "GPU"]
        asked = {"output_dir": str(folder), "num_steps": options.steps, "activities": kinds}
        server.post("/start_profile", {**asked, "with_stack": False}).raise_for_status()
        for answer in answers:
            answer.result()
    until = time.monotonic() + 60
    while not (found := list(folder.rglob("*.trace.json.gz"))):
        if time.monotonic() > until:
            raise SystemExit("gpu_host: no trace within a minute; is --new large enough?")
        time.sleep(0.1)
    _settled(found[0])
    return of_trace(found[0], options.steps)


def _settled(path: Path) -> None:
    """Waits until a file no longer grows."""
    before = -1
    while (size := path.stat().st_size) != before:
        before = size
        time.sleep(0.5)


def run(options: argparse.Namespace, model: Model) -> dict:
    """Starts both servers and profiles every batch and policy."""
    names = options.policies.split(",")
    given = [f"{n}.{value}" for n in names for value in settings(SHARE, options.prompt)[n]]
    files = [report.ROOT / "policies" / f"{name}.yaml" for name in names]
    batches = [int(n) for n in options.batches.split(",")]
    flags: dict[str, object] = {
        "skip_tokenizer_init": True,
        "decode_log_interval": 1,
        "max_total_tokens": int((max(batches) + 1) * (options.prompt + options.new)),
    }
    if not options.toy:
        flags |= gpu_flags(max(batches))
    flags |= model.flags | flags_of(options.server_args)
    facts: dict = {
        "command": report.command(),
        "machine": report.machine("sglang", "torch", "triton", "flashinfer-python"),
        "model": model.words, "steps": options.steps, "prompt": options.prompt,
        "rows": [], "compiled_after_ready": {STOCK: 0, "policies": 0},
    }  # fmt: skip
    rng = np.random.default_rng(0)
    starting = {
        STOCK: serve(model.folder, env=NO_PLUGIN, progress=True, **flags),
        "policies": serve(model.folder, files, given, progress=True, **flags),
    }
    asked = {STOCK: [None], "policies": ["none", *names]}
    with together(starting) as servers:
        cells = [
            (label, batch, policy)
            for batch in batches
            for label, chosen in asked.items()
            for policy in chosen
        ]
        for label, batch, policy in tqdm(cells, desc="batches"):
            prompts = rng.integers(20, model.highest, (batch, options.prompt)).tolist()
            before = compiled()
            with tempfile.TemporaryDirectory() as folder:
                made = profiled(started(servers[label]), prompts, policy, options, Path(folder))
            facts["rows"].append({"policy": policy or label, "batch": batch, **made})
            facts["compiled_after_ready"][label] += len(compiled() - before)
            report.write_json(options.out / "host.json", facts)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--toy", action="store_true", help="the embedded model; no GPU needed")
    parser.add_argument("--model", help="as of serving.py")
    parser.add_argument("--policies", default="snapkv,h2o")
    parser.add_argument("--batches", default="1,32,128", help="requests decoded together")
    parser.add_argument("--prompt", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--steps", type=int, default=64, help="that are profiled")
    parser.add_argument("--new", type=int, default=512, help="tokens generated; more than steps")
    parser.add_argument("--server-args", default="", help="further options of both servers")
    parser.add_argument("--out", type=Path, required=True, help="folder for host.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        name = options.model or (EMBEDDED if options.toy else "llama-3.1-8b")
        run(options, model_of(name, Path(folder)))


if __name__ == "__main__":
    main()
