"""What the runtime does to the bundle of a container that asks for something: plan, and write the plan into its spec.

Imported only then. What a spec cannot express is left to nvct's small hook (nvct/oci/finish.py).
"""

from __future__ import annotations

import os
from stat import S_IMODE, S_ISCHR

from nvct import edits as edits_json
from nvct import userns
from nvct.errors import DriverError, InjectionError, RequestError, StaleInventory
from nvct.fastjson import loads
from nvct.inject.look import look_as
from nvct.inject.mounts import DEVICE_OPTIONS, check_source
from nvct.inject.rootfs import ConfinedRoot
from nvct.model import MountEdit, Remainder
from nvct.node.charlinks import link_by_number
from nvct.oci import lowlevel
from nvct.oci.bundle import text_of
from nvct.oci.inventory import ask_program, checked_plan, settings_alone, with_inventory
from nvct.oci.spec import Change, Node, check_shape, with_change, without_gpu_hooks
from nvct.oci.started import remember
from nvct.oci.state import root_path
from nvct.plan.names import names_foreign, share_out
from nvct.plan.requirements import check_driver
from nvct.record import replace
from nvct.settings import HOOK, NEEDED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from nvct.model import DeviceEdit, Edits, Inventory, Request
    from nvct.oci.bundle import Bundle
    from nvct.oci.spec import Spec
    from nvct.plan.names import Shares
    from nvct.settings import Settings

_HOOKS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + "/hooks"
_WHOLE_HOOK = "nvidia-container-runtime-hook"


def edit_bundle(bundle: Bundle, request: Request, config: str, low_level: str) -> tuple[str, ...]:
    """Write into the bundle's spec what its container asks for. Returns warnings, raises NvctError.

    `config` is the settings file's path, `low_level` the path of the runtime that the front calls.
    """
    check_shape(bundle.spec)
    if names_foreign(request):
        settings = settings_alone(config)
        lowlevel.check(low_level, config, settings)
        shares = share_out(request, settings)
        if not shares.request:
            _write(bundle, _with_cdi(without_gpu_hooks(bundle.spec), shares, settings))
            return shares.warnings

    def edit(settings: Settings, inventory: Inventory) -> tuple[str, ...]:
        lowlevel.check(low_level, config, settings)
        if settings.runtime_mode == HOOK:
            _write(bundle, with_change(without_gpu_hooks(bundle.spec), Change(hook=_whole_hook(config))))
            return ()
        spec, devices, warnings = _edited(bundle, request, settings, inventory)
        if spec is bundle.spec:
            bundle.forget_changes()
            return warnings
        _write(bundle, spec)
        # Only now, for a start that fails shall leave no links.
        return warnings + link_by_number(devices, settings.char_links)

    return with_inventory(config, edit)


def _write(bundle: Bundle, spec: Spec) -> None:
    bundle.write(spec)
    remember(bundle)


def _whole_hook(config: str) -> tuple[str, ...]:
    return (f"{_HOOKS}/{_WHOLE_HOOK}", _WHOLE_HOOK, "-config", os.path.abspath(config), "createRuntime")


def _edited(
    bundle: Bundle, request: Request, settings: Settings, inventory: Inventory
) -> tuple[Spec, tuple[DeviceEdit, ...], tuple[str, ...]]:
    """The spec with what is asked for in it, the bundle's own where that comes to nothing; the devices that were
    planned; and warnings.
    """
    shares = share_out(request, settings)
    if not shares.request:
        check_driver(inventory, request, settings)  # which of its GPUs those are, is for the specs to say
        return _with_cdi(without_gpu_hooks(bundle.spec), shares, settings), (), shares.warnings
    spec, devices, warnings = _with_plan(bundle, shares.request, settings, inventory)
    return (_with_cdi(spec, shares, settings) if shares.names else spec), devices, warnings


def _with_cdi(spec: Spec, shares: Shares, settings: Settings) -> Spec:
    told = {"spec": spec, "names": list(shares.names), "folders": list(settings.cdi_spec_dirs)}
    try:
        edited: Any = loads(ask_program("nvct/cdi/handover.py", text=text_of(told)))
    except DriverError as error:  # it is about the names, or about the specs
        raise RequestError(str(error)) from None
    return dict(edited)


def _with_plan(
    bundle: Bundle, request: Request, settings: Settings, inventory: Inventory
) -> tuple[Spec, tuple[DeviceEdit, ...], tuple[str, ...]]:
    root = _open_root(bundle)
    look = look_as(root, *_owner(bundle.spec))
    edits = checked_plan(inventory, replace(request, container=look), settings)
    if not edits.devices and not edits.mounts:
        return bundle.spec, (), edits.warnings
    if settings.runtime_hook == NEEDED and not _why_hook(edits, root, inventory.architecture):
        from nvct.plan.hookfree import without_hook  # few nodes need it

        edits = without_hook(edits, inventory.architecture, look)
    change, warnings = _change(bundle, edits, inventory, settings, root)
    return with_change(without_gpu_hooks(bundle.spec), change), edits.devices, edits.warnings + warnings


def _why_hook(edits: Edits, root: ConfinedRoot, architecture: str) -> str:
    """What the container would lack without a hook, "" for nothing that its programs look for by themselves."""
    if edits.proc:
        return "its view of /proc/driver/nvidia"
    if edits.files:
        return f"the file {edits.files[0].path}"
    links = {link.path for link in edits.links}
    targets = {mount.target for mount in edits.mounts}
    for entry in edits.loader_cache:
        if entry.path not in links and entry.path not in targets:
            return f"the image's own {entry.name}, which its loader cache is to name first"
    for link in edits.links:
        if link.path.startswith("/dev/"):
            return f"the link {link.path}"
    from nvct.inject.unaided import why_not_unaided

    return why_not_unaided(root, edits.loader_cache, architecture)


