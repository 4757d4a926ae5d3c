"""Whether an image's loader finds libraries by itself, from the bytes of its loader and its cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvct.inject.rootfs import ConfinedRoot
from nvct.inject.unaided import why_not_unaided
from nvct.ldcache import flags_for
from nvct.ldmerge import merge
from nvct.model import CacheEdit

WIDE, NARROW = "/usr/lib/x86_64-linux-gnu", "/usr/lib/i386-linux-gnu"
CUDA = CacheEdit("libcuda.so.1", f"{WIDE}/libcuda.so.1", 64, "")
CUDA_32 = CacheEdit("libcuda.so.1", f"{NARROW}/libcuda.so.1", 32, "")
VDPAU = CacheEdit("libvdpau_nvidia.so.1", f"{WIDE}/vdpau/libvdpau_nvidia.so.1", 64, "")


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    for folder in ("lib64", "etc", "opt", WIDE[1:]):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "lib").symlink_to("usr/lib")
    loader(tmp_path, "/lib/x86_64-linux-gnu/", f"{WIDE}/", "/lib/", "/usr/lib/")
    yield tmp_path


def loader(image: Path, *folders: str, name: str = "lib64/ld-linux-x86-64.so.2") -> None:
    strings = b"".join(folder.encode() + b"\0" for folder in folders)
    (image / name).write_bytes(b"\x7fELF" + b"\0/usr/lib\0/usr/lib/x\0\x05\0" + strings + b"\0\x07")


def cache(image: Path, *entries: tuple[str, str, int]) -> None:
    rows = [(name, path, flags_for("x86_64", bits)) for name, path, bits in entries]
    (image / "etc/ld.so.cache").write_bytes(merge(None, rows))


def why(image: Path, *libraries: CacheEdit) -> str:
    root = ConfinedRoot(os.open(image, os.O_PATH | os.O_DIRECTORY))
    try:
        return why_not_unaided(root, libraries, "x86_64")
    finally:
        root.close()


def test_a_folder_that_the_loader_searches(image: Path) -> None:
    assert why(image, CUDA) == ""
    assert why(image, CUDA, VDPAU) == ""
    assert why(image) == ""


@pytest.mark.parametrize("folders", [["/lib64/", "/usr/lib64/"], ["/lib/", "/usr/lib/"], [f"{WIDE}/x/"], [WIDE], []])
def test_a_folder_that_it_does_not_search(image: Path, folders: list[str]) -> None:
    loader(image, *folders)
    assert why(image, CUDA) == f"the image's /lib64/ld-linux-x86-64.so.2 does not search {WIDE} by itself"


def test_slashes_at_the_end_are_the_same_folder(image: Path) -> None:
    loader(image, "/lib/", f"{WIDE}///")
    assert why(image, CUDA) == ""


def test_each_width_has_its_loader(image: Path) -> None:
    assert "ld-linux.so.2" in why(image, CUDA, CUDA_32)
    loader(image, f"{NARROW}/", name="lib/ld-linux.so.2")
    assert why(image, CUDA, CUDA_32) == ""


def test_without_a_loader_nothing_is_known(image: Path) -> None:
    (image / "lib64/ld-linux-x86-64.so.2").unlink()
    assert why(image, CUDA) != ""


@pytest.mark.parametrize(
    ("entry", "harmless"),
    [
        (("libcuda.so.1", f"{WIDE}/libcuda.so.1", 64), True),
        (("libcuda.so.1", "/lib/x86_64-linux-gnu/libcuda.so.1", 64), True),
        (("libcuda.so.1", "/opt/libcuda.so.1", 64), False),
        (("libcuda.so.1", f"{WIDE}/libcuda.so.0", 64), False),
        (("libcuda.so.1", "/opt/libcuda.so.1", 32), True),
        (("libcuda.so.2", "/opt/libcuda.so.2", 64), True),
    ],
)
def test_another_file_of_the_name_in_the_cache(image: Path, entry: tuple[str, str, int], harmless: bool) -> None:
    cache(image, entry)
    assert why(image, CUDA) == ("" if harmless else f"the image's loader cache has {entry[1]} for {entry[0]}")


def test_a_damaged_cache_is_a_reason(image: Path) -> None:
    (image / "etc/ld.so.cache").write_bytes(b"garbage")
    assert why(image, CUDA).startswith("loader cache")


def test_links_of_the_image_lead_nowhere_else(image: Path) -> None:
    """A link to the host's own loader is followed inside the image, where there is none."""
    (image / "lib64/ld-linux-x86-64.so.2").unlink()
    (image / "lib64/ld-linux-x86-64.so.2").symlink_to(f"{'../' * 20}lib64/ld-linux-x86-64.so.2")
    assert why(image, CUDA) != ""
