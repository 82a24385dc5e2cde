"""Where policies are found: the shipped ones by name, others by path."""

from __future__ import annotations

from pathlib import Path

from kvpolicy.dsl.diagnostics import Diagnostic, PolicyError, did_you_mean
from kvpolicy.dsl.source import Source
from kvpolicy.dsl.yaml_nodes import MAX_BYTES

POLICIES = Path(__file__).resolve().parent.parent / "policies"
TEST_SUFFIX = ".test.yaml"


def shipped() -> dict[str, Path]:
    """The shipped policies by name, in order of name."""
    files = sorted(POLICIES.glob("*.yaml"))
    return {path.stem: path for path in files if not path.name.endswith(TEST_SUFFIX)}


def find(policy: str | Path) -> Path:
    """The file of a policy given by path or by the name of a shipped one.

    Raises:
        PolicyError: there is no such file or name.
    """
    path, name = Path(policy), str(policy)
    try:
        if path.exists():
            return path
    except OSError:  # a name that no file can have
        pass
    if name in shipped():
        return shipped()[name]
    if path.suffix or path.parent != Path():
        raise _unreadable(name, "there is no such file")
    help = did_you_mean(name, shipped()) or "`kvpolicy list` shows the shipped policies"
    raise _unreadable(name, "there is no such file and no shipped policy of this name", help)


def read_source(policy: str | Path) -> Source:
    """The text of a policy given by path or by the name of a shipped one.

    Raises:
        PolicyError: it cannot be read, is no text, or is too long.
    """
    path = find(policy)
    name = str(path) if path == Path(policy) else _short(path)
    try:
        if path.is_dir():
            raise _unreadable(name, "this is a folder, not a policy file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise _unreadable(name, (error.strerror or "it cannot be read").lower()) from None
    except (UnicodeDecodeError, ValueError):
        if len(content) > MAX_BYTES:
            raise _unreadable(name, f"the file has more than {MAX_BYTES:,} bytes") from None
        raise _unreadable(name, "the file is not UTF-8 text") from None
    if len(content) > MAX_BYTES:
        raise _unreadable(name, f"the file has more than {MAX_BYTES:,} bytes")
    return Source(name, text.replace("\r\n", "\n").replace("\r", "\n"))


def _short(path: Path) -> str:
    """A shipped policy's path as messages show it."""
    return f"policies/{path.name}"


def _unreadable(name: str, message: str, help: str | None = None) -> PolicyError:
    return PolicyError([Diagnostic("file", message, None, help)], Source(name, ""))
