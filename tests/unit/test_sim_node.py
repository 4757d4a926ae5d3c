"""Simulated nodes, as the real pynvml, the loader and nvidia-smi see them. One process per node: NVML is global."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

from nvct import ldcache
from nvct.model import NATIVE
from nvct.record import replace
from nvct.sim import driver_files, mig
from nvct.sim.errors import SimError
from nvct.sim.node import Made, create, refuse_real_driver, spec_from_profile, spec_from_yaml
from nvct.sim.profiles import PROFILES
from nvct.sim.spec import GpuSpec, NodeSpec

LIBRARIES = driver_files.library_folder()
DEMO = spec_from_profile(
    "dgx-a100", mig={0: ("1g.5gb",) * 7, 1: ("3g.20gb", "2g.10gb", "1g.5gb"), 2: ("1c.3g.20gb", "2c.3g.20gb")}
)
TREE = Path(__file__).resolve().parents[2]

_READ_NVML = """
import json, sys
from pynvml import *
nvmlInit()
def mig(device):
    parent = nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
    attributes = nvmlDeviceGetAttributes(device)
    return {"uuid": nvmlDeviceGetUUID(device), "name": nvmlDeviceGetName(device), "parent": nvmlDeviceGetUUID(parent),
            "gi": nvmlDeviceGetGpuInstanceId(device), "ci": nvmlDeviceGetComputeInstanceId(device),
            "total": nvmlDeviceGetMemoryInfo(device).total, "mib": attributes.memorySizeMB,
            "slices": [attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount],
            "is_mig": nvmlDeviceIsMigDeviceHandle(device).value,
            "found": nvmlDeviceGetIndex(nvmlDeviceGetHandleByUUID(nvmlDeviceGetUUID(device)))}
def migs(device):
    for index in range(nvmlDeviceGetMaxMigDeviceCount(device)):
        try:
            yield mig(nvmlDeviceGetMigDeviceHandleByIndex(device, index))
        except NVMLError_NotFound:
            return
def mode(device):
    try:
        return nvmlDeviceGetMigMode(device)
    except NVMLError_NotSupported:
        return None
def gpu(device):
    pci = nvmlDeviceGetPciInfo(device)
    assert nvmlDeviceGetUUID(nvmlDeviceGetHandleByPciBusId(pci.busIdLegacy)) == nvmlDeviceGetUUID(device)
    return {"uuid": nvmlDeviceGetUUID(device), "minor": nvmlDeviceGetMinorNumber(device), "bus_id": pci.busId,
            "pci": pci.pciDeviceId, "model": nvmlDeviceGetName(device), "brand": nvmlDeviceGetBrand(device),
            "cc": list(nvmlDeviceGetCudaComputeCapability(device)),
            "total": nvmlDeviceGetMemoryInfo(device, nvmlMemory_v2).total,
            "architecture": nvmlDeviceGetArchitecture(device), "mode": mode(device), "mig": list(migs(device))}
print(json.dumps({"driver": nvmlSystemGetDriverVersion(), "cuda": nvmlSystemGetCudaDriverVersion(),
                  "gpus": [gpu(nvmlDeviceGetHandleByIndex(i)) for i in range(nvmlDeviceGetCount())]}))
"""

_READ_INSTANCES = """
import json
from ctypes import byref, c_uint
from pynvml import *
nvmlInit()
device = nvmlDeviceGetHandleByIndex(2)
def placements(profile):
    count = c_uint()
    nvmlDeviceGetGpuInstancePossiblePlacements(device, profile, None, byref(count))
    spans = (c_nvmlGpuInstancePlacement_t * count.value)()
    nvmlDeviceGetGpuInstancePossiblePlacements(device, profile, spans, byref(count))
    return [[span.start, span.size] for span in spans]
def profiles():
    for index in range(NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = nvmlDeviceGetGpuInstanceProfileInfo(device, index)
        except NVMLError_NotSupported:
            continue
        older = nvmlDeviceGetGpuInstanceProfileInfo(device, index, version=1)
        assert (older.id, older.memorySizeMB) == (info.id, info.memorySizeMB)
        yield [info.name, info.id, info.sliceCount, info.instanceCount, info.memorySizeMB, placements(info.id),
               nvmlDeviceGetGpuInstanceRemainingCapacity(device, info.id)]
def instances(profile):
    count, found = c_uint(), (c_nvmlGpuInstance_t * 7)()
    nvmlDeviceGetGpuInstances(device, profile, found, byref(count))
    return found[:count.value]
def compute(instance, profile):
    count, found = c_uint(), (c_nvmlComputeInstance_t * 7)()
    nvmlGpuInstanceGetComputeInstances(instance, profile, found, byref(count))
    infos = [nvmlComputeInstanceGetInfo(one) for one in found[:count.value]]
    return [[info.id, info.profileId, info.placement.start, info.placement.size] for info in infos]
(instance,) = instances(9)
info = nvmlGpuInstanceGetInfo(instance)
print(json.dumps({"profiles": list(profiles()), "instance": [info.id, info.placement.start, info.placement.size],
                  "compute": compute(instance, 0) + compute(instance, 1),
                  "name": nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, 1, 0).name}))
