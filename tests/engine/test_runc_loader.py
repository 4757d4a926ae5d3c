"""The glibc loader in real containers: every injected library loads, and so does every name that the image had."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvct.sim.spec import NodeSpec
from tests.support.expect import FOLDERS, seen, wanted
from tests.support.nodes import SimNode, dgx_a100
from tests.support.runc import RuncContainer, Start, make_root

pytestmark = pytest.mark.engine

EVERY = ("compute", "utility", "video", "compat32", "ngx", "graphics", "display")
ALL = {"NVIDIA_VISIBLE_DEVICES": "3,0:2", "NVIDIA_DRIVER_CAPABILITIES": "all"}
LDCONFIG = "/sbin/ldconfig"

# (family, whether it has a loader cache) → the root file system
Image = Callable[[str, bool], Path]

# Byte 4 of an ELF file.
ELF_CLASS = {32: 1, 64: 2}

# Of these the image has a library each: names that the loader's order of digits and letters puts in all places, among
# and around those of the driver. All are equally long.
IMAGE_LIBRARIES = [
    *(f"libnvidia-{number:03}.so.1" for number in range(0, 1000, 37)),
    *(f"libcuda-{letter}0012.so.1" for letter in "abyzABYZ"),
    *(f"libzzz-{number:06}.so.1" for number in range(0, 999999, 111111)),
    *(f"lib{letter}image-{n:03}.so.1" for letter in "0aZ" for n in (1, 2, 10, 11, 100)),
]


def build_library(folder: Path, soname: str) -> Path:
    path = folder / soname
    folder.mkdir(parents=True, exist_ok=True)
    command = ["cc", "-shared", "-nostdlib", f"-Wl,-soname,{soname}", "-x", "c", "-o", str(path), "-"]
    subprocess.run(command, input="int nvct_test_image(void) { return 1; }", text=True, check=True)
    return path


def add_libraries(folder: Path, names: list[str]) -> None:
    """One library for each name, with that SONAME: one is built, the others are it with another name written in."""
    model = build_library(folder, names[0]).read_bytes()
    for name in names[1:]:
        padded = name.encode().ljust(len(names[0]), b"\0")
        assert len(padded) == len(names[0])
        (folder / name).write_bytes(model.replace(names[0].encode(), padded))


def loads(container: RuncContainer, names: list[str]) -> dict[str, str]:
    """Name → the file that dlopen(3) loads in the container; "!" and the reason where it loads none."""
    done = container.run("/usr/bin/dlopen_all", *names, check=False)
    return dict(line.split("\t", 1) for line in done.stdout.splitlines())


@pytest.fixture
def image(tmp_path: Path, static_programs: Path, dlopen_all: Path) -> Image:
    """Makes a root file system with `dlopen_all` in it."""

    def make(family: str, loader_cache: bool) -> Path:
        rootfs = tmp_path / "rootfs"
        make_root(rootfs, family, loader_cache, static_programs)
        shutil.copy(dlopen_all, rootfs / "usr/bin")
        return rootfs

    return make


def loads_of_node(node: SimNode, family: str) -> dict[str, str]:
    """What dlopen(3) must find of every 64-bit library, by each of its names and by its path."""
    expected = wanted(node, [], EVERY, family)
    found = {name: path for (name, bits), path in expected["names"].items() if bits == 64}
    files = [path for path in expected["mounts"] if path.startswith(FOLDERS[family][0] + "/") and ".so." in path]
    return found | dict(zip(files, files))


def with_ldconfig(rootfs: Path, *options: str) -> None:
    subprocess.run([LDCONFIG, *options, "-r", str(rootfs)], check=True)


@pytest.mark.parametrize("family", ["debian", "lib64"])
@pytest.mark.parametrize("loader_cache", [True, False], ids=["cache", "no-cache"])
def test_every_library_loads(dgx: SimNode, start: Start, image: Image, family: str, loader_cache: bool) -> None:
    rootfs = image(family, loader_cache)
    expected = loads_of_node(dgx, family)
    assert len(expected) > 80
    with start(dgx, ALL, rootfs=rootfs, family=family) as container:
        assert loads(container, list(expected)) == expected
        assert seen(container, dgx) == wanted(dgx, ["3", "0:2"], EVERY, family)


@pytest.mark.parametrize("layout", ["new", "compat"])
@pytest.mark.parametrize("family", ["debian", "lib64"])
def test_every_name_of_the_image_loads_as_before(
    dgx: SimNode, start: Start, image: Image, family: str, layout: str
) -> None:
    """A cache of many names, in the present format and after an old header, with libraries for newer processors."""
    rootfs = image(family, False)
    add_libraries(rootfs / "opt/image/lib", IMAGE_LIBRARIES)
    add_libraries(rootfs / "opt/image/lib/glibc-hwcaps/x86-64-v2", IMAGE_LIBRARIES[::5])
    (rootfs / "etc/ld.so.conf").write_text("/opt/image/lib\n")
    with_ldconfig(rootfs, "-c", layout)
    with start(dgx, {}, rootfs=rootfs, family=family) as container:
        names = [name for name, _ in container.loader_names()]
        assert set(IMAGE_LIBRARIES) < set(names)
        before = loads(container, names)
        assert not [name for name, path in before.items() if path.startswith("!")]
        if layout == "new" and "v2" in cpu_levels():  # after an old header the loader ignores them
            assert before[IMAGE_LIBRARIES[0]] == f"/opt/image/lib/glibc-hwcaps/x86-64-v2/{IMAGE_LIBRARIES[0]}"
    with start(dgx, ALL, rootfs=rootfs, family=family) as container:
        expected = before | loads_of_node(dgx, family)
        assert len(expected) == len(before) + len(loads_of_node(dgx, family))
        assert loads(container, list(expected)) == expected


def cpu_levels() -> set[str]:
    """The levels of glibc-hwcaps that this machine's loader searches: v2, v3, v4."""
    said = subprocess.run(["/lib64/ld-linux-x86-64.so.2", "--help"], capture_output=True, text=True).stdout
    return {line.split()[0].removeprefix("x86-64-") for line in said.splitlines() if "(supported, searched)" in line}


