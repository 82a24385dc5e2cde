"""The training code is a folder of scripts: its modules are imported by bare name."""

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES / "train"))


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return EXAMPLES / "model-tiny"


@pytest.fixture(scope="session")
def tokenizer(model_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder, local_files_only=True)


@pytest.fixture(scope="session")
def model(model_folder):
    import export

    return export.read(model_folder)
