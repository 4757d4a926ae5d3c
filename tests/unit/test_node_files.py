"""The driver's files: where they are found, and what they are taken for."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
from node_tree import ARCHITECTURE, MACHINE, TRIPLET, VERSION, NodeTree, fake_nvml, shared_object, write

from nvct import ldcache, ldmerge
from nvct.model import BINARY, FIRMWARE, LIBRARY, LIBRARY32, SOCKET, DriverFile
from nvct.node import catalog
from nvct.node.files import (
    LibrarySearch,
    find_elsewhere,
    find_firmware,
    find_libraries,
    find_programs,
    find_sockets,
)


@pytest.fixture
def tree(tmp_path: Path) -> NodeTree:
    return NodeTree(tmp_path, nvml=shared_object("libnvidia-ml.so.1"))


def search(tree: NodeTree, extra: tuple[str, ...] = ()) -> LibrarySearch:
    return find_libraries(str(tree.root), ARCHITECTURE, VERSION, extra)


def paths(found: LibrarySearch) -> list[str]:
    return [file.path for file in found.files]


def write_cache(tree: NodeTree, *paths: str, flags: int | None = None) -> None:
    bits = ldcache.flags_for(MACHINE, 64) if flags is None else flags
    additions = [(os.path.basename(path), path, bits) for path in paths]
    write(tree.root / "etc/ld.so.cache", ldmerge.merge(None, additions))


def test_a_library_is_described_by_its_own_header(tree: NodeTree) -> None:
    assert search(tree).files == (
        DriverFile(LIBRARY, "utility", f"{TRIPLET}/libnvidia-ml.so.{VERSION}", "libnvidia-ml.so.1"),
        DriverFile(LIBRARY, "compute", f"{TRIPLET}/libcuda.so.{VERSION}", "libcuda.so.1", ("libcuda.so",)),
    )


@pytest.mark.parametrize(
    "folder", ["/usr/lib64", f"{TRIPLET}/nvidia/current", "/lib64", f"{TRIPLET}/vdpau", "/usr/lib"]
)
def test_every_usual_folder_is_searched(tree: NodeTree, folder: str) -> None:
    tree.library("libvdpau_nvidia.so", folder=folder)
    assert f"{folder}/libvdpau_nvidia.so.{VERSION}" in paths(search(tree))


def test_folders_that_are_one_folder_give_each_library_once(tree: NodeTree) -> None:
    (tree.root / "lib").symlink_to("usr/lib")
    assert len(search(tree).files) == 2


def test_a_configured_folder_wins_over_the_usual_ones(tree: NodeTree) -> None:
    tree.library("libcuda.so", folder="/opt/driver")
    assert f"/opt/driver/libcuda.so.{VERSION}" in paths(search(tree, ("/opt/driver",)))
    assert f"{TRIPLET}/libcuda.so.{VERSION}" in paths(search(tree))


def test_a_cache_without_the_driver_does_not_end_the_search(tree: NodeTree) -> None:
    write_cache(tree, "/usr/lib/libc.so.6")
    assert len(search(tree).files) == 2


def test_what_lies_beside_the_cached_nvml_is_found(tree: NodeTree) -> None:
    for path in (tree.root / TRIPLET[1:]).iterdir():
        path.unlink()
    tree.library("libnvidia-ml.so", folder="/var/lib/nvidia/lib64")
    tree.library("libcuda.so", folder="/var/lib/nvidia/lib64")
    assert search(tree).files == ()
    write_cache(tree, "/var/lib/nvidia/lib64/libnvidia-ml.so.1")
    assert paths(search(tree)) == [
        f"/var/lib/nvidia/lib64/libnvidia-ml.so.{VERSION}",
        f"/var/lib/nvidia/lib64/libcuda.so.{VERSION}",
    ]


def test_unknown_flags_in_the_cache_do_not_hide_a_library(tree: NodeTree) -> None:
    tree.library("libnvoptix.so", folder="/opt/driver")
    write_cache(tree, "/opt/driver/libnvoptix.so.1", flags=0x7703)
    assert f"/opt/driver/libnvoptix.so.{VERSION}" in paths(search(tree))


def test_dead_lines_of_the_cache_are_skipped_and_told(tree: NodeTree) -> None:
    gone = f"{TRIPLET}/libnvidia-tls.so.550.40"
    write_cache(tree, gone, f"{TRIPLET}/libcuda.so.1")
    found = search(tree)
    assert found.dead == (gone,)
    assert len(found.files) == 2


def test_a_damaged_cache_is_told_and_the_folders_are_searched(tree: NodeTree) -> None:
    write(tree.root / "etc/ld.so.cache", b"glibc-ld.so.cache1.1" + b"\xff" * 40)
    found = search(tree)
    assert len(found.files) == 2
    assert "run ldconfig" in found.notes[0]


def test_other_versions_are_left_out_and_nvmls_are_told(tree: NodeTree) -> None:
    other = tree.library("libnvidia-ml.so", folder="/usr/lib64", version="460.56")
    tree.library("libcuda.so", folder="/usr/lib64", version="460.56")
    found = search(tree)
    assert found.other_versions == {"460.56": str(other)}
    assert all(path.endswith(VERSION) for path in paths(found))


def test_libraries_with_versions_of_their_own_are_found(tree: NodeTree) -> None:
    tree.library("libnvidia-nvvm70.so", version="4")
    tree.library("libnvidia-egl-gbm.so", version="1.1.1")
    names = [os.path.basename(path) for path in paths(search(tree))]
    assert "libnvidia-nvvm70.so.4" in names
    assert "libnvidia-egl-gbm.so.1.1.1" in names


def test_an_unknown_library_of_the_driver_is_told(tree: NodeTree) -> None:
    tree.library("libnvidia-novelty.so")
    tree.library("libnvidia-gtk3.so")
    found = search(tree)
    assert len(found.files) == 2
    (note,) = found.notes
    assert f"libnvidia-novelty.so.{VERSION}" in note
    assert "gtk3" not in note


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("libnvidia-novelty.so.4", True),
        ("libnvidia-novelty.so.1.2.3", True),
        ("libnvidia-novelty.so.470.57.02", False),  # an older driver's, left behind by an upgrade
        ("libnvidia-container.so.1.17.4", False),
        ("libnvidia-novelty.txt", False),
    ],
)
def test_an_unknown_library_is_told_whatever_its_version(tree: NodeTree, name: str, told: bool) -> None:
    write(tree.root / TRIPLET[1:] / name, "")
    assert any(name in note for note in search(tree).notes) == told


@pytest.mark.skipif(MACHINE != "x86_64", reason="cc -m32 makes the 32-bit libraries of x86-64 only")
def test_32_bit_libraries_are_a_kind_of_their_own(tree: NodeTree) -> None:
    try:
        content = shared_object("libcuda.so.1", options=("-m32",))
    except subprocess.CalledProcessError:
        pytest.skip("this compiler makes no 32-bit objects")
    tree.library("libcuda.so", content, folder="/usr/lib/i386-linux-gnu")
    assert (
        DriverFile(LIBRARY32, "compute", f"/usr/lib/i386-linux-gnu/libcuda.so.{VERSION}", "libcuda.so.1")
        in search(tree).files
    )


def test_a_library_for_another_machine_is_left_out_and_told(tree: NodeTree) -> None:
    foreign = bytearray(shared_object("libnvoptix.so.1"))
    foreign[18:20] = (22).to_bytes(2, "little")  # e_machine: IBM S/390, for which there is no driver
    path = tree.library("libnvoptix.so", bytes(foreign))
    found = search(tree)
    assert len(found.files) == 2
    assert str(path) in found.notes[0]
    assert "EM_S390" in found.notes[0]


@pytest.mark.parametrize("keep", [0, 3, 20, 64, 200])
def test_a_truncated_library_is_left_out_and_told(tree: NodeTree, keep: int) -> None:
    path = write(tree.root / f"usr/lib64/libnvoptix.so.{VERSION}", shared_object("libnvoptix.so.1")[:keep])
    found = search(tree)
    assert len(found.files) == 2
    assert str(path) in found.notes[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_library_is_told_with_mode_and_owner(tree: NodeTree) -> None:
    path = tree.library("libnvoptix.so")
    path.chmod(0)
    (note,) = search(tree).notes
    assert f"{path} (mode 0000, owner {os.geteuid()}:" in note


@pytest.mark.skipif(os.geteuid() == 0, reason="root enters every folder")
def test_a_folder_that_cannot_be_entered_is_told_and_not_called_dead(tree: NodeTree) -> None:
    tree.library("libnvoptix.so", folder="/opt/driver")
    write_cache(tree, "/opt/driver/libnvoptix.so.1")
    folder = tree.root / "opt/driver"
    folder.chmod(0o600)
    found = search(tree)
    folder.chmod(0o700)
    assert found.dead == ()
    assert "/opt/driver/libnvoptix.so.1 is left out" in found.notes[0]


def test_links_of_libraries_do_not_leave_the_root(tree: NodeTree, tmp_path: Path) -> None:
    outside = write(tmp_path / f"outside/libnvoptix.so.{VERSION}", shared_object("libnvoptix.so.1"))
    (tree.root / TRIPLET[1:] / "libnvoptix.so.1").symlink_to(outside)
    assert len(search(tree).files) == 2


def test_programs_are_found_through_links(tree: NodeTree) -> None:
    real = write(tree.root / "usr/lib/nvidia/current/nvidia-smi", "#!/bin/sh\n")
    real.chmod(0o755)
    write(tree.root / "usr/bin/nvidia-debugdump", "not executable")
    (tree.root / "usr/bin/nvidia-smi").symlink_to("/usr/lib/nvidia/current/nvidia-smi")
    assert find_programs(str(tree.root)) == (DriverFile(BINARY, "utility", "/usr/lib/nvidia/current/nvidia-smi"),)


def test_firmware_of_this_version_is_found_with_its_real_path(tree: NodeTree) -> None:
    (tree.root / "lib").symlink_to("/usr/lib")
    for version in (VERSION, "460.56"):
        write(tree.root / f"usr/lib/firmware/nvidia/{version}/gsp_ga10x.bin", "x")
    write(tree.root / f"usr/lib/firmware/nvidia/{VERSION}/readme", "x")
    expected = DriverFile(FIRMWARE, "utility", f"/usr/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin")
    assert find_firmware(str(tree.root), VERSION) == (expected,)


def bind_socket(path: Path) -> None:
    """Bind by a relative name, since a socket's path may have 107 bytes only."""
    path.parent.mkdir(parents=True)
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def test_sockets_are_sockets(tree: NodeTree) -> None:
    bind_socket(tree.root / "run/nvidia-persistenced/socket")
    write(tree.root / "run/nvidia-fabricmanager/socket", "a file")
    (tree.root / "var").mkdir()
    (tree.root / "var/run").symlink_to("/run")
    assert find_sockets(str(tree.root)) == (DriverFile(SOCKET, "utility", "/run/nvidia-persistenced/socket"),)


