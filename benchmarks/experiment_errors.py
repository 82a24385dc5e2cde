"""How often the statistics of experiments err, and how much traffic a decision takes.

Simulated runs of examples/experiments/lava-25.yaml, looked at after every value: arms exactly at
their margins (the worst that is no breach), bad and good arms, keys that land in the wrong arm.
Seconds are not measured, so the machine does not matter; --runs 200 takes some 5 s.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict

import report
from kvpolicy.experiments.definition.reading import load
from kvpolicy.experiments.simulate.simulation import RunsOutcome, simulate

EXAMPLE = report.ROOT / "examples" / "experiments" / "lava-25.yaml"
ERRORS = ("what", "values", "question", "runs", "ever happened, % (95 %)", "may be, %")
DELAYS = ("what", "values", "question", "runs", "median", "90 %", "ever happened, %")

TEXT = """\
A run has {values:,} values in each arm that come from requests scored again, and {requests:,} where
every request or key counts. The margins are those of
`{file}`: drift 0.05 nats per token clipped at 2,
disagreement 2 %, failures 0.5 % more than control; alpha is 5 %, a third of it for each of three
guardrails' breaches. "Lognormal" values have a deviation of 1.2 in their logarithm.

## How often it errs

Arms whose mean is exactly the margin: a breach or a clearing is an error there. An interval errs
when it ever leaves the mean out. For the sample ratio the keys come as the weights say.

{errors}

## How much a decision takes

Values in each arm until a breach is called, until an arm is cleared, or until a sample-ratio alarm;
without `min_samples`, below which nothing is decided. A dash: fewer of the runs came to it.

{delays}
"""


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--runs", type=int, default=4_000, help="of each row with a bound")
    parser.add_argument("--values", type=int, default=4_000)
    parser.add_argument("--requests", type=int, default=20_000)
    args = parser.parse_args()
    began = time.monotonic()
    rows = simulate(
        load(EXAMPLE).require(),
        runs=args.runs,
        values=args.values,
        requests=args.requests,
        seed=args.seed,
        progress=True,
    )
    text = TEXT.format(
        values=args.values,
        requests=args.requests,
        file=EXAMPLE.relative_to(report.ROOT),
        errors=report.table(ERRORS, errors(rows)),
        delays=report.table(DELAYS, delays(rows)),
    )
    data = {"seconds": round(time.monotonic() - began, 1), "rows": [asdict(row) for row in rows]}
    title = "Errors and delays of experiments"
    report.publish("experiment_errors", title, text, data, args.save)


def errors(rows: Iterable[RunsOutcome]) -> list[tuple[object, ...]]:
    """Rows that have a bound."""
    return [
        (
            row.metric, row.data, row.question, f"{row.runs:,}",
            f"{100 * row.share:.2f} ({100 * row.low:.2f} to {100 * row.high:.2f})",
            f"{100 * row.bound:.3g}",
        )
        for row in rows
        if row.bound is not None
    ]  # fmt: skip


def delays(rows: Iterable[RunsOutcome]) -> list[tuple[object, ...]]:
    """Rows that state how many values a decision takes."""
    return [
        (
            row.metric, row.data, row.question, f"{row.runs:,}", _count(row.median),
            _count(row.ninety), f"{100 * row.share:.0f}",
        )
        for row in rows
        if row.bound is None
    ]  # fmt: skip


def _count(values: int | None) -> str:
    return "-" if values is None else f"{values:,}"


if __name__ == "__main__":
    main()
