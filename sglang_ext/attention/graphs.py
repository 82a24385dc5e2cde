"""Which of two or three CUDA graphs a decode step replays.

SGLang captures a decode graph per batch size and variant of attention. Here there are two variants:
plain batches replay a graph with nothing but the stock attention, and batches in which a request
reads compressed entries replay one whose attention reads the device tables (tables.py). The latter
also notes queries (queries.py), if any served policy reads them while decoding. So a batch in which
a policy will read this step's queries replays it even before anything has been compressed: its
attention also reads requests without private pages. A further variant that notes no queries would
only save some batches of compressed requests one small copy per layer, for more graphs.

If FlashInfer may read private pages (readers.py) there is a third variant, in which it does.

Policies do nothing between layers, so no step runs without a graph because of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.face.errors import Refused

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.forward.services import Services

PLAIN = "kv_policy_plain"
COMPRESSED = "kv_policy_compressed"
PAGES = "kv_policy_pages"


class GraphVariants:
    """What SGLang asks for by `create_attention_graph_variants`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @property
    def capture_labels(self) -> tuple[str, ...]:
        """All variants, in the order of their capture.

        The plain one is last: FlashInfer's backend plans in the buffers of the last capture of a
        batch size, and the compressed variant reads none of them.
        """
        pages = self._services.pages_reader
        return (COMPRESSED, PLAIN) if pages is None else (COMPRESSED, PAGES, PLAIN)

    def select(self, forward_batch: Any) -> str:
        """The variant for the batch of the current forward."""
        services = self._services
        if not reads_tables(services):
            return PLAIN
        step, pages = services.step, services.pages_reader
        if step is None or pages is None:
            return COMPRESSED
        return PAGES if pages.replays(step.decode, forward_batch.req_pool_indices) else COMPRESSED


def reads_tables(services: Services) -> bool:
    """Whether attention of a decode forward, or of a capture, is to read the device tables.

    Outside of a scheduled forward (SGLang warms up with batches of its own) it is not.
    """
    capturing = compat.captured_attention()
    if capturing is not None:
        return capturing in (COMPRESSED, PAGES)
    step = None if services.step is None else services.step.decode
    return step is not None and (step.reads or step.notes)


def notes_queries(services: Services) -> bool:
    """Whether a decode forward, or a capture, is to note its queries."""
    capturing = compat.captured_attention()
    if capturing is not None:
        return capturing in (COMPRESSED, PAGES) and services.queries.needed
    step = None if services.step is None else services.step.decode
    return step is not None and step.notes


def verify(runner: Any) -> None:
    """Refuse decode graphs that were captured without the variant for compressed entries.

    Args:
        runner: SGLang's model runner, graphs captured.

    Raises:
        Refused: they lack it.
    """
    captured = runner.decode_cuda_graph_capture_bs
    if captured and not isinstance(
        runner.decode_cuda_graph_runner.attention_graph_variants, GraphVariants
    ):
        raise Refused(
            "--kv-policy: SGLang captured its decode graphs without one that reads compressed "
            "entries; start it with --disable-cuda-graph."
        )
