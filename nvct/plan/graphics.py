"""What graphics need besides libraries: the GPUs' DRM nodes, and a profile that tells OpenGL which GPUs there are."""

from __future__ import annotations

from nvct.model import DeviceEdit, FileEdit, Inventory, LeftOut, LinkEdit
from nvct.plan.capabilities import library_classes
from nvct.plan.devices import Choice, ChosenGpu, gpu_name
from nvct.plan.nodes import below
from nvct.record import record
from nvct.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# The driver's libraries read every file in this folder ("Application Profiles" in the driver's README).
PROFILE = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"
_PROFILE_TEXT = (
    '{{"profiles":[{{"name":"_container_","settings":["EGLVisibleDGPUDevices",0x{mask:x}]}}],'
    '"rules":[{{"pattern":[],"profile":"_container_"}}]}}\n'
)
_PROFILE_BITS = 64
_GPU_NODE = "/dev/nvidia"
_BY_PATH = "/dev/dri/by-path"


@record
class Graphics:
    """The part of a plan that graphics add."""

    devices: tuple[DeviceEdit, ...] = ()
    links: tuple[LinkEdit, ...] = ()
    files: tuple[FileEdit, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[str, ...] = ()


def graphics(inventory: Inventory, capabilities: tuple[str, ...], choice: Choice, settings: Settings) -> Graphics:
    """DRM nodes with their links, and the application profile, where a capability asks for graphics."""
    reason = library_classes(capabilities).get("graphics")
    if not reason or not choice.gpus:
        return Graphics()
    left_out = []
    devices: list[DeviceEdit] = []
    links: list[LinkEdit] = []
    for chosen in choice.gpus:
        objection = _objection(chosen, choice, settings)
        if objection:
            left_out.append(LeftOut(f"nodes below /dev/dri of GPU {gpu_name(chosen.gpu)}", objection))
            continue
        why = f"capability {reason}: {chosen.why}"
        devices += _drm_devices(inventory, chosen, why)
        links += _by_path(chosen, why)
    files, too_high = _profile(choice, reason)
    if not settings.parts["application_profile"]:
        left_out.append(LeftOut(PROFILE, "the part application_profile is off in the settings"))
        files, too_high = (), ()
    return Graphics(tuple(devices), tuple(links), files, tuple(left_out), too_high)


def _objection(chosen: ChosenGpu, choice: Choice, settings: Settings) -> str:
    """Why the GPU's DRM nodes are left out; "" when they are not."""
    if not settings.parts["drm_nodes"]:
        return "the part drm_nodes is off in the settings"
    if chosen.gpu.mig_enabled and not _has_graphics(chosen, choice):
        return "its MIG devices compute only; those whose profile says +gfx have graphics"
    if not chosen.gpu.drm_nodes:
        return "this node has none: nvidia-drm is not loaded, or made none; run: modprobe nvidia-drm"
    return ""


def _has_graphics(chosen: ChosenGpu, choice: Choice) -> bool:
    profiles = [mig.device.profile for mig in choice.mig_devices if mig.gpu.uuid == chosen.gpu.uuid]
    return any("gfx" in profile.partition("+")[2].split(",") for profile in profiles)


def _drm_devices(inventory: Inventory, chosen: ChosenGpu, why: str) -> list[DeviceEdit]:
    return [
        DeviceEdit(node.path, below(inventory.roots.dev_root, node.path), node.major, node.minor, why)
        for node in chosen.gpu.drm_nodes
    ]


def _by_path(chosen: ChosenGpu, why: str) -> list[LinkEdit]:
    """The names that udev gives the nodes, by which X servers and Wayland compositors tell GPUs apart."""
    links = []
    for node in chosen.gpu.drm_nodes:
        name = node.path.rpartition("/")[2]
        kind = name.rstrip("0123456789").removesuffix("D")
        if kind in ("card", "render"):
            links.append(LinkEdit(f"{_BY_PATH}/pci-{chosen.gpu.proc_name}-{kind}", f"../{name}", why))
    return links


def _profile(choice: Choice, reason: str) -> tuple[tuple[FileEdit, ...], tuple[str, ...]]:
    """The profile, and a warning for each GPU that it cannot name: it counts them by minor, in a mask of 64 bits."""
    mask, warnings = 0, []
    for chosen in choice.gpus:
        if chosen.gpu.minor < _PROFILE_BITS:
            mask |= 1 << chosen.gpu.minor
        else:
            warnings.append(
                f"GPU {gpu_name(chosen.gpu)} has the minor {chosen.gpu.minor}, and an application profile can name "
                f"minors below {_PROFILE_BITS} only: EGL will not offer this GPU"
            )
    if not mask:
        return (), tuple(warnings)
    why = f"capability {reason}: EGL offers the container's GPUs and no others"
    return (_profile_file(mask, why),), tuple(warnings)


def profile_of_nodes(nodes: Iterable[str], why: str) -> tuple[FileEdit, ...]:
    """The profile for a container with these nodes of the driver; none for none of a GPU, or without a reason."""
    mask = 0
    for node in nodes:
        minor = node.removeprefix(_GPU_NODE)
        if minor.isdecimal() and int(minor) < _PROFILE_BITS:
            mask |= 1 << int(minor)
    return (_profile_file(mask, why),) if mask and why else ()


def _profile_file(mask: int, why: str) -> FileEdit:
    return FileEdit(PROFILE, _PROFILE_TEXT.format(mask=mask), 0o444, why)
