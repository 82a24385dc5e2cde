"""FlashInfer's wrappers with torch in place of its kernels, for machines without a GPU.

Arguments, the copies that a plan makes, and the buffers that a captured run reads are those of
flashinfer 0.7.2; test_flashinfer_stand_in.py compares the arguments with its source if installed. A
wrapper for CUDA graphs reads only its buffers when it runs. The library keeps the split of the work
in the integer workspace; here that holds the planned lengths, and a run fails if the lengths in the
buffers differ. `Tape` replays recorded calls, as a graph does.

Dimensions: H query heads, G KV heads, D head size.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import ClassVar

import torch

_MAGIC = 20240713  # first number of a written schedule


class Tape:
    """Records the calls that run in a `with` block; `replay` repeats them on the same tensors."""

    now: ClassVar[Tape | None] = None

    def __init__(self):
        self.calls = []

    def __enter__(self):
        Tape.now = self
        return self

    def __exit__(self, *_):
        Tape.now = None

    def replay(self):
        for call, made in self.calls:
            for to, value in zip(made, call(), strict=True):
                to.copy_(value)


def _taped(call):
    """Outputs of a call; a tape being recorded writes them again when it is replayed."""
    made = call()
    if Tape.now is not None:
        Tape.now.calls.append((call, made))
    return made


def attend(q, keys, values, scale, first=None):
    """Output [T, H, D] and base-2 log-sum-exp [T, H] of q [T, H, D] over [n, G, D].

    Args:
        first: number of keys that row 0 sees, each further row one more; None: all see all.
    """
    repeat = q.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(repeat, 1) for x in (keys, values))
    logits = torch.einsum("thd,nhd->thn", q.float(), keys) * scale
    if first is not None:
        later = torch.arange(len(keys)) >= first + torch.arange(len(q))[:, None]
        logits = logits.masked_fill(later[:, None], -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    out = torch.einsum("thn,nhd->thd", weights, values)
    return out.to(q.dtype), lse / torch.log(torch.tensor(2.0))


def pages_of(cache, indptr, indices, last, number):
    """Keys or values [n, G, D] of one sequence."""
    begin, end = indptr[number : number + 2].tolist()
    pages = indices[begin:end].long()
    length = (end - begin - 1) * cache.shape[1] + int(last[number]) if end > begin else 0
    return cache[pages].flatten(0, 1)[:length]


def get_seq_lens(indptr, last, page_size):
    return (indptr[1:] - indptr[:-1] - 1).clamp(min=0) * page_size + last


class BatchDecodeWithPagedKVCacheWrapper:
    plans: ClassVar[list] = []  # wrappers that have planned, in order

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ):
        assert kv_layout == "NHD"
        assert float_workspace_buffer.dtype == torch.uint8
        assert jit_args is None
        self._workspace, self._backend = float_workspace_buffer, backend
        self._use_cuda_graph, self._use_tensor_cores = use_cuda_graph, use_tensor_cores
        self._schedule = torch.empty(1 << 16, dtype=torch.uint8)
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer
        self._shape = None
        if use_cuda_graph:
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1

    @property
    def is_cuda_graph_enabled(self):
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        assert int_workspace_buffer.dtype == torch.uint8
        self._workspace, self._schedule = float_workspace_buffer, int_workspace_buffer

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *deprecated_positional_args,
        **kwargs,
    ):
        assert not deprecated_positional_args
        return self._plan_impl(
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            **kwargs,
        )

    def _plan_impl(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        pos_encoding_mode="NONE",
        window_left=-1,
        window_right=0,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        block_tables=None,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
        q_len_per_req=1,
        is_causal=None,
    ):
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        if self._use_cuda_graph:
            assert len(last_page_len) == len(self._paged_kv_last_page_len_buf)
            assert len(indices) <= len(self._paged_kv_indices_buf)
            self._paged_kv_indptr_buf.copy_(indptr)
            self._paged_kv_last_page_len_buf.copy_(last_page_len)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices)
        else:
            self._paged_kv_indptr_buf = indptr
            self._paged_kv_indices_buf = indices
            self._paged_kv_last_page_len_buf = last_page_len
        self._sm_scale = sm_scale
        kinds = (q_data_type, kv_data_type or data_type or q_data_type)
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size, *kinds)
        self._write(indptr, last_page_len, page_size, shape)

    begin_forward = plan

    def _write(self, indptr, last, page_size, shape):
        """Writes the schedule: the planned lengths."""
        if self._use_cuda_graph and self._shape is not None:
            assert shape == self._shape  # captured kernels are those of the first plan
        self._shape = shape
        lengths = get_seq_lens(indptr.cpu(), last.cpu(), page_size).tolist()
        numbers = torch.tensor([_MAGIC, len(lengths), *lengths], dtype=torch.int32)
        written = numbers.view(torch.uint8)
        assert len(written) <= len(self._schedule), "the integer workspace is too small"
        self._schedule[: len(written)] = written
        self.plans.append(self)

    def _planned(self):
        """Lengths of the schedule."""
        numbers = self._schedule[: len(self._schedule) // 4 * 4].view(torch.int32)
        assert numbers[0] == _MAGIC, "nothing is planned"
        return numbers[2 : 2 + int(numbers[1])].tolist()

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        q_len_per_req=None,
        skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):
        assert not args
        keys, values = paged_kv_cache
        if keys.dim() == 3:  # SGLang's pool, with one token per page
            keys, values = keys.unsqueeze(1), values.unsqueeze(1)
        heads, kv_heads, size, page, q_type, kv_type = self._shape
        assert keys.shape[1:] == values.shape[1:] == (page, kv_heads, size)
        assert keys.stride() == values.stride()
        assert q.shape == (len(self._paged_kv_last_page_len_buf), heads, size)
        assert (q.dtype, keys.dtype) == (q_type, kv_type)
        scale = size**-0.5 if self._sm_scale is None else self._sm_scale
        scale *= (1.0 if q_scale is None else q_scale) * (1.0 if k_scale is None else k_scale)

        def call():
            indptr, indices = self._paged_kv_indptr_buf, self._paged_kv_indices_buf
            last = self._paged_kv_last_page_len_buf
            assert self._planned() == get_seq_lens(indptr, last, page).tolist(), "not planned"
            parts = [
                attend(
                    q[i : i + 1],
                    *(pages_of(x, indptr, indices, last, i) for x in (keys, values)),
                    scale,
                )
                for i in range(len(q))
            ]
            made, sums = (torch.cat(each) for each in zip(*parts, strict=True))
            return (made if v_scale is None else made * v_scale), sums

        made, sums = _taped(call)
        return (made, sums) if return_lse else made

    def forward(
        self,
        q,
        paged_kv_cache,
        pos_encoding_mode="NONE",
        q_scale=None,
        k_scale=None,
        v_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
    ):
        self._sm_scale = sm_scale
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

    def forward_return_lse(
        self,
        q,
        paged_kv_cache,
        pos_encoding_mode="NONE",
        q_scale=None,
        k_scale=None,
        v_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
    ):
        self._sm_scale = sm_scale
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return self.run(q, paged_kv_cache, return_lse=True, **scales)


def fast_decode_plan(
    self,
    indptr,
    indices,
    last_page_len,
    num_qo_heads,
    num_kv_heads,
    head_dim,
    page_size,
    pos_encoding_mode="NONE",
    window_left=-1,
    logits_soft_cap=None,
    q_data_type=None,
    kv_data_type=None,
    data_type=None,
    sm_scale=None,
    rope_scale=None,
    rope_theta=None,
    non_blocking=True,
    fixed_split_size=None,
    disable_split_kv=False,
    q_len_per_req=1,
    global_override_indptr_cpu=None,
):
    """As `plan`, but copies nothing into a wrapper for graphs: callers have written its buffers."""
    if self._use_cuda_graph:
        assert indptr.data_ptr() == self._paged_kv_indptr_buf.data_ptr()
        assert indices.data_ptr() == self._paged_kv_indices_buf.data_ptr()
    else:
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf = indptr, indices
        self._paged_kv_last_page_len_buf = last_page_len
    on_host = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu
    shape = (
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        q_data_type,
        kv_data_type or data_type,
    )
    self._write(on_host, last_page_len, page_size, shape)


class BatchPrefillWithRaggedKVCacheWrapper:
    """Attention among the forward's own tokens; only the part that SGLang uses."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend="auto"):
        assert kv_layout == "NHD"

    def begin_forward(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, *, q_data_type
    ):
        self._starts = qo_indptr.tolist()
        if len(self._starts) == 1:
            raise RuntimeError("a plan for no request")

    def forward_return_lse(
        self, q, k, v, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False,
        window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):  # fmt: skip
        assert causal
        assert len(q) == self._starts[-1], f"{len(q)} rows, planned were {self._starts[-1]}"
        rows = [slice(*both) for both in zip(self._starts, self._starts[1:], strict=False)]
        parts = [attend(q[r], k[r], v[r], sm_scale, 1) for r in rows]
        return tuple(map(torch.cat, zip(*parts, strict=True)))

    def forward(self, *arguments, **options):
        return self.forward_return_lse(*arguments, **options)[0]


