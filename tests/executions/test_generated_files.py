"""Generated sources as files: their place, when they are equal, and that they compile."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.execute.planned.compiled import Compiled
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.tools.show import sources
from kvpolicy.kernels.scoring import generated
from shipped_policies import shipped_program

LLAMA = ModelShape(32, 32, 8, 128)
HARNESS = Path(__file__).parents[1] / "kernels"
# What a block may use on a Hopper GPU.
SHARED = 227 << 10


def test_a_file_is_named_by_its_text(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = "MADE = 5\n"
    first = generated.module_of("a-test", source)
    assert first.MADE == 5
    (path,) = (tmp_path / "kvpolicy" / "generated").glob("*.py")
    assert path.name.startswith("a_test_")
    assert path.read_text() == source
    before = path.stat().st_mtime_ns
    assert generated.module_of("a-test", source).MADE == 5
    assert path.stat().st_mtime_ns == before  # read, not written again
    assert generated.module_of("a-test", source.replace("5", "6")).MADE == 6
    assert len(list(path.parent.glob("*.py"))) == 2


def test_a_damaged_file_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = "MADE = 7\n"
    generated.module_of("a-test", source)
    (path,) = (tmp_path / "kvpolicy" / "generated").glob("*.py")
    path.write_text("def run(:")
    assert generated.module_of("a-test", source).MADE == 7
    assert path.read_text() == source


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert generated.module_of("a-test", "MADE = 8\n").MADE == 8
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")  # then it is ~/.cache
    assert generated.cache_folder() == Path.home() / ".cache" / "kvpolicy" / "generated"


def test_writers_at_once(tmp_path):
    source = "MADE = 9\n" + "# padding\n" * 5000
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: generated.written_in(tmp_path, "a.py", source), range(64)))
    assert paths == {tmp_path / "a.py"}
    assert [path.name for path in tmp_path.iterdir()] == ["a.py"]
    assert (tmp_path / "a.py").read_text() == source


def texts(name: str, shape: ModelShape = LLAMA, **given: str) -> list[str]:
    """Sources of the prefill, then those of decode steps."""
    return list(sources(bind(shipped_program(name), shape, given)))


def _continuous() -> list[tuple[str, str]]:
    """Policies and those of their parameters that may have any number within a range."""
    return [
        (name, param.name)
        for name in shipped()
        for param in shipped_program(name).params.values()
        if param.kind == "number" and not (param.choices or param.whole or param.odd)
        if param.unit not in ("tokens", "layers")
    ]


@pytest.mark.parametrize(("name", "parameter"), _continuous())
def test_a_parameter_with_any_value_has_no_text_for_each(name, parameter):
    """Clients may set such parameters; a compiled kernel stays as long as the process."""
    param, rng = shipped_program(name).params[parameter], random.Random(5)
    low, high = (
        float(bound if bound is not None else other)
        for bound, other in ((param.minimum, 0), (param.maximum, 1))
    )
    found = set()
    for _ in range(8):
        with contextlib.suppress(PolicyError):  # `require` refuses a part of the range
            found.add(tuple(texts(name, **{parameter: f"{rng.uniform(low, high):.9f}"})))
    assert len(found) <= 1


def test_one_text_serves_all_lengths_and_layers():
    """Only parameters and sizes of the model decide the text; numbers of a prompt are arguments."""
    assert texts("snapkv") == texts("snapkv", capacity="77", rate="0.5")
    assert texts("snapkv") != texts("snapkv", window="16")
    assert texts("snapkv") == texts("snapkv", ModelShape(4, 16, 4, 128))
    assert texts("snapkv") != texts("snapkv", ModelShape(32, 32, 8, 64))
    text, *_ = texts("pyramidinfer")
    assert "token < tokens - count" in text


def test_the_text_is_for_readers():
    """Names of the policy's lets, and its expressions as comments."""
    text, steps = texts("cake")
    assert "# mean[query](seen)" in text
    assert "# shift" in text or "shift_out" in text
    assert "(seen * log(seen))" in text
    assert "score = " in text
    assert "# score: mean[group](avgpool(sum[query](attn(new)) where not recent(32), 5))" in steps
    assert "token_rank <= own_entries - 32" in steps
    assert max(map(len, f"{text}{steps}".splitlines())) < 170


