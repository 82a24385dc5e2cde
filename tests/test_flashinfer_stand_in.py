"""The stand-in for FlashInfer compared with flashinfer's source, if installed.

The package cannot be imported without CUDA. Its wrapper for decode attention is Python: it is read
from the source and run, with torch in place of the compiled module that it calls.
"""

import ast
import importlib.util
import inspect
import math
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import flashinfer_stand_in as stand_in
import pytest
import torch

sys.path.insert(0, str(Path(__file__).with_name("kernels")))

DECODE = "BatchDecodeWithPagedKVCacheWrapper"


def source(name):
    found = None
    with suppress(ValueError):  # a stand-in without a place
        found = importlib.util.find_spec("flashinfer")
    if found is None or found.origin is None:
        pytest.skip("flashinfer-python is not installed: its arguments cannot be looked up")
    return ast.parse((Path(found.origin).with_name(name)).read_text(encoding="utf-8"))


def functions(body):
    """The last function of each name, as those before it are overloads."""
    return {each.name: each for each in body if isinstance(each, ast.FunctionDef)}


def parameters(function):
    """Names of parameters, and of those with a default."""
    spec = function.args
    every = [*spec.posonlyargs, *spec.args]
    with_default = [each.arg for each in every[len(every) - len(spec.defaults) :]]
    for each, value in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        with_default += [each.arg] if value is not None else []
    stars = [each.arg for each in (spec.vararg, spec.kwarg) if each is not None]
    return [each.arg for each in (*every, *spec.kwonlyargs)] + stars, with_default


def of_stand_in(function):
    found = inspect.signature(function).parameters
    names = sorted(found, key=lambda name: found[name].kind in (2, 4))
    return names, [n for n, each in found.items() if each.default is not each.empty]


@pytest.mark.parametrize(
    "method",
    ["__init__", "reset_workspace_buffer", "plan", "_plan_impl", "run", "forward",
     "forward_return_lse"],
)  # fmt: skip
def test_arguments_of_the_decode_wrapper(method):
    [theirs] = [x for x in source("decode.py").body if getattr(x, "name", None) == DECODE]
    wanted, defaults = parameters(functions(theirs.body)[method])
    ours = getattr(stand_in.BatchDecodeWithPagedKVCacheWrapper, method)
    names, with_default = of_stand_in(ours)
    assert sorted(names) == sorted(wanted)
    assert [each for each in names if each not in ("args", "kwargs")][:8] == wanted[:8]
    assert sorted(with_default) == sorted(defaults)


@pytest.mark.parametrize(
    ("name", "file"), [("fast_decode_plan", "decode.py"), ("merge_state", "cascade.py")]
)
def test_arguments_of_functions(name, file):
    assert of_stand_in(getattr(stand_in, name)) == parameters(functions(source(file).body)[name])


@pytest.mark.parametrize("kind", ["Paged", "Ragged"])
def test_arguments_of_the_prefill_wrappers(kind):
    """Those that SGLang passes."""
    name = f"BatchPrefillWith{kind}KVCacheWrapper"
    [theirs] = [x for x in source("prefill.py").body if getattr(x, "name", None) == name]
    methods = functions(theirs.body)
    for own, method in (("begin_forward", "plan"), ("forward_return_lse",) * 2):
        names, _ = of_stand_in(getattr(getattr(stand_in, name), own))
        assert set(names) <= set(parameters(methods[method])[0])


class Module:
    """Replaces FlashInfer's compiled module: the plan holds lengths, torch computes attention."""

    def __init__(self, simple):
        self.simple = simple

    def plan(self, floats, schedule, pinned, *rest):
        indptr, page = (rest[0], rest[4]) if self.simple else (rest[1], rest[7])
        numbers = indptr.diff().int()
        schedule[: numbers.nbytes] = numbers.view(torch.uint8)
        assert pinned.shape == schedule.shape
        return [page, len(numbers)]

    def run(self, floats, schedule, plan, q, keys, values, *rest):
        if not self.simple:
            qo, *rest = rest
            assert torch.equal(qo.diff(), torch.ones(len(q), dtype=torch.int32))
        indptr, indices, last, out, lse, *rest = rest
        scale = rest[5] if self.simple else rest[11]
        assert torch.equal(schedule[: 4 * plan[1]].view(torch.int32), indptr.diff())
        assert keys.shape[1] == plan[0]
        for i in range(len(q)):
            own = [stand_in.pages_of(x, indptr, indices, last, i) for x in (keys, values)]
            made, sums = stand_in.attend(q[i : i + 1], *own, scale)
            out[i], lse[i] = made[0], sums[0]

    paged_run = run


