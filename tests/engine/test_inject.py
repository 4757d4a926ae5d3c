"""Edits carried out in a mount namespace, on this kernel and on what older ones lack: all of them, once, or none."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from nvct.ldcache import parse
from nvct.model import CacheEdit, DeviceEdit, Edits, LinkEdit, MountEdit, ProcEdit, StaleName
from nvct.record import replace
from tests.support.bare import MISSING_CALLS, BareContainer

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces need root"),
]

RO = ("ro", "nosuid", "nodev")
LIB = "/usr/lib64"

KERNELS = pytest.mark.parametrize("kernel", list(MISSING_CALLS))


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """What the host gives: two libraries, a program, firmware, a socket, and a procfs folder of two GPUs."""
    host = tmp_path / "host"
    host.mkdir()
    for name in ("libcuda.so.550.1", "libnvidia-ml.so.550.1", "nvidia-smi", "gsp.bin"):
        (host / name).write_text(f"{name} of the host")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(host / "socket"))
    proc = host / "driver" / "nvidia"
    for gpu in ("0000:07:00.0", "0000:0f:00.0"):
        (proc / "gpus" / gpu).mkdir(parents=True)
        (proc / "gpus" / gpu / "information").write_text(f"GPU {gpu}")
    for access in ("gpu3/mig/gi1/access", "gpu3/mig/gi1/ci0/access", "gpu3/mig/gi2/access"):
        (proc / "capabilities" / access).parent.mkdir(parents=True, exist_ok=True)
        (proc / "capabilities" / access).write_text("DeviceFileMinor: 21\n")
    (proc / "params").write_text("EnableMSI: 1\nModifyDeviceFiles: 1\n")
    (proc / "version").write_text("NVRM version: 550.1\n")
    return host


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    rootfs = tmp_path / "rootfs"
    for folder in ("etc", "usr/bin", "usr/lib64", "run"):
        (rootfs / folder).mkdir(parents=True)
    return rootfs


def edits_for(host: Path) -> Edits:
    return Edits(
        devices=(
            DeviceEdit("/dev/nvidia0", "/dev/full", 1, 7, "a GPU"),
            DeviceEdit("/dev/nvidia-caps/nvidia-cap1", "/dev/zero", 1, 5, "a capability"),
        ),
        mounts=(
            MountEdit(f"{host}/libcuda.so.550.1", f"{LIB}/libcuda.so.550.1", RO, "compute"),
            MountEdit(f"{host}/libnvidia-ml.so.550.1", f"{LIB}/libnvidia-ml.so.550.1", RO, "utility"),
            MountEdit(f"{host}/nvidia-smi", "/usr/bin/nvidia-smi", RO, "utility"),
            MountEdit(f"{host}/gsp.bin", "/lib/firmware/nvidia/550.1/gsp.bin", RO, "firmware", required=False),
            MountEdit(f"{host}/socket", "/run/nvidia-persistenced/socket", ("nosuid", "nodev", "noexec"), "ipc", False),
        ),
        links=(
            LinkEdit(f"{LIB}/libcuda.so.1", "libcuda.so.550.1", "SONAME"),
            LinkEdit(f"{LIB}/libcuda.so", "libcuda.so.1", "development"),
        ),
        loader_cache=(CacheEdit("libcuda.so.1", f"{LIB}/libcuda.so.1", 64, "compute"),),
        proc=ProcEdit(
            source=f"{host}/driver/nvidia",
            files=("version", "params", "registry"),
            gpus=("0000:0f:00.0",),
            capabilities=("gpu3/mig/gi1/access", "gpu3/mig/gi1/ci0/access"),
            why="only visible GPUs",
        ),
        stale=(StaleName(LIB, "libcuda.so"), StaleName("/lib/firmware/nvidia", "")),
    )


@KERNELS
def test_everything_is_there(host: Path, rootfs: Path, kernel: str) -> None:
    with BareContainer(rootfs, host / "driver") as container:
        assert container.inject(edits_for(host), kernel) == ("", ())
        root = container.root
        assert (root / "usr/lib64/libcuda.so").read_text() == "libcuda.so.550.1 of the host"
        assert os.readlink(root / "usr/lib64/libcuda.so") == "libcuda.so.1"
        assert (root / "usr/bin/nvidia-smi").read_text() == "nvidia-smi of the host"
        assert (root / "dev/nvidia0").lstat().st_rdev == os.makedev(1, 7)
        assert (root / "dev/nvidia-caps/nvidia-cap1").lstat().st_rdev == os.makedev(1, 5)
        assert (root / "run/nvidia-persistenced/socket").is_socket()
        assert b"libcuda.so.1\0" in (root / "etc/ld.so.cache").read_bytes()
        shown = root / "proc/driver/nvidia"
        assert os.listdir(shown / "gpus") == ["0000:0f:00.0"]
        assert (shown / "gpus/0000:0f:00.0/information").read_text() == "GPU 0000:0f:00.0"
        assert (shown / "params").read_text() == "EnableMSI: 1\nModifyDeviceFiles: 0\n"
        assert sorted(os.listdir(shown)) == ["capabilities", "gpus", "params", "version"]
        assert os.listdir(shown / "capabilities/gpu3/mig") == ["gi1"]
        assert (shown / "capabilities/gpu3/mig/gi1/ci0/access").read_text() == "DeviceFileMinor: 21\n"


@KERNELS
def test_mount_options_are_the_ones_asked_for(host: Path, rootfs: Path, kernel: str) -> None:
    with BareContainer(rootfs, host / "driver") as container:
        container.inject(edits_for(host), kernel)
        options = {path: set(text.split(",")) - {"relatime"} for path, text in container.mounts()}
    assert options[f"{LIB}/libcuda.so.550.1"] == {"ro", "nosuid", "nodev"}
    assert options["/dev/nvidia0"] == {"ro", "nosuid", "noexec"}
    assert options["/run/nvidia-persistenced/socket"] == {"rw", "nosuid", "nodev", "noexec"}
    assert options["/proc/driver/nvidia"] == {"ro", "nosuid", "nodev", "noexec"}
    assert options["/proc/driver/nvidia/gpus/0000:0f:00.0"] == {"ro", "nosuid", "nodev", "noexec"}
    assert "/proc/driver/nvidia/gpus/0000:07:00.0" not in options


@KERNELS
def test_twice_is_once(host: Path, rootfs: Path, kernel: str) -> None:
    with BareContainer(rootfs, host / "driver") as container:
        assert container.inject(edits_for(host), kernel) == ("", ())
        tree, mounts = container.tree(), container.mounts()
        assert container.inject(edits_for(host), kernel) == ("", ())
        assert container.tree() == tree
        assert container.mounts() == mounts


@KERNELS
@pytest.mark.parametrize("obstacle", ["device", "mount", "link", "cache"])
def test_a_failure_undoes_everything(host: Path, rootfs: Path, kernel: str, obstacle: str) -> None:
    (rootfs / "usr/lib64/libcuda.so.1").symlink_to("libcuda.so.470.0")
    (rootfs / "usr/lib64/libcuda.so.470.0").touch()
    (rootfs / "lib/firmware/nvidia/470.0").mkdir(parents=True)
    (rootfs / "lib/firmware/nvidia/470.0/gsp.bin").touch()
    edits = edits_for(host)
    if obstacle == "device":
        edits = replace(edits, devices=(*edits.devices, DeviceEdit("/dev/nvidia1", "/dev/full", 1, 99, "a lie")))
    elif obstacle == "mount":
        (rootfs / "usr/bin/nvidia-smi").mkdir()
    elif obstacle == "link":
        (rootfs / "usr/lib64/libcuda.so").mkdir()
    else:
        (rootfs / "etc/ld.so.cache").mkdir()
    with BareContainer(rootfs, host / "driver") as container:
        tree, mounts = container.tree(), container.mounts()
        error, _ = container.inject(edits, kernel)
        assert error.startswith("InjectionError: ")
        assert "everything done before was undone" in error
        assert container.tree() == tree
        assert container.mounts() == mounts


def test_an_error_names_step_path_and_errno(host: Path, rootfs: Path) -> None:
    with BareContainer(rootfs, host / "driver") as container:
        (container.root / "dev/nvidia-caps").write_text("in the way")
        error, _ = container.inject(edits_for(host))
    assert error == (
        "InjectionError: mount device nodes: /dev/nvidia-caps: openat2: Not a directory (ENOTDIR); "
        "everything done before was undone"
    )


def test_what_is_gone_from_the_host_is_for_a_new_inventory(host: Path, rootfs: Path) -> None:
    (host / "nvidia-smi").unlink()
    with BareContainer(rootfs, host / "driver") as container:
        tree = container.tree()
        error, _ = container.inject(edits_for(host))
        assert error.startswith(f"StaleInventory: {host}/nvidia-smi is gone")
        assert container.tree() == tree


@pytest.mark.parametrize("source", ["link", "folder of a stranger's", "file"])
def test_a_writable_source_must_still_be_a_socket(host: Path, rootfs: Path, source: str) -> None:
    """/tmp/nvidia-mps, say, after its daemon has ended: anybody can put a link there."""
    (host / "socket").unlink()
    if source == "link":
        (host / "socket").symlink_to("/etc")
    elif source == "file":
        (host / "socket").write_text("secret")
    else:
        (host / "socket").mkdir()
        os.chown(host / "socket", 1000, 1000)
    with BareContainer(rootfs, host / "driver") as container:
        error, warnings = container.inject(edits_for(host))
        assert error == ""
        assert len(warnings) == 1
        assert f"{host}/socket" in warnings[0]
        assert not (container.root / "run/nvidia-persistenced/socket").exists()


# Links of images, and why nothing is mounted where they lead.
TRAPS = {
    "/proc/1/attr/exec": "kernel's own",
    "/proc/sys/kernel/core_pattern": "kernel's own",
    "/proc/self/status": "kernel's own",
    "/proc/kmsg": "kernel's own",
    "/sys/kernel/profiling": "kernel's own",
    "/proc/self/exe": "ELOOP",
}


@KERNELS
@pytest.mark.parametrize("trap", TRAPS)
def test_nothing_is_mounted_on_the_kernels_own_files(host: Path, rootfs: Path, kernel: str, trap: str) -> None:
    """A link of the image to a file that its runtime is about to write (the class of CVE-2019-16884)."""
    (rootfs / "usr/bin/nvidia-smi").symlink_to(trap)
    (rootfs / "sys").mkdir()
    with BareContainer(rootfs, host / "driver") as container:
        container.run("mount", "-t", "sysfs", "sysfs", f"{rootfs}/sys")
        mounts = container.mounts()
        error, _ = container.inject(edits_for(host), kernel)
        assert TRAPS[trap] in error
        assert container.mounts() == mounts


@KERNELS
@pytest.mark.parametrize("trap", ["/proc/kmsg", "/proc/1/environ"])
def test_the_kernels_own_files_are_not_read(host: Path, rootfs: Path, kernel: str, trap: str) -> None:
    """Reading /proc/kmsg would wait for ever, and eat the log of the host's kernel."""
    (rootfs / "etc/ld.so.cache").symlink_to(trap)
    with BareContainer(rootfs, host / "driver") as container:
        error, warnings = container.inject(edits_for(host), kernel)
        assert error == ""
        assert any("/etc/ld.so.cache" in warning for warning in warnings)
        assert os.readlink(container.root / "etc/ld.so.cache") == trap


