"""Host files, folders and nodes, on their way from the host to their place in the container.

A tree is taken as a descriptor before the container's mount namespace is entered, and attached by descriptor, so no
path string of the host is resolved where the container could interfere, and none of the container's is resolved twice.
Kernels before 5.2 cannot detach a mount, nor can a user namespace without a mount namespace of its own: there a tree is
taken after entering and before any path of the container is touched, and on the old kernels bound by descriptor with
mount(2).
"""

from __future__ import annotations

import errno
import os
from stat import S_ISCHR, S_ISDIR, S_ISLNK, S_ISREG, S_ISSOCK

from nvct.errors import ContainerChanged, InjectionError, StaleInventory
from nvct.inject import syscalls
from nvct.inject.propagation import check_stays_inside, mount_id
from nvct.inject.rootfs import check_ordinary

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvct.inject.ledger import Ledger
    from nvct.inject.rootfs import ConfinedRoot

_ATTRIBUTES = {
    "ro": (syscalls.MOUNT_ATTR_RDONLY, syscalls.MS_RDONLY),
    "nosuid": (syscalls.MOUNT_ATTR_NOSUID, syscalls.MS_NOSUID),
    "nodev": (syscalls.MOUNT_ATTR_NODEV, syscalls.MS_NODEV),
    "noexec": (syscalls.MOUNT_ATTR_NOEXEC, syscalls.MS_NOEXEC),
}

_FLAGS = syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC

# Read-only, so that root in the container cannot change the owner or mode of the host's node; reading and writing the
# device itself is not concerned by that. `nodev` would forbid the very use of it.
DEVICE_OPTIONS = ("ro", "nosuid", "noexec")


class HostTree:
    """One file, folder, socket or node of the host. `source` is its path on the host, `options` as in MountEdit.

    `status` is that of the moment when it was taken: what it is, and which one, never changes.
    """

    def __init__(self, source: str, options: tuple[str, ...]) -> None:
        self.source = source
        self._options = [_ATTRIBUTES[option] for option in options if option in _ATTRIBUTES]
        self._lift_nodev = "nodev" not in options
        self._detached = False
        self._attached = False
        self._may_be_nodev = True
        self.descriptor = -1
        self.status: os.stat_result
        self._detach()

    def _detach(self) -> None:
        try:
            self.descriptor = syscalls.open_tree(self.source)
        except OSError as error:
            # EPERM: in a user namespace that has no mount namespace of its own nothing can be detached.
            if error.errno not in (errno.ENOSYS, errno.EPERM):
                raise
            return
        self._detached = True
        self._check_kind()
        self._set_attributes()

    def _check_kind(self) -> None:
        self.status = os.fstat(self.descriptor)
        check_source(self.status, self.source, writable=_ATTRIBUTES["ro"] not in self._options)

    def _set_attributes(self) -> None:
        wanted = sum(attribute for attribute, _ in self._options)
        lifted = syscalls.MOUNT_ATTR_NODEV if self._lift_nodev else 0
        try:
            syscalls.mount_setattr(self.descriptor, wanted, lifted, self.source)
            self._remount = False
            self._may_be_nodev = not lifted
        except OSError as error:
            if error.errno == errno.EPERM and lifted:  # locked by the user namespace outside of ours
                syscalls.mount_setattr(self.descriptor, wanted, 0, self.source)
                self._remount = False
            elif error.errno == errno.ENOSYS:
                self._remount = True  # 5.2 to 5.11: options can only be set once the mount is attached
            else:
                raise

    def open_inside(self) -> None:
        """Take the source after entering the container's mount namespace, where it could not be taken before."""
        if self._detached:
            return
        self._detach()
        if not self._detached:
            self.descriptor = os.open(self.source, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._check_kind()
            self._remount = True

    def attach(self, root: ConfinedRoot, target: Place, ledger: Ledger) -> None:
        """Mount it on the target, as often as asked; the ledger learns how to undo that."""
        if self._detached:
            mounted = syscalls.copy_mount(self.descriptor, self.source) if self._attached else self.descriptor
            syscalls.move_mount(mounted, target.descriptor, target.path)
            self._attached = True
            ledger.add(f"unmount {target.path}", lambda: _unmount(root, mounted, target.path))
        else:
            mounted = self._bind(root, target, ledger)
        if self._remount:
            self._set_flags(root, mounted, target.path)
        self._check_that_devices_work(mounted)

    def _bind(self, root: ConfinedRoot, target: Place, ledger: Ledger) -> int:
        _mount_by_descriptor(root, str(self.descriptor), target.descriptor, syscalls.MS_BIND, target.path)
        found: list[int] = []
        ledger.add(
            f"unmount {target.path}",
            lambda: _unmount(root, found[0] if found else self._found(root, target), target.path),
        )
        # Here the mount can be found by its name alone. An error in that, unlike others, is never passed over for an
        # optional part, since the container may have changed what was mounted: it must not start.
        try:
            found.append(self._found(root, target))
        except OSError as error:
            raise ContainerChanged(
                f"{target.path} was changed in the container while {self.source} was mounted on it: {error.strerror}"
            ) from None
        return found[0]

    def _found(self, root: ConfinedRoot, target: Place) -> int:
        """A descriptor of the mount that was made last, OSError where something else stands there."""
        mounted = target.look_again(root)
        if not same_file(os.fstat(mounted), self.status):
            raise OSError(errno.ESTALE, "something else stands there", target.path)
        return mounted

    def _set_flags(self, root: ConfinedRoot, mounted: int, path: str) -> None:
        """Add our options to those that the mount has: a user namespace may take none of them away (EPERM)."""
        kept = os.fstatvfs(mounted).f_flag & _FLAGS
        flags = syscalls.MS_REMOUNT | syscalls.MS_BIND | kept | sum(flag for _, flag in self._options)
        lifted = syscalls.MS_NODEV if self._lift_nodev else 0
        try:
            _mount_by_descriptor(root, "", mounted, flags & ~lifted, path)
        except OSError as error:
            if error.errno != errno.EPERM or not kept & lifted:
                raise
            _mount_by_descriptor(root, "", mounted, flags, path)

    def _check_that_devices_work(self, mounted: int) -> None:
        if self._may_be_nodev and S_ISCHR(self.status.st_mode) and os.fstatvfs(mounted).f_flag & syscalls.MS_NODEV:
            raise InjectionError(
                f"{self.source} lies on a file system that is mounted nodev, which cannot be lifted in a user "
                "namespace: have root mount it with `dev`, or let `dev_root` in nvct's settings name another place"
            )


def taken(source: str, options: tuple[str, ...]) -> HostTree:
    """The tree of a source that the edits need. Raises StaleInventory when it is no longer on the host."""
    try:
        return HostTree(source, options)
    except FileNotFoundError as error:
        raise StaleInventory(f"{source} is gone ({error.strerror})") from None


def check_source(status: os.stat_result, source: str, writable: bool) -> None:
    """Raise OSError when what stands at `source` on the host, itself and not what it leads to, must not be mounted.

    Discovery has resolved links and looked who owns what; what has become a link since, in a folder that others can
    write to, would give away whatever it leads to. What is writable must still be a socket or root's folder.
    """
    if S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "has become a link", source)
    if writable and not S_ISSOCK(status.st_mode) and not (S_ISDIR(status.st_mode) and status.st_uid == 0):
        raise OSError(errno.EPERM, "is neither a socket nor a folder of root's", source)


