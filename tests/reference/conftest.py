"""The plain model stands beside its tests."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def embedded():
    """Folder of the model that the repository brings."""
    pytest.importorskip("torch", reason="the plain model needs torch")
    pytest.importorskip("safetensors", reason="checkpoints are read with safetensors")
    return str(ROOT / "examples" / "model-tiny")
