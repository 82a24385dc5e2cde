"""Output tokens that the client prescribes: `custom_params.kv_policy_force`.

The first output tokens of such a request are the client's, whatever the model would say; then it
goes on as usual. SGLang computes the batch's distributions and samples as always. The sampled ids
are replaced in place before the logprobs of "the sampled token" are looked up, so what is returned
is the model's own distribution, and everything later finds the ids as if they had been sampled.

Which output token a row computes follows from the request's length in this forward: the host's list
of outputs lags by a step under overlap scheduling. What a forward forces travels with its sampling
options, as sampling may come later than the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from kvpolicy.sglang_ext.face.asked import FORCE, shown
from kvpolicy.sglang_ext.face.host import to_device

_ATTRIBUTE = "kv_policy_forced"  # of a request: its tokens; of sampling options: rows and tokens


@dataclass(frozen=True)
class Forced:
    """Rows of one forward whose token is prescribed, and these tokens."""

    rows: list[int]
    tokens: list[int]

    def write(self, sampled: torch.Tensor) -> None:
        """Replace sampled ids [B] in place; the host does not wait."""
        rows, tokens = to_device([self.rows, self.tokens], torch.int64, sampled.device)
        sampled.index_copy_(0, rows, tokens.to(sampled.dtype))


class Forcing:
    """The prescribed tokens of one scheduler's requests, from their arrival to the sampler."""

    def __init__(self) -> None:
        self._any_forced = False  # whether any request prescribed tokens since the start
        self._current: Forced | None = None  # of the forward that is in the sampler

    def note(self, request: Any, asked: Mapping[str, Any]) -> None:
        """Take the tokens that a request prescribes, when it arrives.

        Args:
            asked: what it asks of policies.

        Raises:
            ValueError: they are no list of token ids, or cannot be forced; for the client.
        """
        if FORCE in asked:
            setattr(request, _ATTRIBUTE, _checked(asked[FORCE], request))
            self._any_forced = True

    def prepare(self, batch: Any) -> None:
        """Before a forward: note which of its rows will be replaced."""
        if self._any_forced and batch.reqs:
            # Without overlap scheduling the options of the last step come again.
            setattr(batch.sampling_info, _ATTRIBUTE, _of_batch(batch))

    def sample(self, run: Callable[[], torch.Tensor], sampling: Any) -> torch.Tensor:
        """Sample, with the prescribed ids in their places.

        Args:
            run: SGLang's sampler.
            sampling: the sampling options of the forward.

        Returns:
            [B] ids.
        """
        self._current = getattr(sampling, _ATTRIBUTE, None)
        if self._current is None:
            return run()
        try:
            sampled = run()
            self._current.write(sampled)
        finally:
            self._current = None
        return sampled

    def before_logprobs(self, sampled: torch.Tensor) -> None:
        """Inside of the sampler, before the logprobs of the sampled ids [B] are looked up."""
        if self._current is not None:
            self._current.write(sampled)


def goes_on(request: Any) -> bool:
    """Whether nothing may end a request yet: its last output token was prescribed."""
    forced = getattr(request, _ATTRIBUTE, None)
    if forced is None or request.to_finish is not None:
        return False
    max_tokens: int = request.sampling_params.max_new_tokens
    return len(request.output_ids) <= min(len(forced), max_tokens - 1)


def _of_batch(batch: Any) -> Forced | None:
    rows, tokens = [], []
    lengths: list[int] = []
    for row, request in enumerate(batch.reqs):
        forced = getattr(request, _ATTRIBUTE, None)
        if forced is None:
            continue
        lengths = lengths or batch.seq_lens_cpu.tolist()
        # Negative in a chunk of the prompt that is not its last; what is sampled there is dropped.
        index = lengths[row] - len(request.origin_input_ids)
        if 0 <= index < len(forced):
            rows.append(row)
            tokens.append(forced[index])
    return Forced(rows, tokens) if rows else None


def _checked(tokens: Any, request: Any) -> list[int]:
    if not isinstance(tokens, list) or not tokens:
        raise ValueError(f"custom_params.{FORCE} is {shown(tokens)}; expected a list of token ids")
    last = request.vocab_size - 1
    for i, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token <= last:
            raise ValueError(
                f"custom_params.{FORCE}[{i}] is {shown(token)}; this model's token ids are "
                f"0 to {last}"
            )
    sampling = request.sampling_params
    for what, option in (
        ("beam search", request.beam_group is not None),
        ("`stop` strings, which are looked for in all of the output", sampling.stop_strs),
        ("`stop_regex`, which is looked for in all of the output", sampling.stop_regex_strs),
        ("`json_schema`", sampling.json_schema),
        ("`regex`", sampling.regex),
        ("`ebnf`", sampling.ebnf),
        ("`structural_tag`", sampling.structural_tag),
    ):
        if option:
            raise ValueError(f"custom_params.{FORCE} cannot be combined with {what}")
    return tokens
