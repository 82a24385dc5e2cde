"""Cost of a policy relative to a prefill, and its limit."""

from __future__ import annotations

import json

import pytest
from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.bind.gpu import MATRIX_REACHED, MEMORY_REACHED, Gpu
from kvpolicy.dsl.bind.model_config import ModelConfig, config_of
from kvpolicy.dsl.bind.work import Work
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.tools.cli import main
from kvpolicy.dsl.tools.cost import Cost, ExpressionCost, cost
from kvpolicy.dsl.tools.cost_limit import check_cost

# Llama 3.1 8B.
LLAMA = config_of(
    "llama",
    {
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_size": 4096, "intermediate_size": 14336, "torch_dtype": "bfloat16",
    },
)  # fmt: skip
SMALL = ModelConfig("small", ModelShape(4, 4, 2, 8), 32, 64, 64, 2 * 32 * 100, 100, "float32", 4, 4)
HEADER = "policy: p\nlanguage: 1\nabout: a policy\n"


def policy(text: str, config: ModelConfig = LLAMA, **settings: str) -> Bound:
    """A policy written in the test, or a shipped one."""
    source = Source("p.yaml", HEADER + text) if "\n" in text else text
    return bind(load(source).require(), config.shape, settings)


def part(found: Cost, name: str) -> ExpressionCost:
    return next(part for part in found.parts if part.name == name)


def test_work_takes_as_long_as_what_it_has_most_of():
    gpu = Gpu("a GPU", 1 << 30, bandwidth=10.0, matrix=1000.0, vector=100.0, gap=0.0)
    assert gpu.seconds(Work(matrix=100, vector=3)) == pytest.approx((0.1 + 0.03) / MATRIX_REACHED)
    assert gpu.seconds(Work(matrix=100, vector=3, moved=7)) == 0.7 / MEMORY_REACHED
    assert Work(1, 2, 3) + Work(10, 20, 30) == Work(11, 22, 33)


def test_a_decode_step():
    """Weights are read once and multiply every request, which reads its own entries."""
    weights = 4 * 32 * (2 * 32 + 2 * 16 + 3 * 64) + 32 * 100
    entries = 3 * 50  # of three requests, each for two query heads
    assert SMALL.decode_work(3, 50) == Work(
        matrix=2 * 3 * weights + 4 * 8 * 2 * entries,
        vector=5 * 2 * entries,
        moved=4 * weights + entries * 2 * 8 * 4,
    )
    assert SMALL.weights_size == 4 * (weights + 32 * 100)


