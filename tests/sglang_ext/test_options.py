"""--kv-policy and --kv-policy-set: parsing, the environment, and every refusal's sentence."""

import argparse
import json
import logging
import os
import re
from pathlib import Path

import pytest
import torch
from kvpolicy.dsl.bind import parameters
from kvpolicy.dsl.bind.model_config import ModelConfig
from kvpolicy.dsl.bind.named import FOLD_INTERVAL, name_and_path
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.diagnostics import refused
from kvpolicy.kernels.launch import tuned
from kvpolicy.kernels.table import REFERENCE
from kvpolicy.sglang_ext.face import kernels_in_use, options, policy_files
from kvpolicy.sglang_ext.face.errors import Refused

SHAPE = ModelShape(layers=4, heads=4, kv_heads=2, head_dim=32)
MODEL = ModelConfig("a model", SHAPE, 128, 512, 512, 2 * 128 * 512, 512, "float32", 4, 4)
POLICY = """\
policy: {name}
language: 1
params:
  capacity: {{default: 64, unit: tokens, min: 1}}
budget: capacity
keep: sinks(4) then recent(capacity - 4)
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Paths of two policy files, `one` and `two`; no policy in the environment."""
    # setenv first, so that what a test exports is removed after it.
    for variable in (options.PATHS.variable, options.SETTINGS.variable, options.DATA.variable):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    paths = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(POLICY.format(name=name))
        paths.append(str(path))
    return paths


def parse(*words):
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    return parser.parse_args(words)


def test_flags_reach_child_processes_through_the_environment(files, monkeypatch):
    monkeypatch.chdir(os.path.dirname(files[0]))
    options.export(parse("--kv-policy", "one.yaml", "--kv-policy", files[1]))
    options.export(parse("--kv-policy-set", "one.capacity=8", "two.capacity=9"))
    assert options.requested() == (files, ["one.capacity=8", "two.capacity=9"], [])
    one, two = policy_files.load_policies(*options.requested())
    assert (one.name, two.name) == ("one", "two")
    assert one.bind(SHAPE).params["capacity"] == 8
    assert two.bind(SHAPE).params["capacity"] == 9


def test_one_policy_needs_no_prefix(files):
    (policy,) = policy_files.load_policies(files[:1], ["capacity=8"])
    assert policy.bind(SHAPE).params["capacity"] == 8


def test_a_shipped_policy_is_served_by_its_name(files, monkeypatch, tmp_path):
    """But a file of that name comes first."""
    monkeypatch.chdir(tmp_path)
    options.export(parse("--kv-policy", "snapkv", "small=tova", "--kv-policy-kernels", "torch"))
    paths = options.requested().policies
    assert [name for name, _ in map(name_and_path, paths)] == [None, "small"]
    assert all(os.path.isabs(path) for _, path in map(name_and_path, paths))
    found = policy_files.load_policies(paths, ["snapkv.capacity=100"])
    assert [(x.name, x.program.name) for x in found] == [("snapkv", "snapkv"), ("small", "tova")]
    (tmp_path / "tova").write_text(POLICY.format(name="own"))
    options.export(parse("--kv-policy", "tova"))
    assert [x.name for x in policy_files.load_policies(*options.requested())] == ["own"]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("snapvk", "snapvk: there is no such file and no shipped policy of this name; did you "),
        ("zzzz", "zzzz: there is no such file and no shipped policy of this name; `kvpolicy list`"),
        ("nowhere/snapkv", "nowhere/snapkv: there is no such file"),
        ("snapkv.yml", "snapkv.yml: there is no such file"),
    ],
)
def test_neither_a_file_nor_a_shipped_policy(files, value, sentence):
    options.export(parse("--kv-policy", value))
    with pytest.raises(Refused, match=re.escape(sentence)):
        policy_files.load_policies(*options.requested())


