"""The tables of machines agree: where libraries lie on a node and in a container, and how a loader cache marks them."""

from __future__ import annotations

import pytest

from nvct import ldcache
from nvct.model import LIBRARY, LIBRARY32, Ask, DeviceNode, DriverFile, Inventory, Request, Roots
from nvct.node import catalog
from nvct.plan import plan
from nvct.settings import Settings

# elf.h's e_machine in pyelftools' words, Debian's multiarch folders, and the flags of glibc's ldconfig.h.
MACHINES = {
    "x86_64": (("EM_X86_64", "x86_64-linux-gnu", 0x0300), ("EM_386", "i386-linux-gnu", 0x0000)),
    "aarch64": (("EM_AARCH64", "aarch64-linux-gnu", 0x0A00), ("EM_ARM", "arm-linux-gnueabihf", 0x0900)),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_nodes_folders_and_a_caches_flags(machine: str) -> None:
    wide, narrow = MACHINES[machine]
    known = catalog.ARCHITECTURES[machine]
    assert (known.machine, known.triplet) == wide[:2]
    assert (known.machine32, known.triplet32) == narrow[:2]
    assert ldcache.flags_for(machine, 64) & ldcache.ARCHITECTURE == wide[2]
    assert ldcache.flags_for(machine, 32) & ldcache.ARCHITECTURE == narrow[2]
    folders = catalog.library_folders(known)
    for triplet in (wide[1], narrow[1]):
        assert {f"/usr/lib/{triplet}", f"/usr/lib/{triplet}/nvidia/current"} <= set(folders)
    others = {other for name in MACHINES if name != machine for _, other, _ in MACHINES[name]}
    assert not [folder for folder in folders if any(other in folder for other in others)]


@pytest.mark.parametrize("machine", MACHINES)
def test_a_containers_folders(machine: str) -> None:
    files = tuple(
        DriverFile(kind, "compute", f"/usr/lib/libcuda{number}.so.1", "libcuda.so.1")
        for number, kind in enumerate((LIBRARY, LIBRARY32))
    )
    control = (DeviceNode("/dev/nvidiactl", 195, 255),)
    inventory = Inventory("550.1", "12.4", machine, Roots(), {"nvidia": 195}, nodes=control, files=files)
    request = Request(
        devices=Ask("env NVIDIA_VISIBLE_DEVICES", ("none",)),
        capabilities=Ask("env NVIDIA_DRIVER_CAPABILITIES", ("compute", "compat32")),
    )
    targets = {mount.target.rpartition("/")[0] for mount in plan(inventory, request, Settings()).mounts}
    assert targets == {f"/usr/lib/{triplet}" for _, triplet, _ in MACHINES[machine]}
