"""Carries Edits out in a live container that has not started its program yet: all of them, or none."""

from __future__ import annotations

import errno
import os
import time
from _signal import (  # type: ignore[import-not-found]  # `signal` takes 3 ms to import
    SIG_BLOCK,
    SIGHUP,
    SIGINT,
    SIGTERM,
    pthread_sigmask,
)
from fcntl import LOCK_EX, LOCK_NB, flock

from nvct.errors import InjectionError, NvctError, StaleInventory
from nvct.inject import syscalls
from nvct.inject.cgroup import DeviceCgroup, RulesOutOfReach
from nvct.inject.files import write_file
from nvct.inject.ledger import Ledger
from nvct.inject.links import make_link, remove_stale
from nvct.inject.loader import update_loader_cache
from nvct.inject.mounts import DEVICE_OPTIONS, HostTree, Places, attach, attach_again, check_device, taken
from nvct.inject.procmask import ProcMask
from nvct.inject.propagation import shared_mounts
from nvct.inject.rootfs import birth

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvct.inject.rootfs import ConfinedRoot
    from nvct.model import DeviceEdit, Edits, FileEdit, LinkEdit, MountEdit


PATIENCE_S = 10

# What runtimes and terminals send to end a hook: it takes effect when all is done or undone, some milliseconds later.
_ENDING = (SIGHUP, SIGINT, SIGTERM)


def inject(edits: Edits, pid: int, root: ConfinedRoot, architecture: str, cgroups: bool = True) -> tuple[str, ...]:
    """Carry the edits out in the container of process `pid`, whose root folder is `root`. Returns warnings.

    Leaves the calling process, which must have one thread, in the container's mount namespace, with the signals that
    end programs blocked. When a required step fails, everything done before it is undone and InjectionError says which
    step it was. StaleInventory: what the edits name is no longer on the host; nothing has been done, and the caller
    may go on.
    """
    os.umask(0o022)
    carrier = _Carrier(edits, pid, root, architecture, cgroups)
    try:
        carrier.take()
        carrier.wait_for_others()
        pthread_sigmask(SIG_BLOCK, _ENDING)
        carrier.enter()
        carrier.furnish()
    except StaleInventory:
        raise
    except Exception as error:  # whatever it was, a memory that ran out or a mistake of ours: nothing may stay
        failures = carrier.ledger.roll_back()
        raise InjectionError(_failure(carrier.step, error, failures)) from error
    return tuple(carrier.warnings)


def _failure(step: str, error: Exception, failures: tuple[str, ...]) -> str:
    what = str(error)
    if isinstance(error, OSError):
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        what = f"{error.filename or 'no path'}: {error.strerror} ({name})"
    elif not isinstance(error, NvctError):
        what = f"{type(error).__name__} {error}".strip()
    undone = "everything done before was undone"
    if failures:
        undone = f"NOT undone, remove the container: {'; '.join(failures)}"
    return f"{step}: {what}; {undone}"


