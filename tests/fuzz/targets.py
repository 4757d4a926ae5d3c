"""What is fuzzed: functions of bytes that somebody else wrote, and what must hold for all bytes.

Each target takes any bytes. An AssertionError, or any exception that is not one of nvct's own, is a find. Used with
hypothesis in the test suite (test_fuzz.py) and with atheris for longer (`make fuzz`, fuzz.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from nvct import edits, fastjson, ldcache, ldmerge, requirements, settings
from nvct.cdi import check, registry
from nvct.errors import ConfigError, NvctError
from nvct.inject import cgroup
from nvct.model import (
    BINARY,
    LIBRARY,
    ContainerRoot,
    DeviceNode,
    DriverFile,
    Gpu,
    Inventory,
    MigDevice,
    Roots,
)
from nvct.node import procfs
from nvct.oci import state
from nvct.plan import plan
from nvct.request import asks_for_nothing, request_from_spec

LONGEST_MESSAGE = 4000  # characters

X86_64 = 0x0303
ADDED = [
    ("libcuda.so.1", "/usr/lib64/libcuda.so.1", X86_64),
    ("libnvidia-ml.so", "/usr/lib64/libnvidia-ml.so", X86_64),
]

MIG = MigDevice(0, "MIG-0f5d8a1c-0000-4000-8000-00000000000a", "1g.5gb", 7, 0, 4864, 66, 67)
INVENTORY = Inventory(
    "550.1",
    "12.4",
    "x86_64",
    Roots(),
    {"nvidia": 195, "nvidiactl": 195, "nvidia-uvm": 234, "nvidia-caps": 240},
    gpus=(
        Gpu(0, "GPU-0f5d8a1c-0000-4000-8000-000000000001", 1, "00000000:07:00.0", "A100", "", "8.0", 40, True, (MIG,)),
        Gpu(1, "GPU-0f5d8a1d-0000-4000-8000-000000000002", 0, "00000000:0f:00.0", "A100", "", "8.0", 40960),
    ),
    nodes=(DeviceNode("/dev/nvidiactl", 195, 255), DeviceNode("/dev/nvidia-uvm", 234, 0)),
    files=(
        DriverFile(LIBRARY, "utility", "/usr/lib64/libnvidia-ml.so.550.1", "libnvidia-ml.so.1", ("libnvidia-ml.so",)),
        DriverFile(LIBRARY, "compute", "/usr/lib64/libcuda.so.550.1", "libcuda.so.1", ("libcuda.so",)),
        DriverFile(BINARY, "utility", "/usr/bin/nvidia-smi"),
    ),
)  # fmt: skip


def loader_cache(data: bytes) -> None:
    """Merged or refused; merged it can be read, has what was added and what was there, and merging again changes
    nothing.
    """
    try:
        old = [(entry.name, entry.path) for entry in ldcache.parse(data).entries] if data else []
        new = ldmerge.merge(data, ADDED)
    except ldcache.LoaderCacheError as error:
        _check_message(error)
        return
    found = {(entry.name, entry.path) for entry in ldcache.parse(new).entries}
    assert {(name, path) for name, path, _ in ADDED} <= found
    replaced = {name for name, _, _ in ADDED}
    assert {(name, path) for name, path in old if name not in replaced} <= found | set(_same_names(old, replaced))
    assert ldmerge.merge(new, ADDED) == new


def _same_names(old: list[tuple[str, str]], replaced: set[str]) -> list[tuple[str, str]]:
    """Entries of other names that ld.so holds equal to a replaced one: numbers with leading zeros."""
    ranks = {ldmerge._rank(name.encode(), True) for name in replaced}
    return [(name, path) for name, path in old if ldmerge._rank(name.encode("utf-8", "surrogateescape"), True) in ranks]


def config_json(data: bytes) -> None:
    """A plan or a refusal in one line. What is asked for decides: no request, no edit; and never a GPU beyond it."""
    try:
        request = request_from_spec(state._json(data, "config.json"), ContainerRoot())
        edits = plan(INVENTORY, request, settings.Settings())
    except NvctError as error:
        _check_message(error)
        return
    for warning in edits.warnings:
        _check_line(warning)
    if asks_for_nothing(request):
        assert not (edits.devices or edits.mounts or edits.links)
    if not request.devices:
        gpus = {f"/dev/nvidia{gpu.minor}" for gpu in INVENTORY.gpus}
        assert not [device for device in edits.devices if device.path in gpus or "caps" in device.path]


def json_text(data: bytes) -> None:
    """The fast reader and Python's agree, on the value or on there being none."""
    text = data.decode("utf-8", "replace")
    try:
        expected = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        expected = ValueError
    try:
        found = fastjson.loads(text)
    except (ValueError, RecursionError):
        found = ValueError
    assert repr(found) == repr(expected)


