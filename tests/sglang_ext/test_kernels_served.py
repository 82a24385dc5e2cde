"""Triton's kernels in a real scheduler, interpreted: the same answers, no needless waits."""

import pytest
import torch
from host_waits import HostWaits
from kvpolicy.sglang_ext.face.host import to_device, to_host
from served_policies import OF_EVERY_CLASS

TRITON = {"SGLANG_KV_POLICY_KERNELS": "triton", "TRITON_INTERPRET": "1"}
TORCH = {"SGLANG_KV_POLICY_KERNELS": "torch", "TRITON_INTERPRET": "1"}
NO_WAIT = {  # the prompt's length decides how much stays
    "snapkv": ["capacity=48", "window=16"],
    "pyramidkv": ["capacity=48"],
    "vatp-snapkv": ["capacity=48"],
    "sinks-recent": ["capacity=30"],
    "tova": ["capacity=40"],  # remembered for decode steps
    "streamingllm": ["start=2", "window=30"],
}
ONE_WAIT = {
    "adakv": ["capacity=40"],
    "lava": ["capacity=48"],
    "dynamickv": ["capacity=40"],
    "cake": ["capacity=48"],  # remembered for decode steps
    "h2o": ["heavy=20", "window=20"],  # the same; its KV heads keep different positions
    "d2o": ["rate=0.4"],
}
WAIT = "host.py:to_host cpu"
COUNT = "arriving.py:read numpy"


@pytest.mark.server
def test_answers_and_facts_are_those_of_the_references(scenario):
    def run(env):
        return scenario(
            "scenarios_kernels.py",
            "same",
            {**env, "SGLANG_KV_POLICY_FOLD_INTERVAL": "4"},
            policies=OF_EVERY_CLASS,
            lengths=[90, 60],
            output=7,
        )

    by_triton, by_torch = run(TRITON), run(TORCH)
    called, at_start = by_triton.pop("called"), by_triton.pop("called at start")
    assert by_torch.pop("called") == by_torch.pop("called at start") == {}
    # Kernels generated for a policy are compiled before a request waits for them.
    generated = {name for name in called if not name.split(".")[0].endswith("_triton")}
    assert generated
    assert generated <= set(at_start)
    # And so are those of folds.
    folding = {
        "best_triton._best", "carry_triton._carry", "tally_triton._tally",
        "compact_in_place_triton._compact_in_place",
        "entry_ids_triton._ids", "turn_triton._turn", "gather_triton._gather",
        "place_triton._place", "nearest_triton._highest", "merge_rows_triton._rows",
        "merge_entries_triton._merge", "inner_products_triton._inner_products",
        "means_triton._means", "updated_where_left_triton._updated_where_left",
    }  # fmt: skip
    assert folding <= set(at_start)
    served = {name.split(".")[0] for name in generated if called[name] > at_start[name]}
    for name in ("h2o", "d2o"):  # for their prefills, and for their decode steps
        assert len([each for each in served if f"_{name}_" in each]) == 2
    assert by_triton == by_torch
    facts = {rid: answer["facts"] for rid, answer in by_torch["answers"].items()}
    assert [rid for rid, each in facts.items() if "uncompressed" in each] == []
    folded = {rid.split()[0] for rid, each in facts.items() if each.get("folds")}
    assert folded == {"h2o", "d2o", "streamingllm", "cam"}
    assert all(facts[f"fastkv {n}"]["propagated_tokens"] < n for n in (90, 60))
    modules = {name.split(".")[0] for name in called}
    assert modules >= {
        "compact_layers_triton",
        "best_triton",
        "carry_triton",
        "entry_ids_triton",
        "merge_entries_triton",
        "place_triton",
        "rotate_triton",
        "rows_triton",
        "select_triton",
        "compact_in_place_triton",
    }