def _open_root(bundle: Bundle) -> ConfinedRoot:
    path = os.path.join(bundle.folder, root_path(bundle.spec))
    try:
        return ConfinedRoot(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(
            f"the container's root {path!r}: {reason}; expected the folder that root.path names"
        ) from None


def _owner(spec: dict[str, Any]) -> tuple[int, int]:
    """The ids on the host of the container's root, from the maps of its user namespace; ours without one."""
    linux = spec.get("linux") or {}
    return (_mapped(linux.get("uidMappings"), os.geteuid()), _mapped(linux.get("gidMappings"), os.getegid()))


def _mapped(rows: object, ours: int) -> int:
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and row.get("containerID") == 0 and isinstance(row.get("hostID"), int):
            return int(row["hostID"])
    return ours


def _change(
    bundle: Bundle, edits: Edits, inventory: Inventory, settings: Settings, root: ConfinedRoot
) -> tuple[Change, tuple[str, ...]]:
    nodes = tuple(_node(device) for device in edits.devices)
    mounts, warnings = _mounts_that_work(bundle, edits, root)
    # In a user namespace no node can be made, so runtimes mount the host's node of the same path: of which there may be
    # none, or another one, where the driver's nodes lie elsewhere.
    by_mount = _has_user_namespace(bundle.spec) or userns.is_nested()
    if by_mount:
        mounts += tuple(MountEdit(node.source, node.path, DEVICE_OPTIONS, node.why) for node in edits.devices)
    change = Change(
        nodes=() if by_mount else nodes,
        rules=edits.devices if settings.cgroups else (),
        mounts=mounts,
        env=edits.env,
        hook=_small_hook(edits, inventory.architecture),
    )
    return change, warnings


def _has_user_namespace(spec: dict[str, Any]) -> bool:
    namespaces = (spec.get("linux") or {}).get("namespaces")
    return any(isinstance(entry, dict) and entry.get("type") == "user" for entry in namespaces or ())


def _node(device: DeviceEdit) -> Node:
    """The node, with its mode and owner on the host. Raises StaleInventory, and InjectionError for another device."""
    try:
        status = os.lstat(device.source)
    except FileNotFoundError:
        raise StaleInventory(f"{device.source} is gone: discover again") from None
    found = (os.major(status.st_rdev), os.minor(status.st_rdev))
    if not S_ISCHR(status.st_mode) or found != (device.major, device.minor):
        what = f"the device {found[0]}:{found[1]}" if S_ISCHR(status.st_mode) else "no character device"
        raise InjectionError(f"{device.source} is {what}, expected {device.major}:{device.minor}")
    return Node(device, S_IMODE(status.st_mode), status.st_uid, status.st_gid)


def _mounts_that_work(
    bundle: Bundle, edits: Edits, root: ConfinedRoot
) -> tuple[tuple[MountEdit, ...], tuple[str, ...]]:
    """The mounts that the runtime can make, since it fails the start for each that it cannot; and warnings.

    Raises StaleInventory when a file of the driver is gone, InjectionError when one cannot be mounted.
    """
    mounts, warnings, homeless = [], [], []
    read_only_root = bool(os.fstatvfs(root.descriptor).f_flag & os.ST_RDONLY)
    volumes = _read_only_volumes(bundle.spec)
    for mount in edits.mounts:
        reason = _why_no_source(mount)
        if not reason and read_only_root and not root.exists(mount.target):
            reason = "the image's file system is read-only and has nothing to mount on there"
            if mount.required:
                homeless.append(mount.target)
                continue
        if not reason and not mount.required and mount.target.startswith(volumes):
            reason = "that is on a read-only volume"
        if reason:
            warnings.append(f"{mount.target}: {reason}, left out ({mount.why})")
        else:
            mounts.append(mount)
    if homeless:
        raise InjectionError(
            f"the container's root file system is read-only and has no files to mount on at {', '.join(homeless)}: "
            "add empty files there to the image, or let it be writable at start"
        )
    return tuple(mounts), tuple(warnings)


def _why_no_source(mount: MountEdit) -> str:
    """Why an optional file of the host cannot be mounted; "" when it can. Raises for a required one."""
    try:
        check_source(os.lstat(mount.source), mount.source, writable="ro" not in mount.options)
    except FileNotFoundError as error:
        if mount.required:
            raise StaleInventory(f"{mount.source} is gone ({error.strerror}): discover again") from None
        return f"{mount.source}: {error.strerror}"
    except OSError as error:
        if mount.required:
            raise InjectionError(f"{mount.source} {error.strerror}; nothing was changed") from None
        return f"{mount.source} {error.strerror}"
    return ""


def _read_only_volumes(spec: dict[str, Any]) -> tuple[str, ...]:
    """Folders of the container, each with a slash after it, in which the runtime can make no place to mount on."""
    return tuple(
        f"{mount['destination'].rstrip('/')}/"
        for mount in spec.get("mounts") or ()
        if isinstance(mount, dict)
        and isinstance(mount.get("destination"), str)
        and "ro" in (mount.get("options") or ())
    )


def _small_hook(edits: Edits, architecture: str) -> tuple[str, ...]:
    """The small hook with what a spec cannot express as its argument; () when that is nothing."""
    if not edits_json.edits_to_json(edits):
        return ()
    return (f"{_HOOKS}/{edits_json.HOOK}", *edits_json.hook_arguments(Remainder(edits, architecture)))
