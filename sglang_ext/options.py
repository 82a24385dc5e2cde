"""The command line options, and the policies they name.

`--kv-policy PATH` may be given several times; the first policy is the default of requests that
name none. `--kv-policy NAME=PATH` serves a file by another name, so that one file can be served
several times with different settings. `--kv-policy-set name=value` sets a parameter
(`policy.name=value` when several policies are given). `--kv-policy-fold-interval K` says at which
decode steps entries may leave, `--kv-policy-kernels` what computes. Environment variables carry all
of them to SGLang's child processes; `sgl.Engine`, which has no command line, reads them too.
"""

from __future__ import annotations

import logging
import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpolicy.dsl.bind import Bound, bind
from kvpolicy.dsl.check import Checked, load
from kvpolicy.dsl.diagnostics import PolicyError, render_all
from kvpolicy.dsl.ir import ModelShape, Program
from kvpolicy.sglang_ext import share
from kvpolicy.sglang_ext.errors import Refused

logger = logging.getLogger(__name__)

PATHS_VARIABLE = "SGLANG_KV_POLICY"  # [name=]path, separated as in PATH
SETTINGS_VARIABLE = "SGLANG_KV_POLICY_SET"  # name=value, separated by commas
ONE_PIECE_VARIABLE = "SGLANG_KV_POLICY_MAX_ONE_PIECE_PREFILL"  # tokens
INTERVAL_VARIABLE = "SGLANG_KV_POLICY_FOLD_INTERVAL"  # decode steps
KERNELS_VARIABLE = "SGLANG_KV_POLICY_KERNELS"  # one of KERNELS

# Decode steps from one fold to the next; docs/results/fold_interval.md has the measurement.
DEFAULT_INTERVAL = 16

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9@._-]*")

KERNELS = ("auto", "torch", "triton")  # the first one is the default


@dataclass(frozen=True)
class Policy:
    """A checked policy file as it is served.

    Attributes:
        name: by which requests choose it, the file's own unless the operator gave another.
        path: of the file.
        settings: parameter values that the operator set.
        warnings: what the checker says of a file that is well; one text, empty for none.
    """

    name: str
    program: Program
    path: str
    settings: Mapping[str, str]
    warnings: str = ""

    @property
    def option(self) -> str:
        """The option that asked for it, for messages."""
        named = "" if self.name == self.program.name else f"{self.name}="
        return f"--kv-policy {named}{self.path}"

    def bind(self, shape: ModelShape) -> Bound:
        """The policy for a model.

        Raises:
            Refused: a setting is unknown or not accepted, or the policy does not fit the model.
        """
        try:
            bound = bind(self.program, shape, self.settings, fold_interval=fold_interval())
        except PolicyError as error:
            raise Refused(f"{self.option}: {error}") from None
        sentence = share.unserved(bound)
        if sentence:
            raise Refused(f"{self.option}: {sentence}")
        return bound


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options to SGLang's command line; the environment gives the defaults."""
    group = parser.add_argument_group("KV-cache policies (kvpolicy)")
    group.add_argument(
        "--kv-policy",
        metavar="[NAME=]PATH",
        nargs="+",
        action="extend",
        help="KV-cache policy file (YAML), and the name by which requests choose it if that is not "
        "the file's own; may be given several times. The first is the default of requests that "
        "name none in sampling_params.custom_params.kv_policy.",
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
            values = [_absolute(value) for value in values]
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


def _absolute(value: str) -> str:
    name, path = _named(value)
    return os.path.abspath(path) if name is None else f"{name}={os.path.abspath(path)}"


def _named(value: str) -> tuple[str | None, str]:
    """The name that a value of --kv-policy gives, None if it gives none, and the path.

    Raises:
        Refused: there is no path, or the name cannot be one.
    """
    name, equals, path = value.partition("=")
    if not equals or os.sep in name:
        return None, value
    if not path:
        raise Refused(f"--kv-policy {value}: expected PATH or NAME=PATH")
    if not _NAME.fullmatch(name):
        raise Refused(
            f"--kv-policy {value}: `{name}` cannot be a name; a name has letters, digits, `@`, "
            "`.`, `_` and `-`, and begins with a letter or a digit"
        )
    return name, path


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def requested() -> tuple[list[str], list[str]]:
    """Policies (`PATH` or `NAME=PATH`) and settings from the environment."""
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


def load_policies(values: Sequence[str], settings: Sequence[str]) -> tuple[Policy, ...]:
    """Read and check policy files, each once.

    Args:
        values, settings: of --kv-policy and --kv-policy-set.

    Raises:
        Refused: a file cannot be read, is wrong or needs what is not served; two policies have the
            same name; a setting has no policy. The message holds the checker's diagnostics.
    """
    if settings and not values:
        raise Refused(f"--kv-policy-set {settings[0]}: there is no --kv-policy")
    read: dict[str, Checked] = {}
    named: dict[str, str] = {}
    for value in values:
        given, path = _named(value)
        if path not in read:
            read[path] = _checked(path)
        name = given or read[path].require().name
        if name == "none":
            raise Refused(f"--kv-policy {value}: the name `none` stands for no policy")
        if name in named:
            raise Refused(
                f"--kv-policy {value}: {named[name]} is also called `{name}`; give one of them "
                f"another name, as in --kv-policy {name}-2={path}"
            )
        named[name] = path
    chosen = _settings(settings, list(named))
    policies = []
    for name, path in named.items():
        checked = read[path]
        warnings = render_all(checked.diagnostics, checked.source)
        policies.append(Policy(name, checked.require(), path, chosen[name], warnings))
    return tuple(policies)


def log_warnings(policies: Sequence[Policy]) -> None:
    """What the checker says of files that are well, each once."""
    for path, text in {policy.path: policy.warnings for policy in policies}.items():
        if text:
            logger.warning("--kv-policy %s:\n%s", path, text)


def _checked(path: str) -> Checked:
    try:
        checked = load(path)
    except PolicyError as error:
        raise Refused(f"--kv-policy {path}: {error.diagnostics[0].message}") from None
    if checked.program is None:
        raise Refused(f"--kv-policy {path}:\n{render_all(checked.errors, checked.source)}")
    if checked.unserved:
        raise Refused(f"--kv-policy {path}: {'; '.join(checked.unserved)}.")
    return checked


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
