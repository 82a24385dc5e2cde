"""Options and models that cannot be combined with a policy: one sentence each."""

import argparse
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")

from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.sglang_ext.face import compat, refusals
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.face.policy_files import load_policies
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.server_args import ServerArgs

HARMLESS = {name: value for name, value, _ in refusals.OPTIONS} | {
    "kv_cache_dtype": "auto",
    "attention_backend": "torch_native",
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "cuda_graph_config": CudaGraphConfig(),
    "device": "cuda",
    "pp_size": 1,
    "tp_size": 1,
    "enable_mixed_chunk": False,
    "enable_hierarchical_cache": False,
}
ROOT = Path(__file__).parents[2]
BACKENDS = ("torch_native", "triton", "flashinfer", "fa3")


def options(**changes):
    return SimpleNamespace(**(HARMLESS | changes))


def test_kernels_that_the_device_cannot_compute_are_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("SGLANG_KV_POLICY_KERNELS", "triton")
    refusals.check_options(options(device="cuda"))
    with pytest.raises(Refused, match="--kv-policy-kernels triton: there is no CUDA device"):
        refusals.check_options(options(device="cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    refusals.check_options(options(device="cpu"))


def test_flashinfer_reads_only_where_sglang_decodes_by_it(monkeypatch):
    monkeypatch.setenv("SGLANG_KV_POLICY_ATTENTION", "flashinfer")
    refusals.check_options(options(attention_backend="flashinfer"))
    chosen = {"prefill_attention_backend": "flashinfer", "decode_attention_backend": "triton"}
    sentence = "--kv-policy-attention flashinfer: .* decodes by triton; add --attention-backend "
    with pytest.raises(Refused, match=sentence):
        refusals.check_options(options(**chosen))


def test_schedulers_without_plugins_are_refused(monkeypatch):
    """Ray's engine, in a program of its own, sets no option."""
    monkeypatch.setitem(sys.modules, "sglang.srt.ray.engine", SimpleNamespace())
    with pytest.raises(Refused, match=r"^sglang\.srt\.ray cannot be combined with --kv-policy: "):
        refusals.check_options(options())


@pytest.mark.parametrize(
    ("custom", "sentence"),
    [
        (
            {"kv_policy_set": {"capacity": 9}},
            "_set cannot be preferred; set parameters with --kv-",
        ),
        ({"kv_policy_kept": True}, "_kept cannot be preferred; send it with the requests that nee"),
        ({"kv_policy_sets": 1}, "_sets cannot be preferred; "),
        ({"kv_policy": "lva"}, " is `lva`; this server has `lava`, `none`."),
        ({"kv_policy": ["lava"]}, ' is ["lava"]; this server has `lava`, `none`.'),
    ],
)
def test_what_all_requests_cannot_ask_of_policies_is_refused_at_the_start(custom, sentence):
    """The front end checks only what a request brings itself."""
    preferred = options(preferred_sampling_params={"top_k": 3, "custom_params": custom})
    with pytest.raises(Refused) as refusal:
        refusals.check_preferred(preferred, ["lava"])
    start = "--preferred-sampling-params: custom_params.kv_policy"
    assert str(refusal.value).startswith(start + sentence)


@pytest.mark.parametrize("custom", [["kv_policy"], 5, "none"])
def test_preferred_custom_params_are_an_object(custom):
    with pytest.raises(Refused, match=r"custom_params is .*; expected a JSON object"):
        refusals.check_preferred(options(preferred_sampling_params={"custom_params": custom}), [])


@pytest.mark.parametrize(
    "preferred", [None, {"top_k": 3}, {"custom_params": {"kv_policy": "none", "mine": 1}}]
)
def test_other_preferred_parameters_are_served(preferred):
    refusals.check_preferred(options(preferred_sampling_params=preferred), ["lava"])


def test_harmless_options_are_served():
    refusals.check_options(options())
    refusals.check_options(options(dp_size=2, enable_mixed_chunk=True))
    refusals.check_options(options(pp_size=2, tp_size=2, enable_mixed_chunk=True))
    refusals.check_options(options(pp_size=2, enable_hierarchical_cache=True))
    refusals.check_options(options(disaggregation_mode=None))


def test_stages_show_what_they_cannot_decide_apart():
    [policy] = load_policies(["other=minicache"], [])
    with pytest.raises(Refused) as error:
        refusals.check_stages(policy, policy.bind(ModelShape(8, 4, 2, 8)))
    head, _, line, caret = str(error.value).splitlines()
    assert re.match(
        r"--kv-policy other=minicache: policies/minicache\.yaml:\d+:9: error\[unserved\]: "
        r"`other` cannot be served with --pp-size: layers are stored in pairs",
        head,
    )
    assert line.index("layer > start") == caret.index("^")


# A value with which each option is refused.
REFUSED = {
    name: {None: "EAGLE", "null": "prefill", "none": "raise", False: True, 1: 2}[harmless]
    for name, harmless, _ in refusals.OPTIONS
} | {
    "dllm_algorithm": "LowConfidence",
    "grpc_port": 40000,
    "radix_cache_backend": "flexkv",
    "kv_cache_dtype": "mxfp8",
    "attention_backend": "flex_attention",
    "decode_attention_backend": "trtllm_mha",
    "prefill_attention_backend": "fa4",
    "cuda_graph_config": CudaGraphConfig(prefill=PhaseConfig(backend="full")),
}
VARIABLES = [variable for variable, _ in refusals.VARIABLES]


def refusal(**change):
    with pytest.raises(Refused) as refused:
        refusals.check_options(options(**change))
    return str(refused.value)


@pytest.mark.parametrize("name", REFUSED)
def test_each_refusal_is_one_sentence_that_names_the_option(name):
    value, sentence = REFUSED[name], refusal(**{name: REFUSED[name]})
    if name == "cuda_graph_config":
        name, value = "cuda_graph_backend_prefill", "full"
    name = name.removeprefix("decode_").removeprefix("prefill_")
    assert sentence.startswith("--" + name.replace("_", "-"))
    assert value is True or str(value) in sentence
    assert "cannot be combined with --kv-policy: " in sentence
    assert sentence.endswith(".")
    assert sentence.count(". ") == 0
    assert "\n" not in sentence


def table_of_options():
    """Rows of the table in docs/supported.md: option, whether it is served, and the rest."""
    text = (ROOT / "docs" / "supported.md").read_text()
    table = text.split("\n| option of SGLang |")[1].split("\n\n")[0]
    return [[x.strip(" `") for x in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_the_table_of_options_says_what_is_refused_and_why(monkeypatch):
    sentences = [
        refusal(**{name: value})
        for name, value in REFUSED.items()
        if name not in ("decode_attention_backend", "prefill_attention_backend")
    ]
    for name in VARIABLES:
        with monkeypatch.context() as context:
            context.setenv(name, "1")
            sentences.append(refusal())
    parts = [x.removesuffix(".").split(" cannot be combined with --kv-policy: ") for x in sentences]
    wanted = [f"| `{shown}` | no | {why} |" for shown, why in parts]
    rows = [
        f"| `{shown}` | no | {why} |" for shown, served, why in table_of_options() if served == "no"
    ]
    assert rows == wanted, "\n".join(wanted)


def test_the_table_of_options_says_what_is_served_and_where_it_is_tested():
    rows = [row for row in table_of_options() if row[1] != "no"]
    assert len(rows) > 10
    for shown, served, files in rows:
        flag, _, value = shown.removeprefix("--").partition(" ")
        field = flag.replace("-", "_")
        assert served == "yes"
        refusals.check_options(options(**{field: value or True}))
        for file in files.split(", "):
            text = (ROOT / "tests" / file.strip("`")).read_text()
            assert any(each in text for each in (field, flag, value or flag)), (shown, file)


def propagating(**changes):
    """Options of a model whose policies propagate; 0.5.22 has only these."""
    harmless = {"tp_size": 2, "cpu_offload_gb": 0}
    of_experts = {"moe_a2a_backend": "none", "moe_dense_tp_size": None}
    return SimpleNamespace(**(harmless | of_experts | changes))


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("--enable-return-aux-hidden-states", {"enable_return_aux_hidden_states": True}),
        ("--cpu-offload-gb 4", {"cpu_offload_gb": 4}),
        ("--enable-layernorm-sp", {"enable_layernorm_sp": True}),
        ("--moe-a2a-backend deepep", {"moe_a2a_backend": "deepep"}),
        ("--moe-dense-tp-size 1", {"moe_dense_tp_size": 1}),
    ],
)
def test_what_policies_that_propagate_cannot_be_combined_with(what, change):
    refusals.check_propagation(propagating(), ["asl"])
    with pytest.raises(Refused, match=rf"^{what} cannot be .*: `asl`, `fastkv` .* and \w.*\.$"):
        refusals.check_propagation(propagating(**change), ["asl", "fastkv"])
    if not any(each.startswith("enable_return") or each.startswith("cpu") for each in change):
        refusals.check_propagation(propagating(tp_size=1, **change), ["asl"])


@pytest.mark.parametrize(
    "words", [["--dp-size", "2", "--enable-dp-attention"], ["--attn-dp-size", "2"]]
)
def test_attention_of_several_replicas_is_refused_as_sglang_resolves_it(words):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    model = ["--model-path", str(ROOT / "examples" / "model-small"), "--device", "cpu"]
    given = [*model, "--attention-backend", "torch_native", "--tp-size", "2", *words]
    server_args = ServerArgs.from_cli_args(parser.parse_args(given))
    server_args.resolve_once()
    with pytest.raises(Refused, match=r"^--attn-dp-size 2 cannot be combined"):
        refusals.check_options(compat.resolved(server_args))


@pytest.mark.parametrize("prefill", BACKENDS)
@pytest.mark.parametrize("decode", BACKENDS)
def test_attention_backends_are_served_in_any_combination(prefill, decode):
    refusals.check_options(options(attention_backend=prefill))
    chosen = {"prefill_attention_backend": prefill, "decode_attention_backend": decode}
    refusals.check_options(options(**chosen))


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_kernels_without_a_gpu_are_interpreted_or_refused(monkeypatch, backend):
    chosen = options(decode_attention_backend=backend, device="cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    refusals.check_options(chosen)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(Refused, match=f"^--attention-backend {backend} .*TRITON_INTERPRET=1.*$"):
        refusals.check_options(chosen)
    refusals.check_options(options(device="cpu"))


def test_a_gpu_without_numbers_of_the_cache_is_refused(monkeypatch):
    monkeypatch.setattr(compat, "compute_capability", lambda device: (8, 0))
    refusals.check_options(options(kv_cache_dtype="fp8_e5m2"))
    said = refusal(kv_cache_dtype="fp8_e4m3")
    assert said.endswith("GPUs before sm_89 have no such numbers; fp8_e5m2 can be used.")
    monkeypatch.setattr(compat, "compute_capability", lambda device: (8, 9))
    refusals.check_options(options(kv_cache_dtype="fp8_e4m3"))


def attention(k=None, v=None, k_number=None, v_number=None):
    """Scales of SGLang's attention layer."""
    return SimpleNamespace(k_scale=k, v_scale=v, k_scale_float=k_number, v_scale_float=v_number)


def test_scales_that_are_not_always_applied_are_refused():
    plain, ones = attention(), attention(1.0, 1.0, 1.0, 1.0)
    scaled, written = attention(0.5, 2.0, 0.5, 2.0), attention(0.5, 0.5)
    refusals.check_scales([plain, ones], ["torch_native"])
    refusals.check_scales([plain, scaled], ["triton", "fa3"])
    with pytest.raises(Refused, match=r"^--attention-backend torch_native .* scales of this"):
        refusals.check_scales([ones, scaled], ["triton", "torch_native"])
    with pytest.raises(Refused, match=r"^--quantization-param-path cannot be combined"):
        refusals.check_scales([plain, written], ["triton"])


def test_prefills_are_captured_in_pieces():
    for backend in ("breakable", "disabled"):
        config = CudaGraphConfig(prefill=PhaseConfig(backend=backend))
        refusals.check_options(options(cuda_graph_config=config))


def test_environment_variables_are_refused(monkeypatch):
    for name in VARIABLES:
        with monkeypatch.context() as context:
            context.setenv(name, "1")
            assert refusal().startswith(name)


def model(monkeypatch, mla=False, recurrent=False, **changes):
    monkeypatch.setattr(compat, "is_mla", lambda config: mla)
    monkeypatch.setattr(compat, "has_recurrent_layers", lambda config: recurrent)
    fields = {
        "model_path": "m",
        "is_hybrid_swa": False,
        "attention_chunk_size": None,
        "is_encoder_decoder": False,
        "has_attention_sinks": False,
        "is_generation": True,
    }
    return SimpleNamespace(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"mla": True}, "latent attention"),
        ({"recurrent": True}, "recurrent layers"),
        ({"is_hybrid_swa": True}, "sliding-window layers"),
        ({"attention_chunk_size": 8192}, "chunked local attention"),
        ({"is_encoder_decoder": True}, "cross-attention"),
        ({"has_attention_sinks": True}, "attention sinks"),
        ({"is_generation": False}, "no language-model head"),
    ],
)
def test_models_whose_attention_a_policy_does_not_describe(monkeypatch, changes, what):
    with pytest.raises(Refused, match=f"^--model-path m .*{what}.*\\.$"):
        refusals.check_model(model(monkeypatch, **changes))


