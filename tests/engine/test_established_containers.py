"""Real containers on the node where the established hook was measured: same exit status, devices, libraries, rules.

tests/unit/data/established.json holds the measurements, one row each. Where nvct does otherwise, a table below says so,
with the reason.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nvct.node.cache import cache_path
from nvct.node.procfs import read_majors
from nvct.record import record
from nvct.sim import bundle as bundles
from nvct.sim import mig
from nvct.sim.nodefile import spec_from_yaml
from tests.support.runc import BY_HOOK, Hook, RuncContainer, StartFailed, kernel_hook, nvct_runtime

TREE = Path(__file__).resolve().parent.parent.parent
ROWS: list[dict[str, Any]] = json.loads((TREE / "tests/unit/data/established.json").read_text())["rows"]
BY_ID = {row["id"]: row for row in ROWS}
VERSION = "550.163.01"
PARTS = ("devices", "libs", "bins", "proc", "other", "device_cgroup", "symlinks")

# The majors of the measured node; a simulated one takes those that are free.
MAJORS = {"nvidia-uvm": 234, "nvidia-caps": 237}

BUSES = ("07", "0f", "47", "4e", "87", "90", "b7", "bd")
MIG = {0: 7, 1: 2}
NODE: dict[str, Any] = {
    "driver": VERSION,
    "cuda": "12.4",
    "gpus": [
        {
            "card": "a100-40",
            "uuid": f"GPU-12345678-1234-1234-1234-12345678000{n}",
            "minor": n,
            "bus_id": f"0000:{bus}:00.0",
            **({"mig": [f"1g.5gb@{start}" for start in range(MIG[n])]} if n in MIG else {}),
        }
        for n, bus in enumerate(BUSES)
    ],
}

# What the measured node had of a driver; a simulated one has more.
LIBRARIES = """libnvidia-ml libnvidia-cfg libcuda libcudadebugger libnvidia-opencl libnvidia-ptxjitcompiler
    libnvidia-allocator libnvidia-nvvm libvdpau_nvidia libnvidia-encode libnvidia-opticalflow libnvcuvid
    libnvidia-eglcore libnvidia-glcore libnvidia-tls libnvidia-glsi libnvidia-fbc libnvidia-rtcore libnvoptix
    libGLX_nvidia libEGL_nvidia libGLESv2_nvidia libGLESv1_CM_nvidia libnvidia-glvkspirv libnvidia-ngx""".split()  # noqa: SIM905  # twenty-five lines otherwise
LIBRARIES_32 = ("libnvidia-ml", "libcuda", "libnvidia-opencl", "libnvidia-ptxjitcompiler", "libnvidia-allocator")
BINARIES = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
)
KEPT_FOLDERS = ("usr/lib/firmware", "usr/lib/x86_64-linux-gnu", "usr/lib/i386-linux-gnu", "usr/bin")

REFUSED = "refused"


@record
class Otherwise:
    """What nvct does in place of what a row says.

    `outcome`: REFUSED, the id of a row that it is like, or "" for this row; without what begins with one of `less`, and
    with `more`.
    """

    outcome: str
    why: str
    less: tuple[str, ...] = ()
    more: dict[str, tuple[str, ...]] = {}


# GBM loads libnvidia-allocator by this name, and nothing shows a picture without GBM.
GBM = Otherwise(
    "",
    "programs that draw through GBM need libnvidia-allocator, under the name that GBM looks for",
    more={
        "libs": (f"/usr/lib64/libnvidia-allocator.so.{VERSION}",),
        "symlinks": ("/usr/lib64/gbm/nvidia-drm_gbm.so", "/usr/lib64/libnvidia-allocator.so.1"),
    },
)

MIG_CONFIG_WHY = (
    "one node gives leave to change MIG devices, and those that exist have theirs; the established hook adds the nodes "
    "of every MIG device that the GPUs could ever have"
)
CAPABILITIES = "/proc/driver/nvidia/capabilities"


def mig_config(minors: tuple[int, ...], access: tuple[str, ...]) -> Otherwise:
    """A row in which the established hook gives the whole folder of capability nodes."""
    return Otherwise(
        "",
        MIG_CONFIG_WHY,
        less=("/dev/nvidia-caps", CAPABILITIES, "c 237:"),
        more={
            "devices": tuple(f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in (1, *minors)),
            "device_cgroup": tuple(f"c 237:{minor} rw" for minor in (1, *minors)),
            "proc": tuple(f"{CAPABILITIES}/{name}" for name in ("mig/config", *access)),
        },
    )


# The minor of gi0 is 3 + 135 x GPU, each GPU instance has 9, and its first compute instance the next one.
EVERY_MIG = [(gpu, 7 + n) for gpu, count in MIG.items() for n in range(count)]
EVERY_MINOR = tuple(3 + 135 * gpu + 9 * gi + part for gpu, gi in EVERY_MIG for part in (0, 1))
EVERY_ACCESS = tuple(f"gpu{gpu}/mig/gi{gi}/{part}access" for gpu, gi in EVERY_MIG for part in ("", "ci0/"))

# Where nvct is better on purpose.
BETTER = {
    "CAPS='graphics'": GBM,
    "CAPS='display'": GBM,
    "MIG_CONFIG=all, privileged, VISIBLE=2": mig_config((), ()),
    "MIG_CONFIG=all, privileged, VISIBLE=all": mig_config(EVERY_MINOR, EVERY_ACCESS),
    "VISIBLE='0000:07:00.1'": Otherwise(REFUSED, "function 1 of a GPU's PCI device is its audio device, not the GPU"),
    "0 GPUs, VISIBLE=foo": Otherwise(REFUSED, "a token that means nothing is refused on every node, also with 0 GPUs"),
    "VISIBLE='07:00.0'": Otherwise("VISIBLE='0000:07:00.0'", "without its domain the address fits one GPU only"),
    "VISIBLE='MIG-GPU-12345678-1234-1234-1234-123456780000/7/0'": Otherwise(
        "VISIBLE='0:0'", "the form that drivers before 470 give is one name of that MIG device"
    ),
    "VISIBLE='nvidia.com/gpu=0'": Otherwise("VISIBLE='0000:07:00.0'", "the CDI name of GPU 0 means GPU 0"),
    "container procfs has no /proc/driver/nvidia": Otherwise(
        "VISIBLE='0000:07:00.0'",
        "where the container's procfs shows no driver, there is nothing to cover, and CUDA works",
        less=("/proc/driver/nvidia",),
    ),
    **dict.fromkeys(
        ("rootfs has /usr/local/cuda/compat (libcuda 999)", "rootfs has compat libcuda 535 (older)"),
        Otherwise(
            "VISIBLE='0000:07:00.0'",
            "nothing is mounted from the container: its loader cache names the image's own library, where that fits",
        ),
    ),
    "no /proc/driver/nvidia on host, VISIBLE=0": Otherwise(REFUSED, "a failed start leaves nothing behind"),
    "no /proc/driver/nvidia on host, VISIBLE=MIG": Otherwise(REFUSED, "a failed start leaves nothing behind"),
}

# Rows that speak of another program's parts.
OTHER_PROGRAM = {
    "unpatched cli 1.12.1 with toolkit-1.20 hook": Otherwise(
        "VISIBLE='0000:07:00.0'", "nvct's hook calls no second program whose options could be too old"
    ),
}

# Paths that differ in every row: libvdpau looks for its drivers in its own subfolder only.
MOVED = {
    "/usr/lib64/libvdpau_nvidia.so.1": "/usr/lib64/vdpau/libvdpau_nvidia.so.1",
    f"/usr/lib64/libvdpau_nvidia.so.{VERSION}": f"/usr/lib64/vdpau/libvdpau_nvidia.so.{VERSION}",
}
# nvct writes the application profile as a file of the container, where the established hook mounts a tmpfs for it.
WRITTEN = {"/etc/nvidia/nvidia-application-profiles-rc.d"}

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="containers with device nodes need root"),
    pytest.mark.skipif(
        not Path("/sys/fs/cgroup/devices/devices.allow").exists(), reason="the rules are read from a cgroup v1"
    ),
]


class Node:
    """A simulated node from a node file, pruned to what the measured one had."""

    def __init__(self, folder: Path, changes: dict[str, Any]) -> None:
        folder.mkdir()
        file = folder / "measured.yaml"
        file.write_text(yaml.safe_dump({**NODE, **changes}))
        self.spec = spec_from_yaml(file)
        self.place = folder / "node"
        command = [str(TREE / ".venv/bin/python"), str(TREE / "nvct/__main__.py"), "sim", "create"]
        done = subprocess.run([*command, "--from", str(file), str(self.place)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        prune(self.place)
        self.config = f"{self.place}/config.yaml"
        self.majors = read_majors(f"{self.place}/proc")

    def forget(self) -> None:
        Path(cache_path(self.config)).unlink(missing_ok=True)


def prune(place: Path) -> None:
    """Its two development links were those that the hook makes itself, so none is left here."""
    for folder, kept in (("usr/lib/x86_64-linux-gnu", LIBRARIES), ("usr/lib/i386-linux-gnu", LIBRARIES_32)):
        for path in sorted((place / folder).rglob("*.so*")):
            development = path.name.endswith(".so")
            if development or path.name.split(".so")[0] not in kept:
                path.unlink()
    for path in sorted((place / "usr/bin").glob("nv*")):
        if path.name not in BINARIES:
            path.unlink()
    for path in [*(place / "run").glob("nvidia-*"), place / "usr/share", place / "etc/vulkan", place / "etc/OpenCL"]:
        if path.exists():
            subprocess.run(["rm", "-r", str(path)], check=True)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Nodes by how they differ from the measured one; each is made once."""
    folder = tmp_path_factory.mktemp("established")
    made: dict[str, Node] = {}

    def node(changes: dict[str, Any]) -> Node:
        key = json.dumps(changes)
        if key not in made:
            made[key] = Node(folder / str(len(made)), changes)
        return made[key]

    yield node
    for each in made.values():
        each.forget()