def test_a_mixture_of_experts_reads_those_that_are_chosen():
    values = {
        "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 10,
        "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    found = config_of("a mixture", values)
    own, expert = 4 * 8 * 8, 3 * 8 * 16
    assert found.weights_size == 2 * (own + 8 * expert + 8 * 10)
    one, many = (found.decode_work(number, 0) for number in (1, 100))
    assert one.moved == 2 * (own + 2 * expert + 8 * 10)
    assert many.moved == pytest.approx(2 * (own + 8 * expert + 8 * 10))
    assert many.matrix == 100 * one.matrix == 100 * 2 * (own + 2 * expert + 8 * 10)


def test_a_prefill():
    # Per layer: queries, outputs 2 x 32, keys and values 2 x 16, an MLP of 3 x 64, for 32 channels.
    weights = 4 * 32 * (2 * 32 + 2 * 16 + 3 * 64)
    pairs = 4 * 4 * (10 * 11 // 2)  # layers, heads
    assert SMALL.prefill_work(10) == Work(2 * 10 * weights + 4 * 8 * pairs, 5 * pairs, 4 * weights)


def test_a_window():
    """One layer: passes over the keys, softmax and sum; later tokens are not counted."""
    bound = policy("score: sum[head, query](attn(recent(3)))\nbudget: 5\nkeep: top(score)\n", SMALL)
    pairs = 4 * (3 * 10 - 3)
    keys, queries = 4 * 2 * 10 * 8, 4 * 4 * 3 * 8
    for attended, passes in ((True, 1), (False, 2)):
        found = part(cost(bound, SMALL, 10, attended=attended), "score")
        # What the sum leaves is written, and read and written no more within the kernel.
        assert found.work == Work(
            matrix=4 * passes * 2 * 8 * pairs,
            vector=4 * (5 + 1) * pairs,
            moved=4 * (passes * keys + queries + 8 * 10),
        )
        assert found.squared == ""


def test_logits_keys_and_values():
    text = "score: max[head, query](logits(recent(1))) + sum[kv](norm1[dim](value))\n"
    found = cost(policy(text + "budget: 5\nkeep: top(score)\n", SMALL), SMALL, 10)
    work = part(found, "score").work
    assert work.matrix == 4 * 2 * 8 * 4 * 10  # one pass
    assert found.bytes_read == 4 * (2 * 2 * 10 * 8 + 4 * 8)


@pytest.mark.parametrize(
    ("name", "expression", "reason"),
    [
        ("snapkv", "votes", ""),
        ("h2o", "heat", "it looks at every pair of tokens"),
        (
            "pyramidinfer",
            "seen",
            "its window grows with the prompt, so that it looks at a share of",
        ),
        ("asl-lava-d2o", "merge.into", "it compares every dropped entry with every kept one"),
    ],
)
def test_what_grows_with_the_square_of_the_prompt_is_named(name, expression, reason):
    bound = policy(name)
    long, twice = (cost(bound, LLAMA, tokens) for tokens in (32768, 65536))
    found = part(long, expression)
    assert found.squared.startswith(reason)
    assert bool(found.squared) == bool(reason)
    growth = part(twice, expression).seconds / found.seconds
    # What is merged are few entries: those beyond the kept ones, of which there are 1,024.
    assert growth == pytest.approx(4 if reason and name != "asl-lava-d2o" else 2, rel=0.05)
    assert {each.squared for each in long.parts if each.squared} == (
        {found.squared} if reason else set()
    )


def test_the_place_of_what_takes_longest():
    text = "state:\n  heat: heat + sum[group, query](attn(new) * (1 + layer))\nscore: heat\n"
    bound = policy(text + "budget: 512\nkeep: top(score)\n")
    found = cost(bound, LLAMA, 1000).parts[0]
    span = found.span
    assert found.name == "heat"
    assert bound.program.file.text[span.start : span.end] == "attn(new)"


def test_windows_of_their_own():
    """A policy that reads all pairs pays for them once."""
    text = "score: sum[head, query](attn(all)) + sum[head, query](attn(recent(2)))\nbudget: 9\n"
    one, both = (
        cost(policy(each + "keep: top(score)\n", SMALL), SMALL, 1000).parts[0].work.matrix
        for each in ("score: sum[head, query](attn(all))\nbudget: 9\n", text)
    )
    assert both - one == 4 * 2 * 8 * 4 * (2 * 1000 - 1)


def test_pooling_costs_its_width():
    one, wide, endless = (
        cost(policy("snapkv", SMALL, kernel=str(width)), SMALL, 1000).operations
        for width in (1, 101, 9999)
    )
    assert wide - one == pytest.approx(4 * 4 * 1000 * 100)
    assert endless - one == pytest.approx(4 * 4 * 1000 * (2000 - 1))


def test_layers_that_fewer_tokens_reach():
    first, deeper, all_ = (
        part(cost(policy("fastkv", SMALL, **given), SMALL, 1000), "seen").work.matrix
        for given in ({"tsp_layer": "0"}, {"tsp_layer": "2"}, {"tsp_rate": "1"})
    )
    assert first < deeper < all_
    # Three layers of 1,000 tokens and one of 200, or of 1,000, and 8 queries.
    assert (all_ - deeper) == 2 * 8 * 4 * 8 * 800


def test_a_second_prefill_and_what_comes_before_it():
    found = cost(policy("gemfilter", SMALL, filter="2", capacity="10"), SMALL, 1000)
    assert part(found, "match").work.matrix == 2 * 8 * 4 * 1000  # at one layer, of all tokens


def test_layers_that_share():
    two, one = (
        cost(policy("minicache", SMALL, start=start), SMALL, 100).operations for start in ("0", "2")
    )
    assert two == 2 * one > 0


def test_nothing_that_tensors_decide_costs_nothing():
    found = cost(policy("streamingllm"), LLAMA, 131072)
    assert (found.parts, found.share, found.operations) == ((), 0, 0)


@pytest.mark.parametrize("name", shipped())
def test_shipped_policies_on_a_usual_model(name):
    """None takes as long as the prefill, at any length."""
    bound = policy(name)
    shares = [cost(bound, LLAMA, tokens).share for tokens in (1, 100, 8192, 131072)]
    print(f"{name}: " + ", ".join(f"{share:.3%}" for share in shares))
    assert all(0 <= share < 1 for share in shares)


# The limit.


def test_a_policy_that_costs_too_much():
    bound = policy("h2o")
    share = cost(bound, LLAMA, 131072, attended=False).share
    check_cost(bound, LLAMA, 131072, share, "--max")
    with pytest.raises(PolicyError) as caught:
        check_cost(bound, LLAMA, 131072, 0.5, "--max")
    assert str(caught.value).splitlines() == [
        "policies/h2o.yaml:17:34: error[cost]: `h2o` takes 76 % of the time of a prefill of "
        "131,072 tokens, more than the 50 % that are allowed; `heat` takes 76 %: it looks at every "
        "pair of tokens",
        "   |",
        "17 |   heat: heat + sum[group, query](attn(new))  # [kv, token]",
        "   |                                  ^^^^^^^^^",
        "   = help: allow it with `--max 76`, or compute less here, for example the attention of "
        "`recent(64)` alone",
    ]
    check_cost(bound, LLAMA, 131072, 0.76, "--max")


def test_a_policy_that_only_costs_much():
    bound = policy("snapkv")
    with pytest.raises(PolicyError) as caught:
        check_cost(bound, LLAMA, 131072, 0.0005, "--max")
    message = str(caught.value)
    assert "`snapkv` takes 0.06 % of the time" in message
    assert "more than the 0.05 % that are allowed; `votes` takes 0.049 %\n" in message
    assert message.endswith("= help: allow it with `--max 1`, or compute less here")


def test_a_limit_of_nothing_allows_what_costs_nothing():
    check_cost(policy("streamingllm"), LLAMA, 131072, 0.0, "--max")


def test_sizes_as_a_server_knows_them():
    """transformers' values: a model of text and pictures, a dtype that torch prints.

    SGLang serves float32 in half precision.
    """
    values = {
        "text_config": {
            "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64,
            "num_experts_per_tok": 3, "moe_intermediate_size": 10, "intermediate_size": 999,
            "torch_dtype": "torch.float32",
        },
        "vision_config": {"hidden_size": 1},
    }  # fmt: skip
    found = config_of("a model", values)
    shape, given = ModelShape(2, 4, 4, 16), (2 * 64 * 128_256, 128_256)
    assert found == ModelConfig("a model", shape, 64, 30, 30, *given, "float16", 2, 2)
    with pytest.raises(PolicyError, match="a model: error\\[file\\]: the key `num_hidden_layers`"):
        config_of("a model", {"num_attention_heads": 4, "hidden_size": 8})


def _llama(layers, heads, hidden, vocabulary, kind="llama", **more):
    return {
        "model_type": kind, "num_hidden_layers": layers, "num_attention_heads": heads,
        "hidden_size": hidden, "vocab_size": vocabulary, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("quantization", "weight_bytes"),
    [
        (None, 2),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1),
        ({"quant_method": "awq", "bits": 4}, 0.5),
        ({"quant_method": "gptq", "bits": 3}, 0.375),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, 0.5),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5),
        ({"quant_method": "compressed-tensors",
          "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 1),
        ({"quant_method": "of tomorrow"}, 2),
        ({"quant_method": "awq", "bits": "4"}, 2),
    ],
)  # fmt: skip
def test_quantized_weights_take_fewer_bytes(quantization, weight_bytes):
    values = _llama(32, 32, 4096, 128256, "llama", num_key_value_heads=8, intermediate_size=14336)
    found = config_of("a model", {**values, "quantization_config": quantization})
    assert found.weight_bytes == weight_bytes
    assert found.kv_size(1) == 2 * 128 * 2  # the cache is as wide as before
    layers = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    assert found.weights_size == weight_bytes * layers + 2 * 2 * 4096 * 128256


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "recurrent layers"),
        ({"layer_types": ["full_attention", "mamba"]}, "recurrent layers"),
        ({"model_type": "gemma2", "sliding_window": 4096}, "sliding-window"),
        ({"model_type": "mistral", "sliding_window": 4096}, None),
        ({"layer_types": ["full_attention"] * 2}, None),
    ],
)
def test_models_with_which_no_policy_is_served(values, words, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**_llama(2, 4, 64, 100, "llama"), **values}))
    command = ["explain", "snapkv", "--model", str(tmp_path), "--length", "100"]
    assert main(command) == 0
    assert ("no server carries a policy out with it" in capsys.readouterr().out) == bool(words)
    assert main([*command, "--gpu", "h200"]) == (2 if words else 0)
    assert (words or "") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "kv_heads", "billions", "used"),
    [
        # Apertus 8B, Starcoder2 7B: MLPs of two matrices.
        (_llama(32, 32, 4096, 131072, "apertus", num_key_value_heads=8, intermediate_size=21504),
         8, 8.05, 8.05),
        (_llama(32, 36, 4608, 49152, "starcoder2", num_key_value_heads=4), 4, 7.17, 7.17),
        # Gemma 2B: one matrix of tokens.
        (_llama(18, 8, 2048, 256000, "gemma", num_key_value_heads=1, head_dim=256,
                intermediate_size=16384), 1, 2.51, 2.51),
        # Qwen1.5 MoE: an expert besides that all tokens use.
        (_llama(24, 16, 2048, 151936, "qwen2_moe", intermediate_size=5632, num_experts=60,
                num_experts_per_tok=4, moe_intermediate_size=1408,
                shared_expert_intermediate_size=5632), 16, 14.3, 2.69),
        # Falcon 7B: one KV head, which its config does not say.
        (_llama(32, 71, 4544, 65024, "falcon", multi_query=True, new_decoder_architecture=False),
         1, 7.22, 7.22),
        # Granite 4.0 micro: of a class that can have experts.
        (_llama(40, 40, 2560, 100352, "granitemoehybrid", num_key_value_heads=8,
                intermediate_size=8192, num_local_experts=0, num_experts_per_tok=0,
                tie_word_embeddings=True), 8, 3.4, 3.4),
        # Hunyuan A13B: sizes by layer.
        (_llama(32, 32, 4096, 128167, "hunyuan_v1_moe", num_key_value_heads=8, head_dim=128,
                num_experts=64, moe_topk=[8] * 32, num_shared_expert=[1] * 32,
                moe_intermediate_size=[3072] * 32), 8, 80.9, 13.3),
        # ChatGLM3: other keys.
        ({"model_type": "chatglm", "num_layers": 28, "num_attention_heads": 32, "hidden_size": 4096,
          "ffn_hidden_size": 13696, "multi_query_group_num": 2, "padded_vocab_size": 65024},
         2, 6.24, 6.24),
    ],
)  # fmt: skip
def test_sizes_of_models_as_their_authors_say_them(values, kv_heads, billions, used):
    found = config_of("a model", values)
    assert found.shape.kv_heads == kv_heads
    assert found.weights_size / found.element_bytes / 1e9 == pytest.approx(billions, rel=5e-3)
    token = found.weights_size / found.element_bytes - found.shape.layers * found.matrices * (
        found.hidden * (found.total_mlp_width - found.used_mlp_width)
    )
    assert token / 1e9 == pytest.approx(used, rel=5e-3)
