"""Experiment files: good ones are read, bad ones get one exact message each.

`bad/NAME.yaml` has one defect, `bad/NAME.txt` is its message. The name begins with the
defect's code. After an intended change of a message, write the new text to the file.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpolicy.dsl.syntax.diagnostics import PolicyError, render_all
from kvpolicy.experiments.definition.experiment import (
    DEFAULT_TARGETING_KEY,
    CoverageStep,
    KeySource,
    Metric,
    Switchback,
)
from kvpolicy.experiments.definition.reading import as_document, check_policies, load, read

FOLDER = Path(__file__).parent
EXAMPLE = FOLDER.parents[1] / "examples" / "experiments" / "lava-25.yaml"
BAD = sorted((FOLDER / "bad").glob("*.yaml"))
GOOD = [*sorted((FOLDER / "good").glob("*.yaml")), EXAMPLE]


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_bad_file(path):
    found = read(path.read_text(), path.name)
    expected = path.with_suffix(".txt").read_text()
    assert render_all(found.diagnostics, found.source) + "\n" == expected
    [diagnostic] = found.diagnostics
    assert path.stem.startswith(diagnostic.code)
    assert (found.experiment is None) == (diagnostic.severity == "error")


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_good_file(path):
    found = load(path)
    assert render_all(found.diagnostics, found.source) == ""
    experiment = found.require()
    again = read(json.dumps(as_document(experiment), indent="\t"), "request").require()
    assert again == experiment
    assert again.digest == experiment.digest


def test_what_the_example_says():
    experiment = load(EXAMPLE).require()
    assert experiment.name == "lava-25"
    assert experiment.coverage == 0.01
    assert experiment.targeting_key == DEFAULT_TARGETING_KEY
    assert experiment.arm("lava-25").settings == {"rate": 0.25}
    assert experiment.metrics[0] == Metric("drift", "guardrail", 0.05, 2)
    assert experiment.steps[:2] == (CoverageStep(pause=1800.0), CoverageStep(coverage=0.1))
    assert experiment.shadow.sample == 0.02


def test_what_is_left_out_has_a_default():
    experiment = load(FOLDER / "good" / "smallest.yaml").require()
    assert experiment.enabled
    assert experiment.default == "none"
    assert experiment.targeting_key == DEFAULT_TARGETING_KEY
    assert (experiment.analysis.alpha, experiment.analysis.min_samples) == (0.05, 200)
    drift = read(EXAMPLE.read_text().replace(", clip: 2}", "}"), "x").require().metrics[0]
    assert drift.clip == 2


def test_words_are_read_exactly():
    experiment = load(FOLDER / "good" / "latency.yaml").require()
    assert experiment.design == Switchback(600.0, 90.0)
    assert experiment.coverage == 1.0
    assert not experiment.enabled
    assert dict(experiment.arm("half").settings) == {"rate": 0.5, "average": True}
    assert experiment.metrics[2].margin == 0.005
    keys = load(FOLDER / "good" / "keys.yaml").require()
    assert keys.targeting_key[:2] == (
        KeySource("header", "x-user-id"),
        KeySource("body", "metadata.user_id"),
    )
    assert keys.steps == (
        CoverageStep(pause=1800.0),
        CoverageStep(coverage=0.995),
    )


def test_unknown_policies_are_placed():
    found = load(EXAMPLE)
    assert check_policies(found, ["lava@0.25", "lava"]) == []
    [diagnostic] = check_policies(found, ["lava", "tova"])
    assert found.source.place(diagnostic.span.start) == (7, 21)
    assert diagnostic.message == "this server has no policy `lava@0.25`"
    assert diagnostic.help == "did you mean `lava`?"
    default = read(EXAMPLE.read_text().replace("default: none", "default: xyz"), "x")
    first, _ = check_policies(default, [])
    assert default.source.place(first.span.start)[0] == 4
    assert first.help == "this server has `none`"


def test_places_lead_to_values():
    found = load(EXAMPLE)
    text = {path: found.source.text[span.start : span.end] for path, span in found.places.items()}
    assert text["arms.lava-25.set.rate"] == "0.25"
    assert text["metrics.2.margin"] == "0.005"
    assert text["steps.2.pause"] == "2h"
    assert text["targeting_key.1"] == "body:user"


def test_every_mistake_is_reported_in_order():
    text = (
        "experiment: a/b\ncoverage: 101 %\ndefualt: none\n"
        "arms: {a: {policy: none, weight: 0, set: {x: 1}}, b: {weight: 0}}\n"
        "metrics: [{metric: ttft_seconds, role: guardrail}, {metric: drift, role: success}]\n"
        "steps: [{pause: 30}, {}, {coverage: 1}]\ntargeting_key: [headr:x, rid, rid]\n"
    )
    found = read(text, "x.yaml")
    places = [found.source.place(d.span.start) for d in found.diagnostics]
    assert places == sorted(places)
    assert len(found.diagnostics) == 16
    with pytest.raises(PolicyError, match="did you mean `default`"):
        found.require()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "there is no such file"), (b"\xff\xfe", "not UTF-8"), (b" " * 70_000, "more than")],
)
def test_files_that_cannot_be_read(tmp_path, content, message):
    path = tmp_path / "e.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PolicyError, match=message):
        load(path)


def test_what_is_no_file(tmp_path):
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    for path, message in ((tmp_path, "this is a folder, not an experiment file"),
                          (loop, "this link leads back to itself"),
                          ("x" * 5000, "there is no such file")):  # fmt: skip
        with pytest.raises(PolicyError, match=message):
            load(path)


def test_an_empty_file():
    [diagnostic] = read("", "x").diagnostics
    assert (diagnostic.message, diagnostic.help) == (
        "the file is empty",
        "start with `experiment: my-name`",
    )


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_files_get_messages_and_no_traceback(data):
    text = data.draw(st.sampled_from(GOOD)).read_text()
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 12)))
        text = (
            text[:start] + data.draw(st.text("{}[]:,'\"-#%0159 \nmnone", max_size=4)) + text[end:]
        )
    found = read(text, "x.yaml")
    assert found.experiment is not None or found.errors
    render_all(found.diagnostics, found.source)
    if found.experiment is not None:
        assert read(json.dumps(as_document(found.experiment)), "y").require() == found.experiment
