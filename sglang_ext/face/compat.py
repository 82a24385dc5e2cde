"""Every SGLang name that the plugin touches, and the versions it was checked on.

Nothing is imported from SGLang at module level: the plugin is loaded before SGLang has parsed its
command line, and most of SGLang takes seconds to import.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Function = Callable[..., Any]  # a function of SGLang, or a hook on one

CHECKED_VERSIONS = ("0.5.22", "0.5.23")

# Hook targets: the launcher's (the first three), the front end's.
ADD_CLI_ARGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
FROM_CLI_ARGS = "sglang.srt.server_args.ServerArgs.from_cli_args"
PUBLISH = "sglang.srt.runtime_context.publish"
META_INFO = "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info"
BATCH_OUTPUT = "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_batch_output"
ABORTED = "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_req"
MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__"
GENERATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
CONTROLS = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
FRONT_STATE = f"{CONTROLS}.get_internal_state"
CRASH_DUMP = "sglang.srt.managers.tokenizer_manager.TokenizerManager.dump_requests_before_crash"
LOG_REQUEST = (
    "sglang.srt.utils.request_logger.RequestLogger.log_received_request",
    "sglang.srt.utils.request_logger.RequestLogger.log_finished_request",
)
EXPORT_REQUEST = (
    "sglang.srt.observability.request_metrics_exporter.RequestMetricsExporterManager.write_record"
)
ABORT_REQUEST = "sglang.srt.managers.tokenizer_manager.TokenizerManager.abort_request"
RELEASE_MEMORY = f"{CONTROLS}.release_memory_occupation"
RESUME_MEMORY = f"{CONTROLS}.resume_memory_occupation"
WANT_IDLE = (  # they, or what follows a pause, fail while the scheduler has a request
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.pause_generation",
    f"{CONTROLS}.flush_cache",
    f"{CONTROLS}.attach_hicache_storage",
    f"{CONTROLS}.detach_hicache_storage",
)
CHANGE_WEIGHTS = (
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weights_from_disk",
    f"{CONTROLS}.update_weights_from_distributed",
    f"{CONTROLS}.update_weights_from_tensor",
    f"{CONTROLS}.update_weights_from_ipc",
    f"{CONTROLS}.begin_weight_update",
    f"{CONTROLS}.end_weight_update",
)

# The scheduler's.
SIZE_POOL = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget"
CREATE_BUFFERS = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal"
ALLOC_MEMORY_POOL = "sglang.srt.model_executor.model_runner.ModelRunner.alloc_memory_pool"
INIT_MODEL_WORKER = "sglang.srt.managers.scheduler.Scheduler.init_model_worker"
ADD_REQUEST = "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"
MAX_PREFIX_LEN = "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len"
NEW_PREFILL = "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill"
RESET_FOR_RETRACT = "sglang.srt.managers.schedule_batch.Req.reset_for_retract"
PREPARE_FOR_EXTEND = "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend"
SLOT_RESERVE = "sglang.srt.managers.schedule_policy.PrefillAdder._request_slot_reserve_for_req"
RUNNING_NEEDS = (
    "sglang.srt.managers.schedule_policy.PrefillAdder._get_running_request_total_token_offset"
)
ADD_ONE = "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req"
ADD_CHUNKED = "sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req"
PREFILL_STATS = (
    "sglang.srt.managers.scheduler_components.metrics_reporter."
    "SchedulerMetricsReporter.report_prefill_stats"
)
FORWARD = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
PROCESS_RESULT = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
SAMPLE_LOGITS = "sglang.srt.model_executor.model_runner.ModelRunner.sample"
SAMPLE = "sglang.srt.layers.sampler.Sampler.forward"
MATCH_PREFIX = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.match_prefix"
LOGPROBS = "sglang.srt.layers.logprob_processor.OutputLogprobProcessor.compute_logprobs"
TIME_STATS = "sglang.srt.managers.schedule_batch.Req.log_time_stats"
END_OUTPUT = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
PREFETCH = "sglang.srt.managers.scheduler.Scheduler._prefetch_kvcache"
QUEUED_LIMIT = "sglang.srt.managers.scheduler.Scheduler._abort_on_queued_limit"
TOUCH_WAITING = "sglang.srt.managers.schedule_policy.SchedulePolicy._touch_waiting_prefixes"
CONTROL = "sglang.srt.managers.scheduler.Scheduler.handle_dumper_control"
RELEASE_POOL = (
    "sglang.srt.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager.release_memory_occupation"
)
RESUME_POOL = (
    "sglang.srt.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager.resume_memory_occupation"
)
POSITIONS = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
CAN_RUN_GRAPH = (
    "sglang.srt.model_executor.runner.prefill_cuda_graph_runner."
    "PrefillCudaGraphRunner.can_run_graph"
)
GRAPH_VARIANTS = "sglang.srt.layers.attention.graph_variants.create_attention_graph_variants"
CREATE_ROWS = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.__init__"
CHECKPOINT = "sglang.srt.mem_cache.common.checkpoint_kv_cache"
RELEASE = "sglang.srt.mem_cache.common.release_kv_cache"
OWNED = "sglang.srt.managers.schedule_batch.Req.owned_kv_len"
POOL_STATS = (
    "sglang.srt.managers.scheduler_components.pool_stats_observer."
    "SchedulerPoolStatsObserver.get_pool_stats"
)
BEAMS = "sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init"
UNCACHED_SIZES = (
    "sglang.srt.managers.scheduler_components.invariant_checker."
    "SchedulerInvariantChecker._get_total_uncached_sizes"
)

SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
TOKENIZER_MODULE = "sglang.srt.managers.tokenizer_manager"
HTTP_MODULE = "sglang.srt.entrypoints.http_server"

# Model classes whose hidden states can lose rows (`propagate:`), with the names of their models.
LOSE_ROWS = {
    "apertus.ApertusForCausalLM": "Apertus",
    "arcee.ArceeForCausalLM": "Arcee",
    "glm4.Glm4ForCausalLM": "GLM-4",
    "glm4_moe.Glm4MoeForCausalLM": "GLM-4-MoE",
    "llama.LlamaForCausalLM": "Llama",
    "mistral.MistralForCausalLM": "Mistral",
    "mixtral.MixtralForCausalLM": "Mixtral",
    "llama.Phi3ForCausalLM": "Phi-3",
    "qwen2.Qwen2ForCausalLM": "Qwen2",
    "qwen2_moe.Qwen2MoeForCausalLM": "Qwen2-MoE",
    "qwen3.Qwen3ForCausalLM": "Qwen3",
    "qwen3_moe.Qwen3MoeForCausalLM": "Qwen3-MoE",
}

CHANGE = "kv_policy"  # method of the plugin's control messages
_SCORING = "kv_policy_scoring"  # attribute of requests made by `scoring_request`

# Routes whose bodies have no field for `custom_params`: SGLang ignores it.
_WITHOUT_CUSTOM_PARAMS = ("/v1/messages", "/v1/responses", "/api/chat", "/api/generate")

_HEALTH_ROUTES = ("/health", "/health_generate")


def installed_version() -> str:
    """Version of the installed SGLang."""
    return version("sglang")


def in_scheduler() -> bool:
    """Whether this process may run a scheduler: its module is loaded before the plugins are.

    Also true in the process of `sgl.Engine`, where the hooks are never called.
    """
    return SCHEDULER_MODULE in sys.modules


def has_tokenizer() -> bool:
    """Whether this process has loaded the tokenizer manager."""
    return TOKENIZER_MODULE in sys.modules


def _route(request: Any) -> str:
    """The path of an HTTP request below the application's root path."""
    path: str = request.scope["path"]
    root = request.scope.get("root_path", "").rstrip("/")  # `--fastapi-root-path`
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def drops_custom_params(request: Any) -> bool:
    """Whether the route of an HTTP request ignores `custom_params` in its body."""
    return _route(request) in _WITHOUT_CUSTOM_PARAMS