"""


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One compiler cache for the run, and none of it in the user's home."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session", autouse=True)
def machine_without_a_driver() -> None:
    try:
        refuse_real_driver()
    except SimError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A node that tests only read."""
    return create(DEMO, tmp_path_factory.mktemp("demo") / "node")


def needs_nodes(made: Made) -> None:
    if made.why_table:
        pytest.skip(f"no real device nodes here: {made.why_table}")


def run(made: Made, *command: str, user: int | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"LD_LIBRARY_PATH": f"{made.directory}/{LIBRARIES}", "PATH": os.environ["PATH"]}
    return subprocess.run(command, env=environment, user=user, capture_output=True, text=True, timeout=60, check=False)


def smi(made: Made, *options: str, user: int | None = None) -> subprocess.CompletedProcess[str]:
    return run(made, f"{made.directory}/usr/bin/nvidia-smi", *options, user=user)


def python(made: Made, program: str) -> Any:
    done = run(made, sys.executable, "-I", "-c", program)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def listed(made: Made, user: int | None = None) -> list[str]:
    """The first UUID on each line of nvidia-smi -L."""
    done = smi(made, "-L", user=user)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.rsplit("UUID: ", 1)[1].rstrip(")") for line in done.stdout.splitlines()]


def uuids(gpu: GpuSpec) -> list[str]:
    return [gpu.uuid, *(c.uuid for instance in mig.layout(gpu) for c in instance.compute)]


# ---- NVML ----


def nvml_of(spec: NodeSpec) -> dict[str, Any]:
    """What pynvml must read from a node."""
    major, minor = spec.cuda.split(".")
    return {
        "driver": spec.driver,
        "cuda": int(major) * 1000 + int(minor) * 10,
        "gpus": [nvml_of_gpu(gpu) for gpu in spec.gpus],
    }


def nvml_of_gpu(gpu: GpuSpec) -> dict[str, Any]:
    card = gpu.card
    mode = int(gpu.mig is not None)
    return {
        "uuid": gpu.uuid,
        "minor": gpu.minor,
        "bus_id": gpu.bus_id,
        "pci": card.pci_device << 16 | 0x10DE,
        "model": card.model,
        "brand": {"NVIDIA": 14, "TESLA": 2}[card.brand],
        "cc": [int(part) for part in card.compute_capability.split(".")],
        "total": card.memory_mib << 20,
        "architecture": card.architecture,
        "mode": [mode, mode] if card.mig_profiles else None,
        "mig": [
            {
                "uuid": compute.uuid,
                "name": f"{card.model} MIG "
                + ("" if compute.slices == instance.profile.slices else f"{compute.slices}c.")
                + mig.profile_name(card, instance.profile),
                "parent": gpu.uuid,
                "gi": instance.id,
                "ci": compute.id,
                "total": instance.profile.memory_mib << 20,
                "mib": instance.profile.memory_mib,
                "slices": [instance.profile.slices, compute.slices],
                "is_mig": 1,
                "found": index,
            }
            for index, (instance, compute) in enumerate((i, c) for i in mig.layout(gpu) for c in i.compute)
        ],
    }


@pytest.mark.parametrize("name", [name for name in PROFILES if PROFILES[name].kind == NATIVE])
def test_pynvml_reads_every_profile(tmp_path: Path, name: str) -> None:
    plain = spec_from_profile(name)
    profiles = plain.gpus[0].card.mig_profiles
    smallest = mig.profile_name(plain.gpus[0].card, profiles[0]) if profiles else ""
    spec = spec_from_profile(name, mig={0: (smallest,) * profiles[0].max_instances} if profiles else {})
    made = create(spec, tmp_path / "node")
    assert python(made, _READ_NVML) == nvml_of(spec)


