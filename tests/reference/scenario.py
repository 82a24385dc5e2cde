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
    """Runs a scenario and returns its results.

    Args:
        out: file for the results.
        model: folder of the checkpoint.
        environment: variables added to those of this process.
        script: file of the scenario in this folder.
        timeout: seconds.
        flags: flags of the scenario.

    Raises:
        RuntimeError: it ended without results; the message is its last output.
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
