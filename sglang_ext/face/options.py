"""The command line options, and the policies they name.

`--kv-policy PATH` may be given several times; the first policy is the default for requests that
name none. `--kv-policy NAME=PATH` serves a file under another name, so that one file can be served
several times with different settings. `--kv-policy-set name=value` sets a parameter
(`policy.name=value` when several policies are given), `--kv-policy-data name=path` gives all
policies a tensor of the model that they declare. The other options take one value each. All
may stand in the file of `--config`. Environment variables carry them to SGLang's child processes;
`sgl.Engine`, which has no command line, reads them too.
"""

from __future__ import annotations

import logging
import os
import re
import time
from argparse import ArgumentParser, Namespace, _StoreAction
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.bind.model_config import ModelConfig
from kvpolicy.dsl.check.policy import Checked, load
from kvpolicy.dsl.data.given import with_data
from kvpolicy.dsl.ir.nodes import ModelShape, Program
from kvpolicy.dsl.syntax.diagnostics import PolicyError, render_all
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.tools.cost_limit import check_cost
from kvpolicy.experiments.definition.experiment import NO_POLICY
from kvpolicy.sglang_ext.face import pairing
from kvpolicy.sglang_ext.face.errors import Refused

logger = logging.getLogger(__name__)

PATHS_VARIABLE = "SGLANG_KV_POLICY"  # [name=]path, separated as in PATH
SETTINGS_VARIABLE = "SGLANG_KV_POLICY_SET"  # name=value, separated by commas
DATA_VARIABLE = "SGLANG_KV_POLICY_DATA"  # name=path, separated as in PATH
ONE_PIECE_VARIABLE = "SGLANG_KV_POLICY_MAX_ONE_PIECE_PREFILL"  # tokens
INTERVAL_VARIABLE = "SGLANG_KV_POLICY_FOLD_INTERVAL"  # decode steps
KERNELS_VARIABLE = "SGLANG_KV_POLICY_KERNELS"  # one of KERNELS
ATTENTION_VARIABLE = "SGLANG_KV_POLICY_ATTENTION"  # one of ATTENTION
COST_VARIABLE = "SGLANG_KV_POLICY_MAX_COST"  # percent of the prefill's time
FAILURES_VARIABLE = "SGLANG_KV_POLICY_MAX_FAILURES"  # requests
INSPECTION_VARIABLE = "SGLANG_KV_POLICY_ALLOW_INSPECTION"  # 1 or nothing
ALLOW_SET_VARIABLE = "SGLANG_KV_POLICY_ALLOW_SET"  # policy.name, separated by commas
OVERRIDE_VARIABLE = "SGLANG_KV_POLICY_OVERRIDE"  # one of OVERRIDES
EXPERIMENT_VARIABLE = "SGLANG_KV_POLICY_EXPERIMENT"  # path
STATE_VARIABLE = "SGLANG_KV_POLICY_EXPERIMENT_STATE"  # path
SLOTS_VARIABLE = "SGLANG_KV_POLICY_EXPERIMENT_SLOTS"  # slots of the pool

# Decode steps from one fold to the next; docs/results/fold_interval.md has the measurement.
DEFAULT_INTERVAL = 16

# Percent of the time of a prefill of the model's context length that a policy may take.
DEFAULT_COST = 50

# Share of the pool that is set aside for scoring requests again.
DEFAULT_SET_ASIDE = 0.02

# Requests for which a policy may fail before it is disabled.
DEFAULT_FAILURES = 3

REQUEST = "request"  # the path of a policy that came while the server ran
_PLACE = re.compile(r"^\S+: error\[[a-z-]+\]: ")  # what the checker's messages begin with
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9@._-]*")

_FILES = ("kv_experiment", "kv_experiment_state")

KERNELS = ("auto", "torch", "triton")  # the first one is the default
ATTENTION = ("auto", "triton", "flashinfer")  # the first one is the default


# What clients may name: any policy or none, a policy only, nothing. The first is the default.
ANY, LISTED, NOBODY = OVERRIDES = ("any", "listed", "none")

Texts = tuple[tuple[str, str], ...]  # names of parameters and their values as text


