"""The nouns: what a node has (Inventory), what a container asks for (Request), what must change in it (Edits).

All are immutable values. This module imports nothing but the record decorator, since the hook imports it on every
container start. Paths in it are absolute and written as seen below the root they belong to: a driver file's `path`
lies below the driver root, a device node's below the device root, an edit's `target` below the container's root.
"""

from __future__ import annotations

from nvct.record import record

# Raised when the meaning or the shape of a saved inventory changes; another version is refused, not guessed at.
SCHEMA = 1

# Kinds of driver files.
LIBRARY = "library"
LIBRARY32 = "library32"
BINARY = "binary"
FIRMWARE = "firmware"
SOCKET = "socket"
CONFIG = "config"
MODULE = "module"

# Kinds of nodes: the usual driver, and the Windows Subsystem for Linux, whose driver is the Windows one behind
# /dev/dxg.
NATIVE = "native"
WSL = "wsl"


@record
class MigDevice:
    """One compute instance of one GPU instance: what CUDA sees as a device.

    `index` is the N of `gpu:N` (NVML's index below its GPU). `gi_minor` and `ci_minor` are the minors of the two
    capability nodes, /dev/nvidia-caps/nvidia-cap<minor>, read from the capability files under /proc/driver/nvidia.
    """

    index: int
    uuid: str
    profile: str
    gi: int
    ci: int
    memory_mib: int
    gi_minor: int
    ci_minor: int


@record
class Gpu:
    """One physical GPU. `bus_id` is NVML's form, 8 hex digits of PCI domain: `00000000:07:00.0`.

    `minor` numbers its node (/dev/nvidia<minor>) and its capability folder (gpu<minor>); `index` is NVML's order.
    They are often equal and must never be taken for one another. `drm_nodes` are /dev/dri/card<N> and renderD<N>.
    """

    index: int
    uuid: str
    minor: int
    bus_id: str
    model: str
    brand: str
    compute_capability: str
    memory_mib: int
    mig_enabled: bool = False
    mig_devices: tuple[MigDevice, ...] = ()
    drm_nodes: tuple[DeviceNode, ...] = ()

    @property
    def proc_name(self) -> str:
        """The name of its folder under /proc/driver/nvidia/gpus: the domain has 4 digits there unless it needs more."""
        domain, rest = self.bus_id.lower().split(":", 1)
        return f"{int(domain, 16):04x}:{rest}"


@record
class DriverFile:
    """One file of the driver.

    `kind` is LIBRARY, LIBRARY32, BINARY, FIRMWARE, SOCKET, CONFIG (an ICD or application profile: `target` says where
    programs look for it) or MODULE (of an X server). `capability` is the driver capability that brings it
    (utility, compute, video, graphics, ngx); compat32 is no class of its own but admits the kind LIBRARY32. `path` has
    its links resolved inside the driver root. `soname` and `links` are of libraries only: DT_SONAME, and the
    unversioned development name (`libcuda.so`) where the host has it.
    """

    kind: str
    capability: str
    path: str
    soname: str = ""
    links: tuple[str, ...] = ()
    target: str = ""


@record
class DeviceNode:
    """A character device by its path in the container."""

    path: str
    major: int
    minor: int


@record
class Roots:
    """Where this node's parts are seen from here. Absolute; "/" on most machines.

    `root` is the driver root (libraries, binaries, firmware), `dev_root` holds dev/, `proc_root` is a procfs.
    """

    root: str = "/"
    dev_root: str = "/"
    proc_root: str = "/proc"


