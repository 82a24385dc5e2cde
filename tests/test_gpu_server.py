"""A real server on a GPU, with its default attention backends and CUDA graphs.

Answers are compared with those of `torch_native` and the torch kernels, which define them, in the
same half precision; where the tokens agree, their log-probabilities do.
"""

import random
import statistics
from pathlib import Path

import pytest
import torch
from kvpolicy.evaluation.serving import serve, started, together

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.server,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ROOT = Path(__file__).parents[1]
LENGTHS = (300, 91, 517, 300, 1030)
KEPT, NEW = 48, 24
POLICIES = {
    "snapkv": [f"capacity={KEPT}", "window=16"],
    "lava": [f"capacity={KEPT}", "window=16"],
    "streamingllm": [f"window={KEPT - 4}"],
    "h2o": ["heavy=32", "window=16"],
    "sinks-recent": ["capacity=4096"],  # a budget for everything
}
DEFINITION = "torch_native"
SERVED = ("triton-auto", "flashinfer-auto", "flashinfer-flashinfer")
FLAGS = {
    "dtype": "bfloat16",  # and heads of 128, as FlashInfer is built for beforehand
    "skip_tokenizer_init": True,
    "max_running_requests": 8,
    "max_total_tokens": 16384,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_flashinfer_autotune": True,
    "decode_log_interval": 1,
    "enable_metrics": True,
}
# Of the tokens of all answers; a near tie of two tokens ends the comparison of an answer. Between
# bfloat16 and float32 on a CPU at least 0.21 agreed; with other entries kept 0.04.
AGREE = 0.12
# Median difference of log-probabilities of tokens that agree; on that CPU 0.05 at most.
TOLERANCE = 0.1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folder of a Llama with random weights: 2 layers, 8 heads, 2 KV heads of 128."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, head_dim=128, max_position_embeddings=2048,
        initializer_range=0.12, eos_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def start(checkpoint, **flags):
    """A server with all policies of this file."""
    files = [ROOT / "policies" / f"{name}.yaml" for name in POLICIES]
    given = [f"{name}.{value}" for name, values in POLICIES.items() for value in values]
    return serve(checkpoint, files, given, start_timeout=600, **(FLAGS | flags))


def answer(server, seed, policy):
    """Tokens, their log-probabilities and the policy's facts of one greedy answer.

    Without a prefix hit, as the tokens computed together decide the rounding.
    """
    server.flush()
    rnd = random.Random(seed)
    body = {
        "input_ids": [rnd.randrange(3, 500) for _ in range(LENGTHS[seed])],
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": NEW,
            "ignore_eos": True,
            "custom_params": {"kv_policy": policy},
        },
        "return_logprob": True,
    }
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    meta = response.json()["meta_info"]
    logprobs, tokens, *_ = zip(*meta["output_token_logprobs"], strict=True)
    return list(tokens), list(logprobs), meta.get("kv_policy")


def answers(server, policy):
    """Answers to all prompts, one after the other, so that batches are the same in every server."""
    return [answer(server, seed, policy) for seed in range(len(LENGTHS))]


def compared(found, wanted):
    """Share of tokens that agree, and the median difference of their log-probabilities."""
    agree, differences = 0, []
    for (tokens, logprobs, _), (others, other_logprobs, _) in zip(found, wanted, strict=True):
        for token, other, a, b in zip(tokens, others, logprobs, other_logprobs, strict=True):
            if token != other:  # what follows answers another text
                break
            agree += 1
            differences.append(abs(a - b))
    return agree / (NEW * len(found)), statistics.median(differences or [0.0])


@pytest.fixture(scope="module")
def servers(checkpoint):
    """All servers, started at once: one per backend and reader, and one that defines the answers.

    Except for that one, graphs, overlap and radix cache are the defaults.
    """
    torch_only = {"attention_backend": DEFINITION, "kv_policy_kernels": "torch"}
    starting = {DEFINITION: start(checkpoint, **torch_only, disable_cuda_graph=True)}
    for name in SERVED:
        backend, reader = name.split("-")
        chosen = {"attention_backend": backend, "kv_policy_attention": reader}
        starting[name] = start(checkpoint, **chosen, disable_cuda_graph=None)
    with together(starting) as servers:
        yield servers


@pytest.fixture(scope="module")
def defined(servers):
    """Answers by policy of the defining server."""
    server = started(servers[DEFINITION])
    return {policy: answers(server, policy) for policy in (*POLICIES, "none")}


@pytest.fixture(scope="module", params=SERVED)
def server(request, servers):
    """A server with one backend and reader."""
    return started(servers[request.param])


@pytest.mark.parametrize("policy", [*POLICIES, "none"])
def test_answers_are_those_of_the_definition(server, defined, policy):
    found = answers(server, policy)
    agree, difference = compared(found, defined[policy])
    assert agree >= AGREE
    assert difference <= TOLERANCE
    for (_, _, facts), (_, _, wanted) in zip(found, defined[policy], strict=True):
        assert (facts or {}).get("uncompressed") == (wanted or {}).get("uncompressed")
        if wanted and "entries_kept" in wanted:
            # Budgets that data decide may be one entry larger or smaller.
            assert facts["entries_kept"] == pytest.approx(wanted["entries_kept"], rel=0.02)


def test_what_is_dropped_is_missed(server, defined):
    """The comparison notices missing entries: answers with few of them differ."""
    agree, _ = compared(answers(server, "snapkv"), defined["none"])
    assert agree < AGREE


def test_a_budget_for_everything_answers_as_no_policy(server):
    assert compared(answers(server, "sinks-recent"), answers(server, "none")) == (1.0, 0.0)


@pytest.mark.parametrize("policy", ["none", "snapkv", "lava"])
def test_decode_steps_replay_graphs(server, policy):
    before = len(server.log_text())
    answer(server, 0, policy)
    lines = [x for x in server.log_text()[before:].splitlines() if "Decode batch" in x]
    assert len(lines) >= NEW // 2
    assert all("cuda graph: True" in line for line in lines)
