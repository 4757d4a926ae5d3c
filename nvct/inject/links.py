"""Symbolic links in the container, and what earlier starts left there."""

from __future__ import annotations

import errno
import os
from stat import S_ISDIR, S_ISLNK, S_ISREG

from nvct.errors import InjectionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nvct.inject.ledger import Ledger
    from nvct.inject.mounts import Places
    from nvct.inject.rootfs import ConfinedRoot
    from nvct.model import LinkEdit, StaleName

# How much of an image is searched for leftovers: names in all folders together, and those among them that could be
# ours. A driver has some hundred files, and to follow one link can take 4 ms where links were laid out for that.
MOST_NAMES = 1_000_000
MOST_CANDIDATES = 2_000

# Only names below a held folder descriptor are used here, never paths: nothing that is done can leave that folder.


def make_link(edit: LinkEdit, places: Places, ledger: Ledger) -> bool:
    """Make the link as `ln -sfn` would. False, and nothing done, when the image has a regular file of that name."""
    folder, name = edit.path.rsplit("/", 1)
    parent = places.folder(folder or "/")
    old = _what_stands(parent, name, edit.path)
    if old == edit.target:
        return True
    if old is None:
        os.symlink(edit.target, name, dir_fd=parent)
        ledger.add(f"remove {edit.path}", lambda: os.unlink(name, dir_fd=parent))
        return True
    if old == _REGULAR:
        return False
    replace_link(parent, name, edit.target)
    ledger.add(f"restore {edit.path}", lambda: replace_link(parent, name, old))
    return True


_REGULAR = "\0regular file"  # no link's text: a path has no NUL


def _what_stands(parent: int, name: str, path: str) -> str | None:
    """The text of the link, None where nothing stands, _REGULAR for a regular file; another kind is refused."""
    try:
        return os.readlink(name, dir_fd=parent)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: it is no link
            raise
    if S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        return _REGULAR
    raise InjectionError(
        f"{path} is to be a link, but the container has a folder or node there: remove it from the image"
    )


def replace_link(parent: int, name: str, text: str) -> None:
    """Put the new link beside the old one and rename it over: at no moment is there none."""
    beside = aside(parent, name)
    os.symlink(text, beside, dir_fd=parent)
    try:
        os.rename(beside, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:  # a mistake of ours too shall leave nothing
        os.unlink(beside, dir_fd=parent)
        raise


def aside(parent: int, name: str) -> str:
    """The name under which something new for `name` is made, free now: what is there is of a hook that was killed."""
    beside = f".{name}.nvct"
    try:  # noqa: SIM105  # contextlib is slow to import
        os.unlink(beside, dir_fd=parent)
    except FileNotFoundError:
        pass
    return beside


def remove_stale(stale: tuple[StaleName, ...], wanted: set[str], root: ConfinedRoot, ledger: Ledger) -> None:
    """Remove what starts under another driver version left: see model.StaleName. `wanted` are the paths of these
    edits. Only the container's own file system is searched: in a volume, what looks like a leftover is the user's.
    """
    prefixes: dict[str, tuple[str, ...]] = {}
    for leftover in stale:
        prefixes[leftover.folder] = (*prefixes.get(leftover.folder, ()), leftover.prefix)
    links = []
    search = _Search()
    for folder, beginnings in prefixes.items():
        try:
            descriptor = root.open(folder, os.O_RDONLY | os.O_DIRECTORY, same_mount=True)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EXDEV):
                raise
            continue
        for name in search.names(descriptor, beginnings, folder):
            path = f"{folder}/{name}"
            if path in wanted:
                continue
            status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            if S_ISLNK(status.st_mode):
                links.append((descriptor, name, path))
            elif not S_ISDIR(status.st_mode) or not any(inner.startswith(path + "/") for inner in wanted):
                _unless_it_is_not_ours(_remove_leftover, descriptor, name, path, status, search, ledger)
    # Only when all files are gone it shows which links lead nowhere.
    for descriptor, name, path in links:
        if root.leads_nowhere(path):
            _unless_it_is_not_ours(_remove_link, descriptor, name, path, ledger)


