"""What `kvpolicy explain --gpu` says: what is expected of a server, with full KV and the policy."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.gpu import Gpu
from kvpolicy.dsl.bind.model_config import ModelConfig
from kvpolicy.dsl.tools.forecast import Forecast, Load, Serving
from kvpolicy.dsl.tools.units import flops_text, seconds_text, size_text

_WIDTH = 96


def expected(found: Forecast, batch: int) -> Iterator[str]:
    """Lines that compare full KV with the policy, and what the figures rest on."""
    yield _row("", "full KV", "policy", "")
    for name, figure, text, more_is_better in (
        ("KV cache of a prompt", "prompt_bytes", size_text, False),
        ("TTFT", "ttft", seconds_text, False),
        (f"TPOT, {batch:,} at once", "tpot", seconds_text, False),
        ("requests at once, at most", "at_once", "{:,}".format, True),
        ("throughput then, tokens/s", "throughput", "{:,.0f}".format, True),
    ):
        full, policy = getattr(found.full, figure), getattr(found.policy, figure)
        over, under = (policy, full) if more_is_better else (full, policy)
        # No ratio if full KV does not fit.
        yield _row(name, text(full), text(policy), f"{over / under:.2f} x" if under else "")
    yield from _work(found, batch)
    for sentence in found.assumptions:
        yield from textwrap.wrap(
            sentence, _WIDTH, initial_indent="  assumed: ", subsequent_indent="    "
        )


def _row(name: str, full: str, policy: str, ratio: str) -> str:
    return f"  {name:<30} {full:>12} {policy:>12}  {ratio}".rstrip()


def _work(forecast: Forecast, batch: int) -> Iterator[str]:
    share = f"per prompt, {forecast.share:.2%} of its prefill"
    yield _row("scoring and compaction", "", seconds_text(forecast.scoring), share)
    yield _row("arithmetic of scoring", "", flops_text(forecast.operations), "per prompt")
    yield _row("operations and launches", "", f"{forecast.prefill_asks:,.0f}", "per prompt")
    if forecast.fold is None:
        return
    fold = forecast.fold
    yield _row("host time where entries leave", "", seconds_text(fold.host), f"{batch:,} requests")
    yield _row("operations and launches", "", f"{fold.device:,.0f}", "where entries leave")


def document(found: Forecast, bound: Bound, config: ModelConfig, gpu: Gpu, asked: Load) -> str:
    """The forecast as JSON; times are seconds, sizes bytes."""
    ways = {"full": found.full, "policy": found.policy}
    return json.dumps(
        {
            "name": bound.program.name,
            "digest": bound.digest,
            "model": config.name,
            "gpu": gpu.name,
            "length": asked.prompt,
            "batch": asked.batch,
            "max_new_tokens": asked.new,
            **{name: _facts(serving) for name, serving in ways.items()},
            "scoring_seconds": found.scoring,
            "scoring_share": found.share,
            "scoring_operations": found.operations,
            "prefill_asks": found.prefill_asks,
            "fold": None if found.fold is None else asdict(found.fold),
            "assumptions": list(found.assumptions),
        },
        indent=1,
    )


def _facts(serving: Serving) -> dict[str, float]:
    return {
        "prompt_bytes": serving.prompt_bytes,
        "ttft_seconds": serving.ttft,
        "tpot_seconds": serving.tpot,
        "requests_at_once": serving.at_once,
        "tokens_per_second": serving.throughput,
    }
