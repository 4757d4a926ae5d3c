"""What the kernel module says about itself under /proc: parsers (text to value), and readers over a procfs root.

On the hook's hot path. A file that is absent is an absent fact, so the readers let OSError through; a file whose text
is not understood is a DriverError that names it.
"""

from __future__ import annotations

import os

from nvct.errors import DriverError
from nvct.record import record

_CHARACTER_DEVICES = "Character devices:"
_READ_SIZE = 65536  # more than any file read here, so that one call takes a whole one


@record
class GpuInformation:
    """What /proc/driver/nvidia/gpus/<bus id>/information says of one GPU.

    `uuid` has question marks for digits as long as nothing has opened the GPU since the module was loaded.
    """

    model: str
    uuid: str
    minor: int


def version_path(proc_root: str) -> str:
    """Where the kernel module states its version."""
    return f"{proc_root}/driver/nvidia/version"


def information_path(proc_root: str, proc_name: str) -> str:
    """Where the kernel module describes one GPU. `proc_name` is `Gpu.proc_name`."""
    return f"{proc_root}/driver/nvidia/gpus/{proc_name}/information"


def capabilities_path(proc_root: str) -> str:
    """The folder of the MIG capability files."""
    return f"{proc_root}/driver/nvidia/capabilities"


def gi_access(gpu_minor: int, gi: int) -> str:
    """The capability file of a GPU instance, below `capabilities_path`. The kernel counts GPUs by minor."""
    return f"gpu{gpu_minor}/mig/gi{gi}/access"


def ci_access(gpu_minor: int, gi: int, ci: int) -> str:
    """The capability file of a compute instance, below `capabilities_path`."""
    return f"gpu{gpu_minor}/mig/gi{gi}/ci{ci}/access"


def parse_driver_version(text: str) -> str:
    """The version in the `NVRM version:` line: its first word of two or three numbers joined by dots.

    The words around it differ between the closed module (`... x86_64 Kernel Module  550.54.15  Tue ...`) and the open
    one (`... Open Kernel Module for x86_64  550.54.15  Release Build ...`). Raises ValueError when there is none.
    """
    for line in text.splitlines():
        if line.startswith("NVRM version:"):
            for word in line.split():
                if is_version(word):
                    return word
    raise ValueError("no line 'NVRM version:' with a version such as 550.54.15")


def is_version(text: str) -> bool:
    """Whether this is a driver version: two or three numbers joined by dots."""
    parts = text.split(".")
    return len(parts) in (2, 3) and all(part.isascii() and part.isdigit() for part in parts)


def parse_majors(text: str) -> dict[str, int]:
    """The character devices of /proc/devices whose name begins with `nvidia`: name to major number.

    `nvidia` is always among them when the module is loaded: before driver 550.40 its line was called
    `nvidia-frontend`, and the number is entered under both names.
    """
    majors: dict[str, int] = {}
    _, _, rest = text.partition(_CHARACTER_DEVICES)
    for line in rest.split("\n\n", 1)[0].splitlines():
        number, _, name = line.strip().partition(" ")
        if name.startswith("nvidia") and number.isascii() and number.isdigit():
            majors[name] = int(number)
    if "nvidia-frontend" in majors:
        majors.setdefault("nvidia", majors["nvidia-frontend"])
    return majors


def parse_information(text: str) -> GpuInformation:
    """Parse an `information` file. A value is the rest of its line: models hold blanks, commas and colons.

    Raises ValueError naming the line that is missing.
    """
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    uuid = fields.get("GPU UUID", "")
    minor = fields.get("Device Minor", "")
    if not uuid:
        raise ValueError("no line 'GPU UUID:'")
    if not (minor.isascii() and minor.isdigit()):
        raise ValueError("no line 'Device Minor:' with a number")
    return GpuInformation(fields.get("Model", ""), uuid, int(minor))


def parse_capability_minor(text: str) -> int:
    """The minor of the capability's node, /dev/nvidia-caps/nvidia-cap<minor>. Raises ValueError without it."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        value = value.strip()
        if key.strip() == "DeviceFileMinor" and value.isascii() and value.isdigit():
            return int(value)
    raise ValueError("no line 'DeviceFileMinor:' with a number")


def read_driver_version(proc_root: str) -> str:
    """The version of the loaded kernel module. Raises FileNotFoundError when none is loaded."""
    path = version_path(proc_root)
    text = read_text(path)
    try:
        return parse_driver_version(text)
    except ValueError as error:
        raise _not_understood(path, error) from None


def read_majors(proc_root: str) -> dict[str, int]:
    """The NVIDIA lines of /proc/devices, as `parse_majors` gives them."""
    return parse_majors(read_text(f"{proc_root}/devices"))


def read_information(proc_root: str, proc_name: str) -> GpuInformation:
    """One GPU's own description. Raises FileNotFoundError when there is no GPU at that bus address."""
    path = information_path(proc_root, proc_name)
    text = read_text(path)
    try:
        return parse_information(text)
    except ValueError as error:
        raise _not_understood(path, error) from None


def read_capability_minor(proc_root: str, access: str) -> int:
    """The minor of one MIG capability. `access` is of `gi_access` or `ci_access`; FileNotFoundError when it is gone."""
    path = f"{capabilities_path(proc_root)}/{access}"
    text = read_text(path)
    try:
        return parse_capability_minor(text)
    except ValueError as error:
        raise _not_understood(path, error) from None


def read_boot_id(proc_root: str) -> str:
    """The kernel's random name of this boot."""
    return read_text(f"{proc_root}/sys/kernel/random/boot_id").strip()


def read_gpu_times(proc_root: str) -> dict[str, int]:
    """The GPUs that the module drives: `Gpu.proc_name` to the ctime of its `information`. {} without any.

    A GPU that is pulled out and another put in its place gets a new file, which only the time can tell.
    """
    times: dict[str, int] = {}
    for name in sorted(_names(f"{proc_root}/driver/nvidia/gpus", "")):
        _add_time(times, name, information_path(proc_root, name))
    return times


def read_access_times(proc_root: str) -> dict[str, int]:
    """Every MIG capability file that exists, with the time of its last change in nanoseconds: path to ctime.

    The paths are below `capabilities_path`. An instance that is destroyed and made again under its old number gets a
    new file, which only the time can tell. A compute instance's folder holds nothing but its file, so it is not listed.
    """
    root = capabilities_path(proc_root)
    times: dict[str, int] = {}
    for gpu in _names(root, "gpu"):
        mig = f"{gpu}/mig"
        for gi in _names(f"{root}/{mig}", "gi"):
            folder = f"{mig}/{gi}"
            _add_time(times, f"{folder}/access", f"{root}/{folder}/access")
            for ci in _names(f"{root}/{folder}", "ci"):
                _add_time(times, f"{folder}/{ci}/access", f"{root}/{folder}/{ci}/access")
    return times


def _names(folder: str, prefix: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.startswith(prefix)]
    except OSError:  # absent, or removed since its parent was listed
        return []


def _add_time(times: dict[str, int], key: str, path: str) -> None:
    try:
        times[key] = os.stat(path).st_ctime_ns
    except OSError:  # it is just going away
        return


def read_text(path: str) -> str:
    """The text of a small file; bytes that are no UTF-8 are replaced, so that a parser decides."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(handle, _READ_SIZE):
            parts.append(part)
    finally:
        os.close(handle)
    return b"".join(parts).decode("utf-8", "replace")


def _not_understood(path: str, error: ValueError) -> DriverError:
    return DriverError(f"{path} is not understood: {error}; is this a procfs with the NVIDIA driver in it?")