def test_a_file_may_be_served_by_other_names(files, monkeypatch):
    monkeypatch.chdir(os.path.dirname(files[0]))
    values = ["one@0.5=one.yaml", "one", "one@0.125=./one.yaml", f"b.2={files[1]}"]
    values[1] += ".yaml"
    options.export(parse(*(word for value in values for word in ("--kv-policy", value))))
    options.export(parse("--kv-policy-set", "one@0.5.capacity=8", "b.2.capacity=9"))
    assert options.requested().policies == [
        f"one@0.5={files[0]}", files[0], f"one@0.125={files[0]}", f"b.2={files[1]}"
    ]  # fmt: skip
    policies = policy_files.load_policies(*options.requested())
    assert [policy.name for policy in policies] == ["one@0.5", "one", "one@0.125", "b.2"]
    assert [policy.path for policy in policies] == [files[0], files[0], files[0], files[1]]
    assert [policy.bind(SHAPE).params["capacity"] for policy in policies] == [8, 64, 64, 9]
    settings = [dict(policy.settings) for policy in policies]
    assert settings == [{"capacity": "8"}, {}, {}, {"capacity": "9"}]


def test_a_file_is_read_once_however_often_it_is_served(files, monkeypatch):
    read, load = [], policy_files.load
    monkeypatch.setattr(policy_files, "load", lambda path: read.append(path) or load(path))
    policy_files.load_policies([f"p{i}={files[i % 2]}" for i in range(10)], [])
    assert read == files


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (options.FAILURES, "-2", "expected a whole number from 0 on"),
        (options.INSPECTION, "yes", "expected 0 or 1"),
        (options.ONE_PIECE, "0", "expected a whole number from 1 on"),
        (options.OVERRIDE, "some", "expected one of any, listed, none"),
    ],
)
def test_a_wrong_variable_stops_the_start_by_its_name(files, monkeypatch, option, value, message):
    monkeypatch.setenv(option.variable, value)
    options.export(parse())  # without a policy the plugin does nothing
    sentence = f"^{option.variable}: {option.flag} {value}: {message}$"
    with pytest.raises(Refused, match=sentence):
        options.export(parse("--kv-policy", files[0]))


def test_an_empty_policy(files):
    with pytest.raises(Refused, match=r"^--kv-policy: the value is empty$"):
        options.export(parse("--kv-policy", ""))


def test_messages_of_a_renamed_policy_say_which_one(files):
    (policy,) = policy_files.load_policies([f"a={files[0]}"], ["a.capacity=0"])
    with pytest.raises(Refused, match=f"^--kv-policy a={files[0]}: .*at least"):
        policy.bind(SHAPE)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("none={}", "the name `none` stands for no policy"),
        (
            "a b={}",
            "`a b` cannot be a name; a name has at most 64 letters, digits, `@`, `.`, `_` and `-`",
        ),
        ("-a={}", "`-a` cannot be a name"),
        ("={}", "`` cannot be a name"),
        ("a=", "expected PATH or NAME=PATH"),
    ],
)
def test_names_that_cannot_be_given(files, value, message):
    value = value.format(files[0])
    with pytest.raises(Refused, match=re.escape(f"--kv-policy {value}: {message}")):
        policy_files.load_policies([value], [])


def test_a_wrong_name_is_refused_before_the_environment_carries_it(files):
    with pytest.raises(Refused, match="`a b` cannot be a name"):
        options.export(parse("--kv-policy", f"a b={files[0]}"))
    assert options.requested() == ([], [], [])


def test_two_policies_of_one_name_are_refused_with_a_way_out(files):
    for values in ([files[0], f"one={files[1]}"], [f"a={files[0]}", f"a={files[1]}"]):
        name = "one" if values[0] == files[0] else "a"
        sentence = (
            f"--kv-policy {values[1]}: {files[0]} is also called `{name}`; give one of them "
            f"another name, as in --kv-policy {name}-2={files[1]}"
        )
        with pytest.raises(Refused, match=f"^{re.escape(sentence)}$"):
            policy_files.load_policies(values, [])


def test_an_equals_sign_in_a_folder_is_part_of_the_path(files, tmp_path):
    folder = tmp_path / "a=b"
    folder.mkdir()
    path = folder / "one.yaml"
    path.write_text(POLICY.format(name="one"))
    for value in (str(path), f"x={path}"):
        (policy,) = policy_files.load_policies([value], [])
        assert policy.path == str(path)


