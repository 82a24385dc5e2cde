"""Functions generated from policies, as modules: written to a cache, imported once per process.

Triton compiles functions of files, so a source becomes one. Its name holds a digest of the text:
which policy, which parameters and which sizes of a model decide the text, so equal names mean equal
files, and processes that write the same one at once do no harm.
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

from kvpolicy.kernels.templates.run import Frame


@lru_cache(maxsize=1024)
def generated(name: str, source: str) -> Callable:
    """Launches the frames of `kernels/templates` with the functions of a generated source.

    Args:
        name: of the policy, for the file's name.
        source: Python: small `@triton.jit` functions, and `FRAME`, what `Frame` says of them.

    Raises:
        OSError: neither the cache nor the folder for temporary files can be written.
    """
    return Frame(**module_of(name, source).FRAME).run


def module_of(name: str, source: str) -> ModuleType:
    """The module of a generated source; as of `generated`."""
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
    """Where generated files lie: below XDG_CACHE_HOME, or ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return base / "kvpolicy" / "generated"


def _written(name: str, source: str) -> Path:
    """The file of a source, in the cache if it can be written, else in a temporary folder."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        return written_in(cache_folder(), name, source)
    return written_in(Path(_temporary()), name, source)


@lru_cache(maxsize=1)
def _temporary() -> str:
    """A folder of this process alone: a common one could be another user's."""
    return tempfile.mkdtemp(prefix="kvpolicy-generated-")


def written_in(folder: Path, name: str, source: str) -> Path:
    """The file of a source in a folder; whoever reads it meanwhile finds it whole or not at all.

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
