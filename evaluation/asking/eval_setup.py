"""Prepares a run of `kvpolicy eval`: its plan, its samples, and the server that it asks."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy.dsl.bind.model_config import ModelConfig, read_config
from kvpolicy.dsl.syntax.diagnostics import PolicyError, refused, why
from kvpolicy.evaluation import records
from kvpolicy.evaluation.asking import endpoint
from kvpolicy.evaluation.asking.answers import Lines
from kvpolicy.evaluation.asking.asking import CacheSize
from kvpolicy.evaluation.asking.client import Client, OpenAI, SGLang
from kvpolicy.evaluation.asking.endpoint import Endpoint
from kvpolicy.evaluation.asking.machine import machine
from kvpolicy.evaluation.asking.plan import RunPlan, fingerprint
from kvpolicy.evaluation.asking.tokens import Tokens
from kvpolicy.evaluation.asking.turns import requests
from kvpolicy.evaluation.asking.variants import Variant, full_kv, on_server, options, variants
from kvpolicy.evaluation.keys import api_key, belongs_to_url
from kvpolicy.evaluation.questions import catalog, own_data
from kvpolicy.evaluation.questions.sample import History, Sample
from kvpolicy.evaluation.records import FULL
from kvpolicy.evaluation.serving import GPU_FLAGS, has_gpu, serve

_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
# Fewest slots of a server's pool on a CPU; on a GPU SGLang sizes the pool by the GPU's memory.
_SLOTS = 16384
_TIGHT = 256  # tokens; at shorter lengths some samples of a task fit and others do not
# Keys of a model's config that SGLang prefers to `max_position_embeddings`.
_LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length")
_LOADING = 1800  # seconds to wait for a server; a large model's weights take minutes to read


@dataclass
class Setup:
    """A run that is ready to begin.

    Attributes:
        plan: the plan of the run.
        tokens: the model's tokenizer.
        config: sizes of the model; None without --model.
        found: the server at --url; None if a server is to be started.
    """

    plan: RunPlan
    tokens: Tokens
    config: ModelConfig | None
    found: Endpoint | None

    def samples(self, task: str, length: int) -> list[Sample]:
        """The samples of a task and length.

        Raises:
            PolicyError: the task cannot make them.
        """
        return [self.sample(task, length, index) for index in range(self._count(task))]

    def sample(self, task: str, length: int, index: int) -> Sample:
        """One sample.

        Raises:
            PolicyError: the task cannot make it.
        """
        plan = self.plan
        return _sample(self.tokens, task, plan.form, length, index, plan.seed)

    def _count(self, task: str) -> int:
        return _count(task, self.plan.samples)

    def asked(self, task: str, length: int) -> tuple[int, int]:
        """Number of samples of a task and length, and number of their questions."""
        turns = len(self.sample(task, length, 0).turns)
        return self._count(task), self._count(task) * turns

    def questions(self, task: str, length: int) -> int:
        """Number of questions of a task and length, over all variants."""
        return self.plan.questions[task][length][1] * len(self.variants_at(length))

    def variants_at(self, length: int) -> list[Variant]:
        """The variants that are asked at a length."""
        return [variant for variant in self.plan.variants if length in variant.lengths]

    def missing_maps(self, folder: Path, number: int) -> list[tuple[Variant, Sample]]:
        """The maps that kept.jsonl does not have yet, as pairs of variant and sample.

        Args:
            folder: folder of the run.
            number: prompts per task, of the shortest length.

        Raises:
            PolicyError: kept.jsonl holds something else, or cannot be read.
        """
        path, length = folder / "kept.jsonl", self.plan.lengths[0]
        try:
            if path.exists():
                Lines(path).close()  # without a line that was cut off
            facts = list(records.read_maps(path)) if path.exists() else []
        except ValueError as error:
            help_ = "remove it, or take another --out"
            raise refused(str(path), "file", str(error), help_) from None
        except OSError as error:
            raise refused(str(path), "file", why(error, "it cannot be read")) from None
        present = {(f["policy"], f["budget"], f["task"], f["index"]) for f in facts}
        return [
            (variant, self.sample(task, length, index))
            for task in self.plan.tasks
            for index in range(min(number, self._count(task)))
            for variant in self.variants_at(length)
            if variant.alias != FULL
            and (variant.policy, variant.budget, task, index) not in present
        ]


def _count(task: str, samples: int) -> int:
    """Number of samples of a task: as asked for, but at most as many as its file has."""
    try:
        most = catalog.count_of(task)
    except ValueError as error:
        raise refused("--tasks", "arguments", str(error)) from None
    return samples if most is None else min(most, samples)


def _sample(tokens: Tokens, task: str, form: str, length: int, index: int, seed: int) -> Sample:
    try:
        return catalog.sample(
            task, form=form, length=length, index=index, seed=seed, count=tokens.count
        )
    except ValueError as error:
        message = f"{task}, {length} tokens, sample {index}: {error}"
        raise refused("--tasks", "arguments", message) from None


def prepare(args: argparse.Namespace, command: str) -> Setup:
    """Checks the whole command; starts and writes nothing.

    Args:
        args: options of `eval_arguments`.
        command: the command as it was typed.

    Raises:
        PolicyError: an option cannot be used.
    """
    if args.model is not None and os.path.isfile(args.model):
        message = "this is a file; --model is a folder"
        raise refused(args.model, "file", message, f"name its folder: {Path(args.model).parent}")
    config = None if args.model is None else read_config(args.model)
    all_variants, notes, server = _from_url(args) if args.url else _from_model(args, config)
    if not args.no_full:
        all_variants = [full_kv(args.lengths), *all_variants]
    if not all_variants:
        raise refused("--no-full", "arguments", "there is no policy to ask instead")
    titles = _titles(args.tasks)
    folder = args.tokenizer or args.model or _tokenizer_of(server)
    tokens = Tokens(folder)
    form = catalog.form_of(tokens.tokenizer)
    _check_samples(args, tokens, form, server)
    plan = RunPlan(
        command=command,
        model=_model_name(args, server),
        form=form,
        lengths=args.lengths,
        tasks=titles,
        seed=args.seed,
        samples=args.samples,
        variants=all_variants,
        notes=notes,
        server=_server(args, config, server),
        machine=machine(),
        decides={},
    )
    plan.decides = _decides(args, plan, folder, server)
    setup = Setup(plan, tokens, config, server)
    if server is not None and any(variant.alias != FULL for variant in all_variants):
        _check_inspection(args, setup, server)
    plan.questions = {task: {n: setup.asked(task, n) for n in plan.lengths} for task in plan.tasks}
    return setup


def _from_model(
    args: argparse.Namespace, config: ModelConfig | None
) -> tuple[list[Variant], list[str], None]:
    if config is None:
        message = "say which model to serve, or which server to ask with --url"
        raise refused("--model", "arguments", message)
    for option in ("api", "model_name", "api_key_env", "admin_key_env"):
        if getattr(args, option) is not None:
            raise belongs_to_url("--" + option.replace("_", "-"))
    all_variants, notes = variants(
        args.policy, args.set, args.budget, args.lengths, config.shape, args.data
    )
    return all_variants, notes, None


def _from_url(args: argparse.Namespace) -> tuple[list[Variant], list[str], Endpoint]:
    """Variants of a running server; refuses options that only the start of a server can set."""
    start_options = {"--budget": args.budget, "--set": args.set, "--data": args.data}
    start_options["--server-args"] = args.server_args
    for option, value in start_options.items():
        if value:
            message = "with --url the server's own settings decide"
            help_ = "start that server with these settings, or give --model instead of --url"
            raise refused(option, "arguments", message, help_)
    server = endpoint.find(args.url, args.api, api_key(args.api_key_env))
    if server.api == "openai":
        server.model(args.model_name)
    api_key(args.admin_key_env, "--admin-key-env")
    return on_server(args.policy, server.policies or (), args.lengths), [], server


def _check_inspection(args: argparse.Namespace, setup: Setup, server: Endpoint) -> None:
    """Refuses a running server without the inspection that maps and second turns need."""
    if args.maps:
        server.require_inspection("--maps")
    for task in setup.plan.tasks:
        if setup.sample(task, args.lengths[0], 0).history == History.COPY:
            server.require_inspection(f"the task `{task}`")


def _titles(tasks: list[str]) -> dict[str, str]:
    try:
        return {task: catalog.title(task) for task in tasks}
    except ValueError as error:
        raise refused("--tasks", "arguments", str(error)) from None


def _tokenizer_of(server: Endpoint | None) -> str:
    """The folder of a server's tokenizer, if it is on this machine."""
    path = None if server is None else server.info.get("tokenizer_path")
    if not path or not os.path.isdir(path):
        message = "the lengths of prompts need the model's tokenizer"
        raise refused("--tokenizer", "arguments", message, "name the folder that it is in")
    return path