@dataclass(frozen=True, eq=False)
class Policy:
    """A checked policy file as it is served; instances are equal only to themselves.

    Attributes:
        name: name by which requests choose it: the file's, unless the operator gave another.
        path: path of the file; `REQUEST` if the policy came while the server ran.
        settings: parameter -> value that the operator set, as text.
        warnings: the checker's warnings about a valid file, in one text; empty for none.
    """

    name: str
    program: Program
    path: str
    settings: Mapping[str, str]
    warnings: str = ""

    @property
    def option(self) -> str:
        """What asked for it, in messages: its option, or its name if it came as a `REQUEST`."""
        if self.path == REQUEST:
            return f"policy `{self.name}`"
        prefix = "" if self.name == self.program.name else f"{self.name}="
        return f"--kv-policy {prefix}{self.path}"

    def with_settings(self, values: Texts) -> Policy:
        """The same policy with other values of some parameters."""
        return replace(self, settings={**self.settings, **dict(values)})

    def reason(self, error: PolicyError | Refused) -> str:
        """Why it was refused, in one sentence for clients: without option, file and code."""
        if isinstance(error, PolicyError):
            return error.diagnostics[0].message
        text = str(error).removeprefix(f"{self.option}: ").splitlines()[0]
        return _PLACE.sub("", text)

    def bind(self, shape: ModelShape) -> Bound:
        """The policy bound to a model's sizes.

        Raises:
            Refused: a setting is unknown or not accepted, or the policy does not fit the model.
        """
        try:
            bound = bind(self.program, shape, self.settings, fold_interval=fold_interval())
        except PolicyError as error:
            raise Refused(f"{self.option}: {error}") from None
        sentence = pairing.unserved(bound)
        if sentence:
            raise Refused(f"{self.option}: {sentence}")
        return bound


def text_of(value: float | bool) -> str:
    """A parameter's value as settings write it."""
    if isinstance(value, bool | int):  # an integer may be too large for a float
        return str(value).lower()
    return f"{value:.17g}"


def texts_of(values: Mapping[str, Any]) -> Texts:
    """The values of parameters as settings write them, in one order."""
    return tuple(sorted((name, text_of(value)) for name, value in values.items()))


def check_policies(policies: Sequence[Policy], model: ModelConfig, length: int) -> None:
    """Bind policies to a model, check their costs and try them out, before anything is loaded.

    Args:
        length: tokens of the model's context.

    Raises:
        Refused: one does not fit the model, costs more than is allowed, or its trial fails.
    """
    from kvpolicy.dsl.tools.trial import trial  # it needs torch, which the command line does not

    max_percent = max_cost()
    started, digests = time.perf_counter(), set()
    for policy in policies:
        bound = policy.bind(model.shape)
        if bound.digest in digests:
            continue
        digests.add(bound.digest)
        try:
            if max_percent:
                check_cost(bound, model, length, max_percent / 100, "--kv-policy-max-cost")
            trial(bound)
        except PolicyError as error:
            raise Refused(f"{policy.option}: {error}") from None
    seconds = time.perf_counter() - started
    logger.info("KV-cache policies: %d tried in %.1f s.", len(digests), seconds)


