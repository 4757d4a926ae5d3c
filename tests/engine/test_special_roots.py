"""Images that are laid out in unusual ways, on real runc: what the driver's files meet there, and what they leave."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest

from nvct.ldcache import parse
from nvct.sim.bundle import make_rootfs
from tests.conftest import PROGRAMS
from tests.support.namespaces import MountNamespace
from tests.support.nodes import SimNode
from tests.support.runc import RuncContainer, StartFailed
from tests.support.trees import Entry, read_tree
from tests.support.userns import Hooks, make_bundle, running

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="starts containers: needs root"),
    pytest.mark.skipif(not shutil.which("runc"), reason="no runc on this machine (make setup)"),
]

ENV = {"NVIDIA_VISIBLE_DEVICES": "2", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
MACHINE = os.uname().machine
TRIPLET = f"/usr/lib/{MACHINE}-linux-gnu"


class Image:
    """A root file system that a test prepares, and containers of it."""

    def __init__(self, folder: Path, hooks: Hooks, dlopen_all: Path, family: str = "debian") -> None:
        self.hooks = hooks
        self.bundle = make_bundle(folder, hooks(), ENV, 0)
        self.root = self.bundle / "rootfs"
        if family != "debian":
            shutil.rmtree(self.root)
            make_rootfs(self.root, family)
        shutil.copy(dlopen_all, self.root / "usr/bin")

    @contextmanager
    def container(self) -> Iterator[RuncContainer]:
        with running(self.bundle) as container:
            yield container

    def refused(self) -> str:
        """What the hook says about a container that it refuses. Nothing of it is left in the image."""
        before = self.tree()
        with pytest.raises(StartFailed), running(self.bundle):
            pass
        assert self.tree() == before
        assert str(self.bundle) not in Path("/proc/self/mountinfo").read_text()
        return self.hooks.said()

    def tree(self) -> dict[str, Entry]:
        """Every path; runc's own /dev/console left out."""
        found = read_tree(self.root)
        found.pop("/dev/console", None)
        return found

    def names(self) -> dict[str, str]:
        """Name → path of its loader cache."""
        entries = list(parse((self.root / "etc/ld.so.cache").read_bytes()).entries)
        return {entry.name: entry.path for entry in entries}


@pytest.fixture
def image(folder: Path, hooks: Hooks, dlopen_all: Path) -> Image:
    return Image(folder, hooks, dlopen_all)


@pytest.fixture
def red_hat(folder: Path, hooks: Hooks, dlopen_all: Path) -> Image:
    return Image(folder, hooks, dlopen_all, "lib64")


def assert_works(container: RuncContainer, node: SimNode) -> None:
    """nvidia-smi finds NVML and the GPU, and programs that ask for libcuda get the driver's."""
    assert node.gpus["2"].uuid in container.sh("nvidia-smi -L")
    said = container.sh("dlopen_all libcuda.so.1 libcuda.so")
    paths = dict(line.split("\t", 1) for line in said.splitlines())
    assert paths.keys() == {"libcuda.so.1", "libcuda.so"}
    for path in paths.values():
        file = container.root / container.sh(f"readlink -f {path}").strip()[1:]
        assert file.read_bytes() == (node.path / TRIPLET[1:] / f"libcuda.so.{node.version}").read_bytes(), path


def assert_twice_is_once(image: Image, node: SimNode) -> None:
    """A second start of the same container finds all in its place."""
    with image.container() as container:
        assert_works(container, node)
    first = image.tree()
    with image.container() as container:
        assert_works(container, node)
    assert image.tree() == first


# Driver files, links and folders in the image


def real_library(root: Path) -> None:
    (root / TRIPLET[1:] / "libcuda.so.1").write_bytes(b"the image's own libcuda")


