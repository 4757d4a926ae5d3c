"""bpf(2) for the device programs of cgroups: find, read, load, attach, detach. Errors are OSError and name the command.

Layouts: union bpf_attr and struct bpf_prog_info of linux/bpf.h. The kernel takes a shorter union than its own, the rest
being zero, so each command passes only the fields that it uses.
"""

from __future__ import annotations

import errno
import os

from nvct.inject.syscalls import address, buffer, call, u64

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

F_ALLOW_OVERRIDE = 1
F_ALLOW_MULTI = 2
F_REPLACE = 4

_COMMANDS = {
    "BPF_PROG_LOAD": 5,
    "BPF_PROG_ATTACH": 8,
    "BPF_PROG_DETACH": 9,
    "BPF_PROG_GET_FD_BY_ID": 13,
    "BPF_OBJ_GET_INFO_BY_FD": 15,
    "BPF_PROG_QUERY": 16,
}
_CGROUP_DEVICE = 6  # BPF_CGROUP_DEVICE, of enum bpf_attach_type
_PROGRAM_TYPE = 15  # BPF_PROG_TYPE_CGROUP_DEVICE
_MOST_PROGRAMS = 64  # BPF_CGROUP_MAX_PROGS: as many as one cgroup can have
_INFO_SIZE = 88  # struct bpf_prog_info up to gpl_compatible
_LOG_SIZE = 1 << 20
_NAME = b"nvct_devices".ljust(16, b"\0")


def raise_locked_memory(release: str) -> None:
    """On kernels before 5.11 (`release` as uname tells it) let this process load programs: they count as locked memory,
    of which a service may have 64 KiB. Call it before entering a container, since it imports.
    """
    major, minor = release.split(".")[:2]
    digits = minor[: len(minor) - len(minor.lstrip("0123456789"))]  # "19+", "6-rc1"
    if (int(major), int(digits)) >= (5, 11):
        return
    import resource  # costs 0.2 ms, which newer kernels save

    _soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except ValueError:  # no CAP_SYS_RESOURCE: as much as we may
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))


def attached(cgroup: int) -> tuple[int, list[int]]:
    """The device programs attached to exactly this cgroup (a descriptor of its folder): their attach flags, their
    ids.
    """
    ids = buffer(4 * _MOST_PROGRAMS)
    attributes = buffer(
        32, _u32(cgroup) + _u32(_CGROUP_DEVICE) + _u32(0) + _u32(0) + u64(address(ids)) + _u32(_MOST_PROGRAMS)
    )
    _bpf("BPF_PROG_QUERY", attributes)
    flags, count = _number(attributes, 12), _number(attributes, 24)
    return flags & (F_ALLOW_OVERRIDE | F_ALLOW_MULTI), [_number(ids, 4 * index) for index in range(count)]


def program(number: int) -> int:
    """A descriptor of the program with this id."""
    return _bpf("BPF_PROG_GET_FD_BY_ID", buffer(12, _u32(number)))


def instructions(program: int) -> tuple[bytes, bool]:
    """The program as the verifier left it, and whether it declared a licence compatible with the GPL.

    Empty without CAP_BPF, zeros when the kernel has blinded it.
    """
    length = _number(_info(program, b""), 20)
    text = buffer(max(length, 1))
    # Only the length and the address of `xlated` are set: the kernel fills no other list.
    info = _info(program, bytes(20) + _u32(length) + bytes(8) + u64(address(text)))
    return text.raw[:length], bool(info.raw[84] & 1)


def load(instructions: bytes, gpl_compatible: bool) -> int:
    """Load a device program and return its descriptor. The error carries what the verifier says.

    The declared licence decides which helpers a program may call. Ours calls none, so it only passes on what it was
    given.
    """
    licence = b"GPL" if gpl_compatible else b"Apache-2.0"
    try:
        return _load(instructions, licence, None)
    except OSError:
        pass
    log = buffer(_LOG_SIZE)
    try:
        return _load(instructions, licence, log)
    except OSError as error:
        said = [line.strip() for line in log.value.decode(errors="replace").split("\n") if line.strip()]
        verdict = " | ".join(said[-3:]) or "nothing"
        raise OSError(error.errno, f"{error.strerror}; the verifier says: {verdict}") from None


def attach(cgroup: int, program: int, flags: int, replaced: int = 0) -> None:
    """Attach a program. `replaced` is the one whose place it takes, with F_REPLACE (Linux 5.6)."""
    fields = (cgroup, program, _CGROUP_DEVICE, flags, replaced)
    _bpf("BPF_PROG_ATTACH", buffer(20, b"".join(map(_u32, fields))))


def detach(cgroup: int, program: int) -> None:
    fields = (cgroup, program, _CGROUP_DEVICE)
    _bpf("BPF_PROG_DETACH", buffer(20, b"".join(map(_u32, fields))))


def _bpf(command: str, attributes: Any) -> int:
    try:
        return call("bpf", _COMMANDS[command], attributes, len(attributes.raw))
    except OSError as error:
        code = error.errno or errno.EINVAL
        raise OSError(code, f"{command}: {os.strerror(code)}") from None


def _info(program: int, content: bytes) -> Any:
    info = buffer(_INFO_SIZE, content)
    _bpf("BPF_OBJ_GET_INFO_BY_FD", buffer(16, _u32(program) + _u32(_INFO_SIZE) + u64(address(info))))
    return info


def _load(instructions: bytes, licence: bytes, log: Any) -> int:
    text = buffer(len(instructions), instructions)
    words = buffer(len(licence) + 1, licence)
    logging = bytes(16) if log is None else _u32(1) + _u32(_LOG_SIZE) + u64(address(log))
    attributes = _u32(_PROGRAM_TYPE) + _u32(len(instructions) // 8) + u64(address(text)) + u64(address(words)) + logging
    return _bpf("BPF_PROG_LOAD", buffer(64, attributes + _u32(0) + _u32(0) + _NAME))


def _u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def _number(memory: Any, at: int) -> int:
    return int.from_bytes(memory.raw[at : at + 4], "little")
