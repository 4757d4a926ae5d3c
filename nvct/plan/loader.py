"""What the container's loader must be told: glibc's reads a cache, musl's a list of folders."""

from __future__ import annotations

from nvct.model import CacheEdit, ContainerRoot, FileEdit, LeftOut
from nvct.record import record


@record
class Loader:
    """The part of a plan that makes the loader find the driver's libraries."""

    cache: tuple[CacheEdit, ...] = ()
    files: tuple[FileEdit, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[str, ...] = ()


def loader_edits(architecture: str, container: ContainerRoot, cache: tuple[CacheEdit, ...]) -> Loader:
    """`architecture` is the driver's, `cache` are the names of all libraries of the plan.

    An image for other machines keeps its loader's files as they are: its programs run in an emulator, which cannot
    load these libraries, and would lose what they find now.
    """
    if container.architecture not in ("", architecture):
        why = f"the image is for {container.architecture}, this node's driver for {architecture}"
        left_out = LeftOut("loader cache", f"{why}: no program of it can load the driver's libraries")
        return Loader(left_out=(left_out,), warnings=(f"{why}: use an image for {architecture}",))
    if container.musl is None:
        return Loader(cache)
    return Loader(cache, _musl_folders(architecture, container.musl, cache), (), (_GCOMPAT,))


_GCOMPAT = (
    "the image has musl for a C library, and the driver is made for glibc: its libraries and programs work only where "
    "the image has a glibc as well, or the package gcompat"
)


def _musl_folders(architecture: str, searched: str, cache: tuple[CacheEdit, ...]) -> tuple[FileEdit, ...]:
    """The file in which musl's loader reads its folders, one a line or with colons; it has no cache."""
    known = searched.replace(":", "\n").split("\n")
    folders = dict.fromkeys(edit.path.rpartition("/")[0] for edit in cache)
    missing = [folder for folder in folders if folder not in known]
    if not missing:
        return ()
    content = "\n".join([searched.rstrip("\n"), *missing]) + "\n"
    path = f"/etc/ld-musl-{architecture}.path"
    return (FileEdit(path, content, 0o644, "musl's loader finds the driver's libraries by this list of folders"),)
