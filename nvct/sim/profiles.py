"""The nodes that ship with the simulation: cards, and machines made of them.

In a machine of three GPUs or more, index, minor and bus order are three different permutations, so whoever takes one
for another fails. Figures that no public source states are marked as estimates.
"""

from __future__ import annotations

import re
import uuid

from nvct.model import NATIVE, WSL
from nvct.record import record, replace
from nvct.sim.errors import SimError
from nvct.sim.spec import Card, GpuSpec, MigProfile, NodeSpec

# Newest CUDA of each driver branch, from the CUDA release notes.
_CUDA_OF_BRANCH = {
    450: "11.0",
    460: "11.2",
    470: "11.4",
    510: "11.6",
    515: "11.7",
    520: "11.8",
    525: "12.0",
    530: "12.1",
    535: "12.2",
    545: "12.3",
    550: "12.4",
    555: "12.5",
    560: "12.6",
    565: "12.7",
    570: "12.8",
    575: "12.9",
    580: "13.0",
    590: "13.1",
}

DRIVER_VERSION = re.compile(r"[0-9]{3}(\.[0-9]{1,9}){1,2}")
CUDA_VERSION = re.compile(r"[0-9]{1,9}\.[0-9]")

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "sim.nvct")


def _seven_slices(
    memory_mib: tuple[int, int, int, int],
    multiprocessors: tuple[int, int, int, int, int, int],
    copy: tuple[int, int, int, int, int],
    decoders: tuple[int, int, int, int, int, int],
    jpeg: tuple[int, int, int, int, int, int],
) -> tuple[MigProfile, ...]:
    """The seven profiles of the big chips, which all share ids and placements.

    `memory_mib` is of 1/8, 2/8, 4/8 and the whole; `multiprocessors` of 1g, double 1g, 2g, 3g, 4g, 7g; `copy` of 1g,
    2g, 3g, 4g, 7g; `decoders` and `jpeg` as `multiprocessors`. The fill order of 1g, 2g and 3g is the driver's; that of
    the double 1g follows the 2g by analogy.
    """
    eighth, quarter, half, whole = memory_mib
    one, double, two, three, four, seven = multiprocessors
    every = (0, 1, 2, 3, 4, 5, 6)
    last_first = (6, 4, 5, 0, 1, 2, 3)
    return (
        MigProfile(19, 0, 1, 7, 1, every, last_first, eighth, one, copy[0], decoders[0], 0, jpeg[0], 0),
        MigProfile(20, 7, 1, 1, 1, every, last_first, eighth, one, copy[0], 1, 0, 1, 1, "+me"),
        MigProfile(15, 9, 1, 4, 2, (0, 2, 4, 6), (4, 6, 0, 2), quarter, double, copy[0], decoders[1], 0, jpeg[1], 0),
        MigProfile(14, 1, 2, 3, 2, (0, 2, 4), (4, 0, 2), quarter, two, copy[1], decoders[2], 0, jpeg[2], 0),
        MigProfile(9, 2, 3, 2, 4, (0, 4), (4, 0), half, three, copy[2], decoders[3], 0, jpeg[3], 0),
        MigProfile(5, 3, 4, 1, 4, (0,), (0,), half, four, copy[3], decoders[4], 0, jpeg[4], 0),
        MigProfile(0, 4, 7, 1, 8, (0,), (0,), whole, seven, copy[4], decoders[5], 0, jpeg[5], 1),
    )


_HOPPER_ENGINES = (1, 1, 2, 3, 4, 7)