class _Carrier:
    """The steps, in their order. `step` says which one is being done."""

    def __init__(self, edits: Edits, pid: int, root: ConfinedRoot, architecture: str, cgroups: bool) -> None:
        self.edits = edits
        self.step = "start"
        self.ledger = Ledger()
        self.warnings: list[str] = []
        self._pid = pid
        self._root = root
        self._architecture = architecture
        self._with_cgroups = cgroups and bool(edits.devices)
        self._devices: list[tuple[DeviceEdit, HostTree]] = []
        self._mounts: list[tuple[MountEdit, HostTree]] = []
        self._by_target: dict[str, HostTree] = {}

    def take(self) -> None:
        """On the host's side: take all that comes from the host as descriptors, before any of the container's
        paths matter.
        """
        self.step = "take device nodes from the host"
        for device in self.edits.devices:
            self._devices.append((device, taken(device.source, DEVICE_OPTIONS)))
        self.step = "take driver files from the host"
        for mount in self.edits.mounts:
            self._take_mount(mount)
        self.step = "open the container's namespaces"
        owner = os.stat(f"/proc/{self._pid}")
        self._owner = owner.st_uid, owner.st_gid
        self._places = Places(self._root, self.ledger, shared_mounts(self._pid))
        self._namespace = os.open(f"/proc/{self._pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self.step = "read /proc/driver/nvidia"
        self._mask = ProcMask(self.edits.proc, self._owner) if self.edits.proc else None
        self.step = "open the container's device cgroup"
        self._cgroup = self._open_cgroup() if self._with_cgroups else None
        # All that was opened by its pid is the container's if its process is still the one whose root was opened first.
        if self._root.born and birth(self._pid) != self._root.born:
            raise InjectionError(f"process {self._pid} has ended, and its number is another's: the container is gone")

    def _open_cgroup(self) -> DeviceCgroup | None:
        try:
            return DeviceCgroup.of(self._pid)
        except RulesOutOfReach as error:
            self.warnings.append(str(error))
            return None

    def _take_mount(self, mount: MountEdit) -> None:
        if mount.required:
            self._mounts.append((mount, taken(mount.source, mount.options)))
            return
        try:
            self._mounts.append((mount, HostTree(mount.source, mount.options)))
        except OSError as error:
            self.warnings.append(f"{mount.source}: {error.strerror}, left out ({mount.why})")

    def wait_for_others(self) -> None:
        """One hook at a time in one root folder: of two, one would take the other's mounts for its own."""
        self.step = "wait for other hooks in this container"
        self._own = self._root.reopen(self._root.descriptor, os.O_RDONLY | os.O_DIRECTORY)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                flock(self._own, LOCK_EX | LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InjectionError(
                        f"another process has held the container's root folder locked for {PATIENCE_S} s: end it"
                    ) from None
            time.sleep(0.01)

    def enter(self) -> None:
        self.step = "enter the container's mount namespace"
        syscalls.setns(self._namespace, syscalls.CLONE_NEWNS, f"/proc/{self._pid}/ns/mnt")
        for _, tree in (*self._devices, *self._mounts):
            tree.open_inside()
        if self._mask:
            self._mask.open_inside()
        # Only now are all nodes descriptors on old kernels too; still nothing has been done to the container.
        for device, tree in self._devices:
            check_device(tree, device.major, device.minor)
        # In a user namespace nothing can be created by an id that the container's root does not map. Its root may not
        # write wherever the host's may, such as in a volume of the host's: from here on neither may we.
        syscalls.set_file_owner(*self._owner)

    def furnish(self) -> None:
        self.step = "remove what an earlier start left"
        remove_stale(self.edits.stale, self._wanted_paths(), self._root, self.ledger)
        self.step = "mount device nodes"
        for device, tree in self._devices:
            attach(tree, device.path, self._places, self.ledger)
        self.step = "mount driver files"
        self._attach_mounts()
        self.step = "make links"
        for link in self.edits.links:
            self._make_link(link)
        self.step = "write files"
        for file in self.edits.files:
            self._write_file(file)
        self.step = "cover /proc/driver/nvidia"
        if self._mask and not self._mask.attach(self._places, self.ledger):
            self.warnings.append("the container has no /proc/driver/nvidia: nothing to cover there")
        if self.edits.loader_cache:
            self.step = "write the loader cache"
            self.warnings += update_loader_cache(
                self.edits.loader_cache, self.edits.stale, self._architecture, self._places, self.ledger
            )
        if self._cgroup:
            self.step = "allow devices in the container's cgroup"
            self._allow_devices(self._cgroup)

    def _allow_devices(self, cgroup: DeviceCgroup) -> None:
        numbers = [(device.major, device.minor) for device in self.edits.devices]
        try:
            self.ledger.add("take back device rules", cgroup.allow(numbers))
        except RulesOutOfReach as error:
            self.warnings.append(str(error))

    def _wanted_paths(self) -> set[str]:
        return {mount.target for mount in self.edits.mounts} | {link.path for link in self.edits.links}

    def _attach_mounts(self) -> None:
        read_only = []
        for mount, tree in self._mounts:
            steps = len(self.ledger)
            try:
                attach(tree, mount.target, self._places, self.ledger)
                self._by_target[mount.target] = tree
            except (OSError, InjectionError) as error:
                if not mount.required:
                    self.ledger.roll_back(steps)
                    self.warnings.append(f"{mount.target}: {error}, left out ({mount.why})")
                elif isinstance(error, OSError) and error.errno == errno.EROFS:
                    read_only.append(mount.target)
                else:
                    raise
        if read_only:
            raise InjectionError(
                f"the container's root file system is read-only and has no files to mount on at "
                f"{', '.join(read_only)}: add empty files there to the image, or let it be writable at start"
            )

    def _write_file(self, file: FileEdit) -> None:
        """Never fails a start: a read-only folder, or whatever else the image has there, costs the file only."""
        steps = len(self.ledger)
        try:
            write_file(file, self._places, self.ledger)
        except (OSError, InjectionError) as error:
            self.ledger.roll_back(steps)
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self.warnings.append(f"{file.path}: {reason}, left out ({file.why})")

    def _make_link(self, link: LinkEdit) -> None:
        """Where the image has a regular file of the link's name, the library is mounted on that instead: the image
        is kept.
        """
        if make_link(link, self._places, self.ledger):
            return
        library = self._end_of(link)
        tree = self._by_target.get(library)
        if tree:
            attach(tree, link.path, self._places, self.ledger)
        elif not attach_again(library, link.path, self._places, self.ledger):
            raise InjectionError(
                f"{link.path} is to be a link to {link.target}, but the image has a file there: remove it"
            )

    def _end_of(self, link: LinkEdit) -> str:
        folder = link.path.rsplit("/", 1)[0]
        links = {other.path: other.target for other in self.edits.links}
        path = f"{folder}/{link.target}"
        while path in links:
            path = f"{folder}/{links[path]}"
        return path
