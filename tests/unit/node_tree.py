"""Small node trees for the tests of nvct/node: a procfs, a driver root with real ELF files, a table of device nodes.

They are made by hand, so that a test can leave out, damage or contradict any part. Nodes are a table, so that ordinary
users can run these tests.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from nvct.node import catalog
from nvct.settings import Settings

VERSION = "550.54.15"
MACHINE = os.uname().machine
ARCHITECTURE = catalog.ARCHITECTURES[MACHINE]
TRIPLET = f"/usr/lib/{ARCHITECTURE.triplet}"
FAKE_NVML = Path(__file__).parent.parent / "programs" / "fake_nvml.c"

# The GPUs of programs/fake_nvml.c, in NVML's order: folder under /proc, UUID, minor.
GPUS = (
    ("0000:47:00.0", "GPU-aaaaaaaa-0000-0000-0000-000000000000", 1),
    ("0000:07:00.0", "GPU-bbbbbbbb-0000-0000-0000-000000000001", 0),
)
# Its MIG devices: access file, capability minor.
ACCESS = {
    "gpu0/mig/gi2/access": 21,
    "gpu0/mig/gi2/ci0/access": 22,
    "gpu0/mig/gi9/access": 84,
    "gpu0/mig/gi9/ci0/access": 85,
}
MAJORS = {"nvidia": 195, "nvidia-uvm": 507, "nvidia-caps": 237}


@cache
def shared_object(soname: str, source: str = "", options: tuple[str, ...] = ()) -> bytes:
    """A real shared object; without a source it has no symbols and needs nothing."""
    folder = Path(mkdtemp(prefix="nvct-test-"))
    target = folder / "library.so"
    command = ["cc", "-shared", "-fPIC", "-o", str(target), f"-Wl,-soname,{soname}", *options]
    command += [source] if source else ["-nostdlib", "-x", "c", "/dev/null"]
    try:
        subprocess.run(command, check=True, capture_output=True)
        return target.read_bytes()
    finally:
        target.unlink(missing_ok=True)
        folder.rmdir()


def fake_nvml(*options: str) -> bytes:
    """The NVML of programs/fake_nvml.c, built with these options."""
    return shared_object("libnvidia-ml.so.1", str(FAKE_NVML), options)


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def information(uuid: str, minor: int, model: str = "NVIDIA A100-SXM4-40GB") -> str:
    return (
        f"Model: \t\t {model}\nIRQ:   \t\t 34\nGPU UUID: \t {uuid}\nVideo BIOS: \t 92.00.19.00.01\n"
        f"Bus Type: \t PCIe\nDMA Size: \t 47 bits\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"
    )


def capability(minor: int) -> str:
    return f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"


class NodeTree:
    """A node below one folder; everything is there unless a test takes it away."""

    def __init__(self, folder: Path, nvml: bytes | None = None) -> None:
        self.folder = folder
        self.proc = folder / "proc"
        self.root = folder / "root"
        self.root.mkdir()
        self.table = folder / "nodes.json"
        self.settings = Settings(
            root=str(self.root),
            dev_root=str(folder),
            proc_root=str(self.proc),
            sys_root=str(folder / "sys"),
            device_table=str(self.table),
            nvml_timeout_s=20.0,
        )
        self._write_proc()
        self.write_nodes()
        self.library("libnvidia-ml.so", fake_nvml() if nvml is None else nvml)
        self.library("libcuda.so", development=True)

    def _write_proc(self) -> None:
        driver = self.proc / "driver/nvidia"
        write(
            driver / "version",
            f"NVRM version: NVIDIA UNIX {MACHINE} Kernel Module  {VERSION}  Tue Mar  5 22:23:56 UTC 2024\n"
            "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n",
        )
        for name, uuid, minor in GPUS:
            write(driver / "gpus" / name / "information", information(uuid, minor))
        for access, minor in ACCESS.items():
            write(driver / "capabilities" / access, capability(minor))
        write(self.proc / "sys/kernel/random/boot_id", "5f9c6c1e-0000-4000-8000-000000000000\n")
        self.write_majors(MAJORS)

    def write_majors(self, majors: dict[str, int]) -> None:
        lines = "".join(f"{number:3} {name}\n" for name, number in majors.items())
        write(self.proc / "devices", f"Character devices:\n  1 mem\n{lines}\nBlock devices:\n  8 sd\n259 nvidia-disk\n")

    def write_nodes(self, without: tuple[str, ...] = ()) -> None:
        numbers = {
            "/dev/nvidia0": (195, 0),
            "/dev/nvidia1": (195, 1),
            "/dev/nvidiactl": (195, 255),
            "/dev/nvidia-modeset": (195, 254),
            "/dev/nvidia-uvm": (507, 0),
            "/dev/nvidia-uvm-tools": (507, 1),
            **{f"/dev/nvidia-caps/nvidia-cap{minor}": (237, minor) for minor in ACCESS.values()},
        }
        rows = [
            {"path": path, "type": "c", "major": major, "minor": minor, "mode": 0o660, "uid": 0, "gid": 27}
            for path, (major, minor) in numbers.items()
            if path not in without
        ]
        self.table.write_text(json.dumps(rows))

    def library(
        self,
        stem: str,
        content: bytes | None = None,
        folder: str = TRIPLET,
        version: str = VERSION,
        development: bool = False,
    ) -> Path:
        """A library, its SONAME link, and its development link where asked for."""
        path = write(self.root / folder[1:] / f"{stem}.{version}", content or shared_object(f"{stem}.1"))
        (path.parent / f"{stem}.1").symlink_to(path.name)
        if development:
            (path.parent / stem).symlink_to(f"{stem}.1")
        return path
