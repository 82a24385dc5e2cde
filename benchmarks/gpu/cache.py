"""Archives the kernels compiled on a machine for the next machine of its kind."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

# Folders of compiled kernels in the home folder: Triton's, FlashInfer's, SGLang's own.
CACHES = (".triton/cache", ".cache/flashinfer", ".cache/tvm-ffi", ".cache/sglang")


def _folders() -> list[tuple[str, Path]]:
    """(Name in the archive, folder) of compiled kernels."""
    made = [(name, Path.home() / name) for name in CACHES]
    if "TRITON_CACHE_DIR" in os.environ:
        made[0] = (CACHES[0], Path(os.environ["TRITON_CACHE_DIR"]))
    return made


def keep(archive: Path) -> None:
    """Writes the archive for the next run; if cut off, the former archive stays.

    Raises:
        OSError: the archive cannot be written.
    """
    made = archive.with_suffix(".new")
    with tarfile.open(made, "w:gz") as tar:
        for name, folder in _folders():
            if folder.is_dir():
                tar.add(folder, name)
    made.replace(archive)


def restore(archive: Path) -> None:
    """Unpacks the archive of an earlier run into folders that do not exist yet.

    Raises:
        OSError, EOFError, tarfile.TarError, zlib.error: the archive cannot be read.
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
