"""The command `kvpolicy`: what `dsl/` offers, and what asks servers questions."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvpolicy.dsl import cli
from kvpolicy.dsl.cli import Command

COMMANDS: dict[str, Command] = {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    return cli.main(arguments, COMMANDS)


if __name__ == "__main__":
    sys.exit(main())