def proc_files(data: bytes) -> None:
    """A value or ValueError; numbers are numbers."""
    text = data.decode("utf-8", "replace")
    for parse in (procfs.parse_driver_version, procfs.parse_information, procfs.parse_capability_minor):
        try:
            parse(text)
        except ValueError as error:
            _check_line(str(error))
    try:
        majors = procfs.parse_majors(text)
    except ValueError as error:
        _check_line(str(error))
    else:
        assert all(name.startswith("nvidia") and number >= 0 for name, number in majors.items())


def cgroup_files(data: bytes) -> None:
    """/proc/<pid>/cgroup and mountinfo: any text is read, and no folder is found that is not below a cgroup mount."""
    text = data.decode("utf-8", "surrogateescape")
    for mount in cgroup.cgroup_mounts(text):
        for controller in ("", "devices"):
            path = cgroup.cgroup_path(text, controller)
            folder = cgroup.folder_below(mount, path) if path is not None else None
            assert folder is None or folder.startswith(mount.point)


def settings_file(data: bytes) -> None:
    """Settings, or a refusal in one line."""
    try:
        values = settings._parse(data.decode("utf-8", "replace"), "/etc/nvct/config.yaml")
        chosen = settings.from_mapping(values, "/etc/nvct/config.yaml")
    except ConfigError as error:
        _check_message(error)
        return
    assert chosen.root.startswith("/") and ".." not in chosen.root.split("/")
    assert settings.from_json(json.loads(json.dumps(settings.to_json(chosen)))) == chosen


FACTS = {"cuda": "12.4", "driver": "550.1", "arch": "8.0", "brand": "tesla"}


