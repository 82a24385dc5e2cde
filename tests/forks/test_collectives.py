"""Collectives through shared memory give the same as through gloo, in any order of arrival."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import forked
import pytest
import torch

RANKS = 3
DEVICE = torch.cuda.is_available()  # then there are no forks
SCRIPT = """
import json, os, random, sys, time
import torch, torch.distributed as dist
from collectives import GLOO

rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
pair = dist.new_group([0, 2])
rnd, found = random.Random(rank), []


def carried_out(seed):
    made = []
    numbers = torch.Generator().manual_seed(seed)
    for i in range(60):
        size = [1, 7, 513, 20_000][i % 4]  # the last ones are too large for shared memory
        every = torch.randint(-9, 9, (3, size), generator=numbers)
        x = every[rank].to([torch.float32, torch.int64, torch.bfloat16, torch.bool][i % 7 % 4])
        time.sleep(rnd.random() / 500)
        group = pair if i % 3 == 1 else None
        if group is not None and rank == 1:
            continue
        ranks = 2 if group is not None else 3
        if x.dtype is not torch.bool:
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
                y = x.clone()
                dist.all_reduce(y, op, group=group)
                made.append(y)
        listed = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(listed, x, group=group)
        whole = x.new_empty(ranks * size)
        dist.all_gather_into_tensor(whole, x, group=group)
        given = x.clone()
        dist.broadcast(given, 2 * (i % 2), group=group)
        objects = [None] * ranks
        dist.all_gather_object(objects, [rank, i], group=group)
        made += [*listed, whole, given, torch.tensor(objects)]
        if group is None:  # around the ring
            first, second = torch.empty_like(x), torch.empty_like(x)
            again = ~x if x.dtype is torch.bool else -x
            sent = [dist.isend(y, (rank + 1) % 3) for y in (x, again)]
            coming = [dist.irecv(y, (rank - 1) % 3) for y in (first, second)]
            for each in [*coming[::-1], *sent]:
                each.wait()
            made += [first, second]
    return made


own = carried_out(1)
os.environ[GLOO] = "1"
same = [torch.equal(x, y) for x, y in zip(own, carried_out(1), strict=True)]
with open(out, "w") as file:
    json.dump([len(same), sum(same), dist.all_reduce.__module__], file)
"""


@pytest.mark.slow
def test_what_gloo_finds(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(forked.__file__)}

    def rank(number):
        out = tmp_path / f"{number}.json"
        words = [str(script), str(number), str(tmp_path / "store"), str(out)]
        done = forked.run([sys.executable, "-P", *words], timeout=120, env=environment)
        assert out.exists(), done.stderr[-3000:]
        return json.loads(out.read_text())

    with ThreadPoolExecutor(RANKS) as pool:
        for number, same, module in pool.map(rank, range(RANKS)):
            assert number == same > 200
            assert module == ("torch.distributed.distributed_c10d" if DEVICE else "collectives")