def test_pynvml_reads_mig_layouts(demo: Made) -> None:
    read = python(demo, _READ_NVML)
    assert read == nvml_of(DEMO)
    assert [len(gpu["mig"]) for gpu in read["gpus"]] == [7, 3, 2, 0, 0, 0, 0, 0]


def test_pynvml_reads_instances_and_profiles(demo: Made) -> None:
    read = python(demo, _READ_INSTANCES)
    assert read["instance"] == [2, 4, 4]
    assert sorted(read["compute"]) == [[0, 0, 0, 1], [1, 1, 1, 2]]
    assert read["name"] == "MIG 2c.3g.20gb"
    every = [[start, 1] for start in range(7)]
    assert read["profiles"] == [
        ["MIG 1g.5gb", 19, 1, 7, 4864, every, 4],
        ["MIG 2g.10gb", 14, 2, 3, 9856, [[0, 2], [2, 2], [4, 2]], 2],
        ["MIG 3g.20gb", 9, 3, 2, 19968, [[0, 4], [4, 4]], 1],
        ["MIG 4g.20gb", 5, 4, 1, 19968, [[0, 4]], 1],
        ["MIG 7g.40gb", 0, 7, 1, 40192, [[0, 8]], 0],
        ["MIG 1g.5gb+me", 20, 1, 1, 4864, every, 1],
        ["MIG 1g.10gb", 15, 1, 4, 9856, [[0, 2], [2, 2], [4, 2], [6, 2]], 2],
    ]


ANSWERS = {
    "no_permission": (4, "Failed to initialize NVML: Insufficient Permissions"),
    "driver_not_loaded": (9, "couldn't communicate with the NVIDIA driver"),
    "timeout": (10, "Failed to initialize NVML: Timeout"),
    "gpu_is_lost": (15, "Failed to initialize NVML: GPU is lost"),
    "version_mismatch": (18, "Failed to initialize NVML: Driver/library version mismatch"),
    "memory": (20, "Failed to initialize NVML: Insufficient Memory"),
    "unknown": (255, "Failed to initialize NVML: Unknown Error"),
}


def from_yaml(folder: Path, text: str) -> Made:
    folder.mkdir(exist_ok=True)
    (folder / "node.yaml").write_text(text)
    return create(spec_from_yaml(folder / "node.yaml"), folder / "node")


def test_nvml_fails_in_each_stated_way(tmp_path: Path) -> None:
    for answer, (code, text) in ANSWERS.items():
        done = smi(from_yaml(tmp_path, f"profile: t4\nnvml: {{init: {answer}}}"), "-L")
        assert (answer, done.returncode) == (answer, code)
        assert text in done.stdout


def test_nvml_is_as_slow_as_stated(tmp_path: Path) -> None:
    made = from_yaml(tmp_path, "profile: t4\nnvml: {delay_s: 0.7}")
    begin = time.monotonic()
    assert len(listed(made)) == 1
    assert time.monotonic() - begin >= 0.7


def test_libraries_of_another_version_do_not_match_the_module(tmp_path: Path) -> None:
    made = from_yaml(tmp_path, "profile: t4\ndriver: 535.183.06\nlibraries: 535.54.03")
    done = smi(made)
    assert (done.returncode, "version mismatch" in done.stdout) == (18, True)
    assert Path(made.directory, LIBRARIES, "libcuda.so.535.54.03").is_file()
    assert "535.183.06" in Path(made.directory, "proc/driver/nvidia/version").read_text()


# ---- access ----


def test_only_gpus_whose_node_can_be_opened_are_listed(tmp_path: Path) -> None:
    made = create(DEMO, tmp_path / "node")
    needs_nodes(made)
    gone, other = DEMO.gpus[0], DEMO.gpus[4]
    Path(made.directory, f"dev/nvidia{gone.minor}").unlink()
    node = Path(made.directory, f"dev/nvidia{other.minor}")
    node.unlink()
    os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(195, 77))  # a node of that name for something else
    assert listed(made) == [uuid for gpu in DEMO.gpus if gpu not in (gone, other) for uuid in uuids(gpu)]
    assert smi(made, "-L").stdout.startswith(f"GPU 0: NVIDIA A100-SXM4-40GB (UUID: {DEMO.gpus[1].uuid})")


