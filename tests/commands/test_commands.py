"""`explain`, `diff` and `test`: what they say and how they end."""

from __future__ import annotations

import json
import re

import pytest
from kvpolicy.dsl.tools.cli import main
from kvpolicy.dsl.tools.units import flops_text, size_text

CONFIG = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "torch_dtype": "float16",
}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def explain(model, policy, *options, length=1000) -> int:
    return main(["explain", policy, "--model", model, "--length", str(length), *options])


def test_static_budgets_are_shown_exactly(model, capsys):
    assert explain(model, "pyramidkv", "--set", "capacity=100") == 0
    text = capsys.readouterr().out
    # Budgets outside the window of 8: mean 92, last 92 // 20 = 4, first 180, step 58.
    for layer, entries in enumerate((188, 130, 72, 14)):
        assert f"  layer {layer}{entries:>17,}  #" in text
    assert f"mean{101.0:>20,.1f}  10.10% of the prompt" in text
    # 4 layers x 2 KV heads x 1000 entries x 2 x 32 numbers x 2 bytes
    assert "KV cache before  1,000.0 KiB  8,000 entries" in text
    assert "KV cache after    101.0 KiB  808 (10.10%)" in text


def test_budgets_that_depend_on_data_are_bounded(model, capsys):
    assert explain(model, "lava", "--set", "capacity=100") == 0
    text = capsys.readouterr().out
    assert "depend on the prompt's content" in text
    assert "at most 100.5 stay" in text
    assert "at most 804 (10.05%)" in text
    assert text.index("after the last layer") < text.index("inner ")
    assert explain(model, "simlayerkv-prefill") == 0
    assert "everything may stay" in capsys.readouterr().out


@pytest.mark.parametrize("axes", ["kv, token", "layer, kv, token"])
def test_a_head_that_competes_has_no_number_of_its_own(model, tmp_path, capsys, axes):
    policy = tmp_path / "x.yaml"
    keep = f"top[{axes}](norm1[dim](key), 64)"
    policy.write_text(f"policy: x\nlanguage: 1\nkeep: {keep}\n")
    assert explain(model, str(policy)) == 0
    text = capsys.readouterr().out
    kept = section(text, "Entries kept per KV head")
    if "layer" in axes:
        assert "depend on the prompt's content" in kept[0]
        assert "on average over layers and KV heads at most " in kept[1]
    else:
        assert kept[0].split()[:3] == ["layers", "0-3", "32.0"]
        assert "on average over the KV heads of a layer" in kept[1]
    assert "at most" not in " ".join(section(text, "Memory"))


EXCHANGED = "Exchanged between ranks, where the model is divided over them (--tp-size)"


def test_what_ranks_exchange(model, capsys):
    """4 layers, 2 KV heads: a float64 per list, or per token if heads compete.

    Counts of kept entries are exchanged only if the prompt's length does not decide them, and if
    heads continue with lists of different lengths. Whether the tensors are finite is a byte per KV
    head. If ranks share KV heads, queries of 8 heads of 32 are added, of 2 bytes each.
    """
    counts, finite, query = 4 * 2 * 8, 2, 4 * 8 * 32 * 2
    for name, settings, prefill, fold, queries in (
        ("snapkv", ["capacity=100", "window=16"], finite, None, 16),
        ("adakv", ["capacity=100", "window=8"], finite + counts + 4 * 2 * 1000 * 8, None, 8),
        ("h2o", ["heavy=40", "window=40"], finite + counts, 2 * counts, 1000),
        # Sums and how many were summed, of what stays and of 16 steps' tokens, with masks then.
        (
            "tova",
            ["capacity=100"],
            finite + 2 * 4 * 2 * 1000 * 8,
            4 * 2 + 2 * 4 * 2 * 116 * (8 + 1),  # and whether they were finite
            1,
        ),
        ("sinks-recent", ["capacity=100"], 0, None, 0),
        ("streamingllm", [], 0, 0, 0),
    ):
        given = [x for each in settings for x in ("--set", each)]
        assert explain(model, name, *given) == 0
        lines = section(capsys.readouterr().out, EXCHANGED)
        assert size_text(prefill) in lines[0]
        told = ["prefill", *["fold"] * (fold is not None), *["queries"] * (queries > 0)]
        assert [line.split()[0] for line in lines] == told
        assert fold is None or size_text(fold) in lines[1]
        if queries:
            assert "of a prefill besides, " in lines[-1]
            assert size_text(queries * query) in lines[-1]
            assert (f", and {size_text(query)} of a decode step" in lines[-1]) == (fold is not None)