def test_reductions_of_one_window_share_a_pass():
    bound = bind(shipped_program("cake"), LLAMA, {})
    (bundle,) = Compiled(bound).fusions[0].bundles
    assert len(bundle.reductions) == 3
    text, _ = texts("cake")
    # One function for all of them, and one probability.
    assert text.count("def columns_tile(") == 1
    assert text.count("tl.exp(logits - lse)") == 1


_COMPILE = """
import json, sys
import torch
from sm90 import compiled
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.execute.tensors.kernels import Entries, Slots
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.tensors.values import Frame, Step
from kvpolicy.kernels.scoring.generated import generated
from kvpolicy.kernels.table import REFERENCE

def tensor(*shape, dtype=torch.int64):
    return torch.empty(shape, device="cuda", dtype=dtype)

def launch(name, n=32768):
    bound = bind(load(name).require(), ModelShape(32, 32, 8, 128))
    program = TorchProgram(bound, kernels={**REFERENCE, "generated": generated})
    q = tensor(32, bound.queries(n), 128, dtype=torch.bfloat16)
    pool = Slots(tensor(1, 1 << 19, 8, 128, dtype=torch.bfloat16), tensor(n))
    vectors = {"query": q, "key": pool, "value": pool}
    frame = Frame(bound, n, q.device, 8, n, layer=3, vectors=vectors)
    compute(program.generated, frame)
    if program.steps is not None:
        for made in (program.steps.advancing, program.steps.leaving):
            # A layer whose KV heads hold the same, another one, all layers together.
            # The first has entries enough to be cut.
            for given in ((8, 20000, 16, False), (8, 1008, 1, True), (256, 1256, 16, True)):
                compute(made, decoding(bound, *given))

def decoding(bound, heads, n, steps, ragged):
    q = tensor(4 * heads, steps, 128, dtype=torch.bfloat16)
    pool = Entries(tensor(1 << 22, 128, dtype=torch.bfloat16), tensor(heads, n))
    there = tensor(heads, n, dtype=torch.bool) if ragged else None
    return Frame(
        bound, n, q.device, heads, n, layer=3, vectors={"query": q, "key": pool, "value": pool},
        positions=tensor(n), held_mask=there, step=Step(steps, tensor(steps), steps),
    )

def compute(made, frame):
    for bundle in () if made is None else made.fusion.bundles:
        assert made.serves(bundle, frame)
        made.values(bundle, frame, None)

print(json.dumps({
    name: [(x.name, x.shared, x.spilled, x.tensor_cores) for x in compiled(lambda: launch(name))]
    for name in sys.argv[1:]
}))
"""


# What the interpreter lets pass and the compiler does not: names of a loop used after it, numbers
# of the host where it wants tensors, truth values.
HARD = """
policy: hard
language: 1
about: a test
score: |
  mean[group](mean[query](attn(recent(prompt - 5)) where layer < 1 or position > 4))
  * count[group](any[query](attn(recent(prompt - 5)) > 0.2))
  + mean[query](mean[group](attn(recent(prompt - 5)))) * max[dim](abs(value)) * layer
budget: 9
keep: top(score)
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_compiles_for_an_h200(tmp_path):
    """Without a GPU: kernels fit, do not spill, use tensor cores, and never wait."""
    (tmp_path / "hard.yaml").write_text(HARD)
    names = ["h2o", "cake", str(tmp_path / "hard.yaml")]  # others: tests/kernels/test_sm90.py
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(HARNESS), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-P", "-c", _COMPILE, *names]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    made = json.loads(run.stdout)
    names = [kernel for kernel, *_ in made["h2o"]]
    # Of a prefill, of decode steps, and of those where KV heads hold different entries; that one
    # is the same for any number of steps, of entries and of layers.
    assert [names.count(each) for each in ("row_partials", "columns")] == [3, 3]
    assert names.count("row_combine") == 1  # a long prefill has rows enough to fill the card
    for name, kernels in made.items():
        assert kernels, name
        for kernel, shared, spilled, tensor_cores in kernels:
            assert shared <= SHARED, (name, kernel, shared)
            # Rather a few bytes per thread than a smaller tile for everybody.
            assert spilled <= (64 if name.endswith(".yaml") else 0), (name, kernel, spilled)
            assert tensor_cores == (kernel in ("row_partials", "columns", "rows")), (name, kernel)