def ignored_adapter(request: Any, body: Mapping[str, Any]) -> str | None:
    """The text after `:` in the model's name on `/v1/responses`, which ignores it; else None."""
    model = body.get("model")
    if _route(request) != "/v1/responses" or not isinstance(model, str):
        return None
    return model.partition(":")[2].strip() or None


def add_middleware(middleware: type) -> None:
    """Add ASGI middleware to SGLang's HTTP application, once, if this process has one."""
    module = sys.modules.get(HTTP_MODULE)
    if module is not None and all(
        entry.cls is not middleware for entry in module.app.user_middleware
    ):
        module.app.add_middleware(middleware)


def worker_app() -> Any:
    """SGLang's HTTP application in a worker process (`--tokenizer-worker-num`), with the plugins.

    SGLang itself loads no plugins there.
    """
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.plugins import load_plugins

    load_plugins()
    return app


def use_worker_app(path: str) -> bool:
    """Let HTTP workers import `path` (`module:attribute`) in place of SGLang's application.

    Returns:
        False where this version of SGLang cannot, or another application is asked for.
    """
    from sglang.srt.environ import envs

    setting = getattr(envs, "SGLANG_HTTP_SERVER_APP_PATH", None)
    if setting is None or setting.get() not in (f"{HTTP_MODULE}:app", path):
        return False
    setting.set(path)
    return True


def register(target: str, hook: Function, kind: str) -> None:
    """Register a hook; `kind` is "before", "after" or "around"."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType(kind))


def apply_hooks() -> None:
    """Apply hooks registered since SGLang last applied hooks; applied ones stay as they are."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()


def is_applied(target: str) -> bool:
    """Whether the hooks of a target are in place (SGLang only logs a failure)."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return target in HookRegistry._patched


def wrap_attention_backends(wrap: Callable[[str, Function], Function]) -> None:
    """Replace every factory of attention backends by `wrap(name, factory)`."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    for name, factory in list(ATTENTION_BACKENDS.items()):
        ATTENTION_BACKENDS[name] = wrap(name, factory)


def resolved(server_args: Any) -> Any:
    """Options as SGLang has resolved them (defaults chosen), as attributes."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)


def attention_backends(options: Any) -> tuple[str, str]:
    """Names of the attention backends for prefill and decode."""
    from sglang.srt.arg_groups.overrides import attention_backends_of

    return attention_backends_of(options)


def model_config(server_args: Any) -> Any:
    """SGLang's description of the model (reads config.json, no weights)."""
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(server_args)


def config_values(config: Any) -> dict[str, Any]:
    """The values of a model's config.json, by transformers' common names."""
    text = config.hf_text_config
    values = text.to_dict()
    common = {name: values.get(native) for name, native in type(text).attribute_map.items()}
    return {**values, **{name: value for name, value in common.items() if value is not None}}


def is_mla(config: Any) -> bool:
    """Whether a model config describes latent attention (MLA)."""
    from sglang.srt.configs.model_config import AttentionArch

    return config.attention_arch == AttentionArch.MLA


def has_recurrent_layers(config: Any) -> bool:
    """Whether a model mixes attention with Mamba or linear attention."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(config) is not None


def uses_ray() -> bool:
    """Whether this process starts schedulers as Ray's actors."""
    return "sglang.srt.ray.engine" in sys.modules


