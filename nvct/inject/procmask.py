"""The container's /proc/driver/nvidia: a small tmpfs that shows the visible GPUs and no others.

The kernel's own folder tells of every GPU of the node, and its `params` tells the driver's libraries to make device
nodes themselves. The texts are copied, GPU folders and capability files bound from the host.
"""

from __future__ import annotations

import errno
import os

from nvct.errors import ContainerChanged
from nvct.inject import syscalls
from nvct.inject.mounts import HostTree, Place
from nvct.inject.propagation import check_stays_inside

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvct.inject.ledger import Ledger
    from nvct.inject.mounts import Places
    from nvct.inject.rootfs import ConfinedRoot
    from nvct.model import ProcEdit

TARGET = "/proc/driver/nvidia"

_TREE_OPTIONS = ("ro", "nosuid", "nodev", "noexec")
_MOST_TEXT = 1 << 16


class ProcMask:
    """Built on the host's side before the container is entered, attached inside."""

    def __init__(self, edit: ProcEdit) -> None:
        self.texts = {
            name: _text(f"{edit.source}/{name}") for name in edit.files if os.path.exists(f"{edit.source}/{name}")
        }
        names = [f"gpus/{name}" for name in edit.gpus] + [f"capabilities/{name}" for name in edit.capabilities]
        self.trees = {name: HostTree(f"{edit.source}/{name}", _TREE_OPTIONS) for name in names}
        self._folders = {f"gpus/{name}" for name in edit.gpus}
        try:
            self._tmpfs = syscalls.new_tmpfs("0555", TARGET)
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
            self._tmpfs = -1
        else:
            self._fill(self._tmpfs)

    def _fill(self, tmpfs: int) -> None:
        for name, text in self.texts.items():
            _write(tmpfs, name, text)
        os.mkdir("gpus", 0o555, dir_fd=tmpfs)  # empty when no GPU is visible, as a node without one has it
        for name in self.trees:
            folder = name if name in self._folders else os.path.dirname(name)
            _make_folders(tmpfs, folder)
            if name not in self._folders:
                _write(tmpfs, name, b"")

    def open_inside(self) -> None:
        for tree in self.trees.values():
            tree.open_inside()

    def attach(self, places: Places, ledger: Ledger) -> bool:
        """Put it over the container's /proc/driver/nvidia. False, and nothing done, where the container has no
        such folder.
        """
        root = places.root
        try:
            there = root.open(TARGET, os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError:
            return False
        if not self._is_shown_by(root, there):
            check_stays_inside(there, TARGET, root, places.shared)
            tmpfs = self._cover(root, there, ledger)
            for name, tree in self.trees.items():
                self._attach_tree(root, tmpfs, name, tree, ledger)
            _make_read_only(root, tmpfs)
        os.close(there)
        return True

    def _cover(self, root: ConfinedRoot, there: int, ledger: Ledger) -> int:
        if self._tmpfs >= 0:
            syscalls.move_mount(self._tmpfs, there, TARGET)
            tmpfs = self._tmpfs
        else:
            os.fchdir(root.own_descriptors)
            flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
            syscalls.mount("tmpfs", str(there), "tmpfs", flags, "mode=0555", TARGET)
            tmpfs = root.open(TARGET, os.O_PATH | os.O_DIRECTORY)
            if syscalls.filesystem_magic(tmpfs, TARGET) != syscalls.TMPFS_MAGIC:
                raise ContainerChanged(f"{TARGET} was changed in the container while it was covered")
        ledger.add(f"uncover {TARGET}", lambda: _uncover(root, tmpfs))
        if self._tmpfs < 0:
            self._fill(tmpfs)
        return tmpfs

    def _attach_tree(self, root: ConfinedRoot, tmpfs: int, name: str, tree: HostTree, ledger: Ledger) -> None:
        folder, _, last = name.rpartition("/")
        parent = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=tmpfs)
        target = os.open(last, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        # The tmpfs goes as a whole when this is undone: what is mounted on it goes with it.
        tree.attach(root, Place(f"{TARGET}/{name}", target, parent, last), ledger)
        os.close(target)
        os.close(parent)

    def _is_shown_by(self, root: ConfinedRoot, there: int) -> bool:
        """Whether a mask with just this content stands there: an earlier run's."""
        if syscalls.filesystem_magic(there, TARGET) != syscalls.TMPFS_MAGIC:
            return False
        found: dict[str, bytes] = {}
        _collect(root, there, "", self._folders, found)
        return found.keys() == self.texts.keys() | self.trees.keys() and all(
            found[name] == text for name, text in self.texts.items()
        )


def _text(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(descriptor, _MOST_TEXT)
    finally:
        os.close(descriptor)
    return text.replace(b"ModifyDeviceFiles: 1", b"ModifyDeviceFiles: 0")


def _write(tmpfs: int, name: str, text: bytes) -> None:
    descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o444, dir_fd=tmpfs)
    os.write(descriptor, text)
    os.close(descriptor)


def _make_folders(tmpfs: int, path: str) -> None:
    parts = path.split("/")
    for depth in range(1, len(parts) + 1):
        try:
            os.mkdir("/".join(parts[:depth]), 0o555, dir_fd=tmpfs)
        except FileExistsError:
            continue


def _collect(root: ConfinedRoot, folder: int, prefix: str, opaque: set[str], found: dict[str, bytes]) -> None:
    """Gather the files below the folder and their texts; `opaque` folders and capability files count by name only."""
    listing = root.reopen(folder, os.O_RDONLY | os.O_DIRECTORY)
    for name in os.listdir(listing):
        path = prefix + name
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        if path in opaque or path.startswith("capabilities/") and path.endswith("/access"):
            found[path] = b""
        elif os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode & 0o170000 == 0o040000:
            _collect(root, descriptor, path + "/", opaque, found)
        else:
            found[path] = root.read(descriptor, path, _MOST_TEXT)
        os.close(descriptor)
    os.close(listing)


def _make_read_only(root: ConfinedRoot, tmpfs: int) -> None:
    try:
        syscalls.mount_setattr(tmpfs, syscalls.MOUNT_ATTR_RDONLY, 0, TARGET)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        os.fchdir(root.own_descriptors)
        flags = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | syscalls.MS_NOSUID
        syscalls.mount("", str(tmpfs), "", flags | syscalls.MS_NODEV | syscalls.MS_NOEXEC, "", TARGET)


def _uncover(root: ConfinedRoot, tmpfs: int) -> None:
    os.fchdir(root.own_descriptors)
    syscalls.umount(str(tmpfs), TARGET)
