"""Linux calls that Python lacks, one small function each. Errors are OSError and carry the path or the name of the
object.

They go through `_ctypes`, the C part of ctypes, since importing the Python part takes 3 ms of every container start.
Numbers: asm/unistd_64.h (x86-64) and asm-generic/unistd.h (arm64), which share everything from 424 on.
"""

from __future__ import annotations

import _ctypes
import _struct
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
AT_SYMLINK_NOFOLLOW = 0x100

OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = 0o2000000
MOVE_MOUNT_F_EMPTY_PATH = 0x04
MOVE_MOUNT_T_EMPTY_PATH = 0x40

RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_IN_ROOT = 0x10

FSCONFIG_SET_STRING = 1
FSCONFIG_CMD_CREATE = 6
FSOPEN_CLOEXEC = 1
FSMOUNT_CLOEXEC = 1

MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

CLONE_NEWNS = 0x20000

PROC_MAGIC = 0x9FA0
TMPFS_MAGIC = 0x01021994
CGROUP_MAGIC = 0x27E0EB
CGROUP2_MAGIC = 0x63677270

# File systems that are the kernel's own windows (linux/magic.h): their files act when they are opened or covered.
KERNEL_MAGICS = frozenset(
    {
        PROC_MAGIC,
        CGROUP_MAGIC,
        CGROUP2_MAGIC,
        0x62656572,  # sysfs
        0x73636673,  # securityfs
        0x64626720,  # debugfs
        0x74726163,  # tracefs
        0xCAFE4A11,  # bpf
        0x62656570,  # configfs
        0xF97CFF8C,  # selinuxfs
        0xDE5E81E4,  # efivarfs
        0x6165676C,  # pstore
        0x42494E4D,  # binfmt_misc
        0x6E736673,  # nsfs
        0x1CD1,  # devpts
        0x19800202,  # mqueue
    }
)

_SHARED = {
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "openat2": 437,
    "mount_setattr": 442,
}
NUMBERS = {
    "x86_64": {
        **_SHARED,
        "socket": 41,
        "connect": 42,
        "mount": 165,
        "umount2": 166,
        "fstatfs": 138,
        "setfsuid": 122,
        "setfsgid": 123,
        "setns": 308,
        "bpf": 321,
    },
    "aarch64": {
        **_SHARED,
        "socket": 198,
        "connect": 203,
        "mount": 40,
        "umount2": 39,
        "fstatfs": 44,
        "setfsuid": 151,
        "setfsgid": 152,
        "setns": 268,
        "bpf": 280,
    },
}
_number = NUMBERS.get(os.uname().machine, NUMBERS["x86_64"])


class _Long(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "l"


class _Char(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "c"


class _Function(_ctypes.CFuncPtr):
    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
    _restype_ = _Long


_syscall = _Function(_ctypes.dlsym(_ctypes.dlopen(None, 0), "syscall"))  # type: ignore[arg-type]  # None is this program itself


def call(name: str, *arguments: Any, about: str = "") -> int:
    """The system call `name`; OSError about the object `about` when it fails.

    Integers are passed as C int (sign-extended), bytes as a pointer to them, None as NULL, buffers by address.
    """
    result: int = _syscall(_number[name], *arguments)
    if result == -1:
        code = _ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}", about)
    return result


def buffer(size: int, content: bytes = b"") -> Any:
    """Memory of `size` bytes for a call to write to: `.raw` are its bytes, `address()` gives where it lies."""
    memory = type("_Buffer", (_ctypes.Array,), {"_type_": _Char, "_length_": size})()
    memory.raw = content.ljust(size, b"\0")
    return memory


def address(memory: Any) -> int:
    return _ctypes.addressof(memory)


def u64(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _path(path: str) -> bytes:
    if "\0" in path:
        raise ValueError(f"NUL in path {path!r}")
    return os.fsencode(path)


def openat2(folder: int, path: str, flags: int, mode: int, resolve: int) -> int:
    how = u64(flags | os.O_CLOEXEC) + u64(mode) + u64(resolve)
    return call("openat2", folder, _path(path), how, len(how), about=path)


def open_tree(path: str, recursive: bool = False) -> int:
    """A detached copy of what is mounted at `path`, as a file descriptor; where a link stands, the link itself."""
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_SYMLINK_NOFOLLOW | (AT_RECURSIVE if recursive else 0)
    return call("open_tree", AT_FDCWD, _path(path), flags, about=path)


def copy_mount(mount: int, about: str) -> int:
    """A detached copy of the attached mount that the descriptor stands for."""
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH
    return call("open_tree", mount, b"", flags, about=about)


def move_mount(mount: int, target: int, about: str) -> None:
    """Attach the detached mount onto what the descriptor `target` stands for; `about` names it in errors."""
    call("move_mount", mount, b"", target, b"", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH, about=about)


def mount_setattr(mount: int, set_: int, clear: int, about: str) -> None:
    """Set and clear MOUNT_ATTR_* on a mount and all below it, and make them private."""
    attributes = _struct.pack("<4Q", set_, clear, MS_PRIVATE, 0)
    call("mount_setattr", mount, b"", AT_EMPTY_PATH | AT_RECURSIVE, attributes, len(attributes), about=about)


def new_tmpfs(options: dict[str, str], about: str) -> int:
    """A detached, empty tmpfs with the mount options of tmpfs(5): mode (octal digits), uid, gid."""
    context = call("fsopen", b"tmpfs", FSOPEN_CLOEXEC, about=about)
    try:
        for name, value in options.items():
            call("fsconfig", context, FSCONFIG_SET_STRING, name.encode(), value.encode(), 0, about=about)
        call("fsconfig", context, FSCONFIG_CMD_CREATE, None, None, 0, about=about)
        return call(
            "fsmount", context, FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC, about=about
        )
    finally:
        os.close(context)


def mount(source: str, target: str, kind: str, flags: int, data: str, about: str) -> None:
    arguments = (_path(source), _path(target), _path(kind), flags, _path(data))
    call("mount", *arguments, about=about)


def umount(target: str, about: str) -> None:
    """Detach the mount at `target` at once, however busy."""
    call("umount2", _path(target), MNT_DETACH, about=about)


def setns(namespace: int, kind: int, about: str) -> None:
    call("setns", namespace, kind, about=about)


def filesystem_magic(descriptor: int, about: str) -> int:
    """The f_type of statfs(2): which kind of file system the descriptor lies on."""
    result = buffer(128)
    call("fstatfs", descriptor, result, about=about)
    return int.from_bytes(result.raw[:4], "little")


def set_file_owner(uid: int, gid: int) -> None:
    """Files are created, and permissions checked, as this user from now on (fsuid, fsgid). These calls cannot fail
    visibly.

    The kernel takes the capabilities about files from whoever is no longer root there, and gives them back to root.
    """
    call("setfsgid", gid)
    call("setfsuid", uid)


def connect_to_log(path: str) -> int:
    """A datagram socket to the system log at `path` that never waits. Each write to it is one message."""
    descriptor = call("socket", 1, 2 | 0o4000 | 0o2000000, 0, about=path)  # AF_UNIX, SOCK_DGRAM, non-blocking, cloexec
    address_of_log = (1).to_bytes(2, "little") + _path(path) + b"\0"
    try:
        call("connect", descriptor, address_of_log, len(address_of_log), about=path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
