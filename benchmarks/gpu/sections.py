"""The sections of the GPU report: their commands and time limits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import report

BENCHMARKS = report.ROOT / "benchmarks"
LENGTHS = "32768,16384,4096,65536,131072"  # of kernels; most wanted first
# Of servers: in short prompts the host's work shows.
SERVED = "32768,4096,1024,16384,65536,131072"
POOLS = (4.5, 2.5, 9.0)  # in prompts of POOL_PROMPT tokens with answers; most wanted first
POOL_SECONDS = 260  # least per pool; with less time there are fewer pools
# Answers are long, as with short ones prefills take most of the time, with or without a policy. The
# crowd is several times what the pool holds at once when a tenth of the entries is kept: requests
# begin and end together, and the last of them, which may be few, take as long as many.
POOL_PROMPT, POOL_ANSWER, POOL_CROWD = 4096, 512, 18


@dataclass(frozen=True)
class Setting:
    """Options of all sections.

    Attributes:
        toy: small sizes on a CPU.
        models: names or folders as serving.py takes them; section `host` uses the first.
        server_args: further options of every server.
        together: servers that are compared start at once.
    """

    toy: bool
    models: tuple[str, ...]
    server_args: str = ""
    together: bool = False

    def script(self, name: str, *words: object) -> list[str]:
        """The command of a benchmark."""
        toy = ["--toy"] if self.toy else []
        return [sys.executable, str(BENCHMARKS / name), *toy, *map(str, words)]

    def compared(self, model: str | None) -> list[str]:
        """Options of benchmarks that compare servers."""
        return [*self.served(model), *(["--together"] if self.together else [])]

    def served(self, model: str | None) -> list[str]:
        """Options of every benchmark with servers."""
        words = ["--model", model] if model and not self.toy else []
        return [*words, f"--server-args={self.server_args}"] if self.server_args else words


# (setting, model, seconds, folder for results) -> commands, by the names of their result files.
Steps = Callable[[Setting, str | None, float, Path], dict[str, list[str]]]


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        name: its name on the command line.
        seconds: time limit of all its steps.
        what: the section in words.
        steps: makes its commands.
        each_model: whether it runs once for each model.
    """

    name: str
    seconds: float
    what: str
    steps: Steps
    each_model: bool = False


def _checks(name: str) -> Steps:
    def steps(setting: Setting, _: str | None, seconds: float, out: Path) -> dict[str, list[str]]:
        words = setting.script("gpu_checks.py", name, "--seconds", int(0.9 * seconds), "--out", out)
        return {name: words}

    return steps


def _targets(setting: Setting, _: str | None, seconds: float, out: Path) -> dict[str, list[str]]:
    sizes = ["--lengths", LENGTHS, "--batches", "16,1"]
    if setting.toy:
        cases = ("scoring all layers", "decode attention", "compaction", "sums over all queries")
        sizes = ["--cases", ";".join(f"{x} 96" + " x 2" * x.startswith("dec") for x in cases)]
    return {
        "kernels": setting.script(
            "kernels.py", *sizes, "--seconds", int(0.8 * seconds), "--out", out
        )
    }


def _server(setting: Setting, _: str | None, __: float, out: Path) -> dict[str, list[str]]:
    sizes = ["--lengths", "100,67,300", "--new", "8"] if setting.toy else []
    words = setting.served(None)
    made = {"server": setting.script("gpu_server.py", *sizes, *words, "--out", out)}
    if not setting.toy:
        tests = [str(report.ROOT / "tests" / "test_gpu_server.py"), "-p", "no:cacheprovider"]
        made["answers"] = [sys.executable, "-P", "-m", "pytest", "-q", "--tb=short", *tests]
    return made


def _host(setting: Setting, _: str | None, __: float, out: Path) -> dict[str, list[str]]:
    profile, folds = [], []
    if setting.toy:
        profile = [
            "--policies",
            "h2o",
            "--batches",
            "2",
            "--prompt",
            "64",
            "--steps",
            "4",
            "--new",
            "160",
        ]
        folds = ["--policies", "h2o", "--requests", "1,2", "--layers", "2", "--rounds", "2"]
    fold_host = [sys.executable, str(BENCHMARKS / "fold_host.py"), *folds, "--save", str(out)]
    profiled = setting.script(
        "gpu_host.py", *profile, *setting.served(setting.models[0]), "--out", out
    )
    return {"host": profiled, "fold_host": fold_host}


def _serving(
    setting: Setting, model: str | None, seconds: float, out: Path
) -> dict[str, list[str]]:
    sizes = ["--policies", "snapkv,h2o,fastkv", "--shares", "0.125", "--lengths", SERVED]
    # One prompt at a time: a second one would wait for the first one's prefill.
    sizes += ["--at-once", "1", "--most", "16"]
    if setting.toy:
        sizes = ["--policies", "snapkv,fastkv", "--shares", "0.25", "--lengths", "200,300"]
        sizes += ["--at-once", "2", "--rounds", "1", "--new", "8"]
    words = ["--name", "serving", "--cells", "equal", "--plugin-off", *sizes]
    words += ["--seconds", str(int(0.9 * seconds)), *setting.compared(model), "--out", str(out)]
    return {"serving": setting.script("serving.py", *words)}


def _pools(setting: Setting, model: str | None, seconds: float, out: Path) -> dict[str, list[str]]:
    pools, shares, sizes = POOLS, "0.5,0.25,0.1", (POOL_PROMPT, POOL_ANSWER, POOL_CROWD)
    if setting.toy:
        pools, shares, sizes = (2.5, 4.5), "0.25", (200, 12, 2)
    made, (prompt, answer, crowd) = {}, sizes
    pools = pools[: max(1, int(seconds // POOL_SECONDS))]
    # Starting servers takes the same time for every pool; the requests grow with the pool.
    whole = sum(pool + 8 for pool in pools)
    for pool in pools:
        words = ["--name", f"pool-{pool:g}", "--cells", "crowd", "--pool", pool, "--crowd", crowd]
        words += ["--policies", "snapkv", "--shares", shares, "--lengths", prompt, "--new", answer]
        words += ["--seconds", int(0.9 * seconds * (pool + 8) / whole), *setting.compared(model)]
        made[f"pool-{pool:g}"] = setting.script("serving.py", *words, "--out", out)
    return made


_ALL = (
    Section(
        "preflight", 60, "versions, memory, rates of copies and products", _checks("preflight")
    ),
    Section("smoke", 120, "each kernel beside its reference, and its memory", _checks("smoke")),
    Section("numerics", 300, "the kernels' tests, compiled", _checks("numerics")),
    Section("targets", 300, "kernels at the sizes of the goals", _targets),
    Section("server", 300, "answers without the plugin, with it, and with policies", _server),
    Section("host", 300, "host time, launches and idle device of decode steps", _host),
    Section("serving", 600, "TTFT and TPOT beside stock", _serving, True),
    Section("pools", 800, "throughput in tight pools beside stock", _pools, True),
)
SECTIONS = {section.name: section for section in _ALL}
CACHE = "cache"  # pseudo section: keep compiled kernels for the next run


def entries(setting: Setting, chosen: list[str]) -> Iterator[tuple[str, Section, str | None]]:
    """(Key, section, model) of the chosen sections, in order; with `each_model` once per model.

    All sections of a model come before those of the next.
    """
    plain = [SECTIONS[name] for name in SECTIONS if name in chosen]
    yield from ((each.name, each, None) for each in plain if not each.each_model)
    for model in setting.models:
        short = Path(model).name
        yield from ((f"{each.name} {short}", each, model) for each in plain if each.each_model)
