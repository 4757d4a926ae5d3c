"""An OCI bundle: its config.json as a value, and what an earlier `create` of ours added to it.

A bundle may be used again, and by then its MIG devices may be others. So what was added is kept beside config.json, in
nvct-added.json, and taken out before the container's request is read once more.
"""

from __future__ import annotations

import os

from nvct import fastjson
from nvct.errors import InjectionError, RequestError
from nvct.oci.state import read_spec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ADDED = "nvct-added.json"


class Bundle:
    """`spec` is config.json without what an earlier `create` added."""

    def __init__(self, folder: str, path: str, spec: dict[str, Any], had_addition: bool) -> None:
        self.folder = folder
        self.path = path
        self.spec = spec
        self._had_addition = had_addition

    @classmethod
    def of(cls, folder: str, name: str) -> Bundle:
        """The bundle in a folder, whose spec has a name. Raises RequestError."""
        folder = os.path.abspath(folder)
        path = os.path.join(folder, name)
        spec = read_spec(path)
        added = _read_addition(f"{folder}/{_ADDED}")
        if not added:
            return cls(folder, path, spec, False)
        from nvct.oci.spec import has_change, without

        # Engines write config.json anew for each start: then nothing of ours is in it.
        return cls(folder, path, without(spec, added) if has_change(spec, added) else spec, True)

    def write(self, spec: dict[str, Any], added: dict[str, Any]) -> None:
        """Put a spec in the place of config.json, and beside it what of it was added."""
        # In this order: what is added twice is added once, but what nobody knows of stays for ever.
        _replace(f"{self.folder}/{_ADDED}", fastjson.dumps(added), None)
        _replace(self.path, fastjson.dumps(spec), os.stat(self.path))

    def forget_addition(self) -> None:
        """Leave config.json without the earlier addition, for a container that asks for nothing any more."""
        if self._had_addition:
            _replace(self.path, fastjson.dumps(self.spec), os.stat(self.path))
            os.unlink(f"{self.folder}/{_ADDED}")


def _read_addition(path: str) -> dict[str, Any] | None:
    try:
        return read_spec(path) if os.path.lexists(path) else None
    except RequestError as error:
        raise RequestError(f"{error}; remove {path}, and write config.json of the bundle anew") from None


def _replace(path: str, text: str, like: os.stat_result | None) -> None:
    """Write a file in one step, with owner and mode `like` those of the one before. Raises InjectionError."""
    beside = f"{path}.nvct-{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(beside, flags, 0o600)
        try:
            rest = memoryview(text.encode())
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if like:
                os.fchmod(descriptor, like.st_mode & 0o7777)
                if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(descriptor, like.st_uid, like.st_gid)
            os.rename(beside, path)
        except BaseException:
            os.unlink(beside)
            raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InjectionError(
            f"write {path}: {error.strerror}; nothing was changed; let the bundle's folder be writable, and have room"
        ) from None
