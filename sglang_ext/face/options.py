"""The command line options, and the environment variables that carry them.

SGLang's child processes inherit the variables; `sgl.Engine`, which has no command line, reads them
too. `--kv-policy` and the options that end in `-set` and `-data` take several values and may be
given several times; the others take one value each. All may stand in the file of `--config`.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace, _ArgumentGroup, _StoreAction
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvpolicy.dsl.bind.named import FOLD_INTERVAL, name_and_path
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.sglang_ext.face.errors import Refused

_F = TypeVar("_F", bound=Callable[..., object])

# Percent of the time of a prefill of the model's context length that a policy may take.
DEFAULT_COST = 50

# Share of the pool that is set aside for scoring requests again.
DEFAULT_SET_ASIDE = 0.02

# Requests for which a policy may fail before it is disabled.
DEFAULT_FAILURES = 3

KERNELS = ("auto", "torch", "triton")  # the first one is the default
ATTENTION = ("auto", "triton", "flashinfer")  # the first one is the default

# What clients may name: any policy or none, a policy only, nothing. The first is the default.
ANY, LISTED, NOBODY = OVERRIDES = ("any", "listed", "none")


@dataclass(frozen=True)
class Option:
    """An option that takes no value.

    Attributes:
        flag: as on the command line.
        variable: the environment variable that carries it.
        about: what `--help` says.
    """

    flag: str
    variable: str
    about: str

    @property
    def text(self) -> str:
        """What the environment holds; empty: nothing."""
        return os.environ.get(self.variable, "").strip()

    def add_to(self, group: _ArgumentGroup) -> None:
        """Add it to a command line."""
        group.add_argument(self.flag, action="store_true", help=self.about)

    def given(self, arguments: Namespace) -> Any:
        """Its value on a command line; None or something empty if it is not there."""
        return getattr(arguments, self.flag.removeprefix("--").replace("-", "_"), None)

    def export(self, given: Any) -> str:
        """Put a value into the environment; returns the option as messages show it."""
        os.environ[self.variable] = "1"
        return self.flag

    def whole(self, least: int, most: int | None = None) -> int | None:
        """A whole number from the environment; None if there is none.

        Raises:
            Refused: it is something else, or not between `least` and `most`.
        """
        text = self.text
        if not text:
            return None
        if text.isdecimal() and len(text) < 19:
            number = int(text)
            if least <= number and (most is None or number <= most):
                return number
        expected = f"a whole number from {least} on" if most is None else f"{least} or {most}"
        raise Refused(f"{self.flag} {text}: expected {expected}")

    def one_of(self, values: Sequence[str]) -> str:
        """A value from the environment, one of `values`; the first if none is set."""
        text = self.text or values[0]
        if text not in values:
            raise Refused(f"{self.flag} {text}: expected one of {', '.join(values)}")
        return text


@dataclass(frozen=True)
class ValueOption(Option):
    """An option with one value.

    Attributes:
        metavar: what stands for the value in `--help`.
        portable: makes of a value one that means the same in another folder.
    """

    metavar: str
    portable: Callable[[str], str] = str

    def add_to(self, group: _ArgumentGroup) -> None:
        """Add it to a command line."""
        group.add_argument(self.flag, metavar=self.metavar, help=self.about)

    def export(self, given: Any) -> str:
        """Put a value into the environment; returns the option as messages show it."""
        os.environ[self.variable] = value = self.portable(given)
        return f"{self.flag} {value}"


@dataclass(frozen=True, kw_only=True)
class ListOption(ValueOption):
    """An option with several values.

    Attributes:
        separator: between the values in the variable.
    """

    separator: str

    @property
    def values(self) -> list[str]:
        """The values in the environment."""
        return [value for value in self.text.split(self.separator) if value]

    def add_to(self, group: _ArgumentGroup) -> None:
        """Add it to a command line."""
        group.add_argument(
            self.flag, metavar=self.metavar, nargs="+", action=_Extend, help=self.about
        )

    def export(self, given: Any) -> str:
        """Put values into the environment; returns the option as messages show it.

        Raises:
            Refused: a value contains the separator.
        """
        values = [self.portable(value) for value in given]
        for value in values:
            if self.separator in value:
                raise Refused(
                    f"{self.flag} {value}: a value cannot contain `{self.separator}`; give several "
                    "values with blanks between them"
                )
        os.environ[self.variable] = self.separator.join(values)
        return f"{self.flag} {values[0]}"


class _Extend(_StoreAction):
    """Values of all uses of an option; SGLang's `--config` takes no action but a storing one."""

    def __call__(
        self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        earlier_values = getattr(namespace, self.dest, None) or []
        setattr(namespace, self.dest, [*earlier_values, *values])


def _absolute(value: str) -> str:
    """A value of --kv-policy that means the same in another folder."""
    try:
        name, path = name_and_path(value)
    except ValueError as error:
        raise Refused(f"--kv-policy {value}: {error}") from None
    if os.path.exists(path) or os.sep in path or os.path.splitext(path)[1]:
        path = os.path.abspath(path)
    else:  # the name of a shipped policy, or of nothing
        path = str(shipped().get(path, path))
    return path if name is None else f"{name}={path}"


def _absolute_data(value: str) -> str:
    """A value of --kv-policy-data that means the same in another folder."""
    name, equals, path = value.partition("=")
    return f"{name}={os.path.abspath(path)}" if path else f"{name}{equals}"


PATHS = ListOption(
    "--kv-policy",
    "SGLANG_KV_POLICY",
    "KV-cache policy file (YAML) or the name of a shipped one, and the name by which "
    "requests choose it if that is not the file's own; may be given several times. The first "
    "is the default of requests that name none in sampling_params.custom_params.kv_policy.",
    metavar="[NAME=]PATH",
    portable=_absolute,
    separator=os.pathsep,
)
SETTINGS = ListOption(
    "--kv-policy-set",
    "SGLANG_KV_POLICY_SET",
    "Value of a policy's parameter; POLICY.NAME=VALUE when several policies are given.",
    metavar="NAME=VALUE",
    separator=",",
)
DATA = ListOption(
    "--kv-policy-data",
    "SGLANG_KV_POLICY_DATA",
    "File of a tensor of the model, for the policies that declare one of this name under "
    "`data`: JSON, .npy, or rows of numbers as text.",
    metavar="NAME=PATH",
    portable=_absolute_data,
    separator=os.pathsep,
)
ALLOW_SET = ListOption(
    "--kv-policy-allow-set",
    "SGLANG_KV_POLICY_ALLOW_SET",
    "Parameter that requests may set, in custom_params.kv_policy_set; POLICY.NAME when "
    "several policies are given. Default: none.",
    metavar="NAME",
    separator=",",
)
ONE_PIECE = ValueOption(
    "--kv-policy-max-one-piece-prefill",
    "SGLANG_KV_POLICY_MAX_ONE_PIECE_PREFILL",
    "Longest prompt that is prefilled in one piece, for policies whose data decide the "
    "layer after which tokens leave; longer prompts are served in full. Default: the chunk "
    "size (--chunked-prefill-size).",
    metavar="TOKENS",
)
INTERVAL = ValueOption(
    "--kv-policy-fold-interval",
    "SGLANG_KV_POLICY_FOLD_INTERVAL",
    "Decode steps between two folds, at which entries leave, for policies without "
    f"`decode.when`. Default {FOLD_INTERVAL}.",
    metavar="STEPS",
)
KERNEL_CHOICE = ValueOption(
    "--kv-policy-kernels",
    "SGLANG_KV_POLICY_KERNELS",
    "Kernels that score, choose and copy entries. Default auto: triton on a CUDA device, "
    "torch elsewhere.",
    metavar="{" + ",".join(KERNELS) + "}",
)
ATTENTION_CHOICE = ValueOption(
    "--kv-policy-attention",
    "SGLANG_KV_POLICY_ATTENTION",
    "Kernels that read compressed entries in decode steps on a GPU. Default auto: those "
    "measured to be faster on the GPU, else triton. flashinfer needs --attention-backend "
    "flashinfer.",
    metavar="{" + ",".join(ATTENTION) + "}",
)
COST = ValueOption(
    "--kv-policy-max-cost",
    "SGLANG_KV_POLICY_MAX_COST",
    "Highest estimated cost of scoring and choosing, in percent of the time of a prefill "
    "at the model's context length; a policy above it is refused. The estimate is for "
    "attention without log-sum-exp (`kvpolicy explain` shows the one with it). 0: no limit. "
    f"Default {DEFAULT_COST}.",
    metavar="PERCENT",
)
FAILURES = ValueOption(
    "--kv-policy-max-failures",
    "SGLANG_KV_POLICY_MAX_FAILURES",
    "Failed requests after which a policy is disabled and its requests are served in "
    f"full. 0: never. Default {DEFAULT_FAILURES}.",
    metavar="REQUESTS",
)
INSPECTION = Option(
    "--kv-policy-allow-inspection",
    "SGLANG_KV_POLICY_ALLOW_INSPECTION",
    "Let clients ask which positions are kept (custom_params.kv_policy_kept) and "
    "prescribe output (kv_policy_force). For evaluation: both cost the server waits.",
)
OVERRIDE = ValueOption(
    "--kv-policy-override",
    "SGLANG_KV_POLICY_OVERRIDE",
    "Policies that a request may name. any: every served policy, or `none` (full KV); "
    "listed: every served policy; none: no policy. Other names are refused. Default any.",
    metavar="{" + ",".join(OVERRIDES) + "}",
)
EXPERIMENT = ValueOption(
    "--kv-experiment",
    "SGLANG_KV_POLICY_EXPERIMENT",
    "Experiment (YAML) that assigns policies to the requests that name none; see "
    "`kvpolicy experiment check`.",
    metavar="FILE",
    portable=os.path.abspath,
)
STATE = ValueOption(
    "--kv-experiment-state",
    "SGLANG_KV_POLICY_EXPERIMENT_STATE",
    "File for the experiment's state, so that a restart goes on with it; its evidence "
    "is kept beside it, in FILE.evidence.",
    metavar="FILE",
    portable=os.path.abspath,
)
SLOTS = ValueOption(
    "--kv-experiment-slots",
    "SGLANG_KV_POLICY_EXPERIMENT_SLOTS",
    "Slots of the KV pool set aside for scoring requests again with full KV, so that no "
    "other request loses cached tokens for it. Default: 2 %% of the pool, at most the model's "
    "context; 0 if the experiment has no `shadow`.",
    metavar="SLOTS",
)
OPTIONS = (
    PATHS, SETTINGS, DATA, ALLOW_SET, ONE_PIECE, INTERVAL, KERNEL_CHOICE, ATTENTION_CHOICE, COST,
    FAILURES, INSPECTION, OVERRIDE, EXPERIMENT, STATE, SLOTS,
)  # fmt: skip

# What reads an option's value and refuses a wrong one.
_READERS: dict[Option, Callable[..., object]] = {}


def _reads(option: Option) -> Callable[[_F], _F]:
    def note(reader: _F) -> _F:
        _READERS[option] = reader
        return reader

    return note


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options to SGLang's command line; the environment gives the defaults."""
    group = parser.add_argument_group("KV-cache policies (kvpolicy)")
    for option in OPTIONS:
        option.add_to(group)


def export(arguments: Namespace) -> None:
    """Put the parsed options into the environment, which child processes inherit.

    Raises:
        Refused: a value contains the separator of its variable, is not among those of its option,
            or is no number where one is wanted; or there is no --kv-policy.
    """
    exported: set[Option] = set()
    for option in OPTIONS:
        given = option.given(arguments)
        if given is None or given is False or given == []:
            continue
        shown = option.export(given)
        exported.add(option)
        check(option)
        if not PATHS.values:
            why = "the value is empty" if option == PATHS else "there is no --kv-policy"
            raise Refused(f"{shown.strip()}: {why}")
    check_variables(besides=exported)


def check(option: Option) -> None:
    """Refuse a value in the environment that its reader does not take.

    Raises:
        Refused: the message names the option.
    """
    if option in _READERS:
        _READERS[option]()


def check_variables(besides: Collection[Option] = ()) -> None:
    """Refuse values that the environment has had from the start, if a policy is asked for.

    Args:
        besides: options that come from the command line.

    Raises:
        Refused: the message names the variable.
    """
    for option in OPTIONS if PATHS.values else ():
        if option not in besides and option.text:
            try:
                check(option)
            except Refused as error:
                raise Refused(f"{option.variable}: {error}") from None


class Requested(NamedTuple):
    """Values of options, from the environment.

    Attributes:
        policies: of --kv-policy: `PATH` or `NAME=PATH`.
        settings: of --kv-policy-set.
        data: of --kv-policy-data.
    """

    policies: list[str]
    settings: list[str]
    data: list[str]


def requested() -> Requested:
    """The policies that are asked for."""
    return Requested(PATHS.values, SETTINGS.values, DATA.values)


def refuse_experiment(why: str) -> None:
    """Refuse an experiment where none can be served.

    Args:
        why: the reason, for the operator.

    Raises:
        Refused: the environment names one.
    """
    file = experiment_file()
    if file is not None:
        raise Refused(f"{EXPERIMENT.variable} {file}: {why}")


@_reads(INTERVAL)
def fold_interval() -> int:
    """Decode steps from one fold to the next, from the environment.

    Raises:
        Refused: it is not a whole number from 1 on.
    """
    interval = INTERVAL.whole(1)
    return FOLD_INTERVAL if interval is None else interval


@_reads(COST)
def max_cost() -> int:
    """Percent of a prefill's time that a policy may take, from the environment; 0: any.

    Raises:
        Refused: it is not a whole number.
    """
    percent = COST.whole(0)
    return DEFAULT_COST if percent is None else percent


@_reads(FAILURES)
def max_failures() -> int:
    """Requests for which a policy may fail before it is disabled, from the environment; 0: any.

    Raises:
        Refused: it is not a whole number.
    """
    failures = FAILURES.whole(0)
    return DEFAULT_FAILURES if failures is None else failures


@_reads(INSPECTION)
def allows_inspection() -> bool:
    """Whether clients may ask for kept positions and prescribe output, from the environment.

    Raises:
        Refused: it is neither 0 nor 1.
    """
    return bool(INSPECTION.whole(0, 1))


@_reads(OVERRIDE)
def override() -> str:
    """What clients may name, one of OVERRIDES, from the environment.

    Raises:
        Refused: it is none of them.
    """
    return OVERRIDE.one_of(OVERRIDES)


@_reads(EXPERIMENT)
def experiment_file() -> Path | None:
    """The file of the experiment, from the environment; None if there is no experiment."""
    return Path(EXPERIMENT.text) if EXPERIMENT.text else None


@_reads(STATE)
def experiment_state() -> Path | None:
    """The file that keeps where the experiment stands, from the environment; None if not set.

    Raises:
        Refused: there is no experiment, or no folder for the file.
    """
    path = STATE.text
    if not path:
        return None
    if experiment_file() is None:
        raise Refused(f"{STATE.flag} {path}: there is no --kv-experiment")
    if not os.path.isdir(os.path.dirname(path)):
        raise Refused(f"{STATE.flag} {path}: its folder is not there")
    return Path(path)


@_reads(SLOTS)
def experiment_slots(pool: int = 0, context: int = 0) -> int:
    """Slots set aside for scoring requests again, from the environment.

    Args:
        pool: slots of the pool; 0 while that is not known.
        context: tokens of the model's context.

    Raises:
        Refused: it is not a whole number or over half of the pool, or there is no experiment.
    """
    slots = SLOTS.whole(0)
    if experiment_file() is None:
        if slots:
            raise Refused(f"{SLOTS.flag} {slots}: there is no --kv-experiment")
        return 0
    if slots is None:
        return min(int(DEFAULT_SET_ASIDE * pool), context)
    if pool and slots > pool // 2:
        raise Refused(f"{SLOTS.flag} {slots}: more than half of the pool, which has {pool} slots")
    return slots


@_reads(KERNEL_CHOICE)
def kernels() -> str:
    """What computes, one of KERNELS, from the environment.

    Raises:
        Refused: it is none of them.
    """
    return KERNEL_CHOICE.one_of(KERNELS)


@_reads(ATTENTION_CHOICE)
def attention() -> str:
    """What reads compressed entries in decode steps, one of ATTENTION, from the environment.

    Raises:
        Refused: it is none of them.
    """
    return ATTENTION_CHOICE.one_of(ATTENTION)


@_reads(ONE_PIECE)
def one_piece(chunk: int | None = None) -> int | None:
    """Most tokens of a prompt that is prefilled in one piece; None for any number.

    Args:
        chunk: SGLang's chunk size, taken where the operator set no number.

    Raises:
        Refused: the operator's number is not a whole number from 1 on.
    """
    tokens = ONE_PIECE.whole(1)
    if tokens is None:
        return chunk if chunk is not None and chunk > 0 else None
    return tokens