def test_cost_by_expression(model, capsys):
    assert explain(model, "tova", "--set", "capacity=100") == 0
    lines = section(
        capsys.readouterr().out,
        "Cost of deciding, for all layers (generated kernels; see docs/operators.md)",
    )
    # In 4 layers, for 8 heads and 1000 tokens, a pass of 2 x 32 multiply-adds and 5 of the
    # softmax; then a mean over the query and one over the heads together.
    assert lines[0].startswith(f"score{flops_text(4 * 8 * 1000 * (2 * 32 + 5 + 1)):>34}  ")
    assert lines[0].endswith("% of the prefill's time")
    assert lines[1].startswith("keep ")
    assert lines[2].startswith("in all ")
    # keys 1000 x 2 x 32 and queries 8 x 32, 2 bytes each
    assert lines[3] == f"reads{size_text(2 * (64_000 + 256)):>34}  per layer"


def test_cost_of_every_pair_of_tokens(model, capsys):
    assert explain(model, "h2o") == 0
    text = capsys.readouterr().out
    assert re.search(
        r"^  heat +[\d.]+ Gflop  .*'s time; it looks at every pair of tokens$", text, re.M
    )
    assert explain(model, "roco") == 0
    text = capsys.readouterr().out
    assert re.search(r"^  in all +0 flop  0.000% of the prefill's time$", text, re.M)


def test_what_is_expected_on_a_gpu(model, capsys):
    words = ("--gpu", "h200", "--batch", "3", "--max-new-tokens", "40")
    assert explain(model, "h2o", "--set", "heavy=60", "--set", "window=40", *words) == 0
    lines = section(
        capsys.readouterr().out,
        "Expected on H200 SXM (estimated; see docs/performance/README.md)",
    )
    assert lines[0].split() == ["full", "KV", "policy"]
    names = [re.split(r"  +", line)[0] for line in lines]
    assert names[1:11] == [
        "KV cache of a prompt", "TTFT", "TPOT, 3 at once", "requests at once, at most",
        "throughput then, tokens/s", "scoring and compaction", "arithmetic of scoring",
        "operations and launches",
        "host time where entries leave", "operations and launches",
    ]  # fmt: skip
    assert re.split(r"  +", lines[1])[1:] == ["1,000.0 KiB", "100.0 KiB", "10.00 x"]
    text = " ".join(lines[11:])
    assert text.count("assumed: ") == 7
    assert "answers of 40 tokens" in text

    assert explain(model, "h2o", "--set", "heavy=60", "--set", "window=40", *words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["full"]["prompt_bytes"] == 10 * found["policy"]["prompt_bytes"] == 1_024_000
    assert found["fold"]["times"] == 40 // 16
    assert found["scoring_share"] == found["scoring_seconds"] / found["full"]["ttft_seconds"]
    # A pass of 2 x 32 multiply-adds for each of 8 heads, 4 layers and pair of tokens, and more.
    assert 1 < found["scoring_operations"] / (4 * 8 * 1000 * 1001 / 2 * 2 * 32) < 1.2
    assert (found["batch"], found["max_new_tokens"], found["length"]) == (3, 40, 1000)
    assert len(found["assumptions"]) == 7
    assert found["name"] == "h2o"
    assert all(each["ttft_seconds"] > 0 for each in (found["full"], found["policy"]))


def test_a_slower_gpu_is_expected_to_take_longer(model, capsys):
    times = []
    for gpu in ("h200", "a100", "l40s"):
        assert explain(model, "snapkv", "--gpu", gpu, "--json", length=100_000) == 0
        times.append(json.loads(capsys.readouterr().out)["full"]["ttft_seconds"])
    assert times[0] < min(times[1:])


@pytest.mark.parametrize("words", [("--batch", "3"), ("--max-new-tokens", "3"), ("--json",)])
def test_options_of_a_gpu_want_one(model, capsys, words):
    assert explain(model, "snapkv", *words) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"{words[0]}: error[arguments]: it belongs to `--gpu`")
    with pytest.raises(SystemExit) as ended:
        explain(model, "snapkv", "--gpu", "h300")
    assert ended.value.code == 2


