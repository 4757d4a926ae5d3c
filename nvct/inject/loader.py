"""The container's loader cache, /etc/ld.so.cache: read, merged and written by nvct itself.

`ldconfig` is never run: the image's own is a program of the image, the host's would read the image's configuration with
the host's rights, and either takes a hundred times as long.
"""

from __future__ import annotations

import os
from stat import S_ISLNK

from nvct import ldcache
from nvct.inject.links import replace_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvct.inject.ledger import Ledger
    from nvct.inject.mounts import Places
    from nvct.model import CacheEdit, StaleName

FOLDER = "/etc"
NAME = "ld.so.cache"
PATH = f"{FOLDER}/{NAME}"

# Entries of names that could be a driver's whose files are looked for: see links.MOST_CANDIDATES.
MOST_LOOKS = 2_000


def update_loader_cache(
    edits: tuple[CacheEdit, ...],
    stale: tuple[StaleName, ...],
    architecture: str,
    places: Places,
    ledger: Ledger,
) -> tuple[str, ...]:
    """Make the cache name every library of the edits. Returns warnings."""
    parent = places.folder(FOLDER)
    old = _read(places, parent)
    if old and not _is_native(old, architecture):
        return (f"{PATH} in the container is of another architecture than {architecture}: it was left as it is",)
    add = [(edit.name, edit.path, ldcache.flags_for(architecture, edit.bits)) for edit in edits]
    prefixes = tuple({name.prefix for name in stale if name.prefix})
    found = {edit.path: True for edit in edits}

    def is_stale(name: str, path: str) -> bool:
        if not name.startswith(prefixes):
            return False
        if path not in found:
            if len(found) > MOST_LOOKS:
                raise ldcache.LoaderCacheError(
                    f"loader cache: more than {MOST_LOOKS} files of drivers; rebuild it with ldconfig in the image"
                )
            found[path] = places.root.exists(path)
        return not found[path]

    new = ldcache.merge(old, add, is_stale)
    if new != old:
        _write(parent, old, new, ledger)
    return ()


def _is_native(data: bytes, architecture: str) -> bool:
    """Whether the cache is for this machine's programs: rewritten for another's, it would lose what they need."""
    found = ldcache.architecture_of(ldcache.parse(data))
    return not found or ldcache.flags_for(architecture, 64) & ldcache.ARCHITECTURE in found


def _read(places: Places, parent: int) -> bytes | None:
    try:
        anchor = places.root.open(PATH)
    except FileNotFoundError:
        return None
    try:
        return places.root.read(anchor, PATH, ldcache.MAX_SIZE)
    finally:
        os.close(anchor)


def _write(parent: int, old: bytes | None, new: bytes, ledger: Ledger) -> None:
    """Replace the cache in one step: a program that starts meanwhile reads the old one or the new one.

    Where the image has a link there, the link is replaced, not what it leads to.
    """
    status = _status(parent)
    if status is None:
        _put(parent, new, 0o644)
        ledger.add(f"remove {PATH}", lambda: os.unlink(NAME, dir_fd=parent))
    elif S_ISLNK(status.st_mode):
        text = os.readlink(NAME, dir_fd=parent)
        _put(parent, new, 0o644)
        ledger.add(f"restore {PATH}", lambda: replace_link(parent, NAME, text))
    else:
        mode, times = status.st_mode & 0o777, (status.st_atime_ns, status.st_mtime_ns)
        _put(parent, new, mode)
        ledger.add(f"restore {PATH}", lambda: _put(parent, old or b"", mode, times))


def _status(parent: int) -> os.stat_result | None:
    try:
        return os.stat(NAME, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _put(parent: int, content: bytes, mode: int, times: tuple[int, int] | None = None) -> None:
    aside = f".{NAME}.nvct-{os.getpid()}"
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(aside, flags, 0o600, dir_fd=parent)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fchmod(descriptor, mode)
        if times:
            os.utime(descriptor, ns=times)
        os.rename(aside, NAME, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError:
        os.unlink(aside, dir_fd=parent)
        raise
    finally:
        os.close(descriptor)