def test_only_mig_devices_whose_two_capabilities_can_be_opened_are_listed(tmp_path: Path) -> None:
    made = create(replace(DEMO, gpus=DEMO.gpus[:1]), tmp_path / "node")
    needs_nodes(made)
    instances = mig.layout(DEMO.gpus[0])
    Path(made.directory, f"dev/nvidia-caps/nvidia-cap{instances[0].minor}").unlink()
    Path(made.directory, f"dev/nvidia-caps/nvidia-cap{instances[3].compute[0].minor}").unlink()
    left = [i.compute[0].uuid for n, i in enumerate(instances) if n not in (0, 3)]
    assert listed(made) == [DEMO.gpus[0].uuid, *left]
    assert "Device  4:" in smi(made, "-L").stdout
    assert "Device  5:" not in smi(made, "-L").stdout


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_what_a_user_may_not_open_is_denied_to_that_user() -> None:
    with open_folder() as folder:
        made = create(DEMO, folder / "node")
        needs_nodes(made)
        Path(made.directory, f"dev/nvidia{DEMO.gpus[1].minor}").chmod(0o600)
        everything = [uuid for gpu in DEMO.gpus for uuid in uuids(gpu)]
        assert listed(made) == everything
        assert listed(made, user=65534) == [uuid for uuid in everything if uuid not in uuids(DEMO.gpus[1])]
        Path(made.directory, "dev/nvidiactl").chmod(0o600)
        denied = smi(made, user=65534)
        assert (denied.returncode, denied.stdout) == (4, "Failed to initialize NVML: Insufficient Permissions\n")


def test_without_control_node_there_is_no_driver(tmp_path: Path) -> None:
    made = create(spec_from_profile("t4"), tmp_path / "node")
    needs_nodes(made)
    Path(made.directory, "dev/nvidiactl").unlink()
    assert smi(made, "-L").returncode == 9


@contextlib.contextmanager
def device_cgroup(*allowed: str) -> Iterator[Path]:
    """A cgroup v1 in which only `allowed` devices can be opened."""
    top = Path("/sys/fs/cgroup/devices")
    if os.geteuid() != 0 or not (top / "devices.deny").exists():
        pytest.skip("needs root and a cgroup v1 devices controller at /sys/fs/cgroup/devices")
    group = top / f"nvct-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "devices.deny").write_text("a")
        for rule in allowed:
            (group / "devices.allow").write_text(rule)
        yield group
    finally:
        group.rmdir()


def smi_in(group: Path, made: Made) -> subprocess.CompletedProcess[str]:
    enter = f'echo $$ > "{group}/cgroup.procs"; exec "{made.directory}/usr/bin/nvidia-smi" -L'
    return run(made, "/bin/sh", "-c", enter)


def test_the_device_cgroup_decides(tmp_path: Path) -> None:
    made = create(replace(DEMO, gpus=DEMO.gpus[:2]), tmp_path / "node")
    needs_nodes(made)
    gpu = DEMO.gpus[1]
    instance = mig.layout(gpu)[1]
    caps = os.major(Path(made.directory, "dev/nvidia-caps/nvidia-cap1").stat().st_rdev)
    minors = (instance.minor, instance.compute[0].minor)
    rules = ["c 195:255 rw", f"c 195:{gpu.minor} rw", *(f"c {caps}:{minor} r" for minor in minors)]
    with device_cgroup("c 1:3 rwm", *rules) as group:
        lines = smi_in(group, made).stdout.splitlines()
    assert [line.split("(UUID: ")[1].rstrip(")") for line in lines] == [gpu.uuid, instance.compute[0].uuid]
    with device_cgroup("c 1:3 rwm", "c 195:255 rw") as group:
        none = smi_in(group, made)
    assert (none.returncode, none.stdout) == (6, "No devices were found\n")
    with device_cgroup("c 1:3 rwm") as group:
        denied = smi_in(group, made)
    assert (denied.returncode, denied.stdout) == (255, "Failed to initialize NVML: Unknown Error\n")


# ---- nvidia-smi ----


def test_nvidia_smi_lists_in_the_real_format(demo: Made) -> None:
    first = mig.layout(DEMO.gpus[0])[0].compute[0].uuid
    lines = smi(demo, "-L").stdout.splitlines()
    assert lines[0] == f"GPU 0: NVIDIA A100-SXM4-40GB (UUID: {DEMO.gpus[0].uuid})"
    assert lines[1] == f"  MIG 1g.5gb      Device  0: (UUID: {first})"
    assert len(lines) == 8 + 7 + 3 + 2


