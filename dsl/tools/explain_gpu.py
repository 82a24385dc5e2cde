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
from kvpolicy.dsl.tools.units import seconds_text, size_text

_WIDTH = 96


def expected(found: Forecast, batch: int) -> Iterator[str]:
    """The lines of the section."""
    yield f"  {'':<30} {'full KV':>12} {'policy':>12}"
    for name, text in (
        ("KV cache of a prompt", lambda own: size_text(own.prompt_bytes)),
        ("TTFT", lambda own: seconds_text(own.ttft)),
        (f"TPOT, {batch:,} at once", lambda own: seconds_text(own.tpot)),
        ("requests at once, at most", lambda own: f"{own.at_once:,}"),
        ("throughput then, tokens/s", lambda own: f"{own.throughput:,.0f}"),
    ):
        yield _row(name, text(found.full), text(found.policy), _ratio(name, found))
    yield from _work(found, batch)
    for sentence in found.assumptions:
        yield from textwrap.wrap(
            sentence, _WIDTH, initial_indent="  assumed: ", subsequent_indent="    "
        )


def _row(name: str, full: str, policy: str, ratio: str) -> str:
    return f"  {name:<30} {full:>12} {policy:>12}  {ratio}".rstrip()


def _ratio(name: str, found: Forecast) -> str:
    """How many times as much or as fast the policy is; nothing where full KV does not fit."""
    full, own = found.full, found.policy
    pair = {
        "TTFT": (full.ttft, own.ttft),
        "requests at once, at most": (own.at_once, full.at_once),
        "throughput then, tokens/s": (own.throughput, full.throughput),
        "KV cache of a prompt": (full.prompt_bytes, own.prompt_bytes),
    }.get(name, (full.tpot, own.tpot))
    return f"{pair[0] / pair[1]:.2f} x" if pair[1] else ""


def _work(found: Forecast, batch: int) -> Iterator[str]:
    """What the policy itself takes."""
    yield _row("scoring and compaction", "", seconds_text(found.scoring), "per prompt")
    yield _row("operations and launches", "", f"{found.prefill_asks:,.0f}", "per prompt")
    if found.fold is None:
        return
    fold = found.fold
    yield _row("host time where entries leave", "", seconds_text(fold.host), f"{batch:,} requests")
    yield _row("operations and launches", "", f"{fold.device:,.0f}", "where entries leave")


def document(found: Forecast, bound: Bound, config: ModelConfig, gpu: Gpu, asked: Load) -> str:
    """The same as JSON; times are seconds, sizes bytes."""
    ways = {"full": found.full, "policy": found.policy}
    return json.dumps(
        {
            "policy": bound.program.name,
            "digest": bound.digest,
            "model": config.name,
            "gpu": gpu.name,
            "length": asked.prompt,
            "batch": asked.batch,
            "max_new_tokens": asked.new,
            **{name: _facts(own) for name, own in ways.items()},
            "scoring_seconds": found.scoring,
            "prefill_asks": found.prefill_asks,
            "fold": None if found.fold is None else asdict(found.fold),
            "assumptions": list(found.assumptions),
        },
        indent=1,
    )


def _facts(own: Serving) -> dict[str, float]:
    return {
        "prompt_bytes": own.prompt_bytes,
        "ttft_seconds": own.ttft,
        "tpot_seconds": own.tpot,
        "requests_at_once": own.at_once,
        "tokens_per_second": own.throughput,
    }
