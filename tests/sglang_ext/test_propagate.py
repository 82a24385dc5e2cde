"""Prefill in which tokens leave: answers, kept sets and rows of every layer in a real scheduler.

The plain model (tests/reference/eager.py) really drops the rows; `scenarios_propagate.py` fills the
free slots with NaN before each prompt.
"""

import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))

server = pytest.mark.server
FILE = "scenarios_propagate.py"
ROOT = Path(__file__).parents[2]
FASTKV = {"fastkv": ["tsp_layer=1"]}
GEMFILTER = {"gemfilter": ["filter=1", "capacity=40"]}
PYRAMID = {"pyramidinfer": ["least=16", "batch=4"]}
ASL = {"asl": ["capacity=40", "lookback=2", "window=8", "tau=1.5", "start=1"]}
TWO_PASS = {"asl": [*ASL["asl"], "two_pass=true"]}
ALL = {**FASTKV, **GEMFILTER, **PYRAMID, **ASL}
RETRACT = {"SGLANG_TEST_RETRACT": "1"}
LONG = {"SGLANG_KV_POLICY_MAX_ONE_PIECE_PREFILL": "200"}
PAGED = {"disable_overlap_schedule": True, "page_size": 16}
LAST = """
policy: last-not-sure
language: 1
about: Which tokens go deeper depends on data alone.
propagate:
  first: layer == 1
  tokens: top(sum[head, query](logits(recent(4))), 30)
"""
HEAT = """
policy: heat
language: 1
about: What all queries attended to, summed up, decides who goes deeper and what stays.
state:
  heat: heat + sum[group, query](attn(new))
propagate:
  first: layer == 1
  tokens: recent(8) then top(sum[kv](heat), 60)
score: heat
budget: 40
keep: recent(8) then top(score)
decode: same
"""
AGAIN = """
policy: again
language: 1
about: A second pass on a few tokens, thinned while decoding at the positions of that pass.
propagate:
  first: layer == 1
  tokens: top(sum[head, query](logits(recent(1))), 40)
  restart: true
score: mean[head, query](attn(recent(1)))
budget: 30
keep: recent(4) then top(score)
positions: slots
decode: same
"""
NOBODY = """
policy: nobody
language: 1
about: No token goes deeper.
propagate:
  first: layer == 1
  tokens: top(sum[head, query](logits(recent(4))), prompt - 200)
"""


@pytest.fixture
def written(tmp_path):
    """A function from the text of a policy to `policies` of a scenario."""

    def write(text):
        path = tmp_path / f"{text.split()[1]}.yaml"
        path.write_text(text)
        return {str(path): []}

    return write


def expected_rows(name, settings, answer, result, layers):
    """Expected number of rows that enter each layer."""
    computed, cached = len(answer["ids"]) - answer["cached"], answer["cached"]
    facts = answer["facts"]
    if "uncompressed" in facts or facts["selected_layer"] is None:
        return [computed] * layers
    if name in ("gemfilter", "again") or "two_pass=true" in settings:
        acting, chosen = facts["selected_layer"], facts["propagated_tokens"]
        return [computed + chosen] * (acting + 1) + [chosen] * (layers - acting - 1)
    left = result.propagated
    if not isinstance(left, dict):
        left = {result.selected_layer: left}
    rows = [computed]
    for layer in range(layers - 1):
        rows.append(sum(p >= cached for p in left[layer]) if layer in left else rows[-1])
    return rows


def check(found, policies, folder, interval=16):
    """Checks that answers, kept sets, rows and facts equal the plain model's."""
    from eager import generate

    compared = 0
    for path, settings in policies.items():
        name = Path(path).stem
        overrides = dict(setting.split("=") for setting in settings)
        for rid, answer in found.items():
            if rid.split()[0] != name:
                continue
            given = {"policy": path, "overrides": overrides, "reused": answer["cached"]}
            given = {} if answer["facts"].get("uncompressed") == "too_long" else given
            plain = generate(folder, answer["ids"], new_tokens=6, fold_interval=interval, **given)
            assert answer["tokens"] == plain.tokens, rid
            assert answer["kept"] in (None, plain.kept[0]), rid
            rows = expected_rows(name, settings, answer, plain.result, len(plain.kept[0]))
            assert answer["rows"] == rows, rid
            compared += 1
    assert (found["used"], found["private"]) == (0, 0)
    assert compared == len(found) - 2
    return {rid: each["facts"] for rid, each in found.items() if " " in rid}


