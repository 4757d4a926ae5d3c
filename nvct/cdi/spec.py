"""Devices → a CDI spec, the dict that its JSON or YAML says.

Pure. Names and versions are those of the CDI specification (CNCF tag-runtime, "Container Device Interface").
"""

from __future__ import annotations

from nvct import edits as codec
from nvct.cdi.devices import CdiDevice, Devices
from nvct.cdi.names import is_class, is_vendor
from nvct.cdi.versions import VERSIONS, lowest_version
from nvct.errors import ChoiceError
from nvct.model import DeviceEdit, Edits, MountEdit, Remainder
from nvct.plan.hookfree import without_hook
from nvct.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any


@record
class NodeMode:
    """What a device node on the host has besides its numbers: `mode` are its permission bits."""

    mode: int
    uid: int
    gid: int


def spec_of(
    devices: Devices, kind: str, hook: str, architecture: str, modes: Mapping[str, NodeMode], version: str = ""
) -> dict[str, Any]:
    """The spec of a kind. `hook` is the path of nvct's small hook, "" for a spec with which nothing of nvct's runs.

    `modes`: by path on the host, what is known of device nodes. `version`: the cdiVersion to say, by default the lowest
    that the content needs. Raises ChoiceError for a kind that is none, and for a version that cannot say the content.
    """
    check_kind(kind)
    common = _common(devices, hook, architecture, modes)
    spec: dict[str, Any] = {"cdiVersion": "", "kind": kind, "devices": list(_devices(devices.devices, modes))}
    if common:
        spec["containerEdits"] = common
    spec["cdiVersion"] = _version(spec, version)
    return spec


def check_kind(kind: str) -> None:
    """Raise ChoiceError for what is no kind of CDI devices."""
    vendor, _, name = kind.partition("/")
    if not is_vendor(vendor) or not is_class(name):
        raise ChoiceError(
            f"{kind!r} is no kind of CDI devices: expected a vendor as `nvidia.com` and a class as `gpu`, each of "
            "letters, digits, `-`, `_` and `.` that begins with a letter and ends with a letter or digit"
        )


def _common(devices: Devices, hook: str, architecture: str, modes: Mapping[str, NodeMode]) -> dict[str, Any]:
    if not hook:
        return _container_edits(without_hook(devices.common, architecture), modes)
    said = _container_edits(devices.common, modes)
    if devices.remainder:
        said["hooks"] = [_hook(devices.remainder, hook)]
    return said


def _devices(devices: tuple[CdiDevice, ...], modes: Mapping[str, NodeMode]) -> Iterator[dict[str, Any]]:
    for device in devices:
        for name in device.names:
            yield {"name": name, "containerEdits": _container_edits(device.edits, modes)}


def _container_edits(edits: Edits, modes: Mapping[str, NodeMode]) -> dict[str, Any]:
    said: dict[str, Any] = {
        "env": [f"{name}={value}" for name, value in edits.env.items()],
        "deviceNodes": [_device_node(edit, modes.get(edit.source)) for edit in edits.devices],
        "mounts": [_mount(edit) for edit in edits.mounts],
    }
    return {name: part for name, part in said.items() if part}


def _device_node(edit: DeviceEdit, mode: NodeMode | None) -> dict[str, Any]:
    """A reader asks the host for nothing when it is told type and numbers, so the mode has to be said as well."""
    node: dict[str, Any] = {"path": edit.path}
    if edit.source != edit.path:
        node["hostPath"] = edit.source
    node |= {"type": "c", "major": edit.major, "minor": edit.minor}
    if mode:
        node["fileMode"] = mode.mode
        node |= {name: number for name, number in (("uid", mode.uid), ("gid", mode.gid)) if number}
    node["permissions"] = "rw"
    return node


def _mount(edit: MountEdit) -> dict[str, Any]:
    return {
        "hostPath": edit.source,
        "containerPath": edit.target,
        "options": [*edit.options, "rbind", "rprivate"],
    }


def _hook(remainder: Remainder, path: str) -> dict[str, Any]:
    return {
        "hookName": codec.HOOK_STAGE,
        "path": path,
        "args": list(codec.hook_arguments(remainder)),
        "env": list(codec.HOOK_ENV),
    }


def _version(spec: dict[str, Any], asked: str) -> str:
    lowest, reason = lowest_version(spec)
    if not asked:
        return lowest
    if asked not in VERSIONS:
        raise ChoiceError(f"{asked!r} is no CDI version that nvct writes: expected one of {', '.join(VERSIONS)}")
    if VERSIONS.index(asked) < VERSIONS.index(lowest):
        raise ChoiceError(
            f"CDI {asked} cannot say that {reason}: that needs {lowest}; ask for it, or avoid the need (--name "
            "type-index,uuid for other names, --class, dev_root in the settings)"
        )
    return asked
