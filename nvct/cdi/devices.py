"""What CDI devices bring: each is planned as a request of its own, and what all have in common is told apart.

Pure functions. Whoever asks an engine for a CDI device has everything that the driver can do, and no say in it: CDI
carries no capabilities, requirements or variables.
"""

from __future__ import annotations

from nvct.cdi.names import is_device
from nvct.errors import ChoiceError, DriverError, RequestError
from nvct.model import WSL, Ask, Case, Edits, Gpu, Inventory, MigDevice, Pending, Remainder, Request
from nvct.plan import plan_each
from nvct.plan.accept import Accepted, accept
from nvct.plan.compat import compat_objection
from nvct.plan.devices import Choice, choose
from nvct.plan.graphics import PROFILE
from nvct.plan.words import quoted
from nvct.record import record, replace
from nvct.request import meant
from nvct.settings import ACCEPT, Settings

# Ways to name devices: by NVML's index, by UUID, and by kind and index.
INDEX = "index"
UUID = "uuid"
TYPE_INDEX = "type-index"
NAMINGS = (INDEX, UUID, TYPE_INDEX)

GPU = "gpu"
MANAGEMENT = "management"
IMEX = "imex"
EXTRAS = ("gds", "gdrcopy", "mofed", "nvswitch")
MODES = (GPU, MANAGEMENT, IMEX, *EXTRAS)

_SOURCE = "the CDI device"
_ALL_CAPABILITIES = Ask(_SOURCE, ("all",))


@record
class CdiDevice:
    """One device of a spec by all its names, with what it brings beyond what all bring."""

    names: tuple[str, ...]
    edits: Edits


@record
class Devices:
    """What a spec says. `remainder` is what is left for the hook, None where nothing is."""

    common: Edits
    devices: tuple[CdiDevice, ...]
    remainder: Remainder | None = None
    warnings: tuple[str, ...] = ()


def devices_of(
    mode: str, inventory: Inventory, settings: Settings, namings: tuple[str, ...], tokens: tuple[str, ...]
) -> Devices:
    """The devices of one of MODES. `namings` and `tokens` (which devices, as NVIDIA_VISIBLE_DEVICES has them) are about
    GPUs. Raises ChoiceError for tokens that can choose nothing, RequestError for one that means nothing on this node,
    DriverError for a node that has nothing of the kind.
    """
    check_tokens(mode, tokens)
    settings = replace(settings, unprivileged_env=ACCEPT)
    if mode == GPU:
        return _gpus(inventory, settings, namings, tokens)
    if mode == MANAGEMENT:
        return _management(inventory, settings)
    return _imex(inventory, settings) if mode == IMEX else _extra(mode, inventory, settings)


def check_tokens(mode: str, tokens: tuple[str, ...]) -> None:
    """Raise ChoiceError for a choice of devices that cannot be made in this mode, whatever the node has."""
    if mode != GPU and tokens != ("all",):
        raise ChoiceError(f"{', '.join(map(quoted, tokens))}: devices can be chosen in mode {GPU} only")
    if meant(tokens) is None:
        raise ChoiceError(f"{', '.join(map(quoted, tokens))}: `void` asks for nothing; `none` is a spec without a GPU")


def _request(*tokens: str) -> Request:
    return Request(devices=Ask(_SOURCE, tokens), capabilities=_ALL_CAPABILITIES, requirements_disabled=True)


def _gpus(inventory: Inventory, settings: Settings, namings: tuple[str, ...], tokens: tuple[str, ...]) -> Devices:
    named = _named(inventory, namings, tokens)
    requests = [_request("none"), _request(*tokens), *(_request(token) for token, _ in named)]
    common, every, *each = plan_each(inventory, requests, settings)
    devices = [CdiDevice(names, _own(edits, common)) for (_, names), edits in zip(named, each)]
    if _own(every, common).devices:
        devices.append(CdiDevice(("all",), _own(every, common)))
    cases = tuple(_case(device, inventory, request, settings) for device, request in zip(devices, requests[2:]))
    return Devices(
        common=common,
        devices=(*devices, CdiDevice(("none",), Edits(env=common.env))),
        remainder=_remainder(common, every, cases, inventory, settings),
        warnings=common.warnings,
    )


def _named(
    inventory: Inventory, namings: tuple[str, ...], tokens: tuple[str, ...]
) -> list[tuple[str, tuple[str, ...]]]:
    """(the token that asks for it, its names) of each GPU and MIG device that the tokens mean."""
    if inventory.kind == WSL:  # there no device can be told from another
        return []
    whole, parts = _meant(inventory, tokens)
    found = []
    for gpu in inventory.gpus:
        if gpu.uuid in whole:
            found.append((gpu.uuid, _gpu_names(gpu, namings)))
        for device in gpu.mig_devices:
            if device.uuid in parts:
                found.append((device.uuid, _mig_names(gpu, device, namings)))
    return found