def test_without_flags_nothing_is_requested(files):
    options.export(parse())
    assert options.requested() == ([], [], [])
    assert policy_files.load_policies([], []) == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["capacity=8"], r"capacity=8: say which policy, as in one\.capacity=8"),
        (["three.capacity=8"], "no policy is called `three`; there is one, two"),
        (["one@1.capacity=8"], "no policy is called `one@1`; there is one, two"),
        (["capacity"], r"expected NAME=VALUE or POLICY\.NAME=VALUE"),
        (["one.=3"], r"expected NAME=VALUE or POLICY\.NAME=VALUE"),
        (["one.capacity=3", "two.capacity=3", "one.capacity=4"], "`capacity` of `one` is set tw"),
    ],
)
def test_settings_that_fit_no_policy(files, settings, message):
    with pytest.raises(Refused, match=message):
        policy_files.load_policies(files, settings)


def test_every_variable_is_documented():
    names = {option.variable for option in options.OPTIONS}
    text = (Path(__file__).parents[2] / "docs" / "operators.md").read_text()
    assert set(re.findall(r"`(SGLANG_KV_\w+)`", text)) == names


def test_an_experiment_without_a_policy(monkeypatch):
    options.refuse_experiment("there is no --kv-policy")
    monkeypatch.setenv(options.EXPERIMENT.variable, "e.yaml")
    with pytest.raises(Refused, match=r"SGLANG_KV_POLICY_EXPERIMENT e.yaml: there is no --kv-pol"):
        options.refuse_experiment("there is no --kv-policy")


def test_settings_without_a_policy(files):
    with pytest.raises(Refused, match="there is no --kv-policy"):
        policy_files.load_policies([], ["capacity=8"])
    with pytest.raises(Refused, match=r"^--kv-policy-data gate=g.json: there is no --kv-policy$"):
        policy_files.load_policies([], [], ["gate=g.json"])


GATED = """\
policy: gated
language: 1
data:
  gate: {axes: [layer, kv], min: 0, max: 1}
keep: all where gate > 0.5 else recent(4)
"""


@pytest.fixture
def gated(files, tmp_path, monkeypatch):
    """Names of a policy that declares a tensor, and of a file of the tensor for SHAPE."""
    monkeypatch.chdir(tmp_path)
    Path("gated.yaml").write_text(GATED)
    Path("gate.json").write_text(json.dumps([[0.9] * SHAPE.kv_heads] * SHAPE.layers))
    return "gated.yaml", "gate.json"


def test_tensors_of_the_model_are_for_all_policies_that_declare_them(gated, monkeypatch, tmp_path):
    policy, tensor = gated
    options.export(parse("--kv-policy", policy, f"b={policy}", "snapkv"))
    options.export(parse("--kv-policy-data", f"gate={tensor}"))
    assert options.requested().data == [f"gate={tmp_path / tensor}"]
    monkeypatch.chdir("/")
    first, second, snapkv = policy_files.load_policies(*options.requested())
    for each in (first, second):
        assert each.bind(SHAPE).tensors["gate"].layers[0] == (0.9,) * SHAPE.kv_heads
    assert snapkv.bind(SHAPE).tensors == {}
    # A policy that comes later reads those of the server's start.
    later = policy_files.policy_of("later", GATED, {})
    assert later.bind(SHAPE).digest == first.bind(SHAPE).digest
    Path(tmp_path / tensor).write_text(json.dumps([[0.1] * SHAPE.kv_heads] * SHAPE.layers))
    (changed,) = policy_files.load_policies([str(tmp_path / policy)], [], options.requested().data)
    assert changed.bind(SHAPE).digest != first.bind(SHAPE).digest


def test_tensors_that_are_missing_or_wrong(gated):
    policy, _ = gated
    Path("short.csv").write_text("0.5, 0.5\n")
    Path("high.json").write_text(json.dumps([[2] * SHAPE.kv_heads] * SHAPE.layers))
    Path("text.tsv").write_text("0.5 yes\n")
    axes = "the tensor `gate`, [layer, kv] of the model"
    for data, sentence in (
        ([], f"--kv-policy gated.yaml: gated: error[data]: policy `gated` needs {axes}"),
        (["gate=short.csv"], "`gate` has the shape [1, 2]; [layer, kv] of this model is ["),
        (["gate=high.json"], "`gate[0][0]` is 2; at most 1 is accepted"),
        (["gate=text.tsv"], "text.tsv: error[data]: line 1 has more than numbers"),
        (["gate=none.tsv"], "none.tsv: error[data]: no such file or directory"),
        (["gate"], "`gate` is not NAME=FILE"),
        (["gates=short.csv"], "no policy here has a tensor `gates` under `data`"),
        (["gate=short.csv", "gate=high.json"], "`gate` is given twice"),
    ):
        with pytest.raises(Refused) as refused:
            policy_files.load_policies([policy], [], data)[0].bind(SHAPE)
        assert sentence in str(refused.value)