class BatchPrefillWithPagedKVCacheWrapper:
    """Prefill attention over the pool; only the part that SGLang uses."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend="auto"):
        assert kv_layout == "NHD"
        self.is_cuda_graph_enabled = False

    def begin_forward(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, *, q_data_type, kv_data_type, custom_mask,
        non_blocking, fixed_split_size, prefix_len_ptr, token_pos_in_items_ptr,
        token_pos_in_items_len, max_item_len_ptr,
    ):  # fmt: skip
        assert page_size == 1
        self._starts = qo_indptr.tolist()
        self._lists = paged_kv_indptr.clone(), paged_kv_indices, paged_kv_last_page_len

    def forward_return_lse(
        self, q, paged_kv_cache, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, k_scale=None, v_scale=None, window_left=-1,
        logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):  # fmt: skip
        parts = []
        for i, rows in enumerate(zip(self._starts, self._starts[1:], strict=False)):
            own = q[slice(*rows)]
            keys, values = (pages_of(x[:, None], *self._lists, i) for x in paged_kv_cache)
            first = len(keys) - len(own) + 1 if causal else None
            parts.append(attend(own, keys, values, sm_scale * (k_scale or 1.0), first))
        out, lse = map(torch.cat, zip(*parts, strict=True))
        return out * (v_scale or 1.0), lse

    def forward(self, *arguments, **options):
        return self.forward_return_lse(*arguments, **options)[0]


def merge_state(v_a, s_a, v_b, s_b):
    assert v_a.is_contiguous()
    assert v_b.is_contiguous()
    assert v_a.shape == v_b.shape
    assert v_a.dtype == v_b.dtype
    assert s_a.shape == s_b.shape == v_a.shape[:2]
    assert s_a.dtype == s_b.dtype == torch.float32

    def call():
        total = torch.logaddexp2(s_a, s_b)
        a, b = ((s - total).nan_to_num(nan=-torch.inf).exp2()[..., None] for s in (s_a, s_b))
        return (v_a * a + v_b * b).to(v_a.dtype), total

    return _taped(call)


NAMES = (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    fast_decode_plan,
    merge_state,
)


def modules() -> dict[str, ModuleType]:
    """`flashinfer` and `flashinfer.cascade`, for `sys.modules`."""
    whole = ModuleType("flashinfer")
    whole.__spec__ = ModuleSpec("flashinfer", None)
    for each in NAMES:
        setattr(whole, each.__name__, each)
    cascade = ModuleType("flashinfer.cascade")
    cascade.merge_state = merge_state
    return {"flashinfer": whole, "flashinfer.cascade": cascade}


def install() -> None:
    """Installs the stand-in, also in SGLang's backend, which on a CPU ignores the package."""
    sys.modules.update(modules())
    from sglang.srt.layers.attention import flashinfer_backend

    for each in NAMES:
        setattr(flashinfer_backend, each.__name__, each)
    flashinfer_backend._safe_merge_state = merge_state
    flashinfer_backend.torch = _OnCpu()


class _OnCpu:
    """`torch` for a module that always allocates on `cuda`; allocates on the CPU."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *sizes, **options):
        return torch.empty(*sizes, **{**options, "device": "cpu"})

    def zeros(self, *sizes, **options):
        return torch.zeros(*sizes, **{**options, "device": "cpu"})
