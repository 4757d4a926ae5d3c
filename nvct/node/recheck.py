"""The last look before a device is handed out: are these still the devices that the inventory describes?

On the hook's hot path. The cache's stamp tells that nothing has changed since discovery, but a MIG device can be
destroyed between that look and the start of the container, and its number given to another. So what is handed out,
and only that, is read again from /proc.
"""

from __future__ import annotations

from nvct.errors import StaleInventory
from nvct.model import WSL
from nvct.node import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from nvct.model import Gpu, Inventory, MigDevice


def recheck(inventory: Inventory, gpus: Iterable[Gpu], mig_devices: Iterable[MigDevice]) -> None:
    """Compare the majors, each GPU's UUID and minor, and each MIG device's capability minors with /proc.

    The parents of the MIG devices are compared too. Raises StaleInventory at the first difference; the caller then
    discovers again, resolves the request again, and rechecks that.
    """
    try:
        _compare(inventory, gpus, mig_devices)
    except OSError as error:
        raise StaleInventory(
            f"{error.filename}: {error.strerror}, though the inventory has it: discover again"
        ) from None


def _compare(inventory: Inventory, gpus: Iterable[Gpu], mig_devices: Iterable[MigDevice]) -> None:
    proc_root = inventory.roots.proc_root
    _same("the device majors", inventory.majors, procfs.read_majors(proc_root), f"{proc_root}/devices")
    if inventory.kind == WSL:  # no node is one GPU's there, and the cache's stamp has the number of the only one
        return
    parents = {device.uuid: gpu for gpu in inventory.gpus for device in gpu.mig_devices}
    pairs = [(_parent(parents, device), device) for device in mig_devices]
    every = {gpu.uuid: gpu for gpu in (*gpus, *(parent for parent, _ in pairs))}
    for gpu in every.values():
        _compare_gpu(proc_root, gpu)
    for parent, device in pairs:
        _compare_mig(proc_root, parent, device)


def _parent(parents: dict[str, Gpu], device: MigDevice) -> Gpu:
    try:
        return parents[device.uuid]
    except KeyError:
        raise StaleInventory(f"no GPU of the inventory has MIG device {device.uuid}: discover again") from None


def _compare_gpu(proc_root: str, gpu: Gpu) -> None:
    where = procfs.information_path(proc_root, gpu.proc_name)
    information = procfs.read_information(proc_root, gpu.proc_name)
    # A GPU that nothing has opened yet has question marks for digits. Opening every GPU at every start would cost
    # seconds, and that it is another one than at discovery is told by the cache's stamp.
    if "?" not in information.uuid:
        _same(f"the UUID of GPU {gpu.index}", gpu.uuid.lower(), information.uuid.lower(), where)
    _same(f"the minor of GPU {gpu.index}", gpu.minor, information.minor, where)


def _compare_mig(proc_root: str, gpu: Gpu, device: MigDevice) -> None:
    for expected, access in (
        (device.gi_minor, procfs.gi_access(gpu.minor, device.gi)),
        (device.ci_minor, procfs.ci_access(gpu.minor, device.gi, device.ci)),
    ):
        found = procfs.read_capability_minor(proc_root, access)
        where = f"{procfs.capabilities_path(proc_root)}/{access}"
        _same(f"the capability minor of MIG device {gpu.index}:{device.index}", expected, found, where)


def _same(what: str, expected: object, found: object, where: str) -> None:
    if expected != found:
        raise StaleInventory(f"{what} is {found} in {where}, and {expected} in the inventory: discover again")