def section(text: str, title: str) -> list[str]:
    """The lines below a title."""
    lines = text.splitlines()
    rest = lines[lines.index(title) + 1 :]
    return [line.strip() for line in (rest[: rest.index("")] if "" in rest else rest)]


def test_propagation(model, capsys):
    assert explain(model, "fastkv", "--set", "tsp_layer=2") == 0
    lines = section(capsys.readouterr().out, "Tokens that reach a layer")
    assert lines[0] == "first    layer == tsp_layer and prompt >= capacity  (layer 2)"
    assert lines[-3:-1] == ["layers 0-2         1,000", "layer 3              200"]
    assert lines[-1] == "computed           3,200  rows at most, 80.0% of the prefill's"
    assert explain(model, "asl", "--set", "capacity=100", "--set", "two_pass=true") == 0
    lines = section(capsys.readouterr().out, "Tokens that reach a layer")
    assert lines[0].endswith("(the prompt's content decides)")
    assert "The prefill begins again on these tokens, at positions 0, 1, ..." in lines
    assert lines[-2].split() == ["layers", "0-3", "68", "to", "100"]
    assert explain(model, "gemfilter", "--set", "capacity=100", "--set", "filter=1") == 0
    lines = section(capsys.readouterr().out, "Tokens that reach a layer")
    assert lines[-1] == "computed           2,400  rows at most, 60.0% of the prefill's"


def test_states_and_queries_of_decode(model, capsys):
    assert explain(model, "h2o", "--set", "heavy=60", "--set", "window=40") == 0
    lines = section(capsys.readouterr().out, "While decoding")
    assert lines[0] == "when     every 16 steps, or as often as the server is told to"
    assert "state    heat: heat + sum[group, query](attn(new))  : number[kv, token]" in lines
    # A float64 for 100 entries of 2 KV heads in 4 layers.
    assert f"states   {size_text(8 * 100 * 2 * 4)} per request" in lines
    assert explain(model, "pyramidinfer") == 0
    lines = section(capsys.readouterr().out, "While decoding")
    # 201 queries of 8 heads of size 32 in 4 layers, 2 bytes each.
    assert (
        f"queries  {size_text(201 * 8 * 32 * 4 * 2)} per request, the last 201 of each layer"
        in lines
    )


@pytest.mark.parametrize("place", ["file", "decode"])
def test_where_states_begin(model, tmp_path, capsys, place):
    """A state of the file has begun in the prefill, one of decode begins at the first step."""
    state = "state: {heat: {start: 1, next: 'heat + sum[group, query](attn(new))'}}\n"
    text = {
        "file": f"{state}score: heat\nbudget: 20\nkeep: top(score)\ndecode: same\n",
        "decode": "score: position\nbudget: 20\nkeep: top(score)\n"
        f"decode:\n  {state}  score: heat\n",
    }
    policy = tmp_path / "x.yaml"
    policy.write_text(f"policy: x\nlanguage: 1\n{text[place]}")
    assert explain(model, str(policy)) == 0
    lines = section(capsys.readouterr().out, "While decoding")
    assert any(line.split() == ["score", "heat"] for line in lines)
    assert ("at the first step from 1" in map(str.strip, lines)) == (place == "decode")


def test_merging_and_sharing(model, capsys):
    assert explain(model, "d2o") == 0
    lines = section(capsys.readouterr().out, "What becomes of dropped entries")
    assert lines[:2] == ["into     nearest(key)", "accept   match >= bar"]
    assert lines[-1] == "apply    keys and values"
    assert explain(model, "minicache", "--set", "start=0") == 0
    lines = section(capsys.readouterr().out, "Layers that share directions")
    assert lines[0] == "layers     0 and 1, 2 and 3"


