"""Forecasts of `kvpolicy explain --gpu` beside the figures that the GPU report has measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import report
from gpu_host import SHARE
from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.bind.gpu import GPUS, Gpu
from kvpolicy.dsl.bind.model_config import ModelConfig, config_of, read_config
from kvpolicy.dsl.bind.named import FOLD_INTERVAL
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.tools.cost import cost
from kvpolicy.dsl.tools.forecast import Forecast, Load, forecast, pool_of
from serving import by_length
from serving_report import STOCK
from serving_setup import CONFIGURATIONS
from shipped import settings

from gpu.goals import Figures

HEADER = ("what", "figure", "expected", "measured", "measured / expected")
# Topics of kernels.py with a forecast share of a prefill, a word in the case, and the policy.
SCORING = (("scoring", "with selection", "snapkv"), ("sums over all queries", "", "h2o"))
Row = tuple[str, str, float, float]


def text(facts: dict) -> list[str]:
    """Parts of the page: a table, or a sentence on why there is none."""
    name = Figures(facts).of("preflight").get("preflight", {}).get("gpu")
    gpu = known(name)
    if gpu is None:
        return [
            f"Of {name or 'a machine without a GPU'} nothing is expected: it is not in the table."
        ]
    try:
        rows = list(_rows(facts, gpu))
    except Exception as error:  # measured figures are shown in any case
        return [f"What is expected could not be estimated: {type(error).__name__}: {error}"]
    if not rows:
        return ["Nothing was measured of which something is expected."]
    shown = [
        (what, figure, f"{wanted:.3g}", f"{found:.3g}", f"{found / wanted:.2f}" if wanted else "")
        for what, figure, wanted, found in rows
    ]
    return [
        f"By the model of `kvpolicy explain --gpu`, for {gpu.name}: medians; TTFT of requests that "
        "are sent together, prefilled one after the other; of the host and of launches what a "
        "decode step has more than stock's.",
        report.table(HEADER, shown),
    ]


def known(name: str | None) -> Gpu | None:
    """The GPU with the name that torch gives it; None if the table has no such row."""
    found = [gpu for key, gpu in GPUS.items() if key.upper() in (name or "").upper()]
    return found[0] if found else None


def _rows(facts: dict, gpu: Gpu) -> Iterator[Row]:
    for key, section in facts["sections"].items():
        name, _, short = key.partition(" ")
        if name not in ("serving", "pools"):
            continue
        config, figures = _config(section["model"]), Figures(facts, short)
        runs = [figures.of(name).get("serving", {})] if name == "serving" else figures.pools()
        for run in runs:
            for cell in run.get("cells", ()):
                yield from _served(run, cell, config, gpu, short)
    yield from _host(facts, gpu)
    yield from _scoring(facts, gpu)


def _config(model: str) -> ModelConfig:
    if model in CONFIGURATIONS:
        return config_of(model, CONFIGURATIONS[model])
    return read_config(Path(model))


def _bound(policy: str, given: Sequence[str], config: ModelConfig) -> Bound:
    values = dict(value.split("=", 1) for value in given)
    return bind(load(policy).require(), config.shape, values, fold_interval=FOLD_INTERVAL)


@cache  # the page is written again after every section
def _forecast(
    policy: str, given: tuple[str, ...], config: ModelConfig, gpu: Gpu, asked: Load, pool: float
) -> Forecast:
    return forecast(_bound(policy, given, config), config, gpu, asked, pool)


def _served(run: dict, cell: dict, config: ModelConfig, gpu: Gpu, model: str) -> Iterator[Row]:
    """TTFT and TPOT of a cell with an equal batch; requests at once and throughput of a crowd."""
    server, tokens, number = cell["server"], cell["tokens"], cell["requests"]
    policy, given = "streamingllm", []  # for stock's cells any policy: only `full` is read
    if cell["share"] < 1:
        policy = server.rpartition(" ")[0]
        given = next(iter(by_length(policy, cell["share"], [tokens]).values()))
    token = config.shape.layers * config.shape.kv_heads
    pool = run["flags"]["max_total_tokens"] * config.kv_size(token)
    asked = Load(tokens, run["new"], number)
    found = _forecast(policy, tuple(given), config, gpu, asked, pool)
    own = found.policy if cell["share"] < 1 else found.full
    what = f"{model}, {server}, {number} x {tokens:,}"
    if number == run["at_once"]:
        turns = (number + 1) / 2
        yield what, "TTFT, ms", 1e3 * turns * own.ttft, 1e3 * statistics.median(cell["ttft"])
        yield what, "TPOT, ms", 1e3 * own.tpot, 1e3 * statistics.median(cell["tpot"])
        return
    yield what, "at once", min(own.at_once, number), max(cell["at_once"])
    yield what, "tokens/s", own.throughput, statistics.median(cell["throughput"])


def _host(facts: dict, gpu: Gpu) -> Iterator[Row]:
    """Host time and launches that a decode step has beyond stock's."""
    measured = Figures(facts).of("host").get("host", {})
    rows = measured.get("rows", ())
    stock = {row["batch"]: row for row in rows if row["policy"] == STOCK}
    model = next((s["model"] for s in facts["sections"].values() if s.get("model")), None)
    for row in rows:
        policy, batch = row["policy"], row["batch"]
        if policy in (STOCK, "none") or batch not in stock or model is None:
            continue
        config = _config(model)
        given = tuple(settings(SHARE, measured["prompt"])[policy])
        asked = Load(measured["prompt"], measured["steps"], batch)
        fold = _forecast(policy, given, config, gpu, asked, pool_of(config, gpu)).fold
        if fold is None:
            continue
        often, what = fold.times / asked.new, f"{policy}, {batch} requests"
        more = [row[name] - stock[batch][name] for name in ("host_us", "launches")]
        yield what, "host per step, us", 1e6 * often * fold.host, more[0]
        yield what, "launches per step", often * fold.device, more[1]


def _scoring(facts: dict, gpu: Gpu) -> Iterator[Row]:
    """Scoring as a share of a prefill of Llama 3.1 8B."""
    config = _config("llama-3.1-8b")
    for topic, word, policy in SCORING:
        for case in Figures(facts).cases(topic):
            if word not in case["case"]:
                continue
            bound = _bound(policy, [], config)
            wanted = cost(bound, config, case["tokens"], gpu).share
            found = next(iter(case["calls"].values()))["share_of_prefill"]
            yield (
                f"{case['case']}, {case['tokens']:,}",
                "of a prefill, %",
                100 * wanted,
                100 * found,
            )
