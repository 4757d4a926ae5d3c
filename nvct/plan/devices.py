"""Which GPUs and MIG devices the tokens of a request mean."""

from __future__ import annotations

from nvct.errors import RequestError
from nvct.model import Gpu, Inventory, MigDevice, Request
from nvct.plan.accept import Accepted, accept
from nvct.plan.words import listed, quoted, ranges
from nvct.record import record
from nvct.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_HEX = frozenset("0123456789abcdef")
_SHORTEST_PREFIX = 8  # hexadecimal digits
# The kind of the CDI devices that mean this driver's GPUs and MIG devices.
CDI_KIND = "nvidia.com/gpu"


@record
class ChosenGpu:
    """A GPU whose node the container gets."""

    gpu: Gpu
    why: str


@record
class ChosenMig:
    """A MIG device for the container, and the GPU that it is a part of (which is among the chosen GPUs)."""

    gpu: Gpu
    device: MigDevice
    why: str


@record
class Choice:
    """What the tokens of a request mean: each GPU and MIG device once, in the order of first mention."""

    gpus: tuple[ChosenGpu, ...]
    mig_devices: tuple[ChosenMig, ...]
    warnings: tuple[str, ...]


def choose(inventory: Inventory, accepted: Accepted) -> Choice:
    """Resolve the device tokens of a request. Raises RequestError for one that means nothing here, or two things."""
    gpus: dict[str, ChosenGpu] = {}
    mig_devices: dict[str, ChosenMig] = {}
    tokens, source = (accepted.devices.tokens, accepted.devices.source) if accepted.devices else ((), "")
    for token in tokens:
        asked = f"asked for as {quoted(token)} in {source}"
        for gpu, device in _meaning(inventory, token, source):
            name = gpu_name(gpu)
            if device is None:
                gpus.setdefault(gpu.uuid, ChosenGpu(gpu, f"GPU {name} {asked}"))
                continue
            _check_mig_control(accepted, token)
            part = f"MIG device {mig_name(gpu, device)}"
            gpus.setdefault(gpu.uuid, ChosenGpu(gpu, f"GPU {name}, parent of {part} {asked}"))
            mig_devices.setdefault(device.uuid, ChosenMig(gpu, device, f"{part} {asked}"))
    for controlled in _controlled(accepted, gpus.values()):
        mig_devices.setdefault(controlled.device.uuid, controlled)
    divided = {chosen.gpu.uuid for chosen in mig_devices.values()}
    warnings = [
        _only_the_parent(chosen)
        for chosen in gpus.values()
        if chosen.gpu.mig_enabled and chosen.gpu.uuid not in divided
    ]
    return Choice(tuple(gpus.values()), tuple(mig_devices.values()), tuple(warnings))


def resolve(
    inventory: Inventory, request: Request, settings: Settings
) -> tuple[tuple[Gpu, ...], tuple[MigDevice, ...]]:
    """The GPUs, parents included, and the MIG devices that a container gets, for whoever must look at them again.

    Raises RequestError like `accept` and `choose`.
    """
    choice = choose(inventory, accept(request, settings))
    return tuple(chosen.gpu for chosen in choice.gpus), tuple(chosen.device for chosen in choice.mig_devices)


def gpu_name(gpu: Gpu) -> str:
    """How messages name a GPU."""
    return f"{gpu.index} ({gpu.uuid})"


def mig_name(gpu: Gpu, device: MigDevice) -> str:
    """How messages name a MIG device."""
    return f"{gpu.index}:{device.index} ({device.uuid})"


def _controlled(accepted: Accepted, gpus: Iterable[ChosenGpu]) -> list[ChosenMig]:
    """The MIG devices of the visible GPUs, for whoever may change or watch them: it must be able to open them."""
    control = accepted.mig_config or accepted.mig_monitor
    if control is None:
        return []
    return [
        ChosenMig(chosen.gpu, device, f"MIG device {mig_name(chosen.gpu, device)}, which {control.source} is about")
        for chosen in gpus
        for device in chosen.gpu.mig_devices
    ]


def _check_mig_control(accepted: Accepted, token: str) -> None:
    """Whoever may change or watch all MIG devices of a GPU is not confined to one of them."""
    control = accepted.mig_config or accepted.mig_monitor
    if control and token.lower() not in ("all", f"{CDI_KIND}=all"):
        raise RequestError(
            f"`all` in {control.source} is about every MIG device of a GPU, but {quoted(token)} asks for one of them; "
            "ask for the GPU, or for `all`"
        )