@server
def test_answers_kept_sets_and_rows(scenario, model):
    lengths = [300, 131, 41, 9, 8, 1]
    found = scenario(FILE, "answers", policies=ALL, lengths=lengths)
    facts = check(found, ALL, model)
    assert facts["fastkv 300"]["propagated_tokens"] == 60
    assert facts["fastkv 300"]["selected_layer"] == 1
    assert found["fastkv 300"]["rows"] == [300, 300, 60, 60]
    assert found["gemfilter 300"]["rows"] == [340, 340, 40, 40]
    assert found["asl 300"]["rows"] == [300, 300, 40, 40]
    assert facts["pyramidinfer 300"]["propagated_tokens"] < 300
    assert facts["fastkv 1"]["uncompressed"] == "short_prompt"


@server
def test_a_second_pass_after_any_layer(scenario, model):
    found = scenario(FILE, "answers", policies=TWO_PASS, lengths=[300, 131], prefix=100)
    facts = check(found, TWO_PASS, model)
    assert {each["selected_layer"] for each in facts.values()} == {1}
    # The layer is not found: the last one begins the second pass.
    policies = {"asl": [*TWO_PASS["asl"][:3], "tau=0.001", "start=1", "two_pass=true"]}
    found = scenario(FILE, "answers", policies=policies, lengths=[300, 41])
    facts = check(found, policies, model)
    assert {each["selected_layer"] for each in facts.values()} == {3}


@pytest.mark.thorough(every=3)
@server
@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_model_classes(scenario, checkpoint, kind):
    folder = checkpoint(kind)
    policies = {**FASTKV, "gemfilter": ["filter=2", "capacity=40"], **ASL}
    found = scenario(FILE, "answers", folder=folder, policies=policies, lengths=[200])
    check(found, policies, folder)
    assert found["fastkv 200"]["rows"] == [200, 200, 40, 40]


@server
def test_the_embedded_model_in_pages(scenario):
    folder = str(ROOT / "examples" / "model-tiny")
    flags = {"page_size": 16, "disable_overlap_schedule": True, "prefix": 64}
    found = scenario(FILE, "answers", folder=folder, policies=ALL, lengths=[200], **flags)
    check(found, ALL, folder)
    assert found["fastkv 200"]["cached"] == 64


@server
def test_chosen_tokens_of_the_radix_cache_have_no_rows(scenario, model):
    found = scenario(FILE, "answers", policies=ALL, lengths=[300, 131], prefix=100)
    check(found, ALL, model)
    assert {found[f"{name} 300"]["cached"] for name in ALL} == {100}
    assert found["gemfilter 131"]["cached"] == 131 - 40  # it owns the slots of its second pass
    facts = found["fastkv 300"]["facts"]
    assert found["fastkv 300"]["rows"][3] < facts["propagated_tokens"]


@pytest.mark.thorough
@server
def test_chunks_wait_at_the_acting_layer(scenario, model):
    whole = scenario(FILE, "answers", policies=ALL, lengths=[300, 50, 51])
    chunks = {"chunked_prefill_size": 50}
    found = scenario(FILE, "answers", policies=ALL, lengths=[300, 50, 51], **chunks)
    for rid in ("fastkv 300", "fastkv 51", "gemfilter 300", "gemfilter 51", "asl 50"):
        for fact in ("tokens", "kept", "rows"):
            assert found[rid][fact] == whole[rid][fact], (rid, fact)
    for rid in ("pyramidinfer 300", "pyramidinfer 51", "asl 300", "asl 51"):
        assert found[rid]["facts"]["uncompressed"] == "too_long", rid
        assert set(found[rid]["rows"]) == {len(found[rid]["ids"])}, rid
    policies, lengths = {**PYRAMID, **ASL}, [300, 50, 131]
    found = scenario(FILE, "answers", LONG, policies=policies, lengths=lengths, **chunks)
    check(found, policies, model)
    for name in policies:
        assert found[f"{name} 300"]["facts"]["uncompressed"] == "too_long"
        assert found[f"{name} 131"]["facts"]["propagated_tokens"] < 131