def is_set(variable: str) -> bool:
    """Whether one of SGLang's own environment variables, true or false, is true."""
    from sglang.srt.environ import envs

    return bool(getattr(envs, variable).get())


def captures_whole_prefills(options: Any) -> bool:
    """Whether prefills replay one CUDA graph, attention included."""
    from sglang.srt.model_executor.cuda_graph_config import Backend

    return options.cuda_graph_config.prefill.backend == Backend.FULL


def captures_hidden_states(options: Any) -> bool:
    """Whether hidden states of several layers go to the sampler with every batch (0.5.23)."""
    return bool(getattr(options, "enable_return_aux_hidden_states", False))


def divides_tokens(options: Any) -> str | None:
    """The option by which each rank has some of the tokens between layers; None: all have all."""
    if options.tp_size == 1:
        return None
    if getattr(options, "enable_layernorm_sp", False):  # 0.5.23
        return "--enable-layernorm-sp"
    if options.moe_a2a_backend != "none":
        return f"--moe-a2a-backend {options.moe_a2a_backend}"
    return "--moe-dense-tp-size 1" if options.moe_dense_tp_size == 1 else None


def captured_requests(options: Any) -> int:
    """Requests of the largest decode batch to be captured, the pool permitting; 0 if none is."""
    from sglang.srt.model_executor.cuda_graph_config import Backend

    decode = options.cuda_graph_config.decode
    off = decode.backend == Backend.DISABLED or options.device == "cpu"
    return 0 if off else max(decode.bs)


def most_running(scheduler: Any) -> int:
    """Most requests that a scheduler runs at once."""
    return scheduler.max_running_requests


def captured_attention() -> str | None:
    """Which variant of a decode graph is being captured; None outside of a capture."""
    from sglang.srt.model_executor.runner_utils.capture_mode import get_capture_attention_variant

    return get_capture_attention_variant()


def read_during_layers(declared: Any) -> Any:
    """The `SharedReadEnds` of a forward whose layers read the table of slots.

    Args:
        declared: the stock backend's.
    """
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

    return SharedReadEnds.max_of([declared, SharedReadEnds.POST_REPLAY])


def backends_in_use(runner: Any) -> list[Any]:
    """The attention backends of a model runner: one, or one each for prefill and decode."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    backend = runner.attn_backend
    if isinstance(backend, HybridAttnBackend):
        return [backend.prefill_backend, backend.decode_backend]
    return [backend]


def streams(scheduler: Any) -> tuple[Any, Any, Any]:
    """The module of a scheduler's device, the scheduler's stream, and that of its forwards."""
    return scheduler.device_module, scheduler.schedule_stream, scheduler.forward_stream


def is_plain_pool(pool: Any) -> bool:
    """Whether the KV pool is the ordinary one: `[slots, G, D]` per layer, unquantized."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return type(pool) is MHATokenToKVPool and pool.kv_cache_layout == "nhd" and not pool.use_hnd


def kv_memory_region(pool: Any) -> Any:
    """The context in which SGLang allocates KV buffers."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

    return pool.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE)


def attention_layers(model: Any) -> list[Any]:
    """The model's attention layers, in order of their ids.

    A model that SGLang computes with transformers' class keeps them in a table, which also has
    elements for layers without attention.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = [m for m in model.modules() if isinstance(m, RadixAttention)]
    table = getattr(model, "attention_instances", None)
    if table:
        modules = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
        layers += [table[m.layer_idx] for m in modules if getattr(m, "layer_idx", None) in table]
    return sorted(layers, key=lambda layer: layer.layer_id)


def is_decoder_attention(layer: Any) -> bool:
    """Whether an attention layer is ordinary causal self-attention."""
    from sglang.srt.layers.radix_attention import AttentionType

    return layer.attn_type == AttentionType.DECODER and not layer.is_cross_attention


def decoder_layers(model: Any) -> list[Any] | None:
    """The layers of a model whose hidden states can lose rows; None for another class.

    A layer of these classes takes (positions, hidden states, forward batch) and leaves its residual
    in the forward batch.
    """
    module = type(model).__module__.removeprefix("sglang.srt.models.")
    loses_rows = f"{module}.{type(model).__name__}" in LOSE_ROWS
    return list(model.model.layers) if loses_rows else None


