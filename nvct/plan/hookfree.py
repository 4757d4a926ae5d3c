"""Edits for a spec with which nothing of nvct's runs: the same files, arranged so that a loader finds them by itself.

Where no hook makes links and writes the loader cache, every name of a library has to be a mount of the file, in the
folders that loaders search whatever their cache says (ld.so(8): its trusted folders are compiled in). Where the image
is not known, that is done for both families of images.
"""

from __future__ import annotations

from posixpath import normpath

from nvct.model import LIBRARY, LIBRARY32, ContainerRoot, Edits, LeftOut, MountEdit
from nvct.plan.files import library_folders
from nvct.record import replace

_NO_HOOK = "nothing of nvct's runs when a container starts from this spec"


def without_hook(edits: Edits, architecture: str, container: ContainerRoot | None = None) -> Edits:
    """`edits` are a plan for `container`, or for a debian-like image where None says that it is not known. What nothing
    can stand in for is left out, with the reason.

    In images that are not known 32-bit libraries are mounted in Debian's folder alone: the other family's, /usr/lib, is
    another name for the 64-bit folder in some.
    """
    mounts = {mount.target: mount for mount in edits.mounts}
    ends = _ends(edits)
    libraries = {ends[entry.path] for entry in edits.loader_cache}
    folders = library_folders(architecture, container or ContainerRoot())
    inside = tuple(f"{folder}/" for folder in folders.values())
    placed = {path: mount for path, mount in mounts.items() if path not in libraries or not path.startswith(inside)}
    names = _library_names(edits, libraries, ends, mounts, folders)
    placed |= names
    if container is None:
        placed |= _twins(names, folders[LIBRARY], library_folders(architecture, ContainerRoot(debian=False))[LIBRARY])
    for link in edits.links:
        end = ends[link.path]
        if end in mounts and end not in libraries:
            placed[link.path] = replace(mounts[end], target=link.path)
    return Edits(
        devices=edits.devices,
        mounts=tuple(placed.values()),
        env=edits.env,
        left_out=(*edits.left_out, *out_of_reach(edits)),
        warnings=edits.warnings,
    )


def _twins(names: dict[str, MountEdit], folder: str, other: str) -> dict[str, MountEdit]:
    """The same libraries in the folder of the other family."""
    paths = {path: other + path[len(folder) :] for path in names if path.startswith(f"{folder}/")}
    return {twin: replace(names[path], target=twin) for path, twin in paths.items()}


def _library_names(
    edits: Edits, libraries: set[str], ends: dict[str, str], mounts: dict[str, MountEdit], folders: dict[str, str]
) -> dict[str, MountEdit]:
    """A mount of the library at the place of each of its names."""
    names = {link.path: ends[link.path] for link in edits.links if ends[link.path] in libraries}
    for entry in edits.loader_cache:
        folder = folders[LIBRARY if entry.bits == 64 else LIBRARY32]
        # Where a library lies in a folder of its own, only the cache has led loaders there.
        path = entry.path if entry.path.startswith(f"{folder}/") else f"{folder}/{entry.name}"
        names[path] = ends[entry.path]
    return {path: replace(mounts[end], target=path) for path, end in names.items()}


def _ends(edits: Edits) -> dict[str, str]:
    """Where the plan's links lead to, by the path of every link and library."""
    texts = {link.path: link.target for link in edits.links}
    return {path: _end(path, texts) for path in (*texts, *(entry.path for entry in edits.loader_cache))}


def _end(path: str, texts: dict[str, str]) -> str:
    while path in texts:
        path = normpath(f"{path.rpartition('/')[0]}/{texts[path]}")
    return path


def out_of_reach(edits: Edits) -> tuple[LeftOut, ...]:
    """What of the edits nothing can stand in for where no hook runs."""
    mounts = {mount.target for mount in edits.mounts}
    ends = _ends(edits)
    left_out = [LeftOut(link.path, _NO_HOOK) for link in edits.links if ends[link.path] not in mounts]
    left_out += [LeftOut(file.path, _NO_HOOK) for file in edits.files]
    if edits.loader_cache:
        why = f"{_NO_HOOK}: programs that read it (`ldconfig -p`), such as Triton, do not find the driver's libraries"
        left_out.append(LeftOut("loader cache", why))
    if edits.proc:
        why = f"{_NO_HOOK}: the container sees every GPU of the node there"
        left_out.append(LeftOut("/proc/driver/nvidia", why))
    return tuple(left_out)