@server
def test_the_last_token_may_leave(scenario, model, written):
    policies = written(LAST)
    found = scenario(FILE, "answers", policies=policies, lengths=[300, 131, 5], prefix=60)
    facts = check(found, policies, model)
    assert found["last-not-sure 300"]["cached"] == 0
    assert facts["last-not-sure 300"]["propagated_tokens"] == 30
    assert any(found[f"last-not-sure {n}"]["kept"][3][0][-1] < n - 1 for n in (300, 131))


@server
def test_sums_over_all_queries_in_chunks(scenario, model, written):
    policies = written(HEAT)
    flags = {"lengths": [300, 131, 65, 64], "chunked_prefill_size": 64}
    found = scenario(FILE, "answers", policies=policies, **flags)
    check(found, policies, model)
    assert found["heat 300"]["rows"] == [300, 300, 68, 68]


@server
def test_decoding_goes_on_from_a_second_pass(scenario, model, written):
    policies = written(AGAIN)
    every = {"SGLANG_KV_POLICY_FOLD_INTERVAL": "2"}
    flags = {"lengths": [300, 131, 35], "chunked_prefill_size": 64}
    found = scenario(FILE, "answers", every, policies=policies, **flags)
    facts = check(found, policies, model, interval=2)
    assert facts["again 300"]["folds"] == 2
    assert facts["again 300"]["propagated_tokens"] == 40


@server
def test_where_no_token_is_chosen_all_go_on(scenario, model, written):
    policies = written(NOBODY)
    flags = {"lengths": [201, 200], "chunked_prefill_size": 64}
    found = scenario(FILE, "answers", policies=policies, **flags)
    check(found, policies, model)
    assert found["nobody 201"]["facts"]["propagated_tokens"] == 1
    assert found["nobody 200"]["rows"] == [200] * 4


@server
def test_prompts_in_the_radix_cache_are_complete(scenario):
    never = {"asl": [*ASL["asl"][:3], "tau=0.001", "start=1"]}
    everything = {"fastkv-adakv": ["tsp_layer=1", "tsp_rate=1"]}
    found = scenario(FILE, "shared", policies={**FASTKV, **GEMFILTER, **never, **everything})
    assert {name: each["cached"] for name, each in found.items()} == {
        "fastkv": 0,
        "gemfilter": 0,
        "asl": 199,
        "fastkv-adakv": 199,
    }
    for name, each in found.items():  # one token alone is the first of several
        assert each["one"] == each["tokens"][:1], name
    assert found["asl"]["facts"]["selected_layer"] is None
    assert found["asl"]["facts"]["propagated_tokens"] == 200


@server
def test_aborted_between_chunks(scenario):
    seen = scenario(FILE, "aborted", policies={**FASTKV, **GEMFILTER}, chunked_prefill_size=50)
    assert seen["fastkv"]["rows"] >= 150
    assert seen["gemfilter"]["rows"] == 0  # its second pass starts from the tokens
    assert min(seen[name]["private"] for name in ("fastkv", "gemfilter")) >= 30
    assert (seen["fastkv"]["after"], seen["gemfilter"]["after"]) == (0, 0)
    assert seen["missing_after_flush"] == 0


