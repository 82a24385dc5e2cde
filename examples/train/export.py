"""Write and read the model folder that `transformers` and SGLang load.

The weights are stored in float16 and used in float32. The small folder costs no accuracy: the
rounding error of a weight is too small to change an answer, and `evaluate.py` measures the file.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from kvpolicy.evaluation.questions import embedded
from kvpolicy.evaluation.questions.embedded_words import VOCABULARY
from model import Config, Llama
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

# One user turn is a context and a question; the answer follows the word `answer`.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    " answer {{ message['content'] }} {{ eos_token }}"
    "{% else %}"
    " {{ message['content'] }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %} answer{% endif %}"
)


def write(model: Llama, folder: Path) -> None:
    """Write weights, configurations and tokenizer of `model` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", model_config(model.config))
    write_json(folder / "generation_config.json", generation_config())
    tokenizer().save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(model.config))


def read(folder: Path) -> Llama:
    """Read the model in `folder`, in float32."""
    stored = json.loads((folder / "config.json").read_text())
    model = Llama(Config(**{field.name: stored[field.name] for field in fields(Config)}))
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return model.eval()


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def model_config(config: Config) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **config.as_dict(),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "bos_token_id": embedded.BOS,
        "eos_token_id": embedded.END,
        "pad_token_id": embedded.PAD,
    }


def generation_config() -> dict:
    return {
        "bos_token_id": embedded.BOS,
        "eos_token_id": embedded.END,
        "pad_token_id": embedded.PAD,
        "do_sample": False,
    }


def tokenizer() -> Tokenizer:
    """A tokenizer of whole words, in lower case, punctuation apart; `<s>` begins a text."""
    special = [VOCABULARY[i] for i in (embedded.PAD, embedded.BOS, embedded.END, embedded.UNK)]
    vocabulary = {word: i for i, word in enumerate(VOCABULARY)}
    result = Tokenizer(models.WordLevel(vocabulary, unk_token=VOCABULARY[embedded.UNK]))
    result.normalizer = normalizers.Lowercase()
    result.pre_tokenizer = pre_tokenizers.Whitespace()
    bos = VOCABULARY[embedded.BOS]
    result.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, embedded.BOS)]
    )
    result.add_special_tokens(special)
    return result


def tokenizer_config(config: Config) -> dict:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": VOCABULARY[embedded.BOS],
        "eos_token": VOCABULARY[embedded.END],
        "pad_token": VOCABULARY[embedded.PAD],
        "unk_token": VOCABULARY[embedded.UNK],
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