def test_optional_parts_warn(host: Path, rootfs: Path) -> None:
    (host / "gsp.bin").unlink()
    (rootfs / "run/nvidia-persistenced").write_text("in the way")
    with BareContainer(rootfs, host / "driver") as container:
        error, warnings = container.inject(edits_for(host))
        assert error == ""
        assert len(warnings) == 2
        assert "gsp.bin" in warnings[0]
        assert "/run/nvidia-persistenced/socket" in warnings[1]
        assert not (container.root / "lib/firmware").exists()


@KERNELS
def test_a_library_of_the_image_is_covered_not_replaced(host: Path, rootfs: Path, kernel: str) -> None:
    (rootfs / "usr/lib64/libcuda.so.1").write_text("of the image")
    with BareContainer(rootfs, host / "driver") as container:
        assert container.inject(edits_for(host), kernel) == ("", ())
        assert (container.root / "usr/lib64/libcuda.so.1").read_text() == "libcuda.so.550.1 of the host"
        assert container.inject(edits_for(host), kernel) == ("", ())
    assert (rootfs / "usr/lib64/libcuda.so.1").read_text() == "of the image"


def test_a_node_that_is_there_is_kept_and_a_wrong_one_refused(host: Path, rootfs: Path) -> None:
    edits = replace(edits_for(host), proc=None)
    with BareContainer(rootfs) as container:
        os.mknod(container.root / "dev/nvidia0", 0o020666, os.makedev(1, 7))
        assert container.inject(edits) == ("", ())
        assert "/dev/nvidia0" not in dict(container.mounts())
    with BareContainer(rootfs) as container:
        os.mknod(container.root / "dev/nvidia0", 0o020666, os.makedev(1, 3))
        error, _ = container.inject(edits)
        assert "/dev/nvidia0 is the device 1:3 in the container, /dev/full is 1:7" in error