@pytest.mark.thorough
@server
@pytest.mark.parametrize(
    ("count", "env", "flags"),
    [
        (30, {}, {"scratch": 2, "max_total_tokens": 1500}),
        (30, {**LONG, **RETRACT}, {"max_total_tokens": 1200, "chunked_prefill_size": 64, **PAGED}),
        (30, RETRACT, {"chunked_prefill_size": -1, "mem_fraction_static": 0.5}),
        (16, LONG, {"chunked_prefill_size": 64, "enable_mixed_chunk": True}),
    ],
    ids=["few-rows", "retracted-paged-chunks", "retracted", "mixed-chunks"],
)
def test_answers_do_not_depend_on_what_else_happens(scenario, count, env, flags):
    snapkv = {"snapkv": ["capacity=40", "window=16"]}
    policies = {**FASTKV, **GEMFILTER, **PYRAMID, **TWO_PASS, **snapkv}
    seen = scenario(FILE, "mixed", env, policies=policies, count=count, seed=len(flags), **flags)
    assert seen["different"] == []
    assert (seen["used"], seen["private"], seen["missing_after_flush"]) == (0, 0, 0)
    assert seen["left"] >= 5
    assert seen["aborted"] >= 1
    assert (seen["retractions"] > 0) == ("SGLANG_TEST_RETRACT" in env)
    assert (seen["mixed"] > 20) == ("enable_mixed_chunk" in flags)


@pytest.mark.thorough
@server
def test_logprobs_and_metrics_of_a_server(model):
    from kvpolicy.evaluation.serving import serve

    path = str(ROOT / "policies" / "fastkv.yaml")
    ids = [3 + 7 * n % 490 for n in range(200)]

    def ask(server, **fields):
        sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, **fields}
        server.flush()
        return server.post("/generate", body).json()

    with serve(model, [path], ["tsp_layer=1"], enable_metrics=True) as server:
        alone = ask(server)
        output = ask(server, return_logprob=True)
        whole = ask(server, return_logprob=True, logprob_start_len=0)
        metrics = server.metrics()
    facts = alone["meta_info"]["kv_policy"]
    assert (facts["selected_layer"], facts["propagated_tokens"]) == (1, 40)
    assert output["output_ids"] == alone["output_ids"]
    chosen = [token for _, token, _ in output["meta_info"]["output_token_logprobs"]]
    assert chosen == alone["output_ids"]
    assert whole["meta_info"]["kv_policy"]["uncompressed"] == "input_logprobs"
    assert len(whole["meta_info"]["input_token_logprobs"]) == 200
    counted = {k: v for k, v in metrics.items() if "propagated_tokens_total" in k}
    assert sum(counted.values()) == 80, counted


def bound_policy(name, **overrides):
    from kvpolicy.dsl.bind.bind import bind
    from kvpolicy.dsl.check.policy import load
    from kvpolicy.dsl.ir.nodes import ModelShape

    path = ROOT / "policies" / f"{name}.yaml"
    shape = ModelShape(layers=4, heads=4, kv_heads=2, head_dim=32)
    return bind(load(str(path)).require(), shape, overrides)


@pytest.mark.parametrize(
    ("name", "overrides", "prompt", "plan"),
    [
        ("snapkv", {}, 5000, None),
        ("fastkv", {"tsp_layer": "1"}, 300, (1, False, 292)),
        ("fastkv", {"tsp_layer": "1"}, 8, (1, False, 0)),
        ("fastkv", {"tsp_layer": "3"}, 300, None),  # there is no deeper layer
        ("gemfilter", {"filter": "1", "capacity": "40"}, 300, (1, True, 260)),
        ("gemfilter", {"filter": "3", "capacity": "40"}, 300, (3, True, 260)),
        ("gemfilter", {"filter": "1", "capacity": "40"}, 40, None),  # all are chosen
        ("asl", {"capacity": "40", "lookback": "2"}, 300, (None, False, 268)),
        ("asl", {"capacity": "40", "lookback": "2", "two_pass": "true"}, 300, (None, True, 260)),
        ("pyramidinfer", {}, 300, (None, False, 239)),
    ],
)
def test_what_is_known_before_the_prefill(name, overrides, prompt, plan):
    pytest.importorskip("torch")
    from kvpolicy.sglang_ext.request import propagation

    found = propagation.plan(bound_policy(name, **overrides), prompt)
    assert found == (None if plan is None else propagation.PropagationPlan(*plan))


