"""Jetson boards: a GPU inside the chip, driven by nvgpu instead of the driver that nvct knows."""

from __future__ import annotations

import os

from nvct.errors import DriverError
from nvct.node import procfs
from nvct.node.roots import on_host
from nvct.settings import Settings

_RELEASE = "/etc/nv_tegra_release"
_FAMILY = "/devices/soc0/family"


def is_jetson(settings: Settings) -> bool:
    """Whether this machine is a Jetson: it has NVIDIA's board software, or a chip of the Tegra family."""
    return os.path.isfile(on_host(settings.root, _RELEASE)) or _family(settings).lower().startswith("tegra")


def _family(settings: Settings) -> str:
    try:
        return procfs.read_text(on_host(settings.sys_root, _FAMILY)).strip()
    except OSError:  # no system-on-chip that says what it is
        return ""


def refusal(settings: Settings) -> DriverError:
    """Why nothing can be done for containers there."""
    release = on_host(settings.root, _RELEASE)
    found = release if os.path.isfile(release) else on_host(settings.sys_root, _FAMILY)
    return DriverError(
        f"this is a Jetson ({found}) without NVML, whose GPU nvct does not give to containers: use the container "
        "runtime of JetPack there"
    )
