"""What policies cannot be combined with; each refusal is one sentence with the option and why."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.model_config import ModelConfig, config_of
from kvpolicy.dsl.bind.stages import why_not_apart
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.experiments.definition.experiment import NO_POLICY
from kvpolicy.sglang_ext.face import compat, kernels_in_use
from kvpolicy.sglang_ext.face.asked import POLICY, PREFIX, SET, not_served, shown
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.face.options import attention, kernels
from kvpolicy.sglang_ext.face.policy_files import Policy

# Attention backends for prefills and decode steps, in any combination; see attention/backend.py.
SERVED_BACKENDS = ("torch_native", "triton", "flashinfer", "fa3")

CACHE_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")

# Option (attribute of SGLang's), its harmless value, why any other cannot be served.
OPTIONS = (
    ("speculative_algorithm", None, "draft tokens are verified against slots that were freed"),
    ("disaggregation_mode", "null", "a compressed request's row cannot be transferred"),
    ("attn_cp_size", 1, "keys of one request would be spread over ranks"),
    ("dcp_size", 1, "keys of one request would be spread over ranks"),
    ("attn_dp_size", 1, "its ranks hold different requests (--enable-dp-attention sets it, too)"),
    ("enable_lmcache", False, "it stores whole rows, and freed slots are no longer in them"),
    ("enable_flexkv", False, "it stores whole rows, and freed slots are no longer in them"),
    ("enable_hisparse", False, "it keeps its own tables of a request's slots"),
    ("enable_unified_memory", False, "slots would move between pools"),
    ("enable_two_batch_overlap", False, "a forward would see half of a batch"),
    ("enable_pdmux", False, "prefill and decode would run at the same time"),
    ("enable_torch_compile", False, "decode steps read ragged tables"),
    ("dllm_algorithm", None, "blocks are denoised in place, not appended"),
    (
        "enable_deterministic_inference",
        False,
        "which kernel reads a request's entries, and so its rounding, depends on its batch",
    ),
    ("is_embedding", False, "nothing is decoded"),
    ("encoder_only", False, "nothing is decoded"),
    ("strip_thinking_cache", False, "it moves the end of what a request owns"),
    (
        "enable_return_routed_experts",
        False,
        "it looks up a request's tokens by slots that were freed",
    ),
    ("kv_canary", "none", "it follows a request's row to slots that were freed"),
    ("smg_grpc_mode", False, "requests say in HTTP by which policy they are served"),
    ("grpc_port", None, "requests say in HTTP by which policy they are served"),
    ("use_ray", False, "its schedulers load no plugins, and would serve full KV"),
    ("radix_cache_backend", None, "it may store whole rows, and freed slots are no longer in them"),
    ("enable_nvidia_megakernel", False, "it replaces the model's decode steps"),
    ("enable_amd_monokernel", False, "it replaces the model's decode steps"),
    (
        "enable_unified_cache_external_linker",
        False,
        "a prompt may be copied before it is known whether its prefix was loaded",
    ),
)

# Environment variable of SGLang, why no policy can be served where it is true.
VARIABLES = (
    ("SGLANG_RUST_SERVER", "it is not tested"),
    ("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "the pool is then not allocated in one piece"),
    ("SGLANG_USE_HND_KVCACHE", "the slots of a page are then not next to each other"),
)


def check_version() -> None:
    """Refuse a version of SGLang that the plugin was not checked on.

    Raises:
        Refused: names the checked versions and the installed one.
    """
    installed = compat.installed_version()
    if installed not in compat.CHECKED_VERSIONS:
        checked = ", ".join(compat.CHECKED_VERSIONS)
        raise Refused(f"--kv-policy works with SGLang {checked}, but {installed} is installed.")


def check_options(options: Any) -> None:
    """Refuse options that cannot be combined with a policy.

    Args:
        options: SGLang's options as resolved, defaults chosen.

    Raises:
        Refused: names the option and why.
    """
    for name, harmless, why in OPTIONS:
        value = getattr(options, name, harmless)  # not every version has all
        if value not in (harmless, None):
            raise _refusal(name, value, why)
    _check_cache_dtype(options)
    _check_attention(options)
    kernels_in_use.check(kernels(), options.device)
    if compat.captures_whole_prefills(options):
        why = "a policy looks at each layer of a prompt, and there is nothing between them"
        raise _refusal("cuda_graph_backend_prefill", "full", why)
    if compat.uses_ray():
        raise Refused(
            "sglang.srt.ray cannot be combined with --kv-policy: its schedulers load no plugins, "
            "and would serve full KV."
        )
    for variable, why in VARIABLES:
        if compat.is_set(variable):
            raise Refused(f"{variable} cannot be combined with --kv-policy: {why}.")


def check_preferred(options: Any, policies: Iterable[str]) -> None:
    """Refuse sampling parameters of all requests that ask of policies what none can have.

    Args:
        options: as of `check_options`.
        policies: names of those that are served.

    Raises:
        Refused: names the key and what to do.
    """
    option = "--preferred-sampling-params: custom_params"
    custom = (options.preferred_sampling_params or {}).get("custom_params")
    if custom is None:
        return
    if not isinstance(custom, dict):
        raise Refused(f"{option} is {shown(custom)}; expected a JSON object.")
    keys = [key for key in custom if isinstance(key, str) and key.startswith(PREFIX)]
    for key in keys:
        where = f"{option}.{key}"
        if key == SET:
            raise Refused(f"{where} cannot be preferred; set parameters with --kv-policy-set.")
        if key != POLICY:
            raise Refused(f"{where} cannot be preferred; send it with the requests that need it.")
        if custom[key] not in (*policies, NO_POLICY):
            raise Refused(f"{not_served(where, custom[key], (*policies, NO_POLICY))}.")


def _check_cache_dtype(options: Any) -> None:
    """Refuse types of cache entries that cannot move, or that the GPU does not have."""
    if options.kv_cache_dtype not in CACHE_DTYPES:
        why = "its numbers have scales of their own, which do not move with entries"
        raise _refusal("kv_cache_dtype", options.kv_cache_dtype, why)
    compute = compat.compute_capability(options.device)
    if options.kv_cache_dtype == "fp8_e4m3" and compute is not None and compute < (8, 9):
        why = "GPUs before sm_89 have no such numbers; fp8_e5m2 can be used"
        raise _refusal("kv_cache_dtype", options.kv_cache_dtype, why)


def _check_attention(options: Any) -> None:
    """Refuse attention that cannot read compressed entries."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    prefill_backend, decode_backend = compat.attention_backends(options)
    for backend in dict.fromkeys((prefill_backend, decode_backend)):
        if backend not in SERVED_BACKENDS:
            why = f"only {', '.join(SERVED_BACKENDS)} can read compressed entries in this version"
            raise _refusal("attention_backend", backend, why)
        if backend != "torch_native" and options.device == "cpu" and not interpreted:
            why = "without a GPU its kernels run in Triton's interpreter only (TRITON_INTERPRET=1)"
            raise _refusal("attention_backend", backend, why)
    if attention() == "flashinfer" and decode_backend != "flashinfer":
        raise Refused(
            f"--kv-policy-attention flashinfer: tails are read by SGLang's own backend, and it "
            f"decodes by {decode_backend}; add --attention-backend flashinfer, or leave the option "
            f"out."
        )


