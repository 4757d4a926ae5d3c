"""What the container's loader is told, by the kind of its image."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nvct.model import CacheEdit, ContainerRoot, FileEdit, Inventory, Roots
from nvct.plan.loader import loader_edits

NODE = Inventory("550.163.01", "12.4", "x86_64", Roots(), {})
CACHE = (
    CacheEdit("libcuda.so.1", "/usr/lib64/libcuda.so.1", 64, "compute"),
    CacheEdit("libcuda.so", "/usr/lib64/libcuda.so", 64, "compute"),
    CacheEdit("libvdpau_nvidia.so.1", "/usr/lib64/vdpau/libvdpau_nvidia.so.1", 64, "video"),
)
DEFAULT = "/lib:/usr/local/lib:/usr/lib\n"


def musl_list(musl: str, cache: tuple[CacheEdit, ...] = CACHE) -> FileEdit | None:
    files = loader_edits(NODE.architecture, ContainerRoot(musl=musl), cache).files
    return files[0] if files else None


def test_glibc_gets_the_cache_alone() -> None:
    for architecture in ("", "x86_64"):
        told = loader_edits(NODE.architecture, ContainerRoot(architecture=architecture), CACHE)
        assert (told.cache, told.files, told.left_out, told.warnings) == (CACHE, (), (), ())


def test_musl_gets_the_folders_too() -> None:
    told = loader_edits(NODE.architecture, ContainerRoot(musl=DEFAULT), CACHE)
    assert told.cache == CACHE
    (file,) = told.files
    assert file.path == "/etc/ld-musl-x86_64.path"
    assert file.content == "/lib:/usr/local/lib:/usr/lib\n/usr/lib64\n/usr/lib64/vdpau\n"
    assert file.mode == 0o644
    assert file.why
    assert "gcompat" in told.warnings[0]


def test_the_list_has_the_machines_name() -> None:
    (file,) = loader_edits("aarch64", ContainerRoot(musl=""), CACHE).files
    assert file.path == "/etc/ld-musl-aarch64.path"


def test_what_is_listed_is_not_listed_again() -> None:
    assert musl_list("/usr/lib64\n/usr/lib64/vdpau") is None
    edit = musl_list("/a:/usr/lib64:/b")
    assert edit
    assert edit.content == "/a:/usr/lib64:/b\n/usr/lib64/vdpau\n"


def test_without_libraries_nothing_is_listed() -> None:
    assert musl_list(DEFAULT, ()) is None


FOLDERS = st.lists(st.text("abc/", min_size=1, max_size=5).map(lambda text: "/" + text), max_size=6)


@given(FOLDERS, st.sampled_from([":", "\n"]), st.booleans())
def test_nothing_that_was_searched_is_lost(folders: list[str], separator: str, ends: bool) -> None:
    had = separator.join(folders) + ("\n" if ends else "")
    edit = musl_list(had)
    found = (edit.content if edit else had).replace(":", "\n").split("\n")
    assert found[: len(folders)] == folders
    assert {"/usr/lib64", "/usr/lib64/vdpau"} <= set(found)
    assert musl_list(edit.content if edit else had) is None  # twice is once


def test_an_image_for_another_architecture_keeps_its_files() -> None:
    told = loader_edits(NODE.architecture, ContainerRoot(architecture="aarch64", musl=DEFAULT), CACHE)
    assert (told.cache, told.files) == ((), ())
    (left_out,) = told.left_out
    assert left_out.what == "loader cache"
    assert "aarch64" in left_out.why
    assert "x86_64" in left_out.why
    assert told.warnings == ("the image is for aarch64, this node's driver for x86_64: use an image for x86_64",)
