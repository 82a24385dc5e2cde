"""A server whose policies are looked into: started on a model, or found at a URL.

`inspect` and `fidelity` name policies by file. Everything that can be wrong with them is found
before a server is started.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from kvpolicy.dsl.bind import bind
from kvpolicy.dsl.check import load
from kvpolicy.dsl.commands import overrides
from kvpolicy.dsl.diagnostics import listed, refused
from kvpolicy.dsl.library import find, shipped
from kvpolicy.dsl.model_config import read_config
from kvpolicy.evaluation.serving import ServerFailed, serve

_PATIENCE = 600  # seconds for one answer


@dataclass(frozen=True)
class Named:
    """A policy of the command line.

    Attributes:
        name: how requests choose it.
        path: its file; None where only the server at the URL knows it.
        settings: values of its parameters.
    """

    name: str
    path: Path | None
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Look:
    """A server that answers, and the tokenizer of its model.

    Attributes:
        policies: those of the command line; settings are the server's where it tells them.
        tokenizer: a transformers tokenizer.
        vocabulary: rows of the model's logits; None if its config is not at hand.
    """

    url: str
    policies: tuple[Named, ...]
    tokenizer: Any
    vocabulary: int | None
    session: requests.Session

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, special tokens included."""
        return list(self.tokenizer(text, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def ask(self, ids: Sequence[int], policy: str, tokens: int, **fields: Any) -> dict[str, Any]:
        """The answer of /generate to a prompt, greedily and whatever it ends with.

        Args:
            ids: the prompt.
            tokens: how many to generate.
            fields: further fields of the request; `custom`: further custom parameters.

        Raises:
            PolicyError: the server refuses it or does not answer; the server's own sentence.
        """
        custom = {"kv_policy": policy, **fields.pop("custom", {})}
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": list(ids), "sampling_params": {**sampling, "custom_params": custom}}
        return _json(self.session, "POST", self.url + "/generate", {**body, **fields})


@contextlib.contextmanager
def opened(args: argparse.Namespace) -> Iterator[Look]:
    """The server that the options of look_arguments.py name, for the time of a `with` block.

    Raises:
        PolicyError: a policy, a setting or the model cannot be used, or nobody answers.
    """
    if args.url is None and args.model is None:
        raise refused("--model", "arguments", "name a model to serve, or a server with --url")
    policies = named(args.policies, args.set, args.model, args.url is not None)
    if args.url is not None:
        yield _found(args, policies)
        return
    flags = server_flags(args.server_args)
    settings = [f"{p.name}.{key}={value}" for p in policies for key, value in p.settings.items()]
    paths = [str(policy.path) for policy in policies]
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(serve(args.model, paths, settings, progress=True, **flags))
        except ServerFailed as error:
            raise refused(args.model, "server", str(error)) from None
        yield Look(server.url, policies, *_model(args.model), server.session)


def named(
    policies: Sequence[str], settings: Sequence[str], model: str | None, running: bool
) -> tuple[Named, ...]:
    """The policies of the command line, checked and, where a model is named, bound to it.

    Args:
        settings: `NAME=VALUE`, or `POLICY.NAME=VALUE` where several policies are named.
        running: whether the server runs already: its policies and settings are its own.

    Raises:
        PolicyError: a defect, an unknown name or setting, or a policy that is named twice.
    """
    if running and settings:
        message = "a server that runs already has its own settings"
        raise refused("--set", "arguments", message, "leave it out, or leave --url out")
    found = [_by_name(each, running) for each in policies]
    names = [each.name for each in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise refused("--policy", "arguments", f"`{twice}` is named twice")
    given = _by_policy(overrides(settings), names)
    found = [Named(each.name, each.path, given[each.name]) for each in found]
    shape = read_config(model).shape if model is not None and not running else None
    for each in found:
        if each.path is not None and shape is not None:
            bind(load(each.path).require(), shape, each.settings)
    return tuple(found)


def _by_name(policy: str, running: bool) -> Named:
    if running and policy not in shipped() and not Path(policy).suffix:
        return Named(policy, None)
    path = find(policy)
    checked = load(path)
    return Named(checked.require().name, path)


def _by_policy(settings: Mapping[str, str], names: Sequence[str]) -> dict[str, dict[str, str]]:
    given: dict[str, dict[str, str]] = {name: {} for name in names}
    for key, value in settings.items():
        policy, _, name = key.rpartition(".")
        if not policy and len(names) == 1:
            policy = names[0]
        if policy not in given:
            message = f"`{key}` is of none of the policies {listed(names, 'and')}"
            raise refused("--set", "arguments", message, "write POLICY.NAME=VALUE")
        given[policy][name] = value
    return given


def server_flags(words: str | None) -> dict[str, Any]:
    """`--mem-fraction-static 0.5 --trust-remote-code` as the flags of `serving.serve`.

    Raises:
        PolicyError: a word that belongs to no option.
    """
    flags: dict[str, Any] = {}
    name = None
    for word in shlex.split(words or ""):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flags[name] = value if equals else True
        elif name is None:
            message = f"`{word}` belongs to no option"
            raise refused("--server-args", "arguments", message, "write --server-args '--a 1 --b'")
        else:
            flags[name] = word if flags[name] is True else [*_list(flags[name]), word]
    return flags


def _list(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def _found(args: argparse.Namespace, policies: Sequence[Named]) -> Look:
    """The server at the URL, which has to have the policies."""
    url, session = args.url.rstrip("/"), requests.Session()
    info = _json(session, "GET", url + "/server_info")
    states = info.get("internal_states") or [{}]
    has = states[0].get("kv_policy")
    if has is None:
        message = "this server has no policies: it runs without kvpolicy"
        raise refused(url, "server", message, "start it with --kv-policy")
    known = {each["name"]: each for each in has}
    for policy in policies:
        if policy.name not in known:
            message = f"this server has no policy `{policy.name}`; it has {listed(known, 'and')}"
            raise refused(url, "server", message)
    theirs = tuple(
        Named(each.name, each.path, dict(known[each.name].get("settings") or {}))
        for each in policies
    )
    folder = args.model or _json(session, "GET", url + "/model_info")["tokenizer_path"]
    return Look(url, theirs, *_model(folder), session)


def _model(folder: str) -> tuple[Any, int | None]:
    """A model's tokenizer and the size of its vocabulary."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        message = f"its tokenizer cannot be loaded: {first}"
        raise refused(folder, "file", message, "name the model's folder with --model") from None
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        return tokenizer, config.vocab_size
    except (OSError, ValueError, AttributeError):
        return tokenizer, None


def _json(
    session: requests.Session, method: str, url: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The answer to one request.

    Raises:
        PolicyError: nobody answers, the server refuses, or what comes back is no JSON object.
    """
    try:
        response = session.request(method, url, json=body, timeout=_PATIENCE)
    except requests.RequestException as error:
        raise refused(url, "server", f"nobody answers there ({_short(error)})") from None
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not response.ok:
        raise refused(url, "server", f"HTTP {response.status_code}: {_message(answer, response)}")
    if not isinstance(answer, dict):
        raise refused(url, "server", "what answers there is no SGLang server")
    return answer


def _short(error: requests.RequestException) -> str:
    """The end of a chain of errors, which says what happened."""
    cause: BaseException = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    return str(cause) or type(error).__name__


def _message(answer: Any, response: requests.Response) -> str:
    """The sentence of a refused request."""
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        text = error.get("message") if isinstance(error, dict) else error
        if isinstance(text, str):
            return text
    return response.reason or "no reason given"


def text_of(file: str) -> str:
    """The text of a file, or of the standard input for `-`.

    Raises:
        PolicyError: it cannot be read, or is empty.
    """
    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        text = raw.decode("utf-8")
    except OSError as error:
        raise refused(file, "file", (error.strerror or "cannot be read").lower()) from None
    except UnicodeDecodeError:
        raise refused(file, "file", "the file is not UTF-8 text") from None
    if not text.strip():
        raise refused("the standard input" if file == "-" else file, "file", "there is no text")
    return text