class _Search:
    """Lists folders of an image that may have been filled to keep a start busy."""

    def __init__(self) -> None:
        self._names = 0
        self._candidates = 0

    def names(self, folder: int, beginnings: tuple[str, ...], path: str) -> list[str]:
        """The names in the folder that begin so. InjectionError when there were too many, here and before."""
        found = []
        with os.scandir(folder) as entries:
            for entry in entries:
                self._names += 1
                if entry.name.startswith(beginnings):
                    self._candidates += 1
                    found.append(entry.name)
                if self._names > MOST_NAMES or self._candidates > MOST_CANDIDATES:
                    raise InjectionError(
                        f"{path} in the container, with the folders before it, has more than {MOST_NAMES} names or "
                        f"{MOST_CANDIDATES} that could be of a driver: remove them from the image"
                    )
        return found


def _unless_it_is_not_ours(remove: Callable[..., None], *arguments: object) -> None:
    """Remove something, unless a volume of the user's is mounted there (EBUSY) or nothing can be removed (EROFS)."""
    try:
        remove(*arguments)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.EROFS):
            raise


def _remove_link(parent: int, name: str, path: str, ledger: Ledger) -> None:
    text = os.readlink(name, dir_fd=parent)
    os.unlink(name, dir_fd=parent)
    ledger.add(f"restore {path}", lambda: os.symlink(text, name, dir_fd=parent))


def _remove_leftover(
    parent: int, name: str, path: str, status: os.stat_result, search: _Search, ledger: Ledger
) -> None:
    if _is_leftover(status):
        os.unlink(name, dir_fd=parent)
        ledger.add(f"restore {path}", lambda: _restore_file(parent, name, status))
    elif S_ISDIR(status.st_mode):
        _remove_folder_of_leftovers(parent, path, name, status, search, ledger)


def _is_leftover(status: os.stat_result) -> bool:
    """An empty file is a place that a mount of ours once covered; one that is covered now has the size of what
    covers it.
    """
    return S_ISREG(status.st_mode) and status.st_size == 0


def _restore_file(parent: int, name: str, like: os.stat_result) -> None:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o600, dir_fd=parent)
    try:
        _dress(descriptor, like)
    finally:
        os.close(descriptor)


def _dress(descriptor: int, like: os.stat_result) -> None:
    """Give a file or folder that was just made owner and mode of `like`, whatever the umask."""
    made = os.fstat(descriptor)
    if (made.st_uid, made.st_gid) != (like.st_uid, like.st_gid):
        as_far_as_allowed(os.fchown, descriptor, like.st_uid, like.st_gid)
    os.fchmod(descriptor, like.st_mode & 0o7777)


def as_far_as_allowed(call: Callable[..., object], *arguments: object) -> None:
    """Do something that a user namespace (EPERM, EINVAL for an id that is not mapped), a security module (EACCES) or a
    file system may not let us do.
    """
    try:
        call(*arguments)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EINVAL, errno.EACCES, errno.EOPNOTSUPP):
            raise


def _remove_folder_of_leftovers(
    parent: int, path: str, name: str, status: os.stat_result, search: _Search, ledger: Ledger
) -> None:
    """Remove a folder in which nothing but empty files is left."""
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        names = search.names(folder, ("",), path)
        inside = {entry: os.stat(entry, dir_fd=folder, follow_symlinks=False) for entry in names}
        if all(map(_is_leftover, inside.values())):
            ledger.add(f"restore {path}", lambda: _restore_folder(parent, name, status, inside))
            _remove_folder(parent, name, folder, inside)
    finally:
        os.close(folder)


def _remove_folder(parent: int, name: str, folder: int, inside: Iterable[str]) -> None:
    """Remove the folder `name`, open as `folder`, with the files in it.

    Tried before the files go, since the kernel refuses a mount point first of all (EBUSY): a volume's files stay.
    """
    try:
        os.rmdir(name, dir_fd=parent)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        for entry in inside:
            os.unlink(entry, dir_fd=folder)
        os.rmdir(name, dir_fd=parent)


def _restore_folder(parent: int, name: str, like: os.stat_result, inside: dict[str, os.stat_result]) -> None:
    """Undo a removal that may have failed half-way."""
    is_new = name not in os.listdir(parent)
    if is_new:
        os.mkdir(name, 0o700, dir_fd=parent)
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        for entry in inside.keys() - set(os.listdir(folder)):
            _restore_file(folder, entry, inside[entry])
        if is_new:
            _dress(folder, like)
    finally:
        os.close(folder)
