"""The model's decoder layers, wrapped so that rows can leave between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.face.errors import Refused

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.forward.services import Services


def wrap(services: Services, runner: Any, names: Sequence[str]) -> None:
    """Wrap every decoder layer of a loaded model.

    Args:
        runner: SGLang's model runner.
        names: of the policies that propagate.

    Raises:
        Refused: the model's class is not one from whose layers rows may leave, or a layer could
            not be wrapped.
    """
    model, policies = runner.model, ", ".join(f"`{name}`" for name in names)
    layers = compat.decoder_layers(model)
    if layers is None:
        raise Refused(
            f"--kv-policy: {policies} propagates chosen tokens only, which is served for "
            f"{', '.join(compat.LOSE_ROWS.values())}; the model's class is {type(model).__name__}."
        )
    services.runner = runner
    services.layers = [layer.forward for layer in layers]
    for number, layer in enumerate(layers):
        layer.forward = _wrapped(services, number, layer.forward)
    _verify(layers)


def _wrapped(services: Services, number: int, run: Callable[..., Any]) -> Callable[..., Any]:
    def forward(positions: Any, hidden_states: Any, forward_batch: Any, **options: Any) -> Any:
        step = services.step
        if step is None or step.propagate is None:
            return run(positions, hidden_states, forward_batch, **options)
        return step.propagate.layer(number, run, positions, hidden_states, forward_batch, **options)

    return forward


def _verify(layers: list[Any]) -> None:
    """Refuse unless each wrapped layer holds the attention layer of its number."""
    for number, layer in enumerate(layers):
        layer_ids = [attention.layer_id for attention in compat.attention_layers(layer)]
        if layer_ids != [number] or layer.forward.__module__ != __name__:
            raise Refused(
                f"--kv-policy: decoder layer {number} of {type(layer).__name__} could not be "
                f"wrapped; it holds the attention layers {layer_ids}."
            )
