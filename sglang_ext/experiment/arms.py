"""The policies that an experiment's arms need at start, beside those of `--kv-policy`."""

from __future__ import annotations

from collections.abc import Sequence

from kvpolicy.dsl.bind.parameters import text_of
from kvpolicy.experiments.definition.experiment import Experiment


def with_arms(
    experiment: Experiment, policies: dict[str, str], settings: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Policies and settings of a server, with those of arms that have settings added.

    Args:
        policies: name -> path.
        settings: `POLICY.NAME=VALUE`, or `NAME=VALUE` where there is one policy.

    Returns:
        Both; with settings added, all of them as `POLICY.NAME=VALUE`.
    """
    names = list(policies)
    qualified_settings = [
        setting if "." in setting.partition("=")[0] else f"{names[0]}.{setting}"
        for setting in settings
    ]
    paths, values = dict(policies), list(settings)
    for arm in experiment.arms:
        if not arm.settings:
            continue
        values = qualified_settings if values == list(settings) else values
        name = arm.served_as
        paths[name] = policies[arm.policy]
        arm_values = {key: text_of(value) for key, value in arm.settings.items()}
        for setting in qualified_settings:
            qualified_name, _, value = setting.partition("=")
            policy, _, key = qualified_name.strip().rpartition(".")
            if policy == arm.policy:
                arm_values.setdefault(key, value)
        values = [*values, *(f"{name}.{key}={value}" for key, value in arm_values.items())]
    return paths, values
