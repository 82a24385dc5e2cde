"""Measured choices: which one applies, which files are refused, and that wrappers use them."""

import json
from pathlib import Path

import pytest
import test_compact_in_place as in_place_tests
import test_decode_attention as decode_tests
import torch
from kvpolicy.kernels.attention import decode_attention_triton
from kvpolicy.kernels.entries.compact_layers import compact_layers
from kvpolicy.kernels.entries.compact_layers_triton import compact_layers as compact_layers_triton
from kvpolicy.kernels.entries.gather import gather
from kvpolicy.kernels.entries.gather_triton import gather as gather_triton
from kvpolicy.kernels.entries.place import place
from kvpolicy.kernels.entries.place_triton import place as place_triton
from kvpolicy.kernels.entries.rows_triton import put_rows, take_rows
from kvpolicy.kernels.launch import tuned
from kvpolicy.kernels.merging.following import following
from kvpolicy.kernels.merging.merge_rows import merge_mass, merge_rows
from kvpolicy.kernels.merging.merge_rows_triton import merge_rows as merge_rows_triton
from kvpolicy.kernels.merging.nearest import nearest
from kvpolicy.kernels.merging.nearest_triton import nearest as nearest_triton
from kvpolicy.kernels.scoring.select import top
from kvpolicy.kernels.scoring.select_triton import top as top_triton
from triton.runtime.jit import KernelInterface

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAME = tuned.device_name(DEVICE)
DECODE = {"dtype": "float32", "head_dim": 64, "rows": 16}
READER = {"dtype": "float16", "head_dim": 64, "group": 2, "lists": 12, "entries": 40}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which measured choices are looked up."""
    monkeypatch.setenv(tuned.FOLDER_VARIABLE, str(tmp_path))
    tuned.load.cache_clear()
    yield tmp_path
    tuned.load.cache_clear()


def write(folder, *choices, **facts):
    runs = [
        {"choices": [dict(zip(("kernel", "where", "choice"), c, strict=True))]} for c in choices
    ]
    path = tuned.path_of(NAME, folder)
    path.write_text(json.dumps({"device": NAME, "runs": runs} | facts))
    tuned.load.cache_clear()
    return path


def test_without_a_file_nothing_is_chosen_and_the_log_says_so(folder):
    assert tuned.choice("compact_layers", DEVICE, 128, 1000) == {}
    assert tuned.load(DEVICE).summary == (
        f"not tuned for {NAME}; run `python benchmarks/kernels.py --topics tuning --write`"
    )
    path = write(folder)
    assert tuned.load(DEVICE).summary == f"tuned for {NAME} by {path}"


def test_no_file_of_a_gpu_is_shipped_that_cannot_be_read():
    shipped = {
        path.stem: tuned.read(path, json.loads(path.read_text())["device"])
        for path in tuned.SHIPPED.glob("*.json")
    }
    assert "decode_attention" in shipped["NVIDIA_H200"]


def test_the_name_of_a_gpu_is_the_name_of_the_file():
    path = tuned.path_of("NVIDIA H100 80GB HBM3", Path("there"))
    assert path == Path("there/NVIDIA_H100_80GB_HBM3.json")


def test_the_nearest_size_is_taken_and_others_must_be_equal(folder):
    write(
        folder,
        ("decode_attention", {**DECODE, "lists": 8}, {"splits": 8}),
        ("decode_attention", {**DECODE, "lists": 128}, {"splits": 4}),
        ("decode_attention", {**DECODE, "rows": 32, "lists": 64}, {"splits": 9}),
        ("decode_reader", {**READER, "lists": 8, "entries": 4000}, {"reader": "flashinfer"}),
        ("decode_reader", {**READER, "lists": 512, "entries": 500}, {}),
    )

    def splits(lists, dtype=torch.float32, size=64, rows=16):
        found = tuned.choice("decode_attention", DEVICE, dtype, size, rows, lists)
        return found.get("splits")

    # On a scale of factors: 32 lies in the middle, and the first is taken.
    assert [splits(n) for n in (1, 8, 31, 32, 33, 5000)] == [8, 8, 8, 8, 4, 4]
    assert splits(64, rows=32) == 9
    assert splits(64, dtype=torch.float16) is None
    assert splits(64, size=128) is None
    assert tuned.choice("place", DEVICE, 64, 64) == {}

    def reader(lists, entries):
        shape = (torch.float16, 64, 2, lists, entries)
        return tuned.choice("decode_reader", DEVICE, *shape).get("reader")

    assert reader(8, 4000) == reader(16, 4000) == "flashinfer"
    assert reader(512, 4000) is None


def test_sizes_without_end_are_not_remembered(folder, monkeypatch):
    monkeypatch.setattr(tuned, "_REMEMBERED", 3)
    write(folder, ("rows", {"row_bytes": 8}, {"block": 2}), ("rows", {"row_bytes": 64}, {}))
    for size in (1, 8, 9, 200, 10, 300, 64, 8):
        block = 2 if size <= 22 else None
        assert tuned.choice("rows", DEVICE, size).get("block") == block
        tuned.choice("place", DEVICE, 8, size)
    assert len(tuned.load(DEVICE).remembered) <= 3


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (("deocde", {}, {}), r"runs\[0\].choices\[0\].kernel: expected one of .*, got deocde"),
        (("rows", {}, {}), r"choices\[0\].where: expected row_bytes, got "),
        (("rows", {"row_bytes": "8"}, {}), "row_bytes: expected a whole number from 1, got '8'"),
        (("rows", {"row_bytes": True}, {}), "row_bytes: expected a whole number from 1, got True"),
        (("rows", {"row_bytes": 8}, {"blocks": 8}), "choice: expected block, got blocks"),
        (("rows", {"row_bytes": 8}, {"block": 9}), "choice.block: 9 is not possible"),
        (("rows", {"row_bytes": 8}, {"block": 8.0}), "choice.block: 8.0 is not possible"),
        (("rows", {"row_bytes": 8}, [8]), "not as `--write` writes it"),
        (("decode_reader", READER, {"reader": "fa3"}), "choice.reader: 'fa3' is not possible"),
        (("nearest", {"dtype": "half2", "head_dim": 1, "dropped": 1}, {}), "no dtype 'half2'"),
        (
            ("decode_attention", {**DECODE, "lists": 8}, {"splits": 257}),
            "choice.splits: 257 is not possible",
        ),
    ],
)
def test_a_choice_that_cannot_be_is_one_sentence(folder, choice, message):
    path = write(folder, choice)
    with pytest.raises(tuned.TunedError, match=message) as caught:
        tuned.choice("rows", DEVICE, 8)
    sentence = str(caught.value)
    assert sentence.startswith(f"{path}: ")
    assert "correct or remove the file, or measure anew: `python benchmarks/kernels.py" in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "not as `--write` writes it"),
        ('{"device": "another GPU", "runs": []}', f"device: expected {NAME}, got another GPU"),
        (f'{{"device": "{NAME}"}}', "not as `--write` writes it .KeyError: 'runs'"),
        (b"\xff\xfe", "decode"),
    ],
)
def test_a_broken_file_is_one_sentence(folder, text, message):
    path = write(folder)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(tuned.TunedError, match=message) as caught:
        tuned.load(DEVICE)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_one_choice_for_the_same_sizes(folder):
    one = ("rows", {"row_bytes": 8}, {})
    write(folder, one, one)
    with pytest.raises(tuned.TunedError, match=r"runs\[1\].choices\[0\]: .* stands before"):
        tuned.load(DEVICE)


def test_a_folder_that_is_not_there(folder, monkeypatch):
    monkeypatch.setenv(tuned.FOLDER_VARIABLE, str(folder / "gone"))
    tuned.load.cache_clear()
    with pytest.raises(tuned.TunedError, match=r"_TUNED_KERNELS: there is no folder .*gone"):
        tuned.load(DEVICE)


# The wrappers: what is measured is what their kernels are launched with, and results stay.


@pytest.fixture
def launched(monkeypatch):
    """Notes options of launches of a module's kernels, if they include a named constant."""
    launch = KernelInterface.__getitem__
    watched = []

    def watch(kernel, grid):
        def noted(*arguments, **options):
            for module, constants, made in watched:
                if kernel.fn.__module__ == module.__name__ and not constants.isdisjoint(options):
                    made.append(options)
            return launch(kernel, grid)(*arguments, **options)

        return noted

    monkeypatch.setattr(KernelInterface, "__getitem__", watch)

    def options_of(module, *constants):
        watched.append((module, set(constants), []))
        return watched[-1][2]

    return options_of


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "splits"),
    [
        ({"entries": 32, "warps": 8, "stages": 2, "splits": 5}, 5),
        ({"stages": 3, "programs": 2}, None),
    ],
)
def test_decode_attention_reads_as_measured(folder, launched, choice, splits):
    given = decode_tests.case(decode_tests.MIXED, heads=4, kv_heads=2)
    before = given.run(decode_tests.decode_triton)
    needed = (len(given.rows), 4, 2, 64, DEVICE)
    elements = decode_attention_triton.workspace_elements(*needed)
    write(folder, ("decode_attention", {**DECODE, "lists": 8}, choice))
    made = launched(decode_attention_triton, "STAGES")
    decode_tests.assert_exact(given.run(decode_tests.decode_triton), given)
    [options] = made
    assert options["STAGES"] == choice["stages"]
    assert options["num_warps"] == choice.get("warps", 8)
    assert options["N"] == choice.get("entries", 64)
    assert options["BALANCE"] == (splits is None)
    if splits is not None:
        # A captured graph's workspace knows of the splits.
        found = decode_attention_triton.workspace_elements(*needed)
        assert found == (24 * splits * 65, 12 * 2)
        assert found > elements
        same = given.run(decode_tests.decode_triton, splits=splits)
        assert torch.equal(given.run(decode_tests.decode_triton), same)
    else:
        torch.testing.assert_close(given.run(decode_tests.decode_triton), before)
    # What a caller gives comes before what was measured.
    given.run(decode_tests.decode_triton, splits=1)
    assert not made[-1]["SPLIT"]


