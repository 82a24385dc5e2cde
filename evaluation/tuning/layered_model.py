"""A transformers checkpoint that `kvpolicy tune` runs one layer at a time.

Dimensions: H query heads, G KV heads, N tokens of the prompt, n tokens at a layer, D head size, C
hidden size.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kvpolicy.dsl.syntax.diagnostics import PolicyError, refused
from torch import Tensor

# Model types whose layers take hidden states and positions as Llama's do.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_ATTENTION = "kvpolicy_tune"


class LayeredModel:
    """The body of a causal language model.

    Args:
        folder: a checkpoint in transformers' format.
        device: torch's name of the device on which it runs; None for the GPU if there is one.

    Raises:
        PolicyError: transformers is not installed, or the checkpoint cannot be used.
    """

    def __init__(self, folder: str | Path, device: str | None) -> None:
        transformers = _transformers()
        self.folder = str(folder)
        device_name = device or ("cuda" if torch.cuda.is_available() else "cpu")
        transformers.AttentionInterface.register(_ATTENTION, self._attend)
        try:
            config = transformers.AutoConfig.from_pretrained(self.folder, local_files_only=True)
            if config.model_type not in MODEL_TYPES:
                raise refused(
                    self.folder,
                    "range",
                    f"`tune` knows the model types {', '.join(MODEL_TYPES)}, not "
                    f"{config.model_type}",
                )
            body = transformers.AutoModel.from_pretrained(
                self.folder, dtype="auto", attn_implementation=_ATTENTION, local_files_only=True
            )
            self.device = _device(device_name)
            self.body = body.to(self.device).eval()
        except PolicyError:
            raise
        except Exception as error:  # damaged weights raise one of safetensors
            message = f"the model cannot be loaded: {_reason(error)}"
            raise refused(self.folder, "file", message) from None
        self.layers = len(self.body.layers)
        self._seen: tuple[Tensor, Tensor, Tensor]  # q, k and v of the layer computed last

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text, by the model's own tokenizer.

        Raises:
            PolicyError: the tokenizer cannot be loaded.
        """
        transformers = _transformers()
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                self.folder, local_files_only=True
            )
        except Exception as error:  # a damaged file may raise any
            message = f"the model's tokenizer cannot be loaded: {_reason(error)}"
            help = 'give token ids instead, `{"input_ids": [...]}`'
            raise refused(self.folder, "file", message, help) from None
        return list(tokenizer(text)["input_ids"])

    def embed(self, ids: list[int]) -> Tensor:
        """Hidden states [1, N, C] that enter the first layer.

        Raises:
            PolicyError: an id that the model does not have.
        """
        size = self.body.embed_tokens.num_embeddings
        wrong = next((i for i in ids if not 0 <= i < size), None)
        if wrong is not None:
            raise refused("--prompts", "range", f"token id {wrong}: the model has {size:,} tokens")
        hidden: Tensor = self.body.embed_tokens(torch.tensor([ids], device=self.device))
        return hidden

    def layer(self, index: int, hidden: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [1, n, C] after a layer; positions [n] are the tokens' original ones."""
        position_ids = positions.to(self.device)[None]
        out: Tensor | tuple[Tensor, ...] = self.body.layers[index](
            hidden,
            attention_mask=None,
            position_ids=position_ids,
            position_embeddings=self.body.rotary_emb(hidden, position_ids),
            use_cache=False,
        )
        return out[0] if isinstance(out, tuple) else out

    def seen(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [H, n, D], k and v [G, n, D] of the layer computed last, after RoPE, float32."""
        q, k, v = self._seen
        return q[0].float(), k[0].float(), v[0].float()

    def final(self, hidden: Tensor) -> Tensor:
        """The last token's hidden state [C] after the final norm, float64 on the CPU."""
        normed: Tensor = self.body.norm(hidden[:, -1:])
        return normed[0, 0].double().cpu()

    def _attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """Causal attention among the tokens at the layer; called by transformers."""
        window = options.get("sliding_window")
        if window is not None and q.shape[2] > window:
            message = f"a prompt of {q.shape[2]:,} tokens exceeds the model's sliding window"
            help = f"use prompts of at most {window:,} tokens"
            raise refused("--prompts", "range", message, help)
        self._seen = (q, k, v)
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=options.get("scaling"), enable_gqa=grouped
        )
        return out.transpose(1, 2).contiguous(), None


def _device(name: str) -> torch.device:
    """A device of torch.

    Raises:
        PolicyError: there is none of this name.
    """
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        return device
    except (RuntimeError, AssertionError, NotImplementedError):
        message = f"`{name}` is no device that this torch can use"
        raise refused("--device", "arguments", message, "for example `cpu` or `cuda`") from None


def _reason(error: Exception) -> str:
    """The first line of what transformers says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _transformers() -> Any:
    """The package transformers, imported when needed and kept from downloading files."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError:
        message = "`kvpolicy tune` runs the model with transformers, which is not installed"
        raise refused("tune", "file", message, "pip install transformers") from None
    return transformers