def old_driver(root: Path) -> None:
    (root / TRIPLET[1:] / "libcuda.so.535.54.03").write_bytes(b"libcuda of another driver")
    (root / TRIPLET[1:] / "libcuda.so.1").symlink_to("libcuda.so.535.54.03")
    (root / TRIPLET[1:] / "libcuda.so").symlink_to("libcuda.so.1")


def links_that_lead_nowhere(root: Path) -> None:
    (root / TRIPLET[1:] / "libcuda.so.1").symlink_to("libcuda.so.470.82.01")
    (root / TRIPLET[1:] / "libcuda.so.550.163.01").symlink_to("/nowhere/libcuda.so")
    (root / "usr/bin/nvidia-smi").symlink_to("/opt/nvidia/bin/nvidia-smi")


def absolute_link_at_a_target(root: Path) -> None:
    (root / "opt/nvidia").mkdir(parents=True)
    (root / "opt/nvidia/nvidia-smi").write_text("#!/usr/bin/sh\n")
    (root / "usr/bin/nvidia-smi").symlink_to("/opt/nvidia/nvidia-smi")


def same_version(root: Path) -> None:
    (root / TRIPLET[1:] / "libcuda.so.550.163.01").write_bytes(b"copied into the image by someone")
    (root / "usr/bin/nvidia-smi").write_bytes(b"copied as well")


def stubs_in_the_cache(root: Path) -> None:
    stubs = root / "usr/local/cuda/lib64/stubs"
    stubs.mkdir(parents=True)
    source = subprocess.run(
        ["cc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", stubs / "libcuda.so"], check=True
    )
    assert source.returncode == 0
    (root / "etc/ld.so.conf").write_text("/usr/local/cuda/lib64/stubs\n")
    subprocess.run(["/sbin/ldconfig", "-r", root], check=True, capture_output=True)
    assert b"stubs/libcuda.so" in (root / "etc/ld.so.cache").read_bytes()


@pytest.mark.parametrize(
    "prepare",
    [real_library, old_driver, links_that_lead_nowhere, absolute_link_at_a_target, same_version, stubs_in_the_cache],
)
def test_images_that_hold_driver_files(image: Image, node: SimNode, prepare: Callable[[Path], None]) -> None:
    prepare(image.root)
    had = {path: found for path, found in image.tree().items() if found.is_file and "ld.so.cache" not in path}
    assert_twice_is_once(image, node)
    assert had.items() <= image.tree().items()  # what is mounted over a file leaves it as it is


@pytest.mark.parametrize("place", ["usr/bin/nvidia-smi", f"{TRIPLET[1:]}/libcuda.so.1", "etc/ld.so.cache"])
def test_a_folder_where_a_file_must_be(image: Image, place: str) -> None:
    if (image.root / place).exists():
        (image.root / place).unlink()
    (image.root / place).mkdir()
    assert "everything done before was undone" in image.refused()


def test_a_failure_puts_links_back(image: Image) -> None:
    old_driver(image.root)
    links_that_lead_nowhere_but_one(image.root)
    (image.root / "etc/ld.so.cache").unlink()
    (image.root / "etc/ld.so.cache").mkdir()
    assert "write the loader cache" in image.refused()


def links_that_lead_nowhere_but_one(root: Path) -> None:
    (root / "usr/bin/nvidia-smi").symlink_to("/opt/nvidia/bin/nvidia-smi")
    (root / TRIPLET[1:] / "libcuda.so.550.163.01").symlink_to("/nowhere")


# Folders of the image that are links, or that are not there


def lib64_is_lib(root: Path) -> None:
    shutil.move(root / "usr/lib64", root / "usr/lib64.old")
    for path in (root / "usr/lib64.old").iterdir():
        shutil.move(path, root / "usr/lib" / path.name)
    (root / "usr/lib64.old").rmdir()
    (root / "usr/lib64").symlink_to("lib")


def slash_lib64_is_usr_lib(root: Path) -> None:
    for path in (root / "lib64").iterdir():
        shutil.move(path, root / "usr/lib" / path.name)
    (root / "lib64").rmdir()
    (root / "lib64").symlink_to("/usr/lib")