def test_unknown_and_unaccepted_parameters_name_the_file(files):
    for setting, message in (("capacty=8", "did you mean `capacity`"), ("capacity=0", "at least")):
        (policy,) = policy_files.load_policies(files[:1], [setting])
        with pytest.raises(Refused, match=message) as refused:
            policy.bind(SHAPE)
        assert f"--kv-policy {files[0]}" in str(refused.value)


def test_files_that_cannot_be_served(files, tmp_path):
    missing = tmp_path / "missing.yaml"
    with pytest.raises(Refused, match=f"--kv-policy {missing}: there is no such file"):
        policy_files.load_policies([str(missing)], [])
    with pytest.raises(Refused, match=f"^--kv-policy {tmp_path}: this is a folder, not a policy"):
        policy_files.load_policies([str(tmp_path)], [])
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    with pytest.raises(Refused, match=f"^--kv-policy {loop}: this link leads back to itself$"):
        policy_files.load_policies([str(loop)], [])
    with pytest.raises(Refused, match="is also called `one`"):
        policy_files.load_policies([files[0], files[0]], [])
    none = tmp_path / "none.yaml"
    none.write_text(POLICY.format(name="none"))
    with pytest.raises(Refused, match="`none` stands for no policy"):
        policy_files.load_policies([str(none)], [])


def test_a_wrong_file_gives_the_checkers_diagnostics(tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(POLICY.format(name="wrong").replace("capacity - 4", "capacty - 4"))
    with pytest.raises(Refused) as refused:
        policy_files.load_policies([str(wrong)], [])
    assert f"{wrong}:6:" in str(refused.value)
    assert "did you mean `capacity`?" in str(refused.value)


def test_warnings_are_logged_once_for_a_file(files, tmp_path, caplog):
    path = tmp_path / "nothing.yaml"
    path.write_text("policy: nothing\nlanguage: 1\nscore: position\nbudget: 0\nkeep: top(score)\n")
    values = [files[0], str(path), f"also={path}"]
    with caplog.at_level("WARNING"):
        policy_files.log_warnings(policy_files.load_policies(values, []))
    (line,) = caplog.messages
    assert line.startswith(f"--kv-policy {path}:\n{path}:4:9: warning[zero]: `budget` is 0")


def test_what_is_not_served_yet_is_refused_with_its_place(tmp_path):
    path = tmp_path / "read.yaml"
    path.write_text(POLICY.format(name="read") + "read: recent(8)\n")
    with pytest.raises(Refused) as error:
        policy_files.load_policies([str(path)], [])
    head, problem, _, line, caret = str(error.value).splitlines()
    assert head == f"--kv-policy {path}:"
    assert re.fullmatch(rf"{path}:\d+:1: error\[unserved\]: `read` cannot be served yet", problem)
    assert line.index("read") == caret.index("^^^^")


def test_the_fold_interval_reaches_the_policies(files, monkeypatch):
    monkeypatch.setenv(options.INTERVAL.variable, "")
    path = files[0]
    with open(path, "a") as file:
        file.write("decode: same\n")
    options.export(parse("--kv-policy", path))
    (policy,) = policy_files.load_policies([path], [])
    assert policy.bind(SHAPE).fold_interval == FOLD_INTERVAL
    options.export(parse("--kv-policy-fold-interval", "3"))
    bound = policy.bind(SHAPE)
    assert [step for step in range(1, 10) if bound.leaves_at(step, 50)] == [3, 6, 9]


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "often"])
def test_a_wrong_fold_interval_is_refused(files, monkeypatch, text):
    monkeypatch.setenv(options.INTERVAL.variable, "")
    sentence = f"--kv-policy-fold-interval {text}: expected a whole number from 1 on"
    with pytest.raises(Refused, match=re.escape(sentence)):
        options.export(parse(f"--kv-policy-fold-interval={text}"))


