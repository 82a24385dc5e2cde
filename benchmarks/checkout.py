"""Makes this checkout's `kvpolicy` importable on a machine where it is not installed.

A GPU machine may have torch and SGLang and no way to install anything; an installed wheel may be
older. Importing this module puts a folder first on the path of this process and of servers that it
starts. The folder links to the checkout's package and declares its entry points.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Python packages that `kvpolicy` needs, by module name.
NEEDED = {"yaml": "PyYAML", "lark": "lark"}


def _refuse_without() -> None:
    missing = [name for module, name in NEEDED.items() if not importlib.util.find_spec(module)]
    if missing:
        names = " ".join(missing)
        raise SystemExit(
            f"{Path(sys.argv[0]).stem}: kvpolicy needs {' and '.join(missing)}, which this Python "
            f"({sys.executable}) lacks; `pip install {names}`, or without network `pip download "
            f"{names}` elsewhere, and here unpack the wheels into a folder that PYTHONPATH names "
            "(docs/performance/README.md)"
        )


def _is_here() -> bool:
    try:
        spec = importlib.util.find_spec("kvpolicy.dsl")
    except ModuleNotFoundError:
        return False
    places = (spec and spec.submodule_search_locations) or ()
    return any(Path(place).resolve() == ROOT / "dsl" for place in places)


def _link() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    name, version = project["project"]["name"], project["project"]["version"]
    folder = Path(tempfile.mkdtemp(prefix="kvpolicy-checkout-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / name).symlink_to(ROOT / "src" / name)
    facts = folder / f"{name}-{version}.dist-info"
    facts.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (facts / "METADATA").write_text(text, encoding="utf-8")
    lines = []
    for group, points in project["project"]["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
    (facts / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.path.insert(0, str(folder))
    rest = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([rest] if rest else [])])


_refuse_without()
if not _is_here():
    _link()