def etc_is_a_link(root: Path) -> None:
    (root / "system").mkdir()
    shutil.move(root / "etc", root / "system/etc")
    (root / "etc").symlink_to("/system/etc")


def usr_lib_is_an_absolute_link(root: Path) -> None:
    shutil.move(root / "usr/lib", root / "lib-elsewhere")
    (root / "usr/lib").symlink_to("/lib-elsewhere")


def no_etc(root: Path) -> None:
    shutil.rmtree(root / "etc")


@pytest.mark.parametrize(
    "prepare", [lib64_is_lib, slash_lib64_is_usr_lib, etc_is_a_link, usr_lib_is_an_absolute_link, no_etc]
)
def test_folders_that_are_links_or_missing(red_hat: Image, node: SimNode, prepare: Callable[[Path], None]) -> None:
    prepare(red_hat.root)
    assert_twice_is_once(red_hat, node)
    assert red_hat.hooks.said() == ""
    assert not Path("/lib-elsewhere").exists()
    assert not Path("/system").exists()


def test_no_usr_lib(folder: Path, hooks: Hooks, node: SimNode, dlopen_all: Path) -> None:
    """One static program and nothing else: everything is made, and a loader cache for whoever brings a loader."""
    image = Image(folder, hooks, dlopen_all, "busybox")
    (image.root / "lib").unlink()
    (image.root / "usr/lib").rmdir()
    with image.container() as container:
        assert (container.root / f"usr/lib64/libcuda.so.{node.version}").stat().st_size > 0
        assert (container.root / "dev/nvidia3").is_char_device()
    assert image.names()["libcuda.so.1"] == "/usr/lib64/libcuda.so.1"


def test_a_folder_that_leads_nowhere_is_named(red_hat: Image) -> None:
    (red_hat.root / "usr/lib64").rmdir()
    (red_hat.root / "usr/lib64").symlink_to("/gone")
    assert "leads nowhere" in red_hat.refused()


# The loader's files


@pytest.mark.parametrize("present", list(product((True, False), repeat=3)))
def test_any_set_of_loader_files(red_hat: Image, node: SimNode, present: tuple[bool, bool, bool]) -> None:
    """ld.so.conf, ld.so.conf.d and ld.so.cache, each there or not; in the end `ldconfig -p` shows the library."""
    conf, conf_d, cache = present
    etc = red_hat.root / "etc"
    if conf:
        (etc / "ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n" if conf_d else "/usr/local/lib\n")
    if conf_d:
        (etc / "ld.so.conf.d").mkdir()
        (etc / "ld.so.conf.d/a.conf").write_text("/usr/local/lib\n")
    if not cache:
        (etc / "ld.so.cache").unlink()
    assert_twice_is_once(red_hat, node)
    listed = subprocess.run(["/sbin/ldconfig", "-p", "-r", red_hat.root], check=True, capture_output=True, text=True)
    assert "libcuda.so.1 (libc6,x86-64) => /usr/lib64/libcuda.so.1" in listed.stdout.replace("AArch64", "x86-64")
    assert red_hat.hooks.said() == ""


def test_two_c_libraries(image: Image, node: SimNode) -> None:
    """The loader's own folder has the right one, and the image's configuration names another: the right one stays."""
    other = image.root / "opt/other/lib"
    other.mkdir(parents=True)
    (other / "libc.so.6").write_bytes(b"\x7fELF broken")
    (image.root / "etc/ld.so.conf.d").mkdir()
    (image.root / "etc/ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n")
    (image.root / "etc/ld.so.conf.d/other.conf").write_text("/opt/other/lib\n")
    before = image.names()
    assert_twice_is_once(image, node)
    assert before.items() <= image.names().items()
    assert "/opt/other/lib/libc.so.6" not in image.names().values()
    (image.root / "etc/ld.so.cache").unlink()
    assert_twice_is_once(image, node)
    assert "libc.so.6" not in image.names()