def _only_the_parent(chosen: ChosenGpu) -> str:
    if not chosen.gpu.mig_devices:
        return f"{chosen.why}: MIG is enabled there and no MIG device exists, so CUDA finds nothing; create MIG devices"
    choices = listed([f"{chosen.gpu.index}:{device.index}" for device in chosen.gpu.mig_devices])
    return f"{chosen.why}: MIG is enabled there, so the GPU alone cannot compute; ask for a MIG device: {choices}"


def _meaning(inventory: Inventory, token: str, source: str) -> list[tuple[Gpu, MigDevice | None]]:
    """What one token means: (GPU, None) for a whole GPU, (GPU, MIG device) for a part."""
    try:
        return _named(inventory, _without_kind(token))
    except _Refusal as refusal:
        raise RequestError(f"{quoted(token)} in {source}: {refusal}") from None


def _named(inventory: Inventory, name: str) -> list[tuple[Gpu, MigDevice | None]]:
    text = name.lower()
    if text == "all":
        return _everything(inventory)
    mig = _exact_mig(inventory, text)
    if mig is not None:
        return [mig]
    if text.startswith("mig-gpu-"):
        return [_by_old_mig_uuid(inventory, text)]
    if text.startswith("mig-"):
        return [_by_mig_uuid(inventory, text)]
    if text.startswith("gpu-"):
        return [(_by_gpu_uuid(inventory, text), None)]
    if _is_number(text):
        return [(_by_index(inventory, text), None)]
    if ":" in text and "." in text:
        return [(_by_bus_id(inventory, text), None)]
    if all(map(_is_number, text.split(":"))):
        return [_by_mig_index(inventory, text)]
    raise _Refusal(_not_a_device(inventory, name))


def _without_kind(token: str) -> str:
    """A device without its kind, where it was asked for by a CDI name, vendor/class=name."""
    kind, equals, name = token.partition("=")
    if not equals or "/" not in kind:
        return token
    if kind != CDI_KIND:
        raise _Refusal(
            f"this is a CDI name of the kind {quoted(kind)}, and here only {CDI_KIND} is known; ask the engine for it "
            "(docker run --device), or start the container with the nvct runtime, which reads CDI specs"
        )
    return name


class _Refusal(Exception):
    """Why a token is refused, and what would be valid; `_meaning` adds which token it was and where."""


def _everything(inventory: Inventory) -> list[tuple[Gpu, MigDevice | None]]:
    found: list[tuple[Gpu, MigDevice | None]] = []
    for gpu in inventory.gpus:
        found += [(gpu, device) for device in gpu.mig_devices] if gpu.mig_devices else [(gpu, None)]
    return found


def _exact_mig(inventory: Inventory, text: str) -> tuple[Gpu, MigDevice] | None:
    """The MIG device with this UUID, of whichever form this driver gives."""
    for gpu in inventory.gpus:
        for device in gpu.mig_devices:
            if device.uuid.lower() == text:
                return gpu, device
    return None


def _by_old_mig_uuid(inventory: Inventory, text: str) -> tuple[Gpu, MigDevice]:
    """MIG-GPU-<GPU UUID>/<GPU instance>/<compute instance>, the form before driver 470."""
    parts = text[len("mig-") :].split("/")
    if len(parts) != 3 or not _is_number(parts[1]) or not _is_number(parts[2]):
        raise _Refusal("expected MIG-GPU-<UUID of the GPU>/<GPU instance>/<compute instance>; " + _valid(inventory))
    gpu = _by_gpu_uuid(inventory, parts[0])
    for device in gpu.mig_devices:
        if [str(device.gi), str(device.ci)] == parts[1:]:
            return gpu, device
    raise _Refusal(
        f"GPU {gpu_name(gpu)} has no compute instance {parts[2]} in a GPU instance {parts[1]}; {_valid(inventory)}"
    )


def _by_mig_uuid(inventory: Inventory, text: str) -> tuple[Gpu, MigDevice]:
    pairs = {device.uuid: (gpu, device) for gpu in inventory.gpus for device in gpu.mig_devices}
    return pairs[_by_uuid(list(pairs), text, "MIG-", "MIG device", _valid(inventory))]


def _by_gpu_uuid(inventory: Inventory, text: str) -> Gpu:
    gpus = {gpu.uuid: gpu for gpu in inventory.gpus}
    return gpus[_by_uuid(list(gpus), text, "GPU-", "GPU", _valid(inventory))]


