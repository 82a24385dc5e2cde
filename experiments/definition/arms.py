"""Whether arms name policies that there are, and values that these take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from kvpolicy.dsl.bind.named import name_and_path, settings_by_policy
from kvpolicy.dsl.bind.parameters import given_value, text_of
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.ir.nodes import Program
from kvpolicy.dsl.syntax.diagnostics import Diagnostic, PolicyError, refused
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.experiments.definition.experiment import NO_POLICY, Experiment
from kvpolicy.experiments.definition.reading import Read


def paths_by_name(values: Sequence[str], own_name: Callable[[str], str]) -> dict[str, str]:
    """The paths of a server's policies, by the names that requests and arms give them.

    Args:
        values: values of --kv-policy.
        own_name: reads the policy at a path, and gives the name that its file says.

    Raises:
        ValueError: a value is of another form, or its name cannot be one or is taken; the message
            begins with the value.
    """
    paths: dict[str, str] = {}
    for value in values:
        try:
            given_name, path = name_and_path(value)
        except ValueError as error:
            raise ValueError(f"{value}: {error}") from None
        file_name = own_name(path)
        name = given_name or file_name
        if name == NO_POLICY:
            raise ValueError(f"{value}: the name `{NO_POLICY}` stands for no policy")
        if name in paths:
            raise ValueError(
                f"{value}: {paths[name]} is also called `{name}`; give one of them another name, "
                f"as in --kv-policy {name}-2={path}"
            )
        paths[name] = path
    return paths


def given(values: Sequence[str], settings: Sequence[str]) -> dict[str, Program]:
    """The policies of a server by the names that arms give them.

    Args:
        values, settings: values of --kv-policy and --kv-policy-set.

    Raises:
        PolicyError: a policy cannot be read or is wrong, two have one name, or a setting is for
            none of them or is not taken.
    """
    read = cache(lambda path: load(path).executable())
    try:
        paths = paths_by_name(values, lambda path: read(path).name)
    except ValueError as error:
        raise refused("--kv-policy", "arguments", str(error)) from None
    programs = {name: read(path) for name, path in paths.items()}
    if settings and not programs:
        message = "there is no --kv-policy that it could be for"
        raise refused(f"--kv-policy-set {settings[0]}", "arguments", message)
    try:
        by_policy = settings_by_policy(settings, list(programs)) if settings else {}
    except ValueError as error:
        raise refused("--kv-policy-set", "arguments", str(error)) from None
    for name, values_of in by_policy.items():
        for parameter, text in values_of.items():
            given_value(programs[name], parameter, text)
    return programs


def shipped_programs(experiment: Experiment) -> dict[str, Program]:
    """The policies that an experiment names and that come with kvpolicy."""
    names = {experiment.default, *(arm.policy for arm in experiment.arms)}
    return {name: load(name).require() for name in shipped() if name in names}


def unknown(experiment: Experiment, programs: Mapping[str, Program]) -> list[str]:
    """Policies that an experiment names and that could not be looked at, each once."""
    names = (experiment.default, *(arm.policy for arm in experiment.arms))
    known = {NO_POLICY, *programs}
    return list(dict.fromkeys(name for name in names if name not in known))


def check_settings(read: Read, programs: Mapping[str, Program]) -> list[Diagnostic]:
    """Errors on values of parameters that an arm's policy does not take, each at its place.

    What depends on the model, as a `require` between parameters does, is not looked at.

    Args:
        programs: policies by the names that arms give them; arms of others are passed over.

    Raises:
        PolicyError: the file has errors.
    """
    diagnostics = []
    for arm in read.require().arms:
        if arm.policy not in programs:
            continue
        for parameter, value in arm.settings.items():
            try:
                given_value(programs[arm.policy], parameter, text_of(value))
            except PolicyError as error:
                [problem] = error.diagnostics
                span = read.places.get(f"arms.{arm.name}.set.{parameter}")
                message = f"arm `{arm.name}`: {problem.message}"
                diagnostics.append(Diagnostic(problem.code, message, span, problem.help))
    return diagnostics