@pytest.mark.parametrize("family", ["debian", "lib64"])
def test_the_driver_of_this_node_wins_over_one_of_the_image(
    dgx: SimNode, start: Start, image: Image, family: str
) -> None:
    """CUDA images carry a libcuda.so.1 for older drivers, and their cache names it."""
    rootfs = image(family, False)
    build_library(rootfs / "usr/local/cuda/compat", "libcuda.so.1")
    build_library(rootfs / "usr/local/cuda/compat", "libother.so.1")
    (rootfs / "etc/ld.so.conf").write_text("/usr/local/cuda/compat\n")
    with_ldconfig(rootfs)
    with start(dgx, {}, rootfs=rootfs, family=family) as container:
        assert loads(container, ["libcuda.so.1"]) == {"libcuda.so.1": "/usr/local/cuda/compat/libcuda.so.1"}
    with start(dgx, ALL, rootfs=rootfs, family=family) as container:
        expected = loads_of_node(dgx, family)
        expected["libother.so.1"] = "/usr/local/cuda/compat/libother.so.1"
        assert loads(container, list(expected)) == expected
        inside = os.stat(container.root / FOLDERS[family][0][1:] / "libcuda.so.1")
        there = os.stat(dgx.path / FOLDERS["debian"][0][1:] / f"libcuda.so.{dgx.version}")
        assert inside.st_ino == there.st_ino
    assert (rootfs / "usr/local/cuda/compat/libcuda.so.1").stat().st_size > 0


@pytest.mark.parametrize("what", ["file", "link"])
def test_a_libcuda_of_the_image_in_the_same_folder(dgx: SimNode, start: Start, image: Image, what: str) -> None:
    """An image that was made on a machine with another driver: its files are covered, not changed."""
    rootfs = image("debian", False)
    folder = rootfs / FOLDERS["debian"][0][1:]
    library = build_library(folder, "libcuda.so.1")
    if what == "link":
        library.rename(folder / "libcuda.so.440.33.01")
        library.symlink_to("libcuda.so.440.33.01")
    content = library.read_bytes()
    with_ldconfig(rootfs)
    with start(dgx, ALL, rootfs=rootfs) as container:
        expected = loads_of_node(dgx, "debian")
        assert loads(container, list(expected)) == expected
        mine = (dgx.path / FOLDERS["debian"][0][1:] / f"libcuda.so.{dgx.version}").read_bytes()
        assert (container.root / FOLDERS["debian"][0][1:] / "libcuda.so.1").read_bytes() == mine
    left = folder / ("libcuda.so.1" if what == "file" else "libcuda.so.440.33.01")
    assert left.read_bytes() == content


