"""The experiment of `--kv-experiment` at the server's start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpolicy.dsl.syntax.diagnostics import PolicyError, render_all
from kvpolicy.experiments.definition import reading
from kvpolicy.experiments.definition.experiment import NO_POLICY, Experiment
from kvpolicy.sglang_ext.experiment.arms import with_arms
from kvpolicy.sglang_ext.experiment.live import LABELS, Live
from kvpolicy.sglang_ext.face import compat, options, policy_files
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.face.policy_files import Policy


def prepare(server_args: Any) -> None:
    """On the command line: check the experiment, and serve its arms' policies.

    Args:
        server_args: SGLang's options; the labels that requests may have are extended in place.

    Raises:
        Refused: the file is wrong, or an arm's policy is not served.
    """
    file = options.experiment_file()
    if file is None:
        return
    if not compat.has_step_outputs():
        raise Refused(
            f"--kv-experiment needs SGLang 0.5.23; {compat.installed_version()} is installed."
        )
    paths, settings, data = options.requested()
    policies = policy_files.load_policies(paths, settings, data)
    experiment = read(file, [policy.name for policy in policies])
    policy_paths = {policy.name: policy.path for policy in policies}
    files, values = with_arms(experiment, policy_paths, settings)
    added = [f"{name}={files[name]}" for name in files if name not in policy_paths]
    if added:
        os.environ[options.PATHS.variable] = os.pathsep.join([*paths, *added])
        os.environ[options.SETTINGS.variable] = ",".join(values)
    if experiment.shadow is None:
        os.environ.setdefault(options.SLOTS.variable, "0")
    compat.allow_labels(server_args, LABELS)


def read(file: Path, names: Sequence[str]) -> Experiment:
    """The experiment in a file.

    Args:
        names: names of the policies that are served.

    Raises:
        Refused: the file is wrong; the message holds the diagnostics.
    """
    try:
        definition = reading.load(file)
        experiment = definition.require()
        problems = reading.check_policies(definition, [*names, NO_POLICY])
    except PolicyError as error:
        raise Refused(f"--kv-experiment {file}:\n{error}") from None
    if problems:
        raise Refused(f"--kv-experiment {file}:\n{render_all(problems, definition.source)}")
    return experiment


def live(policies: Sequence[Policy], workers: int) -> Live | None:
    """The experiment of the process that talks to clients; None if there is none.

    Args:
        workers: number of processes that talk to clients.

    Raises:
        Refused: its file or its state file cannot be used, or there are several processes.
    """
    file = options.experiment_file()
    if file is None:
        return None
    if workers > 1:
        raise Refused(
            f"--tokenizer-worker-num {workers} cannot be combined with --kv-experiment: each "
            "worker would count for itself."
        )
    experiment = read(file, [policy.name for policy in policies])
    arm_settings = {arm.served_as: dict(arm.settings) for arm in experiment.arms if arm.settings}
    served = {policy.name: arm_settings.get(policy.name, {}) for policy in policies}
    return Live(experiment, file, served, options.experiment_state())