def changes_of(row: dict[str, Any]) -> dict[str, Any]:
    """How the node of a row differs from the measured one."""
    host = row.get("host", {})
    if "nvml_init_returns" in host:
        return {"nvml": {"init": "driver_not_loaded"}}
    if "nvml_gpu_count" in host:
        return {"gpus": []}
    return {"missing": ["proc/driver/nvidia"]} if row["mode"] == "noproc" else {}


def env_of(row: dict[str, Any], node: Node) -> dict[str, str]:
    """The variables of a row, with the UUIDs that the MIG devices have on the simulated node."""

    def uuid(match: re.Match[str]) -> str:
        instances = mig.layout(node.spec.gpus[int(match[1])])
        return instances[int(match[2])].compute[0].uuid

    pattern = re.compile(r"MIG-aaaaaaaa-0000-5000-8000-000000000([0-9])0([0-9])")
    return {name: pattern.sub(uuid, value) for name, value in row["env"].items()}


def make_bundle(folder: Path, row: dict[str, Any], node: Node, carrier: str = BY_HOOK) -> Path:
    bundle = folder / "bundle"
    rootfs = bundle / "rootfs"
    bundles.make_rootfs(rootfs, "busybox")
    for name in ("usr/lib64", "usr/lib32"):
        (rootfs / name).mkdir()
    compat = re.match(r"rootfs has .*compat.*libcuda (\d+)", row["id"])
    if compat:
        place = rootfs / "usr/local/cuda/compat"
        place.mkdir(parents=True)
        (place / f"libcuda.so.{compat[1]}.1").write_bytes(b"\x7fELF of another version")
        (place / "libcuda.so.1").symlink_to(f"libcuda.so.{compat[1]}.1")
    spec = bundles.config(["/usr/bin/sleep", "600"], env_of(row, node), {"prestart": hooks_for(row, node, carrier)})
    spec["root"]["path"] = str(rootfs)  # type: ignore[index]
    if row["privileged"]:
        for names in spec["process"]["capabilities"].values():  # type: ignore[index]
            names.append("CAP_SYS_ADMIN")
    bundles.write_config(bundle, spec)
    return bundle