def test_nvidia_smi_table_versions_and_usage(demo: Made) -> None:
    table = smi(demo).stdout
    assert "Driver Version: 550.163.01" in table
    assert "CUDA Version: 12.4" in table
    assert table.count("NVIDIA A100-SXM4-40GB") == 8
    assert table.count("Enabled") == 3
    assert smi(demo, "--version").stdout.splitlines()[0] == "NVIDIA-SMI version  : 550.163.01"
    assert smi(demo, "-h").stdout.startswith("usage: ")
    assert (smi(demo, "-x").returncode, smi(demo, "-x").stdout) == (2, "")


def dynamic_tags(file: BinaryIO) -> list[Any]:
    section = ELFFile(file).get_section_by_name(".dynamic")
    assert isinstance(section, DynamicSection)
    return list(section.iter_tags())


def test_nvidia_smi_finds_nvml_by_the_loader_alone(demo: Made) -> None:
    with open(f"{demo.directory}/usr/bin/nvidia-smi", "rb") as file:
        tags = [(tag.entry.d_tag, getattr(tag, "needed", None)) for tag in dynamic_tags(file)]
    assert ("DT_NEEDED", "libnvidia-ml.so.1") in tags
    assert not {"DT_RUNPATH", "DT_RPATH"} & {tag for tag, _ in tags}


# ---- files ----

REQUIRED = {
    "libnvidia-ml",
    "libnvidia-cfg",
    "libnvidia-nscq",
    "libcuda",
    "libcudadebugger",
    "libnvidia-opencl",
    "libnvidia-gpucomp",
    "libnvidia-ptxjitcompiler",
    "libnvidia-fatbinaryloader",
    "libnvidia-allocator",
    "libnvidia-compiler",
    "libnvidia-pkcs11",
    "libnvidia-pkcs11-openssl3",
    "libnvidia-nvvm",
    "libnvidia-nvvm70",
    "libnvidia-tileiras",
    "libvdpau_nvidia",
    "libnvidia-encode",
    "libnvidia-opticalflow",
    "libnvcuvid",
    "libnvidia-eglcore",
    "libnvidia-glcore",
    "libnvidia-tls",
    "libnvidia-glsi",
    "libnvidia-fbc",
    "libnvidia-ifr",
    "libnvidia-rtcore",
    "libnvoptix",
    "libGLX_nvidia",
    "libEGL_nvidia",
    "libGLESv2_nvidia",
    "libGLESv1_CM_nvidia",
    "libnvidia-glvkspirv",
    "libnvidia-cbl",
    "libnvidia-ngx",
    "libnvidia-egl-gbm",
    "libnvidia-egl-wayland",
    "libnvidia-vulkan-producer",
}


def soname(path: Path) -> str:
    """Its DT_SONAME."""
    with path.open("rb") as file:
        return str(next(tag.soname for tag in dynamic_tags(file) if tag.entry.d_tag == "DT_SONAME"))


def libraries_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("lib*.so*") if not path.is_symlink())


def test_every_library_has_its_soname_and_a_link_of_that_name(demo: Made) -> None:
    files = libraries_in(Path(demo.directory, LIBRARIES))
    assert {path.name.split(".so")[0] for path in files} >= REQUIRED
    for path in files:
        assert (path.parent / soname(path)).resolve() == path
    sonames = {path.name.split(".so")[0]: soname(path) for path in files}
    assert sonames["libcuda"] == "libcuda.so.1"
    assert sonames["libnvidia-nvvm"] == "libnvidia-nvvm.so.4"
    assert sonames["libGLX_nvidia"] == "libGLX_nvidia.so.0"
    assert sonames["libnvidia-glcore"] == "libnvidia-glcore.so.550.163.01"
    assert sonames["libnvidia-nvvm70"] == "libnvidia-nvvm70.so.4"
    assert Path(demo.directory, LIBRARIES, "libcuda.so").readlink() == Path("libcuda.so.1")


def test_every_library_loads_and_its_function_answers(demo: Made) -> None:
    every = (*driver_files.LIBRARIES_BOTH, *driver_files.LIBRARIES_64)
    calls = [(one.soname.format(v=DEMO.driver), driver_files.symbol(one)) for one in every if "/" not in one.file]
    program = f"import ctypes, json; print(json.dumps([getattr(ctypes.CDLL(n), s)() for n, s in {calls!r}]))"
    assert python(demo, program) == [1] * len(calls)


def test_libraries_for_32_bit_programs(demo: Made) -> None:
    if demo.notes:
        pytest.skip(demo.notes[0])
    files = libraries_in(Path(demo.directory, "usr/lib/i386-linux-gnu"))
    assert len(files) == len(driver_files.LIBRARIES_BOTH) + 1
    for path in files:
        with path.open("rb") as file:
            assert (ELFFile(file).elfclass, ELFFile(file)["e_machine"]) == (32, "EM_386")


