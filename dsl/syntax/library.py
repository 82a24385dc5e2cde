"""Where policies are found: the shipped ones by name, others by path."""

from __future__ import annotations

import errno
import shutil
import stat
from pathlib import Path

from kvpolicy.dsl.syntax.diagnostics import did_you_mean, refused, why
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.syntax.yaml_nodes import MAX_BYTES

POLICIES = Path(__file__).resolve().parents[2] / "policies"
TEST_SUFFIX = ".test.yaml"

# Errors for a path that does not exist.
_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


def shipped() -> dict[str, Path]:
    """The shipped policies by name, in order of name."""
    files = sorted(POLICIES.glob("*.yaml"))
    return {path.stem: path for path in files if not path.name.endswith(TEST_SUFFIX)}


def find(policy: str | Path) -> Path:
    """The file of a policy given by path or by the name of a shipped one.

    Raises:
        PolicyError: there is no such file or name, or it is not a regular file.
    """
    path, name = Path(policy), str(policy)
    if is_there(path, "a policy file"):
        return path
    if name in shipped():
        return shipped()[name]
    if path.suffix or path.parent != Path():
        raise refused(name, "file", "there is no such file")
    help = did_you_mean(name, shipped()) or "`kvpolicy list` shows the shipped policies"
    raise refused(name, "file", "there is no such file and no shipped policy of this name", help)


def is_there(path: Path, what: str) -> bool:
    """Whether there is a file at a path.

    Args:
        what: what the file should be, for the message.

    Raises:
        PolicyError: something is there that is no regular file, or that cannot be looked at.
    """
    name, reason = str(path), None
    try:
        kind = path.stat().st_mode
    except OSError as error:
        if error.errno == errno.ELOOP:
            reason = "this link leads back to itself"
        elif error.errno not in _NOWHERE:
            reason = why(error, "it cannot be read")
        elif error.errno == errno.ENOENT and path.is_symlink():
            reason = "this link leads to no file"
        if reason is not None:
            raise refused(name, "file", reason) from None
    except ValueError:  # a name that no file can have
        pass
    else:
        if stat.S_ISREG(kind):
            return True
        raise refused(name, "file", f"this is {_kind(kind)}, not {what}")
    return False


def _kind(mode: int) -> str:
    """Words for what is not a regular file."""
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def read_source(policy: str | Path) -> Source:
    """The text of a policy given by path or by the name of a shipped one.

    Raises:
        PolicyError: it cannot be read, is no text, or is too long.
    """
    path = find(policy)
    return read_file(path, str(path) if path == Path(policy) else f"policies/{path.name}")


def read_file(path: Path, name: str) -> Source:
    """The text of a file, which messages call `name`.

    Raises:
        PolicyError: it cannot be read, is no text, or is too long.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise refused(name, "file", why(error, "it cannot be read")) from None
    if len(content) > MAX_BYTES:
        raise refused(name, "file", f"the file has more than {MAX_BYTES:,} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise refused(name, "file", "the file is not UTF-8 text") from None
    return Source(name, text.replace("\r\n", "\n").replace("\r", "\n"))


def rewrite(path: Path, text: str, name: str) -> None:
    """Replaces the text of a file, which messages call `name`; if that fails, the file stays.

    Raises:
        PolicyError: it cannot be written.
    """
    file = path.resolve()  # a link stays a link
    new_file = file.with_name(f".{file.name}.new")
    try:
        with file.open("r+"):  # a write-protected file is not replaced either
            pass
        try:
            new_file.write_text(text, encoding="utf-8")
            shutil.copymode(file, new_file)
            new_file.replace(file)
        finally:
            new_file.unlink(missing_ok=True)
    except OSError as error:
        raise refused(name, "file", why(error, "it cannot be written")) from None