@KERNELS
def test_what_an_earlier_driver_left_is_removed(host: Path, rootfs: Path, kernel: str) -> None:
    with BareContainer(rootfs, host / "driver") as container:
        old = Edits(
            mounts=(
                MountEdit(f"{host}/libcuda.so.550.1", f"{LIB}/libcuda.so.470.9", RO, ""),
                MountEdit(f"{host}/gsp.bin", "/lib/firmware/nvidia/470.9/gsp.bin", RO, ""),
            ),
            links=(LinkEdit(f"{LIB}/libcuda.so.1", "libcuda.so.470.9", ""),),
            loader_cache=(
                CacheEdit("libcuda.so.1", f"{LIB}/libcuda.so.1", 64, ""),
                CacheEdit("libcuda.so.470.9", f"{LIB}/libcuda.so.470.9", 64, ""),
            ),
        )
        assert container.inject(old, kernel) == ("", ())
    (rootfs / "usr/lib64/libcudart.so.1").touch()
    with BareContainer(rootfs, host / "driver") as container:
        assert container.inject(edits_for(host), kernel) == ("", ())
        assert sorted(os.listdir(container.root / "usr/lib64")) == [
            "libcuda.so",
            "libcuda.so.1",
            "libcuda.so.550.1",
            "libcudart.so.1",
            "libnvidia-ml.so.550.1",
        ]
        assert os.listdir(container.root / "lib/firmware/nvidia") == ["550.1"]
        cache = parse((container.root / "etc/ld.so.cache").read_bytes())
        assert [(entry.name, entry.path) for entry in cache.entries] == [("libcuda.so.1", f"{LIB}/libcuda.so.1")]


