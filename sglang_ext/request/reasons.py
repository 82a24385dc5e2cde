"""Why a request of a policy is served in full: the fact `uncompressed` and the label `reason`."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a request's prompt is not compressed."""

    SHORT_PROMPT = "short_prompt"  # the budget holds the whole prompt
    DECODE_ONLY = "decode_only"  # the policy lets nothing leave before the first decode step
    NOTHING_DROPPED = "nothing_dropped"  # known only after scoring
    NOTHING_SAVED = "nothing_saved"  # it would take as many slots as the prompt
    NOT_FINITE = "not_finite"  # queries, keys or values held NaN or infinity
    NO_SLOTS = "no_slots"  # no room for the compressed copy beside the prompt
    ONE_TOKEN = "one_token"  # nothing is decoded after the prefill
    MULTIMODAL = "multimodal"
    EMBEDDINGS = "input_embeds"  # the prompt is not tokens, so it is not in the radix cache
    SESSION = "session"  # the next turn continues from the full row
    BEAM = "beam_search"
    POLICY_ERROR = "policy_error"  # the policy failed (failures.py)
    POLICY_DISABLED = "policy_disabled"  # it has failed too often

    # Of policies with `propagate` only: what they are asked for needs all rows.
    TOO_LONG = "too_long"  # data decide its layer, and the prompt would be prefilled in chunks
    INPUT_LOGPROBS = "input_logprobs"
    HIDDEN_STATES = "hidden_states"
