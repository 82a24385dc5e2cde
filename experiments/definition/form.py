"""The table of an experiment file's keys, for reading, formatting and the JSON Schema."""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.dsl.syntax.mappings import KnownKey
from kvpolicy.dsl.syntax.yaml_nodes import FileKind
from kvpolicy.experiments.definition.metrics import METRICS

EXPERIMENT = FileKind(
    "an experiment file",
    "experiments",
    "experiment: my-name",
    "experiment",
    {
        "language": (
            "this file is a policy, not an experiment",
            "give it as `--kv-policy FILE`; an arm of an experiment names it",
        )
    },
)

NAME = r"[A-Za-z0-9][A-Za-z0-9@._-]*"  # the server's rule for names of policies
PARAMETER = r"[a-z][a-z0-9_]*"
PLACE = r"session_id|rid|header:[A-Za-z0-9_-]+|body:[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*"
MAX_NAME = 64
MAX_ARMS = 16
MAX_ITEMS = 64  # of lists and mappings other than `arms`


@dataclass(frozen=True)
class Field(KnownKey):
    """A key of a mapping.

    `form` says which values it takes: "name", "policy", "truth", "number", "whole", "share"
    (`10 %` or 0.1), "amount" (a number or `2 %`), "duration" (`30m`), "choice" (one of `choices`),
    "places" (a list of targeting keys), "keys" (a mapping with `fields`), "items" (a list of
    mappings with `fields`), "arms" (names that the author chooses, each a mapping with `fields`),
    "set" (names of parameters with values), or "design" (`request`, or a mapping with `fields`).

    Numbers, shares, amounts and durations (in seconds) have bounds: `least` and `most` are
    allowed values, `above` and `below` are not.
    """

    fields: tuple[Field, ...] = ()
    choices: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None


YEAR = 365 * 86_400.0

ARM = (
    Field("policy", "policy", "a policy that the server has, or `none` for full KV", True),
    Field("weight", "number", "share of the keys, relative to other arms; 1 if not given",
          least=0, most=1e6),
    Field("set", "set", "values of the policy's parameters"),
)  # fmt: skip
SWITCHBACK = (
    Field("window", "duration", "how long one arm has all covered requests", True,
          least=60, most=YEAR),
    Field("burn_in", "duration", "beginning of a window that is not compared", least=0,
          most=YEAR),
)  # fmt: skip
SHADOW = (
    Field("sample", "share", "share of the requests that are scored again", True, above=0, most=1),
    Field("top", "whole", "candidates per token that are compared; 64 if not given", least=1,
          most=1024),
    Field("tokens_per_second", "number", "most that scoring again may compute; 2000 if not given",
          above=0, most=1e9),
)  # fmt: skip
METRIC = (
    Field("metric", "choice", "what is measured", True, choices=tuple(METRICS)),
    Field("role", "choice", "what it is for", True, choices=("guardrail", "success", "info")),
    Field("margin", "amount", "how much is too much, in the metric's unit", above=0, most=1e12),
    Field("clip", "number", "larger values count as this one", above=0, most=1e12),
)
ANALYSIS = (
    Field("alpha", "number", "chance of a false alarm; 0.05 if not given", above=0, below=0.5),
    Field("min_samples", "whole", "values in an arm before a decision; 200 if not given",
          least=1, most=1_000_000_000),
    Field("on_fail", "choice", "what a breached guardrail does; `abort` if not given",
          choices=("abort", "alert")),
)  # fmt: skip
STEP = (
    Field("coverage", "share", "share of the keys from here on", least=0, most=1),
    Field("pause", "duration", "time until the next step", above=0, most=YEAR),
)

FILE = (
    Field("experiment", "name", "its name, also the salt of the split", True),
    Field("enabled", "truth", "`false` serves everything by `default`; `true` if not given"),
    Field("targeting_key", "places", "where the key of a request is looked for, in this order"),
    Field("coverage", "share", "share of the keys that take part", True, least=0, most=1),
    Field("default", "policy", "policy of requests that take no part, and after an abort; "
          "`none` if not given"),
    Field("arms", "arms", "what is compared; the first one is control", True, fields=ARM),
    Field("design", "design", "`request` draws an arm for each key, `switchback` for each window "
          "of time", fields=(Field("switchback", "keys", "arms take turns", True, SWITCHBACK),)),
    Field("shadow", "keys", "requests that are scored again with full KV", fields=SHADOW),
    Field("metrics", "items", "what is measured in every arm", True, fields=METRIC),
    Field("analysis", "keys", "when something is decided", fields=ANALYSIS),
    Field("steps", "items", "how coverage grows", fields=STEP),
)  # fmt: skip
