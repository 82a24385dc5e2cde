"""The hooks of a scheduler process; each only translates SGLang's arguments for `Runtime`."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from kvpolicy.sglang_ext.attention import backend as backends
from kvpolicy.sglang_ext.attention import graphs
from kvpolicy.sglang_ext.face import asked, compat, host, options, refusals
from kvpolicy.sglang_ext.face.compat import Function
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.forward import propagate
from kvpolicy.sglang_ext.forward.services import Services
from kvpolicy.sglang_ext.memory.arena import create_arena
from kvpolicy.sglang_ext.memory.set_aside import SetAside
from kvpolicy.sglang_ext.memory.store import Store
from kvpolicy.sglang_ext.memory.tables import DeviceTables
from kvpolicy.sglang_ext.request import force, internal
from kvpolicy.sglang_ext.runtime import Runtime
from kvpolicy.sglang_ext.serving import reserved
from kvpolicy.sglang_ext.start import start

logger = logging.getLogger(__name__)


def stop(error: Refused) -> SystemExit:
    """The exception that stops the server with one message and no traceback."""
    return SystemExit(f"kvpolicy: {error}")


def install(runtime: Runtime) -> None:
    """Register every hook of a scheduler process."""
    for target, kind, hook in _scheduler_hooks(runtime):
        compat.register(target, hook, kind)

    def wrap(name: str, factory: Function) -> Function:
        def build(runner: Any) -> Any:
            backend = factory(runner)
            if name in refusals.SERVED_BACKENDS:
                shape = refusals.model_shape(runner.model_config)
                try:
                    heads = refusals.shape_of_rank(shape, compat.tensor_group().size).heads
                    backend_names = compat.attention_backends(compat.resolved(runner.server_args))
                    arguments = (backend, name, runtime.services, heads, runner.dtype)
                    return backends.attach(*arguments, decodes=name == backend_names[1])
                except Refused as error:
                    raise stop(error) from None
            raise stop(Refused(f"--attention-backend {name} cannot read compressed entries."))

        return build

    compat.wrap_attention_backends(wrap)


def _scheduler_hooks(runtime: Runtime) -> list[tuple[str, str, Function]]:
    return [
        (compat.SIZE_POOL, "around", _around_size_pool(runtime.services)),
        (compat.CREATE_BUFFERS, "around", lambda _, pool: _create_buffers(runtime.services, pool)),
        (compat.ALLOC_MEMORY_POOL, "after", _after_pool(runtime.services)),
        (compat.INIT_MODEL_WORKER, "after", _after_start(runtime)),
        (compat.BEAMS, "around", _around_beams(runtime)),
        (compat.ADD_REQUEST, "before", _before_queue(runtime)),
        (compat.NEW_PREFILL, "before", lambda _, running: runtime.admit_again(running)),
        (compat.MAX_PREFIX_LEN, "after", lambda r, req, *_: runtime.limit_prefix(req, r)),
        (compat.RESET_FOR_RETRACT, "after", lambda _, req: runtime.retracted(req)),
        (compat.PREPARE_FOR_EXTEND, "after", lambda _, batch: runtime.allocate(batch)),
        (compat.SLOT_RESERVE, "after", _after_reserve(runtime)),
        (compat.RUNNING_NEEDS, "after", lambda n, _, req: runtime.still_needs(req, n)),
        (compat.MATCH_PREFIX, "around", _around_match_prefix),
        (compat.PREFETCH, "around", _around_prefetch),
        (compat.QUEUED_LIMIT, "around", _around_queued_limit),
        (compat.TOUCH_WAITING, "around", _around_touch_waiting),
        (compat.TIME_STATS, "around", _around_time_stats),
        (compat.ADD_ONE, "around", _around_add_one(runtime)),
        (compat.ADD_CHUNKED, "around", _around_add_chunked(runtime)),
        (compat.PREFILL_STATS, "around", _around_prefill_stats),
        (compat.FORWARD, "around", _around_forward(runtime)),
        (compat.PROCESS_RESULT, "before", lambda _, batch, *rest: runtime.processing(batch)),
        (compat.SAMPLE_LOGITS, "around", _around_sample_logits(runtime)),
        (compat.SAMPLE, "around", _around_sample(runtime)),
        (compat.LOGPROBS, "before", _before_logprobs(runtime)),
        (compat.END_OUTPUT, "around", _around_end_output(runtime)),
        (compat.INTERNAL_STATE, "after", _after_internal_state(runtime)),
        (compat.CONTROL, "around", _around_control(runtime)),
        (compat.RELEASE_POOL, "around", _around_release_pool(runtime)),
        (compat.RESUME_POOL, "around", _around_resume_pool(runtime)),
        (compat.CHECKPOINT, "after", lambda _, req, tree: runtime.published(req)),
        (compat.RELEASE, "before", lambda req, *_, **options: runtime.released(req)),
        (compat.OWNED, "after", lambda length, req: runtime.owned(req, length)),
        (compat.POSITIONS, "after", _after_positions(runtime.services)),
        (compat.CAN_RUN_GRAPH, "around", _around_can_run_graph(runtime.services)),
        (compat.GRAPH_VARIANTS, "after", _after_graph_variants(runtime.services)),
        (compat.CREATE_ROWS, "after", _after_rows(runtime.services)),
        (compat.POOL_STATS, "after", _after_pool_stats(runtime.services)),
        (compat.UNCACHED_SIZES, "after", _after_uncached(runtime.services)),
    ]


def _after_pool_stats(services: Services) -> Function:
    def after(stats: Any, _: Any) -> Any:
        """After SchedulerPoolStatsObserver.get_pool_stats."""
        unused = services.store.set_aside.unused
        return compat.not_free(stats, unused) if unused else stats

    return after


def _after_uncached(services: Services) -> Function:
    def after(sizes: tuple[int, ...], _: Any) -> tuple[int, ...]:
        """After SchedulerInvariantChecker._get_total_uncached_sizes."""
        return (sizes[0] + services.store.uncached, *sizes[1:])

    return after


def _around_size_pool(services: Services) -> Function:
    def around(original: Function, configurator: Any, budget: int, **options: Any) -> Any:
        """Around KVCacheConfigurator.config_from_budget: from bytes to tokens of the pool."""
        try:
            return reserved.size_pool(
                services,
                lambda pool_budget: original(configurator, pool_budget, **options),
                configurator,
                budget,
            )
        except Refused as error:
            raise stop(error) from None

    return around


def _create_buffers(services: Services, pool: Any) -> None:
    """Instead of MHATokenToKVPool._create_buffers_normal: all layers in one tensor."""
    if not compat.is_plain_pool(pool):
        raise stop(Refused("--kv-policy: this model's KV pool is not laid out as plain K and V."))
    rows = pool.size + pool.page_size
    padded = -(-rows // pool.page_size) * pool.page_size
    group = compat.stage_group()
    services.divide(group, compat.layers_of(pool))
    sizes = (pool.layer_num, padded, pool.head_num, pool.head_dim, pool.dtype, pool.device)
    arena = create_arena(*sizes, compat.kv_memory_region(pool))
    services.arena = replace(arena, spans=services.stages.spans, stage=group.stage)
    layers = services.arena.storage.view(pool.store_dtype)
    pool.k_buffer = [layer[0, :rows] for layer in layers]
    pool.v_buffer = [layer[1, :rows] for layer in layers]


def _after_pool(services: Services) -> Function:
    def after(_: None, runner: Any, *args: Any, **kw: Any) -> None:
        """After ModelRunner.alloc_memory_pool."""
        allocator = runner.token_to_kv_pool_allocator
        rows = compat.slot_table(runner).shape[0]
        services.join(compat.tensor_group(), refusals.model_shape(runner.model_config).kv_heads)
        try:
            set_aside = options.experiment_slots(allocator.size, runner.model_config.context_len)
        except Refused as error:
            raise stop(error) from None
        if set_aside:
            logger.info("%d slots of the pool are set aside for scoring requests again.", set_aside)
        services.tables = DeviceTables(
            services.arena, rows, allocator.size, services.streams, pairs=services.shares
        )
        services.store = Store(
            services.arena,
            allocator,
            lambda policy, slots: services.metrics.private_slots(policy, slots),
            services.tables,
            services.streams,
            SetAside(allocator, set_aside),
            services.ranks.heads,
        )
        runner.req_to_token_pool.attach_aux_cache(services.store)

    return after


def _after_rows(services: Services) -> Function:
    def after(_: None, pool: Any, *args: Any, **options: Any) -> None:
        """After ReqToTokenPool.__init__: add rows for views of propagating prompts."""
        if services.propagates:
            table = pool.req_to_token
            scratch = table.new_zeros((reserved.SCRATCH, table.shape[1]))
            pool.req_to_token = torch.cat([table, scratch])
            services.scratch_rows = range(table.shape[0], pool.req_to_token.shape[0])

    return after


def _after_positions(services: Services) -> Function:
    def after(forward_batch: Any, cls: type, batch: Any, *args: Any, **options: Any) -> Any:
        """After ForwardBatch.init_new: move positions that follow a second prefill."""
        shifts = propagate.shifts(batch) if services.propagates else None
        if shifts is not None:
            positions = forward_batch.positions
            device_shifts = host.to_device(shifts.tolist(), positions.dtype, positions.device)
            forward_batch.positions = positions - device_shifts
        return forward_batch

    return after


def _around_can_run_graph(services: Services) -> Function:
    def around(original: Function, runner: Any, forward_batch: Any) -> bool:
        """Around PrefillCudaGraphRunner.can_run_graph: rows cannot leave a captured prefill."""
        step = services.step
        if step is not None and step.propagate is not None:
            return False
        return bool(original(runner, forward_batch))

    return around


def _after_graph_variants(services: Services) -> Function:
    def after(variants: Any, *args: Any, **options: Any) -> Any:
        """After create_attention_graph_variants: add graphs for compressed batches."""
        if variants is not None:
            raise stop(Refused("--kv-policy: this model's attention has graph variants already."))
        return graphs.GraphVariants(services)

    return after


def _after_start(runtime: Runtime) -> Function:
    def after(_: None, scheduler: Any) -> None:
        """After Scheduler.init_model_worker."""
        try:
            start(runtime, scheduler, [target for target, _, _ in _scheduler_hooks(runtime)])
        except Refused as error:
            raise stop(error) from None

    return after


def _around_beams(runtime: Runtime) -> Function:
    def around(original: Function, coordinator: Any, req: Any, *args: Any) -> Any:
        """Around BeamCoordinator.validate_and_init, which gives a request other sampling options.

        Its `custom_params` are kept. What policies cannot serve is refused here: once queued, a
        group of beams cannot be ended like other requests.
        """
        custom = req.sampling_params.custom_params
        error: str | None = original(coordinator, req, *args)
        req.sampling_params.custom_params = custom
        if error is None:
            error = runtime.refuses(req)
            if error is not None:
                compat.end_beams(coordinator, req)
        return error

    return around


def _before_queue(runtime: Runtime) -> Function:
    def before(scheduler: Any, req: Any, *args: Any, **options: Any) -> None:
        """Before Scheduler._add_request_to_queue."""
        runtime.queue(req)

    return before


def _after_reserve(runtime: Runtime) -> Function:
    def after(reserved: int, adder: Any, req: Any, *, extend_input_len: int | None = None) -> int:
        """After PrefillAdder._request_slot_reserve_for_req."""
        return reserved + runtime.reserve(adder, req, extend_input_len)

    return after


def _around_add_one(runtime: Runtime) -> Function:
    def around(
        original: Function, adder: Any, req: Any, has_chunked_req: bool, *args: Any, **kw: Any
    ) -> Any:
        """Around PrefillAdder.add_one_req."""
        if runtime.must_wait(adder, req, has_chunked_req):
            return compat.admitted_none()

        def add() -> Any:
            return original(adder, req, has_chunked_req, *args, **kw)

        if asked.is_scoring(req):
            return internal.admit(runtime.services.store.set_aside, adder, req, add)
        result = add()
        admitted = bool(adder.can_run_list) and adder.can_run_list[-1] is req
        if admitted and runtime.end_early(req):
            # The rest follows as the next chunk; only one request at a time can be in chunks.
            adder.new_chunked_req = req
            return compat.admitted_none()
        return result

    return around


def _around_add_chunked(runtime: Runtime) -> Function:
    def around(original: Function, adder: Any, req: Any) -> Any:
        """Around PrefillAdder.add_chunked_req; returns the request while its prefill goes on."""
        if adder.rem_chunk_tokens is None:
            # Chunked prefill is off: this is a resumed request, and its last chunk has no limit.
            adder.rem_chunk_tokens = max(adder.rem_input_tokens, req.seqlen)
        if runtime.chunk_must_wait(adder, req):
            adder.rem_chunk_tokens = 0
            return req
        with compat.uncounted(adder) if asked.is_scoring(req) else nullcontext():
            unfinished = original(adder, req)
        if not runtime.end_early(req):
            return unfinished
        # SGLang takes a request that is still in chunks to have used up the pass.
        adder.rem_chunk_tokens = 0
        return req

    return around


def _around_match_prefix(original: Function, tree: Any, params: Any) -> Any:
    """Around UnifiedRadixCache.match_prefix; what internal requests find is not marked as used."""
    if params.req is None or tree.disable or not asked.is_scoring(params.req):
        return original(tree, params)
    return compat.found_unnoticed(tree, params.key)


def _around_prefetch(original: Function, scheduler: Any, req: Any, *args: Any, **kw: Any) -> Any:
    """Around Scheduler._prefetch_kvcache; for internal requests nothing is fetched from storage."""
    return None if asked.is_scoring(req) else original(scheduler, req, *args, **kw)


def _around_queued_limit(original: Function, scheduler: Any, req: Any) -> bool:
    """Around Scheduler._abort_on_queued_limit: internal requests take no place in the queue."""
    if asked.is_scoring(req):
        return False
    limit = scheduler.max_queued_requests
    if limit is not None:
        scheduler.max_queued_requests += sum(map(asked.is_scoring, scheduler.waiting_queue))
    try:
        return bool(original(scheduler, req))
    finally:
        scheduler.max_queued_requests = limit


def _around_touch_waiting(original: Function, policy: Any, active: Any, waiting: Any) -> None:
    """Around SchedulePolicy._touch_waiting_prefixes; not for internal requests."""
    original(policy, active, [req for req in waiting if not asked.is_scoring(req)])


def _around_time_stats(original: Function, req: Any) -> None:
    """Around Req.log_time_stats; not for internal requests."""
    if not asked.is_scoring(req):
        original(req)


def _around_prefill_stats(
    original: Function, reporter: Any, batch: Any, *args: Any, **kw: Any
) -> None:
    """Around SchedulerMetricsReporter.report_prefill_stats."""
    if batch is None or not batch.reqs or not all(asked.is_scoring(req) for req in batch.reqs):
        original(reporter, batch, *args, **kw)


def _around_forward(runtime: Runtime) -> Function:
    def around(original: Function, worker: Any, batch: Any, *args: Any, **options: Any) -> Any:
        """Around TpModelWorker.forward_batch_generation."""
        if batch is None:
            return original(worker, batch, *args, **options)
        return runtime.forward(lambda: original(worker, batch, *args, **options), batch)

    return around


def _around_sample_logits(runtime: Runtime) -> Function:
    def around(original: Function, runner: Any, logits_output: Any, batch: Any) -> Any:
        """Around ModelRunner.sample."""
        return runtime.raw.sample(
            lambda: original(runner, logits_output, batch), logits_output, batch.sampling_info
        )

    return around


def _around_sample(runtime: Runtime) -> Function:
    def around(
        original: Function, sampler: Any, logits: Any, info: Any, *args: Any, **kw: Any
    ) -> Any:
        """Around Sampler.forward."""
        return runtime.forcing.sample(lambda: original(sampler, logits, info, *args, **kw), info)

    return around


def _before_logprobs(runtime: Runtime) -> Function:
    def before(_: Any, logprobs: Any, top: Any, ids: Any, sampled: torch.Tensor) -> None:
        """Before OutputLogprobProcessor.compute_logprobs."""
        runtime.forcing.before_logprobs(sampled)

    return before


def _around_end_output(runtime: Runtime) -> Function:
    def around(original: Function, req: Any, *args: Any, **options: Any) -> None:
        """Around Req.update_finish_state: prescribed tokens end nothing."""
        if not force.goes_on(req):
            original(req, *args, **options)
            if runtime.ends_with_error(req):
                compat.end_again(req)

    return around


def _around_control(runtime: Runtime) -> Function:
    def around(original: Function, scheduler: Any, request: Any) -> None:
        """Around Scheduler.handle_dumper_control."""
        if request.method != compat.CHANGE:
            original(scheduler, request)
            return
        compat.answer_change(scheduler, request, runtime.changes.handle(request.body))

    return around


def _around_release_pool(runtime: Runtime) -> Function:
    def around(original: Function, manager: Any, request: Any) -> Any:
        """Around SchedulerWeightUpdaterManager.release_memory_occupation.

        Kernels that are tried in the background read the pool.
        """
        runtime.background.pause()
        try:
            return original(manager, request)
        finally:
            if not compat.has_released_memory(manager):  # it was refused
                runtime.background.resume()

    return around


def _around_resume_pool(runtime: Runtime) -> Function:
    def around(original: Function, manager: Any, request: Any) -> Any:
        """Around SchedulerWeightUpdaterManager.resume_memory_occupation."""
        answer = original(manager, request)
        if not compat.has_released_memory(manager):
            runtime.background.resume()
        return answer

    return around


def _after_internal_state(runtime: Runtime) -> Function:
    def after(answer: Any, *args: Any) -> Any:
        """After Scheduler.get_internal_state, which GET /server_info shows."""
        answer.internal_state["kv_policy"] = runtime.policies.describe()
        answer.internal_state["kv_policy_inspection"] = runtime.inspection
        answer.internal_state["kv_policy_version"] = version("kvpolicy")
        answer.internal_state["kv_policy_dp_rank"] = compat.dp_rank()
        answer.internal_state["kv_policy_token_bytes"] = runtime.services.reports.token_bytes
        return answer

    return after