def requirements_text(data: bytes) -> None:
    """Terms or a refusal. An expression holds when one of its terms, by itself, holds, or when there is none."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        terms = requirements.parse(text)
    except requirements.Malformed as error:
        assert error.reason
        return
    failures = requirements.unmet(terms, FACTS)
    alone = [requirements.unmet((term,), FACTS) for term in terms]
    assert bool(failures) == (bool(terms) and all(alone))
    assert requirements.unmet(terms, {}) == ()


def cdi_spec(data: bytes) -> None:
    """A value in which problems are found, a line each, or none; or a refusal in one line."""
    try:
        value = registry.parse("/etc/cdi/a.yaml", data)
    except ConfigError as error:
        _check_message(error)
        return
    for problem in check.problems(value):
        _check_line(problem)


def hook_argument(data: bytes) -> None:
    """Edits that say the same when they are written again, or a refusal."""
    try:
        remainder = edits.from_json(fastjson.loads(data.decode("utf-8", "replace")))
    except ConfigError as error:
        assert "write the spec again" in str(error)
        return
    except (ValueError, RecursionError):
        return
    assert edits.from_json(edits.to_json(remainder)) == remainder


def _check_message(error: NvctError) -> None:
    assert len(str(error)) <= LONGEST_MESSAGE, str(error)[:200]
    _check_line(str(error))


def _check_line(text: str) -> None:
    assert text.isprintable() or all(ord(letter) >= 0xA0 for letter in text if not letter.isprintable()), ascii(text)


class Target(NamedTuple):
    """A function to fuzz, and bytes of the right kind to begin with."""

    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]


def _spec(*env: str, **parts: object) -> bytes:
    spec = {"ociVersion": "1.0.2", "process": {"env": list(env), "capabilities": {"bounding": ["CAP_KILL"]}}}
    return json.dumps({**spec, "root": {"path": "rootfs"}, **parts}).encode()


_CACHE = ldmerge.merge(
    None, [*ADDED, ("libc.so.6", "/lib64/libc.so.6", X86_64), ("libfoo-10.so", "/opt/libfoo-10.so", 3)]
)
_OLD_CACHE = b"ld.so-1.7.0".ljust(16, b"\0").replace(b"\0\0\0\0\0", b"\0\1\0\0\0", 1) + bytes(12) + b"libfoo.so\0"
_MOUNTINFO = b"36 32 0:31 / /sys/fs/cgroup/devices rw,nosuid shared:16 - cgroup cgroup rw,devices\n"
_MOUNTINFO += b"37 32 0:32 /../.. /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n5:devices:/docker/12ab\n0::/a\\040b\n"

TARGETS: dict[str, Target] = {
    "loader_cache": Target(loader_cache, (_CACHE, _OLD_CACHE, _OLD_CACHE + bytes(2) + _CACHE, b"")),
    "config_json": Target(
        config_json,
        (
            _spec("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=all"),
            _spec("NVIDIA_VISIBLE_DEVICES=0:0,GPU-0f5d8a1d,MIG-0f5d8a1c-0000-4000-8000-00000000000a,0000:0f:00.0"),
            _spec("NVIDIA_VISIBLE_DEVICES=none", "NVIDIA_DRIVER_CAPABILITIES=utility, video"),
            _spec("A=1", process=None),
        ),
    ),
    "json_text": Target(json_text, (_spec("A=\u00e9\n"), b'[1e5, -0, NaN, {"a": [null, true, "\\ud83d\\ude00"]}]')),
    "proc_files": Target(
        proc_files,
        (
            b"NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue Apr 23 2024\nGCC version: 12\n",
            b"Character devices:\n  1 mem\n195 nvidia-frontend\n240 nvidia-caps\n\nBlock devices:\n  8 sd\n",
            b"Model: \t\t NVIDIA A100\nGPU UUID: \t GPU-0f5d8a1c-????\nDevice Minor: \t 3\n",
            b"DeviceFileMinor: 21\nDeviceFileMode: 292\n",
        ),
    ),
    "cgroup_files": Target(cgroup_files, (_MOUNTINFO,)),
    "requirements": Target(
        requirements_text,
        (b"cuda>=12.4 brand=tesla,driver>=470,driver<471", b"arch>=8.0,cuda!=9 brand!=grid", b"CUDA<= 11.0.0"),
    ),
    "cdi_spec": Target(
        cdi_spec,
        (
            b"cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: '0'\n  containerEdits:\n    env: [A=1]\n",
            b'{"cdiVersion": "0.3.0", "kind": "a/b", "devices": [{"name": "x", "containerEdits": {"hooks": []}}]}',
        ),
    ),
    "hook_argument": Target(
        hook_argument,
        (
            b'{"architecture": "x86_64", "edits": {"links": {"/a": "b"}, "loader_cache": [["a", "/a", 64]]}}',
            b'{"architecture": "x86_64", "edits": {"stale": {"/usr/lib64": ["libcuda.so"]}, "files": []}}',
        ),
    ),
    "settings_file": Target(
        settings_file,
        (
            b"root: /run/nvidia/driver\ndev_root: /\nlibrary_search_path: [/opt/lib]\nnvml_timeout_s: 5\n",
            b"supported_capabilities: [utility, compute]\nmask_proc: true\ndevice_table: ''\nproc_root: /proc\n",
        ),
    ),
}
