"""Reports of a request when its state changes."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch


@pytest.fixture
def metrics():
    return Mock()


@pytest.fixture
def reports(metrics):
    pytest.importorskip("sglang", reason="reports ask the runtime")
    from kvpolicy.sglang_ext.report.reports import Reports

    arena = SimpleNamespace(kv_heads=2, model_layers=3, layers=3, slot_bytes=96)
    heads = SimpleNamespace(total=lambda number: number)
    return Reports(arena, metrics, SimpleNamespace(heads=heads))


def test_a_compressed_request_that_comes_back_without_room_says_so(reports, metrics):
    from kvpolicy.sglang_ext.request.reasons import Reason
    from kvpolicy.sglang_ext.request.request import RequestState

    served = SimpleNamespace(name="mine", set={}, upper_layers=(), plan=lambda prompt: None)
    state = RequestState(served, prompt=9, slots=4)
    state.private = SimpleNamespace(slots=torch.arange(4))
    request = SimpleNamespace(rid="a", customized_info=None, output_ids=[], send_token_offset=0)
    reports.finished_prompt(request, state, 24, finite=True)
    assert request.customized_info["kv_policy"][-1]["entries_kept"] == 24

    # One token has been sent when it is retracted.
    request.output_ids, request.send_token_offset = [5], 1
    state.private, state.uncompressed = None, Reason.NO_SLOTS
    for _ in range(2):
        reports.finished([(request, state)])
    facts = request.customized_info["kv_policy"]
    assert [each["entries_kept"] for each in facts] == [24, 24]
    assert [each.get("uncompressed") for each in facts] == [None, "no_slots"]
    metrics.gave_up.assert_called_once_with("mine", Reason.NO_SLOTS)


def test_what_its_policy_ended_is_not_counted_as_served_in_full(reports, metrics):
    from kvpolicy.sglang_ext.request.reasons import Reason
    from kvpolicy.sglang_ext.request.request import RequestState

    served = SimpleNamespace(name="mine", set={})
    state = RequestState(served, prompt=9, slots=4, uncompressed=Reason.POLICY_ERROR)
    state.failed = True
    goes_on, ended = (
        SimpleNamespace(
            rid="a", customized_info=None, output_ids=[], send_token_offset=0, to_finish=finish
        )
        for finish in (None, "an error")
    )
    for _ in range(2):  # the second time after a retraction
        reports.finished([(ended, state)])
    metrics.ended_with_prompt.assert_called_once_with("mine")
    assert ended.customized_info is None
    metrics.uncompressed.assert_not_called()
    state.reported.counted = False
    reports.finished([(goes_on, state)])
    metrics.uncompressed.assert_called_once_with("mine", Reason.POLICY_ERROR)


def test_what_was_never_compressed_is_counted_once(reports, metrics):
    from kvpolicy.sglang_ext.request.reasons import Reason
    from kvpolicy.sglang_ext.request.request import RequestState

    served = SimpleNamespace(name="mine", set={})
    state = RequestState(served, prompt=9, slots=4, uncompressed=Reason.NO_SLOTS)
    request = SimpleNamespace(rid="a", customized_info=None, output_ids=[], send_token_offset=0)
    for _ in range(2):
        reports.finished([(request, state)])
    assert len(request.customized_info["kv_policy"]) == 1
    metrics.gave_up.assert_not_called()
