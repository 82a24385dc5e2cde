"""The policies that the options name.

`--kv-policy PATH` may be given several times; the first policy is the default for requests that
name none. `--kv-policy NAME=PATH` serves a file under another name, so that one file can be served
several times with different settings. `--kv-policy-set name=value` sets a parameter
(`policy.name=value` when several policies are given), `--kv-policy-data name=path` gives all
policies a tensor of the model that they declare.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.bind.model_config import ModelConfig
from kvpolicy.dsl.bind.named import NAME, OF_NAMES, settings_by_policy
from kvpolicy.dsl.bind.parameters import text_of
from kvpolicy.dsl.check.policy import Checked, load
from kvpolicy.dsl.data.given import with_data
from kvpolicy.dsl.ir.nodes import ModelShape, Program
from kvpolicy.dsl.syntax.diagnostics import PolicyError, render_all
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.tools.cost_limit import check_cost
from kvpolicy.experiments.definition.arms import paths_by_name
from kvpolicy.experiments.definition.experiment import NO_POLICY
from kvpolicy.sglang_ext.face import options
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.face.pairing import check_share

logger = logging.getLogger(__name__)

REQUEST = "request"  # the path of a policy that came while the server ran

Texts = tuple[tuple[str, str], ...]  # names of parameters and their values as text

_PLACE = re.compile(r"^.*?: error\[[a-z-]+\]: ")  # what the checker's messages begin with


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
            bound = bind(self.program, shape, self.settings, fold_interval=options.fold_interval())
            check_share(bound)
        except PolicyError as error:
            raise Refused(f"{self.option}: {error}") from None
        return bound


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

    max_percent = options.max_cost()
    started, digests = time.perf_counter(), set()
    for policy in policies:
        bound = policy.bind(model.shape)
        if bound.digest in digests:
            continue
        digests.add(bound.digest)
        try:
            if max_percent:
                check_cost(bound, model, length, max_percent / 100, options.COST.flag)
            trial(bound)
        except PolicyError as error:
            raise Refused(f"{policy.option}: {error}") from None
    seconds = time.perf_counter() - started
    logger.info("KV-cache policies: %d tried in %.1f s.", len(digests), seconds)


def load_policies(
    values: Sequence[str], settings: Sequence[str], data: Sequence[str] = ()
) -> tuple[Policy, ...]:
    """Read and check policy files, each once.

    Args:
        values, settings, data: values of --kv-policy, --kv-policy-set and --kv-policy-data.

    Raises:
        Refused: a file cannot be read, is wrong or needs what is not served; two policies have the
            same name; a setting or a tensor has no policy, or a parameter is set twice. The message
            holds the checker's diagnostics.
    """
    for option, given in ((options.SETTINGS, settings), (options.DATA, data)):
        if given and not values:
            raise Refused(f"{option.flag} {given[0]}: there is no --kv-policy")
    read = cache(_checked)
    try:
        paths = paths_by_name(values, lambda path: read(path).require().name)
    except ValueError as error:
        raise Refused(f"--kv-policy {error}") from None
    try:
        policy_settings = settings_by_policy(settings, list(paths))
    except ValueError as error:
        raise Refused(f"--kv-policy-set {error}") from None
    files = {path: read(path) for path in paths.values()}
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
        return with_data(programs, data, options.DATA.flag)
    except PolicyError as error:
        text = str(error).removeprefix(f"{options.DATA.flag}: ")
        raise Refused(f"{options.DATA.flag}: {text}") from None


def policy_of(name: str, text: str, settings: Mapping[str, str]) -> Policy:
    """A policy that comes as text while the server runs.

    Raises:
        Refused: the name cannot be one, or the text is wrong or needs what is not served.
    """
    if name == NO_POLICY:
        raise Refused(f"the name `{NO_POLICY}` stands for no policy")
    if not NAME.fullmatch(name):
        raise Refused(f"`{name[:70]}` cannot be a name; {OF_NAMES}")
    checked = load(Source(name, text))
    try:
        program = checked.executable()
    except PolicyError as error:
        raise Refused(str(error)) from None
    warnings = render_all(checked.diagnostics, checked.source)
    # Tensors come with the model, so a policy may read those of the server's start.
    data = [x for x in options.DATA.values if x.partition("=")[0] in program.data]
    [program] = _with_data([program], data)
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
    try:
        checked.executable()
    except PolicyError as error:
        raise Refused(f"--kv-policy {path}:\n{error}") from None
    return checked