@pytest.fixture
def two_drivers(tmp_path: Path, root_user: None) -> Iterator[tuple[SimNode, NodeSpec]]:
    """One node before and after an upgrade of its driver, which drops a library and renames the firmware."""
    node = dgx_a100(tmp_path / "node", driver="550.163.01")
    newer = dgx_a100(tmp_path / "newer", driver="580.65.06").spec
    shutil.rmtree(tmp_path / "newer")
    yield node, newer
    node.forget()


@pytest.mark.parametrize("family", ["debian", "lib64", "busybox"])
def test_another_driver_version_at_the_next_start(
    two_drivers: tuple[SimNode, NodeSpec],
    start: Start,
    image: Image,
    tmp_path: Path,
    family: str,
    static_programs: Path,
) -> None:
    node, newer = two_drivers
    if family == "busybox":
        rootfs = tmp_path / "rootfs"
        make_root(rootfs, family, False, static_programs)
    else:
        rootfs = image(family, True)
    with start(node, ALL, rootfs=rootfs, family=family) as container:
        assert seen(container, node)["names"] == wanted(node, [], EVERY, family)["names"]
        first = container.before
    node.make(newer)
    assert node.version == "580.65.06"
    with start(node, ALL, rootfs=rootfs, family=family) as container:
        container.before = first  # compared with the image before its first start: as if there had been no other
        container.names_before = {}
        expected = wanted(node, ["3", "0:2"], EVERY, family)
        now = seen(container, node)
        own = {key: path for key, path in now["names"].items() if key not in expected["names"]}
        assert {**now, "names": expected["names"]} == expected
        assert not [key for key in own if "nvidia" in key[0] or "cuda" in key[0]]
        assert not [path for path in container.image() if "550.163.01" in path]
        if family != "busybox":
            names = loads_of_node(node, family)
            assert loads(container, list(names)) == names


def test_a_library_that_a_newer_driver_has_no_longer(
    two_drivers: tuple[SimNode, NodeSpec], start: Start, image: Image
) -> None:
    node, newer = two_drivers
    rootfs = image("debian", True)
    with start(node, ALL, rootfs=rootfs) as container:
        assert ("libnvidia-ifr.so.1", 64) in container.loader_names()
    node.make(newer)
    for path in (node.path / "usr/lib").rglob("libnvidia-ifr*"):
        path.unlink()
    with_ldconfig(node.path, "-X")
    with start(node, ALL, rootfs=rootfs) as container:
        assert not [path for path in container.image() if "libnvidia-ifr" in path]
        assert ("libnvidia-ifr.so.1", 64) not in container.loader_names()
        assert ("libnvidia-fbc.so.1", 64) in container.loader_names()


def test_what_is_the_images_own_survives_another_driver(
    two_drivers: tuple[SimNode, NodeSpec], start: Start, image: Image
) -> None:
    """A library of the image whose name begins like the driver's, with its cache entry and link."""
    node, newer = two_drivers
    rootfs = image("debian", False)
    folder = rootfs / FOLDERS["debian"][0][1:]
    build_library(folder, "libnvidia-container.so.1")
    (folder / "libnvidia-container.so").symlink_to("libnvidia-container.so.1")
    (rootfs / "etc/ld.so.conf").write_text(f"{FOLDERS['debian'][0]}\n")
    with_ldconfig(rootfs)
    for spec in (node.spec, newer, node.spec):
        node.make(spec)
        with start(node, ALL, rootfs=rootfs) as container:
            names = ["libnvidia-container.so.1", "libnvidia-container.so"]
            assert loads(container, names) == {name: f"{FOLDERS['debian'][0]}/{name}" for name in names}


def test_32_bit_names_are_32_bit_files(dgx: SimNode, start: Start, image: Image) -> None:
    """No 32-bit program runs here, so the entries are compared with the files they lead to."""
    rootfs = image("debian", True)
    with start(dgx, ALL, rootfs=rootfs) as container:
        names = container.loader_names()
        kinds = {key: Path(f"{container.root}{path}").read_bytes()[4] for key, path in names.items()}
        assert len([key for key in names if key[1] == 32]) > 30
        assert kinds == {key: ELF_CLASS[key[1]] for key in names}