def hooks_for(row: dict[str, Any], node: Node, carrier: str) -> list[Hook]:
    """Those before the program: what plays the kernel, in all rows but one, and nvct's own where it is the carrier."""
    without_kernel = row["id"] == "container procfs has no /proc/driver/nvidia"
    hook = str(TREE / "hooks/nvidia-container-runtime-hook")
    own: list[Hook] = [{"path": hook, "args": [hook, "-config", node.config, "prestart"]}]
    return [*([] if without_kernel else [kernel_hook(node.place)]), *(own if carrier == BY_HOOK else [])]


def seen(container: RuncContainer, node: Node) -> dict[str, list[str]]:
    """What is in the container, in the words of the measurements."""
    points = list(container.mounts())
    root = container.root
    nodes = [*(root / "dev").glob("nvidia*"), *(root / "dev/nvidia-caps").glob("*")]
    folders = (root / "usr/lib64", root / "usr/lib32")
    names = {number: name for name, number in node.majors.items()}
    return {
        "devices": sorted(str(path).removeprefix(str(root)) for path in nodes if path.is_char_device()),
        "libs": sorted(point for point in points if ".so." in point),
        "bins": sorted(point for point in points if point.startswith("/usr/bin/")),
        "proc": sorted(point for point in points if point.startswith("/proc/driver/nvidia")),
        "other": sorted(point.removeprefix("/usr") for point in points if "/firmware/" in point),
        "device_cgroup": sorted(rule for rule in (translated(rule, names) for rule in container.devices_v1()) if rule),
        "symlinks": sorted(
            str(path).removeprefix(str(root)) for folder in folders for path in folder.rglob("*") if path.is_symlink()
        ),
    }


