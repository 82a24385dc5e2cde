"""The command line options, and the policies they name.

`--kv-policy PATH` may be given several times; the first policy is the default of requests that
name none. `--kv-policy-set name=value` sets a parameter (`policy.name=value` when several policies
are given). `--kv-policy-fold-interval K` says at which decode steps entries may leave,
`--kv-policy-kernels` what computes. Environment variables carry all of them to SGLang's child
processes; `sgl.Engine`, which has no command line, reads them too.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpolicy.dsl.bind import Bound, bind
from kvpolicy.dsl.check import load
from kvpolicy.dsl.diagnostics import PolicyError, render_all
from kvpolicy.dsl.ir import ModelShape, Program
from kvpolicy.sglang_ext import share
from kvpolicy.sglang_ext.errors import Refused

PATHS_VARIABLE = "SGLANG_KV_POLICY"  # paths, separated as in PATH
SETTINGS_VARIABLE = "SGLANG_KV_POLICY_SET"  # name=value, separated by commas
ONE_PIECE_VARIABLE = "SGLANG_KV_POLICY_MAX_ONE_PIECE_PREFILL"  # tokens
INTERVAL_VARIABLE = "SGLANG_KV_POLICY_FOLD_INTERVAL"  # decode steps
KERNELS_VARIABLE = "SGLANG_KV_POLICY_KERNELS"  # one of KERNELS

# Decode steps from one fold to the next; docs/results/fold_interval.md has the measurement.
DEFAULT_INTERVAL = 16

KERNELS = ("auto", "torch", "triton")  # the first one is the default


@dataclass(frozen=True)
class Policy:
    """A checked policy file and the parameter values that the operator set for it."""

    program: Program
    path: str
    settings: Mapping[str, str]

    @property
    def name(self) -> str:
        """The name by which requests choose it."""
        return self.program.name

    def bind(self, shape: ModelShape) -> Bound:
        """The policy for a model.

        Raises:
            Refused: a setting is unknown or not accepted, or the policy does not fit the model.
        """
        try:
            bound = bind(self.program, shape, self.settings, fold_interval=fold_interval())
        except PolicyError as error:
            raise Refused(f"--kv-policy {self.path}: {error}") from None
        sentence = share.unserved(bound)
        if sentence:
            raise Refused(f"--kv-policy {self.path}: {sentence}")
        return bound


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options to SGLang's command line; the environment gives the defaults."""
    group = parser.add_argument_group("KV-cache policies (kvpolicy)")
    group.add_argument(
        "--kv-policy",
        metavar="PATH",
        nargs="+",
        action="extend",
        help="KV-cache policy file (YAML); may be given several times. The first is the default "
        "of requests that do not name one in sampling_params.custom_params.kv_policy.",
    )
    group.add_argument(
        "--kv-policy-set",
        metavar="NAME=VALUE",
        nargs="+",
        action="extend",
        help="Value of a policy's parameter; POLICY.NAME=VALUE when several policies are given.",
    )
    group.add_argument(
        "--kv-policy-max-one-piece-prefill",
        metavar="TOKENS",
        help="Longest prompt that is prefilled in one piece where a policy finds the layer after "
        "which tokens leave only from data; a longer one is served in full. Default: the chunk "
        "size (--chunked-prefill-size).",
    )
    group.add_argument(
        "--kv-policy-fold-interval",
        metavar="STEPS",
        help="Entries leave at every so many decode steps, where a policy does not say "
        f"`decode.when` itself. Default {DEFAULT_INTERVAL}.",
    )
    group.add_argument(
        "--kv-policy-kernels",
        metavar="{" + ",".join(KERNELS) + "}",
        help="What scores, chooses and copies entries. Default auto: triton on a CUDA device, "
        "torch elsewhere.",
    )