_A100_40 = _seven_slices(
    (4864, 9856, 19968, 40192), (14, 14, 28, 42, 56, 98), (1, 2, 3, 4, 7), (0, 1, 1, 2, 2, 5), (0, 0, 0, 0, 0, 1)
)
_H100_80 = _seven_slices(
    (9984, 20096, 40448, 81152), (16, 26, 32, 60, 64, 132), (1, 2, 3, 4, 8), _HOPPER_ENGINES, _HOPPER_ENGINES
)
_H200 = _seven_slices(
    (16384, 33024, 71168, 143360), (16, 26, 32, 60, 64, 132), (1, 2, 3, 4, 8), _HOPPER_ENGINES, _HOPPER_ENGINES
)
# Estimates for Blackwell: the multiprocessors of 3g, 4g (GB200) and 7g, the memory of 3g and 7g, the media engines.
_B200 = _seven_slices(
    (21504, 45312, 91136, 182272), (18, 30, 36, 70, 72, 148), (2, 4, 6, 8, 16), _HOPPER_ENGINES, _HOPPER_ENGINES
)
_GB200 = _seven_slices(
    (22528, 46592, 93696, 188416), (18, 32, 38, 72, 76, 152), (2, 4, 6, 8, 16), _HOPPER_ENGINES, _HOPPER_ENGINES
)
# The fill order of this four-slot card is by analogy: right half first.
_A30_1G = MigProfile(14, 0, 1, 4, 1, (0, 1, 2, 3), (2, 3, 0, 1), 5952, 14, 1, 0)
_A30_2G = MigProfile(5, 1, 2, 2, 2, (0, 2), (2, 0), 11968, 28, 2, 2)
_A30 = (
    _A30_1G,
    replace(_A30_1G, id=21, nvml_index=7, max_instances=1, decoders=1, jpeg=1, ofa=1, attribute="+me"),
    _A30_2G,
    replace(_A30_2G, id=6, nvml_index=8, max_instances=1, jpeg=1, ofa=1, attribute="+me"),
    MigProfile(0, 3, 4, 1, 4, (0,), (0,), 24000, 56, 4, 4, 0, 1, 1),
)

CARDS = {
    "a100-40": Card("NVIDIA A100-SXM4-40GB", "NVIDIA", 7, "8.0", 40536, 0x20B0, 400, _A100_40, 8),
    "a30": Card("NVIDIA A30", "NVIDIA", 7, "8.0", 24258, 0x20B7, 165, _A30, 4),
    "h100": Card("NVIDIA H100 80GB HBM3", "NVIDIA", 9, "9.0", 81559, 0x2330, 700, _H100_80, 8),
    "h200": Card("NVIDIA H200", "NVIDIA", 9, "9.0", 143771, 0x2335, 700, _H200, 8),
    "b200": Card("NVIDIA B200", "NVIDIA", 10, "10.0", 183359, 0x2901, 1000, _B200, 8),
    "gb200": Card("NVIDIA GB200", "NVIDIA", 10, "10.0", 189471, 0x2941, 1200, _GB200, 8),
    "l40s": Card("NVIDIA L40S", "NVIDIA", 8, "8.9", 46068, 0x26B9, 350),
    "t4": Card("Tesla T4", "TESLA", 6, "7.5", 15360, 0x1EB8, 70),
    "v100": Card("Tesla V100-SXM2-16GB", "TESLA", 5, "7.0", 16384, 0x1DB1, 300),
    "rtx4090": Card("NVIDIA GeForce RTX 4090", "GEFORCE", 8, "8.9", 24564, 0x2684, 450),
    "k80": Card("Tesla K80", "TESLA", 2, "3.7", 11441, 0x102D, 149),
}


@record
class Profile:
    """A machine. `buses` are where its slots are, in bus order; it has as many GPUs as slots unless asked otherwise."""

    title: str
    card: str
    driver: str
    buses: tuple[str, ...]
    open_module: bool = False
    fabric_manager: bool = False
    nvswitches: int = 0
    imex_channels: int = 0
    kind: str = NATIVE


_DGX_H = ("1B", "43", "52", "61", "9D", "C3", "D1", "DF")


def _slots(*buses: str) -> tuple[str, ...]:
    return tuple(f"00000000:{bus}:00.0" for bus in buses)