def test_what_is_reported(model, tmp_path, capsys):
    assert explain(model, "d2o") == 0
    lines = section(capsys.readouterr().out, "Reported by `kvpolicy run`")
    assert lines == ["layer_ratio  prefill  layers * rate * softmax[layer](-spread)  : number"]
    policy = tmp_path / "p.yaml"
    policy.write_text(
        "policy: p\nlanguage: 1\nparams: {wide: false}\nlet:\n  size: mean[kv](norm1[dim](key))\n"
        "keep: top(size, 4) where wide else recent(4)\ndecode: same\nreport: [size]\n"
    )
    assert explain(model, str(policy)) == 0
    lines = section(capsys.readouterr().out, "Reported by `kvpolicy run`")
    assert lines == ["size  not computed with these parameters"]
    assert explain(model, str(policy), "--set", "wide=true") == 0
    lines = section(capsys.readouterr().out, "Reported by `kvpolicy run`")
    assert lines == ["size  prefill and decode  mean[kv](norm1[dim](key))  : number[token]"]


def test_explain_speaks_of_a_server(model, capsys):
    """Its digest is the one in `/server_info` and in the JSON; it was of a fold at every step."""
    assert explain(model, "h2o", "--gpu", "h200", "--json", length=4096) == 0
    digest = json.loads(capsys.readouterr().out)["digest"]
    assert explain(model, "h2o", length=4096) == 0
    text = capsys.readouterr().out
    assert f"digest  {digest[:16]}\n" in text
    assert "every 16 steps" in "\n".join(section(text, "While decoding"))


def test_difference_of_sections(model, capsys):
    assert main(["diff", "fastkv", "h2o", "--model", model, "--length", "1000"]) == 1
    text = capsys.readouterr().out
    assert section(text, "Tokens that reach the last layer") == ["at most 200 -> 1,000"]
    assert section(text, "While decoding") == [
        "nothing leaves -> every 16 steps, or as often as the server is told to"
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "the key `num_hidden_layers` is missing"),
        (
            {"num_attention_heads": "8"},
            "`num_attention_heads` is '8'; it is a positive whole number",
        ),
        ({"num_key_value_heads": 3}, "8 heads cannot share 3 KV heads"),
    ],
)
def test_unusable_config(tmp_path, capsys, change, message):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIG, **change}))
    assert explain(str(file), "snapkv") == 2
    assert message in capsys.readouterr().err


def test_a_byte_order_mark_is_not_part_of_a_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8-sig")
    assert explain(str(tmp_path), "snapkv") == 0


@pytest.mark.parametrize(
    ("content", "message"), [("[]", "is a JSON object"), ("{", "not JSON"), (None, "no such file")]
)
def test_config_that_is_none(tmp_path, capsys, content, message):
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    assert explain(str(file), "snapkv") == 2
    assert message in capsys.readouterr().err


def test_diff(model, tmp_path, capsys):
    def diff(first: str, second: str) -> int:
        return main(["diff", first, second, "--model", model, "--length", "3000"])

    assert diff("snapkv", "snapkv") == 0
    assert "mean the same" in capsys.readouterr().out
    assert diff("snapkv", "pyramidkv") == 1
    text = capsys.readouterr().out
    assert "window       32 -> 8" in text
    assert "beta         - -> 20" in text
    # A prompt of less than twice the budget gets even budgets.
    assert "layers 0-3" not in text
    assert "Overlap on a sample" in text
    assert diff("snapkv", "sinks-recent") == 1
    first = capsys.readouterr().out
    assert diff("snapkv", "sinks-recent") == 1
    assert capsys.readouterr().out == first
    assert diff("snapkv", str(tmp_path / "missing.yaml")) == 2


def test_diff_with_values_of_parameters(model, capsys):
    def diff(*words: str) -> int:
        return main(["diff", *words, "--model", model, "--length", "3000"])

    assert diff("snapkv", "adakv", "--set", "capacity=64") == 1
    assert "capacity" not in capsys.readouterr().out  # both have it, and it is the same
    assert diff("snapkv", "streamingllm", "--set", "kernel=5") == 1
    output = capsys.readouterr().out
    assert re.search(r"kernel +5 -> -", output)
    assert "Overlap on a sample" in output
    assert diff("snapkv", "pyramidkv", "--set", "windw=16") == 2
    error = capsys.readouterr().err
    assert "no policy here has a parameter `windw`" in error
    assert "did you mean `window`?" in error