def _by_uuid(uuids: list[str], text: str, prefix: str, noun: str, valid: str) -> str:
    """The one UUID that is, or begins with, `text` (in lower case)."""
    digits = text[len(prefix) :].replace("-", "")
    found = [uuid for uuid in uuids if uuid.lower().startswith(text)]
    if len(digits) < _SHORTEST_PREFIX or not _HEX.issuperset(digits):
        meant = f", perhaps those of `{found[0]}`" if digits and len(found) == 1 else ""
        raise _Refusal(
            f"expected {prefix} and a UUID, or at least its first {_SHORTEST_PREFIX} hexadecimal digits{meant}; {valid}"
        )
    if len(found) > 1:
        raise _Refusal(f"that is the beginning of {len(found)} UUIDs: {listed(found)}; give more digits")
    if not found:
        raise _Refusal(f"no {noun} of this node has such a UUID; {valid}")
    return found[0]


def _by_index(inventory: Inventory, text: str) -> Gpu:
    for gpu in inventory.gpus:
        if str(gpu.index) == text:
            return gpu
    same_minor = [gpu for gpu in inventory.gpus if str(gpu.minor) == text]
    hint = f" (/dev/nvidia{text} is GPU {gpu_name(same_minor[0])})" if same_minor else ""
    raise _Refusal(
        f"no GPU has this index{hint}; use `all` or UUIDs where only some of the host's GPUs are visible, since "
        f"indexes count those; {_valid(inventory)}"
    )


def _by_mig_index(inventory: Inventory, text: str) -> tuple[Gpu, MigDevice]:
    parts = text.split(":")
    if len(parts) != 2:
        raise _Refusal(f"expected <GPU>:<MIG device>; {_valid(inventory)}")
    gpu = _by_index(inventory, parts[0])
    for device in gpu.mig_devices:
        if str(device.index) == parts[1]:
            return gpu, device
    state = "has no such MIG device" if gpu.mig_enabled else "is not divided: its MIG mode is off"
    raise _Refusal(f"GPU {gpu_name(gpu)} {state}; {_valid(inventory)}")


def _by_bus_id(inventory: Inventory, text: str) -> Gpu:
    """A PCI address, [domain:]bus:device.function; without a domain it must fit one GPU only."""
    address, _, function = text.rpartition(".")
    parts = address.split(":")
    lengths = [len(part) for part in parts]
    well_formed = lengths[-2:] == [2, 2] and (lengths[:-2] == [] or (len(lengths) == 3 and 4 <= lengths[0] <= 8))
    if not well_formed or not _HEX.issuperset("".join(parts)):
        raise _Refusal(f"expected a PCI address such as 0000:07:00.0; {_valid_bus_ids(inventory)}")
    if function != "0":
        raise _Refusal(f"a GPU is function 0 of its PCI device; {_valid_bus_ids(inventory)}")
    wanted = _padded(text) if len(parts) == 3 else ":" + text
    found = [gpu for gpu in inventory.gpus if gpu.bus_id.lower().endswith(wanted)]
    if len(found) > 1:
        raise _Refusal(f"GPUs of several PCI domains have this address; {_valid_bus_ids(inventory)}")
    if not found:
        raise _Refusal(f"no GPU of this node is there; {_valid_bus_ids(inventory)}")
    return found[0]


def _padded(bus_id: str) -> str:
    """NVML writes the domain with 8 digits, the kernel with 4."""
    return bus_id.rjust(len("00000000:07:00.0"), "0")


def _not_a_device(inventory: Inventory, name: str) -> str:
    from nvct.plan.nearmiss import hint  # only a refusal needs it

    expected = "expected an index, a UUID, a PCI address, <GPU>:<MIG device>, all, none or void"
    near = hint(inventory, name)
    return f"{near or expected}; {_valid(inventory)}"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _valid(inventory: Inventory) -> str:
    if not inventory.gpus:
        return "this node has no GPU"
    gpus = f"see `nvct list`; valid are GPUs {ranges([gpu.index for gpu in inventory.gpus])}"
    mig = [
        ranges([device.index for device in gpu.mig_devices], f"{gpu.index}:")
        for gpu in inventory.gpus
        if gpu.mig_devices
    ]
    return f"{gpus}; MIG devices {listed(mig)}" if mig else f"{gpus}; this node has no MIG device"


def _valid_bus_ids(inventory: Inventory) -> str:
    if not inventory.gpus:
        return "this node has no GPU"
    return f"valid are {listed([gpu.bus_id for gpu in inventory.gpus])}"
