"""The file of a spec: put there in one step, and never in the place of what is somebody else's."""

from __future__ import annotations

import contextlib
import os
import stat

from nvct.cdi.registry import parse
from nvct.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Engines that root has not started read specs, too.
_MODE = 0o644

_STEP = "name another file with --output, or remove it"


def replaceable(path: str, kind: str) -> dict[str, Any] | None:
    """The spec of this kind in the file, whoever wrote it; None where nothing stands. Raises ConfigError for all else:
    a spec of another kind, or what nobody can tell.
    """
    content = _content(path)
    if content is None or not content.strip():
        return None
    try:
        value = parse(path, content)
    except ConfigError as error:
        raise ConfigError(f"{error}; that may be somebody else's, so {_STEP}") from None
    found = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(value, dict) or found != kind:
        what = f"has devices of the kind {ascii(found)[1:-1]:.80}" if isinstance(found, str) else "is no CDI spec"
        raise ConfigError(f"{path} {what}, expected {kind} or no file: {_STEP}")
    return value


def write(path: str, text: str, kind: str) -> bool:
    """Put the text of a spec there in one step, for everybody to read; False when it was there with just that text.

    Its folder is made when absent. Readers take files by their extension, so that they pass over the one in the making.
    Raises ConfigError as `replaceable`, OSError with the path.
    """
    if text_of(path) == text:
        return False
    replaceable(path, kind)
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    making = f"{path}.{os.getpid()}.new"
    try:
        descriptor = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fchmod(descriptor, _MODE)
            os.fsync(descriptor)
        os.rename(making, path)
    except BaseException as error:
        remove(making)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = path  # writing to a descriptor knows no name
        raise
    return True


def text_of(path: str) -> str | None:
    """The text of a file that everybody can read and its owner alone can write; None for all else."""
    try:
        content = _content(path)
        return None if content is None or stat.S_IMODE(os.stat(path).st_mode) != _MODE else content.decode()
    except (OSError, ConfigError, UnicodeDecodeError):
        return None


def _content(path: str) -> bytes | None:
    """None for a file that is not there, nor what its link leads to. Raises ConfigError for what is no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{path} is no regular file, expected a spec or nothing there: {_STEP}")
        with open(descriptor, "rb", closefd=False) as stream:
            return stream.read()
    finally:
        os.close(descriptor)


def remove(path: str) -> None:
    """Remove the file if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
