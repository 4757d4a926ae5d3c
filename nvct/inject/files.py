"""Small files that nvct writes in the container: replaced in one step, and put back as they were when a start fails.

Only names below a held folder descriptor are used here, never paths: nothing that is done can leave that folder.
"""

from __future__ import annotations

import os
from stat import S_ISLNK

from nvct.inject.links import as_far_as_allowed, aside, replace_link
from nvct.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvct.inject.ledger import Ledger
    from nvct.inject.mounts import Places
    from nvct.inject.rootfs import ConfinedRoot
    from nvct.model import FileEdit

# More than any file that nvct makes; a longer one in its place is somebody's own, and stays.
_MOST_BYTES = 1 << 16


def write_file(edit: FileEdit, places: Places, ledger: Ledger) -> None:
    """Make the file as the edit has it, unless it is so already. Raises OSError where that is not possible."""
    folder, name = edit.path.rsplit("/", 1)
    parent = places.folder(folder or "/")
    content = edit.content.encode()
    status = _status(parent, name)
    old = None
    if status is not None and not S_ISLNK(status.st_mode):
        old = _read(places.root, parent, name, edit.path)
    if status is None or old != content or status.st_mode & 0o7777 != edit.mode:
        replace_file(parent, name, content, edit.mode, old, ledger, edit.path)


def _read(root: ConfinedRoot, parent: int, name: str, path: str) -> bytes:
    anchor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        return root.read(anchor, path, _MOST_BYTES)
    finally:
        os.close(anchor)


def replace_file(
    parent: int, name: str, content: bytes, mode: int | None, old: bytes | None, ledger: Ledger, about: str
) -> None:
    """Put `content` in place of what has the name in one step: a program that starts meanwhile reads old or new.

    `old` is the content of the regular file there, if it is one; the new file has its owner and its extended
    attributes (a security label is one). Where a link is, the link is replaced, not what it leads to. `mode` None: as
    the old file has it, else 0644. `about` is the path, for the ledger.
    """
    status = _status(parent, name)
    if status is None:
        _put(parent, name, content, _Like(mode=0o644 if mode is None else mode))
        ledger.add(f"remove {about}", lambda: os.unlink(name, dir_fd=parent))
    elif S_ISLNK(status.st_mode):
        text = os.readlink(name, dir_fd=parent)
        _put(parent, name, content, _Like(mode=0o644 if mode is None else mode))
        ledger.add(f"restore {about}", lambda: replace_link(parent, name, text))
    else:
        like = _Like.of(parent, name)
        _put(parent, name, content, like if mode is None else replace(like, mode=mode, times=None))
        ledger.add(f"restore {about}", lambda: _put(parent, name, old or b"", like))


@record
class _Like:
    """What a file has besides its content. `owner` is (uid, gid), None for whoever makes it; `times` None for now."""

    mode: int
    owner: tuple[int, int] | None = None
    times: tuple[int, int] | None = None
    attributes: tuple[tuple[str, bytes], ...] = ()

    @classmethod
    def of(cls, parent: int, name: str) -> _Like:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=parent)
        try:
            status = os.fstat(descriptor)
            attributes = tuple((key, os.getxattr(descriptor, key)) for key in _listed(descriptor))
        finally:
            os.close(descriptor)
        times = (status.st_atime_ns, status.st_mtime_ns)
        return cls(status.st_mode & 0o777, (status.st_uid, status.st_gid), times, attributes)


def _listed(descriptor: int) -> list[str]:
    try:
        return os.listxattr(descriptor)
    except OSError:  # a file system without extended attributes
        return []


def _status(parent: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _put(parent: int, name: str, content: bytes, like: _Like) -> None:
    beside = aside(parent, name)
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(beside, flags, 0o600, dir_fd=parent)
    try:
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            _dress(descriptor, like)
        finally:
            os.close(descriptor)  # first, for some file systems tell only now that they are full
        os.rename(beside, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:  # a mistake of ours too shall leave nothing
        os.unlink(beside, dir_fd=parent)
        raise


def _dress(descriptor: int, like: _Like) -> None:
    """Give the new file what it shall have; owner and attributes as far as a user namespace lets us."""
    status = os.fstat(descriptor)
    if like.owner not in (None, (status.st_uid, status.st_gid)):
        as_far_as_allowed(os.fchown, descriptor, *like.owner or ())
    for key, value in like.attributes:
        as_far_as_allowed(os.setxattr, descriptor, key, value)
    os.fchmod(descriptor, like.mode)
    if like.times:
        os.utime(descriptor, ns=like.times)
