"""One forward of a batch: what the plugin does in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpolicy.sglang_ext.forward.decode_step import DecodeStep
from kvpolicy.sglang_ext.forward.prefill_step import PrefillStep
from kvpolicy.sglang_ext.forward.propagate import PropagateStep
from kvpolicy.sglang_ext.forward.resume import ResumeStep
from kvpolicy.sglang_ext.forward.row_layout import RowLayout
from kvpolicy.sglang_ext.request.request import decoding_in

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.forward.services import Services


class ForwardStep:
    """The plugin's parts in one forward; those that the forward has no use for are None.

    A mixed forward has the parts of a prefill and `decode`.
    """

    def __init__(self, services: Services, batch: Any) -> None:
        self.prefill: PrefillStep | None = None
        self.resume: ResumeStep | None = None
        self.propagate: PropagateStep | None = None
        self.decode: DecodeStep | None = None
        if batch.forward_mode.is_extend():
            self._layout = layout = RowLayout(batch)
            self.prefill = prefill = PrefillStep(services, batch, layout)
            self.resume = ResumeStep(services, batch, layout)
            if PropagateStep.wanted(batch):
                self.propagate = PropagateStep(services, batch, layout, prefill)
            self._decoding = decoding_in(batch)
            if self._decoding:
                self.decode = DecodeStep(services, batch, self._decoding)
        elif batch.forward_mode.is_decode():
            self.decode = DecodeStep(services, batch, batch.reqs)

    @property
    def decoding(self) -> slice | None:
        """Rows of an extend forward that decode, at the current layer; None if there are none."""
        if not self._decoding or self._layout.rows(self._decoding[0]) is None:
            return None
        first, last = (self._layout.required_rows(self._decoding[index]) for index in (0, -1))
        return slice(first.start, last.stop)

    def finish(self) -> None:
        """After the forward: compress the prompts that ended in it, and fold."""
        for step in (self.propagate, self.prefill, self.resume, self.decode):
            if step is not None:
                step.finish()
