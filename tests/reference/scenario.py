"""Runs a scenario of this folder with a checkpoint, in a process of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import forked

HERE = Path(__file__).parent


def run(
    out: Path,
    model: str,
    environment: Mapping[str, str],
    script: str = "served.py",
    *,
    timeout: float = 400,
    **flags: Any,
) -> dict[str, Any]:
    """What the scenario has written.

    Args:
        out: the file that it writes.
        model: folder of the checkpoint.
        environment: variables that are added to this process'.
        timeout: seconds.
        flags: of the scenario.

    Raises:
        RuntimeError: it has ended without; says what it printed last.
    """
    paths = os.pathsep.join([str(HERE), str(HERE.parent / "sglang_ext")])
    done = forked.run(
        [sys.executable, "-P", str(HERE / script), str(out), model, json.dumps(flags)],
        timeout=timeout,
        env={**os.environ, **environment, "PYTHONPATH": paths},
    )
    if not out.exists():
        raise RuntimeError((done.stdout + done.stderr)[-5000:])
    return json.loads(out.read_text())