def test_links_go_with_the_files_that_they_lead_to(host: Path, rootfs: Path) -> None:
    """Chains of links, in whichever order the folder lists them."""
    for number in range(8):
        (rootfs / f"usr/lib64/libcuda.so.470.{number}").touch()
        (rootfs / f"usr/lib64/libcuda.so.x{number}").symlink_to(f"libcuda.so.470.{number}")
        (rootfs / f"usr/lib64/libcuda.so.0{number}").symlink_to(f"libcuda.so.x{number}")
    with BareContainer(rootfs, host / "driver") as container:
        assert container.inject(Edits(stale=(StaleName(LIB, "libcuda.so"),))) == ("", ())
        assert os.listdir(container.root / "usr/lib64") == []


def test_volumes_in_the_place_of_leftovers_stay(host: Path, rootfs: Path, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "empty").touch()
    (rootfs / "lib/firmware/nvidia/470.9").mkdir(parents=True)
    (rootfs / "usr/lib64/libcuda.so.470.9").touch()
    with BareContainer(rootfs, host / "driver") as container:
        for source, target in (
            (volume, "lib/firmware/nvidia/470.9"),
            (volume / "empty", "usr/lib64/libcuda.so.470.9"),
        ):
            subprocess.run(
                ["nsenter", "-t", str(container.pid), "-m", "mount", "--bind", source, rootfs / target], check=True
            )
        mounts = container.mounts()
        stale = (StaleName("/lib/firmware/nvidia", ""), StaleName(LIB, "libcuda.so"))
        assert container.inject(Edits(stale=stale)) == ("", ())
        assert container.mounts() == mounts
        assert os.listdir(volume) == ["empty"]


