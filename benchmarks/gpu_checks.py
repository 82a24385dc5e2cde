"""Whether a GPU machine and the kernels on it are in order, before anything is timed.

    python benchmarks/gpu_checks.py preflight --out FOLDER    versions, memory, copy and products
    python benchmarks/gpu_checks.py smoke --out FOLDER        each case of kernels.py in a process
    python benchmarks/gpu_checks.py numerics --out FOLDER     the kernels' tests, compiled

A CUDA fault ruins its whole process, so that each case of the smoke test has one of its own, first
in the model's head size, then small ones under compute-sanitizer, if it is here. What was found is
written after every case.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import checkout  # noqa: F401
import report

PACKAGES = (
    "torch", "triton", "sglang", "sglang-kernel", "flashinfer-python", "transformers", "numpy",
    "lark", "PyYAML", "requests", "tqdm", "matplotlib", "pytest", "pytest-xdist", "hypothesis",
)  # fmt: skip
KERNELS = str(report.ROOT / "benchmarks" / "kernels.py")
OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b")
# Tests that compute on the GPU. Tests that only compile for one are redundant here.
NUMERICS = (
    "tests/test_gpu.py", "tests/kernels", "tests/executions/test_generated.py",
    "tests/executions/test_generated_steps.py", "--ignore=tests/kernels/test_sm90.py",
)  # fmt: skip
ONE_FILE = ("tests/kernels/test_rotate.py",)


def compiled() -> set[str]:
    """Names in Triton's cache now: a folder for each kernel and its specializations."""
    folder = os.environ.get("TRITON_CACHE_DIR")
    place = Path(folder) if folder else Path.home() / ".triton" / "cache"
    return {path.name for path in place.iterdir()} if place.is_dir() else set()


def preflight(options: argparse.Namespace) -> None:
    """Versions, missing packages, memory, bytes copied and FLOP of products per second."""
    import torch
    from serving_setup import has_fa3
    from timing import Clock

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    facts: dict = {
        "machine": report.machine(*PACKAGES),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "memory": torch.cuda.mem_get_info() if gpu else None,
        "missing": [name for name, version in versions.items() if version is None],
        "fa3": has_fa3(),
        "tools": {name: shutil.which(name) for name in ("nvcc", "compute-sanitizer")},
    }
    report.write_json(options.out / "preflight.json", facts)
    clock = Clock(device, 0)
    facts["copy"] = clock.copy_bandwidth(1 << 20 if options.toy else 4 << 30)
    size = 256 if options.toy else 8192
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    x @ x
    best = min(clock.once(lambda: x @ x) for _ in range(10))
    facts["flops"] = 2 * size**3 / best
    report.write_json(options.out / "preflight.json", facts)


def words_of(label: str, sizes: list[str], sanitizer: str | None) -> list[str]:
    """The command of one case."""
    words = [sys.executable, KERNELS, *sizes, "--check", "--cases", label]
    if sanitizer is None:
        return words
    return [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", *words]


def alone(words: list[str], log: Path, until: float) -> tuple[str, list[str]]:
    """Runs a command until the monotonic time `until`; its outcome and last 40 lines."""
    # No caching allocator: the checker then knows the bounds of every tensor.
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if words[0] != sys.executable else {}
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **env},
        )  # fmt: skip
        try:
            status = process.wait(max(until - time.monotonic(), 0.1))
            state = "passed" if status == 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            state = "time limit"
    return state, log.read_text(errors="replace").splitlines()[-40:]


def labels(sizes: list[str], folder: Path) -> list[str]:
    """Labels of the cases at these sizes."""
    path = folder / "cases.txt"
    with path.open("w") as output:
        subprocess.run([sys.executable, KERNELS, *sizes, "--list"], stdout=output, check=True)
    return path.read_text(encoding="utf-8").splitlines()


def smoke(options: argparse.Namespace) -> None:
    """Runs every case; then small ones under the memory checker."""
    until = time.monotonic() + options.seconds
    small = ["--toy", "--lengths", "96", "--batches", "2"]
    sizes = small if options.toy else ["--lengths", "1024", "--batches", "2", "--layers", "2"]
    sanitizer = shutil.which("compute-sanitizer")
    facts: dict = {"checker": sanitizer, "cases": []}
    runs = [("as it is", sizes, None)]
    if sanitizer and not options.toy:
        runs.append(("memory checker", small, sanitizer))
    for kind, shape, checker in runs:
        listed = labels(shape, options.out)
        if options.toy:
            listed = [label for label in listed if label.split()[0] in ("compaction", "entropy")]

        def one(number: int, shape=shape, checker=checker, kind=kind, listed=listed) -> None:
            log = options.out / f"{kind}-{number}.log"
            state, lines = alone(words_of(listed[number], shape, checker), log, until)
            log.unlink()
            made = {"case": listed[number], "run": kind, "state": state}
            facts["cases"].append(made if state == "passed" else {**made, "tail": lines})

        with ThreadPoolExecutor(min(8, max(2, (os.cpu_count() or 2) // 2))) as pool:
            for each in [pool.submit(one, number) for number in range(len(listed))]:
                each.result()
                report.write_json(options.out / "smoke.json", facts)
    if bad := [case for case in facts["cases"] if case["state"] != "passed"]:
        for case in bad:
            print(f"{case['case']} ({case['run']}): {case['state']}", *case["tail"], sep="\n")
        raise SystemExit(f"gpu_checks: {len(bad)} of {len(facts['cases'])} cases failed")


def numerics(options: argparse.Namespace) -> None:
    """Runs the tests of kernels and executions; counts are written while they run."""
    facts: dict = {"outcomes": {}, "failures": []}
    missing = [n for n in ("pytest", "hypothesis") if importlib.util.find_spec(n) is None]
    if missing:
        report.write_json(options.out / "numerics.json", {**facts, "missing": missing})
        raise SystemExit(f"gpu_checks: there is no {' and no '.join(missing)} here")
    words = [sys.executable, "-P", "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
    many = min(12, max(1, (os.cpu_count() or 2) - 2))
    if many > 1 and importlib.util.find_spec("xdist") and not options.toy:
        words += ["-n", str(many)]
    words += ONE_FILE if options.toy else NUMERICS
    counts: Counter[str] = Counter()
    process = subprocess.Popen(
        words, cwd=report.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    written = 0.0
    for line in process.stdout or ():
        print(line, end="", flush=True)
        if "::" in line and "%]" in line and (found := OUTCOME.search(line)):
            counts[found[1].lower()] += 1
            if found[1] in ("FAILED", "ERROR"):
                facts["failures"].append(line.strip())
        if time.monotonic() - written > 2:
            written = time.monotonic()
            report.write_json(options.out / "numerics.json", {**facts, "outcomes": counts})
    report.write_json(options.out / "numerics.json", {**facts, "outcomes": counts})
    raise SystemExit(process.wait())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("check", choices=("preflight", "smoke", "numerics"))
    parser.add_argument("--toy", action="store_true", help="small sizes, also without a GPU")
    parser.add_argument("--seconds", type=float, default=120, help="limit of the smoke test")
    parser.add_argument("--out", type=Path, required=True, help="folder for CHECK.json")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    {"preflight": preflight, "smoke": smoke, "numerics": numerics}[options.check](options)


if __name__ == "__main__":
    main()
