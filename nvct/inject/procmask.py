"""The container's /proc/driver/nvidia: a small tmpfs that shows the visible GPUs and no others.

The kernel's own folder tells of every GPU of the node, and its `params` tells the driver's libraries to make device
nodes themselves. The texts are copied, GPU folders and capability files bound from the host.
"""

from __future__ import annotations

import errno
import os
from stat import S_ISDIR

from nvct.errors import InjectionError
from nvct.inject import syscalls
from nvct.inject.mounts import Place, taken
from nvct.inject.propagation import check_stays_inside

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvct.inject.ledger import Ledger
    from nvct.inject.mounts import HostTree, Places
    from nvct.inject.rootfs import ConfinedRoot
    from nvct.model import ProcEdit

TARGET = "/proc/driver/nvidia"

_TREE_OPTIONS = ("ro", "nosuid", "nodev", "noexec")
_MOST_TEXT = 1 << 16


class ProcMask:
    """What it shows is taken on the host's side before the container is entered; it is made and attached inside.

    `owner`, the ids of the container's root, owns it: a container in a user namespace can make nothing of other ids.
    Raises StaleInventory when a GPU or capability is gone.
    """

    def __init__(self, edit: ProcEdit, owner: tuple[int, int]) -> None:
        # Writable for its owner, who fills it; the mount becomes read-only in the end.
        self._options = {"mode": "0755", "uid": str(owner[0]), "gid": str(owner[1])}
        texts = {name: _text(f"{edit.source}/{name}") for name in edit.files}
        self.texts = {name: text for name, text in texts.items() if text is not None}
        names = [f"gpus/{name}" for name in edit.gpus] + [f"capabilities/{name}" for name in edit.capabilities]
        self.trees = {name: taken(f"{edit.source}/{name}", _TREE_OPTIONS) for name in names}
        self._folders = {f"gpus/{name}" for name in edit.gpus}

    def _fill(self, tmpfs: int) -> None:
        for name, text in self.texts.items():
            _write(tmpfs, name, text)
        made = {""}
        _make_folders(tmpfs, "gpus", made)  # empty when no GPU is visible, as a node without one has it
        for name in self.trees:
            _make_folders(tmpfs, name if name in self._folders else name.rpartition("/")[0], made)
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
            try:
                self._show(root, there, ledger)
            except OSError as error:
                raise InjectionError(
                    f"{TARGET}: {error.strerror} ({errno.errorcode.get(error.errno or 0)}); where mounts below /proc "
                    "are refused, set `mask_proc: false` in nvct's settings: the container then sees every GPU there"
                ) from error
        os.close(there)
        return True

    def _show(self, root: ConfinedRoot, there: int, ledger: Ledger) -> None:
        tmpfs = self._cover(root, there, ledger)
        for name, tree in self.trees.items():
            self._attach_tree(root, tmpfs, name, tree, ledger)
        _make_read_only(root, tmpfs)

    def _cover(self, root: ConfinedRoot, there: int, ledger: Ledger) -> int:
        """Put the tmpfs there, filled before it is attached, where the kernel can do that."""
        try:
            tmpfs = syscalls.new_tmpfs(self._options, TARGET)
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
            tmpfs = self._mount(root, there, ledger)
            self._fill(tmpfs)
        else:
            self._fill(tmpfs)
            syscalls.move_mount(tmpfs, there, TARGET)
            ledger.add(f"uncover {TARGET}", lambda: _uncover(root, tmpfs))
        return tmpfs

    def _mount(self, root: ConfinedRoot, there: int, ledger: Ledger) -> int:
        os.fchdir(root.own_descriptors)
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
        options = ",".join(f"{name}={value}" for name, value in self._options.items())
        syscalls.mount("tmpfs", str(there), "tmpfs", flags, options, TARGET)
        found: list[int] = []
        ledger.add(f"uncover {TARGET}", lambda: _uncover(root, found[0] if found else _new_mount(root)))
        found.append(_new_mount(root))
        return found[0]

    def _attach_tree(self, root: ConfinedRoot, tmpfs: int, name: str, tree: HostTree, ledger: Ledger) -> None:
        # All on the way is of our own making, and nobody else can change it.
        target = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=tmpfs)
        # The tmpfs goes as a whole when this is undone: what is mounted on it goes with it.
        tree.attach(root, Place(f"{TARGET}/{name}", target, tmpfs, name), ledger)
        os.close(target)

    def _is_shown_by(self, root: ConfinedRoot, there: int) -> bool:
        """Whether a mask with just this content stands there: an earlier run's."""
        if syscalls.filesystem_magic(there, TARGET) != syscalls.TMPFS_MAGIC:
            return False
        found: dict[str, bytes] = {}
        _collect(root, there, "", self._folders, found)
        return found.keys() == self.texts.keys() | self.trees.keys() and all(
            found[name] == text for name, text in self.texts.items()
        )


def _new_mount(root: ConfinedRoot) -> int:
    """The tmpfs that was mounted last, which can be found by its name alone."""
    tmpfs = root.open(TARGET, os.O_PATH | os.O_DIRECTORY)
    if syscalls.filesystem_magic(tmpfs, TARGET) != syscalls.TMPFS_MAGIC:
        raise OSError(errno.ESTALE, "was changed in the container while it was covered", TARGET)
    return tmpfs


def _text(path: str) -> bytes | None:
    """What a file of the host's says to a container; None where this driver has no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        text = os.read(descriptor, _MOST_TEXT)
    finally:
        os.close(descriptor)
    return text.replace(b"ModifyDeviceFiles: 1", b"ModifyDeviceFiles: 0")


def _write(tmpfs: int, name: str, text: bytes) -> None:
    descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o444, dir_fd=tmpfs)
    os.write(descriptor, text)
    os.close(descriptor)


def _make_folders(tmpfs: int, path: str, made: set[str]) -> None:
    if path not in made:
        _make_folders(tmpfs, path.rpartition("/")[0], made)
        os.mkdir(path, 0o755, dir_fd=tmpfs)
        made.add(path)


def _collect(root: ConfinedRoot, folder: int, prefix: str, opaque: set[str], found: dict[str, bytes]) -> None:
    """Gather the files below the folder and their texts; `opaque` folders and capability files count by name only."""
    listing = root.reopen(folder, os.O_RDONLY | os.O_DIRECTORY)
    for name in os.listdir(listing):
        path = prefix + name
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        is_folder = S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        if path in opaque or path.startswith("capabilities/") and not is_folder:
            found[path] = b""
        elif is_folder:
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