class Place:
    """Where something is to be mounted in the container: `descriptor` is what stands there, in folder `parent` as
    `name`.
    """

    def __init__(self, path: str, descriptor: int, parent: int, name: str) -> None:
        self.path = path
        self.descriptor = descriptor
        self.parent = parent
        self.name = name

    def look_again(self, root: ConfinedRoot) -> int:
        """A descriptor of what stands there now: what has been mounted on it."""
        if S_ISLNK(os.stat(self.name, dir_fd=self.parent, follow_symlinks=False).st_mode):
            return root.open(self.path)
        return os.open(self.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.parent)


class Places:
    """Finds, and where they are missing makes, the places to mount on. Each folder is resolved once.

    `shared` are the container's `propagation.shared_mounts`.
    """

    def __init__(self, root: ConfinedRoot, ledger: Ledger, shared: frozenset[str]) -> None:
        self.root = root
        self.shared = shared
        self._ledger = ledger
        self._folders: dict[str, int] = {}
        self._ordinary: set[int] = set()  # file systems known not to be the kernel's own, by st_dev

    def folder(self, path: str) -> int:
        """A descriptor of the folder, made where it is missing; held until the end."""
        if path not in self._folders:
            self._folders[path] = self.root.folder(path, self._made_folder)
        return self._folders[path]

    def _made_folder(self, parent: int, name: str) -> None:
        self._ledger.add(f"remove folder {name}", lambda: os.rmdir(name, dir_fd=parent))

    def place(self, path: str, is_folder: bool) -> Place:
        """The place at `path` for a folder or for anything else; an empty one is made where nothing stands."""
        folder, name = path.rsplit("/", 1)
        parent = self.folder(folder or "/")
        try:
            found = self._made(parent, name, is_folder)
        except FileExistsError:
            found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        status = os.fstat(found)
        if S_ISLNK(status.st_mode):
            os.close(found)
            found = self._behind_link(path, parent, name, is_folder)
            status = os.fstat(found)
        if S_ISDIR(status.st_mode) != is_folder:
            wanted, there = ("a folder", "a file") if is_folder else ("a file", "a folder")
            raise InjectionError(
                f"{path} is to be {wanted}, but the container has {there} there: remove it from the image"
            )
        if status.st_dev not in self._ordinary:
            check_ordinary(found, path)
            self._ordinary.add(status.st_dev)
        return Place(path, found, parent, name)

    def _behind_link(self, path: str, parent: int, name: str, is_folder: bool) -> int:
        """What the link leads to; one that leads nowhere, as of another driver's file, makes room."""
        try:
            return self.root.open(path)
        except FileNotFoundError:
            text = os.readlink(name, dir_fd=parent)
        os.unlink(name, dir_fd=parent)
        self._ledger.add(f"restore {path}", lambda: os.symlink(text, name, dir_fd=parent))
        return self._made(parent, name, is_folder)

    def _made(self, parent: int, name: str, is_folder: bool) -> int:
        """An empty place where nothing stands. Raises FileExistsError, also where nothing could be made."""
        if is_folder:
            os.mkdir(name, 0o755, dir_fd=parent)
            self._ledger.add(f"remove folder {name}", lambda: os.rmdir(name, dir_fd=parent))
            return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        made = os.open(name, flags, 0o644, dir_fd=parent)
        self._ledger.add(f"remove {name}", lambda: os.unlink(name, dir_fd=parent))
        return made