def export(arguments: Namespace) -> None:
    """Put the parsed options into the environment, which child processes inherit.

    Raises:
        Refused: a value contains the separator of its variable, is not among those of its option,
            or is no number where one is wanted.
    """
    for option, variable, separator in (
        ("kv_policy", PATHS_VARIABLE, os.pathsep),
        ("kv_policy_set", SETTINGS_VARIABLE, ","),
    ):
        values = getattr(arguments, option, None)
        if not values:
            continue
        flag = _flag(option)
        if option == "kv_policy":
            values = [os.path.abspath(value) for value in values]
        for value in values:
            if separator in value:
                raise Refused(f"{flag} {value}: a value cannot contain `{separator}`")
        os.environ[variable] = separator.join(values)
    most = getattr(arguments, "kv_policy_max_one_piece_prefill", None)
    if most is not None:
        os.environ[ONE_PIECE_VARIABLE] = most
        one_piece(None)
    for option, variable, check in (
        ("kv_policy_fold_interval", INTERVAL_VARIABLE, fold_interval),
        ("kv_policy_kernels", KERNELS_VARIABLE, kernels),
    ):
        value = getattr(arguments, option, None)
        if value is None:
            continue
        os.environ[variable] = value
        check()
        if not requested()[0]:
            raise Refused(f"{_flag(option)} {value}: there is no --kv-policy")


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def requested() -> tuple[list[str], list[str]]:
    """Paths and settings from the environment."""
    paths = os.environ.get(PATHS_VARIABLE, "").split(os.pathsep)
    settings = os.environ.get(SETTINGS_VARIABLE, "").split(",")
    return [p for p in paths if p], [s for s in settings if s]


def fold_interval() -> int:
    """Decode steps from one fold to the next, from the environment.

    Raises:
        Refused: it is not a whole number from 1 on.
    """
    text = os.environ.get(INTERVAL_VARIABLE, "").strip()
    if not text:
        return DEFAULT_INTERVAL
    if not text.isdecimal() or int(text) < 1:
        raise Refused(f"--kv-policy-fold-interval {text}: expected a whole number from 1 on")
    return int(text)


def kernels() -> str:
    """What computes, one of KERNELS, from the environment.

    Raises:
        Refused: it is none of them.
    """
    text = os.environ.get(KERNELS_VARIABLE, "").strip() or KERNELS[0]
    if text not in KERNELS:
        raise Refused(f"--kv-policy-kernels {text}: expected one of {', '.join(KERNELS)}")
    return text


def one_piece(chunk: int | None) -> int | None:
    """Tokens of a prompt that is prefilled in one piece at most; None for any number.

    Args:
        chunk: SGLang's chunk size, taken where the operator said nothing.

    Raises:
        Refused: the operator's number is not a whole number from 1 on.
    """
    text = os.environ.get(ONE_PIECE_VARIABLE, "").strip()
    if not text:
        return chunk if chunk is not None and chunk > 0 else None
    if not text.isdecimal() or int(text) < 1:
        raise Refused(
            f"--kv-policy-max-one-piece-prefill {text}: expected a whole number from 1 on"
        )
    return int(text)


def load_policies(paths: Sequence[str], settings: Sequence[str]) -> tuple[Policy, ...]:
    """Read and check policy files.

    Raises:
        Refused: a file cannot be read, is wrong or needs what is not served; two policies have the
            same name; a setting has no policy. The message holds the checker's diagnostics.
    """
    if settings and not paths:
        raise Refused(f"--kv-policy-set {settings[0]}: there is no --kv-policy")
    programs: dict[str, tuple[Program, str]] = {}
    for path in paths:
        program = _program(path)
        if program.name == "none":
            raise Refused(f"--kv-policy {path}: the name `none` stands for no policy")
        if program.name in programs:
            other = programs[program.name][1]
            raise Refused(f"--kv-policy {path}: {other} is also called `{program.name}`")
        programs[program.name] = (program, path)
    values = _settings(settings, list(programs))
    return tuple(Policy(program, path, values[name]) for name, (program, path) in programs.items())


def _program(path: str) -> Program:
    if not Path(path).is_file():
        raise Refused(f"--kv-policy {path}: there is no such file")
    try:
        checked = load(path)
    except PolicyError as error:
        raise Refused(str(error)) from None
    if checked.program is None:
        raise Refused(f"--kv-policy {path}:\n{render_all(checked.errors, checked.source)}")
    if checked.unserved:
        raise Refused(f"--kv-policy {path}: {'; '.join(checked.unserved)}.")
    return checked.program


def _settings(settings: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, str]]:
    values: dict[str, dict[str, str]] = {name: {} for name in names}
    for setting in settings:
        left, equals, value = setting.partition("=")
        policy, dot, parameter = left.strip().rpartition(".")
        if not equals or not parameter:
            raise Refused(f"--kv-policy-set {setting}: expected NAME=VALUE or POLICY.NAME=VALUE")
        if not dot:
            if len(names) > 1:
                raise Refused(
                    f"--kv-policy-set {setting}: say which policy, as in {names[0]}.{setting}"
                )
            policy = names[0]
        if policy not in values:
            raise Refused(
                f"--kv-policy-set {setting}: no policy is called `{policy}`; "
                f"there is {', '.join(names)}"
            )
        values[policy][parameter] = value.strip()
    return values