def _decorators(node):
    return " ".join(ast.unparse(each) for each in getattr(node, "decorator_list", ()))


def real_wrapper():
    """FlashInfer's wrapper class, made from its source."""
    [theirs] = [x for x in source("decode.py").body if getattr(x, "name", None) == DECODE]
    theirs.body = [each for each in theirs.body if "overload" not in _decorators(each)]
    for each in theirs.body:
        if "flashinfer_api" in _decorators(each):  # which traces calls
            each.decorator_list = []

    class Torch:
        def __getattr__(self, name):
            return getattr(torch, name)

        def empty(self, *sizes, pin_memory=False, **options):
            return torch.empty(*sizes, **options)

    enum = {"NONE": 0, "NHD": 0}
    names = {
        "torch": Torch(), "math": math, "functools": __import__("functools"),
        "_check_workspace_buffer_alignment": lambda *_: None, "_check_kv_layout": lambda *_: None,
        "_check_pos_encoding_mode": lambda *_: None,
        "_check_cached_qkv_data_type": lambda q, k, of_q, of_k: None,
        "_unpack_paged_kv_cache": lambda cache, layout: cache,
        "canonicalize_torch_dtype": lambda kind: kind,
        "get_compute_capability": lambda device: (9, 0),
        "_get_range_buf": lambda n, device: torch.arange(n, dtype=torch.int32),
        "get_seq_lens": stand_in.get_seq_lens, "is_float8": lambda x: x.dtype.itemsize == 1,
        "get_batch_prefill_module": lambda *_: Module(simple=False),
        "get_batch_decode_module": lambda *_: Module(simple=True),
        "PosEncodingMode": {"NONE": SimpleNamespace(value=0)},
        "TensorLayout": {"NHD": SimpleNamespace(value=enum["NHD"])},
        "MaskMode": SimpleNamespace(
            CAUSAL=SimpleNamespace(value=1), NON_CAUSAL=SimpleNamespace(value=0)
        ),
        "device_support_pdl": lambda device: False,
        "_get_cache_alibi_slopes_buf": lambda *_: None,
        "Optional": dict, "Union": dict, "Any": None, "List": dict, "Tuple": dict, "Literal": dict,
        "CudnnDecodeGraph": None,
        "_BATCH_DECODE_PLAN_LEGACY_POS_ARGS": (),
    }  # fmt: skip
    module = ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), theirs], [])
    exec(compile(ast.fix_missing_locations(module), "decode.py", "exec"), names)
    return names[DECODE]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("tensor_cores", [False, True])
def test_the_wrapper_of_the_package_reads_private_pages(monkeypatch, captured, tensor_cores):
    """With its own checks, copies and order of arguments, between our plans and the kernels."""
    from decode_cases import assert_exact
    from kvpolicy.kernels.attention.private_attention_flashinfer import PrivateAttention
    from test_decode_attention import MIXED, case
    from test_private_attention import plan, read

    package = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=real_wrapper(), merge_state=stand_in.merge_state
    )
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    given = case(MIXED, heads=4, kv_heads=2)
    workspace = torch.zeros(64, dtype=torch.uint8)
    attention = PrivateAttention(
        given.storage, 4, given.q.dtype, workspace, tensor_cores=tensor_cores
    )
    attention.reserve(len(MIXED) + 1)
    for order in (torch.arange(len(MIXED)), torch.arange(len(MIXED)).flip(0)):
        size = len(MIXED) + 1 if captured else None
        plan(attention, given, order, captured=size)
        got = read(attention, given, order, padding=1 if captured else 0)
        back = torch.empty_like(got)
        back[order] = got
        assert_exact(back, given)