PROFILES = {
    "dgx-a100": Profile(
        "DGX A100, 8 x A100 40 GB, NVSwitch",
        "a100-40",
        "550.163.01",
        _slots("07", "0F", "47", "4E", "87", "90", "B7", "BD"),
        fabric_manager=True,
        nvswitches=6,
    ),
    "a30": Profile("server with 4 x A30", "a30", "535.183.06", _slots("17", "65", "CA", "E3")),
    "h100": Profile(
        "DGX H100, 8 x H100 80 GB, NVSwitch",
        "h100",
        "550.163.01",
        _slots(*_DGX_H),
        fabric_manager=True,
        nvswitches=4,
    ),
    "h200": Profile(
        "HGX H200, 8 x H200 141 GB, NVSwitch",
        "h200",
        "570.133.20",
        _slots(*_DGX_H),
        open_module=True,
        fabric_manager=True,
        nvswitches=4,
    ),
    # The NVSwitches of this generation are no PCI devices of the driver, but the fabric manager still runs.
    "b200": Profile(
        "DGX B200, 8 x B200 180 GB",
        "b200",
        "570.133.20",
        _slots(*_DGX_H),
        open_module=True,
        fabric_manager=True,
    ),
    "gb200": Profile(
        "GB200 NVL72 compute tray, 4 x GB200, a PCI domain each, IMEX channels",
        "gb200",
        "580.65.06",
        ("00000008:01:00.0", "00000009:01:00.0", "00000018:01:00.0", "00000019:01:00.0"),
        open_module=True,
        imex_channels=1,
    ),
    "l40s": Profile("server with 4 x L40S", "l40s", "550.163.01", _slots("01", "24", "41", "61")),
    "t4": Profile("cloud machine with one T4", "t4", "535.183.06", ("00000000:00:1E.0",)),
    "v100": Profile(
        "cloud machine with 4 x V100 16 GB",
        "v100",
        "535.183.06",
        ("00000000:00:1B.0", "00000000:00:1C.0", "00000000:00:1D.0", "00000000:00:1E.0"),
    ),
    "k80": Profile("p2.xlarge: one half of a K80, the last driver for it", "k80", "470.256.02", ("00000000:00:1E.0",)),
    "wsl2": Profile(
        "Windows machine with 2 x RTX 4090, seen from WSL 2",
        "rtx4090",
        "551.61",
        _slots("01", "02"),
        kind=WSL,
    ),
}


def cuda_of(driver: str) -> str:
    """The newest CUDA of a driver version, by its branch; that of the nearest older branch where it is not listed."""
    branch = int(driver.split(".")[0])
    return _CUDA_OF_BRANCH[max((known for known in _CUDA_OF_BRANCH if known <= branch), default=min(_CUDA_OF_BRANCH))]


def spec_from_profile(
    name: str,
    gpus: int | None = None,
    mig: dict[int, tuple[str, ...]] | None = None,
    driver: str | None = None,
    cuda: str | None = None,
) -> NodeSpec:
    """The node of a profile, with as many GPUs, MIG layouts by NVML index, driver and CUDA version as asked for.

    Raises SimError for a profile that does not exist, too many GPUs, an index without a GPU, or no version.
    """
    if driver and not DRIVER_VERSION.fullmatch(driver):
        raise SimError(f"driver version {driver!r} has not the form 550.163.01")
    if cuda and not CUDA_VERSION.fullmatch(cuda):
        raise SimError(f"CUDA version {cuda!r} has not the form 12.4")
    profile = PROFILES.get(name)
    if profile is None:
        raise SimError(f"no profile {name!r}; valid: {', '.join(PROFILES)}")
    count = len(profile.buses) if gpus is None else gpus
    if not 0 <= count <= len(profile.buses):
        raise SimError(f"{name} has slots for 0 to {len(profile.buses)} GPUs, not {count}")
    layouts = mig or {}
    absent = [index for index in layouts if not 0 <= index < count]
    if absent:
        raise SimError(f"MIG layout for GPU {absent[0]}, but {name} has {count} GPUs here, numbered from 0")
    return NodeSpec(
        name=name,
        driver=driver or profile.driver,
        cuda=cuda or cuda_of(driver or profile.driver),
        gpus=tuple(_gpu(name, profile, index, count, layouts.get(index)) for index in range(count)),
        open_module=profile.open_module,
        fabric_manager=profile.fabric_manager,
        nvswitches=profile.nvswitches,
        imex_channels=profile.imex_channels,
        kind=profile.kind,
    )


def _gpu(name: str, profile: Profile, index: int, count: int, mig: tuple[str, ...] | None) -> GpuSpec:
    # Rotations by one and by two: for three GPUs and more no two of index, minor and bus rank agree anywhere.
    minor = (index + 1) % count
    bus_rank = (index + 2) % count
    return GpuSpec(CARDS[profile.card], gpu_uuid(name, index), minor, profile.buses[bus_rank], mig)


def gpu_uuid(node: str, index: int) -> str:
    """The same for the same node and index on every machine and every day."""
    return f"GPU-{uuid.uuid5(_NAMESPACE, f'{node}/{index}')}"