def test_an_image_for_another_architecture(folder: Path, hooks: Hooks, node: SimNode, dlopen_all: Path) -> None:
    """Its loader cache would lose what its emulated programs need: it is left alone, there or not."""
    image = Image(folder, hooks, dlopen_all, "busybox")
    other, number = ("aarch64", 183) if MACHINE == "x86_64" else ("x86_64", 62)
    (image.root / "lib64").mkdir()
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + (3).to_bytes(2, "little") + number.to_bytes(2, "little")
    (image.root / "lib64/libc.so.6").write_bytes(header + bytes(44))
    (image.root / "bin/sh").unlink()
    with image.container():
        pass
    assert not (image.root / "etc/ld.so.cache").exists()
    assert hooks.said() == (
        f"nvct: warning: the image is for {other}, this node's driver for {MACHINE}: use an image for {MACHINE}\n"
    )


# musl


def alpine(root: Path) -> Path:
    """Make the static root one that has musl's loader, as far as it can be seen from outside; its list's path."""
    (root / f"lib/ld-musl-{MACHINE}.so.1").write_bytes(b"\x7fELF")
    return root / f"etc/ld-musl-{MACHINE}.path"


@pytest.mark.parametrize("listed", [None, "/lib\n/usr/lib\n", "/lib:/usr/local/lib", "/lib:/usr/lib64:/x\n", ""])
def test_musl_searches_the_drivers_folder(folder: Path, hooks: Hooks, dlopen_all: Path, listed: str | None) -> None:
    image = Image(folder, hooks, dlopen_all, "busybox")
    path = alpine(image.root)
    if listed is not None:
        path.write_text(listed)
    with image.container():
        pass
    first = image.tree()
    had = "/lib:/usr/local/lib:/usr/lib" if listed is None else listed
    found = path.read_text().replace(":", "\n").split()
    assert found == [*had.replace(":", "\n").split(), *(["/usr/lib64"] if "/usr/lib64" not in had else [])]
    with image.container():
        pass
    assert image.tree() == first
    assert "gcompat" in hooks.said()


def test_a_failure_restores_musls_list(folder: Path, hooks: Hooks, dlopen_all: Path) -> None:
    image = Image(folder, hooks, dlopen_all, "busybox")
    alpine(image.root).write_text("/lib\n")
    (image.root / "etc/ld.so.cache").mkdir()
    assert "write the loader cache" in image.refused()
    (image.root / f"etc/ld-musl-{MACHINE}.path").unlink()
    image.refused()


@pytest.mark.skipif(not shutil.which("musl-gcc"), reason="no musl-gcc on this machine (Debian package musl-tools)")
def test_musls_own_loader_finds_the_libraries(folder: Path, hooks: Hooks, dlopen_all: Path, node: SimNode) -> None:
    image = Image(folder, hooks, dlopen_all, "busybox")
    subprocess.run(["musl-gcc", "-o", image.root / "usr/bin/dlopen_all", PROGRAMS / "dlopen_all.c"], check=True)
    loader = Path(f"/lib/ld-musl-{MACHINE}.so.1")
    shutil.copy(loader, image.root / str(loader)[1:])
    with image.container() as container:
        said = container.sh("dlopen_all libcuda.so.1")
        assert said == "libcuda.so.1\t/usr/lib64/libcuda.so.1\n"
    (image.root / f"etc/ld-musl-{MACHINE}.path").unlink()
    with running(make_bundle(folder, {}, {}, 0, rootfs=image.root)) as container:
        assert "\t!\t" in container.sh("dlopen_all libcuda.so.1")


# A container inside a container

