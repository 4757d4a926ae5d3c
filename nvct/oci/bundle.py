"""An OCI bundle: its config.json as a value, and what an earlier `create` of ours changed in it.

A bundle may be used again, when its MIG devices are others. So what was changed is kept beside config.json, in
nvct-changes.json, and undone before the container's request is read once more.
"""

from __future__ import annotations

import os

from nvct import fastjson
from nvct.errors import InjectionError, RequestError
from nvct.oci.state import read_spec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CHANGES = "nvct-changes.json"


class Bundle:
    """`spec` is config.json as it was before an earlier `create`, `changes` are those that it has of that one; none in
    a config.json that was written anew since.
    """

    def __init__(self, folder: str, path: str, spec: dict[str, Any]) -> None:
        self.folder = folder
        self.path = path
        self.spec = spec
        self.changes: list[dict[str, Any]] = []
        self._had_changes = False

    @classmethod
    def of(cls, folder: str, name: str) -> Bundle:
        """The bundle in a folder, whose spec has a name. Raises RequestError."""
        folder = os.path.abspath(folder)
        path = os.path.join(folder, name)
        bundle = cls(folder, path, read_spec(path))
        kept = f"{folder}/{_CHANGES}"
        if os.path.lexists(kept):
            bundle._take_back(_read_changes(kept))
        return bundle

    def _take_back(self, changes: list[dict[str, Any]]) -> None:
        from nvct.oci.spec import has, without

        self._had_changes = True
        # Engines write config.json anew for each start: then nothing of ours is in it.
        if has(self.spec, changes):
            self.spec = without(self.spec, changes)
            self.changes = changes

    def write(self, spec: dict[str, Any]) -> None:
        """Put a spec in the place of config.json, and beside it what makes it of the one before."""
        from nvct.oci.spec import difference

        changes = {"changes": difference(self.spec, spec)}
        # In this order: changes that are not there do no harm, but what nobody knows of stays for ever.
        _replace(f"{self.folder}/{_CHANGES}", fastjson.dumps(changes), None)
        _replace(self.path, fastjson.dumps(spec), os.stat(self.path))

    def forget_changes(self) -> None:
        """Leave config.json without the earlier changes, for a container that asks for nothing any more."""
        if self._had_changes:
            _replace(self.path, fastjson.dumps(self.spec), os.stat(self.path))
            os.unlink(f"{self.folder}/{_CHANGES}")


def _read_changes(path: str) -> list[dict[str, Any]]:
    try:
        value: Any = read_spec(path)
        return [{name: list(row[name]) for name in ("path", "came", "went")} for row in value["changes"]]
    except (RequestError, LookupError, TypeError) as error:
        raise RequestError(
            f"{path} is not what nvct writes ({error}); remove it, and write the bundle's config.json anew"
        ) from None


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
