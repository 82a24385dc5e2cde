"""Muon for the matrices, AdamW for embeddings and norms, under one schedule."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

# Quintic whose five iterations bring singular values near 1 (Jordan et al. 2024, "Muon").
NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Approximately the nearest semi-orthogonal matrices of a stack [count, rows, columns]."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        square = x @ x.transpose(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    return x.transpose(1, 2) if tall else x


class Muon(Optimizer):
    """Momentum, orthogonalized per matrix; matrices of one shape are updated as a stack."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        decay: float = 0.0,
    ) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_shape.setdefault(parameter.shape, []).append(parameter)
        groups = [{"params": same} for same in by_shape.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            self._step_stack(group, group["params"])

    def _step_stack(self, group: dict, parameters: list[nn.Parameter]) -> None:
        state = self.state[parameters[0]]
        if "momentum" not in state:
            state["momentum"] = torch.zeros(len(parameters), *parameters[0].shape)
        # A layer that took no part in this step stays as it is.
        active = [i for i, parameter in enumerate(parameters) if parameter.grad is not None]
        if not active:
            return
        parameters = [parameters[i] for i in active]
        gradient = torch.stack([parameter.grad for parameter in parameters])
        momentum = state["momentum"][active].lerp_(gradient, 1 - group["momentum"])
        state["momentum"][active] = momentum
        update = orthogonalize(gradient.lerp(momentum, group["momentum"]))
        rows, columns = parameters[0].shape
        size = group["lr"] * max(1.0, rows / columns) ** 0.5
        for parameter, direction in zip(parameters, update, strict=True):
            parameter.mul_(1 - group["lr"] * group["decay"]).add_(direction, alpha=-size)


class Optimizers:
    """Both optimizers; `set_rate` scales their learning rates together."""

    def __init__(self, model: nn.Module) -> None:
        matrices, rest = [], []
        for name, parameter in model.named_parameters():
            is_matrix = parameter.dim() == 2 and "embed" not in name
            (matrices if is_matrix else rest).append(parameter)
        self.parts = [
            Muon(matrices, lr=0.02, decay=0.01),
            AdamW(rest, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.base_rates = [part.defaults["lr"] for part in self.parts]

    def set_rate(self, factor: float) -> None:
        for part, base in zip(self.parts, self.base_rates, strict=True):
            for group in part.param_groups:
                group["lr"] = base * factor

    def step(self) -> None:
        for part in self.parts:
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