@pytest.mark.parametrize("kernel", ["today", "5.11"])
def test_nothing_is_removed_from_a_volume_that_holds_the_libraries(
    host: Path, rootfs: Path, tmp_path: Path, kernel: str
) -> None:
    """`docker run -v /usr/lib64:/usr/lib64`: an empty file there is the host's, whatever its name."""
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "libcuda.so.470.9").touch()
    (volume / "libcuda.so").symlink_to("nowhere")
    with BareContainer(rootfs, host / "driver") as container:
        subprocess.run(
            ["nsenter", "-t", str(container.pid), "-m", "mount", "--bind", volume, rootfs / "usr/lib64"], check=True
        )
        assert container.inject(Edits(stale=(StaleName(LIB, "libcuda.so"),)), kernel) == ("", ())
    assert sorted(os.listdir(volume)) == ["libcuda.so", "libcuda.so.470.9"]


def test_leftovers_on_a_read_only_root_hinder_nobody(host: Path, rootfs: Path) -> None:
    (rootfs / "usr/lib64/libcuda.so.470.9").touch()
    (rootfs / "usr/lib64/libcuda.so.0").symlink_to("nowhere")
    (rootfs / "lib/firmware/nvidia/470.9").mkdir(parents=True)
    stale = (StaleName("/lib/firmware/nvidia", ""), StaleName(LIB, "libcuda.so"))
    with BareContainer(rootfs, host / "driver", read_only=True) as container:
        tree = container.tree()
        assert container.inject(Edits(stale=stale)) == ("", ())
        assert container.tree() == tree


def test_a_read_only_root_lists_what_it_lacks(host: Path, rootfs: Path) -> None:
    with BareContainer(rootfs, host / "driver", read_only=True) as container:
        error, _ = container.inject(replace(edits_for(host), stale=()))
        assert "read-only" in error
        for path in (f"{LIB}/libcuda.so.550.1", f"{LIB}/libnvidia-ml.so.550.1", "/usr/bin/nvidia-smi"):
            assert path in error
    (rootfs / "usr/lib64/libcuda.so.550.1").touch()
    (rootfs / "usr/bin/nvidia-smi").touch()
    edits = edits_for(host)
    edits = replace(edits, mounts=(edits.mounts[0], edits.mounts[2]), links=(), loader_cache=(), stale=())
    with BareContainer(rootfs, host / "driver", read_only=True) as container:
        assert container.inject(edits) == ("", ())
        assert (container.root / "usr/bin/nvidia-smi").read_text() == "nvidia-smi of the host"


@KERNELS
def test_links_of_the_image_lead_nowhere_else(host: Path, rootfs: Path, tmp_path: Path, kernel: str) -> None:
    """A folder of the image that is a link to a folder of the host: all goes below the container's root."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (rootfs / "usr/lib64").rmdir()
    (rootfs / "usr/lib64").symlink_to(outside)
    (rootfs / str(outside)[1:]).mkdir(parents=True)
    with BareContainer(rootfs, host / "driver") as container:
        assert container.inject(edits_for(host), kernel) == ("", ())
        assert (container.root / str(outside)[1:] / "libcuda.so.550.1").exists()
    assert list(outside.iterdir()) == []
