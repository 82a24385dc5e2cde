"""Vectors recorded from the authors' code, and `kvpolicy run` on tensors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from kvpolicy.dsl.tools.cli import main

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())


def run(tmp_path, policy, settings, execution, q, k, v=None, steps=None, options=(), **arrays):
    """The result that `kvpolicy run` writes.

    Args:
        tmp_path: folder for files.
        policy: a name, a path, or the text of a policy.
        settings: parameter values.
        execution: name of the execution.
        q, k, v: tensors of the prompt; v is zeros if left out.
        steps: q_step, k_step, v_step, or None.
        options: more options of the command.
        arrays: more arrays of the npz.
    """
    if "\n" in str(policy):
        name = policy.partition("policy:")[2].split()[0]
        (tmp_path / f"{name}.yaml").write_text(policy)
        policy = str(tmp_path / f"{name}.yaml")
    if steps is not None:
        arrays.update(zip(("q_step", "k_step", "v_step"), steps, strict=True))
    np.savez(tmp_path / "x.npz", q=q, k=k, v=np.zeros_like(k) if v is None else v, **arrays)
    overrides = [
        part
        for name, value in settings.items()
        for part in ("--set", f"{name}={str(value).lower()}")
    ]
    out = tmp_path / "r.json"
    tensors = ["--tensors", str(tmp_path / "x.npz"), "--execution", execution]
    assert main(["run", policy, *tensors, "--out", str(out), *overrides, *options]) == 0
    return json.loads(out.read_text())