def _meant(inventory: Inventory, tokens: tuple[str, ...]) -> tuple[set[str], set[str]]:
    """The UUIDs of whole GPUs and of MIG devices. `all` means every GPU, also one that is divided: its node alone is
    what `0` has always meant.
    """
    whole = {gpu.uuid for gpu in inventory.gpus} if meant(tokens) == ("all",) else set()
    parts = set()
    for token in meant(tokens) or ():
        choice = choose(inventory, Accepted(devices=Ask(_SOURCE, (token,))))
        divided = {chosen.gpu.uuid for chosen in choice.mig_devices}
        whole |= {chosen.gpu.uuid for chosen in choice.gpus} - divided
        parts |= {chosen.device.uuid for chosen in choice.mig_devices}
    return whole, parts


def _gpu_names(gpu: Gpu, namings: tuple[str, ...]) -> tuple[str, ...]:
    names = {INDEX: str(gpu.index), UUID: gpu.uuid, TYPE_INDEX: f"gpu{gpu.index}"}
    return tuple(names[naming] for naming in namings)


def _mig_names(gpu: Gpu, device: MigDevice, namings: tuple[str, ...]) -> tuple[str, ...]:
    index = f"{gpu.index}:{device.index}"
    names = {INDEX: index, UUID: device.uuid, TYPE_INDEX: f"mig{index}"}
    # The UUIDs of drivers before 470 have slashes, which no CDI name can have.
    return tuple(names[naming] for naming in namings if is_device(names[naming]))


def _own(edits: Edits, common: Edits) -> Edits:
    """What a device brings that not every one does; of the profile for graphics the hook makes one for all."""
    devices = {edit.path for edit in common.devices}
    mounts = {edit.target for edit in common.mounts}
    links = {edit.path for edit in common.links}
    files = {edit.path for edit in common.files} | {PROFILE}
    proc = edits.proc and common.proc and replace(edits.proc, files=())
    return Edits(
        devices=tuple(edit for edit in edits.devices if edit.path not in devices),
        mounts=tuple(edit for edit in edits.mounts if edit.target not in mounts),
        links=tuple(edit for edit in edits.links if edit.path not in links),
        files=tuple(edit for edit in edits.files if edit.path not in files),
        proc=proc,
    )


def _case(device: CdiDevice, inventory: Inventory, request: Request, settings: Settings) -> Case:
    objection = compat_objection(choose(inventory, accept(request, settings)), settings)
    # UUIDs of drivers before 470 cannot be names, and there may be no other.
    name = next(iter(device.names), "")
    return Case(tuple(node.path for node in device.edits.devices), device.edits, objection, name)


def _remainder(
    common: Edits, every: Edits, cases: tuple[Case, ...], inventory: Inventory, settings: Settings
) -> Remainder:
    pending = Pending(
        driver_version=inventory.driver_version,
        cases=cases,
        profile=next((file.why for file in every.files if file.path == PROFILE), ""),
        no_compat=compat_objection(Choice((), (), ()), settings),
    )
    return Remainder(common, inventory.architecture, pending)


def _management(inventory: Inventory, settings: Settings) -> Devices:
    """One device with every node of the driver, for containers that manage the node itself.

    They make nodes and MIG devices, so nothing of /proc/driver/nvidia is hidden from them.
    """
    channels = tuple(_channel(node.path) for node in inventory.extra_nodes.get("imex", ()))
    control = Ask(_SOURCE, ("all",)) if inventory.mig_minors and "nvidia-caps" in inventory.majors else None
    request = replace(
        _request("all"),
        privileged=True,
        mig_config=control,
        mig_monitor=control,
        imex_channels=Ask(_SOURCE, channels) if channels else None,
    )
    common, every = (replace(edits, proc=None) for edits in plan_each(inventory, [_request("none"), request], settings))
    device = CdiDevice(("all",), _own(every, common))
    case = _case(device, inventory, request, settings)
    return Devices(common, (device,), _remainder(common, every, (case,), inventory, settings), common.warnings)


def _imex(inventory: Inventory, settings: Settings) -> Devices:
    channels = tuple(_channel(node.path) for node in inventory.extra_nodes.get("imex", ()))
    if not channels:
        raise DriverError(
            f"this node has no IMEX channel below {inventory.roots.dev_root}: expected "
            "/dev/nvidia-caps-imex-channels/channel0 or another; start nvidia-imex, or make the nodes"
        )
    wanted = [*((channel, (channel,)) for channel in channels), ("all", channels)]
    requests = [
        _request("none"),
        *(replace(_request("none"), imex_channels=Ask(_SOURCE, numbers)) for _, numbers in wanted),
    ]
    common, *each = plan_each(inventory, requests, settings)
    devices = [CdiDevice((name,), _own(edits, common)) for (name, _), edits in zip(wanted, each)]
    if not devices[0].edits.devices:
        raise RequestError("; ".join(each[0].warnings))
    return Devices(common=Edits(), devices=tuple(devices))


def _extra(mode: str, inventory: Inventory, settings: Settings) -> Devices:
    request = replace(_request("none"), extras={mode: Ask(_SOURCE, ("enabled",))})
    common, edits = plan_each(inventory, [_request("none"), request], settings)
    own = _own(edits, common)
    if not own.devices:
        reasons = [left.why for left in edits.left_out if left.what.startswith(mode)]
        raise DriverError("; ".join(reasons) or f"this node has nothing for mode {mode}")
    return Devices(common=Edits(), devices=(CdiDevice(("all",), own),))


def _channel(path: str) -> str:
    return path.rpartition("/channel")[2]
