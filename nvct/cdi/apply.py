"""CDI edits → an OCI runtime spec, as engines do it that know CDI.

Pure but for the look at device nodes of which a spec does not say all. Facts: the CDI specification, "OCI Edits", and
the OCI runtime specification 1.1.
"""

from __future__ import annotations

import os
import stat

from nvct.edits import HOOK_ENV
from nvct.errors import RequestError
from nvct.specparts import list_of, object_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from nvct.cdi.registry import Named

    Json = dict[str, Any]


def edits_of(devices: Sequence[Named]) -> list[Json]:
    """The edits of devices in the order in which they are to be applied: those of a spec before its first device's."""
    found: list[Json] = []
    specs: set[str] = set()
    for named in devices:
        if named.file.path not in specs:
            specs.add(named.file.path)
            found.append(named.file.spec.get("containerEdits", {}))
        found.append(named.device["containerEdits"])
    return found


def apply(spec: Json, edits: Sequence[Json]) -> Json:
    """The OCI spec with all edits, which are valid, in it; `spec` stays as it is.

    Raises RequestError for a spec of another shape than the OCI runtime specification gives it, and for a device node
    that is not on this machine.
    """
    new = dict(spec)
    process = new["process"] = object_of(spec, "process")
    linux = new["linux"] = object_of(spec, "linux")
    for edit in edits:
        for entry in edit.get("env", ()):
            _set(process, "env", entry, lambda other: str(other).partition("=")[0])
        for node in edit.get("deviceNodes", ()):
            _add_node(linux, node, process.get("user"))
        for device in edit.get("netDevices", ()):
            named = {device["hostInterfaceName"]: {"name": device["name"]}}
            linux["netDevices"] = {**object_of(linux, "netDevices"), **named}
        for mount in edit.get("mounts", ()):
            _set(new, "mounts", _mount(mount, linux), lambda other: other.get("destination"))
        for hook in edit.get("hooks", ()):
            _add_hook(new, hook)
        if edit.get("intelRdt"):
            linux["intelRdt"] = edit["intelRdt"]
        _add_groups(process, edit.get("additionalGids", ()))
    if any(edit.get("mounts") for edit in edits):
        # What is mounted below another mount must come after it. Python's sort keeps the order of the rest.
        new["mounts"] = sorted(new["mounts"], key=lambda mount: _depth(str(mount.get("destination"))))
    return new


def _depth(path: str) -> int:
    return len([part for part in path.split("/") if part])


def _set(place: Json, name: str, entry: Any, key: Callable[[Any], object]) -> None:
    """Append an entry to a list, in the place of all that have the same key."""
    place[name] = [other for other in list_of(place, name) if key(other) != key(entry)] + [entry]


def _add_node(linux: Json, node: Json, user: object) -> None:
    device = {"path": node["path"], **_numbers(node)}
    owner = user if isinstance(user, dict) else {}
    for name in ("uid", "gid"):
        if name in node:
            device[name] = node[name]
        elif owner.get(name):
            device[name] = owner[name]  # so that the container's user can open it
    if "fileMode" in node:
        device["fileMode"] = node["fileMode"]
    _set(linux, "devices", device, lambda other: other.get("path"))
    access = node.get("permissions") or "rwm"
    if device["type"] not in ("b", "c") or access == "none":
        return
    rule = {name: device[name] for name in ("type", "major", "minor")}
    linux["resources"] = resources = object_of(linux, "resources")
    rules = list_of(resources, "devices")
    new = {"allow": True, **rule, "access": access}
    resources["devices"] = rules if new in rules else [*rules, new]


def _numbers(node: Json) -> Json:
    """What the spec does not say of a node is that of the machine's."""
    said = {name: node[name] for name in ("type", "major", "minor") if node.get(name)}
    if "type" in said and ("major" in said or said["type"] == "p"):
        return {"major": 0, "minor": 0, **said} if said["type"] != "p" else said
    path = node.get("hostPath") or node["path"]
    try:
        status = os.stat(path)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}, though a CDI spec has it as a device node") from None
    kinds = (("b", stat.S_ISBLK), ("c", stat.S_ISCHR), ("p", stat.S_ISFIFO))
    kind = next((letter for letter, is_kind in kinds if is_kind(status.st_mode)), None)
    if kind is None:
        raise RequestError(f"{path} is no device node, though a CDI spec has it as one")
    return {"type": kind, "major": os.major(status.st_rdev), "minor": os.minor(status.st_rdev), **said}


def _mount(mount: Json, linux: Json) -> Json:
    return {
        "destination": mount["containerPath"],
        "type": mount.get("type") or "bind",
        "source": mount["hostPath"],
        "options": list(mount.get("options") or ["bind"]),
    }


def _add_hook(spec: Json, hook: Json) -> None:
    entry: Json = {name: hook[name] for name in ("path", "args", "timeout") if name in hook}
    entry["env"] = list(hook.get("env") or HOOK_ENV)
    hooks = spec["hooks"] = object_of(spec, "hooks")
    stage = list_of(hooks, hook["hookName"])
    hooks[hook["hookName"]] = stage if entry in stage else [*stage, entry]


def _add_groups(process: Json, groups: Sequence[int]) -> None:
    wanted = [group for group in groups if group]
    if wanted:
        user = process["user"] = object_of(process, "user")
        old = list_of(user, "additionalGids")
        user["additionalGids"] = [*old, *(group for group in dict.fromkeys(wanted) if group not in old)]
