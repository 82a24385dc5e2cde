"""`kvpolicy report`: what it writes, that equal inputs give equal files, and what it refuses."""

import json
import sys
from pathlib import Path

import pytest
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.evaluation import cli, records
from kvpolicy.evaluation.asking.answers import Answers
from kvpolicy.evaluation.reporting import report, results

sys.path.insert(0, str(Path(__file__).parent))
import made_run

FILES = ["summary.md", "summary.csv", "report.html", "accuracy.png", "pareto.png", "needle.png",
         "kept.png"]  # fmt: skip
LATE = ("report", "page", "plots", "plot_kept", "plot_labels")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder of a run with two policies, and the files that the report wrote into it."""
    folder = tmp_path_factory.mktemp("run")
    made_run.write(folder, made_run.NAMES[:2], tasks=("niah", "mq"), samples=12)
    return folder, report.write(folder)


def test_writes_every_file(run):
    folder, written = run
    assert written == [folder / name for name in FILES]
    assert all(path.stat().st_size > 500 for path in written)


def test_equal_inputs_give_equal_files(run, tmp_path):
    folder, written = run
    for name in ("plan.json", "samples.jsonl", "kept.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    for path, again in zip(written, report.write(tmp_path), strict=True):
        assert path.read_bytes() == again.read_bytes(), path.name


def test_command_prints_the_table_and_the_files(run, capsys):
    folder, _ = run
    assert cli.main(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "| snapkv" in out
    assert str(folder / "report.html") in out


def test_command_says_what_must_be_installed(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [n for n in sys.modules if n.startswith("kvpolicy.evaluation.") and n[20:] in LATE]:
        monkeypatch.delitem(sys.modules, name)
    assert cli.main(["report", str(run[0])]) == 2
    error = capsys.readouterr().err
    assert "needs matplotlib" in error
    assert "pip install '.[eval]'" in error


def test_without_maps_there_is_no_picture_of_them(tmp_path):
    made_run.write(tmp_path, made_run.NAMES[:1], tasks=("vt",), samples=3, maps=False)
    (tmp_path / "kept.png").write_bytes(b"of an earlier run")
    written = [path.name for path in report.write(tmp_path)]
    # vt has no depth either.
    assert written == [name for name in FILES if name not in ("kept.png", "needle.png")]
    assert not (tmp_path / "kept.png").exists()


def test_an_interrupted_run_is_reported_as_far_as_it_got(tmp_path):
    made_run.write(tmp_path, made_run.NAMES[:2], tasks=("niah", "mq"), samples=12)
    samples = tmp_path / "samples.jsonl"
    text = samples.read_text()
    samples.write_text(text[: len(text) // 3])  # the last line is cut off
    report.write(tmp_path)
    assert "n = 0/24" in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\x1c", "\r", "\v"])
def test_answers_and_prompts_may_hold_ends_of_lines_of_any_kind(end, tmp_path):
    made_run.write(tmp_path, made_run.NAMES[:1], tasks=("niah",), samples=2, budgets=(0.5,))
    for name, key in (("samples.jsonl", "answer"), ("kept.jsonl", "tokens")):
        entries = list(map(json.loads, (tmp_path / name).read_text().split("\n")[:-1]))
        entries[0][key] = f"a{end}b" if key == "answer" else [end, *entries[0][key][1:]]
        lines = [json.dumps(entry, ensure_ascii=False) for entry in entries]
        (tmp_path / name).write_text("".join(f"{each}\n" for each in lines), encoding="utf-8")
    found = list(records.read(tmp_path / "samples.jsonl"))
    assert (len(found), found[0].answer) == (8, f"a{end}b")
    assert Answers(tmp_path).keys == {record.key for record in found}  # a run goes on
    read = results.load(tmp_path)
    assert read.maps[0]["tokens"][0] == end


def refusal(folder, capsys):
    assert cli.main(["report", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_refuses_what_is_no_run(tmp_path, capsys):
    assert "no plan.json" in refusal(tmp_path / "nowhere", capsys)
    (tmp_path / "plan.json").write_text("{}")
    assert "not a plan of `kvpolicy eval`" in refusal(tmp_path, capsys)
    (tmp_path / "plan.json").write_text("[1, 2")
    assert "cannot be read" in refusal(tmp_path, capsys)


def test_refuses_a_run_without_answers(tmp_path, capsys):
    plan = made_run.write(tmp_path, made_run.NAMES[:1], tasks=("niah",), samples=2)
    samples = tmp_path / "samples.jsonl"
    samples.unlink()
    assert "no question has been answered" in refusal(tmp_path, capsys)
    samples.write_text("")
    assert "no question has been answered" in refusal(tmp_path, capsys)
    assert not (tmp_path / "summary.md").exists()
    assert plan["samples"] == 2


def test_refuses_foreign_or_broken_lines(tmp_path, capsys):
    plan = made_run.write(tmp_path, made_run.NAMES[:1], tasks=("niah",), samples=2)
    samples = tmp_path / "samples.jsonl"
    good = samples.read_text()
    samples.write_text('{"a": 1}\n' + good)
    assert "samples.jsonl:1: not a record" in refusal(tmp_path, capsys)
    samples.write_text(good + '{"a": 1}\n')  # whole, so nothing has cut it off
    last = good.count("\n") + 1
    assert f"samples.jsonl:{last}: not a record" in refusal(tmp_path, capsys)
    samples.write_text(good)
    plan["policies"] = plan["policies"][:1]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert "plan.json knows nothing of policy snapkv" in refusal(tmp_path, capsys)
    made_run.write(tmp_path, made_run.NAMES[:1], tasks=("niah",), samples=2)
    (tmp_path / "kept.jsonl").write_text("{}}\n")
    assert "kept.jsonl" in refusal(tmp_path, capsys)
    (tmp_path / "kept.jsonl").write_text('{"policy": "snapkv"}\n')
    assert "kept.jsonl" in refusal(tmp_path, capsys)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lengths", []),
        ("lengths", ["512"]),
        ("tasks", {}),
        ("tasks", {"niah": 1}),
        ("samples", "2"),
        ("policies", []),
        ("policies", [{"policy": "none", "budget": "0.5"}]),
        ("policies", [{"policy": "none", "budget": None, "aliases": {"none": 512}}]),
        ("questions", {"niah": {"512": 2}}),
        ("stages", {"start": "soon"}),
        ("server", "a"),
    ],
)
def test_refuses_a_plan_of_another_form(key, value, tmp_path, capsys):
    plan = made_run.write(tmp_path, made_run.NAMES[:1], tasks=("niah",), samples=2)
    (tmp_path / "plan.json").write_text(json.dumps({**plan, key: value}))
    assert f"not a plan of `kvpolicy eval`: `{key}` is" in refusal(tmp_path, capsys)


@pytest.mark.parametrize(
    "changes",
    [{"score": "1"}, {"score": 2}, {"length": "512"}, {"index": 0.5}, {"setting": []},
     {"kept": "all"}, {"task": None}, {"depth": float("nan")}, {"turn": 10**30}],
)  # fmt: skip
def test_refuses_records_of_another_form(changes, tmp_path, capsys):
    made_run.write(tmp_path, made_run.NAMES[:1], tasks=("niah",), samples=2)
    samples = tmp_path / "samples.jsonl"
    first, *others = samples.read_text().splitlines(keepends=True)
    samples.write_text(json.dumps({**json.loads(first), **changes}) + "\n" + "".join(others))
    assert "samples.jsonl:1: not a record" in refusal(tmp_path, capsys)


def test_refuses_answers_at_a_length_that_was_not_planned(tmp_path, capsys):
    plan = made_run.write(tmp_path, made_run.NAMES[:1], tasks=("niah",), samples=2)
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "lengths": [512]}))
    assert "plan.json knows nothing of policy" in refusal(tmp_path, capsys)


def test_refuses_files_that_are_none(tmp_path, capsys):
    made_run.write(tmp_path, made_run.NAMES[:1], tasks=("niah",), samples=2)
    assert "plan.json: error[report]: not a directory" in refusal(tmp_path / "plan.json", capsys)
    for name, content in (("kept.jsonl", b"\xff\n"), ("samples.jsonl", b"\xff\n")):
        (tmp_path / name).write_bytes(content)
        assert f"{name}:1: not a " in refusal(tmp_path, capsys)
        (tmp_path / name).unlink()
        (tmp_path / name).mkdir()
        assert f"{name}: error[report]: is a directory" in refusal(tmp_path, capsys)


def test_maps_of_other_tasks_are_left_out(tmp_path):
    """An earlier run with another plan may have left kept.jsonl."""
    made_run.write(tmp_path, made_run.NAMES[:1], tasks=("niah", "mk"), samples=2)
    maps = (tmp_path / "kept.jsonl").read_text()
    made_run.write(tmp_path, made_run.NAMES[:1], tasks=("vt",), samples=2)
    (tmp_path / "kept.jsonl").write_text(maps)
    report.write(tmp_path)
    assert results.load(tmp_path).maps == ()


def test_refuses_a_folder_it_cannot_write(tmp_path, monkeypatch):
    made_run.write(tmp_path, made_run.NAMES[:1], tasks=("niah",), samples=2)

    def full_disk(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(PolicyError, match="no space left on device"):
        report.write(tmp_path)