def test_a_link_to_a_folder_is_no_folder_of_sockets(tree: NodeTree) -> None:
    (tree.root / "etc").mkdir()
    (tree.root / "tmp").mkdir()
    (tree.root / "tmp/nvidia-mps").symlink_to("/etc")
    assert find_sockets(str(tree.root)) == ()


def test_a_link_to_a_socket_is_no_socket(tree: NodeTree) -> None:
    bind_socket(tree.root / "run/docker.sock")
    (tree.root / "tmp").mkdir()
    (tree.root / "tmp/nvidia-mps").symlink_to("/run/docker.sock")
    assert find_sockets(str(tree.root)) == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes folders of root's and of others")
def test_a_folder_of_sockets_must_be_roots(tree: NodeTree) -> None:
    folder = tree.root / "tmp/nvidia-mps"
    folder.mkdir(parents=True)
    assert find_sockets(str(tree.root)) == (DriverFile(SOCKET, "compute", "/tmp/nvidia-mps"),)
    os.chown(folder, 1000, 1000)
    assert find_sockets(str(tree.root)) == ()


def test_libraries_elsewhere_are_found_for_the_message(tree: NodeTree) -> None:
    path = tree.library("libnvidia-ml.so", folder="/usr/local/nvidia/lib64")
    assert find_elsewhere(str(tree.root), ARCHITECTURE, VERSION) == (str(path),)
    assert find_elsewhere(str(tree.root), ARCHITECTURE, "460.56") == ()


def test_the_catalog_has_each_name_once() -> None:
    stems = [library.stem for library in catalog.LIBRARIES] + list(catalog.LEFT_OUT)
    assert len(stems) == len(set(stems))
    assert all(catalog.stem_of(f"{stem}.1.2") == stem for stem in stems)


@pytest.mark.parametrize(
    ("name", "stem"), [("libcuda.so.1", "libcuda.so"), ("libcuda.so", "libcuda.so"), ("x.sock", ""), ("gsp.bin", "")]
)
def test_the_stem_of_a_name(name: str, stem: str) -> None:
    assert catalog.stem_of(name) == stem


def test_a_real_shared_object_with_code_has_a_soname(tree: NodeTree) -> None:
    tree.library("libnvidia-ml.so", fake_nvml(), folder="/opt/driver")
    assert search(tree, ("/opt/driver",)).files[0].soname == "libnvidia-ml.so.1"