@record
class Inventory:
    """Everything that this node has for GPU containers.

    `majors` are the lines of /proc/devices whose name begins with "nvidia": name to number. `nodes` are the control
    nodes that exist: nvidiactl, nvidia-uvm, nvidia-uvm-tools, nvidia-modeset. `extra_nodes` are those that a container
    gets only when it asks by name: gds, mofed, gdrcopy, nvswitch, imex. `mig_minors` are the two capabilities that no
    MIG device has: config and monitor. `kind` is NATIVE or WSL. `missing` says, a sentence each, what a complete
    driver would have and this node has not.
    `architecture` is the machine's (`x86_64`, `aarch64`). `cuda_version` is the newest CUDA of the driver: "12.4".
    """

    driver_version: str
    cuda_version: str
    architecture: str
    roots: Roots
    majors: dict[str, int]
    gpus: tuple[Gpu, ...] = ()
    nodes: tuple[DeviceNode, ...] = ()
    files: tuple[DriverFile, ...] = ()
    missing: tuple[str, ...] = ()
    extra_nodes: dict[str, tuple[DeviceNode, ...]] = {}
    mig_minors: dict[str, int] = {}
    kind: str = NATIVE


@record
class CompatFolder:
    """The image's own CUDA forward compatibility libraries: a newer driver's CUDA, meant for an older kernel module.

    `path` is their folder as the container names it, `names` the libraries in it (regular files, links followed inside
    the container's root). `note` is the JSON text in which its libcuda says which drivers it fits, "" where it has
    none.
    """

    path: str
    names: tuple[str, ...]
    note: str = ""


@record
class ContainerRoot:
    """What the container's root file system looks like, as far as a plan depends on it.

    `debian`: it has /etc/debian_version. `lib32`: it has /usr/lib32. `lib_is_lib64`: its /usr/lib and /usr/lib64 are
    one folder. `compat`: its forward compatibility libraries, None where it has none. `musl`: the folders that its
    musl loader searches, the text of /etc/ld-musl-<architecture>.path or musl's own list where it has no such file;
    None where it has no such loader. `architecture`: of its programs (`x86_64`, `aarch64`), "" where that is not known.
    """

    debian: bool = True
    lib32: bool = False
    lib_is_lib64: bool = False
    compat: CompatFolder | None = None
    musl: str | None = None
    architecture: str = ""


@record
class Ask:
    """Values asked for in one place. `source` names it in words for messages: "env NVIDIA_VISIBLE_DEVICES"."""

    source: str
    tokens: tuple[str, ...]


@record
class Request:
    """Everything that a container asked for, by the place where it asked. What counts of it is for plan to say.

    Tokens stand as they were written, in their order, without blanks and empty ones; an Ask without tokens is a
    variable that is set and empty, None one that is unset.

    `annotations`: by key, the annotations in which engines are asked for CDI devices; those of a runtime's spec only.
    `devices`: NVIDIA_VISIBLE_DEVICES. `swarm`: by name, the DOCKER_RESOURCE_* variables, in which docker swarm says
    which of a node's resources a task reserved. `mount_list`: devices listed as mounts of /dev/null; `imex_mounts`:
    IMEX channels listed so. `capabilities`: NVIDIA_DRIVER_CAPABILITIES. `legacy_cuda`: the CUDA_VERSION of an image
    from before there was NVIDIA_REQUIRE_CUDA, else "". `requirements`: NVIDIA_REQUIRE_* by name, the whole expression
    as the one token; `requirements_disabled`: NVIDIA_DISABLE_REQUIRE is true. `mig_config`, `mig_monitor`,
    `imex_channels`: NVIDIA_MIG_CONFIG_DEVICES, NVIDIA_MIG_MONITOR_DEVICES, NVIDIA_IMEX_CHANNELS. `extras`: NVIDIA_GDS
    and its like, by their names in Inventory.extra_nodes. `privileged`: it has CAP_SYS_ADMIN.
    """

    devices: Ask | None = None
    swarm: dict[str, Ask] = {}
    mount_list: Ask | None = None
    imex_mounts: Ask | None = None
    capabilities: Ask | None = None
    legacy_cuda: str = ""
    requirements: tuple[Ask, ...] = ()
    requirements_disabled: bool = False
    mig_config: Ask | None = None
    mig_monitor: Ask | None = None
    imex_channels: Ask | None = None
    extras: dict[str, Ask] = {}
    privileged: bool = False
    container: ContainerRoot = ContainerRoot()
    annotations: dict[str, Ask] = {}


