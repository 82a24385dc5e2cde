"""The policies that are asked, and their settings: `--policy`, `--budget` and `--set`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.data.given import with_data
from kvpolicy.dsl.ir.nodes import ModelShape, Program
from kvpolicy.dsl.syntax.diagnostics import PolicyError, listed, refused
from kvpolicy.dsl.syntax.library import find, shipped
from kvpolicy.evaluation.asking.budgets import ParameterValue, solve, thins_some
from kvpolicy.evaluation.records import FULL

ALL = "all"


@dataclass(frozen=True)
class Variant:
    """One policy with one setting, as a server knows it.

    Attributes:
        alias: name in requests; FULL for full KV.
        policy: name of the policy.
        budget: share of the prompt's entries asked for; None if none was, or no parameter sets it.
        setting: name -> value as text of every parameter that is set.
        lengths: lengths of the prompts that it is asked, in tokens.
        path: file of the policy; None for full KV and for policies of a running server.
        predicted: length -> largest share that is kept.
        meaning: text that identifies the policy with its values; equal for equal variants.
        about: what the policy's file says about it.
    """

    alias: str
    policy: str
    budget: float | None
    setting: Mapping[str, str]
    lengths: tuple[int, ...]
    path: str | None = None
    predicted: Mapping[int, float] = field(default_factory=dict)
    meaning: str = ""
    about: str = ""

    @property
    def label(self) -> str:
        """Policy and budget for people."""
        return self.policy if self.budget is None else f"{self.policy} {100 * self.budget:g} %"


def options(served: Sequence[Variant]) -> tuple[list[str], list[str]]:
    """Values of --kv-policy and --kv-policy-set for a server with these variants."""
    policies = [f"{variant.alias}={variant.path}" for variant in served]
    settings = [
        f"{variant.alias}.{name}={value}"
        for variant in served
        for name, value in variant.setting.items()
    ]
    return policies, settings


def full_kv(lengths: Sequence[int]) -> Variant:
    """The variant with full KV, asked at these lengths."""
    return Variant(FULL, FULL, None, {}, tuple(lengths), about="full KV")


@dataclass(frozen=True)
class _CheckedPolicy:
    """A checked policy and the values of --set for it.

    Attributes:
        program: the policy.
        path: its file.
        given: name -> value of the parameters that are set.
        general: names in `given` that were set for every policy, without `POLICY.`.
    """

    program: Program
    path: str
    given: Mapping[str, str]
    general: frozenset[str] = frozenset()


def variants(
    words: Sequence[str],
    settings: Sequence[str],
    shares: Sequence[float],
    lengths: Sequence[int],
    shape: ModelShape,
    data: Sequence[str] = (),
) -> tuple[list[Variant], list[str]]:
    """The variants to serve, without full KV.

    Args:
        words: values of --policy; `none` is ignored.
        settings: values of --set.
        shares: values of --budget.
        lengths: lengths of the prompts in tokens.
        shape: sizes of the model.
        data: values of --data.

    Returns:
        The variants, and a sentence about each difference from what was asked for.

    Raises:
        PolicyError: a policy fails its check, a value is not accepted, or a name is unknown.
    """
    all_variants: list[Variant] = []
    notes: list[str] = []
    shares = list({f"{share:g}": share for share in shares}.values())
    for policy in _policies(words, settings, data, shape):
        policy_variants, policy_notes = _of_policy(policy, shares, lengths, shape)
        all_variants += policy_variants
        notes += policy_notes
    return all_variants, notes


def _of_policy(
    policy: _CheckedPolicy, shares: Sequence[float], lengths: Sequence[int], shape: ModelShape
) -> tuple[list[Variant], list[str]]:
    """The variants of one policy, and sentences on what differs from what was asked for."""
    name, notes = policy.program.name, []
    parameter, values_by_share = solve(policy.program, shape, policy.given, shares, lengths)
    if parameter in policy.general:
        settings = {key: value for key, value in policy.given.items() if key != parameter}
        policy = replace(policy, given=settings)
        notes.append(
            f"{parameter} sets the share of {name}, so `--set {parameter}=...` is not for it"
        )
    if not values_by_share or parameter in policy.given:
        if shares:
            exception = (
                f", beside those of --set ({', '.join(policy.given)})" if policy.given else ""
            )
            notes.append(
                f"no parameter of {name} sets such a share{exception}; it is served once as it is"
            )
        return [_variant(policy, shape, name, None, None, tuple(lengths))], notes
    policy_variants: list[Variant] = []
    for share in shares:
        values = values_by_share.get(share, ())
        policy_variants += _of_share(policy, shape, share, values, lengths)
        missing_lengths = [n for n in lengths if not any(n in value.lengths for value in values)]
        if missing_lengths:
            tokens = ", ".join(f"{n:,}" for n in missing_lengths)
            notes.append(
                f"{name} keeps {100 * share:g} % of {tokens} tokens at no value of a parameter; "
                "left out (perhaps another `--set`, such as a smaller window, makes room)"
            )
    if thins_some(bind(policy.program, shape, policy_variants[-1].setting), max(lengths)):
        notes.append(f"data decide which layers {name} thins; the share is what it keeps of those")
    return policy_variants, notes


def _of_share(
    policy: _CheckedPolicy,
    shape: ModelShape,
    share: float,
    values: Sequence[ParameterValue],
    lengths: Sequence[int],
) -> Iterator[Variant]:
    """One variant per value; a value that does not suit all lengths has them in its alias."""
    alias = f"{policy.program.name}@{share:g}"
    for value in values:
        suits_all = len(value.lengths) == len(lengths)
        name = alias if suits_all else f"{alias}@{'-'.join(str(n) for n in sorted(value.lengths))}"
        yield _variant(policy, shape, name, share, value, value.lengths)


def _variant(
    policy: _CheckedPolicy,
    shape: ModelShape,
    alias: str,
    share: float | None,
    value: ParameterValue | None,
    lengths: tuple[int, ...],
) -> Variant:
    setting = dict(policy.given)
    if value is not None:
        setting[value.parameter] = value.value
    program = policy.program
    return Variant(
        alias,
        program.name,
        share,
        setting,
        tuple(sorted(lengths)),
        policy.path,
        {} if value is None else value.predicted,
        bind(program, shape, setting).digest,
        program.about,
    )


def _policies(
    words: Sequence[str], settings: Sequence[str], data: Sequence[str], shape: ModelShape
) -> list[_CheckedPolicy]:
    """The checked policies, each with its settings and tensors."""
    names = [name for word in words for name in (shipped() if word == ALL else [word])]
    programs: dict[str, tuple[Program, str]] = {}
    for word in dict.fromkeys(names):
        if word == FULL:
            continue
        program, path = load(word).executable(), str(find(word).resolve())
        if program.name == FULL:
            raise refused(word, "name", f"the name `{FULL}` stands for full KV")
        if programs.get(program.name, (None, path))[1] != path:
            message = f"another file is called `{program.name}` too"
            raise refused(word, "name", message, "change the name on its `policy:` line")
        programs[program.name] = (program, path)
    complete = with_data([program for program, _ in programs.values()], data)
    programs = {program.name: (program, programs[program.name][1]) for program in complete}
    by_policy = _settings(settings, {name: program for name, (program, _) in programs.items()})
    general = {setting.partition("=")[0].strip() for setting in settings}
    for name, (program, _) in programs.items():
        bind(program, shape, by_policy[name])  # refuses what is not accepted, by its name
    return [
        _CheckedPolicy(program, path, by_policy[name], frozenset(general & by_policy[name].keys()))
        for name, (program, path) in programs.items()
    ]


def _settings(
    settings: Sequence[str], programs: Mapping[str, Program]
) -> dict[str, dict[str, str]]:
    """Policy -> name -> value of --set; `NAME=VALUE` is for every policy with that parameter."""
    by_policy: dict[str, dict[str, str]] = {name: {} for name in programs}
    for setting in settings:
        key, equals, value = setting.partition("=")
        policy, dot, parameter = key.strip().rpartition(".")
        if not equals or not parameter:
            message = f"`{setting}` is not NAME=VALUE or POLICY.NAME=VALUE"
            raise refused("--set", "arguments", message)
        if dot and policy not in programs:
            raise refused("--set", "arguments", f"`{setting}`: {_unknown(policy, programs)}")
        takers = [policy] if dot else [n for n, p in programs.items() if parameter in p.params]
        if not takers:
            message = f"`{setting}`: no policy here has a parameter `{parameter}`"
            raise refused("--set", "arguments", message)
        for name in takers:
            by_policy[name][parameter] = value.strip()
    return by_policy


def _unknown(policy: str, programs: Mapping[str, Program]) -> str:
    if not programs:
        return "there is no policy that it could be for"
    return f"no policy here is called `{policy}`; there is {listed(programs)}"


def on_server(words: Sequence[str], served: Sequence[Mapping], lengths: Sequence[int]) -> list:
    """Variants of policies that a running server has.

    Args:
        words: values of --policy: names at the server, `all` or `none`, which is ignored.
        served: name, path and settings of each policy, as the server reports them.
        lengths: lengths of the prompts in tokens.

    Raises:
        PolicyError: the server has no policy of a name.
    """
    policies = {policy["name"]: policy for policy in served}
    names = [name for word in words for name in (policies if word == ALL else [word])]
    all_variants = []
    for name in dict.fromkeys(names):
        if name == FULL:
            continue
        if name not in policies:
            raise _not_there(name, policies)
        setting = {key: str(value) for key, value in (policies[name].get("settings") or {}).items()}
        meaning = f"{policies[name].get('path')} {sorted(setting.items())}"
        all_variants.append(Variant(name, name, None, setting, tuple(lengths), None, {}, meaning))
    return all_variants


def _not_there(name: str, policies: Mapping[str, Mapping]) -> PolicyError:
    if not policies:
        message = f"the server at --url serves no policies, so it cannot be asked for `{name}`"
        help_ = "ask it for `none` only, or start it with `--kv-policy`"
        return refused("--policy", "arguments", message, help_)
    message = f"the server at --url has no policy called `{name}`; it has {listed(policies, 'and')}"
    return refused("--policy", "arguments", message)