def _check_samples(
    args: argparse.Namespace, tokens: Tokens, form: str, server: Endpoint | None
) -> None:
    """Makes samples of each task and length; checks that they fit the server and the model."""
    context_length = _context(args, server)
    for task in args.tasks:
        for length, index in _checked(args, task):
            sample = _sample(tokens, task, form, length, index, args.seed)
            if server is not None and server.api == "openai" and sample.history == History.EVICTED:
                message = f"`{task}` needs a server whose cache can be emptied, which is SGLang"
                raise refused("--tasks", "arguments", message)
            *_, request = requests(sample, tokens, copy=False)
            if context_length is not None and len(request.ids) + request.most > context_length:
                message = (
                    f"{task} at {length} needs {len(request.ids) + request.most:,} tokens with the "
                    f"answer, and the model reads at most {context_length:,}"
                )
                raise refused("--lengths", "arguments", message)


def _checked(args: argparse.Namespace, task: str) -> Iterator[tuple[int, int]]:
    """Length and index of the samples to check: the first, or all where their sizes differ."""
    for length in args.lengths:
        sizes_differ = own_data.is_one(task) or length < _TIGHT
        for index in range(_count(task, args.samples) if sizes_differ else 1):
            yield length, index


def _context(args: argparse.Namespace, server: Endpoint | None) -> int | None:
    """Largest number of tokens of prompt and answer that the model takes; None if not known."""
    words = " ".join(args.server_args).replace("--context-length=", "--context-length ").split()
    if "--context-length" in words[:-1]:
        text = words[words.index("--context-length") + 1]
        return int(text) if text.isdigit() else None
    if server is not None:
        context_length = server.info.get("context_length")
        return context_length if isinstance(context_length, int) else None
    file = Path(args.model) / "config.json"
    config = json.loads(file.read_text(encoding="utf-8-sig"))
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaled = "factor" in scaling and "original_max_position_embeddings" not in scaling
    if scaled or any(config.get(key) for key in _LENGTHS):
        return None  # SGLang would find another length than `max_position_embeddings`
    context_length = config.get("max_position_embeddings")
    return context_length if isinstance(context_length, int) else None


