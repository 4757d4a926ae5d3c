"""The confined root: the only way by which nvct opens a path of a container.

What lies below a container's root was written by whoever wrote the image, and may change while we look. So a path is
never used twice: it is resolved once, with every link and every `..` held inside the root, to a descriptor, and all
that follows is done to that descriptor or to a name directly below it.
"""

from __future__ import annotations

import errno
import os
from stat import S_ISDIR, S_ISLNK, S_ISREG

from nvct.inject import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# As many as the kernel follows in one path (MAXSYMLINKS).
_MOST_LINKS = 40

# How often the kernel may ask to look again since something was renamed meanwhile.
_MOST_TRIES = 1_000

# The kernel has no such limit: 40 links can have 80,000 components. A step takes it 50 ns, and us 10 us.
_MOST_STEPS = 1_000

# How the kernel says that there is nothing at a path for the container's root. Any other error says nothing about it.
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.ENAMETOOLONG, errno.EXDEV)

# More than the loader cache of a large image has: what is read at once is copied once.
_CHUNK = 4 << 20

_ANCHOR = os.O_PATH | os.O_CLOEXEC


class ConfinedRoot:
    """A container's root folder, held by descriptor. Paths given to its methods are absolute, as seen in the
    container.
    """

    def __init__(self, descriptor: int, born: str = "") -> None:
        self.descriptor = descriptor
        self.born = born
        # Opened now, while /proc is the host's: the container's own /proc is as untrusted as the rest of it.
        self.own_descriptors = os.open("/proc/self/fd", _ANCHOR | os.O_DIRECTORY)
        self._kernel_resolves = True

    @classmethod
    def of_process(cls, pid: int, rootfs: str) -> ConfinedRoot:
        """The folder `rootfs` as process `pid` sees it. Usable from any mount namespace.

        `born` is then the process's: whoever uses the pid later must find the same.
        """
        born = birth(pid)
        process = cls(os.open(f"/proc/{pid}/root", _ANCHOR | os.O_DIRECTORY))
        try:
            return cls(process.open(rootfs, os.O_PATH | os.O_DIRECTORY), born)
        finally:
            process.close()

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self.own_descriptors)

    def open(self, path: str, flags: int = os.O_PATH, same_mount: bool = False) -> int:
        """A descriptor of what stands at `path`, links followed inside the root (the last one not with O_NOFOLLOW).

        Magic links, such as those in /proc/<pid>/fd, lead out of every root and are refused with ELOOP. Creates
        nothing. With `same_mount` the way may not lead onto another mount, such as a volume of the user's: EXDEV.
        """
        if self._kernel_resolves:
            try:
                return self._open_by_kernel(path, flags, same_mount)
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise
                self._kernel_resolves = False
        try:
            return self._open_by_walk(path, flags, same_mount)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), path) from None

    def _open_by_kernel(self, path: str, flags: int, same_mount: bool) -> int:
        resolve = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS
        if same_mount:
            resolve |= syscalls.RESOLVE_NO_XDEV
        for _ in range(_MOST_TRIES):
            try:
                return syscalls.openat2(self.descriptor, path, flags, 0, resolve)
            except OSError as error:
                # EAGAIN: a rename elsewhere may have moved a `..` out of the root; the kernel asks us to try again.
                if error.errno != errno.EAGAIN:
                    raise
        raise OSError(errno.EAGAIN, "something renames without pause", path)

    def _open_by_walk(self, path: str, flags: int, same_mount: bool) -> int:
        """What `_open_by_kernel` does, a component at a time, for kernels before 5.6.

        It tells mounts apart by their devices, so a volume of the root's own file system passes for the same mount.
        """
        trail = [os.dup(self.descriptor)]  # from the root to where we are; `..` steps back along it
        pending = path.split("/")
        links = steps = 0
        try:
            while pending:
                name = pending.pop(0)
                steps += 1
                if steps > _MOST_STEPS:
                    raise OSError(errno.ELOOP, "too many steps")
                if name == "..":
                    _shorten(trail, max(1, len(trail) - 1))
                if name in ("", ".", ".."):
                    continue
                found = os.open(name, _ANCHOR | os.O_NOFOLLOW, dir_fd=trail[-1])
                trail.append(found)
                status = os.fstat(found)
                mode = status.st_mode
                if same_mount and status.st_dev != os.fstat(self.descriptor).st_dev:
                    raise OSError(errno.EXDEV, "another mount")
                if pending and not S_ISDIR(mode) and not S_ISLNK(mode):
                    raise OSError(errno.ENOTDIR, "not a folder")
                if not S_ISLNK(mode) or (flags & os.O_NOFOLLOW and not pending):
                    continue
                text = _link_text(found)
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, "too many links")
                _shorten(trail, 1 if text.startswith("/") else len(trail) - 1)
                pending[:0] = text.split("/")
            return self.reopen(trail[-1], flags)
        finally:
            _shorten(trail, 0)

    def reopen(self, descriptor: int, flags: int) -> int:
        """Open what an O_PATH descriptor stands for once more, with other flags, through no name that could be
        swapped.
        """
        if not flags & os.O_PATH:
            return os.open(str(descriptor), (flags & ~os.O_NOFOLLOW) | os.O_CLOEXEC, dir_fd=self.own_descriptors)
        if flags & os.O_DIRECTORY and not S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENOTDIR, "not a folder")
        return os.dup(descriptor)

    def exists(self, path: str) -> bool:
        """Whether something stands at the path. Raises OSError when that cannot be told."""
        try:
            descriptor = self.open(path)
        except OSError as error:
            if error.errno not in NOT_THERE:
                raise
            return False
        os.close(descriptor)
        return True

    def leads_nowhere(self, path: str) -> bool:
        """Whether nothing stands at the path, or where its link leads. A way that cannot be followed is a no: what is
        removed for a yes is gone. Raises OSError when the kernel could not look.
        """
        try:
            descriptor = self.open(path)
        except OSError as error:
            if error.errno not in (*NOT_THERE, errno.EAGAIN):
                raise
            return error.errno in (errno.ENOENT, errno.ENOTDIR)
        os.close(descriptor)
        return False

    def read(self, anchor: int, path: str, most: int) -> bytes:
        """The content of the regular file that the O_PATH descriptor `anchor` stands for; OSError EFBIG past `most`
        bytes.
        """
        size = os.fstat(anchor).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"{size} bytes, the limit is {most}", path)
        return self.read_start(anchor, path, most)

    def read_start(self, anchor: int, path: str, most: int) -> bytes:
        """At most `most` bytes from the start of the regular file that the O_PATH descriptor `anchor` stands for.

        Only a regular file is ever opened, and none of the kernel's own: opening a fifo waits, opening a device can
        act, and a link of the image to /proc/kmsg would keep us reading for ever.
        """
        if not S_ISREG(os.fstat(anchor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        check_ordinary(anchor, path)
        descriptor = self.reopen(anchor, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return _read_up_to(descriptor, most)
        finally:
            os.close(descriptor)

    def folder(self, path: str, made: Callable[[int, str], None]) -> int:
        """A descriptor of the folder at `path`; what is missing of it is made, mode 0755.

        `made(parent descriptor, name)` is called for each folder made; the descriptor is the callee's.
        """
        parts = [part for part in path.split("/") if part]
        missing: list[str] = []
        while (here := self._folder_or_none("/" + "/".join(parts))) is None:
            missing.insert(0, parts.pop())
        for name in missing:
            try:
                check_ordinary(here, path)
                held = os.dup(here)  # first, so that nothing can fail between making the folder and its being known
                # Nothing stands below a folder that we made, unless somebody races us: their link is refused here.
                os.mkdir(name, 0o755, dir_fd=here)
                made(held, name)
                inner = os.open(name, _ANCHOR | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
            except FileExistsError:
                raise OSError(errno.ENOENT, f"{name!r} is a link that leads nowhere", path) from None
            finally:
                os.close(here)
            here = inner
        return here

    def _folder_or_none(self, path: str) -> int | None:
        try:
            return self.open(path, os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError:
            return None


def birth(pid: int) -> str:
    """When the process was started, in the kernel's ticks: together with the pid it is one process, and no later
    one.
    """
    descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(descriptor, 1 << 12).decode(errors="replace")
    finally:
        os.close(descriptor)
    return text.rpartition(")")[2].split()[19]


def check_ordinary(descriptor: int, path: str) -> None:
    """Raise OSError when what the descriptor stands for lies on procfs, sysfs or another window of the kernel.

    A link of the image can lead there, and a mount on /proc/<pid>/attr/exec or a folder made among cgroups would act
    on the runtime itself.
    """
    if syscalls.filesystem_magic(descriptor, path) in syscalls.KERNEL_MAGICS:
        raise OSError(errno.EXDEV, "leads to a file system of the kernel's own, such as /proc or /sys", path)


def _shorten(trail: list[int], length: int) -> None:
    while len(trail) > length:
        os.close(trail.pop())


def _read_up_to(descriptor: int, most: int) -> bytes:
    chunks = []
    while most > 0 and (chunk := os.read(descriptor, min(most, _CHUNK))):
        chunks.append(chunk)
        most -= len(chunk)
    return b"".join(chunks)


def _link_text(link: int) -> str:
    """The text of the link that the O_PATH descriptor stands for.

    The links of procfs that lead out of a root are told by their text: an absolute path, or `kind:[inode]`. Its
    honest ones (self, thread-self, mounts, net) are relative paths.
    """
    text = os.fsdecode(os.readlink(b"", dir_fd=link))
    if (text.startswith("/") or ":" in text) and syscalls.filesystem_magic(link, text) == syscalls.PROC_MAGIC:
        raise OSError(errno.ELOOP, "a magic link")
    return text
