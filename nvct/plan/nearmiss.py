"""What someone probably meant by a device token that means nothing. Imported only to word a refusal."""

from __future__ import annotations

from nvct.model import Gpu, Inventory, MigDevice
from nvct.plan.words import listed

_SEPARATORS = ";| \t\n\r+&"
_WRAPPING = "\"'[](){}"
_WORDS = ("none", "void")


def hint(inventory: Inventory, token: str) -> str:
    """A sentence without its end for a refusal, or "" when the token resembles nothing."""
    text = token.strip(_WRAPPING).lower()
    pieces = _pieces(text)
    if len(pieces) > 1:
        return f"separate devices with commas: `{','.join(pieces)}`"
    if text in _WORDS:
        return f"{text} is a word of NVIDIA_VISIBLE_DEVICES, in lower case"
    if text.startswith("cdi/"):
        return "expected cdi/<vendor>/<class>/<name>"
    profile = _by_profile(inventory, text)
    if profile:
        return f"this is a MIG profile; ask for a MIG device that has it: {listed(profile)}"
    meant = _meant(inventory, text)
    return f"perhaps `{meant}` is meant" if meant else ""


def _pieces(text: str) -> list[str]:
    """The parts of a list with the wrong separators, only of what could be names of devices."""
    for separator in _SEPARATORS:
        text = text.replace(separator, ",")
    pieces = [piece for piece in text.split(",") if piece]
    return pieces if all(piece.isascii() and piece.isprintable() for piece in pieces) else []


def _by_profile(inventory: Inventory, text: str) -> list[str]:
    return [f"{gpu.index}:{mig.index}" for gpu, mig in _mig_devices(inventory) if mig.profile.lower() == text]


def _meant(inventory: Inventory, text: str) -> str:
    return (
        _by_node(inventory, text)
        or _by_number(inventory, text)
        or _by_mig_number(inventory, text)
        or _by_bare_uuid(inventory, text)
    )


def _by_node(inventory: Inventory, text: str) -> str:
    """nvidia<N> is the node of the GPU with the minor N, whatever its index."""
    minor = text.removeprefix("/dev/").removeprefix("nvidia")
    found = [gpu for gpu in inventory.gpus if str(gpu.minor) == minor] if text != minor else []
    return str(found[0].index) if found else ""


def _by_number(inventory: Inventory, text: str) -> str:
    """gpu0, gpu:0, device=0, a wrapped 0, 00."""
    number = text.removeprefix("device=").removeprefix("gpu").lstrip(":=_#") or text
    number = number.lstrip("0") or "0" if number.isascii() and number.isdigit() else number
    return number if any(str(gpu.index) == number for gpu in inventory.gpus) else ""


def _by_mig_number(inventory: Inventory, text: str) -> str:
    """mig0:1, gpu0:1, 0.1, 0/1, a wrapped 0:1."""
    name = text.removeprefix("device=").removeprefix("mig").removeprefix("gpu").lstrip(":=_#-")
    for separator in "./":
        name = name.replace(separator, ":")
    names = [f"{gpu.index}:{mig.index}" for gpu, mig in _mig_devices(inventory)]
    return name if name in names else ""


def _by_bare_uuid(inventory: Inventory, text: str) -> str:
    """A UUID, or eight of its characters, without the GPU- or MIG- before it."""
    uuids = [gpu.uuid for gpu in inventory.gpus] + [mig.uuid for _, mig in _mig_devices(inventory)]
    found = [uuid for uuid in uuids if uuid.partition("-")[2].lower().startswith(text)] if len(text) >= 8 else []
    return found[0] if len(found) == 1 else ""


def _mig_devices(inventory: Inventory) -> list[tuple[Gpu, MigDevice]]:
    return [(gpu, device) for gpu in inventory.gpus for device in gpu.mig_devices]