def _model_name(args: argparse.Namespace, server: Endpoint | None) -> str:
    if server is None:
        return args.model
    if server.api == "openai":
        return server.model(args.model_name)
    return str(server.info.get("model_path") or args.url)


def _server(
    args: argparse.Namespace, config: ModelConfig | None, server: Endpoint | None
) -> dict[str, Any]:
    """The facts about the server for plan.json."""
    info = {} if server is None else server.info
    version = info.get("version")
    if server is None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version("sglang")
    config = config or _config_of(info)
    return {
        "url": args.url,
        "api": "sglang" if server is None else server.api,
        "version": version,
        "arguments": args.server_args or None,
        "L": None if config is None else config.shape.layers,
        "G": None if config is None else config.shape.kv_heads,
        "bytes_per_token": None,
    }


def _config_of(info: Any) -> ModelConfig | None:
    """Sizes of the model of a server; None if its folder is not on this machine."""
    path = info.get("model_path")
    if not path or not os.path.isdir(path):
        return None
    with contextlib.suppress(PolicyError):
        return read_config(path)
    return None


def _decides(
    args: argparse.Namespace, plan: RunPlan, tokenizer: str, server: Endpoint | None
) -> dict[str, Any]:
    """The values that decide the answers; runs with equal values can share a folder."""
    data = [Path(t.removeprefix(own_data.PREFIX)) for t in plan.tasks if own_data.is_one(t)]
    folder = Path(args.model or tokenizer)
    files = [p for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".bin")]
    tokenizer_files = sorted(Path(tokenizer).glob("tokenizer*"))
    return {
        "model": [plan.model if server else None, fingerprint(*files, *tokenizer_files)],
        "form": plan.form,
        "tasks": list(plan.tasks),
        "data": fingerprint(*data),
        "lengths": plan.lengths,
        "samples": plan.samples,
        "seed": plan.seed,
        "policies": [
            [variant.alias, variant.policy, variant.budget, list(variant.lengths), variant.meaning]
            for variant in plan.variants
        ],
        "server": [plan.server["api"], plan.server["version"], args.server_args],
    }


