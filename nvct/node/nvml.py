"""Ask NVML in a child process, for a limited time, and turn each way to fail into a sentence that says what to do."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any, TypedDict

from nvct.errors import DriverError
from nvct.node.devices import NodeReader
from nvct.node.roots import on_host
from nvct.node.verdicts import version_mismatch
from nvct.record import record

_PROBE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nvml_probe.py")
_PATIENCE_AFTER_KILL_S = 1.0

# The codes of nvml.h that have an answer of their own.
_NO_PERMISSION = 4
_DRIVER_NOT_LOADED = 9
_LIBRARY_NOT_FOUND = 12
_VERSION_MISMATCH = 18

# nvmlBrandType_t, in the words that NVIDIA_REQUIRE_* expressions compare with.
_BRANDS = (
    "Unknown",
    "Quadro",
    "Tesla",
    "NVS",
    "GRID",
    "GeForce",
    "TITAN",
    "VApps",
    "VPC",
    "VCS",
    "VWS",
    "CloudGaming",
    "QuadroRTX",
    "NvidiaRTX",
    "Nvidia",
    "GeForceRTX",
    "TitanRTX",
)


class ProbeError(TypedDict):
    """An NVML error: its code in nvml.h and NVML's own words."""

    code: int
    text: str


class MigAnswer(TypedDict):
    """One MIG device as NVML describes it. `index` is its place below its GPU."""

    index: int
    uuid: str
    name: str
    gi: int
    ci: int
    gi_slices: int
    ci_slices: int
    memory_mib: int


class GpuAnswer(TypedDict):
    """One GPU as NVML describes it. `brand` is of nvmlBrandType_t; `compute_capability` is [major, minor].

    `minor` is -1 where GPUs have no nodes of their own (WSL).
    """

    index: int
    uuid: str
    minor: int
    bus_id: str
    model: str
    brand: int
    compute_capability: list[int]
    memory_bytes: int
    mig_enabled: bool
    mig_devices: list[MigAnswer]


class BrokenGpu(TypedDict):
    """A GPU that NVML counts but cannot describe: lost from the bus, or waiting for a reset."""

    index: int
    error: ProbeError


@record
class Answer:
    """What NVML knows of this node. `cuda_version` is NVML's number: 1000 for each major, 10 for each minor."""

    driver_version: str
    cuda_version: int
    gpus: tuple[GpuAnswer, ...]
    broken: tuple[BrokenGpu, ...]


@record
class Subject:
    """Whom to ask, and what is known of the node for messages: paths are on this host, `version` is the module's.

    `control_node` is what the library opens first, below `dev_root`.
    """

    library: str
    version: str
    version_path: str
    dev_root: str
    control_node: str = "/dev/nvidiactl"


def cuda_version(answer: Answer) -> str:
    """The newest CUDA of the driver: "12.4"."""
    return f"{answer.cuda_version // 1000}.{answer.cuda_version % 1000 // 10}"


def brand_name(brand: int) -> str:
    """A brand of nvmlBrandType_t in words; a newer one than are known here is "Unknown"."""
    return _BRANDS[brand] if 0 <= brand < len(_BRANDS) else _BRANDS[0]


def broken_gpus(answer: Answer) -> list[str]:
    """A sentence for each GPU that NVML counts but cannot describe."""
    return [f"GPU {gpu['index']} is left out: NVML says {gpu['error']['text']}; see dmesg" for gpu in answer.broken]


def ask(subject: Subject, timeout_s: float, read_node: NodeReader) -> Answer:
    """Ask the library for everything that an inventory needs; in at most about `timeout_s` seconds.

    Raises DriverError when NVML refuses, crashes, or does not answer in time.
    """
    raw = _run_probe(subject, timeout_s)
    if "error" in raw:
        raise _refusal(subject, raw["error"], read_node)
    return Answer(
        raw["driver_version"],
        raw["cuda_version"],
        tuple(gpu for gpu in raw["gpus"] if "error" not in gpu),
        tuple(gpu for gpu in raw["gpus"] if "error" in gpu),
    )


