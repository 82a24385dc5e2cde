"""`--enable-lora`: requests with an adapter answer as the model with the adapter merged in."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")

METHODS = ("adakv", "asl", "fastkv", "gemfilter", "h2o", "streamingllm")
FASTKV = Path(__file__).parents[2] / "policies" / "fastkv.yaml"
RANK, ALPHA = 4, 8
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(model: str, adapter: Path, merged: Path) -> None:
    """Makes a random adapter for a model, and the model with the adapter merged in."""
    import torch
    from safetensors.torch import load_file, save_file

    drawn = torch.Generator().manual_seed(3)
    weights, parts = load_file(f"{model}/model.safetensors"), {}
    for name, weight in weights.items():
        if name.split(".")[-2] in TARGETS:
            a = torch.randn(RANK, weight.shape[1], generator=drawn) * 0.1
            b = torch.randn(weight.shape[0], RANK, generator=drawn) * 0.1
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            parts |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
            weights[name] = weight + ALPHA / RANK * (b @ a)
    shutil.copytree(model, merged)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    adapter.mkdir()
    save_file(parts, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS}
    (adapter / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.thorough
@pytest.mark.server
def test_answers_are_those_of_the_merged_model(serve, random_model, tmp_path):
    # Requests with and without the adapter lose rows, and restart, in one batch.
    from comparison import compare

    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    adapted(random_model, adapter, merged)
    flags = {"adapter": str(adapter), "lora_backend": "torch_native", "methods": METHODS}
    seen = serve(random_model, {"SGLANG_KV_POLICY_FOLD_INTERVAL": "1"}, each=2, pause=1, **flags)
    for model, name in ((random_model, None), (str(merged), "adapter")):
        answers = [each for each in seen["answers"] if each["adapter"] == name]
        different, ties, changed = compare(model, answers, 1)
        assert different == []
        assert ties <= 1
        assert len(answers) >= 6
        assert len(changed - {"none"}) >= 4
    assert seen["left"] == [0, 0, 0]


@pytest.mark.server
def test_a_client_names_policy_and_adapter(random_model, tmp_path):
    from eager import generate
    from kvpolicy.evaluation.serving import serve
    from methods import METHODS as VALUES
    from methods import settings

    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    adapted(random_model, adapter, merged)
    flags = {"enable_lora": True, "lora_paths": [f"one={adapter}"], "max_loras_per_batch": 2}
    flags |= {"lora_backend": "torch_native", "skip_tokenizer_init": True}
    ids = [*range(7, 400, 7)]
    with serve(random_model, [FASTKV], settings(["fastkv"]), **flags) as server:
        sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
        request = {"input_ids": ids, "sampling_params": sampling}
        answers = {
            name: server.post("/generate", {**request, "lora_path": name}).json()["output_ids"]
            for name in ("one", None)
        }
        later = {"lora_name": "two", "lora_path": str(adapter)}
        assert server.post("/load_lora_adapter", later).ok
        request |= {"sampling_params": {**sampling, "max_new_tokens": 100}, "lora_path": "two"}
        alone = server.post("/generate", request).json()
        body = {**request, "stream": True}
        with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            with ThreadPoolExecutor() as pool:  # an adapter leaves when its requests have ended
                unloaded = pool.submit(server.post, "/unload_lora_adapter", {"lora_name": "two"})
                parts = [json.loads(x[6:]) for x in lines if x.startswith(b"data: {")]
        assert unloaded.result().ok
        assert parts[-1]["output_ids"] == alone["output_ids"]
        assert alone["output_ids"][:6] == answers["one"]
    for name, model in (("one", str(merged)), (None, random_model)):
        plain = generate(model, ids, "fastkv", VALUES["fastkv"], new_tokens=6)
        assert answers[name] == plain.tokens