def listed(heads, size=64):
    """Lists of 3 requests with 2 KV heads in a pool of keys, then values; the rest is NaN."""
    generator = torch.Generator().manual_seed(heads)
    indptr = torch.tensor([0, 5, 0, 63, 1000, 1, 64]).cumsum(0)
    indices = torch.randperm(1200, generator=generator)[: int(indptr[-1])]
    pool = torch.full((2400, size), float("nan"))
    pool[indices], pool[indices + 1200] = torch.randn(2, len(indices), size, generator=generator)
    q = torch.randn(3, 1, heads, size, generator=generator)
    return [t.to(DEVICE) for t in (q, pool, pool[1200:], indptr, indices)]


def test_paged_attention_reads_as_measured(folder, launched):
    from kvpolicy.kernels.attention import paged_attention_triton
    from kvpolicy.kernels.attention.paged_attention import paged_attention

    given = listed(8)
    where = {"dtype": "float32", "head_dim": 64, "rows": 16, "lists": 6}
    write(folder, ("paged_attention", where, {"entries": 16, "warps": 2, "splits": 3}))
    made = launched(paged_attention_triton, "BALANCE")
    got = paged_attention_triton.paged_attention(*given, scale=0.2)
    assert (made[0]["N"], made[0]["num_warps"], made[0]["BALANCE"]) == (16, 2, False)
    torch.testing.assert_close(got, paged_attention(*given, scale=0.2))