def translated(rule: str, names: dict[int, str]) -> str:
    """A rule about a device of the driver, with the major that it had on the measured node; "" for another's."""
    kind, numbers, access = rule.split()
    major = numbers.partition(":")[0]
    if kind != "c" or not major.isdigit() or int(major) not in names:
        return ""
    return f"c {MAJORS.get(names[int(major)], int(major))}:{numbers.partition(':')[2]} {access}"


def expected(row: dict[str, Any], otherwise: Otherwise) -> dict[str, list[str]]:
    wanted = {}
    for name in PARTS:
        kept = [MOVED.get(item, item) for item in row[name] if item not in WRITTEN]
        kept = [item for item in kept if not item.startswith(otherwise.less or " ")]
        wanted[name] = sorted([*kept, *otherwise.more.get(name, ())])
    return wanted


def tree(folder: Path) -> list[str]:
    return sorted(f"{path} {path.lstat().st_mode} {path.lstat().st_mtime_ns}" for path in folder.rglob("*"))


CONTAINERS = [row for row in ROWS if row["id"] not in ("pid gone", "bundle without config.json")]


@pytest.mark.parametrize("row", CONTAINERS, ids=[row["id"] for row in CONTAINERS])
def test_the_container_gets_what_the_established_hook_gives(
    row: dict[str, Any], nodes: Any, carrier: str, tmp_path: Path
) -> None:
    node = nodes(changes_of(row))
    bundle = make_bundle(tmp_path, row, node, carrier)
    runtime = ["runc"] if carrier == BY_HOOK else nvct_runtime(node.place)
    otherwise = {**BETTER, **OTHER_PROGRAM}.get(row["id"], Otherwise("", ""))
    before = tree(bundle / "rootfs")
    like = BY_ID.get(otherwise.outcome, row)
    if otherwise.outcome == REFUSED or like["exit_code"]:
        with pytest.raises(StartFailed, match="nvct: "):
            RuncContainer(bundle, runtime=runtime).delete()
        assert tree(bundle / "rootfs") == before
        return
    container = RuncContainer(bundle, runtime=runtime)
    try:
        found, wanted = seen(container, node), expected(like, otherwise)
    finally:
        container.delete()
    if row["id"] == "CAPS='all'":
        # The measurement of links ended after twelve of them, which only this row exceeds.
        assert set(wanted.pop("symlinks")) <= set(found.pop("symlinks"))
    assert found == wanted


@pytest.mark.parametrize(
    ("row", "config_json", "pid"),
    [(BY_ID["pid gone"], True, 999_999), (BY_ID["bundle without config.json"], False, os.getpid())],
    ids=["pid gone", "bundle without config.json"],
)
def test_a_state_that_is_wrong_is_refused(
    row: dict[str, Any], config_json: bool, pid: int, nodes: Any, tmp_path: Path
) -> None:
    node = nodes({})
    bundle = make_bundle(tmp_path, row, node)
    if not config_json:
        (bundle / "config.json").unlink()
    state = json.dumps({"ociVersion": "1.0.2", "id": "x", "pid": pid, "bundle": str(bundle), "status": "created"})
    command = [str(TREE / "hooks/nvidia-container-runtime-hook"), "-config", node.config, "prestart"]
    done = subprocess.run(command, input=state, capture_output=True, text=True)
    assert done.returncode == row["exit_code"] == 1
    assert done.stderr.startswith("nvct: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("table", [BETTER, OTHER_PROGRAM])
def test_every_deviation_is_about_a_measured_row(table: dict[str, Otherwise]) -> None:
    assert set(table) <= set(BY_ID)
    assert {otherwise.outcome for otherwise in table.values()} <= {"", REFUSED, *BY_ID}
    assert all(otherwise.why for otherwise in table.values())


def test_no_row_is_left_out() -> None:
    assert len(ROWS) == len(BY_ID) == 80