def test_diff_of_policies_that_require_more_layers_than_a_sample_has(tmp_path, capsys):
    config, policy = tmp_path / "config.json", tmp_path / "deep.yaml"
    config.write_text(json.dumps({**CONFIG, "num_hidden_layers": 16}))
    policy.write_text("policy: deep\nlanguage: 1\nrequire: [layers > 8]\nkeep: recent(100)\n")
    words = ["diff", str(policy), "snapkv", "--model", str(config), "--length", "3000"]
    assert main(words) == 1
    lines = section(capsys.readouterr().out, "Overlap on a sample")
    assert "16 layers" in lines[0]
    assert lines[0].endswith(" 1,024 tokens")


@pytest.mark.thorough
def test_shipped_policies_pass_their_tests(capsys):
    assert main(["test"]) == 0
    assert " 0 failed (interpreter and torch)" in capsys.readouterr().out


POLICY = """policy: ends
language: 1
about: ends
params: {n: {default: 2, min: 1, unit: tokens}}
keep: sinks(1) then recent(n)
"""
CASE = """policy: ends
tests:
  - name: six tokens
    model: {layers: 1, heads: 1, kv_heads: 1, head_size: 2}
    tokens: 6
    kept: "0 4-5"
"""


def check(tmp_path, capsys, case: str) -> tuple[int, str]:
    (tmp_path / "ends.yaml").write_text(POLICY)
    (tmp_path / "ends.test.yaml").write_text(case)
    code = main(["test", str(tmp_path / "ends.yaml")])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_policy_test_that_passes(tmp_path, capsys):
    assert check(tmp_path, capsys, CASE)[0] == 0
    refused = CASE.replace('kept: "0 4-5"', "set: {n: 0}\n    refused: at least 1")
    assert check(tmp_path, capsys, refused)[0] == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"0 4-5"', '"0 3 5"', "kept 0 4-5; 4 should not be there; 3 is missing"),
        ('"0 4-5"', '"0-5"', "1-3 are missing"),
        ("tokens: 6", "tokens: 6\n    set: {n: 0}", "refused: ends: error[range]: `n` is 0"),
        ('kept: "0 4-5"', "refused: never", "should be refused with `never`, but is accepted"),
        ("tokens: 6", "tokens: 6\n    budgets: 3", "no budgets to compare"),
    ],
)
def test_policy_test_that_fails(tmp_path, capsys, old, new, message):
    code, text = check(tmp_path, capsys, CASE.replace(old, new))
    assert code == 1
    assert message in text
    assert "ends.test.yaml:3: six tokens (torch)" in text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("policy: ends", "policy: other", "`policy` is `other`, but the file tests `ends`"),
        ("tokens: 6", "tokns: 6", "did you mean `tokens`?"),
        ("tokens: 6", "tokens: six", "`six` is no whole number"),
        ("layers: 1", "layers: 1000000", "the tensors have more than"),
        ('"0 4-5"', '"5 4"', "positions are written in ascending order"),
        ('"0 4-5"', '"a"', "`a` is no position"),
        ('"0 4-5"', '[["0", "1"]]', "2 KV heads are listed, the model has 1"),
        ('"0 4-5"', '["0", "1"]', "2 layers are listed, the model has 1"),
        ('    kept: "0 4-5"\n', "", "and so on) or how it is `refused`"),
        ("head_size: 2", "size: 2", "unknown key `size`"),
        (", head_size: 2", "", "the key `head_size` is missing"),
        ("tokens: 6", "tokens: 6\n    q: [a]", "`a` is no number"),
        ("tests:", "tests: 3\nmore:", "unknown key `more`"),
    ],
)
def test_unusable_test_file(tmp_path, capsys, old, new, message):
    code, text = check(tmp_path, capsys, CASE.replace(old, new))
    assert code == 2
    assert message in text
    assert "Traceback" not in text


def test_tensors_of_the_wrong_size_fail_the_test(tmp_path, capsys):
    code, text = check(tmp_path, capsys, CASE.replace("tokens: 6", "tokens: 6\n    q: [1, 2, 3]"))
    assert code == 1
    assert "`q` has the sizes [3], not [1, 1, 6, 2] or the last of them" in text


def test_missing_tests(tmp_path, capsys):
    (tmp_path / "ends.yaml").write_text(POLICY)
    assert main(["test", str(tmp_path / "ends.yaml")]) == 2
    assert "`ends.test.yaml` is missing" in capsys.readouterr().err
    assert main(["test", str(tmp_path)]) == 2