def attach(tree: HostTree, path: str, places: Places, ledger: Ledger) -> None:
    """Mount the tree at `path` of the container, unless it is there already."""
    status = tree.status
    target = places.place(path, S_ISDIR(status.st_mode))
    there = os.fstat(target.descriptor)
    if not same_file(there, status):
        if S_ISCHR(there.st_mode):
            raise InjectionError(
                f"{path} is the device {_numbers(there)} in the container, {tree.source} is {_numbers(status)}: "
                "remove the node from the image or from the container's device list"
            )
        check_stays_inside(target.descriptor, path, places.root, places.shared)
        tree.attach(places.root, target, ledger)
    os.close(target.descriptor)


def attach_again(mounted: str, path: str, places: Places, ledger: Ledger) -> bool:
    """Mount at `path` too what the runtime has mounted at `mounted` for a spec; False when no file is mounted there."""
    root = places.root
    try:
        source = root.open(mounted)
    except FileNotFoundError:
        return False
    folder = places.folder(os.path.dirname(mounted))
    if mount_id(source, root) == mount_id(folder, root) or not S_ISREG(os.fstat(source).st_mode):
        os.close(source)
        return False
    target = places.place(path, is_folder=False)
    if not same_file(os.fstat(source), os.fstat(target.descriptor)):
        check_stays_inside(target.descriptor, path, root, places.shared)
        copy = syscalls.copy_mount(source, mounted)
        syscalls.move_mount(copy, target.descriptor, path)
        ledger.add(f"unmount {path}", lambda: _unmount(root, copy, path))
    os.close(target.descriptor)
    os.close(source)
    return True


def same_file(one: os.stat_result, other: os.stat_result) -> bool:
    """Whether two descriptors stand for one file, or for two nodes of one device."""
    if S_ISCHR(one.st_mode) and S_ISCHR(other.st_mode):
        return one.st_rdev == other.st_rdev
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def check_device(tree: HostTree, major: int, minor: int) -> None:
    """Raise InjectionError unless the tree is the character device major:minor."""
    status = tree.status
    if not S_ISCHR(status.st_mode):
        raise InjectionError(f"{tree.source} is no character device")
    if (os.major(status.st_rdev), os.minor(status.st_rdev)) != (major, minor):
        raise InjectionError(f"{tree.source} is the device {_numbers(status)}, expected {major}:{minor}")


def _numbers(status: os.stat_result) -> str:
    return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"


def _mount_by_descriptor(root: ConfinedRoot, source: str, target: int, flags: int, about: str) -> None:
    """mount(2) knows paths only: descriptors are named as entries of this process's own /proc/self/fd, held open."""
    os.fchdir(root.own_descriptors)
    syscalls.mount(source, str(target), "", flags, "", about)


def _unmount(root: ConfinedRoot, mounted: int, about: str) -> None:
    os.fchdir(root.own_descriptors)
    syscalls.umount(str(mounted), about)
