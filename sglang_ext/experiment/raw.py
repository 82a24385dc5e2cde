"""In the scheduler: the model's own distributions of sampled requests, before any change to them.

What SGLang reports of an output token is scaled by the temperature and follows logit bias,
penalties and grammar. A comparison with full KV needs the logits as the model computed them. For
sampled requests only, the top K candidates of every output token are taken, copied to the host with
the rest of the step's result, and sent with the answer's last tokens. With several stages, the last
one has the logits, and SGLang sends what is taken to the first one, which answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from kvpolicy.sglang_ext.face import compat

logger = logging.getLogger(__name__)

RAW = "kv_policy_raw"  # key in SGLang's customized_info; attribute of a request

_ROWS = "kv_policy_raw_rows"  # attribute of sampling options


@dataclass
class Recorded:
    """What has been taken of one request.

    Attributes:
        top: K, number of candidates taken of each output token.
        logprobs, ids: per output token, [K] float32 and [K] int32, most probable first.
        whole: whether no output token is missing.
    """

    top: int
    logprobs: list[np.ndarray] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    whole: bool = True

    def add(self, index: int, logprobs: np.ndarray, ids: np.ndarray) -> None:
        """Take the candidates of output token `index`, from 0; ids below 0 are `missing`."""
        self.whole = self.whole and index == len(self.ids) and bool((ids >= 0).all())
        self.logprobs.append(logprobs)
        self.ids.append(ids)


@dataclass(frozen=True)
class CandidateRows:
    """Rows of one forward whose candidates are taken, and the largest K of them."""

    rows: list[int]
    top: int


class Raw:
    """The sampled requests of one scheduler."""

    def __init__(self) -> None:
        self._any = False  # whether any request has been sampled since the start

    def note(self, request: Any, top: int) -> None:
        """Take a request's distributions from its first output token on."""
        setattr(request, RAW, Recorded(top))
        self._any = True

    def prepare(self, batch: Any) -> None:
        """Before a forward: note the rows whose candidates are taken."""
        if not self._any:
            return
        row_tops = [
            (row, getattr(request, RAW).top)
            for row, request in enumerate(batch.reqs)
            if getattr(request, RAW, None) is not None
        ]
        rows = (
            CandidateRows([row for row, _ in row_tops], max(top for _, top in row_tops))
            if row_tops
            else None
        )
        # Without overlap scheduling the options of the last step come again.
        setattr(batch.sampling_info, _ROWS, rows)

    def sample(self, run: Callable[[], torch.Tensor], logits_output: Any, sampling: Any) -> Any:
        """Sample, after reading the logits as the model computed them.

        Args:
            run: SGLang's sampling, which changes the logits in place.
            sampling: the sampling options of the forward.
        """
        rows = getattr(sampling, _ROWS, None)
        if rows is None:
            return run()
        logits = logits_output.next_token_logits
        try:
            candidates = take(logits, rows)
        except Exception:  # then these requests are not compared
            logger.exception("The distributions of sampled requests were not taken.")
            candidates = missing(logits, rows)
        result = run()
        compat.add_output(logits_output, candidates)
        return result

    def from_pp_tensors(self, tensors: Mapping[str, torch.Tensor]) -> OnDevice:
        """Called by SGLang on the first stage, with the `to_pp_tensors` of the last one."""
        return OnDevice(**tensors)


@dataclass(frozen=True)
class OnDevice:
    """Candidates of some rows of a batch, R of them; copied by SGLang with the step's result.

    Attributes:
        rows: [R] int64.
        logprobs: [R, K] float32.
        ids: [R, K] int32.
    """

    rows: torch.Tensor
    logprobs: torch.Tensor
    ids: torch.Tensor

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> OnHost:
        """Called by SGLang after the forward."""
        return OnHost(**{name: copy_tensor(tensor) for name, tensor in vars(self).items()})

    def to_pp_tensors(self) -> dict[str, torch.Tensor]:
        """Called by SGLang on the last stage, to send them to the first one."""
        return dict(vars(self))


@dataclass(frozen=True)
class OnHost:
    """`OnDevice` on the host, once the copy is done."""

    rows: torch.Tensor
    logprobs: torch.Tensor
    ids: torch.Tensor

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Called by SGLang when the requests have the step's tokens, before these are sent."""
        logprobs, ids = self.logprobs.numpy(), self.ids.numpy()
        for place, row in enumerate(self.rows.tolist()):
            request, commit = batch.reqs[row], commits[row]
            recorded = getattr(request, RAW, None)
            if recorded is None or commit is None:
                continue
            try:
                place_top = np.s_[place, : recorded.top]
                # The batch's tensors are not kept alive by what one request records.
                candidates = logprobs[place_top].copy(), ids[place_top].copy()
                recorded.add(commit.output_index, *candidates)
                if request.finished():
                    _send(request, recorded)
                    setattr(request, RAW, None)
            except Exception:  # the request goes on, and is not compared
                setattr(request, RAW, None)
                logger.exception("A sampled request is not compared. rid=%s", request.rid)


def take(logits: torch.Tensor, rows: CandidateRows) -> OnDevice:
    """The most probable candidates of some rows of logits [B, vocabulary]."""
    index = _on_device(rows, logits)
    # As SGLang computes logprobs of the input, so that equal logits give equal values.
    logprobs = torch.log_softmax(logits[index].float(), dim=-1)
    top = logprobs.topk(min(rows.top, logprobs.shape[-1]), dim=-1)
    return OnDevice(index, top.values, top.indices.to(torch.int32))


def missing(logits: torch.Tensor, rows: CandidateRows) -> OnDevice:
    """In place of what `take` could not give, of the same shapes, with ids of -1.

    Each rank of the last stage sends a part; without it the first stage would wait for ever.
    """
    size = (len(rows.rows), min(rows.top, logits.shape[-1]))
    ids = torch.full(size, -1, dtype=torch.int32, device=logits.device)
    return OnDevice(_on_device(rows, logits), ids.float(), ids)


def _on_device(rows: CandidateRows, logits: torch.Tensor) -> torch.Tensor:
    return torch.tensor(rows.rows, device="cpu").to(logits.device, non_blocking=True)


def _send(request: Any, recorded: Recorded) -> None:
    """Send what was recorded with the answer's last tokens."""
    visible = len(request.output_ids) if request.finished_len is None else request.finished_len
    if not recorded.whole or not 0 < visible <= len(recorded.ids):
        return
    payload = {
        "prompt": np.asarray(request.origin_input_ids, dtype=np.int32),
        "output": np.asarray(request.output_ids[:visible], dtype=np.int32),
        "ids": np.stack(recorded.ids[:visible]),
        "logprobs": np.stack(recorded.logprobs[:visible]),
    }
    # SGLang takes one element per output token.
    values = [None] * (visible - 1) + [payload]
    request.customized_info = {**(request.customized_info or {}), RAW: values}
