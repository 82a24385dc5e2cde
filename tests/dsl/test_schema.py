"""The JSON Schema for editors accepts good files and refuses obviously bad ones."""

from pathlib import Path

import jsonschema
import pytest
import yaml
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.syntax.schema import schema, schema_text

FILES = [*sorted((Path(__file__).parent / "good").glob("*.yaml")), *shipped().values()]
# Keys that the schema knows; everything else is the checker's.
BAD = (
    "key-unknown", "key-unknown-nested", "key-missing-policy", "key-missing-default",
    "key-missing-tokens", "key-policy-name", "key-policy-none", "key-language", "key-unit",
    "key-number", "key-list", "key-mapping", "key-parameter-name", "key-expression-mapping",
    "key-decode", "key-positions", "key-apply", "key-data-axes", "key-data-no-axes",
    "key-report-list", "key-report-expression",
)  # fmt: skip


def validator():
    jsonschema.Draft202012Validator.check_schema(schema())
    return jsonschema.Draft202012Validator(schema())


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_accepts(path):
    errors = [e.message for e in validator().iter_errors(yaml.safe_load(path.read_text()))]
    assert errors == []


@pytest.mark.parametrize("name", BAD)
def test_refuses(name):
    path = Path(__file__).parent / "bad" / f"{name}.yaml"
    assert not validator().is_valid(yaml.safe_load(path.read_text()))


def test_text_ends_with_a_newline():
    assert schema_text().endswith("}\n")