def test_an_ordinary_model_is_served(monkeypatch):
    refusals.check_model(model(monkeypatch))


def layer(number, **changes):
    fields = {
        "layer_id": number,
        "tp_q_head_num": 4,
        "tp_k_head_num": 2,
        "qk_head_dim": 32,
        "v_head_dim": 32,
        "sliding_window_size": -1,
        "logit_cap": 0.0,
        "xai_temperature_len": -1,
    }
    return SimpleNamespace(**(fields | changes))


def test_every_attention_layer_is_checked(monkeypatch):
    monkeypatch.setattr(compat, "is_decoder_attention", lambda layer: not hasattr(layer, "cross"))
    shape = ModelShape(2, 4, 2, 32)
    refusals.check_layers([layer(0), layer(1)], shape, range(2))
    for wrong, message in (
        ([layer(0)], "1 attention layers where its config says 2"),
        ([layer(0), layer(1, tp_k_head_num=4)], "layer 1 has heads"),
        ([layer(0, cross=True), layer(1)], "layer 0 has attention that is not causal"),
        ([layer(0, sliding_window_size=64), layer(1)], "layer 0 has a sliding window"),
        ([layer(0), layer(1, logit_cap=30.0)], "layer 1 has capped logits"),
        ([layer(0), layer(1, xai_temperature_len=8)], "layer 1 has a temperature by position"),
    ):
        with pytest.raises(Refused, match=message):
            refusals.check_layers(wrong, shape, range(2))


def test_heads_that_sglang_adds_on_a_cpu_are_refused():
    def config(heads, kv_heads):
        sizes = {"num_hidden_layers": 4, "num_attention_heads": heads, "head_dim": 16}
        return SimpleNamespace(**sizes, get_total_num_kv_heads=lambda: kv_heads)

    refusals.check_added_heads(config(4, 2), ModelShape(4, 4, 2, 16), 2)
    with pytest.raises(Refused, match=r"^--tp-size 4 .* on a CPU: .* 4 query .* 2 KV heads\.$"):
        refusals.check_added_heads(config(8, 4), ModelShape(4, 4, 2, 16), 4)


def test_each_rank_needs_as_many_heads_as_the_others():
    shape = ModelShape(4, 24, 4, 16)
    assert refusals.shape_of_rank(shape, 2) == ModelShape(4, 12, 2, 16)
    assert refusals.shape_of_rank(shape, 8) == ModelShape(4, 3, 1, 16)  # two of each KV head
    for ranks in (3, 6, 16):
        with pytest.raises(Refused, match=f"--tp-size {ranks} cannot be .* 24 query .* 4 KV heads"):
            refusals.shape_of_rank(shape, ranks)