@record
class DeviceEdit:
    """A device node for the container, and leave for it to read and write there. `source` is its path on this host."""

    path: str
    source: str
    major: int
    minor: int
    why: str


@record
class MountEdit:
    """A file, folder or socket of the host for the container. `options` are those of a bind mount: ro, nosuid, nodev,
    noexec, rw.

    A missing `source` or an unwritable `target` fails the start when `required`, else it is a warning.
    """

    source: str
    target: str
    options: tuple[str, ...]
    why: str
    required: bool = True


@record
class LinkEdit:
    """A symbolic link at `path`; `target` is its text, as relative as it is to stand there."""

    path: str
    target: str
    why: str


@record
class CacheEdit:
    """A line of the container's loader cache: programs that ask for `name` get `path`. `bits` is 64 or 32."""

    name: str
    path: str
    bits: int
    why: str


@record
class ProcEdit:
    """What the container sees of /proc/driver/nvidia: a small file system in place of the kernel's own.

    `source` is the folder on this host. `files` are copied (version, params, registry), params with
    `ModifyDeviceFiles: 0`, so that no program in the container makes nodes of its own. `gpus` (folders below gpus/) and
    `capabilities` (files below capabilities/) are bound from the host: only those that the container may use.
    """

    source: str
    files: tuple[str, ...]
    gpus: tuple[str, ...]
    capabilities: tuple[str, ...]
    why: str


@record
class FileEdit:
    """A small file that nvct writes in the container, `mode` in octal as a number. Optional: a failure is a warning."""

    path: str
    content: str
    mode: int
    why: str


@record
class LeftOut:
    """Something that the container might have expected and does not get."""

    what: str
    why: str


@record
class StaleName:
    """Names that an earlier start under another driver version may have left in a stopped container.

    In `folder`, an *empty* regular file whose name begins with `prefix`, a link of such a name that leads nowhere,
    and a loader cache entry of such a name whose file is gone are leftovers, unless these edits put them there again.
    """

    folder: str
    prefix: str


@record
class Edits:
    """Everything that must change in the container, and why. Carried out by a hook, or written into a spec."""

    devices: tuple[DeviceEdit, ...] = ()
    mounts: tuple[MountEdit, ...] = ()
    links: tuple[LinkEdit, ...] = ()
    loader_cache: tuple[CacheEdit, ...] = ()
    proc: ProcEdit | None = None
    files: tuple[FileEdit, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    env: dict[str, str] = {}
    stale: tuple[StaleName, ...] = ()
    warnings: tuple[str, ...] = ()


@record
class Case:
    """Edits that a container gets when it has all of these device nodes (paths in the container).

    `no_compat`: why the image's forward compatibility libraries are of no use with them, "" where they may be. `device`
    is the name of the device that they are, "" where it has none.
    """

    nodes: tuple[str, ...]
    edits: Edits
    no_compat: str = ""
    device: str = ""


@record
class Pending:
    """What of a plan can only be decided when the container is known, for a spec that serves many.

    `cases` say what comes with each device. `profile`: why the container gets an application profile for its GPUs, ""
    where it gets none. `no_compat` as in Case, for all devices of the node; `driver_version` is what forward
    compatibility libraries are compared with.
    """

    driver_version: str
    cases: tuple[Case, ...] = ()
    profile: str = ""
    no_compat: str = ""


@record
class Remainder:
    """What of Edits a spec cannot express, for nvct's hook to carry out.

    `edits` has neither devices nor mounts. `architecture` is the driver's. Without `pending` the edits are complete.
    """

    edits: Edits
    architecture: str
    pending: Pending | None = None
