"""Description of the machine on which a measurement was made."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from pathlib import Path


def machine(*packages: str) -> str:
    """Processor or GPU, cores, memory, and versions of Python and of packages.

    Args:
        packages: names of packages, "sglang" and "torch" by default; missing ones are left out.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = []
    for name in packages or ("sglang", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return (
        f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, "
        f"Python {platform.python_version()}, {', '.join(versions)}"
    )


def _processor() -> str:
    with contextlib.suppress(ImportError):
        import torch

        if torch.cuda.is_available():
            facts = torch.cuda.get_device_properties(0)
            memory = facts.total_memory / 2**30
            return f"{facts.name} ({memory:.0f} GiB), CUDA {torch.version.cuda}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
