"""Kernels compile for an H200 without a GPU, fit into it, and do not wait for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvpolicy.kernels.launch.occupancy import Processor

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
# What a block may use on a Hopper GPU.
SHARED = 227 << 10
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def compiled():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", HERE / "sm90_cases.py"]
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent)])
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


def cases() -> list[str]:
    text = (HERE / "sm90_cases.py").read_text(encoding="utf-8")
    body = text[text.index("CASES:") : text.index("def main")]
    return [line.split('"')[1] for line in body.splitlines() if line.startswith('    "')]


@pytest.mark.parametrize("case", cases())
def test_fits(compiled, case):
    kernels = compiled[case]
    assert kernels, "nothing was launched"
    for kernel in kernels:
        assert kernel["shared"] <= SHARED, kernel
        assert kernel["spilled"] == 0, kernel


@pytest.mark.parametrize("case", ["decode attention", "snapkv", "h2o", "merging"])
def test_uses_tensor_cores(compiled, case):
    assert any(kernel["tensor_cores"] for kernel in compiled[case])


# What a processor holds at once at least of a case's kernel.
PROGRAMS = [
    ("h2o", "columns", 2),
    ("d2o", "columns", 2),
    ("decode attention", "_decode", 3),
    ("decode attention, layers in pairs", "_decode", 2),
    ("decode attention, layers in pairs, no groups", "_decode", 3),
    ("decode attention, layers in pairs, groups of 7", "_decode", 3),
    ("attention over lists, 32 query rows", "_paged", 2),
    ("attention over lists, one KV head", "_paged", 2),
    ("attention over lists with lengths, one KV head", "_paged", 2),
    ("fold in place", "_compact_in_place", 8),
    ("fold in place, 16 layers", "_compact_in_place", 8),
]


@pytest.mark.parametrize(("case", "name", "programs"), PROGRAMS)
def test_so_many_programs_fit_a_processor(compiled, case, name, programs):
    hopper = Processor(1 << 16, 228 << 10, warps=64, programs=32)
    found = [kernel for kernel in compiled[case] if kernel["name"] == name]
    assert found
    for kernel in found:
        held = hopper.programs_at_once(kernel["registers"], kernel["shared"], kernel["warps"])
        assert held >= programs, kernel


@pytest.mark.parametrize("case", ["decode attention", "decode attention, layers in pairs"])
def test_the_last_program_sees_what_the_others_have_stored(compiled, case):
    """Two counters, of sixteen programs and of these groups, each between barriers."""
    [kernel] = compiled[case]
    assert (kernel["counts"], kernel["ordered"]) == (2, 2)