@pytest.mark.thorough(besides=["chunks"])
@pytest.mark.server
@pytest.mark.parametrize("flags", [{}, {"chunked_prefill_size": 64}], ids=["whole", "chunks"])
def test_a_prefill_forward_waits_once_if_at_all(scenario, flags):
    """For several prompts together; forwards before a prompt's last chunk do not wait."""
    # Windows of queries are carried from chunk to chunk, or sums over all queries.
    policies = NO_WAIT | ONE_WAIT
    in_chunks = ("snapkv", "tova", "cake", "h2o")
    chosen = [name for name in policies if not flags or name in in_chunks]
    seen = scenario(
        "scenarios_kernels.py",
        "waits",
        TRITON | {"SGLANG_KV_POLICY_FOLD_INTERVAL": "1"},
        policies={name: policies[name] for name in chosen},
        lengths=[100, 70],
        **flags,
    )
    assert list(seen) == chosen
    for name, each in seen.items():
        ended = [forward["ended"] for forward in each["forwards"]]
        assert sum(ended) == 2, name
        assert flags or ended == [2], name
        for forward in each["forwards"]:
            waits = [WAIT] if name in ONE_WAIT and forward["ended"] else []
            assert forward["waits"] == waits, name
        assert all("entries_kept" in facts for facts in each["facts"]), name


@pytest.mark.thorough(besides=["chunks"])
@pytest.mark.server
@pytest.mark.parametrize("flags", [{}, {"chunked_prefill_size": 64}], ids=["whole", "chunks"])
def test_where_attention_gives_its_log_sum_exp_no_kernel_looks_for_it(scenario, flags):
    """The same answers, also for windows and sums in chunks; one pass over the keys."""
    policies = {
        "snapkv": ["capacity=48", "window=16"],
        "pyramidkv": ["capacity=48"],
        "h2o": ["heavy=20", "window=20"],
    }
    if not flags:  # it wants prompts in one piece
        policies["fastkv"] = ["capacity=40"]

    def run(env, **given):
        return scenario(
            "scenarios_kernels.py",
            "same",
            env,
            policies=policies,
            lengths=[100, 70],
            output=3,
            **given,
            **flags,
        )

    attended, by_torch = run(TRITON, attended=True), run(TORCH)
    called, at_start = attended.pop("called"), attended.pop("called at start")
    assert called["row_pass.row_partials"] == at_start["row_pass.row_partials"]
    assert sum(called.values()) > sum(at_start.values())
    del by_torch["called"], by_torch["called at start"]
    assert attended == by_torch
    assert all("entries_kept" in each["facts"] for each in attended["answers"].values())


@pytest.mark.server
def test_all_layers_of_a_prompt_are_scored_in_one_launch(scenario):
    """Also for chunks; sums over all queries are computed layer by layer and chunk by chunk."""
    lengths, layers = [100, 70], 4
    for policy, given, number in (
        ("snapkv", ["capacity=48", "window=16"], len(lengths)),
        ("h2o", ["heavy=20", "window=20"], layers * (2 + 2)),
    ):
        run = scenario(
            "scenarios_kernels.py",
            "same",
            TRITON,
            policies={policy: given},
            lengths=lengths,
            output=3,
            chunked_prefill_size=64,
        )
        called, at_start = (
            sum(number for name, number in run[when].items() if name.endswith(".columns_store"))
            for when in ("called", "called at start")
        )
        assert called - at_start == number, policy


FOLDING = {
    "h2o": ["heavy=20", "window=19"],
    "streamingllm": ["start=2", "window=30"],
    "roco": ["capacity=3", "newest=1"],
    "cake": ["capacity=40", "window=8"],
    "d2o": ["rate=0.4"],
    "cam": ["start=2", "window=30", "reach=4"],
}


@pytest.fixture(scope="module")
def folding(scenario):
    """A function that runs three folds of two requests of each policy in `FOLDING`, or of some."""

    def run(names=tuple(FOLDING), **flags):
        return scenario(
            "scenarios_kernels.py",
            "decode_waits",
            TRITON | {"SGLANG_KV_POLICY_FOLD_INTERVAL": "4"},
            policies={name: FOLDING[name] for name in names},
            lengths=[60, 45],
            output=14,
            **flags,
        )

    return run


@pytest.fixture(scope="module")
def at_once(folding):
    """Folds whose numbers arrive as soon as they are computed."""
    return folding()


