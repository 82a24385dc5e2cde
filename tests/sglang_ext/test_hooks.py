"""Every SGLang name that the plugin touches exists, with the arguments that it uses."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")

from kvpolicy.sglang_ext.face import compat, refusals
from kvpolicy.sglang_ext.face.asked import ASSIGNED
from kvpolicy.sglang_ext.face.errors import Refused

SIGNATURES = {
    compat.RUNNING_NEEDS: ["self", "req"],
    compat.ADD_CLI_ARGS: ["parser"],
    compat.BEAMS: ["self", "req", "recv_req"],
    compat.MANAGER: ["self", "server_args", "port_args"],
    compat.FROM_CLI_ARGS: ["cls", "args"],
    compat.PUBLISH: ["server_args", "role"],
    compat.META_INFO: ["self", "meta_info", "state", "customized_info", "index", "finish_reason"],
    compat.BATCH_OUTPUT: ["self", "recv_obj"],
    compat.ABORTED: ["self", "recv_obj"],
    compat.GENERATE: ["self", "obj", "request"],
    compat.CRASH_DUMP: ["self"],
    compat.FRONT_STATE: ["self"],
    compat.LOG_REQUEST[0]: ["self", "obj", "tokenizer", "request"],
    compat.LOG_REQUEST[1]: ["self", "obj", "out", "request"],
    compat.EXPORT_REQUEST: ["self", "obj", "out_dict"],
    compat.ABORT_REQUEST: ["self", "rid", "abort_all"],
    compat.RELEASE_MEMORY: ["self", "obj"],
    compat.RELEASE_POOL: ["self", "recv_req"],
    compat.RESUME_POOL: ["self", "recv_req"],
    compat.RESUME_MEMORY: ["self", "obj"],
    **{target: ["self"] for target in (*compat.WANT_IDLE, *compat.CHANGE_WEIGHTS)},
    compat.SIZE_POOL: ["self", "budget_bytes", "cap_tokens"],
    compat.CREATE_BUFFERS: ["self"],
    compat.ALLOC_MEMORY_POOL: ["self"],
    compat.INIT_MODEL_WORKER: ["self"],
    compat.ADD_REQUEST: ["self", "req"],
    compat.NEW_PREFILL: ["self", "running_batch"],
    compat.MAX_PREFIX_LEN: ["self", "input_len"],
    compat.RESET_FOR_RETRACT: ["self"],
    compat.PREPARE_FOR_EXTEND: ["self"],
    compat.SLOT_RESERVE: ["self", "req", "extend_input_len"],
    compat.ADD_ONE: ["self", "req", "has_chunked_req"],
    compat.ADD_CHUNKED: ["self", "req"],
    compat.PREFILL_STATS: ["self", "batch", "prefill_stats"],
    compat.FORWARD: ["self", "batch"],
    compat.PROCESS_RESULT: ["self", "batch", "result"],
    compat.SAMPLE_LOGITS: ["self", "logits_output", "forward_batch"],
    compat.SAMPLE: ["self", "logits_output", "sampling_info"],
    compat.MATCH_PREFIX: ["self", "params"],
    compat.PREFETCH: ["self", "req", "storage_hit_end"],
    compat.QUEUED_LIMIT: ["self", "recv_req"],
    compat.TOUCH_WAITING: ["self", "policy", "waiting_queue"],
    compat.TIME_STATS: ["self"],
    compat.LOGPROBS: [
        "self",
        "logprobs",
        "top_logprobs_nums",
        "token_ids_logprobs",
        "batch_next_token_ids",
    ],
    compat.END_OUTPUT: ["self", "new_accepted_len"],
    compat.INTERNAL_STATE: ["self", "recv_req"],
    compat.CONTROL: ["self", "recv_req"],
    compat.CHECKPOINT: ["req", "tree_cache"],
    compat.RELEASE: ["req", "tree_cache"],
    compat.OWNED: ["self"],
    compat.POSITIONS: ["cls", "batch", "model_runner"],
    compat.CAN_RUN_GRAPH: ["self", "forward_batch"],
    compat.GRAPH_VARIANTS: ["hf_config"],
    compat.CREATE_ROWS: ["self", "size", "max_context_len"],
    compat.POOL_STATS: ["self"],
    compat.UNCACHED_SIZES: ["self"],
}


def test_the_installed_version_was_checked():
    refusals.check_version()


def test_another_version_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(compat, "installed_version", lambda: "0.9.9")
    with pytest.raises(
        Refused, match=r"^--kv-policy works with SGLang .*, but 0\.9\.9 is installed\.$"
    ):
        refusals.check_version()


def test_every_target_is_listed():
    targets = {v for v in vars(compat).values() if isinstance(v, str) and v.startswith("sglang.")}
    targets |= {*compat.WANT_IDLE, *compat.CHANGE_WEIGHTS, *compat.LOG_REQUEST}
    owners = {compat.SCHEDULER_MODULE, compat.TOKENIZER_MODULE, compat.HTTP_MODULE, compat.CONTROLS}
    assert targets - owners == set(SIGNATURES)


@pytest.mark.parametrize("target", SIGNATURES)
def test_target_has_the_arguments(target):
    path, name = target.rsplit(".", 1)
    owner = pkgutil.resolve_name(path)
    raw = inspect.getattr_static(owner, name)
    function = getattr(raw, "__func__", raw)
    parameters = list(inspect.signature(function).parameters)
    wanted = SIGNATURES[target]
    assert parameters[: len(wanted)] == wanted


def test_attributes_that_are_read_or_written_exist():
    """Otherwise a rename would show only in the middle of a request."""
    batch = importlib.import_module("sglang.srt.managers.schedule_batch")
    source = inspect.getsource(batch.Req.__init__)
    for name in (
        "origin_input_ids", "sampling_params", "multimodal_inputs", "input_embeds", "session",
        "positional_embed_overrides", "beam_group", "to_finish", "prefix_len", "extend_end",
        "lock", "skip_radix_cache_insert", "customized_info", "output_ids", "return_logprob",
        "logprob_start_len", "return_hidden_states", "full_untruncated_fill_ids",
        "send_token_offset", "vocab_size",
    ):  # fmt: skip
        assert f"self.{name}" in source, name
    assert "decoding_reqs" in batch.ScheduleBatch.__dataclass_fields__
    requests = importlib.import_module("sglang.srt.managers.io_struct")
    assert "routed_dp_rank" in requests.GenerateReqInput.__dataclass_fields__
    manager = importlib.import_module(compat.TOKENIZER_MODULE).TokenizerManager
    for name in ("preferred_sampling_params", "server_args"):
        assert f"self.{name} = " in inspect.getsource(manager), name
    if compat.has_step_outputs():
        runner = importlib.import_module("sglang.srt.model_executor.model_runner").ModelRunner
        assert hasattr(runner, "sampling_observer")
    slots = {"req_pool_idx", "cache_protected_len", "kv_committed_len", "kv_allocated_len"}
    assert slots <= set(batch.ReqKvInfo.__slots__)
    adder = importlib.import_module("sglang.srt.managers.schedule_policy").PrefillAdder
    source = inspect.getsource(adder.__init__)
    for name in (
        "memory_budget", "rem_chunk_tokens", "rem_input_tokens", "new_chunked_req",
        "can_run_list", "per_req_token_overhead", "page_size", "log_hit_tokens",
        "log_input_tokens",
    ):  # fmt: skip
        assert f"self.{name}" in source, name


def test_flashinfers_backend_has_what_plans_and_readers_touch():
    module = importlib.import_module("sglang.srt.layers.attention.flashinfer_backend")
    begin = inspect.signature(module.FlashInferIndicesUpdaterDecode.call_begin_forward)
    first = ["self", "wrapper", "paged_kernel_lens", "paged_kernel_lens_sum", "kv_indptr"]
    first += ["kv_start_idx", "spec_info", "seq_lens_cpu"]
    assert list(begin.parameters)[:8] == first
    assert begin.parameters["req_pool_indices"].kind is inspect.Parameter.KEYWORD_ONLY
    backend = module.FlashInferAttnBackend
    assert list(inspect.signature(backend._create_decode_wrappers).parameters) == [
        "self", "bs", "num_tokens",
    ]  # fmt: skip
    source = inspect.getsource(backend.__init__)
    for name in ("workspace_buffer", "decode_use_tensor_cores", "indices_updater_decode"):
        assert f"self.{name} = " in source
    assert "decode_wrapper.forward(" in inspect.getsource(backend.forward_decode)


def test_refused_options_exist():
    from sglang.srt.server_args import ServerArgs

    fields = set(inspect.signature(ServerArgs).parameters)
    newer = {"enable_nvidia_megakernel", "enable_amd_monokernel"}  # than 0.5.22
    asked_for = {name for name, _, _ in refusals.OPTIONS} | {"kv_cache_dtype"}
    assert asked_for - fields == (newer if compat.installed_version() == "0.5.22" else set())


def test_the_plugin_is_light():
    """SGLang loads it before it parses its command line: no torch, no SGLang, no scheduler."""
    code = (
        "import sys, kvpolicy.sglang_ext.plugin as p; "
        "sys.exit(' '.join(m for m in ('torch', 'numpy', 'sglang') if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "")


def request(*, scores):
    custom = {ASSIGNED: {"scores": scores}}
    return SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom))


@pytest.mark.parametrize("scores", [False, True])
def test_internal_requests_fetch_nothing_from_storage_and_are_not_logged(scores):
    from kvpolicy.sglang_ext import hooks

    fetched, logged, req = [], [], request(scores=scores)
    hooks._around_prefetch(lambda scheduler, own: fetched.append(own), None, req)
    hooks._around_time_stats(logged.append, req)
    assert fetched == logged == ([] if scores else [req])


def test_internal_requests_leave_the_queue_and_the_cache_to_others():
    from kvpolicy.sglang_ext import hooks

    def full(scheduler, req):
        return len(scheduler.waiting_queue) + 1 > scheduler.max_queued_requests

    own, internal, touched = request(scores=False), request(scores=True), []
    queue = SimpleNamespace(max_queued_requests=2, waiting_queue=[own, internal, internal])
    assert not hooks._around_queued_limit(full, queue, own)
    queue.waiting_queue.append(own)
    assert hooks._around_queued_limit(full, queue, own)
    assert not hooks._around_queued_limit(full, queue, internal)
    assert queue.max_queued_requests == 2
    queue.max_queued_requests = None  # no limit
    assert not hooks._around_queued_limit(lambda *_: False, queue, own)
    hooks._around_touch_waiting(
        lambda *given: touched.append(given), "policy", "lru", [internal, own]
    )
    assert touched == [("policy", "lru", [own])]