class Adder:
    """Replaces SGLang's prefill adder, as far as a propagating prompt needs it."""

    def __init__(self, chunk, admitted=()):
        self.rem_chunk_tokens, self.can_run_list = chunk, list(admitted)

    def ceil_paged_tokens(self, tokens):
        return -(-tokens // 16) * 16


@pytest.mark.parametrize(
    ("layer", "chunk", "others", "waits", "chunk_after"),
    [
        (None, 128, 0, False, 128),  # it fits
        (None, 64, 1, True, 64),  # not beside another one
        (None, 64, 0, False, 112),  # alone, in a larger pass
        (None, None, 1, False, None),  # nothing is split
        (2, 64, 1, False, 64),  # it may be split
        (2, 128, 2, True, 128),  # too many of its kind
    ],
)
def test_admission(layer, chunk, others, waits, chunk_after):
    pytest.importorskip("torch")
    from kvpolicy.sglang_ext.request import admission

    state = SimpleNamespace(plan=SimpleNamespace(layer=layer), propagates=True)
    request = SimpleNamespace(full_untruncated_fill_ids=[0] * 120, prefix_len=20)
    admitted = [SimpleNamespace(kv_policy_state=state) for _ in range(others)]
    adder = Adder(chunk, admitted)
    assert admission.must_wait(adder, request, state, most=2) is waits
    assert adder.rem_chunk_tokens == chunk_after


class Recorder:
    """Replaces SGLang's recorder of experts."""

    recording = True

    @contextmanager
    def disable_this_region(self):
        self.recording = False
        yield
        self.recording = True


def test_experts_of_a_second_pass_are_not_recorded(monkeypatch):
    """SGLang would take them for experts of the layer after which the pass begins."""
    pytest.importorskip("sglang")
    from kvpolicy.sglang_ext.face import compat
    from kvpolicy.sglang_ext.forward import view
    from kvpolicy.sglang_ext.forward.propagate import PropagateStep
    from sglang.srt.eplb import expert_distribution

    recorder, seen = Recorder(), []
    name = "get_global_expert_distribution_recorder"
    monkeypatch.setattr(expert_distribution, name, lambda: recorder)
    monkeypatch.setattr(compat, "embed", lambda model, ids: ids)
    monkeypatch.setattr(compat, "start_stream", lambda batch: None)
    monkeypatch.setattr(view, "rows_of", lambda hidden, batch: (None, None))
    step = object.__new__(PropagateStep)
    layers = [lambda *_: seen.append(recorder.recording)] * 3
    step._services = SimpleNamespace(layers=layers, runner=SimpleNamespace(model=None))
    step._layout = SimpleNamespace(replace=lambda rows: None)
    step._start_again(1, (None, None, None), {})
    assert seen == [False, False]
    assert recorder.recording


class Other:
    """A model whose layers pass rows on in another way."""


def test_other_models_are_refused_by_class():
    pytest.importorskip("sglang")
    from kvpolicy.sglang_ext.face.errors import Refused
    from kvpolicy.sglang_ext.forward import layers
    from kvpolicy.sglang_ext.forward.services import Services

    with pytest.raises(
        Refused, match=r"`fastkv` .*Qwen3, Qwen3-MoE; the model's class is Other\.$"
    ):
        layers.wrap(Services(()), SimpleNamespace(model=Other()), ["fastkv"])


@pytest.mark.parametrize(
    ("text", "chunk", "most"),
    [("", 512, 512), ("", -1, None), ("", None, None), ("700", 512, 700), (" 1 ", None, 1)],
)
def test_longest_prompt_in_one_piece(monkeypatch, text, chunk, most):
    from kvpolicy.sglang_ext.face import options

    monkeypatch.setenv(options.ONE_PIECE.variable, text)
    assert options.one_piece(chunk) == most


@pytest.mark.parametrize("text", ["0", "-5", "1e3", "many"])
def test_a_wrong_length_is_refused(monkeypatch, text):
    from kvpolicy.sglang_ext.face import options
    from kvpolicy.sglang_ext.face.errors import Refused

    monkeypatch.setenv(options.ONE_PIECE.variable, text)
    with pytest.raises(Refused, match=f"prefill {text}: expected a whole number from 1 on"):
        options.one_piece(512)
