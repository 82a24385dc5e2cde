"""Kernels that were compiled on a machine, for the next one of its kind."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

# Folders of compiled kernels in the home folder: Triton's, FlashInfer's, SGLang's own.
CACHES = (".triton/cache", ".cache/flashinfer", ".cache/tvm-ffi", ".cache/sglang")


def _folders() -> list[tuple[str, Path]]:
    """Folders of compiled kernels, by their names in the archive."""
    made = [(name, Path.home() / name) for name in CACHES]
    if "TRITON_CACHE_DIR" in os.environ:
        made[0] = (CACHES[0], Path(os.environ["TRITON_CACHE_DIR"]))
    return made


def keep(archive: Path) -> None:
    """What was compiled, for the next run; a run that is cut off here leaves the former archive.

    Raises:
        OSError: it cannot be written.
    """
    made = archive.with_suffix(".new")
    with tarfile.open(made, "w:gz") as tar:
        for name, folder in _folders():
            if folder.is_dir():
                tar.add(folder, name)
    made.replace(archive)


def restore(archive: Path) -> None:
    """What an earlier run has compiled, where nothing is compiled yet.

    Raises:
        OSError, EOFError, tarfile.TarError, zlib.error: it cannot be read.
    """
    if not archive.exists():
        return
    with tarfile.open(archive) as tar:
        for name, folder in _folders():
            members = [each for each in tar if each.name.startswith(f"{name}/")]
            if folder.is_dir() or not members:
                continue
            for member in members:
                member.name = member.name.removeprefix(f"{name}/")
                tar.extract(member, folder, filter="data")
