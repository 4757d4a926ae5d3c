"""The simulated driver's memory of its node, proc/driver/nvct-sim: written here, read by the C library (c/state.c).

A folder of text files. A line is a key, a blank and a value to the end of the line; a reader skips keys that it does
not know, so what comes later adds lines and takes none away. A key may stand on several lines.

`node`, what never changes while the node is up::

    format 1                       raised when a reader of the old format would misread the new one
    driver 550.163.01              the kernel module's version
    cuda 12040                     1000 x major + 10 x minor
    access nodes                   device nodes prove access; `table`: there are none, access is assumed
    major.nvidia 195               the majors that the nodes must have, also major.nvidia-caps
    dxg 508 0                      instead of these: the numbers of /dev/dxg, where that is every GPU's only node (WSL)
    nvml.init 0                    the answer of NVML's initialisation, after nvml.delay_ms
    gpus 8                         there are files gpu.0 to gpu.7, by NVML index

`gpu.<index>`, one GPU; whoever changes its state rewrites this file as a whole and renames it into place::

    uuid, minor, bus_id, pci_device, pci_subsystem, name, brand, architecture, compute_capability, serial
    memory.{total,reserved,used}_mib, utilization.{gpu,memory} (per cent), temperature.gpu (degrees Celsius),
    power.{usage,limit}_mw, clock.{sm,memory}_mhz, ecc.{current,pending} (0 or 1)
    mig.current, mig.pending       0 or 1; the lines are absent where the card has no MIG; mig.slots: memory slots
    mig.profile ID INDEX SLICES MOST SIZE MIB SMS COPY DECODERS ENCODERS JPEG OFA NAME START[,START...]
    mig.gi GI PROFILE START MINOR
    mig.ci GI CI SLICES START MINOR UUID

Reserved there for what the simulation does not do yet: `process PID GI CI MIB KIND` (GI and CI are - outside MIG),
`event SERIAL KIND VALUE` (XIDs and others, in the order of SERIAL), `nvlink LINK PEER-BUS-ID STATE`, `numa_node N`,
`ecc.volatile.*` and `ecc.aggregate.*` counters, `clock.limit.*`, `persistence`.
"""

from __future__ import annotations

from collections.abc import Iterable

from nvct.model import WSL
from nvct.sim import mig
from nvct.sim.folder import Folder
from nvct.sim.proc_files import gpu_major
from nvct.sim.spec import INIT_ANSWERS, GpuSpec, NodeSpec

PLACE = "proc/driver/nvct-sim"
FORMAT = 1

# NVML's brand constants that the cards have.
BRANDS = {"UNKNOWN": 0, "QUADRO": 1, "TESLA": 2, "GEFORCE": 5, "TITAN": 6, "NVIDIA_RTX": 13, "NVIDIA": 14}


def write_state(folder: Folder, spec: NodeSpec, majors: dict[str, int], nodes: bool) -> None:
    """`nodes`: the node has real device nodes."""
    major, minor = (int(part) for part in spec.cuda.split("."))
    node = {
        "format": FORMAT,
        "driver": spec.driver,
        "cuda": 1000 * major + 10 * minor,
        "access": "nodes" if nodes else "table",
        **_majors(spec, majors),
        "nvml.init": INIT_ANSWERS[spec.nvml.init],
        "nvml.delay_ms": round(spec.nvml.delay_s * 1000),
        "gpus": len(spec.gpus),
    }
    folder.file(f"{PLACE}/node", _lines(node.items()))
    for index, gpu in enumerate(spec.gpus):
        folder.file(f"{PLACE}/gpu.{index}", _lines([*_figures(gpu, index), *_mig(gpu)]))


def _majors(spec: NodeSpec, majors: dict[str, int]) -> dict[str, object]:
    if spec.kind == WSL:
        return {"dxg": f"{majors['dxg']} 0"}
    return {"major.nvidia": gpu_major(majors), "major.nvidia-caps": majors["nvidia-caps"]}


def _lines(pairs: Iterable[tuple[str, object]]) -> str:
    return "".join(f"{key} {value}\n" for key, value in pairs)


def _figures(gpu: GpuSpec, index: int) -> list[tuple[str, object]]:
    card = gpu.card
    return [
        ("uuid", gpu.uuid),
        ("minor", gpu.minor),
        ("bus_id", gpu.bus_id),
        ("pci_device", f"0x{card.pci_device:04x}10de"),
        ("pci_subsystem", "0x145010de"),
        ("name", card.model),
        ("brand", BRANDS[card.brand]),
        ("architecture", card.architecture),
        ("compute_capability", card.compute_capability),
        ("serial", 1565020000000 + index),
        ("memory.total_mib", card.memory_mib),
        ("memory.reserved_mib", 0),
        ("memory.used_mib", 0),
        ("utilization.gpu", 0),
        ("utilization.memory", 0),
        ("temperature.gpu", 31 + index),
        ("power.usage_mw", card.power_limit_w * 130),
        ("power.limit_mw", card.power_limit_w * 1000),
        ("clock.sm_mhz", 210),
        ("clock.memory_mhz", 1215),
        ("ecc.current", 1),
        ("ecc.pending", 1),
    ]


def _mig(gpu: GpuSpec) -> list[tuple[str, object]]:
    if not gpu.card.mig_profiles:
        return []
    mode = 0 if gpu.mig is None else 1
    lines: list[tuple[str, object]] = [("mig.current", mode), ("mig.pending", mode), ("mig.slots", gpu.card.mig_slots)]
    for p in gpu.card.mig_profiles:
        starts = ",".join(str(start) for start in p.starts)
        head = f"{p.id} {p.nvml_index} {p.slices} {p.max_instances} {p.size} {p.memory_mib} {p.multiprocessors}"
        engines = f"{p.copy_engines} {p.decoders} {p.encoders} {p.jpeg} {p.ofa}"
        lines.append(("mig.profile", f"{head} {engines} {mig.profile_name(gpu.card, p)} {starts}"))
    for instance in mig.layout(gpu):
        lines.append(("mig.gi", f"{instance.id} {instance.profile.id} {instance.start} {instance.minor}"))
        for one in instance.compute:
            lines.append(("mig.ci", f"{instance.id} {one.id} {one.slices} {one.start} {one.minor} {one.uuid}"))
    return lines
