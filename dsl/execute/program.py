"""The torch program of a policy: keeps exactly what the interpreter keeps, on any device.

`TorchProgram.start(prompt)`, `Run.observe(layer, q, k, v)` and `Run.finish()` are the interface of
a prefill; what follows it (`Memory.after`, merged rows) comes from the `FinishedPrefill`.
"""

from __future__ import annotations

from kvpolicy.dsl.execute.planned.compiled import Compiled
from kvpolicy.dsl.execute.prefill.run import Run


class TorchProgram(Compiled):
    """A compiled policy, and how its prefills begin."""

    def start(self, prompt: int) -> Run:
        """Begins a prefill of `prompt` tokens."""
        return Run(self, prompt)