def test_a_fold_interval_without_a_policy_is_refused(files, monkeypatch):
    monkeypatch.setenv(options.INTERVAL.variable, "")
    with pytest.raises(Refused, match="--kv-policy-fold-interval 3: there is no --kv-policy"):
        options.export(parse("--kv-policy-fold-interval", "3"))


def test_the_kernels_reach_child_processes(files, monkeypatch):
    monkeypatch.setenv(options.KERNEL_CHOICE.variable, "")
    assert options.kernels() == "auto"
    options.export(parse("--kv-policy", files[0], "--kv-policy-kernels", "torch"))
    assert options.kernels() == "torch"


def test_what_reads_reaches_child_processes(files, monkeypatch):
    monkeypatch.setenv(options.ATTENTION_CHOICE.variable, "")
    assert options.attention() == "auto"
    options.export(parse("--kv-policy", files[0], "--kv-policy-attention", "flashinfer"))
    assert options.attention() == "flashinfer"
    sentence = "--kv-policy-attention fa3: expected one of auto, triton, flashinfer"
    with pytest.raises(Refused, match=re.escape(sentence)):
        options.export(parse("--kv-policy", files[0], "--kv-policy-attention", "fa3"))


def test_unknown_kernels_and_kernels_without_a_policy_are_refused(files, monkeypatch):
    monkeypatch.setenv(options.KERNEL_CHOICE.variable, "")
    wrong = parse("--kv-policy", files[0], "--kv-policy-kernels", "cuda")
    sentence = "--kv-policy-kernels cuda: expected one of auto, torch, triton"
    with pytest.raises(Refused, match=re.escape(sentence)):
        options.export(wrong)
    monkeypatch.setenv(options.PATHS.variable, "")
    with pytest.raises(Refused, match="--kv-policy-kernels torch: there is no --kv-policy"):
        options.export(parse("--kv-policy-kernels", "torch"))
    monkeypatch.setenv(options.ALLOW_SET.variable, "")
    with pytest.raises(Refused, match="--kv-policy-allow-set capacity: there is no --kv-policy"):
        options.export(parse("--kv-policy-allow-set", "capacity"))


