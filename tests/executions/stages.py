"""Programs of stages that divide a model's layers, with the numbers that they tell each other."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.execute.drive import InPools, drive
from kvpolicy.dsl.execute.prefill.run import Run
from kvpolicy.dsl.execute.program import TorchProgram


class Stage(TorchProgram):
    """A stage's program that gets the exchanged numbers of all stages.

    Attributes:
        numbers: those of a prompt; None if nothing is exchanged.
    """

    numbers: torch.Tensor | None = None

    def start(self, prompt: int) -> Run:
        run = super().start(prompt)
        finish = run.finish

        def heard(**options):
            if self.exchanged:
                run.take_layer_numbers(self.numbers)
            return finish(**options)

        run.finish = heard
        return run

    @classmethod
    def all(cls, bound: Bound, prompt, parts: Iterable[range], **options) -> list[Stage]:
        """The programs of stages with these layers, for a prompt with q, k and v of all layers."""
        made = [cls(bound, layers=layers, **options) for layers in parts]
        if not made[0].exchanged:
            return made
        runs = (observed(TorchProgram(bound, layers=x.layers, **options), prompt) for x in made)
        numbers = torch.cat([run.layer_numbers() for run in runs])
        assert numbers.shape == (bound.shape.layers, len(made[0].exchanged), 3)
        assert (numbers >= 0).all()
        for each in made:
            each.numbers = numbers
        return made


def observed(program: TorchProgram, prompt) -> Run:
    """A run of a program's layers, which has seen them, from q, k and v of all layers."""
    q, k, v = (torch.as_tensor(x) for x in prompt)
    return drive(program, k.shape[2], InPools(q, k.transpose(1, 2), v.transpose(1, 2))).run
