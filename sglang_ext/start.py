"""The start of a scheduler: everything is verified, policies are bound, kernels compiled."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.kernels.entries.rounding import FLOAT8
from kvpolicy.sglang_ext.attention import backend as backends
from kvpolicy.sglang_ext.attention import graphs
from kvpolicy.sglang_ext.face import compat, options, refusals
from kvpolicy.sglang_ext.face.compiling import compiling, watch_late
from kvpolicy.sglang_ext.face.errors import NotCompiled, Refused
from kvpolicy.sglang_ext.face.policy_files import Policy
from kvpolicy.sglang_ext.forward import layers
from kvpolicy.sglang_ext.forward.rotary import of_model
from kvpolicy.sglang_ext.forward.services import Services
from kvpolicy.sglang_ext.forward.warm import warm, warm_attention, warm_variant
from kvpolicy.sglang_ext.memory.arena import Arena
from kvpolicy.sglang_ext.report.metrics import Metrics
from kvpolicy.sglang_ext.request.request import Served
from kvpolicy.sglang_ext.runtime import Runtime
from kvpolicy.sglang_ext.serving.background import Background
from kvpolicy.sglang_ext.serving.changes import Changes
from kvpolicy.sglang_ext.serving.served import ServedPolicies
from kvpolicy.sglang_ext.serving.variants import Variants

logger = logging.getLogger(__name__)


def start(runtime: Runtime, scheduler: Any, targets: Sequence[str]) -> None:
    """Verify everything, bind the policies to the model and compile what they need.

    Args:
        scheduler: SGLang's, with its model loaded.
        targets: names of SGLang that hooks were registered on.

    Raises:
        Refused: the server cannot serve what it was asked for.
    """
    verify(runtime, scheduler, targets)
    services, runner = runtime.services, scheduler.tp_worker.model_runner
    services.streams.bind(scheduler)
    if services.in_stages and services.arena.stage == 0:
        compat.receive_outputs(runner, runtime.raw)
    shape = refusals.model_shape(scheduler.model_config)
    refusals.check_added_heads(runner.model_config, shape, services.ranks.size)
    attention = compat.attention_layers(runner.model)
    rank_shape = refusals.shape_of_rank(shape, services.ranks.size)
    refusals.check_layers(attention, rank_shape, services.stages.span)
    if services.arena.scales is not None:
        backend_names = compat.attention_backends(compat.resolved(scheduler.server_args))
        refusals.check_scales(attention, backend_names)
        services.store.when_empty(
            lambda: services.arena.set_scales([compat.kv_scales(layer) for layer in attention])
        )
    if any(policy.program.positions == "slots" for policy in runtime.asked_for):
        services.rotary = of_model(runner.model)

    def make(policy: Policy, bound: Bound) -> Served:
        page_size, heads = services.store.allocator.page_size, services.ranks.heads
        if services.in_stages:
            refusals.check_stages(policy, bound)
        try:
            return Served(policy, bound, services.arena, page_size, heads)
        except PolicyError as error:
            raise Refused(f"{policy.option}: {error}") from error

    served_policies = [make(policy, policy.bind(shape)) for policy in runtime.asked_for]
    names = [served.name for served in served_policies]
    server_options = compat.resolved(scheduler.server_args)
    propagating = [served.name for served in served_policies if served.bound.propagates]
    if propagating:
        refusals.check_propagation(server_options, propagating)
        layers.wrap(services, runner, propagating)
        runtime.one_piece = options.one_piece(server_options.chunked_prefill_size)
    metrics = Metrics(compat.metric_labels(scheduler), names)
    services.start(metrics, runtime.max_failures)
    prepare = partial(_prepare, services, partial(warm, queries=runner.dtype))
    _compile(services, scheduler, served_policies, prepare)
    make_later = partial(_made_later, services, make)
    prepare_variant = partial(_prepare, services, partial(warm_variant, queries=runner.dtype))
    runtime.background = background = Background(services.arena.storage.device)
    variants = Variants(
        shape, make_later, prepare_variant, services.ranks, services.stages, background
    )
    runtime.policies = ServedPolicies(served_policies, variants, metrics)
    captured_requests = compat.captured_requests(server_options)

    def make_served(policy: Policy, bound: Bound) -> Served:
        served = make_later(policy, bound)
        prepare(served)
        return served

    arguments = (runner, shape, make_served, captured_requests, background)
    runtime.changes = Changes(services, runtime.policies, *arguments)


def _compile(
    services: Services,
    scheduler: Any,
    served_policies: Sequence[Served],
    prepare: Callable[[Served], None],
) -> None:
    """Compile every kernel known to be needed, before the server says that it is ready."""
    runner = scheduler.tp_worker.model_runner
    for served in served_policies:
        started = time.perf_counter()
        prepare(served)
        params = ", ".join(f"{k}={_shown(v)}" for k, v in served.bound.params.items())
        logger.info(
            "KV-cache policy %s (%s): %s. digest=%s, ready in %.1f s",
            served.name,
            served.policy.path,
            params or "no parameters",
            served.bound.digest[:12],
            time.perf_counter() - started,
        )
    if services.arena.storage.device.type == "cuda":
        heads = refusals.model_shape(runner.model_config).heads // services.ranks.size
        requests = compat.most_running(scheduler)
        with compiling("KV-cache policies' attention"):
            warm_attention(services, heads, runner.dtype, requests)
    watch_late()


def _made_later(
    services: Services, make: Callable[[Policy, Bound], Served], policy: Policy, bound: Bound
) -> Served:
    """A policy that came while the server ran, from what its start prepared.

    Raises:
        Refused: it needs more than that.
    """
    if bound.propagates and not services.layers:
        raise Refused("tokens would leave the prefill, and this server is not prepared for it")
    return make(policy, bound)


def _prepare(services: Services, warm: Callable[[Services, Served], None], served: Served) -> None:
    """Compile a policy's kernels.

    Raises:
        NotCompiled: that fails.
    """
    try:
        with compiling(f"KV-cache policy {served.name}"), services.ranks.alone():
            warm(services, served)
    except Exception as error:
        logger.exception("Compilation of kernels failed.")
        what = f"its kernels cannot be compiled: {type(error).__name__}: {error}"
        help_ = "--kv-policy-kernels torch serves it without them"
        raise NotCompiled(f"{served.policy.option}: {what}; {help_}") from error


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{float(value):g}"


def verify(runtime: Runtime, scheduler: Any, targets: Sequence[str]) -> None:
    """Refuse to serve unless every part of the plugin is in place.

    Args:
        targets: names of SGLang that hooks were registered on.

    Raises:
        Refused: says what is missing.
    """
    refusals.check_version()
    refusals.check_options(compat.resolved(scheduler.server_args))
    refusals.check_model(scheduler.model_config)
    missing = [target for target in targets if not compat.is_applied(target)]
    if missing:
        raise Refused(f"--kv-policy: SGLang did not apply the hooks on {', '.join(missing)}.")
    runner = scheduler.tp_worker.model_runner
    _verify_arena(runtime.services.arena, runner.token_to_kv_pool)
    used_backends = compat.backends_in_use(runner)
    if any(backend.forward_decode.__module__ != backends.__name__ for backend in used_backends):
        raise Refused("--kv-policy: the attention backend was replaced after it was made.")
    graphs.verify(runner)


def _verify_arena(arena: Arena, pool: Any) -> None:
    for layer, (k, v) in enumerate(zip(pool.k_buffer, pool.v_buffer, strict=True)):
        keys, values = arena.storage[layer]
        if k.data_ptr() != keys.data_ptr() or v.data_ptr() != values.data_ptr():
            raise Refused("--kv-policy: the KV pool is not in the memory laid out for policies.")
    if arena.storage.dtype not in (torch.float32, torch.float16, torch.bfloat16, *FLOAT8):
        raise Refused(f"--kv-cache-dtype {arena.storage.dtype} is not served with --kv-policy.")
