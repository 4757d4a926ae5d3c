"""An OCI bundle: its config.json as a value, and what an earlier `create` of ours changed in it.

A bundle may be used again, when its MIG devices are others. So what was changed is kept beside config.json, in
nvct-changes.json, and undone before the container's request is read once more.
"""

from __future__ import annotations

import os
import time
from _signal import (  # type: ignore[import-not-found]  # `signal` takes 3 ms to import
    SIG_BLOCK,
    SIG_SETMASK,
    SIGHUP,
    SIGINT,
    SIGTERM,
    pthread_sigmask,
)
from fcntl import LOCK_EX, LOCK_NB, flock

from nvct import fastjson
from nvct.errors import InjectionError, RequestError
from nvct.oci.state import read_spec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CHANGES = "nvct-changes.json"

# What engines and terminals send to end a start: it takes effect when the bundle is written, a millisecond later.
_ENDING = (SIGHUP, SIGINT, SIGTERM)
_PATIENCE_S = 10


class Bundle:
    """`spec` is config.json as it was before an earlier `create`, with what was edited by hand since; `changes` are
    those that it has of that one, none in a config.json that was written anew.
    """

    def __init__(self, folder: str, path: str, spec: dict[str, Any]) -> None:
        self.folder = folder
        self.path = path
        self.spec = spec
        beside, name = os.path.split(path)
        # Another spec in the same folder has changes of its own.
        self._kept = f"{beside}/{_CHANGES if name == 'config.json' else f'{name}.{_CHANGES}'}"
        self._recorded: list[dict[str, Any]] | None = None  # what is beside config.json, all of it
        self.changes: list[dict[str, Any]] = []

    @classmethod
    def of(cls, folder: str, name: str) -> Bundle:
        """The bundle in a folder, whose spec has a name. Raises RequestError."""
        folder = os.path.abspath(folder)
        path = os.path.join(folder, name)
        bundle = cls(folder, path, read_spec(path))
        if os.path.lexists(bundle._kept):
            bundle._undo()
        return bundle

    def _undo(self) -> None:
        from nvct.oci.spec import still_there, without

        self._recorded = _read_changes(self._kept)
        self.changes = still_there(self.spec, self._recorded)
        self.spec = without(self.spec, self.changes)

    def write(self, spec: dict[str, Any]) -> None:
        """Put a spec in the place of config.json, and beside it what makes it of the one before.

        Raises RequestError for a spec that JSON cannot hold, InjectionError when it cannot be written.
        """
        from nvct.oci.spec import difference

        changes = difference(self.spec, spec)
        # Those of before, too: should this start end between the two steps, they are what config.json has.
        changes += [change for change in self.changes if change not in changes]
        text = text_of(spec)
        with _Undisturbed(os.path.dirname(self._kept)):
            left = "nothing was changed"
            try:
                # In this order: changes that are not there do no harm, but what nobody knows of stays for ever.
                self._keep(changes)
                left = ""
                _replace(self.path, text, os.stat(self.path))
            except OSError as error:
                raise _failure(self.path, error, left or self._keep_as_before()) from None

    def forget_changes(self) -> None:
        """Leave config.json without the earlier changes, for a container that asks for nothing any more."""
        if self._recorded is None:
            return
        text = text_of(self.spec) if self.changes else ""
        with _Undisturbed(os.path.dirname(self._kept)):
            left = "nothing was changed"
            try:
                if self.changes:
                    _replace(self.path, text, os.stat(self.path))
                    left = "earlier changes of nvct's are no longer in config.json"
                os.unlink(self._kept)
            except OSError as error:
                raise _failure(self.path, error, left) from None

    def _keep(self, changes: list[dict[str, Any]]) -> None:
        _replace(self._kept, text_of({"changes": changes}), None)

    def _keep_as_before(self) -> str:
        """Leave no changes beside a spec that could not be written; says what has become of them."""
        try:
            if self._recorded is not None:
                self._keep(self._recorded)
            else:
                os.unlink(self._kept)
        except OSError:
            return f"{self.path} was not changed, and {self._kept}, which was, does no harm"
        return "nothing was changed"


def text_of(value: dict[str, Any]) -> str:
    """A value out of a spec as JSON. Raises RequestError."""
    try:
        return fastjson.dumps(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"config.json cannot be written again as it was read ({error}): no number in it may be beyond 1e308, nor "
            "NaN, and nothing nested as deeply as that"
        ) from None


def _failure(path: str, error: OSError, left: str) -> InjectionError:
    where = error.filename or path
    return InjectionError(
        f"write {where}: {error.strerror}; {left}; let the bundle's folder be writable, and have room"
    )


def _read_changes(path: str) -> list[dict[str, Any]]:
    from nvct.oci.spec import is_place

    try:
        value: Any = read_spec(path)
        changes = [{name: _list(row[name]) for name in ("path", "came", "went")} for row in value["changes"]]
        for change in changes:
            if not is_place(change["path"]):
                raise RequestError(f"nvct changes nothing at {change['path']!r:.80}")
        return changes
    except (RequestError, LookupError, TypeError) as error:
        raise RequestError(
            f"{path} is not what nvct writes ({error}); remove it, and write the bundle's config.json anew"
        ) from None


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"{value!r:.80} is no list")
    return value


class _Undisturbed:
    """While a bundle is written no other start writes in its folder, and no signal ends this one half-way.

    Raises InjectionError.
    """

    def __init__(self, folder: str) -> None:
        self._path = folder

    def __enter__(self) -> None:
        try:
            self._folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._lock()
        except OSError as error:
            raise _failure(self._path, error, "nothing was changed") from None
        self._mask = pthread_sigmask(SIG_BLOCK, _ENDING)

    def _lock(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return flock(self._folder, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InjectionError(
                        f"another process has held {self._path} locked for {_PATIENCE_S} s: end it; nothing was changed"
                    ) from None
            time.sleep(0.01)

    def __exit__(self, *_error: object) -> None:
        os.close(self._folder)
        pthread_sigmask(SIG_SETMASK, self._mask)


def _replace(path: str, text: str, like: os.stat_result | None) -> None:
    """Write a file in one step, with owner and mode `like` those of the one before. Raises OSError."""
    beside = f"{path}.nvct"
    if os.path.lexists(beside):
        os.unlink(beside)  # of a start that was killed: nobody else writes here now
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
        raise OSError(error.errno, error.strerror, path) from None