def test_compaction_selection_and_rows_as_measured(folder, launched):
    from kvpolicy.kernels.entries import compact_layers_triton as compacting
    from kvpolicy.kernels.entries import rows_triton
    from kvpolicy.kernels.scoring import select_triton

    write(
        folder,
        ("compact_layers", {"row_bytes": 64, "positions": 50}, {"part": 256, "tile": 4}),
        ("top", {"rows": 2, "keys": 9000}, {"block": 1024, "programs": 12}),
        ("rows", {"row_bytes": 80}, {"block": 16}),
    )
    generator = torch.Generator().manual_seed(0)
    storage = torch.randn(3, 2, 100, 2, 16, generator=generator).to(DEVICE)
    kept = (torch.rand(3, 2, 50, generator=generator) < 0.3).to(DEVICE)
    slots = torch.randperm(100, generator=generator).to(DEVICE)
    pages = (kept.sum(-1).flatten() + 1) // 2
    first = (pages.cumsum(0) - pages).view(3, 2)
    inputs = (slots[:50], kept, slots[50 : 50 + -(-int(pages.sum()) // 3)], first)
    wanted = storage.clone()
    compact_layers(wanted, *inputs)
    made = launched(compacting, "PART", "TILE")
    compact_layers_triton(storage, *inputs)
    assert torch.equal(storage, wanted)
    assert [x.get("PART", x.get("TILE")) for x in made] == [256, 256, 4]

    keys = torch.randint(-5, 5, (2, 9000), generator=generator, dtype=torch.int32).to(DEVICE)
    made = launched(select_triton, "DIGIT")
    assert torch.equal(top_triton(keys, 300), top(keys, 300))
    assert [each["BLOCK"] for each in made] == [1024] * 4
    short = keys[:, :5000].contiguous()  # one program takes it, whatever long rows are cut into
    assert torch.equal(top_triton(short, 300), top(short, 300))
    assert len(made) == 4

    tensors = [torch.randn(9, 20, generator=generator).to(DEVICE), torch.arange(9, device=DEVICE)]
    rows = torch.tensor([1, 4, 8], device=DEVICE)
    made = launched(rows_triton, "BLOCK")
    taken = take_rows(tensors, rows)
    assert all(torch.equal(x, t[rows]) for x, t in zip(taken, tensors, strict=True))
    put_rows(tensors, rows, [-x for x in taken])
    assert torch.equal(tensors[0][rows], -taken[0])
    assert [x["BLOCK"] for x in made[-2:]] == [16, 16]


def test_gather_and_place_as_measured(folder, launched):
    from kvpolicy.kernels.entries import gather_triton as gathering
    from kvpolicy.kernels.entries import place_triton as placing

    write(
        folder,
        ("gather", {"row_bytes": 64, "candidates": 9}, {"tile": 2}),
        ("place", {"row_bytes": 64, "candidates": 9}, {"tile": 8}),
    )
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 2, 37, 16, generator=generator).to(DEVICE)
    kept = (torch.rand(2, 37, generator=generator) < 0.5).to(DEVICE)
    pages = torch.randperm(50, generator=generator).to(DEVICE)
    pools = torch.zeros(2, 200, 16, device=DEVICE)
    made = launched(placing, "TILE")
    counts = place(pools[0], k, v, kept, pages, value_offset=100)
    assert torch.equal(place_triton(pools[1], k, v, kept, pages, value_offset=100), counts)
    assert torch.equal(pools[0], pools[1])
    assert made[0]["TILE"] == 8

    indptr = torch.tensor([0, int(counts[0]), int(counts.sum())], device=DEVICE)
    indices = torch.randperm(200, generator=generator)[: int(counts.sum())].to(DEVICE)
    entries = torch.randn(200, 16, generator=generator).to(DEVICE)
    made = launched(gathering, "TILE")
    got = gather_triton(entries, entries, indptr, indices, kept)
    for mine, wanted in zip(got, gather(entries, entries, indptr, indices, kept), strict=True):
        assert torch.equal(mine, wanted)
    assert made[-1]["TILE"] == 2


def test_folds_in_place_as_measured(folder, launched):
    from kvpolicy.kernels.entries import compact_in_place_triton

    where = {"row_bytes": 32, "lists": 6, "candidates": 20}
    write(folder, ("compact_in_place", where, {"piece": 16, "tile": 16}))
    made = launched(compact_in_place_triton, "PIECE")
    given = in_place_tests.SMALL["usual"]
    in_place_tests.same(given.run(compact_in_place_triton.compact_in_place), given.one_by_one())
    assert (made[0]["PIECE"], made[0]["PIECES"], made[0]["TILE"]) == (4, 2, 16)
    given.run(compact_in_place_triton.compact_in_place, tile=8)
    assert (made[1]["PIECE"], made[1]["TILE"]) == (4, 8)
    # A tile that needs more registers may have them.
    given.run(compact_in_place_triton.compact_in_place, piece=32, tile=1024)
    assert [x["maxnreg"] for x in made] == [64, 64, None]


def test_merges_as_measured(folder, launched):
    from kvpolicy.kernels.merging import merge_rows_triton as merging
    from kvpolicy.kernels.merging import nearest_triton as finding

    shape = {"dtype": "float32", "head_dim": 64}
    write(
        folder,
        ("nearest", {**shape, "dropped": 40}, {"rows": 16, "columns": 32}),
        ("merge_rows", {**shape, "tokens": 60}, {"receivers": 3, "tile": 4}),
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 60, 64, generator=generator)
    kept = torch.rand(2, 60, generator=generator) < 0.3
    places, real, *_ = following(kept, torch.ones_like(kept), 40, 0)
    given = [each.to(DEVICE) for each in (x, places, real, kept)]
    made = launched(finding, "BLOCK_M")
    for one, other in zip(nearest_triton(*given), nearest(*given), strict=True):
        assert torch.equal(one, other)
    assert (made[-1]["BLOCK_M"], made[-1]["BLOCK_N"]) == (16, 32)
    receivers, sources = torch.randint(60, (2, 30), generator=generator).sort(-1)
    offsets = torch.stack([torch.searchsorted(row, torch.arange(61)) for row in receivers]).int()
    weights = torch.rand(2, 30, generator=generator, dtype=torch.float64)
    links = tuple(each.to(DEVICE) for each in (sources, weights, offsets))
    inputs = (x.to(DEVICE), links, None, merge_mass(links, None))
    made = launched(merging, "RECEIVERS")
    torch.testing.assert_close(merge_rows_triton(*inputs), merge_rows(*inputs))
    assert (made[-1]["RECEIVERS"], made[-1]["LINKS"]) == (3, 4)
