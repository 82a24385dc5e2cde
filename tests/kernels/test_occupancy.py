"""Programs of a kernel that run at once: by CUDA's rules, and for launched kernels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kvpolicy.kernels.attention import paged_attention_tiles_triton as attention
from kvpolicy.kernels.launch import occupancy
from kvpolicy.kernels.launch.occupancy import Processor

CUDA = torch.device("cuda")
# As the drivers report them: compute capability, KiB of shared memory, threads of a processor.
GPUS = {80: (164, 2048), 86: (100, 1536), 89: (100, 1536), 90: (228, 2048), 100: (228, 2048)}


def properties(capability: int) -> SimpleNamespace:
    kib, threads = GPUS[capability]
    return SimpleNamespace(
        major=capability // 10, minor=capability % 10, multi_processor_count=132,
        regs_per_multiprocessor=1 << 16, shared_memory_per_multiprocessor=kib << 10,
        max_threads_per_multi_processor=threads,
    )  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    """Makes torch report a GPU of a capability."""

    def report(capability: int) -> Processor:
        occupancy.processor.cache_clear()
        attention.processors.cache_clear()
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: properties(capability)
        )
        return occupancy.processor(CUDA)

    monkeypatch.setattr(attention, "_PROGRAMS_AT_ONCE", {})
    monkeypatch.setattr(attention, "_SEEN", set())
    yield report
    occupancy.processor.cache_clear()
    attention.processors.cache_clear()


@pytest.mark.parametrize(
    ("capability", "registers", "shared", "warps", "held"),
    [
        # Registers, 256 of a warp at a time, from quarters of 16,384.
        (80, 32, 0, 8, 8),  # 8 x 8 warps: all that there are
        (80, 33, 0, 8, 6),  # 40 registers are handed out: 12 warps of a quarter
        (80, 64, 0, 8, 4),
        (90, 168, 0, 4, 3),  # 3 warps of a quarter
        (90, 169, 0, 4, 2),  # 176 are handed out: 2
        (90, 255, 0, 4, 2),
        (90, 255, 0, 8, 1),
        (90, 128, 0, 1, 16),
        # Shared memory, 1 KiB of each program for the system.
        (80, 32, (163 << 10), 4, 1),
        (80, 32, (81 << 10), 4, 2),
        (80, 32, (81 << 10) + 1, 4, 1),
        (90, 32, (113 << 10), 4, 2),
        (90, 32, (75 << 10), 4, 3),
        (90, 32, (75 << 10) + 1, 4, 2),
        (100, 32, (227 << 10), 4, 1),
        (89, 32, (49 << 10), 4, 2),
        (90, 32, (228 << 10), 4, 0),  # more than a program may use
        # Programs and warps at once.
        (80, 16, 0, 1, 32), (90, 16, 0, 1, 32), (100, 16, 0, 1, 32), (86, 16, 0, 1, 16),
        (89, 16, 0, 1, 24), (89, 16, 0, 4, 12),
    ],
)  # fmt: skip
def test_rules(gpu, capability, registers, shared, warps, held):
    assert gpu(capability).programs_at_once(registers, shared, warps) == held


def compiled(registers: int, shared: int, warps: int, name: str = "a") -> SimpleNamespace:
    metadata = SimpleNamespace(shared=shared, num_warps=warps)
    return SimpleNamespace(n_regs=registers, metadata=metadata, hash=name)


def test_what_was_not_loaded_says_nothing(gpu):
    gpu(90)
    assert occupancy.programs_at_once(CUDA, None) is None
    assert occupancy.programs_at_once(CUDA, SimpleNamespace(metadata=None)) is None
    assert occupancy.programs_at_once(CUDA, compiled(168, 72 << 10, 4)) == 3


CALL = ("decode_attention", CUDA, torch.bfloat16, 128, 16)


def test_lists_are_cut_for_as_many_as_the_compiled_kernel_allows(gpu):
    gpu(90)
    tile = attention.tile_of(128, torch.bfloat16, 16)
    assert attention.programs_at_once(*CALL, tile) == 3
    assert attention.tile_and_cut(*CALL, 8)[1] == attention.cut(8, CUDA, 3)
    attention.launched(*CALL, tile, compiled(170, 70 << 10, 4))
    assert attention.programs_at_once(*CALL, tile) == 2
    cut = attention.tile_and_cut(*CALL, 8)[1]
    assert cut == attention.cut(8, CUDA, 2) != attention.cut(8, CUDA, 3)
    # Another variant of it, of which more would fit, changes nothing; another tile's does not.
    attention.launched(*CALL, tile, compiled(90, 70 << 10, 4, "b"))
    assert attention.programs_at_once(*CALL, tile) == 2
    other = attention.SplitTile(32, 4, 5)
    attention.launched(*CALL, other, compiled(255, 40 << 10, 8, "c"))
    assert [attention.programs_at_once(*CALL, each) for each in (other, tile)] == [1, 2]
    # What is measured, or asked for, decides before that.
    assert attention.tile_and_cut(*CALL, 8, programs=4)[1] == attention.cut(8, CUDA, 4)


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("rows", [16, 32])
def test_what_is_allocated_before_suffices(gpu, capability, size, rows):
    """A kernel that fits more programs than assumed is still divided for the assumed number."""
    gpu(capability)
    call = ("decode_attention", CUDA, torch.bfloat16, size, rows)
    tile = attention.tile_of(size, torch.bfloat16, rows)
    supposed = attention.programs_at_once(*call, tile)
    before = [attention.tile_and_cut(*call, lists)[1].splits for lists in range(1, 3000, 37)]
    for registers in (16, 128, 255):
        attention.launched(*call, tile, compiled(registers, 0, tile.warps, str(registers)))
        assert 1 <= attention.programs_at_once(*call, tile) <= supposed
        after = [attention.tile_and_cut(*call, lists)[1].splits for lists in range(1, 3000, 37)]
        assert all(now <= then for now, then in zip(after, before, strict=True))


def test_without_a_gpu():
    assert attention.programs_at_once("decode_attention", torch.device("cpu"), *CALL[2:], None) == 1
