"""The state of an experiment and what was seen of it, as one JSON value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpolicy.experiments.definition.experiment import as_document
from kvpolicy.experiments.replica.analysis import Analysis
from kvpolicy.experiments.replica.lifecycle import Lifecycle


def document(
    lifecycle: Lifecycle,
    analysis: Analysis,
    *,
    reload: Mapping[str, Any],
    state_saved: bool,
    state_file: bool = True,
    analysed_seconds: float | None = None,
    with_keys: bool = True,
) -> dict[str, Any]:
    """What `GET /kv_policy/experiment` answers and `kvpolicy experiment` reads.

    Args:
        reload: `success`: whether the file as last read is in use; `problem`: what is wrong with
            it, or None.
        state_saved: whether there is a state file that is up to date.
        state_file: whether there is one at all.
        analysed_seconds: seconds since the analysis began, for the rate of samples; None where it
            is not known.
        with_keys: include hashes of the keys, by which replicas that share keys are pooled.
    """
    experiment = lifecycle.experiment
    return {
        "experiment": as_document(experiment),
        "name": experiment.name,
        "revision": experiment.revision,
        "digest": experiment.digest,
        **lifecycle.document(),
        "reload": dict(reload),
        "state_saved": state_saved,
        "state_file": state_file,
        "verdicts": [verdict.as_document() for verdict in analysis.verdicts()],
        "warnings": analysis.warnings(),
        "analysis": analysis.as_document(with_keys=with_keys),
        "analysed_seconds": None if analysed_seconds is None else round(analysed_seconds, 1),
        "shadow": {arm: dict(record.scoring.requests) for arm, record in analysis.records.items()},
    }
