"""OCI bundles to try a node with: small root file systems out of this machine's own files, and their config.json.

A container that is started from one runs under any OCI runtime, with no image and no registry.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from nvct.edits import HOOK_ENV
from nvct.errors import NvctError

# What the programs of a simulated driver, and a shell to look around with, need of the C library.
_GLIBC = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")
_APPLETS = ("sh", "cat", "head", "ls", "mkdir", "mknod", "readlink", "rm", "sleep", "sort", "stat", "test", "true")

FAMILIES = ("debian", "lib64", "busybox")


def make_rootfs(directory: Path, family: str = "debian", loader_cache: bool = True) -> None:
    """Write a root file system into the empty or absent folder.

    debian: has /etc/debian_version, so libraries go to /usr/lib/<triplet>. lib64: has not, so they go to /usr/lib64,
    which this C library finds through the loader cache alone. busybox: one static program and no C library.
    `loader_cache` says whether the first two come with a cache of their own.
    """
    for folder in ("dev", "etc", "proc", "sys", "tmp", "run", "usr/bin", "usr/lib"):
        (directory / folder).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib"):
        (directory / name).symlink_to(f"usr/{name}")
    _add_busybox(directory)
    if family == "debian":
        (directory / "etc/debian_version").write_text("12.0\n")
    if family == "lib64":
        (directory / "usr/lib64").mkdir()
    if family != "busybox":
        _add_glibc(directory)
        if loader_cache:
            subprocess.run(["/sbin/ldconfig", "-r", directory], check=True)


def _add_busybox(directory: Path) -> None:
    busybox = shutil.which("busybox")
    if not busybox:
        raise NvctError("busybox is not on this machine; install the Debian package busybox-static")
    shutil.copy(busybox, directory / "usr/bin/busybox")
    for applet in _APPLETS:
        (directory / "usr/bin" / applet).symlink_to("busybox")


def _add_glibc(directory: Path) -> None:
    """The loader under the path that programs name (PT_INTERP), the libraries where the loader looks by itself."""
    machine = os.uname().machine
    triplet = f"{machine}-linux-gnu"
    loader = Path({"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}[machine])
    (directory / str(loader.parent)[1:]).mkdir(exist_ok=True)
    shutil.copy(loader, directory / str(loader)[1:])
    libraries = directory / "usr/lib" / triplet
    libraries.mkdir()
    for name in _GLIBC:
        source = Path("/lib") / triplet / name
        if source.exists():
            shutil.copy(source, libraries / name)


def config(
    args: Sequence[str],
    env: Mapping[str, str],
    hooks: Mapping[str, Sequence[Mapping[str, object]]],
    read_only: bool = False,
) -> dict[str, object]:
    """An OCI runtime spec for a root file system beside it in `rootfs`: no network, no terminal, no device but the
    usual.
    """
    capabilities = ["CAP_KILL", "CAP_MKNOD", "CAP_DAC_OVERRIDE", "CAP_CHOWN"]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": list(args),
            "env": ["PATH=/usr/bin", *(f"{name}={value}" for name, value in env.items())],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": read_only},
        "hostname": "nvct",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {
                "destination": "/dev",
                "type": "tmpfs",
                "source": "tmpfs",
                "options": ["nosuid", "strictatime", "mode=755", "size=65536k"],
            },
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
        ],
        "hooks": {
            stage: [{**entry, "env": entry.get("env") or list(HOOK_ENV)} for entry in entries]
            for stage, entries in hooks.items()
        },
        "linux": {
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
            "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")],
        },
    }


def write_config(bundle: Path, spec: dict[str, object]) -> None:
    (bundle / "config.json").write_text(json.dumps(spec))
