"""The container's loader cache, /etc/ld.so.cache: read, merged and written by nvct itself.

`ldconfig` is never run: the image's own is a program of the image, the host's would read the image's configuration with
the host's rights, and either takes a hundred times as long.
"""

from __future__ import annotations

import os

from nvct import ldcache
from nvct.inject.files import replace_file

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
                    f"loader cache: more than {MOST_LOOKS} files of drivers in it; "
                    "rebuild it with ldconfig in the image"
                )
            found[path] = places.root.exists(path)
        return not found[path]

    new = ldcache.merge(old, add, is_stale)
    if new != old:
        replace_file(parent, NAME, new, None, old, ledger, PATH)
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
