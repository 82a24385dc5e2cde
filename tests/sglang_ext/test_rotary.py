"""The served model's rotary embedding: moved keys equal keys computed at the new position."""

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")
pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")

from kvpolicy.sglang_ext.face.errors import Refused  # noqa: E402
from kvpolicy.sglang_ext.forward.rotary import of_model  # noqa: E402

HEAD, ROTARY, BASE, LONGEST = 16, 12, 10000, 512
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALINGS = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
}


class Attention(torch.nn.Module):
    """An attention module as in SGLang's models."""

    def __init__(self, embedding, **flags):
        from sglang.srt.layers.radix_attention import RadixAttention

        super().__init__()
        self.attn = RadixAttention(2, HEAD, 1.0, 2, 0)
        self.rotary_emb = embedding
        vars(self).update(flags)


class HunYuanAttention(Attention):
    """An attention that norms its keys after rotation."""


class Model(torch.nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            layer if isinstance(layer, Attention) else Attention(layer) for layer in layers
        )


def embedding(scaling, neox=True, base=BASE):
    from sglang.srt.layers.rotary_embedding import get_rope

    return get_rope(HEAD, ROTARY, LONGEST, base, neox, scaling, torch.float32)


@pytest.mark.parametrize("neox", [True, False], ids=["halves", "interleaved"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_moved_keys_are_those_of_later_positions(scaling, neox):
    rope = embedding(SCALINGS[scaling], neox)
    rotary = of_model(Model(rope, rope))
    keys = torch.randn((3, 2 * HEAD), generator=torch.Generator().manual_seed(1))
    shift = torch.tensor([0, 1, 300])

    def at(positions):
        queries = torch.zeros((3, 2 * HEAD))
        turned = rope.forward_native(torch.tensor(positions), queries, keys.clone())[1]
        return turned.view(3, 2, HEAD).transpose(0, 1)

    first = at([7, 7, 7])
    moved = rotary.move(first, shift.expand(2, 3))
    torch.testing.assert_close(moved, at([7, 8, 307]), rtol=1e-4, atol=1e-4)
    assert torch.equal(moved[:, 0], first[:, 0])
    assert not torch.allclose(moved[:, 1:], first[:, 1:], atol=1e-2)


def test_other_embeddings_are_refused_in_one_sentence():
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    plain, last = embedding(None), "Model has layers whose keys SGLang does not turn last"
    for models, why in (
        (Model(plain, embedding(dynamic)), "DynamicNTKScalingRotaryEmbedding does not turn keys"),
        (Model(plain, embedding(None, base=500)), "layers turn their keys differently"),
        (Model(plain, embedding(None, False)), "layers turn their keys differently"),
        (Model(plain, None), last),
        (Model(plain, Attention(plain, use_rope=False)), last),
        (Model(HunYuanAttention(plain, use_qk_norm=True)), last),
        (Model(Attention(plain, use_xllm_partial_rope=True)), last),  # pairs half a head apart
        (Model(), last),
    ):
        with pytest.raises(Refused, match=f"`positions: slots` cannot be served.*{why}") as refused:
            of_model(models)
        assert str(refused.value).count(". ") == 0
    assert (
        of_model(Model(HunYuanAttention(plain, use_qk_norm=False))).inv_freq.numel() == ROTARY / 2
    )
