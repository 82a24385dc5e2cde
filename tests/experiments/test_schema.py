"""The JSON Schema for editors: current, accepts good files, refuses malformed ones."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from kvpolicy.experiments.definition.reading import as_document, load
from kvpolicy.experiments.definition.schema import schema, schema_text

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
GOOD = [
    *sorted((FOLDER / "good").glob("*.yaml")),
    ROOT / "examples" / "experiments" / "lava-25.yaml",
]
BAD = [p for p in sorted((FOLDER / "bad").glob("*.yaml")) if p.stem != "yaml-colon"]  # no YAML
# What a schema cannot say: rules between keys, bounds of times, and YAML's own ways of writing.
BEYOND = {
    "key-clip-of-share", "key-latency", "key-margin-of-info", "key-margin-percent",
    "key-metric-twice", "key-no-clip", "key-no-margin", "key-no-shadow", "key-role",
    "key-set-of-none", "key-truth", "range-burn-in", "range-margin", "range-place-twice",
    "range-sample", "range-weight-control", "range-weight-others", "range-weights", "range-window",
    "yaml-anchor", "yaml-twice",
}  # fmt: skip


def validator():
    jsonschema.Draft202012Validator.check_schema(schema())
    return jsonschema.Draft202012Validator(schema())


def data(path):
    text = path.read_text()
    return json.loads(text) if text.startswith("{") else yaml.safe_load(text)


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_accepts(path):
    assert [error.message for error in validator().iter_errors(data(path))] == []
    assert validator().is_valid(as_document(load(path).require()))


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_agrees_with_reading(path):
    accepted = path.stem.startswith("unused") or path.stem in BEYOND
    assert validator().is_valid(data(path)) == accepted


def test_the_committed_schema_is_current():
    assert (ROOT / "docs" / "experiment.schema.json").read_text() == schema_text()
