"""What one replica has seen of an experiment, to be kept over a restart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpolicy.experiments.definition.experiment import Experiment
from kvpolicy.experiments.replica.analysis import Analysis
from kvpolicy.experiments.statistics.bounded_mean import finite

FORMAT = 1


@dataclass(frozen=True)
class Evidence:
    """What was seen of one revision by one replica.

    Attributes:
        analysis: the analysis of its requests.
        seconds: time since the analysis began.
        shadowed: number of requests scored again so far, which is also the number of the last.
    """

    analysis: Analysis
    seconds: float
    shadowed: int

    def saved(self) -> dict[str, Any]:
        """The evidence as a JSON value."""
        experiment = self.analysis.experiment
        return {
            "format": FORMAT,
            "experiment": experiment.name,
            "revision": experiment.revision,
            "seconds": round(self.seconds, 1),
            "shadowed": self.shadowed,
            "analysis": self.analysis.as_document(),
        }

    @classmethod
    def restored(cls, experiment: Experiment, saved: Mapping[str, Any]) -> Evidence | None:
        """The evidence of a value that the method `saved` returned; None for another revision.

        Raises:
            ValueError: `saved` is of another format or damaged.
        """
        if saved.get("format") != FORMAT:
            raise ValueError(f"its format is {saved.get('format')!r}, not {FORMAT}")
        if saved.get("revision") != experiment.revision:
            return None
        try:
            analysis = Analysis.from_document(experiment, saved["analysis"])
            return cls(analysis, finite(saved["seconds"]), int(saved["shadowed"]))
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"it lacks something: {error!r}") from None
