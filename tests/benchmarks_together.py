"""Runs benchmarks one after the other in one process, on shared servers.

    python -P tests/benchmarks_together.py FOLDER COMMAND...

A server that several benchmarks start with the same arguments is started once and runs until the
last benchmark has ended. The output of benchmarks/NAME.py goes to FOLDER/NAME.md.
"""

import contextlib
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from kvpolicy.evaluation import serving

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def shared(servers: contextlib.ExitStack):
    """Replacement of `serving.serve` that shares servers; they end with the stack."""
    start, running = serving.serve, {}

    @contextlib.contextmanager
    def serve(*arguments, progress: bool = False, **flags) -> Iterator[serving.Server]:
        key = repr((arguments, sorted(flags.items())))
        if key not in running:
            print(f"a server is started for {key}", file=sys.stderr)
            running[key] = servers.enter_context(start(*arguments, progress=progress, **flags))
        yield running[key]

    return serve


def main() -> None:
    folder, *commands = sys.argv[1:]
    sys.path.insert(0, str(BENCHMARKS))
    with contextlib.ExitStack() as servers:
        serving.serve = shared(servers)
        for command in commands:
            name, *words = shlex.split(command)
            script = BENCHMARKS / f"{name}.py"
            sys.argv = [str(script), *words]
            output = Path(folder, f"{name}.md")
            with output.open("w") as file, contextlib.redirect_stdout(file):
                runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
