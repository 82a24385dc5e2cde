"""Functions generated from policies, as modules: written to a cache, imported once per process.

Triton compiles functions of files, so a source is written to one. The file's name holds a digest of
the text, which depends on the policy, its parameters and the model's sizes. Equal names mean equal
files, so processes may write the same one at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

from kvpolicy.kernels.templates.run import Template


@lru_cache(maxsize=1024)
def generated(name: str, source: str) -> Callable:
    """Complete the frames of `kernels/templates` with the functions of a generated source.

    Args:
        name: the policy's name, for the file's name.
        source: Python: small `@triton.jit` functions, and `TEMPLATE`, the attributes of `Template`.

    Returns:
        `Template.run`, which launches the kernels.

    Raises:
        OSError: neither the cache nor the folder for temporary files can be written.
    """
    return Template(**module_of(name, source).TEMPLATE).run


def module_of(name: str, source: str) -> ModuleType:
    """Import a generated source as a module; arguments and errors as of `generated`."""
    stem = f"{re.sub(r'[^A-Za-z0-9]+', '_', name)}_{hashlib.sha256(source.encode()).hexdigest()}"
    path = _written(f"{stem}.py", source)
    module_name = f"kvpolicy_generated_{stem}"
    loader = SourceFileLoader(module_name, str(path))
    spec = ModuleSpec(module_name, loader, origin=str(path))
    spec.has_location = True
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # where Triton looks for a function's globals
    loader.exec_module(module)
    return module


def cache_folder() -> Path:
    """Folder of generated files: below XDG_CACHE_HOME if it is absolute, else below ~/.cache."""
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache_home) if os.path.isabs(cache_home) else Path.home() / ".cache"
    return base / "kvpolicy" / "generated"


def _written(name: str, source: str) -> Path:
    """Write the file of a source to the cache if possible, else to a temporary folder."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no home folder
        return written_in(cache_folder(), name, source)
    return written_in(Path(_temporary()), name, source)


@lru_cache(maxsize=1)
def _temporary() -> str:
    """A folder for this process alone: a shared one could be another user's."""
    return tempfile.mkdtemp(prefix="kvpolicy-generated-")


def written_in(folder: Path, name: str, source: str) -> Path:
    """Write the file of a source to a folder; readers find it whole or not at all.

    Returns:
        Its path.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / name
    if path.exists() and path.read_text(encoding="utf-8") == source:
        return path
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(source)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
    return path
