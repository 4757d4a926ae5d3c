"""Small files that nvct writes in a container: in one step, undone with the rest, and never outside its root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvct.model import CacheEdit, DeviceEdit, Edits, FileEdit
from nvct.record import replace
from tests.support.bare import MISSING_CALLS, BareContainer

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces need root"),
]

KERNELS = pytest.mark.parametrize("kernel", list(MISSING_CALLS))
PATH = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"
NAME = PATH.rpartition("/")[2]
EDITS = Edits(files=(FileEdit(PATH, '{"profiles":[]}\n', 0o444, "graphics"),))
# What fails after files are written: the loader cache cannot be replaced by a file.
FAILING = replace(EDITS, loader_cache=(CacheEdit("libcuda.so.1", "/usr/lib64/libcuda.so.1", 64, "compute"),))


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    rootfs = tmp_path / "rootfs"
    (rootfs / "etc").mkdir(parents=True)
    return rootfs


@KERNELS
def test_the_file_is_written_with_its_folders(rootfs: Path, kernel: str) -> None:
    with BareContainer(rootfs) as container:
        assert container.inject(EDITS, kernel) == ("", ())
        file = container.root / PATH[1:]
        assert file.read_text() == '{"profiles":[]}\n'
        assert file.stat().st_mode & 0o7777 == 0o444
        assert os.listdir(file.parent) == [NAME]  # nothing that was only on the way


@KERNELS
def test_twice_is_once(rootfs: Path, kernel: str) -> None:
    with BareContainer(rootfs) as container:
        assert container.inject(EDITS, kernel) == ("", ())
        before = (container.root / PATH[1:]).stat()
        assert container.inject(EDITS, kernel) == ("", ())
        after = (container.root / PATH[1:]).stat()
    assert (before.st_ino, before.st_ctime_ns) == (after.st_ino, after.st_ctime_ns)


@KERNELS
@pytest.mark.parametrize("before", ["nothing", "other text", "other mode", "a link"])
def test_an_older_file_is_replaced_and_a_failure_puts_it_back(rootfs: Path, kernel: str, before: str) -> None:
    file = rootfs / PATH[1:]
    if before != "nothing":
        file.parent.mkdir(parents=True)
        (file.parent / "target").write_text("the image's own")
    if before == "a link":
        file.symlink_to("target")
    elif before != "nothing":
        file.write_text("older" if before == "other text" else '{"profiles":[]}\n')
        file.chmod(0o640)
    (rootfs / "etc/ld.so.cache").mkdir()
    with BareContainer(rootfs) as container:
        tree = container.tree()
        error, _ = container.inject(FAILING, kernel)
        assert error.startswith("InjectionError: write the loader cache")
        assert container.tree() == tree
        assert container.inject(EDITS, kernel) == ("", ())
        assert not (container.root / PATH[1:]).is_symlink()
        assert (container.root / PATH[1:]).read_text() == '{"profiles":[]}\n'
    if before == "a link":
        assert (file.parent / "target").read_text() == "the image's own"


@KERNELS
@pytest.mark.parametrize("before", [None, "older"])
def test_a_fault_of_any_kind_leaves_nothing(rootfs: Path, kernel: str, before: str | None) -> None:
    """A mode that is no number is found when the file is beside its place already."""
    path = "/etc/file"
    if before:
        (rootfs / path[1:]).write_text(before)
    edits = Edits(files=(FileEdit(path, "new", "0444", "graphics"),))  # type: ignore[arg-type]
    with BareContainer(rootfs) as container:
        tree = container.tree()
        error, _ = container.inject(edits, kernel)
        assert error.startswith("InjectionError: write files: TypeError")
        assert "everything done before was undone" in error
        assert container.tree() == tree


@KERNELS
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("form", ["absolute", "relative", "proc"])
def test_no_link_in_the_path_leads_out(rootfs: Path, tmp_path: Path, kernel: str, depth: int, form: str) -> None:
    """Each component of the path in turn is a link to a folder (or a file) of the host."""
    outside = tmp_path / "outside"
    rest = PATH.split("/")[1:][depth:]
    (outside.joinpath(*rest[:-1])).mkdir(parents=True)
    victim = outside.joinpath(*rest) if rest else outside / "victim"
    victim.write_text("the host's")
    aim = outside if rest else victim
    link = rootfs.joinpath(*PATH.split("/")[1 : depth + 1])
    if depth == 1:
        link.rmdir()
    link.parent.mkdir(parents=True, exist_ok=True)
    texts = {
        "absolute": str(aim),
        "relative": "../" * 30 + str(aim)[1:],
        "proc": f"/proc/{os.getpid()}/root{aim}",
    }
    link.symlink_to(texts[form])
    before = {path: path.lstat().st_mtime_ns for path in outside.rglob("*")}
    with BareContainer(rootfs) as container:
        error, warnings = container.inject(EDITS, kernel)
    assert error == ""
    assert victim.read_text() == "the host's"
    assert {path: path.lstat().st_mtime_ns for path in outside.rglob("*")} == before
    # Where a folder is only a dangling link inside the root there is a warning; the last one is simply replaced.
    assert (warnings == ()) == (depth == 4)


@KERNELS
def test_a_link_to_a_folder_of_the_root_is_followed_there(rootfs: Path, tmp_path: Path, kernel: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (rootfs / str(outside)[1:]).mkdir(parents=True)
    (rootfs / "etc/nvidia").symlink_to(outside)
    with BareContainer(rootfs) as container:
        assert container.inject(EDITS, kernel) == ("", ())
    assert (rootfs / str(outside)[1:] / "nvidia-application-profiles-rc.d" / NAME).exists()
    assert list(outside.iterdir()) == []


@KERNELS
@pytest.mark.parametrize("obstacle", ["folder", "fifo", "long file", "file for a folder", "read-only"])
def test_an_obstacle_costs_the_file_and_nothing_else(rootfs: Path, kernel: str, obstacle: str) -> None:
    file = rootfs / PATH[1:]
    (file.parent if obstacle != "file for a folder" else rootfs / "etc").mkdir(parents=True, exist_ok=True)
    if obstacle == "folder":
        file.mkdir()
    elif obstacle == "fifo":
        os.mkfifo(file)
    elif obstacle == "long file":
        file.write_bytes(bytes(1 << 17))
    elif obstacle == "file for a folder":
        (rootfs / "etc/nvidia").touch()
    edits = replace(EDITS, devices=(DeviceEdit("/dev/nvidia0", "/dev/full", 1, 7, "a GPU"),))
    with BareContainer(rootfs, read_only=obstacle == "read-only") as container:
        before = {path: entry for path, entry in container.tree().items() if path.startswith("/etc")}
        error, warnings = container.inject(edits, kernel)
        assert error == ""
        assert len(warnings) == 1
        assert warnings[0].startswith(f"{PATH}: ")
        assert warnings[0].endswith("left out (graphics)")
        assert {path: entry for path, entry in container.tree().items() if path.startswith("/etc")} == before
        assert (container.root / "dev/nvidia0").is_char_device()
