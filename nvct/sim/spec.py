"""What a simulated node is made of, as values: the node, its GPUs, their MIG profiles and layout, a failing NVML.

Nothing is read or written here. `nvct.sim.profiles` and `nvct.sim.nodefile` make these values, `nvct.sim.node` builds a
node from them.
"""

from __future__ import annotations

from nvct.model import NATIVE
from nvct.record import record


@record
class MigProfile:
    """One kind of GPU instance of one card.

    `id` is the profile id that `nvidia-smi mig -lgip` prints, `nvml_index` the number by which NVML's profile query
    asks for it. `slices` counts compute slices; an instance takes `size` memory slots from one of `starts` on.
    `fill` is the order in which the driver tries the starts when none is asked for. `attribute` is "" or "+me".
    """

    id: int
    nvml_index: int
    slices: int
    max_instances: int
    size: int
    starts: tuple[int, ...]
    fill: tuple[int, ...]
    memory_mib: int
    multiprocessors: int
    copy_engines: int
    decoders: int
    encoders: int = 0
    jpeg: int = 0
    ofa: int = 0
    attribute: str = ""


@record
class Card:
    """A model of GPU. `pci_device` is the device id alone (0x20b0); `mig_profiles` is empty where the card has no MIG.

    `brand` is the name of NVML's brand constant, `architecture` NVML's architecture number (7 is Ampere).
    `mig_slots` counts the memory slots that MIG placements are stated in.
    """

    model: str
    brand: str
    architecture: int
    compute_capability: str
    memory_mib: int
    pci_device: int
    power_limit_w: int
    mig_profiles: tuple[MigProfile, ...] = ()
    mig_slots: int = 0


@record
class GpuSpec:
    """One GPU of a node; its place in `NodeSpec.gpus` is its NVML index.

    `mig` is None where MIG mode is off, else the names of the MIG devices in the order in which they are created:
    "1g.5gb", with a start slot "3g.20gb@4", with fewer compute slices than the GPU instance "1c.3g.20gb".
    """

    card: Card
    uuid: str
    minor: int
    bus_id: str
    mig: tuple[str, ...] | None = None


@record
class NvmlBehaviour:
    """What NVML's initialisation does: the name of its answer (a key of `INIT_ANSWERS`), after `delay_s` seconds."""

    init: str = "ok"
    delay_s: float = 0.0


# What a failing initialisation may answer, with NVML's return codes. "ok" still fails where nodes cannot be opened.
INIT_ANSWERS = {
    "ok": 0,
    "no_permission": 4,
    "driver_not_loaded": 9,
    "timeout": 10,
    "gpu_is_lost": 15,
    "version_mismatch": 18,
    "memory": 20,
    "unknown": 999,
}


@record
class NodeSpec:
    """A whole node.

    `driver` is the kernel module's version, `libraries` that of the driver's files where it differs ("" when not).
    `cuda` is "12.4". `gds` and `rdma` count the nodes of GPUDirect Storage and of InfiniBand cards, `gdrcopy` says
    whether there is the node of GDRCopy. `majors` overrides numbers of /proc/devices. `missing` and `unreadable` are
    globs below the node's folder, `links` extra symbolic links: path below the folder to link text. `kind` is
    model.NATIVE or WSL.
    """

    name: str
    driver: str
    cuda: str
    gpus: tuple[GpuSpec, ...]
    libraries: str = ""
    open_module: bool = False
    fabric_manager: bool = False
    nvswitches: int = 0
    imex_channels: int = 0
    gds: int = 0
    rdma: int = 0
    gdrcopy: bool = False
    nvml: NvmlBehaviour = NvmlBehaviour()
    majors: dict[str, int] = {}
    missing: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    links: dict[str, str] = {}
    kind: str = NATIVE

    @property
    def library_version(self) -> str:
        return self.libraries or self.driver
