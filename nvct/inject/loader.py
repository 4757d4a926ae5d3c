"""The container's loader cache, /etc/ld.so.cache: read, merged and written by nvct itself.

`ldconfig` is never run: the image's own is a program of the image, the host's would read the image's configuration with
the host's rights, and either takes a hundred times as long.
"""

from __future__ import annotations

import errno
import os

from nvct import ldcache, ldmerge
from nvct.inject.files import replace_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvct.inject.ledger import Ledger
    from nvct.inject.mounts import Places
    from nvct.inject.rootfs import ConfinedRoot
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
    """Make the cache name every library of the edits. Returns warnings.

    A cache on a volume is somebody else's, often the host's own, and stays as it is.
    """
    try:
        old = _read(places.root)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return (f"{PATH} lies on a volume of the container's: it was left as it is, and lacks the driver's libraries",)
    parent = places.folder(FOLDER)
    parsed = ldcache.parse(old) if old else None
    if parsed and not _is_native(parsed, architecture):
        return (f"{PATH} in the container is of another architecture than {architecture}: it was left as it is",)
    add = [(edit.name, edit.path, ldcache.flags_for(architecture, edit.bits)) for edit in edits]
    prefixes = tuple({name.prefix for name in stale if name.prefix})
    found = {edit.path: True for edit in edits}

    def is_stale(_name: str, path: str) -> bool:
        if path not in found:
            if len(found) > MOST_LOOKS:
                raise ldcache.LoaderCacheError(
                    f"loader cache: more than {MOST_LOOKS} files of drivers in it; "
                    "rebuild it with ldconfig in the image"
                )
            found[path] = not places.root.leads_nowhere(path)
        return not found[path]

    new = ldmerge.merge(old, add, is_stale, parsed, prefixes)
    if new != old:
        replace_file(parent, NAME, new, None, old, ledger, PATH)
    return ()


def _is_native(cache: ldcache.Cache, architecture: str) -> bool:
    """Whether the cache is for this machine's programs: rewritten for another's, it would lose what they need."""
    found = ldcache.architecture_of(cache)
    return not found or ldcache.flags_for(architecture, 64) & ldcache.ARCHITECTURE in found


def _read(root: ConfinedRoot) -> bytes | None:
    """The cache of the container's own file system, None without one. EXDEV when it, or its folder, is elsewhere."""
    try:
        anchor = root.open(PATH, same_mount=True)
    except FileNotFoundError:
        _check_folder(root)
        return None
    try:
        return root.read(anchor, PATH, ldcache.MAX_SIZE)
    finally:
        os.close(anchor)


def _check_folder(root: ConfinedRoot) -> None:
    try:
        os.close(root.open(FOLDER, same_mount=True))
    except FileNotFoundError:
        return
