"""The server of `inspect` and `fidelity`: started on a model, or found at a URL.

Policies are named by file, or by their name at a running server. All mistakes in them are found
before a server is started.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from kvpolicy.dsl.bind.model_config import read_config
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.diagnostics import PolicyError, refused
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.evaluation import server_answers
from kvpolicy.evaluation.asking import endpoint
from kvpolicy.evaluation.asking.tokens import Tokens
from kvpolicy.evaluation.asking.variants import Variant, on_server, options, variants
from kvpolicy.evaluation.keys import api_key, belongs_to_url
from kvpolicy.evaluation.serving import GPU_FLAGS, ServerFailed, has_gpu, serve
from kvpolicy.evaluation.text_files import decoded, read_text

_PATIENCE = 600  # seconds for one answer


@dataclass(frozen=True)
class Look:
    """A server that answers, and the tokenizer of its model.

    Attributes:
        url: address of the server.
        policies: the policies of the command line, with their names in requests.
        tokens: the model's tokenizer.
        vocabulary: number of the model's logits; None if its config is not on this machine.
        headers: HTTP headers of every request.
    """

    url: str
    policies: tuple[Variant, ...]
    tokens: Tokens
    vocabulary: int | None
    headers: Mapping[str, str] = field(default_factory=dict)

    def ask(self, ids: Sequence[int], policy: str, count: int, **fields: Any) -> dict[str, Any]:
        """The answer of /generate to a prompt: `count` tokens, greedy, not stopped by an end token.

        Args:
            ids: token ids of the prompt.
            policy: name of the policy; FULL for full KV.
            count: number of tokens to generate.
            fields: further fields of the request; `custom` has further custom parameters.

        Raises:
            PolicyError: the server refuses the request, in its words, or does not answer.
        """
        custom = {"kv_policy": policy, **fields.pop("custom", {})}
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        body = {"input_ids": list(ids), "sampling_params": {**sampling, "custom_params": custom}}
        url = self.url + "/generate"
        try:
            response = requests.post(
                url, json={**body, **fields}, headers=self.headers, timeout=_PATIENCE
            )
        except requests.RequestException as error:
            raise self._refused(f"no answer: {type(error).__name__}") from None
        if not response.ok:
            words = server_answers.refusal(response.status_code, response.content)
            raise self._refused(words)
        try:
            answer = server_answers.generated(server_answers.json_of(response.content))
        except ValueError as error:
            raise self.unusable(str(error)) from None
        reason = server_answers.given_up(answer)
        if reason is not None:
            raise self._refused(f"the server gave up: {reason}")
        return answer

    def unusable(self, why: str) -> PolicyError:
        """The refusal of an answer that cannot be used."""
        message = f"its answer cannot be used: {why}"
        return refused(self.url, "server", message, "it needs the same version of kvpolicy")

    def _refused(self, sentence: str) -> PolicyError:
        return refused(self.url, "server", sentence)


@contextlib.contextmanager
def opened(
    args: argparse.Namespace, check: Callable[[Tokens, ModelShape], object]
) -> Iterator[Look]:
    """The server of the options in look_arguments.py, for the time of a `with` block.

    Args:
        check: finds mistakes, by the tokenizer and the model, before a server is started.

    Raises:
        PolicyError: a policy, a setting or the model cannot be used, or nobody answers.
    """
    if args.url is not None:
        yield _found(args)
        return
    if args.model is None:
        raise refused("--model", "arguments", "name a model to serve, or a server with --url")
    if args.api_key_env is not None:
        raise belongs_to_url("--api-key-env")
    shape = read_config(args.model).shape
    policies, _ = variants(args.policies, args.set, (), (), shape, args.data)
    _not_nothing(policies)
    paths, settings = options(policies)
    tokens = Tokens(args.model)
    check(tokens, shape)
    with contextlib.ExitStack() as stack:
        # On a GPU SGLang chooses kernels and precision.
        flags: dict[str, Any] = dict.fromkeys(GPU_FLAGS) if has_gpu() else {}
        starting = serve(
            args.model,
            paths,
            settings,
            progress=True,
            arguments=args.server_args,
            kv_policy_allow_inspection=True,
            kv_policy_data=args.data,
            **flags,
        )
        try:
            server = stack.enter_context(starting)
        except ServerFailed as error:
            raise refused(args.model, "server", str(error)) from None
        yield Look(server.url, tuple(policies), tokens, _vocabulary(args.model))


def _found(args: argparse.Namespace) -> Look:
    """The server at the URL, which has to have the policies."""
    options_of_start = {"--set": args.set, "--data": args.data, "--server-args": args.server_args}
    for option, value in options_of_start.items():
        if value:
            message = "a server that runs already has its own settings"
            raise refused(option, "arguments", message, "leave it out, or leave --url out")
    names = [_name(policy) for policy in args.policies]
    key = api_key(args.api_key_env)
    server = endpoint.find(args.url, "sglang", key)
    policies = on_server(names, server.policies or (), ())
    _not_nothing(policies)
    server.require_inspection(f"kvpolicy {args.name}")
    model_path = server.info.get("model_path")
    folder = args.model or server.info.get("tokenizer_path") or model_path
    if not folder or not os.path.isdir(folder):
        message = f"the tokenizer of its model is not on this machine ({folder})"
        raise refused(args.url, "server", message, "name the model's folder with --model")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # The server fails if asked for more tokens than its model has, so another config is no use.
    same_model = model_path is not None and Path(model_path).resolve() == Path(folder).resolve()
    vocabulary = _vocabulary(folder) if same_model else None
    return Look(server.url, tuple(policies), Tokens(folder), vocabulary, headers)


def _name(policy: str) -> str:
    """The name of a policy that is given by file or shipped; otherwise the name that is given."""
    is_file = Path(policy).suffix in (".yaml", ".yml") or os.path.isfile(policy)
    if not is_file and policy not in shipped():
        return policy
    return load(policy).require().name


def _not_nothing(policies: Sequence[Variant]) -> None:
    if not policies:
        message = "`none` is full KV, which keeps everything"
        raise refused("--policy", "arguments", message, "name a policy")


def _vocabulary(folder: str) -> int | None:
    """Number of a model's logits; None if its folder has no config that says so."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        return config.vocab_size
    except (OSError, ValueError, AttributeError):
        return None


def text_of(file: str) -> str:
    """The text of a file, or of the standard input for `-`.

    Raises:
        PolicyError: the text cannot be read, or is empty.
    """
    name = "the standard input" if file == "-" else file
    if file == "-" and sys.stdin is None:
        raise refused(name, "file", "it is closed", "pipe the text into it, or name a file")
    try:
        text = decoded(sys.stdin.buffer.read()) if file == "-" else read_text(file)
    except ValueError as error:
        raise refused(name, "file", str(error)) from None
    if not text.strip():
        raise refused(name, "file", "there is no text in it")
    return text