def _refusal(name: str, value: Any, why: str) -> Refused:
    option = "--" + name.replace("_", "-")
    setting = option if value is True else f"{option} {value}"
    return Refused(f"{setting} cannot be combined with --kv-policy: {why}.")


def check_model(config: Any) -> None:
    """Refuse models whose attention a policy does not describe.

    Args:
        config: SGLang's model config.

    Raises:
        Refused: says what the model has.
    """
    window = "keys outside the window are freed already"
    for present, what, why in (
        (compat.is_mla(config), "latent attention (MLA)", "entries are not keys and values"),
        (compat.has_recurrent_layers(config), "recurrent layers", "their state has no entries"),
        (config.is_hybrid_swa, "sliding-window layers", window),
        (config.attention_chunk_size is not None, "chunked local attention", window),
        (config.is_encoder_decoder, "cross-attention", "the encoder's entries are not a prompt"),
        (config.has_attention_sinks, "attention sinks in its softmax", "scores would differ"),
        (not config.is_generation, "no language-model head", "nothing is decoded"),
    ):
        if present:
            raise Refused(
                f"--model-path {config.model_path} cannot be served with --kv-policy: "
                f"the model has {what}, and {why}."
            )


def model_shape(config: Any) -> ModelShape:
    """Sizes of a model from SGLang's model config, before its weights are loaded."""
    return ModelShape(
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.get_total_num_kv_heads(),
        head_dim=config.head_dim,
    )