# Runs in the outer container: a container of its own runc, of what the outer one has been given.
_INNER = """
import json, subprocess, sys
subprocess.run(["mount", "--bind", sys.argv[2], "/proc/devices"], check=True)
runc = ["runc", "--root", "/run/inner-runc"]
started = subprocess.run([*runc, "run", "-d", "--bundle", sys.argv[1], "inner"], stdin=subprocess.DEVNULL,
    stdout=open("/run/inner.log", "w"), stderr=subprocess.STDOUT)
said = open("/run/inner.log").read()
if started.returncode:
    said += open(sys.argv[3]).read()
else:
    script = "nvidia-smi -L; ls /proc/driver/nvidia/gpus; mknod /dev/x c 195 2; head -c1 /dev/x /dev/nvidia3"
    said += subprocess.run([*runc, "exec", "inner", "/usr/bin/sh", "-c", "exec 2>&1; " + script],
        capture_output=True, text=True).stdout
    pid = json.loads(subprocess.run([*runc, "state", "inner"], capture_output=True).stdout)["pid"]
    (line,) = [line for line in open(f"/proc/{pid}/cgroup") if ":devices:" in line]
    said += "cgroup " + line
    said += "".join("mount " + line.split()[4] + "\\n" for line in open(f"/proc/{pid}/mountinfo"))
subprocess.run([*runc, "delete", "-f", "inner"], capture_output=True)
print(said)
"""


@pytest.fixture
def machine(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """This machine's own root file system for a container, and the command that enters where it is mounted.

    What is written there is kept apart.
    """
    root = folder / "machine"
    root.mkdir(exist_ok=True)
    script = (
        f"mount -t tmpfs tmpfs {root}; mkdir {root}/upper {root}/work {root}/root; "
        f"mount -t overlay overlay -o lowerdir=/,upperdir={root}/upper,workdir={root}/work {root}/root"
    )
    with MountNamespace(script) as host:
        yield root / "root", host.prefix


def test_a_container_inside_a_container(
    folder: Path, hooks: Hooks, node: SimNode, machine: tuple[Path, list[str]]
) -> None:
    """The outer one's nodes and /proc folders are mounts already, and its cgroup is the root of what the inner sees."""
    root, prefix = machine
    config = folder / "inner.yaml"
    config.write_text("proc_root: /proc\n")
    inner = make_bundle(folder, hooks(config=config, shown=""), {**ENV, "NVIDIA_VISIBLE_DEVICES": "0"}, 0)
    outer = make_bundle(folder, hooks(), ENV, 0, rootfs=root)
    change_spec(outer)
    with running(outer, prefix) as container:
        said = container.run(
            "/usr/bin/python3", "-c", _INNER, str(inner), f"{node.path}/proc/devices", str(hooks.log)
        ).stdout
    lines = said.splitlines()
    assert f"GPU 0: NVIDIA A100-SXM4-40GB (UUID: {node.gpus['2'].uuid})" in lines[0], said
    assert lines[1] == node.gpus["2"].bus
    assert "/dev/x: Operation not permitted" in lines[2]
    assert "/dev/nvidia3: No such device or address" in lines[3]
    assert lines[4].endswith(f"/{container.name}/inner")
    points = [line.removeprefix("mount ") for line in lines[5:]]
    assert {"/dev/nvidia3", "/dev/nvidiactl", "/proc/driver/nvidia", "/usr/bin/nvidia-smi"} <= set(points)
    assert hooks.said().count("\n") == 1  # the outer container has CAP_SYS_ADMIN
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()


_CAPABILITIES = [
    *("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_SETPCAP"),
    *("CAP_NET_ADMIN", "CAP_SYS_CHROOT", "CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_MKNOD"),
]


def change_spec(bundle: Path) -> None:
    """Let the container run containers: capabilities, programs, and its cgroups to write to."""
    spec = json.loads((bundle / "config.json").read_text())
    capabilities = dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES)
    spec["process"].update(noNewPrivileges=False, capabilities=capabilities)
    spec["process"]["env"][0] = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"
    spec["mounts"].append({"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["rw"]})
    (bundle / "config.json").write_text(json.dumps(spec))
