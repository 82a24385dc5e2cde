"""What the plugin holds on the device beside SGLang's KV pool, computed before the pool is sized.

SGLang gives the pool what `--mem-fraction-static` leaves beside the weights. Tables and buffers of
the plugin are allocated later and stay, so they are taken off the pool; otherwise they would come
out of what is left for forwards. Queries kept between folds are taken off too, up to the limit that
request/queries.py sets. What else comes and goes with requests, states of policies and temporary
tensors of folds, is not.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.sglang_ext.attention import readers
from kvpolicy.sglang_ext.face import compat, refusals
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.face.options import fold_interval
from kvpolicy.sglang_ext.memory.tables import DeviceTables
from kvpolicy.sglang_ext.request.queries import most_bytes

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.forward.services import Services

logger = logging.getLogger(__name__)

SCRATCH = 32  # rows of SGLang's table of slots for the propagating prompts of one forward


def size_pool(
    services: Services, original: Callable[[int], Any], configurator: Any, budget: int
) -> Any:
    """SGLang's sizes of the pool for what the plugin leaves of a budget.

    A number of tokens that the operator gave stays, if the whole budget has room for it.

    Args:
        original: from bytes to sizes.
        configurator: SGLang's object that sizes the pool.
        budget: bytes for the pool and what lies beside it.

    Raises:
        Refused: nothing is left for the pool.
    """
    sizes = original(budget)
    options = compat.resolved(configurator.server_args)
    parts = bytes_by_part(services, configurator, options, sizes.max_total_num_tokens)
    plugin_bytes = sum(parts.values())
    limit, tokens = options.max_total_tokens, sizes.max_total_num_tokens
    if limit is not None and tokens >= limit // options.page_size * options.page_size:
        effect = "--max-total-tokens stays as given"
    elif plugin_bytes >= budget:
        raise Refused(
            f"--mem-fraction-static {options.mem_fraction_static} leaves {_mib(budget)} MiB beside "
            f"the weights, and KV-cache policies need {_mib(plugin_bytes)} MiB of it; raise it, or "
            "lower --max-running-requests."
        )
    else:
        sizes = original(budget - plugin_bytes)
        tokens_left = sizes.max_total_num_tokens
        effect = f"the pool has {tokens_left} tokens, {tokens - tokens_left} fewer for it"
    listing = ", ".join(f"{what} {_mib(size)}" for what, size in parts.items() if size)
    line = "KV-cache policies take %s MiB of the device beside the KV pool (%s); %s."
    logger.info(line, _mib(plugin_bytes), listing, effect)
    return sizes


def bytes_by_part(
    services: Services, configurator: Any, options: Any, tokens: int
) -> dict[str, int]:
    """Bytes of each part of the plugin beside a pool of `tokens`; a smaller pool needs no more.

    Args:
        options: SGLang's, as resolved.
    """
    config = configurator.model_config
    shape = refusals.shape_of_rank(refusals.model_shape(config), options.tp_size)
    if options.pp_size != 1:
        shape = replace(shape, layers=compat.layers_here(configurator))
    requests = configurator.resolve_max_num_reqs(tokens)
    scratch = SCRATCH if services.propagates else 0
    rows = requests + 1 + scratch
    tables = DeviceTables.empty(
        rows, shape.layers, shape.kv_heads, tokens, "meta", pairs=services.shares
    )
    row_length = config.context_len + 64  # SGLang's rows are a few tokens longer than the context
    parts = {"tables": tables.bytes, "rows of propagating prompts": scratch * row_length * 4}
    captured = min(compat.captured_requests(options), requests)
    backend, device = compat.attention_backends(options)[1], torch.device(configurator.device)
    if readers.may_read(backend, device):
        from kvpolicy.kernels.attention.private_attention_flashinfer import reserved_bytes

        slots, group = tokens + options.page_size, shape.heads // shape.kv_heads
        arguments = (shape.layers, slots, shape.kv_heads, group, captured or requests, device)
        parts["lists for FlashInfer"] = reserved_bytes(*arguments)
    if captured and backend != "torch_native":
        from kvpolicy.kernels.attention.decode_attention_triton import (
            Workspace,
            workspace_elements,
        )

        sizes = (shape.heads, shape.kv_heads, shape.head_dim)
        elements = workspace_elements(captured, *sizes, device)
        parts["decode attention"] = Workspace.empty(elements, torch.device("meta")).nbytes
        if services.queries.needed:
            step = math.prod((shape.layers, captured, shape.heads, shape.head_dim))
            step *= configurator.model_dtype.itemsize
            parts["queries"] = most_bytes(step, fold_interval())
    return parts


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"