def shape_of_rank(shape: ModelShape, ranks: int) -> ModelShape:
    """Sizes of one rank's part of a model (`--tp-size`), which has at least one KV head.

    Args:
        ranks: number of ranks.

    Raises:
        Refused: the ranks would have different numbers of heads.
    """
    if shape.heads % ranks or (shape.kv_heads % ranks and ranks % shape.kv_heads):
        raise Refused(
            f"--tp-size {ranks} cannot be combined with --kv-policy: the model has {shape.heads} "
            f"query heads and {shape.kv_heads} KV heads, and each rank needs as many as the others."
        )
    return replace(shape, heads=shape.heads // ranks, kv_heads=max(shape.kv_heads // ranks, 1))


def check_added_heads(config: Any, shape: ModelShape, ranks: int) -> None:
    """Refuse a model to which SGLang has added heads so that they divide evenly among ranks.

    Args:
        config: SGLang's model config, as the model was loaded with it.
        shape: the checkpoint's sizes.
    """
    if model_shape(config) != shape:
        raise Refused(
            f"--tp-size {ranks} cannot be combined with --kv-policy on a CPU: SGLang adds empty "
            f"heads there to the model's {shape.heads} query heads and {shape.kv_heads} KV heads."
        )


def model_sizes(config: Any) -> ModelConfig:
    """Sizes that decide what a model's prefill costs, from SGLang's model config.

    Raises:
        Refused: the config lacks a size.
    """
    try:
        sizes = config_of("--model-path", compat.config_values(config))
    except PolicyError as error:
        raise Refused(f"--kv-policy: {error}") from None
    return replace(sizes, shape=model_shape(config))


def check_stages(policy: Policy, bound: Bound) -> None:
    """Refuse a policy that stages cannot carry out each for its layers alone.

    Raises:
        Refused: names the policy, says what it does and shows where.
    """
    obstacle = why_not_apart(bound)
    if obstacle is not None:
        message = f"`{policy.name}` cannot be served with --pp-size: {obstacle.why}"
        error = bound.program.refused("unserved", message, obstacle.cause.span)
        raise Refused(f"{policy.option}: {error}")


def check_propagation(options: Any, names: Sequence[str]) -> None:
    """Refuse options that need all tokens in all layers.

    Args:
        options: SGLang's options as resolved.
        names: names of the policies that propagate chosen tokens only.

    Raises:
        Refused: names the option and the policies.
    """
    policies = ", ".join(f"`{name}`" for name in names)
    option = compat.divides_tokens(options)
    for present, what, why in (
        (
            compat.captures_hidden_states(options),
            "--enable-return-aux-hidden-states",
            "the others have no hidden states in deeper layers",
        ),
        (
            options.cpu_offload_gb > 0,
            f"--cpu-offload-gb {options.cpu_offload_gb}",
            "SGLang undoes after a forward what makes tokens leave between offloaded layers",
        ),
        (option is not None, option, "each rank has only some of the tokens between layers"),
    ):
        if present:
            raise Refused(
                f"{what} cannot be combined with --kv-policy: {policies} propagates chosen tokens "
                f"only, and {why}."
            )


def check_layers(layers: list[Any], shape: ModelShape, own: range) -> None:
    """Refuse a loaded model whose attention layers are not all ordinary and alike.

    Args:
        layers: the model's attention layers on this stage.
        shape: sizes of this rank's part of the model.
        own: numbers of this stage's layers in the model.

    Raises:
        Refused: says which layer has what.
    """
    if [layer.layer_id for layer in layers] != list(own):
        raise Refused(
            f"--kv-policy: the model has {len(layers)} attention layers where its config says "
            f"{len(own)}."
        )
    for layer in layers:
        sizes = (layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim)
        expected = (shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim)
        for wrong, what in (
            (sizes != expected, f"heads {sizes} where the config says {expected}"),
            (not compat.is_decoder_attention(layer), "attention that is not causal"),
            (layer.sliding_window_size > -1, "a sliding window"),
            (layer.logit_cap > 0, "capped logits"),
            (layer.xai_temperature_len > 0, "a temperature by position"),
        ):
            if wrong:
                raise Refused(f"--kv-policy: attention layer {layer.layer_id} has {what}.")


def check_scales(layers: list[Any], backends: Iterable[str]) -> None:
    """Refuse scales of 8-bit entries that SGLang does not apply at every read and write.

    Args:
        layers: the model's attention layers on this stage.
        backends: names of the attention backends in use.

    Raises:
        Refused: says what to do.
    """
    if any(compat.lacks_scale(layer) for layer in layers):
        raise Refused(
            "--quantization-param-path cannot be combined with --kv-policy: its scales are applied "
            "when entries are written and not when they are read. Use a checkpoint that has scales."
        )
    if "torch_native" in backends and any(compat.kv_scales(x) != (1.0, 1.0) for x in layers):
        raise Refused(
            "--attention-backend torch_native cannot be combined with --kv-policy and the scales "
            "of this checkpoint's entries: it does not apply them. Choose another backend."
        )