def test_the_loader_cache_lists_every_library(demo: Made) -> None:
    cache = Path(demo.directory, "etc/ld.so.cache")
    entries = ldcache.names(cache.read_bytes(), os.uname().machine)
    paths = {(name, path) for name, path, _ in entries}
    for path in libraries_in(Path(demo.directory, LIBRARIES)):
        if path.parent.name not in ("vdpau", "xorg"):  # of the two folders that no loader searches
            name = soname(path)
            assert (name, f"/{LIBRARIES}/{name}") in paths
    assert ("libcuda.so", f"/{LIBRARIES}/libcuda.so") in paths


def test_programs_firmware_and_sockets(demo: Made) -> None:
    top = Path(demo.directory)
    assert sorted(path.name for path in top.glob("lib/firmware/nvidia/550.163.01/*")) == [
        "gsp_ga10x.bin",
        "gsp_tu10x.bin",
    ]
    for name in ("nvidia-debugdump", "nvidia-persistenced", "nvidia-cuda-mps-control", "nv-fabricmanager"):
        assert run(demo, f"{top}/usr/bin/{name}").stdout == f"{name} of a simulated node\n"
    for name in ("persistenced", "fabricmanager"):
        assert stat.S_ISSOCK((top / f"run/nvidia-{name}/socket").stat().st_mode)
    assert (top / "lib").readlink() == Path("usr/lib")