class _Extend(_StoreAction):
    """Values of all uses of an option; SGLang's `--config` takes no action but a storing one."""

    def __call__(
        self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        earlier_values = getattr(namespace, self.dest, None) or []
        setattr(namespace, self.dest, [*earlier_values, *values])


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options to SGLang's command line; the environment gives the defaults."""
    group = parser.add_argument_group("KV-cache policies (kvpolicy)")
    group.add_argument(
        "--kv-policy",
        metavar="[NAME=]PATH",
        nargs="+",
        action=_Extend,
        help="KV-cache policy file (YAML) or the name of a shipped one, and the name by which "
        "requests choose it if that is not the file's own; may be given several times. The first "
        "is the default of requests that name none in sampling_params.custom_params.kv_policy.",
    )
    group.add_argument(
        "--kv-policy-set",
        metavar="NAME=VALUE",
        nargs="+",
        action=_Extend,
        help="Value of a policy's parameter; POLICY.NAME=VALUE when several policies are given.",
    )
    group.add_argument(
        "--kv-policy-data",
        metavar="NAME=PATH",
        nargs="+",
        action=_Extend,
        help="File of a tensor of the model, for the policies that declare one of this name under "
        "`data`: JSON, .npy, or rows of numbers as text.",
    )
    group.add_argument(
        "--kv-policy-allow-set",
        metavar="NAME",
        nargs="+",
        action=_Extend,
        help="Parameter that requests may set, in custom_params.kv_policy_set; POLICY.NAME when "
        "several policies are given. Default: none.",
    )
    group.add_argument(
        "--kv-policy-max-one-piece-prefill",
        metavar="TOKENS",
        help="Longest prompt that is prefilled in one piece, for policies whose data decide the "
        "layer after which tokens leave; longer prompts are served in full. Default: the chunk "
        "size (--chunked-prefill-size).",
    )
    group.add_argument(
        "--kv-policy-fold-interval",
        metavar="STEPS",
        help="Decode steps between two folds, at which entries leave, for policies without "
        f"`decode.when`. Default {DEFAULT_INTERVAL}.",
    )
    group.add_argument(
        "--kv-policy-kernels",
        metavar="{" + ",".join(KERNELS) + "}",
        help="Kernels that score, choose and copy entries. Default auto: triton on a CUDA device, "
        "torch elsewhere.",
    )
    group.add_argument(
        "--kv-policy-attention",
        metavar="{" + ",".join(ATTENTION) + "}",
        help="Kernels that read compressed entries in decode steps on a GPU. Default auto: those "
        "measured to be faster on the GPU, else triton. flashinfer needs --attention-backend "
        "flashinfer.",
    )
    group.add_argument(
        "--kv-policy-max-cost",
        metavar="PERCENT",
        help="Highest estimated cost of scoring and choosing, in percent of the time of a prefill "
        "at the model's context length; a policy above it is refused. The estimate is for "
        "attention without log-sum-exp (`kvpolicy explain` shows the one with it). 0: no limit. "
        f"Default {DEFAULT_COST}.",
    )
    group.add_argument(
        "--kv-policy-max-failures",
        metavar="REQUESTS",
        help="Failed requests after which a policy is disabled and its requests are served in "
        f"full. 0: never. Default {DEFAULT_FAILURES}.",
    )
    group.add_argument(
        "--kv-policy-allow-inspection",
        action="store_true",
        help="Let clients ask which positions are kept (custom_params.kv_policy_kept) and "
        "prescribe output (kv_policy_force). For evaluation: both cost the server waits.",
    )
    group.add_argument(
        "--kv-policy-override",
        metavar="{" + ",".join(OVERRIDES) + "}",
        help="Policies that a request may name. any: every served policy, or `none` (full KV); "
        "listed: every served policy; none: no policy. Other names are refused. Default any.",
    )
    group.add_argument(
        "--kv-experiment",
        metavar="FILE",
        help="Experiment (YAML) that assigns policies to the requests that name none; see "
        "`kvpolicy experiment check`.",
    )
    group.add_argument(
        "--kv-experiment-state",
        metavar="FILE",
        help="File for the experiment's state, so that a restart goes on with it; its evidence "
        "is kept beside it, in FILE.evidence.",
    )
    group.add_argument(
        "--kv-experiment-slots",
        metavar="SLOTS",
        help="Slots of the KV pool set aside for scoring requests again with full KV, so that no "
        "other request loses cached tokens for it. Default: 2 %% of the pool, at most the model's "
        "context; 0 if the experiment has no `shadow`.",
    )


def export(arguments: Namespace) -> None:
    """Put the parsed options into the environment, which child processes inherit.

    Raises:
        Refused: a value contains the separator of its variable, is not among those of its option,
            or is no number where one is wanted; or there is no --kv-policy.
    """
    for option, variable, separator in (
        ("kv_policy", PATHS_VARIABLE, os.pathsep),
        ("kv_policy_set", SETTINGS_VARIABLE, ","),
        ("kv_policy_data", DATA_VARIABLE, os.pathsep),
        ("kv_policy_allow_set", ALLOW_SET_VARIABLE, ","),
    ):
        values = getattr(arguments, option, None)
        if not values:
            continue
        flag = _flag(option)
        if option == "kv_policy":
            values = [_absolute(value) for value in values]
        if option == "kv_policy_data":
            values = [_absolute_data(value) for value in values]
        for value in values:
            if separator in value:
                raise Refused(
                    f"{flag} {value}: a value cannot contain `{separator}`; give several values "
                    "with blanks between them"
                )
        os.environ[variable] = separator.join(values)
        if not requested().policies:
            raise Refused(f"{flag} {values[0]}: there is no --kv-policy")
    for option, variable, check in (
        ("kv_policy_max_one_piece_prefill", ONE_PIECE_VARIABLE, lambda: one_piece(None)),
        ("kv_policy_fold_interval", INTERVAL_VARIABLE, fold_interval),
        ("kv_policy_kernels", KERNELS_VARIABLE, kernels),
        ("kv_policy_attention", ATTENTION_VARIABLE, attention),
        ("kv_policy_max_cost", COST_VARIABLE, max_cost),
        ("kv_policy_max_failures", FAILURES_VARIABLE, max_failures),
        ("kv_policy_allow_inspection", INSPECTION_VARIABLE, allows_inspection),
        ("kv_policy_override", OVERRIDE_VARIABLE, override),
        ("kv_experiment", EXPERIMENT_VARIABLE, experiment_file),
        ("kv_experiment_state", STATE_VARIABLE, experiment_state),
        ("kv_experiment_slots", SLOTS_VARIABLE, experiment_slots),
    ):
        value = getattr(arguments, option, None)
        if value is None or value is False:
            continue
        if option in _FILES:
            value = os.path.abspath(value)
        os.environ[variable] = "1" if value is True else value
        check()
        if not requested().policies:
            setting = _flag(option) if value is True else f"{_flag(option)} {value}"
            raise Refused(f"{setting}: there is no --kv-policy")


def _absolute(value: str) -> str:
    """A value of --kv-policy that means the same in another folder."""
    name, path = _named(value)
    if os.path.exists(path) or os.sep in path or os.path.splitext(path)[1]:
        path = os.path.abspath(path)
    else:  # the name of a shipped policy, or of nothing
        path = str(shipped().get(path, path))
    return path if name is None else f"{name}={path}"


def _absolute_data(value: str) -> str:
    """A value of --kv-policy-data that means the same in another folder."""
    name, equals, path = value.partition("=")
    return f"{name}={os.path.abspath(path)}" if path else f"{name}{equals}"


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

    def values(variable: str, separator: str) -> list[str]:
        return [value for value in os.environ.get(variable, "").split(separator) if value]

    return Requested(
        values(PATHS_VARIABLE, os.pathsep),
        values(SETTINGS_VARIABLE, ","),
        values(DATA_VARIABLE, os.pathsep),
    )


def refuse_experiment(why: str) -> None:
    """Refuse an experiment where none can be served.

    Args:
        why: the reason, for the operator.

    Raises:
        Refused: the environment names one.
    """
    file = experiment_file()
    if file is not None:
        raise Refused(f"{EXPERIMENT_VARIABLE} {file}: {why}")


def allowed_to_set() -> list[str]:
    """Parameters that requests may set, `[POLICY.]NAME`, from the environment."""
    return [name for name in os.environ.get(ALLOW_SET_VARIABLE, "").split(",") if name]


def fold_interval() -> int:
    """Decode steps from one fold to the next, from the environment.

    Raises:
        Refused: it is not a whole number from 1 on.
    """
    interval = _whole(INTERVAL_VARIABLE, "--kv-policy-fold-interval", 1)
    return DEFAULT_INTERVAL if interval is None else interval


def max_cost() -> int:
    """Percent of a prefill's time that a policy may take, from the environment; 0: any.

    Raises:
        Refused: it is not a whole number.
    """
    percent = _whole(COST_VARIABLE, "--kv-policy-max-cost", 0)
    return DEFAULT_COST if percent is None else percent


def max_failures() -> int:
    """Requests for which a policy may fail before it is disabled, from the environment; 0: any.

    Raises:
        Refused: it is not a whole number.
    """
    failures = _whole(FAILURES_VARIABLE, "--kv-policy-max-failures", 0)
    return DEFAULT_FAILURES if failures is None else failures


def allows_inspection() -> bool:
    """Whether clients may ask for kept positions and prescribe output, from the environment.

    Raises:
        Refused: it is neither 0 nor 1.
    """
    return bool(_whole(INSPECTION_VARIABLE, "--kv-policy-allow-inspection", 0, 1))


def override() -> str:
    """What clients may name, one of OVERRIDES, from the environment.

    Raises:
        Refused: it is none of them.
    """
    return _one_of(OVERRIDE_VARIABLE, "--kv-policy-override", OVERRIDES)


def experiment_file() -> Path | None:
    """The file of the experiment, from the environment; None if there is no experiment."""
    path = os.environ.get(EXPERIMENT_VARIABLE)
    return Path(path) if path else None


def experiment_state() -> Path | None:
    """The file that keeps where the experiment stands, from the environment; None if not set.

    Raises:
        Refused: there is no experiment, or no folder for the file.
    """
    path = os.environ.get(STATE_VARIABLE)
    if not path:
        return None
    if experiment_file() is None:
        raise Refused(f"--kv-experiment-state {path}: there is no --kv-experiment")
    if not os.path.isdir(os.path.dirname(path)):
        raise Refused(f"--kv-experiment-state {path}: its folder is not there")
    return Path(path)


def experiment_slots(pool: int = 0, context: int = 0) -> int:
    """Slots set aside for scoring requests again, from the environment.

    Args:
        pool: slots of the pool; 0 while that is not known.
        context: tokens of the model's context.

    Raises:
        Refused: it is not a whole number or over half of the pool, or there is no experiment.
    """
    flag = "--kv-experiment-slots"
    slots = _whole(SLOTS_VARIABLE, flag, 0)
    if experiment_file() is None:
        if slots:
            raise Refused(f"{flag} {slots}: there is no --kv-experiment")
        return 0
    if slots is None:
        return min(int(DEFAULT_SET_ASIDE * pool), context)
    if pool and slots > pool // 2:
        raise Refused(f"{flag} {slots}: more than half of the pool, which has {pool} slots")
    return slots


def kernels() -> str:
    """What computes, one of KERNELS, from the environment.

    Raises:
        Refused: it is none of them.
    """
    return _one_of(KERNELS_VARIABLE, "--kv-policy-kernels", KERNELS)


def attention() -> str:
    """What reads compressed entries in decode steps, one of ATTENTION, from the environment.

    Raises:
        Refused: it is none of them.
    """
    return _one_of(ATTENTION_VARIABLE, "--kv-policy-attention", ATTENTION)


def _one_of(variable: str, flag: str, values: Sequence[str]) -> str:
    """A value from the environment, one of `values`; the first if none is set."""
    text = os.environ.get(variable, "").strip() or values[0]
    if text not in values:
        raise Refused(f"{flag} {text}: expected one of {', '.join(values)}")
    return text


def one_piece(chunk: int | None) -> int | None:
    """Most tokens of a prompt that is prefilled in one piece; None for any number.

    Args:
        chunk: SGLang's chunk size, taken where the operator set no number.

    Raises:
        Refused: the operator's number is not a whole number from 1 on.
    """
    tokens = _whole(ONE_PIECE_VARIABLE, "--kv-policy-max-one-piece-prefill", 1)
    if tokens is None:
        return chunk if chunk is not None and chunk > 0 else None
    return tokens


def _whole(variable: str, flag: str, least: int, most: int | None = None) -> int | None:
    """A whole number from the environment; None if there is none.

    Raises:
        Refused: it is something else, or not between `least` and `most`.
    """
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    if text.isdecimal() and len(text) < 19:
        number = int(text)
        if least <= number and (most is None or number <= most):
            return number
    expected = f"a whole number from {least} on" if most is None else f"{least} or {most}"
    raise Refused(f"{flag} {text}: expected {expected}")


def load_policies(
    values: Sequence[str], settings: Sequence[str], data: Sequence[str] = ()
) -> tuple[Policy, ...]:
    """Read and check policy files, each once.

    Args:
        values, settings, data: values of --kv-policy, --kv-policy-set and --kv-policy-data.

    Raises:
        Refused: a file cannot be read, is wrong or needs what is not served; two policies have the
            same name; a setting or a tensor has no policy. The message holds the checker's
            diagnostics.
    """
    for flag, given in (("--kv-policy-set", settings), ("--kv-policy-data", data)):
        if given and not values:
            raise Refused(f"{flag} {given[0]}: there is no --kv-policy")
    files: dict[str, Checked] = {}
    paths: dict[str, str] = {}
    for value in values:
        given_name, path = _named(value)
        if path not in files:
            files[path] = _checked(path)
        name = given_name or files[path].require().name
        if name == NO_POLICY:
            raise Refused(f"--kv-policy {value}: the name `{NO_POLICY}` stands for no policy")
        if name in paths:
            raise Refused(
                f"--kv-policy {value}: {paths[name]} is also called `{name}`; give one of them "
                f"another name, as in --kv-policy {name}-2={path}"
            )
        paths[name] = path
    policy_settings = _settings(settings, list(paths))
    programs = dict(
        zip(files, _with_data([x.require() for x in files.values()], data), strict=True)
    )
    policies = []
    for name, path in paths.items():
        checked = files[path]
        warnings = render_all(checked.diagnostics, checked.source)
        policies.append(Policy(name, programs[path], path, policy_settings[name], warnings))
    return tuple(policies)


def _with_data(programs: Sequence[Program], data: Sequence[str]) -> list[Program]:
    """Policies with the tensors of the values of --kv-policy-data.

    Raises:
        Refused: one cannot be read, or no policy declares it.
    """
    try:
        return with_data(programs, data, "--kv-policy-data")
    except PolicyError as error:
        raise Refused(str(error)) from None


def policy_of(name: str, text: str, settings: Mapping[str, str]) -> Policy:
    """A policy that comes as text while the server runs.

    Raises:
        Refused: the name cannot be one, or the text is wrong or needs what is not served.
    """
    if name == NO_POLICY:
        raise Refused(f"the name `{NO_POLICY}` stands for no policy")
    if not _NAME.fullmatch(name):
        raise Refused(f"`{name[:60]}` cannot be a name: it has letters, digits, `@`, `.`, `_`, `-`")
    checked = load(Source(name, text))
    if checked.program is None:
        raise Refused(render_all(checked.errors, checked.source))
    if checked.unserved:
        raise Refused(f"{'; '.join(checked.unserved)}.")
    warnings = render_all(checked.diagnostics, checked.source)
    # Tensors come with the model, so a policy may read those of the server's start.
    data = [x for x in requested().data if x.partition("=")[0] in checked.program.data]
    [program] = _with_data([checked.program], data)
    return Policy(name, program, REQUEST, dict(settings), warnings)


def log_warnings(policies: Sequence[Policy]) -> None:
    """Log the checker's warnings about valid files, once per file."""
    for path, text in {policy.path: policy.warnings for policy in policies}.items():
        if text:
            logger.warning("--kv-policy %s:\n%s", path, text)


def _checked(path: str) -> Checked:
    try:
        checked = load(path)
    except PolicyError as error:
        problem = error.diagnostics[0]
        text = problem.message if problem.help is None else f"{problem.message}; {problem.help}"
        raise Refused(f"--kv-policy {path}: {text}") from None
    if checked.program is None:
        raise Refused(f"--kv-policy {path}:\n{render_all(checked.errors, checked.source)}")
    if checked.unserved:
        raise Refused(f"--kv-policy {path}: {'; '.join(checked.unserved)}.")
    return checked


def _settings(settings: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, str]]:
    values: dict[str, dict[str, str]] = {name: {} for name in names}
    for setting in settings:
        qualified_name, equals, value = setting.partition("=")
        policy, dot, parameter = qualified_name.strip().rpartition(".")
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
