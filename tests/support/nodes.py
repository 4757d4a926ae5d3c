"""Simulated nodes for tests, each with tables of what is on it.

The tables are written out by hand from the node's description (profile, MIG layout, the driver's numbering rules), not
computed by nvct: they are what its answers are compared with.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from nvct.node.cache import cache_path
from nvct.sim.node import create, spec_from_profile, spec_from_yaml
from nvct.sim.spec import NodeSpec


class GpuFacts(NamedTuple):
    """`bus` is the folder name below /proc/driver/nvidia/gpus."""

    uuid: str
    minor: int
    bus: str


class MigFacts(NamedTuple):
    """`gpu` is the index of its GPU; `gi_minor` and `ci_minor` are those of its two capability nodes."""

    uuid: str
    gpu: str
    gi: int
    ci: int
    gi_minor: int
    ci_minor: int


class SimNode:
    """A simulated node in the folder `path`. `gpus` and `mig` are tables by the names of requests: "2", "0:1".

    `mig_mode`: the names of the GPUs in MIG mode, with MIG devices or without.
    """

    def __init__(
        self, spec: NodeSpec, path: Path, gpus: dict[str, GpuFacts], mig: dict[str, MigFacts], mig_mode: set[str]
    ) -> None:
        self.path = path
        self.spec = spec
        self.gpus = gpus
        self.mig = mig
        self.mig_mode = mig_mode
        self.config = path / "config.yaml"
        self.cache = Path(cache_path(str(self.config)))
        self.make(spec)

    def make(self, spec: NodeSpec) -> None:
        """Make the node, in the place of the one that is there: a node that has booted again."""
        create(spec, self.path)
        self.spec = spec

    @property
    def version(self) -> str:
        return self.spec.driver

    @property
    def majors(self) -> dict[str, int]:
        """Its character devices: name → number. Some numbers depend on what this machine has taken."""
        text = (self.path / "proc/devices").read_text().split("Block devices:")[0]
        rows = [line.split() for line in text.splitlines()[1:] if line]
        return {name: int(number) for number, name in rows}

    def device_numbers(self) -> set[tuple[int, int]]:
        """(major, minor) of every device node that the node has."""
        found = [path.lstat() for path in (self.path / "dev").rglob("*")]
        return {(os.major(s.st_rdev), os.minor(s.st_rdev)) for s in found if stat.S_ISCHR(s.st_mode)}

    def drm(self, gpu: GpuFacts) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
        """The GPU's DRM nodes by path, and udev's links to them; their numbers depend on this machine's own cards."""
        nodes, links = {}, {}
        for kind in ("card", "render"):
            link = f"/dev/dri/by-path/pci-{gpu.bus}-{kind}"
            links[link] = os.readlink(f"{self.path}{link}")
            status = os.stat(f"{self.path}{link}")
            nodes[f"/dev/dri/{links[link].removeprefix('../')}"] = (os.major(status.st_rdev), os.minor(status.st_rdev))
        return nodes, links

    def forget(self) -> None:
        """Remove what hooks have kept about it outside of its folder."""
        self.cache.unlink(missing_ok=True)


@contextmanager
def kept(node: SimNode) -> Iterator[SimNode]:
    try:
        yield node
    finally:
        node.forget()


DGX_MIG = {0: ("1g.5gb",) * 7, 1: ("3g.20gb", "2g.10gb", "1g.5gb")}

DGX_GPUS = {
    "0": GpuFacts("GPU-7d9959fa-39dc-5b9e-9859-0a682e6e3f49", 1, "0000:47:00.0"),
    "1": GpuFacts("GPU-45f9797d-66b6-500c-a95a-d28f3e0a271d", 2, "0000:4e:00.0"),
    "2": GpuFacts("GPU-db7cc168-04ab-513c-adda-9ae5da770fea", 3, "0000:87:00.0"),
    "3": GpuFacts("GPU-aadc5e7a-3e8e-50ab-8595-fc6242a2f294", 4, "0000:90:00.0"),
    "4": GpuFacts("GPU-e8358205-c00a-56c6-8a40-4db5812030a4", 5, "0000:b7:00.0"),
    "5": GpuFacts("GPU-348f192c-0f36-5e46-b051-780a64c84056", 6, "0000:bd:00.0"),
    "6": GpuFacts("GPU-92e196e9-afe0-5cdf-aee0-d4071304acf2", 7, "0000:07:00.0"),
    "7": GpuFacts("GPU-a2c4806f-2d73-5d91-a6f0-8d083f5d7db7", 0, "0000:0f:00.0"),
}