def test_a_socket_is_bound_however_long_the_path(tmp_path: Path) -> None:
    made = create(spec_from_profile("t4"), tmp_path / ("long" * 40))
    folder = os.open(f"{made.directory}/run/nvidia-persistenced", os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as caller, pytest.raises(ConnectionRefusedError):
            caller.connect(f"/proc/self/fd/{folder}/socket")  # bound, and nobody listens
    finally:
        os.close(folder)
    assert not Path(made.directory, "run/nvidia-fabricmanager").exists()


# ---- proc, sys, dev ----


def proc(made: Made, path: str) -> str:
    return Path(made.directory, "proc", path).read_text()


def test_proc_says_what_the_module_would(demo: Made) -> None:
    assert "Kernel Module  550.163.01  " in proc(demo, "driver/nvidia/version")
    assert "ModifyDeviceFiles: 1\n" in proc(demo, "driver/nvidia/params")
    for gpu in DEMO.gpus:
        name = gpu.bus_id.lower().removeprefix("0000")
        lines = dict(line.split(":", 1) for line in proc(demo, f"driver/nvidia/gpus/{name}/information").splitlines())
        values = {key: value.strip() for key, value in lines.items()}
        assert (values["Model"], values["GPU UUID"], values["Bus Location"], values["Device Minor"]) == (
            gpu.card.model,
            gpu.uuid,
            name,
            str(gpu.minor),
        )


def test_proc_shows_the_capabilities_of_each_mig_device_under_the_minor(demo: Made) -> None:
    gpu = DEMO.gpus[1]
    instance = mig.layout(gpu)[0]
    where = f"driver/nvidia/capabilities/gpu{gpu.minor}/mig/gi{instance.id}"
    assert proc(demo, f"{where}/access") == (
        f"DeviceFileMinor: {instance.minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
    )
    assert f"DeviceFileMinor: {instance.compute[0].minor}\n" in proc(demo, f"{where}/ci0/access")
    assert "DeviceFileMode: 256\n" in proc(demo, "driver/nvidia/capabilities/mig/config")
    table = dict(line.split(" ") for line in proc(demo, "driver/nvidia-caps/mig-minors").splitlines())
    assert table[f"gpu{gpu.minor}/gi{instance.id}/access"] == str(instance.minor)
    assert (table["config"], table["monitor"], len(table)) == ("1", "2", 2 + 32 * 15 * 9)


def test_the_majors_have_the_names_of_their_time(demo: Made, tmp_path: Path) -> None:
    old = create(spec_from_profile("t4"), tmp_path / "node")
    assert "195 nvidia-frontend\n" in proc(old, "devices")
    assert "195 nvidia\n" in proc(demo, "devices")
    assert "nvidia-frontend" not in proc(demo, "devices")


def test_an_open_module_and_more_pci_domains(tmp_path: Path) -> None:
    made = create(spec_from_profile("gb200"), tmp_path / "node")
    assert f"Open Kernel Module for {os.uname().machine}  580.65.06" in proc(made, "driver/nvidia/version")
    assert Path(made.directory, "proc/driver/nvidia/gpus/0018:01:00.0").is_dir()
    assert "nvidia-caps-imex-channels" in proc(made, "devices")


def test_sysfs_has_the_gpus_and_the_switches_which_are_none(demo: Made) -> None:
    devices = Path(demo.directory, "sys/bus/pci/devices")
    classes = [(path / "class").read_text().strip() for path in devices.iterdir()]
    assert (classes.count("0x030200"), classes.count("0x068000")) == (8, 6)
    gpu = devices / DEMO.gpus[0].bus_id.lower().removeprefix("0000")
    assert ((gpu / "vendor").read_text(), (gpu / "device").read_text()) == ("0x10de\n", "0x20b0\n")
    assert len(list((gpu / "drm").iterdir())) == 2


def test_device_nodes_have_their_numbers_and_modes_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        made = create(DEMO, tmp_path / "node")
    finally:
        os.umask(before)
    needs_nodes(made)
    dev = Path(made.directory, "dev")
    rows = [line.split() for line in proc(made, "devices").splitlines()]
    majors = {row[1]: int(row[0]) for row in rows if len(row) == 2 and row[0].isdigit()}

    def numbers(name: str) -> tuple[int, int, int]:
        status = (dev / name).stat()
        return os.major(status.st_rdev), os.minor(status.st_rdev), stat.S_IMODE(status.st_mode)

    assert numbers("nvidiactl") == (195, 255, 0o666)
    assert numbers(f"nvidia{DEMO.gpus[3].minor}") == (195, DEMO.gpus[3].minor, 0o666)
    assert numbers("nvidia-uvm-tools") == (majors["nvidia-uvm"], 1, 0o666)
    assert numbers("nvidia-caps/nvidia-cap1") == (majors["nvidia-caps"], 1, 0o400)
    assert numbers("nvidia-caps/nvidia-cap2") == (majors["nvidia-caps"], 2, 0o444)
    assert stat.S_IMODE(dev.stat().st_mode) == stat.S_IMODE(Path(made.directory).stat().st_mode) == 0o755
    assert stat.S_IMODE(Path(made.config).stat().st_mode) == 0o644


# ---- node files ----


def test_missing_and_unreadable_files_and_links(tmp_path: Path) -> None:
    made = from_yaml(
        tmp_path,
        "profile: t4\nmissing: ['usr/lib/*/libcuda.so.5*', dev/dri]\nunreadable: [usr/bin/nvidia-smi]\n"
        "links: {lib64/libextra.so: /nowhere}",
    )
    top = Path(made.directory)
    assert not (top / LIBRARIES / "libcuda.so.535.183.06").exists()
    assert not (top / "dev/dri").exists()
    assert stat.S_IMODE((top / "usr/bin/nvidia-smi").stat().st_mode) == 0
    assert (top / "usr/lib64/libextra.so").readlink() == Path("/nowhere")
    cached = ldcache.names((top / "etc/ld.so.cache").read_bytes(), os.uname().machine)
    assert "libcuda.so.1" in {name for name, _, _ in cached}  # listed still: a dead entry


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("missing: [usr/bin/nvidia-sim]", "'usr/bin/nvidia-sim' matches nothing"),
        ("gpus: [{card: t4, mig: [1g.5gb]}]", "Tesla T4 (minor 0) has no MIG"),
    ],
)
def test_what_cannot_be_made_is_refused_and_leaves_nothing(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SimError) as refused:
        from_yaml(tmp_path, f"profile: t4\n{text}")
    assert said in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["node.yaml"]


def test_a_major_that_this_machine_uses_is_refused(tmp_path: Path) -> None:
    needs_nodes(create(spec_from_profile("t4"), tmp_path / "probe"))
    with pytest.raises(SimError, match="major 10, asked for as nvidia-uvm, belongs to misc"):
        from_yaml(tmp_path, "profile: t4\nmajors: {nvidia-uvm: 10}")


# ---- making a node again, elsewhere, or as an ordinary user ----


def contents(top: Path) -> list[tuple[str, int, bytes]]:
    rows = []
    for path in sorted(top.rglob("*")):
        status = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(status.st_mode) and path.name != "boot_id" else b""
        rows.append((str(path.relative_to(top)), status.st_mode, data))
    return rows