def embed(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """[T, hidden] embeddings of tokens [T], as the model's forward makes them."""
    return model.model.embed_tokens(ids)


def slot_table(runner: Any) -> torch.Tensor:
    """[rows, context] int32, SGLang's table of slots with the scratch rows."""
    return runner.req_to_token_pool.req_to_token


def await_loaded(runner: Any, layer: int) -> None:
    """Have this forward wait for entries of a layer that come from the host, as attention does."""
    runner.token_to_kv_pool.get_key_buffer(layer)


def unrecorded() -> Any:
    """The context in which SGLang records no experts (`--expert-distribution-recorder-mode`)."""
    from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder

    return get_global_expert_distribution_recorder().disable_this_region()


def start_stream(batch: Any) -> None:
    """Begin the residual stream of a batch before its first layer."""
    from sglang.srt.layers.layer_boundary.residual.batch import start

    start(batch)


def take_stream(hidden: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """A layer's output and residual, [T, hidden], and how the next layer is to add them up."""
    stream = batch.residual_stream
    update = stream.pending.update
    output, residual = stream.export(hidden)
    return output, residual, update


def put_stream(batch: Any, output: torch.Tensor, residual: torch.Tensor, update: Any) -> Any:
    """Leave output and residual in a batch; returns what the next layer is called with."""
    from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream

    hidden, batch.residual_stream = ResidualStream.from_handoff(output, residual, update)
    return hidden


def view_of(batch: Any, fields: dict[str, Any]) -> Any:
    """A forward batch like `batch` but for some fields; `prepare` readies layers for it."""
    view = copy.copy(batch)
    for name, value in fields.items():
        setattr(view, name, value)
    return view


def prepare(runner: Any, batch: Any) -> None:
    """From now on, have attention and LoRA adapters run on the rows of a batch or of a view."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    if not batch.batch_size:  # no layer runs without rows, and FlashInfer cannot plan for none
        return
    runner.kv_index_translator.bind_own_plan(batch)
    get_attn_backend().init_forward_metadata(batch)
    adapt_rows(runner, batch)


def adapt_rows(runner: Any, batch: Any) -> None:
    """From now on, have LoRA adapters applied to the rows of a batch or of a view."""
    if runner.lora_manager is not None:
        runner.lora_manager.prepare_lora_batch(batch)


def save_kv(
    backend: Any, layer: Any, batch: Any, k: torch.Tensor, v: torch.Tensor, *scales: Any
) -> None:
    """Write a forward's new keys and values into the pool, as the stock backend does.

    Args:
        scales: of keys and values, where the backend applies the layer's; k and v may then be
            changed in place.
    """
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    location = KVWriteLoc(batch.out_cache_loc, None)
    backend.token_to_kv_pool.set_kv_buffer(layer, location, k, v, *scales)


def kv_scales(layer: Any) -> tuple[float, float]:
    """Factors of an attention layer's 8-bit keys and values when they are read."""
    if layer.k_scale is None or layer.v_scale is None:
        return 1.0, 1.0
    return layer.k_scale_float, layer.v_scale_float


def lacks_scale(layer: Any) -> bool:
    """Whether an attention layer has scales that SGLang applies only when it writes."""
    kinds = ((layer.k_scale, layer.k_scale_float), (layer.v_scale, layer.v_scale_float))
    return any(scale is not None and number is None for scale, number in kinds)


def compute_capability(device: str) -> tuple[int, int] | None:
    """(major, minor) of the GPU that a server runs on; None without an NVIDIA GPU."""
    import torch

    if device != "cuda" or not torch.cuda.is_available() or torch.version.cuda is None:
        return None
    return torch.cuda.get_device_capability()


def gives_lse(name: str, backend: Any) -> bool:
    """Whether a stock backend's prefill can hand over the log-sum-exp of its logits.

    Args:
        name: the backend's in SGLang's registry.
    """
    if name == "fa3":
        return "return_lse" in inspect.signature(backend.forward_extend).parameters
    wrapper = getattr(backend, "prefill_wrapper_ragged", None)
    return name == "flashinfer" and hasattr(wrapper, "forward_return_lse")


def extend_with_lse(
    name: str, forward: Function, backend: Any, *arguments: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a prefill of a backend that `gives_lse`.

    Args:
        forward: the stock `forward_extend`, which is called with the backend and all that follows.

    Returns:
        The output, and the natural log-sum-exp of the logits, float32 [rows, H]; None for the
        latter where the backend took a path that does not compute it.
    """
    if name == "fa3":
        out, lse = forward(backend, *arguments, return_lse=True, **options)
        return out, lse
    with _noting_lse(backend) as lses:
        out = forward(backend, *arguments, **options)
    return out, _natural(lses)


class _Noting:
    """A wrapper of FlashInfer that notes the log-sum-exp of every call."""

    def __init__(self, wrapper: Any, lses: list[torch.Tensor]) -> None:
        self._wrapper, self._lses = wrapper, lses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)

    def forward(self, *arguments: Any, **options: Any) -> torch.Tensor:
        return self.forward_return_lse(*arguments, **options)[0]

    def forward_return_lse(
        self, *arguments: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self._wrapper.forward_return_lse(*arguments, **options)
        self._lses.append(lse)
        return out, lse


@contextmanager
def _noting_lse(backend: Any) -> Iterator[list[torch.Tensor]]:
    """Base-2 log-sum-exps [rows, H] that a backend's FlashInfer wrappers find in the block."""
    lses: list[torch.Tensor] = []
    metadata, ragged = backend.forward_metadata, backend.prefill_wrapper_ragged
    paged = metadata.prefill_wrappers
    backend.prefill_wrapper_ragged = _Noting(ragged, lses)
    metadata.prefill_wrappers = [_Noting(wrapper, lses) for wrapper in paged]
    try:
        yield lses
    finally:
        backend.prefill_wrapper_ragged, metadata.prefill_wrappers = ragged, paged


def flashinfer_decode(backend: Any) -> tuple[torch.Tensor, bool]:
    """The workspace of SGLang's FlashInfer backend, and whether it decodes with tensor cores."""
    return backend.workspace_buffer, backend.decode_use_tensor_cores


def decode_with_lse(
    forward: Function, backend: Any, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """A decode forward of SGLang's FlashInfer backend, and base-2 [B, H] log-sum-exp of its logits.

    Args:
        forward: the stock `forward_decode`, which is called with the backend and all that follows.
    """
    lses: list[torch.Tensor] = []
    metadata = backend.forward_metadata
    wrappers = metadata.decode_wrappers
    metadata.decode_wrappers = [_Noting(wrapper, lses) for wrapper in wrappers]
    try:
        out = forward(backend, *arguments)
    finally:
        metadata.decode_wrappers = wrappers
    return out, lses[0]


def begin_at_tails(
    backend: Any, tails: Callable[[], tuple[torch.Tensor, Sequence[int]] | None]
) -> None:
    """Have SGLang's FlashInfer backend read the rows of decode forwards from their tails on.

    Args:
        tails: returns the token from which each row is read: int32 [rows of SGLang's table of
            slots] on the device, and on the host those of the forward's rows, padding left out;
            None: rows are read from their beginning.
    """
    import torch

    updater = backend.indices_updater_decode
    begin = updater.call_begin_forward

    def begin_there(
        wrapper: Any, lengths: Any, total: Any, indptr: Any, first: Any, spec: Any,
        on_host: Any = None, *arguments: Any, req_pool_indices: Any, **options: Any,
    ) -> None:  # fmt: skip
        tail_starts = tails()
        if tail_starts is not None:
            starts, row_starts = tail_starts
            first = starts[req_pool_indices[: len(lengths)]]
            lengths = lengths - first
            total = None if total is None else total - sum(row_starts)
            if on_host is not None:
                on_host = on_host.clone()
                on_host[: len(row_starts)] -= torch.tensor(row_starts, dtype=on_host.dtype)
        options["req_pool_indices"] = req_pool_indices
        begin(wrapper, lengths, total, indptr, first, spec, on_host, *arguments, **options)

    updater.call_begin_forward = begin_there


def _natural(lses: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Natural log-sum-exp of one noted base-2 value, or of two (new tokens and prefix); or None."""
    if not 1 <= len(lses) <= 2:
        return None
    lse = lses[0] if len(lses) == 1 else lses[0].logaddexp2(lses[1])
    return lse * math.log(2)


def stock_decode_rows(
    backend: Any, layer: Any, batch: Any, q: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """The torch-native backend's own attention for some rows of a decode batch.

    Args:
        q: [B, H, D] queries of the whole batch.
        rows: [n] int64 rows wanted.

    Returns:
        [n, H, D]
    """
    part = q[rows]
    return backend._run_sdpa_forward_decode(
        part,
        part.new_empty(part.shape),
        backend.token_to_kv_pool.get_key_buffer(layer.layer_id),
        backend.token_to_kv_pool.get_value_buffer(layer.layer_id),
        backend.req_to_token_pool.req_to_token,
        batch.req_pool_indices[rows],
        batch.seq_lens[rows],
        None,
        scaling=layer.scaling,
        enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        causal=False,
    )


def scaled(queries: torch.Tensor, layer: Any) -> torch.Tensor:
    """Queries for which a policy's attention, softmax(q k / sqrt(D)), is the model's."""
    factor = scale(layer)
    return queries if factor == 1.0 else queries * factor


def scale(layer: Any) -> float:
    """Factor of a layer's queries in `scaled`."""
    factor = layer.scaling * math.sqrt(layer.qk_head_dim)
    return 1.0 if math.isclose(factor, 1.0, rel_tol=1e-6) else factor


def evict(tree: Any, slots: int) -> None:
    """Ask the radix cache to evict until `slots` are free, or nothing is left to evict."""
    from sglang.srt.mem_cache.common import evict_from_tree_cache

    evict_from_tree_cache(tree, slots)


def locked_alone(tree: Any, request: Any) -> int:
    """Slots of the radix cache that nothing but this request's lock keeps from being evicted."""
    if request.lock is None:
        return 0
    node, evictable = request.lock.node, tree.evictable_size()
    tree.unlock(request.lock)
    locked = tree.evictable_size() - evictable
    request.lock = tree.lock(node)
    return locked


def rotary_embeddings(model: Any) -> list[Any | None]:
    """The rotary embedding that turns the keys of each attention layer; None where none is found.

    Also None where it is off, where keys change after it, or where it pairs dimensions otherwise.
    """
    from sglang.srt.layers import rotary_embedding
    from sglang.srt.layers.radix_attention import RadixAttention

    embeddings, package = [], rotary_embedding.__name__
    for owner in model.modules():
        if any(isinstance(child, RadixAttention) for child in owner.children()):
            rotary = [m for m in owner.children() if type(m).__module__.startswith(package)]
            off = not getattr(owner, "use_rope", True) or not getattr(owner, "attn_use_rope", True)
            normed_after = type(owner).__name__ == "HunYuanAttention" and owner.use_qk_norm
            # The pairs that it turns lie half a head apart, though fewer dimensions turn.
            partial = getattr(owner, "use_xllm_partial_rope", False)
            embeddings.append(
                rotary[0] if rotary and not (off or normed_after or partial) else None
            )
    return embeddings


def frequencies(embedding: Any) -> torch.Tensor | None:
    """[pairs] radians per position by which a rotary embedding turns each pair of dimensions.

    None where they depend on more than the position. YaRN also scales keys, all by one factor.
    """
    from sglang.srt.layers import rotary_embedding as rope
    from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding
    from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding

    kind = type(embedding)
    if kind in (rope.RotaryEmbedding, Llama3RotaryEmbedding):
        return embedding._compute_inv_freq(embedding.base)
    if kind is LinearScalingRotaryEmbedding and len(embedding.scaling_factors) == 1:
        # Positions are divided by the factor.
        return embedding._compute_inv_freq(embedding.base) / embedding.scaling_factors[0]
    if kind is YaRNScalingRotaryEmbedding:
        return embedding._compute_inv_freq(embedding.scaling_factor)
    return None


def add_output(logits_output: Any, output: Any) -> None:
    """Have SGLang copy an output of this step to the host, and hand it over with the tokens."""
    from sglang.srt.managers.auxiliary_output import append_auxiliary_output

    logits_output.auxiliary_device_output = append_auxiliary_output(
        logits_output.auxiliary_device_output, output
    )


def receive_outputs(runner: Any, receiver: Any) -> None:
    """On the first stage: have `receiver.from_pp_tensors` make outputs that the last stage sends.

    SGLang asks the observer of samples for that, which only the last stage would call otherwise.
    """
    runner.sampling_observer = receiver


def leave_out_of_metrics(request: Any) -> None:
    """In the scheduler: observe no times of a request, and cache nothing that it computes."""
    request.time_stats.enable_metrics = False
    request.skip_radix_cache_insert = True


def end_beams(coordinator: Any, request: Any) -> None:
    """In the scheduler: forget the group of beams of a request that is refused."""
    coordinator.retire_group(request)


def found_unnoticed(tree: Any, key: Any) -> Any:
    """The match of `key` in the radix cache; its eviction order and its nodes stay as they are."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchResult

    length, node, _ = tree.tree_core.match_full_device_prefix(key)
    return MatchResult(length, node, node, node)


def keep_for_session(tree: Any, request: Any) -> None:
    """Have a session (`--enable-session-radix-cache`) refer to the prompt of a request that ends.

    SGLang does so when it leaves a request's tokens to the radix cache at the request's end. A
    compressed request left its prompt there earlier, and leaves nothing at its end.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.mem_cache.radix_cache import RadixKey

    if not getattr(tree, "enable_session_radix_cache", False):
        return
    if not request.finished() or isinstance(request.finished_reason, FINISH_ABORT):
        return
    key = RadixKey(request.origin_input_ids, request.extra_key, cache_salt=request.cache_salt)
    length, node, _ = tree.tree_core.match_full_device_prefix(key.page_aligned(tree.page_size))
    if length:
        tree.session_refs.register_session_ref(request, leaf=node)


def not_free(stats: Any, slots: int) -> Any:
    """SGLang's statistics of its pool, changed so that `slots` free slots count as used."""
    capacity = stats.full_num_used + stats.full_available_size + stats.full_evictable_size
    stats.full_available_size -= slots
    stats.full_num_used += slots
    stats.full_token_usage = stats.full_num_used / capacity
    return stats


def refuse_unnoticed(request: Any, message: str) -> None:
    """SGLang's `set_finish_with_abort` for an internal request, without the log of an error."""
    from array import array
    from http import HTTPStatus

    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    request.origin_input_ids = array("q", [0])  # one token, as the prefill is not needed
    request.return_logprob, request.logprob_start_len = False, -1
    request.to_finish = FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError")


@contextmanager
def uncounted(adder: Any) -> Iterator[None]:
    """A block whose admissions are not counted among prefilled and cached tokens."""
    counts = (adder.log_input_tokens, adder.log_hit_tokens)
    try:
        yield
    finally:
        adder.log_input_tokens, adder.log_hit_tokens = counts


def end_with_error(request: Any, message: str) -> None:
    """Let a request that is being computed end with an HTTP 500 and a message for the client."""
    from http import HTTPStatus

    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    request.to_finish = FINISH_ABORT(message, status, "InternalServerError")


def end_again(request: Any) -> None:
    """Let a request that SGLang has ended end with the error of `end_with_error` instead."""
    request.finished_reason, request.to_finish = request.to_finish, None


def is_health_check(request: Any) -> bool:
    """Whether a request is one of SGLang's own health checks."""
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    return isinstance(request.rid, str) and request.rid.startswith(HEALTH_CHECK_RID_PREFIX)


def is_named_health_check(obj: Any) -> bool:
    """In the front end: whether the id of a request, or of one in a batch, is a health check's."""
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    rids = obj.rid if isinstance(obj.rid, list) else [obj.rid]
    return any(isinstance(rid, str) and rid.startswith(HEALTH_CHECK_RID_PREFIX) for rid in rids)


def is_of_health_route(request: Any) -> bool:
    """Whether an HTTP request came by a health route, which carries no request of a client."""
    return request is not None and _route(request) in _HEALTH_ROUTES


def admitted_none() -> Any:
    """The prefill adder's answer "admit nothing more in this pass"."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult.OTHER


def passed_over() -> Any:
    """The prefill adder's answer "this one stays in the queue, the next may be admitted"."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult.CONTINUE


def ignores_eos_without_cache(adder: Any, request: Any) -> bool:
    """Whether the prefill adder follows a request's output step by step instead of adding it."""
    return request.sampling_params.ignore_eos and getattr(adder.tree_cache, "disable", True)


def running_needs(adder: Any, request: Any) -> float:
    """Slots that the prefill adder reserves for what a running request may still take."""
    return float(adder._get_running_request_total_token_offset(request))


def longest_estimated_output() -> int:
    """Most output tokens that the prefill adder reserves for one request."""
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

    return CLIP_MAX_NEW_TOKENS


def free_slots(allocator: Any) -> torch.Tensor:
    """[n] slots on the allocator's free list, on its device."""
    import torch

    pages, size = allocator.get_all_free_pages(), allocator.page_size
    return (pages[:, None] * size + torch.arange(size, device=pages.device)).flatten()


@dataclass(frozen=True)
class TensorGroup:
    """The ranks among which a model's heads are divided (`--tp`), as torch knows them.

    Attributes:
        rank, size: number of this process's rank, from 0, and number of ranks.
        host, device: groups of `torch.distributed`, for numbers of the host and for tensors.
    """

    rank: int
    size: int
    host: Any
    device: Any


def tensor_group() -> TensorGroup:
    """The `TensorGroup` of this scheduler."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    return TensorGroup(group.rank_in_group, group.world_size, group.cpu_group, group.device_group)


@dataclass(frozen=True)
class StageGroup:
    """The stages among which a model's layers are divided (`--pp-size`).

    Attributes:
        stage, size: number of this process's stage, from 0, and number of stages.
    """

    stage: int
    size: int


def stage_group() -> StageGroup:
    """The `StageGroup` of this scheduler."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().pp_group
    return StageGroup(group.rank_in_group, group.world_size)


def layers_of(pool: Any) -> range:
    """Layers of the model whose keys and values are in a pool."""
    return range(pool.start_layer, pool.start_layer + pool.layer_num)


def layers_here(configurator: Any) -> int:
    """Number of the model's layers on this stage, before it has a pool."""
    number: int = configurator.layer_info.num_effective_layers
    return number


def dp_rank() -> int | None:
    """This scheduler's data-parallel rank (`--dp-size`); None if it is the only one."""
    from sglang.srt.runtime_context import get_parallel

    rank: int | None = get_parallel().dp_rank
    return rank


def metric_labels(scheduler: Any) -> dict[str, str] | None:
    """Labels that SGLang gives this scheduler's metrics; None where it is to export none.

    That is where metrics are off, and on all ranks and stages but the first: each of them knows
    every request, which is to be counted once.
    """
    collector = scheduler.metrics_collector
    first = tensor_group().rank == 0 and stage_group().stage == 0
    return dict(collector.labels) if collector is not None and first else None


# The front end, for experiments.


def has_step_outputs() -> bool:
    """Whether this SGLang copies further outputs of a step to the host (from 0.5.23 on)."""
    from importlib.util import find_spec

    return find_spec("sglang.srt.managers.auxiliary_output") is not None


async def token_bytes(manager: Any) -> int:
    """KV memory of one token in all layers, in bytes, as the plugin in the scheduler says it.

    The front end does not know it: `--kv-cache-dtype auto` is what the checkpoint says.
    """
    states = await manager.get_internal_state()
    size: int = states[0]["kv_policy_token_bytes"]
    return size


def manager() -> Any:
    """SGLang's tokenizer manager behind its HTTP server."""
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager


def preferred_custom_params(manager: Any) -> Any:
    """`custom_params` of requests that have none (`--preferred-sampling-params`)."""
    return (manager.preferred_sampling_params or {}).get("custom_params")


def prompts(obj: Any) -> int:
    """Number of prompts of a request as its route has made it."""
    text, ids, embeds = (getattr(obj, name, None) for name in ("text", "input_ids", "input_embeds"))
    if isinstance(text, list):
        return len(text)
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        return len(ids)
    # A prompt is a list of vectors.
    if isinstance(embeds, list) and embeds and embeds[0] and isinstance(embeds[0][0], list):
        return len(embeds)
    return 1


def session_of(obj: Any) -> str | None:
    """The id of the session that a request names; None if it names none."""
    if obj.session_id is not None:
        return obj.session_id
    params = obj.session_params
    session = params.get("id") if isinstance(params, dict) else None
    return session if isinstance(session, str) else None


def has_adapters(manager: Any) -> bool:
    """Whether requests may name LoRA adapters (`--enable-lora`)."""
    return bool(manager.enable_lora)


def is_adapter(manager: Any, name: str) -> bool:
    """Whether a LoRA adapter is loaded by this name."""
    return has_adapters(manager) and name in manager.lora_registry.get_all_adapters()


def refused_before_generation(obj: Any) -> None:
    """Complete a request that generates nothing: SGLang reads it again after a stream's error."""
    if not hasattr(obj, "is_single"):
        obj.is_single, obj.rid = False, []


def is_starting(manager: Any) -> bool:
    """Whether the server has not yet answered its warm-up."""
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    return manager.server_status == ServerStatus.Starting


def is_generation(obj: Any) -> bool:
    """Whether a request is answered by generated tokens."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    return isinstance(obj, GenerateReqInput)


def allowed_labels() -> tuple[str, ...]:
    """Labels that requests may have, once SGLang's options are published."""
    from sglang.srt.runtime_context import get_observability

    return tuple(get_observability().tokenizer_metrics_allowed_custom_labels or ())


def set_labels(obj: Any, labels: dict[str, str], allowed: Collection[str]) -> None:
    """Set a request's labels of SGLang's histograms, in place of a client's of the same names.

    The client's other labels stay where `allowed` has them: any others would end in an error of the
    metrics library.
    """
    client_labels = obj.custom_labels if isinstance(obj.custom_labels, dict) else {}
    kept_labels = {name: str(value) for name, value in client_labels.items() if name in allowed}
    obj.custom_labels = {**kept_labels, **labels}


def allow_labels(server_args: Any, labels: tuple[str, ...]) -> None:
    """Add labels to those that requests may have; before SGLang has resolved its options."""
    allowed = server_args.tokenizer_metrics_allowed_custom_labels or []
    added = [label for label in labels if label not in allowed]
    server_args.tokenizer_metrics_allowed_custom_labels = [*allowed, *added]


def front_end_labels(manager: Any) -> dict[str, str] | None:
    """Labels of the tokenizer's metrics without those of requests; None when metrics are off."""
    if not manager.enable_metrics:
        return None
    return {name: value for name, value in manager.metrics_collector.labels.items() if value}


def is_idle(manager: Any, most_used: float) -> bool:
    """Whether no request waits for admission, and under `most_used` (a share) of each pool is.

    A paused server is not idle. With `--pp-size`, there is a running batch per stage, and a load
    says how many requests one of them has.
    """
    loads, options = manager.load_snapshot_reader.read_all(), manager.server_args
    batch, stages = options.pp_max_micro_batch_size, options.pp_size
    free = all(
        load.num_waiting_reqs == 0
        and load.num_running_reqs < (batch or max(load.max_running_requests // stages, 1))
        and load.token_usage < most_used
        for load in loads
    )
    return free and not manager.is_pause


def memory_tags(obj: Any) -> frozenset[str]:
    """Kinds of memory that a request to release or resume memory names; all if it names none."""
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    return frozenset(obj.tags or GPU_MEMORY_ALL_TYPES)


def has_only_tokens(obj: Any) -> bool:
    """Whether a request's prompt is nothing but tokens."""
    other_inputs = (obj.image_data, obj.video_data, obj.audio_data, obj.input_embeds)
    only_tokens = all(value is None or value == [] for value in other_inputs)
    return only_tokens and obj.session_params is None


def cache_namespace(obj: Any, meta_info: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by which a scoring request finds in the radix cache what `obj` left there.

    Args:
        meta_info: of the answer to `obj`, whose scheduler is to compute the scoring request.
    """
    names = ("extra_key", "cache_salt", "lora_path")
    fields = {name: getattr(obj, name, None) for name in names}
    return {**fields, "routed_dp_rank": meta_info.get("dp_rank")}


def latencies(state: Any) -> tuple[float | None, float | None]:
    """Seconds to the first token of a request that has ended, and to its end; None if not known.

    For an answer that was not streamed, SGLang knows the first only with `--enable-metrics`; else
    it notes the time at which all tokens came.
    """
    stats = state.time_stats
    first_token_known = 0 < stats.first_token_time < stats.finished_time
    ttft = stats.get_first_token_latency() if first_token_known else None
    return ttft, stats.get_e2e_latency() if stats.finished_time else None


def complete_output(output: Any) -> None:
    """Have `META_INFO` called for every request of an output, also where nothing is collected."""
    if getattr(output, "customized_info", {}) is None:
        output.customized_info = {}


def is_scoring(obj: Any) -> bool:
    """Whether a request was made by `scoring_request`."""
    return getattr(obj, _SCORING, False)


def add_route(path: str, method: str, endpoint: Function, *, admin: bool) -> None:
    """Add a route to SGLang's HTTP application, if this process has one.

    Args:
        endpoint: from an HTTP request to a status and a JSON value.
        admin: whether the admin key is needed; if none is configured, requests are refused.
    """
    module = sys.modules.get(HTTP_MODULE)
    if module is None or any(
        getattr(route, "path", None) == path and method in (getattr(route, "methods", None) or ())
        for route in module.app.routes
    ):
        return
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.utils.auth import AuthLevel, auth_level

    async def answer(request: Any) -> Any:
        status, content = await endpoint(request)
        return JSONResponse(content, status_code=status)

    answer.__annotations__["request"] = Request  # FastAPI reads it
    level = AuthLevel.ADMIN_FORCE if admin else AuthLevel.NORMAL
    module.app.add_api_route(path, auth_level(level)(answer), methods=[method])


async def change_policies(manager: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Send `body` to every scheduler, which handles it between two batches; their answers.

    It travels in SGLang's control message whose body is any JSON, under the method `CHANGE`.
    """
    from sglang.srt.managers.io_struct import DumperControlReqInput

    answers = await manager.dumper_control(DumperControlReqInput(method=CHANGE, body=body))
    return [answer.response[0] for answer in answers]


def has_released_memory(manager: Any) -> bool:
    """Whether memory is given up, by a scheduler's `SchedulerWeightUpdaterManager`."""
    return bool(manager.offload_tags)


def answer_change(scheduler: Any, request: Any, answer: dict[str, Any]) -> None:
    """In a scheduler: answer a request of `change_policies`."""
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    output = DumperControlReqOutput(success=True, response=[answer])
    scheduler.ipc_channels.send_to_tokenizer.send_output(output, request)


def scoring_request(
    tokens: list[int], *, start: int, top: int, custom: dict[str, Any], namespace: Mapping[str, Any]
) -> Any:
    """A request that generates nothing: it asks for `top` candidates of tokens after `start`."""
    from uuid import uuid4

    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        rid=f"kv-shadow-{uuid4().hex}",
        input_ids=tokens,
        sampling_params={"max_new_tokens": 0, "temperature": 0, "custom_params": custom},
        return_logprob=True,
        logprob_start_len=start,
        top_logprobs_num=top,
        return_flat_raw_top_logprobs=True,
        return_flat_raw_top_logprobs_b64=True,
        log_metrics=False,
        no_logs=True,
        **namespace,
    )
    setattr(request, _SCORING, True)
    return request


async def score(manager: Any, request: Any) -> tuple[Any, Any]:
    """Candidates of a scoring request: ids int32 and logprobs float32, [n, K] each."""
    import base64

    import numpy as np

    answer = await manager.generate_request(request, None).__anext__()
    meta, shape = answer["meta_info"], answer["meta_info"]["input_top_logprobs_shape"]

    def array(name: str, dtype: str) -> Any:
        content = base64.b64decode(meta[f"input_top_logprobs_{name}_flat_b64"])
        return np.frombuffer(content, dtype).reshape(shape)

    return array("idx", "<i4"), array("val", "<f4")


def abort_unnoticed(manager: Any, rid: str) -> None:
    """Abort a scoring request without counting it in SGLang's metrics; it still gets an answer."""
    from sglang.srt.managers.io_struct import AbortReq

    manager._dispatch_to_scheduler(AbortReq(rid=rid))