def _run_probe(subject: Subject, timeout_s: float) -> dict[str, Any]:
    started = time.monotonic()
    command = [sys.executable, "-I", _PROBE, subject.library, *_pynvml_folder()]
    # No environment: LD_PRELOAD and the like of whoever started us decide nothing here.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={})
    try:
        output, complaint = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _abandon(child)
        raise _timed_out(subject, timeout_s, time.monotonic() - started) from None
    try:
        raw = json.loads(output)
    except ValueError:
        raise _crashed(subject, child.returncode, complaint) from None
    return dict(raw)


def _pynvml_folder() -> list[str]:
    """Where this interpreter finds pynvml: a hook's has it on its path by hand, which its child does not inherit."""
    spec = importlib.util.find_spec("pynvml")
    if spec is None or spec.origin is None:
        raise DriverError(f"{sys.executable} has no module pynvml: install the package nvidia-ml-py for it")
    return [os.path.dirname(spec.origin)]


def _abandon(child: subprocess.Popen[bytes]) -> None:
    """Kill the probe; one that hangs inside the driver cannot die before the driver lets go, and is left behind."""
    child.kill()
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()
    try:
        child.wait(_PATIENCE_AFTER_KILL_S)
    except subprocess.TimeoutExpired:
        return


def _timed_out(subject: Subject, limit_s: float, waited_s: float) -> DriverError:
    return DriverError(
        f"NVML ({subject.library}) has not answered within the limit nvml_timeout_s of {limit_s:g} s "
        f"(waited {waited_s:.1f} s): without persistence mode every start initialises the GPUs anew; "
        "start nvidia-persistenced or run `nvidia-smi -pm 1`, "
        "or raise nvml_timeout_s; when nvidia-smi hangs too, the driver does: see dmesg"
    )


def _crashed(subject: Subject, status: int, complaint: bytes) -> DriverError:
    last_line = complaint.decode("utf-8", "replace").strip().rpartition("\n")[2]
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return DriverError(
        f"the process that asked NVML ({subject.library}) {how} without an answer"
        f"{': ' + last_line if last_line else ''}; expected what nvidia-smi shows: run it, and see dmesg"
    )


def _refusal(subject: Subject, error: ProbeError, read_node: NodeReader) -> DriverError:
    code = error["code"]
    if code == _VERSION_MISMATCH:
        return version_mismatch(subject.version, subject.version_path, {_version_in(subject.library): subject.library})
    if code == _NO_PERMISSION:
        return _no_permission(subject, read_node)
    if code == _DRIVER_NOT_LOADED:
        return _not_loaded(subject, read_node)
    if code == _LIBRARY_NOT_FOUND:
        return DriverError(f"{subject.library} cannot be loaded: {error['text']}; install the driver's libraries again")
    return DriverError(
        f"NVML ({subject.library}) fails with code {code}, {error['text']}; expected an answer for driver "
        f"{subject.version}: run nvidia-smi, and see dmesg"
    )


def _no_permission(subject: Subject, read_node: NodeReader) -> DriverError:
    node = read_node(subject.control_node)
    where = on_host(subject.dev_root, subject.control_node)
    state = f"has mode {node.mode:04o} and owner {node.uid}:{node.gid}" if node else "is absent"
    return DriverError(
        f"NVML ({subject.library}) lacks permission: {where} {state}, and user {os.geteuid()} (groups "
        f"{', '.join(map(str, os.getgroups())) or 'none'}) asked; expected read and write access: "
        "run as root, join that group, or mend the mode; when it looks right, see SELinux or the device cgroup"
    )


def _not_loaded(subject: Subject, read_node: NodeReader) -> DriverError:
    where = on_host(subject.dev_root, subject.control_node)
    node = "exists" if read_node(subject.control_node) else "is absent"
    return DriverError(
        f"NVML ({subject.library}) says that the driver is not loaded, though {subject.version_path} names "
        f"{subject.version}; {where} {node}: run `nvidia-modprobe -c 0 -u`, or see dmesg for why it does not answer"
    )


def _version_in(library: str) -> str:
    """The version at the end of the real file's name."""
    return os.path.realpath(library).partition(".so.")[2] or "of unknown version"