@pytest.mark.thorough
@pytest.mark.server
def test_a_decode_step_waits_where_entries_leave_for_how_many_stay(at_once):
    assert list(at_once) == [*FOLDING, "left"]
    for name in FOLDING:
        each = at_once[name]
        assert [forward["folds"] for forward in each["forwards"]] == [0, 0, 0, 2] * 3 + [0], name
        assert each["folds"] == [3, 3], name
        for forward in each["forwards"]:
            assert forward["waits"] == ([COUNT] if forward["folds"] else []), name


@pytest.mark.thorough
@pytest.mark.server
def test_folds_of_lists_that_last_do_not_wait(folding, at_once):
    """A fold's numbers are read at the next fold; the first fold has shown them in advance."""
    names = ("h2o", "cake", "roco")
    seen = folding(names, lagging=True)
    assert seen["left"] == at_once["left"]
    for name in names:
        assert seen[name]["tokens"] == at_once[name]["tokens"], name
        assert seen[name]["folds"] == [3, 3], name
        waits = [forward["waits"] for forward in seen[name]["forwards"] if forward["folds"]]
        # The third fold reads the numbers of the second, which were there long before.
        known = [[COUNT], [], [COUNT]]  # numbers of roco's lists are not known
        assert waits == ([[COUNT]] * 3 if name == "roco" else known), name
        others = [forward["waits"] for forward in seen[name]["forwards"] if not forward["folds"]]
        assert not any(others), name


@pytest.mark.thorough
@pytest.mark.server
def test_what_else_waits_is_what_is_documented(scenario):
    seen = scenario(
        "scenarios_kernels.py",
        "waits",
        TRITON,
        policies={"fastkv": ["capacity=40"], "minicache": ["start=0", "t=0.6", "gamma=0.05"]},
        lengths=[100, 70],
    )
    (fastkv,), (minicache,) = (seen[name]["forwards"] for name in ("fastkv", "minicache"))
    assert sorted(fastkv["waits"]) == [WAIT, *["run.py:_number_chosen tolist"] * 2]
    assert minicache["waits"] == [WAIT] * (1 + 2 * 2)  # two pairs of each prompt


def of_the_device():
    return torch.arange(6, device=torch.device("cpu"))


WAITS = {
    "item": lambda x: x[2].item(),
    "int": lambda x: int(x.sum()),
    "bool": lambda x: bool((x > 1).any()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "boolean index": lambda x: x[x > 2],
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 2),
    "repeats of the device": lambda x: x.repeat_interleave(x),
    "boolean index written": lambda x: x.__setitem__(x > 2, 0),
    "tensor on the device": lambda x: torch.tensor([1, 2], device=x.device),
    "to the device": lambda x: torch.tensor([1, 2]).to(x.device),
    "both": lambda x: x + torch.tensor([1] * 6),
    "equal": lambda x: torch.equal(x, x),
    "to_host": lambda x: to_host([x]),
}
NO_WAITS = {
    "slice": lambda x: x[2:4] + 1,
    "index": lambda x: x[x.argsort()],
    "where": lambda x: torch.where(x > 2, x, 0).cumsum(0),
    "item of the host": lambda x: torch.arange(3).sum().item(),
    "list of the host": lambda x: torch.tensor([1, 2]).tolist(),
    "repeats of the host": lambda x: x.repeat_interleave(2),
    "number of the host": lambda x: x.sum() * torch.tensor(2),
    "to_device": lambda x: to_device([1, 2], torch.int64, x.device) + x[:2],
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_is_found(wait):
    x = of_the_device()
    with HostWaits() as waits:
        WAITS[wait](x)
    assert len(waits.found) >= 1


@pytest.mark.parametrize("work", NO_WAITS)
def test_what_needs_no_wait_is_not_taken_for_one(work):
    x = of_the_device()
    with HostWaits() as waits:
        NO_WAITS[work](x)
    assert waits.found == []


def test_numbers_come_to_the_host_in_one_transfer():
    x = of_the_device()
    with HostWaits() as waits:
        numbers, truth = to_host([x.view(2, 3), x > 2])
        assert numbers.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert truth.tolist() == [0, 0, 0, 1, 1, 1]
    assert len(waits.found) == 1
    assert to_host([]) == []
