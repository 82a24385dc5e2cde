"""Real servers, started once for all tests that ask them."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "model-tiny"
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def model() -> str:
    """Folder of the smallest embedded model."""
    return str(MODEL)


@pytest.fixture(scope="session")
def with_policies():
    """A server with two policies, one of them under another name."""
    pytest.importorskip("sglang", reason="SGLang is an extra")
    from kvpolicy.evaluation.serving import serve

    policies = [ROOT / "policies" / "snapkv.yaml", f"half={ROOT / 'policies' / 'tova.yaml'}"]
    settings = ["snapkv.rate=0.25", "snapkv.window=8", "half.rate=0.5"]
    with serve(MODEL, policies, settings, kv_policy_allow_inspection=True) as server:
        yield server


@pytest.fixture(scope="session")
def stock():
    """A server of SGLang without policies."""
    pytest.importorskip("sglang", reason="SGLang is an extra")
    from kvpolicy.evaluation.serving import serve

    with serve(MODEL) as server:
        yield server