def test_triton_on_a_cpu_needs_its_interpreter(files, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(Refused, match="choose torch, or set TRITON_INTERPRET=1"):
        kernels_in_use.check("triton", "cpu")
    for asked, device in (("triton", "cuda"), ("auto", "cpu"), ("torch", "cpu")):
        kernels_in_use.check(asked, device)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernels_in_use.check("triton", "cpu")


def test_the_kernels_in_use_are_said_once(files, monkeypatch, caplog):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv(options.KERNEL_CHOICE.variable, "")
    kernels_in_use.chosen_for.cache_clear()
    with caplog.at_level(logging.INFO):
        auto = [kernels_in_use.in_use(torch.device("cpu")) for _ in range(2)]
    assert [record.getMessage() for record in caplog.records] == ["KV-cache policy kernels: torch."]
    assert (auto[0].name, auto[0].table) == ("torch", REFERENCE)
    with caplog.at_level(logging.INFO):
        assert kernels_in_use.in_use(torch.device("cuda")).name == "triton"
    said = caplog.records[-1].getMessage()
    assert said.startswith("KV-cache policy kernels: triton, not tuned for ")
    assert said.endswith("; run `python benchmarks/kernels.py --topics tuning --write`.")
    monkeypatch.setenv(options.KERNEL_CHOICE.variable, "triton")
    assert set(kernels_in_use.in_use(torch.device("cpu")).table) == {*REFERENCE, "generated"}
    monkeypatch.setenv(options.KERNEL_CHOICE.variable, "torch")
    assert kernels_in_use.in_use(torch.device("cuda")).name == "torch"


def test_measured_choices_that_cannot_be_read_stop_the_server(files, monkeypatch, tmp_path):
    monkeypatch.setenv(tuned.FOLDER_VARIABLE, str(tmp_path))
    path = tmp_path / "cpu.json"
    path.write_text("{}")
    kernels_in_use.chosen_for.cache_clear()
    tuned.load.cache_clear()
    try:
        with pytest.raises(Refused, match=f"--kv-policy: {re.escape(str(path))}: not as `--write`"):
            kernels_in_use.in_use(torch.device("cpu"))
    finally:
        tuned.load.cache_clear()


def test_separators_in_values_are_refused(files):
    with pytest.raises(Refused, match="a value cannot contain `,`"):
        options.export(parse("--kv-policy-set", "capacity=1,2"))


def test_policies_are_tried_before_a_server_loads_anything(files, monkeypatch):
    """A policy whose executions differ is refused; equal policies are tried once."""
    from kvpolicy.dsl.tools import trial

    tried = []

    def failing(bound):
        tried.append(bound.params["capacity"])
        if bound.params["capacity"] == 8:
            raise refused("one", "trial", "keeps other entries", "write it otherwise")

    monkeypatch.setattr(trial, "trial", failing)
    names = [f"a={files[0]}", f"b={files[0]}", f"c={files[0]}"]
    policy_files.check_policies(policy_files.load_policies(names, ["b.capacity=9"]), MODEL, 4096)
    assert tried == [64, 9]
    policies = policy_files.load_policies(names, ["b.capacity=8"])
    with pytest.raises(Refused, match=f"^--kv-policy b={files[0]}: one: .*keeps other entries"):
        policy_files.check_policies(policies, MODEL, 4096)


def test_a_policy_that_costs_too_much_is_refused_with_the_limit_that_allows_it(monkeypatch):
    def check(length):
        policy_files.check_policies(
            policy_files.load_policies(["policies/h2o.yaml"], []), MODEL, length
        )

    monkeypatch.setenv("SGLANG_KV_POLICY_MAX_COST", "50")
    check(64)
    with pytest.raises(Refused) as error:
        check(4096)
    message = str(error.value)
    assert message.startswith("--kv-policy policies/h2o.yaml: policies/h2o.yaml:17:34: error[cost]")
    assert (
        "of the time of a prefill of 4,096 tokens, more than the 50 % that are allowed" in message
    )
    assert "it looks at every pair of tokens" in message
    enough = re.search(r"allow it with `--kv-policy-max-cost (\d+)`", message)[1]
    for allowed in (enough, "0"):
        monkeypatch.setenv("SGLANG_KV_POLICY_MAX_COST", allowed)
        check(4096)
    monkeypatch.setenv("SGLANG_KV_POLICY_MAX_COST", str(int(enough) - 1))
    with pytest.raises(Refused):
        check(4096)


@pytest.mark.parametrize(
    ("text", "pool", "slots"),
    [("", 10_000, 200), ("", 10**7, 4096), ("0", 10_000, 0), ("5000", 10_000, 5000)],
)
def test_slots_set_aside_for_an_experiment(monkeypatch, text, pool, slots):
    monkeypatch.setenv(options.SLOTS.variable, text)
    monkeypatch.setenv(options.EXPERIMENT.variable, "")
    if text not in ("", "0"):
        with pytest.raises(Refused, match="--kv-experiment-slots 5000: there is no --kv-exp"):
            options.experiment_slots(pool, 4096)
    else:
        assert options.experiment_slots(pool, 4096) == 0
    monkeypatch.setenv(options.EXPERIMENT.variable, "/experiment.yaml")
    assert options.experiment_slots(pool, 4096) == slots


def test_what_is_set_aside_leaves_half_of_the_pool(monkeypatch):
    monkeypatch.setenv(options.SLOTS.variable, "501")
    monkeypatch.setenv(options.EXPERIMENT.variable, "/experiment.yaml")
    with pytest.raises(Refused, match="501: more than half of the pool, which has 1000 slots"):
        options.experiment_slots(1000, 4096)
    assert options.experiment_slots() == 501  # on the command line no pool is known


def test_values_of_parameters_as_settings_write_them():
    assert [parameters.text_of(x) for x in (True, 7, 0.25, 0.1)] == [
        "true", "7", "0.25", "0.10000000000000001"
    ]  # fmt: skip
    assert (
        parameters.text_of(10**400) == f"{10**400}"
    )  # more than a float holds: refused as any other