def test_making_a_node_again_gives_the_same_node(tmp_path: Path) -> None:
    top = tmp_path / "node"
    create(DEMO, top)
    first, boot = contents(top), (top / "proc/sys/kernel/random/boot_id").read_text()
    (top / "usr/bin/left-over").touch()
    create(DEMO, top)
    assert contents(top) == first
    assert (top / "proc/sys/kernel/random/boot_id").read_text() != boot
    assert list(tmp_path.iterdir()) == [top]


def test_another_node_replaces_it_whole(tmp_path: Path) -> None:
    top = tmp_path / "node"
    create(DEMO, top)
    made = create(spec_from_profile("t4"), top)
    assert not list(top.glob("**/*550.163.01*"))
    assert len(listed(made)) == 1


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(SimError, match="no simulated node"):
        create(spec_from_profile("t4"), tmp_path)
    with pytest.raises(SimError, match="is a file"):
        create(spec_from_profile("t4"), tmp_path / "precious")
    assert (tmp_path / "precious").read_text() == "x"


def test_a_failed_replacement_leaves_the_old_node(tmp_path: Path) -> None:
    made = create(spec_from_profile("t4"), tmp_path / "node")
    wrong = replace(spec_from_profile("h100"), missing=("no/such",))
    with pytest.raises(SimError):
        create(wrong, tmp_path / "node")
    assert len(listed(made)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["node"]


def test_a_node_with_something_mounted_in_it_is_left_alone(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    made = create(spec_from_profile("t4"), tmp_path / "a node")
    program = (
        "from nvct.sim.node import create, spec_from_profile\n"
        f"try: create(spec_from_profile('t4'), {made.directory!r})\n"
        "except Exception as error: print(error)"
    )
    inside = f'mount -t tmpfs none "{made.directory}/run" && exec "{sys.executable}" -c "{program}"'
    done = subprocess.run(["unshare", "-m", "sh", "-c", inside], capture_output=True, text=True, cwd=TREE, check=True)
    assert "a\\040node/run is a mount point" in done.stdout


def test_a_machine_with_a_real_driver_is_refused(tmp_path: Path) -> None:
    (tmp_path / "devices").write_text("Character devices:\n  1 mem\n\nBlock devices:\n195 nvidia-disk\n")
    refuse_real_driver(str(tmp_path))
    (tmp_path / "devices").write_text("Character devices:\n195 nvidia-frontend\n\nBlock devices:\n")
    with pytest.raises(SimError, match="has a real NVIDIA driver"):
        refuse_real_driver(str(tmp_path))
    (tmp_path / "devices").write_text("Character devices:\n\nBlock devices:\n")
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    with pytest.raises(SimError, match="has a real NVIDIA driver"):
        refuse_real_driver(str(tmp_path))


_AS_USER = """
import json, sys
sys.path.insert(0, {tree!r})
from nvct.sim.node import create, spec_from_profile
made = create(spec_from_profile("dgx-a100", mig={{0: ("1g.5gb",)}}), {place!r})
print(json.dumps([made.directory, made.config, made.why_table, list(made.notes)]))
"""


def test_an_ordinary_user_gets_a_table_of_nodes() -> None:
    with open_folder() as folder:
        folder.chmod(0o777)
        user = 65534 if os.geteuid() == 0 else None
        program = _AS_USER.format(tree=str(TREE), place=str(folder / "node"))
        environment = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(folder / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            user=user,
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        if "Permission denied" in done.stderr and str(folder) not in done.stderr:
            pytest.skip(f"an ordinary user cannot read {TREE}")
        assert done.returncode == 0, done.stderr
        made = Made(*json.loads(done.stdout))
        assert made.why_table.startswith("mknod: ")
        rows = {row["path"]: row for row in json.loads(Path(made.directory, "dev/nodes.json").read_text())}
        assert rows["/dev/nvidiactl"] == {
            "path": "/dev/nvidiactl",
            "type": "c",
            "major": 195,
            "minor": 255,
            "mode": 0o666,
            "uid": 0,
            "gid": 0,
        }
        assert f"device_table: {made.directory}/dev/nodes.json\n" in Path(made.config).read_text()
        assert len(listed(made, user=user)) == 9
        cached = ldcache.names(Path(made.directory, "etc/ld.so.cache").read_bytes(), os.uname().machine)
        assert ("libcuda.so.1", f"/{LIBRARIES}/libcuda.so.1") in {(name, path) for name, path, _ in cached}


def test_without_a_compiler_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SimError, match="apt-get install gcc"):
        create(spec_from_profile("t4"), tmp_path / "node")