# Minors: 3 + 135 for each GPU minor + 9 for each GPU instance id, the compute instances following their instance.
DGX_MIG_DEVICES = {
    "0:0": MigFacts("MIG-332ce60d-4086-5d60-a4dc-452ae2bf609b", "0", 7, 0, 201, 202),
    "0:1": MigFacts("MIG-b87bc5b7-41c9-5aa9-b987-215e08c8abc0", "0", 8, 0, 210, 211),
    "0:2": MigFacts("MIG-5cb10df6-8ae0-582e-8526-bf84010959f0", "0", 9, 0, 219, 220),
    "0:3": MigFacts("MIG-1ed8492e-2710-51eb-b6bc-d4cf78e16d03", "0", 10, 0, 228, 229),
    "0:4": MigFacts("MIG-05d52762-fb6b-5cbe-983a-928396bdb346", "0", 11, 0, 237, 238),
    "0:5": MigFacts("MIG-524d0582-6d4e-523c-9299-535aea8936eb", "0", 12, 0, 246, 247),
    "0:6": MigFacts("MIG-2cde9bca-2fd1-51a0-8c83-08a5b58c33f1", "0", 13, 0, 255, 256),
    "1:0": MigFacts("MIG-2f2323bd-0c82-5b3c-9909-532e65cf9095", "1", 2, 0, 291, 292),
    "1:1": MigFacts("MIG-855e30c6-f131-531f-a145-5786d3c91775", "1", 3, 0, 300, 301),
    "1:2": MigFacts("MIG-edd4cf59-8899-5eaa-8860-4ee984ebf6c5", "1", 9, 0, 354, 355),
}


def dgx_a100(path: Path, driver: str = "550.163.01") -> SimNode:
    """Eight GPUs: the first divided into seven equal MIG devices, the second into three unequal ones."""
    spec = spec_from_profile("dgx-a100", mig=DGX_MIG, driver=driver)
    return SimNode(spec, path, DGX_GPUS, DGX_MIG_DEVICES, {"0", "1"})


# Four kinds of cards under an older driver. The first two UUIDs begin alike, and their buses differ by the domain only;
# the A30's first two MIG devices share a GPU instance; the A100 is in MIG mode and has no MIG device.
MIXED = """
driver: 470.256.02
cuda: "11.4"
gpus:
- {card: v100, uuid: GPU-11111111-2222-4333-8444-0000000000aa, minor: 5, bus_id: "0000:3b:00.0"}
- {card: a30, uuid: GPU-11111111-2222-4333-8444-0000000000bb, minor: 0, bus_id: "0001:3b:00.0",
   mig: [1c.2g.12gb, 1c.2g.12gb, 1g.6gb]}
- {card: a100-40, uuid: GPU-99999999-2222-4333-8444-0000000000cc, minor: 3, bus_id: "0000:5e:00.0", mig: []}
- {card: t4, uuid: GPU-77777777-2222-4333-8444-0000000000dd, minor: 9, bus_id: "0000:af:00.0"}
missing: ["usr/lib/*/libnvidia-encode*"]
"""

MIXED_GPUS = {
    "0": GpuFacts("GPU-11111111-2222-4333-8444-0000000000aa", 5, "0000:3b:00.0"),
    "1": GpuFacts("GPU-11111111-2222-4333-8444-0000000000bb", 0, "0001:3b:00.0"),
    "2": GpuFacts("GPU-99999999-2222-4333-8444-0000000000cc", 3, "0000:5e:00.0"),
    "3": GpuFacts("GPU-77777777-2222-4333-8444-0000000000dd", 9, "0000:af:00.0"),
}

MIXED_MIG_DEVICES = {
    "1:0": MigFacts("MIG-8815bd10-70f1-5f78-b481-81c3a3ed6235", "1", 2, 0, 21, 22),
    "1:1": MigFacts("MIG-858c1c57-ef01-5058-90d8-60e9c319e5e7", "1", 2, 1, 21, 23),
    "1:2": MigFacts("MIG-f49a5bb6-498b-567c-820e-68235be996c2", "1", 3, 0, 30, 31),
}


def mixed_node(path: Path) -> SimNode:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_name(f"{path.name}.yaml")
    file.write_text(MIXED)
    return SimNode(spec_from_yaml(file), path, MIXED_GPUS, MIXED_MIG_DEVICES, {"1", "2"})