@contextlib.contextmanager
def opened(args: argparse.Namespace, setup: Setup) -> Iterator[tuple[Client, CacheSize]]:
    """A client of the server to ask, and the model's sizes, for the time of a `with` block.

    Raises:
        ServerFailed: the server that is started here does not start.
        PolicyError: the server that was started is not one of SGLang.
    """
    server = setup.found
    if server is None:
        with _started(args, setup) as url:
            yield _sglang(setup, endpoint.find(url, "sglang", None))
    elif server.api == "sglang":
        keys = (api_key(args.api_key_env), api_key(args.admin_key_env, "--admin-key-env"))
        yield _sglang(setup, server, *keys)
    else:
        name, key = server.model(args.model_name), api_key(args.api_key_env)
        yield OpenAI(server.url, name, setup.tokens, key), _memory(setup)


@contextlib.contextmanager
def _started(args: argparse.Namespace, setup: Setup) -> Iterator[str]:
    """Starts a server with all variants; yields its address."""
    policy_variants = [variant for variant in setup.plan.variants if variant.path is not None]
    policies, settings = options(policy_variants)
    flags: dict[str, Any] = {"max_total_tokens": _slots(args)}
    if has_gpu():  # SGLang chooses kernels, precision and size of the pool
        flags = dict.fromkeys(GPU_FLAGS)
    flags["kv_policy_allow_inspection"] = bool(policies)  # nobody else uses this server
    flags["kv_policy_data"] = args.data
    words = args.server_args
    with serve(
        args.model, policies, settings, progress=not args.quiet, arguments=words,
        start_timeout=_LOADING, **flags,
    ) as server:  # fmt: skip
        yield server.url


def _slots(args: argparse.Namespace) -> int:
    """Slots for all requests in flight, their compressed copies and their answers."""
    return max(_SLOTS, 3 * args.concurrency * (max(args.lengths) + 512))


def _sglang(
    setup: Setup, server: Endpoint, key: str | None = None, admin_key: str | None = None
) -> tuple[Client, CacheSize]:
    """A client of SGLang, and the model's sizes; sets `bytes_per_token` in the plan."""
    config = setup.config or _config_of(server.info)
    expected_bytes = None if config is None else _token_bytes(server.info, config)
    setup.plan.server["bytes_per_token"] = server.token_bytes or expected_bytes
    named = server.policies is not None
    client = SGLang(server.url, setup.tokens, named=named, key=key, admin_key=admin_key)
    return client, _memory(setup)


def _token_bytes(info: Mapping[str, Any], config: ModelConfig) -> int:
    """KV memory of one token that SGLang's options ask for, in bytes.

    Only a server itself knows what a checkpoint asks for (`--kv-cache-dtype auto`).
    """
    kind = str(info.get("kv_cache_dtype") or "auto")
    kind = str(info.get("dtype")) if kind == "auto" else kind
    size = 1 if kind.startswith("fp8") else _BYTES.get(kind, config.element_bytes)
    shape = config.shape
    return shape.layers * shape.kv_heads * 2 * shape.head_dim * size


def _memory(setup: Setup) -> CacheSize:
    server = setup.plan.server
    lists = None if server["L"] is None else server["L"] * server["G"]
    return CacheSize(lists, server["bytes_per_token"])
