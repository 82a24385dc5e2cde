"""The torch program of a policy: keeps exactly what the interpreter keeps, on any device.

`TorchProgram.start(prompt)`, `Run.observe(layer, q, k, v)` and `Run.finish()` are the interface of
a prefill; what follows a prefill (`Memory.after`, merged rows) comes from the finished run.
Policies that propagate, remember or merge are evaluated layer by layer, without a plan
(prefill.py).
"""

from __future__ import annotations

from kvpolicy.dsl.execute.compiled import Compiled
from kvpolicy.dsl.execute.prefill import DirectRun
from kvpolicy.dsl.execute.run import Run


class TorchProgram(Compiled):
    """A compiled policy, and how its prefills begin."""

    def start(self, prompt: int) -> Run:
        """Begins a prefill of `prompt` tokens."""
        # Decoding may begin from nothing: states and budgets are then those of no tokens.
        direct = self.direct.needed or (prompt == 0 and self.steps is not None)
        kind = DirectRun if direct else Run
        return kind(self, prompt, self.bound.queries(prompt) if prompt else 0)
