"""Plugins for tests that a server's processes load as they load installed ones."""

from __future__ import annotations

import os
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def installed(folder: Path, name: str) -> str:
    """A PYTHONPATH with which SGLang finds `register` of a module beside this one as a plugin.

    Args:
        folder: where the plugin is said to be installed.
        name: of the module.
    """
    own = folder / f"{name}-0.dist-info"
    own.mkdir()
    (own / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (own / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:register\n")
    return os.pathsep.join([str(folder), str(_HERE)])
