"""Without a GPU, Triton's kernels run in its interpreter and SGLang's processes are forks."""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

# Matrices are small: threads of several processes would only wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is imported, by torch

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "forks"))
import brief
import browser as browsers
import forked
import quicker

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are declared
    quicker.kernels()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

settings.register_profile("untimed", deadline=None)  # no failures on a busy machine
settings.register_profile("brief", deadline=None, max_examples=30)
settings.load_profile("untimed")

# The longest files come first, so that all processes end at about the same time. Files that wait
# for servers alternate with files that compute, so that both cores always have work.
_LONG = (
    "test_benchmarks.py",
    "test_tensor_parallel.py",
    "test_requests.py",
    "test_models.py",
    "test_warmed.py",
    "test_pipeline_parallel.py",
    "test_gpu_report.py",
    "test_faults.py",
    "test_sm90.py",
    "test_folds.py",
    "test_experiment.py",
    "test_experiment_in_stages.py",
    "test_agreement.py",
    "test_kernels_served.py",
    "test_server.py",
    "test_small_checkpoint.py",
    "test_propagate.py",
    "test_asked.py",
    "test_train.py",
    "test_eager_agreement.py",
    "test_scheduler.py",
    "test_schedules.py",
    "test_generated.py",
    "test_eval_server.py",
    "test_served.py",
    "test_hierarchical.py",
    "test_heads.py",
    "test_lora.py",
    "test_generated_steps.py",
    "test_eight_bits.py",
    "test_stack.py",
    "test_parallel.py",
    "test_steps.py",
    "test_evaluation_document.py",
    "test_share_served.py",
    "test_same.py",
    "test_fidelity_served.py",
    "test_backends.py",
    "test_checkpoint.py",
    "test_eval.py",
    "test_tuning.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Excludes imported and collected objects, which stay, from garbage collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "leave out what is marked `thorough`, besides the rows that the mark names"
    parser.addoption("--brief", action="store_true", help=words)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the longest files first, in the order of `_LONG`; `--brief` leaves tests out."""
    order = {name: place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    if config.getoption("brief"):
        config.hook.pytest_deselected(items=[item for item in items if brief.leaves_out(item)])
        items[:] = [item for item in items if not brief.leaves_out(item)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests on CPU tensors if there is a GPU, whose compiled kernels cannot read them."""
    if torch.cuda.is_available() and item.get_closest_marker("interpreted"):
        pytest.skip("computes on the CPU")


def pytest_configure(config: pytest.Config) -> None:
    """Lets all processes of a run fork, unless there is a GPU, which a fork cannot share."""
    if config.getoption("brief"):
        settings.load_profile("brief")
    if not torch.cuda.is_available() and not hasattr(config, "workerinput"):
        forks = contextlib.ExitStack()
        forks.enter_context(forked.forks())
        config.add_cleanup(forks.close)


@pytest.fixture(scope="session", autouse=True)
def servers_are_forks() -> None:
    """Makes servers of `serve` forks, except within `forked.new_interpreters()`."""
    from kvpolicy.evaluation import serving

    forked.servers_are_forks(serving)


@pytest.fixture(autouse=True)
def environment_stays() -> Iterator[None]:
    """Takes back what a test's code sets in the environment; nothing forks in another one."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def browser() -> Iterator[browsers.Browser]:
    """A browser for all tests that look at pages."""
    program = browsers.found()
    if program is None:
        pytest.skip("needs Chromium")
    started = browsers.Browser(program)
    yield started
    started.close()
