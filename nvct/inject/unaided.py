"""Whether an image's loader finds the driver's libraries unaided, when they are mounted under their SONAMEs.

The loader (glibc's ld.so) looks a name up in the image's cache and then in its system folders, which are compiled into
it. So it needs no links and no lines in the cache where the folder is one of these, and the cache has no other file of
the name.
"""

from __future__ import annotations

import os

from nvct import ldcache
from nvct.inject.loader import PATH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvct.inject.rootfs import ConfinedRoot
    from nvct.model import CacheEdit

# Where programs name their loader (PT_INTERP), by architecture and bits.
_LOADERS = {
    ("x86_64", 64): "/lib64/ld-linux-x86-64.so.2",
    ("x86_64", 32): "/lib/ld-linux.so.2",
    ("aarch64", 64): "/lib/ld-linux-aarch64.so.1",
    ("aarch64", 32): "/lib/ld-linux-armhf.so.3",
}
_MOST_LOADER = 4 << 20  # bytes; glibc's has 200 KiB, with debugging symbols some more


def why_not_unaided(root: ConfinedRoot, libraries: tuple[CacheEdit, ...], architecture: str) -> str:
    """Why the loader does not find all of the libraries, "" when it does. `libraries`: their names and places."""
    try:
        for bits in sorted({library.bits for library in libraries}):
            folders = {os.path.dirname(library.path) for library in libraries if library.bits == bits}
            # In a subfolder lies what is looked for by its place, as drivers of VDPAU are.
            searched = {folder for folder in folders if not any(folder.startswith(f"{other}/") for other in folders)}
            missing = _not_searched(root, _LOADERS[architecture, bits], searched)
            if missing:
                return missing
        return _other_file(root, libraries, architecture)
    except (OSError, ldcache.LoaderCacheError) as error:
        return str(error)


def _not_searched(root: ConfinedRoot, loader: str, folders: set[str]) -> str:
    content = _content(root, loader, _MOST_LOADER)
    for folder in sorted(folders):
        if not _has_string(content, folder.encode()):
            return f"the image's {loader} does not search {folder} by itself"
    return ""


def _has_string(content: bytes, folder: bytes) -> bool:
    """Whether the folder is a string of its own in there, with a slash after it, or several."""
    start = b"\0" + folder + b"/"
    at = content.find(start)
    while at >= 0:
        end = at + len(start)
        if content[end : end + 64].lstrip(b"/")[:1] == b"\0":
            return True
        at = content.find(start, end)
    return False


def _other_file(root: ConfinedRoot, libraries: tuple[CacheEdit, ...], architecture: str) -> str:
    try:
        cache = _content(root, PATH, ldcache.MAX_SIZE)
    except FileNotFoundError:
        return ""
    ours = {(library.name, library.bits): library.path for library in libraries}
    for name, path, bits in ldcache.names(cache, architecture):
        own = ours.get((name, bits))
        if own and path != own and not _is_same_file(root, path, own):
            return f"the image's loader cache has {path} for {name}"
    return ""


def _is_same_file(root: ConfinedRoot, one: str, other: str) -> bool:
    """Whether two paths name one place: /lib and /usr/lib are one folder in most images. The file is not there yet."""
    folders = os.path.dirname(one), os.path.dirname(other)
    if os.path.basename(one) != os.path.basename(other):
        return False
    try:
        descriptors = [root.open(folder, os.O_PATH | os.O_DIRECTORY) for folder in folders]
    except OSError:
        return False
    same = os.path.sameopenfile(*descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return same


def _content(root: ConfinedRoot, path: str, most: int) -> bytes:
    anchor = root.open(path)
    try:
        return root.read(anchor, path, most)
    finally:
        os.close(anchor)
