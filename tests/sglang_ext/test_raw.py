"""Distributions of sampled requests: taken before they change, completely or not at all."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kvpolicy.sglang_ext.experiment.raw import RAW, CandidateRows, OnHost, Raw, take

V = 31


def req(rid="r", output=(), finished=False):
    made = SimpleNamespace(
        rid=rid, output_ids=list(output), finished_len=None, origin_input_ids=[5, 6, 7],
        retraction_count=0, customized_info=None,
    )  # fmt: skip
    made.finished = lambda: finished
    return made


def commit(index):
    return SimpleNamespace(output_index=index)


def test_the_most_probable_of_the_sampled_rows():
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    taken = take(logits, CandidateRows([3, 1], 9))
    wanted = torch.log_softmax(logits[[3, 1]].float(), dim=-1).topk(9)
    assert torch.equal(taken.logprobs, wanted.values)
    assert torch.equal(taken.ids.long(), wanted.indices)
    assert taken.rows.tolist() == [3, 1]
    assert take(logits, CandidateRows([0], 1000)).ids.shape == (1, V)


@pytest.mark.parametrize("in_stages", [False, True])
def test_a_request_leaves_with_what_was_recorded(in_stages):
    raw, requests = Raw(), [req("a"), req("b", [9, 8], True), req("c")]
    raw.note(requests[1], 3)
    raw.note(requests[2], 5)
    batch = SimpleNamespace(reqs=requests, sampling_info=SimpleNamespace())
    raw.prepare(batch)
    output = SimpleNamespace(next_token_logits=torch.randn(3, V), auxiliary_device_output=None)
    before = output.next_token_logits.clone()

    def run():
        output.next_token_logits.fill_(0.0)  # bias, temperature, grammar
        return "ids"

    assert raw.sample(run, output, batch.sampling_info) == "ids"
    taken = output.auxiliary_device_output
    if in_stages:
        from sglang.srt.sampling import sampling_observer_pp as pipeline

        sent = {}
        pipeline.add_auxiliary_output_to_pp_tensors(sent, taken)
        taken = pipeline.pop_auxiliary_output_from_pp_tensors(sent, Raw())
    host = taken.copy_to_host(lambda tensor: tensor.clone())
    first = OnHost(host.rows, host.logprobs, host.ids)
    requests[1].finished = lambda: False
    first.consume(batch, [commit(0), commit(0), commit(0)])
    requests[1].finished = lambda: True
    host.consume(batch, [None, commit(1), None])
    payload = requests[1].customized_info[RAW][-1]
    assert payload["prompt"].tolist() == [5, 6, 7]
    assert payload["output"].tolist() == [9, 8]
    wanted = torch.log_softmax(before[1], dim=-1).topk(3)
    assert payload["ids"].tolist() == [wanted.indices.tolist()] * 2
    assert np.allclose(payload["logprobs"], wanted.values)
    assert requests[0].customized_info is requests[2].customized_info is None


@pytest.mark.parametrize("wrong", ["a step is missing", "an array is short", "nothing is known"])
def test_what_is_not_whole_is_not_sent(wrong, caplog):
    raw, request = Raw(), req("a", [9, 8], True)
    raw.note(request, 3)
    ids, logprobs = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 3)
    index = 0
    if wrong == "a step is missing":
        index = 1
    elif wrong == "an array is short":
        ids = ids[:0]
    else:
        request.finished = None
    host = OnHost(torch.tensor([0]), logprobs, ids)
    if wrong == "a step is missing":
        request.finished = lambda: False
        host.consume(SimpleNamespace(reqs=[request]), [commit(2)])
        request.finished = lambda: True
    host.consume(SimpleNamespace(reqs=[request]), [commit(index)])
    assert request.customized_info is None
    assert ("A sampled request is not compared" in caplog.text) == (wrong != "a step is missing")


def test_logits_that_cannot_be_read_stop_nobody(monkeypatch, caplog):
    """What other ranks have read has the same shapes, as parts of it are sent by each."""
    raw, request = Raw(), req("a", [9], True)
    raw.note(request, 3)
    batch = SimpleNamespace(reqs=[request], sampling_info=SimpleNamespace())
    raw.prepare(batch)
    output = SimpleNamespace(next_token_logits=torch.randn(1, V), auxiliary_device_output=None)
    elsewhere = take(output.next_token_logits, CandidateRows([0], 3)).to_pp_tensors()
    monkeypatch.setattr("kvpolicy.sglang_ext.experiment.raw.take", lambda *_: 1 / 0)
    assert raw.sample(lambda: "ids", output, batch.sampling_info) == "ids"
    assert "were not taken" in caplog.text
    taken = output.auxiliary_device_output
    for name, tensor in taken.to_pp_tensors().items():
        assert (tensor.shape, tensor.dtype) == (elsewhere[name].shape, elsewhere[name].dtype)
    taken.copy_to_host(lambda tensor: tensor).consume(batch, [commit(0)])
    assert request.customized_info is None
