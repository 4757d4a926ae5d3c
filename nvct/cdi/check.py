"""Whether a value is a CDI spec, and if not, what is wrong where. The rules are those of the CDI specification."""

from __future__ import annotations

import os
import re
import stat

from nvct.cdi import names
from nvct.cdi.versions import VERSIONS, lowest_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_STAGES = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
_PERMISSIONS = re.compile("[rwm]*|none")
_VERSION = re.compile("v?[0-9]+[.][0-9]+[.][0-9]+", re.ASCII)


class _Wrong(Exception):
    """What was expected of a value."""


def _text(value: object) -> None:
    if not isinstance(value, str) or not value:
        raise _Wrong("a string that is not empty")


def _any_text(value: object) -> None:
    if not isinstance(value, str):
        raise _Wrong("a string")


def _path(value: object) -> None:
    if not isinstance(value, str) or not value.startswith("/"):
        raise _Wrong("an absolute path")


def _number(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Wrong("a whole number")


def _natural(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 32:
        raise _Wrong("a whole number from 0 to 4294967295")


def _switch(value: object) -> None:
    if not isinstance(value, bool):
        raise _Wrong("true or false")


def _assignment(value: object) -> None:
    if not isinstance(value, str) or value.find("=") < 1:
        raise _Wrong("NAME=VALUE")


def _one_of(*choices: str) -> Callable[[object], None]:
    def check(value: object) -> None:
        if value not in choices:
            raise _Wrong("one of " + ", ".join(choices))

    return check


def _permissions(value: object) -> None:
    if not isinstance(value, str) or not _PERMISSIONS.fullmatch(value):
        raise _Wrong("of the letters r, w and m, or `none`")


def _annotations(value: object) -> None:
    if not isinstance(value, dict) or not all(isinstance(part, str) for pair in value.items() for part in pair):
        raise _Wrong("a mapping of strings to strings")


def _kind(value: object) -> None:
    if not isinstance(value, str) or not names.is_kind(value):
        raise _Wrong("VENDOR/CLASS, as nvidia.com/gpu")


def _device_name(value: object) -> None:
    if not isinstance(value, str) or not names.is_device(value):
        raise _Wrong("letters, digits, `_`, `-`, `.` and `:`, beginning and ending with a letter or digit")


def _version(value: object) -> None:
    if not isinstance(value, str) or not _VERSION.fullmatch(value):
        raise _Wrong(f"a version of the CDI specification, {VERSIONS[0]} to {VERSIONS[-1]}")
    if value.removeprefix("v") not in VERSIONS:
        raise _Wrong(f"a version that nvct knows, {VERSIONS[0]} to {VERSIONS[-1]}")


# A field: what checks it, and whether it must be there. A tuple of one is a list of such values.
_Fields = dict[str, tuple["Callable[[object], None] | _Fields | tuple[object]", bool]]

_NODE: _Fields = {
    "path": (_path, True),
    "hostPath": (_path, False),
    "type": (_one_of("b", "c", "u", "p"), False),
    "major": (_number, False),
    "minor": (_number, False),
    "fileMode": (_natural, False),
    "permissions": (_permissions, False),
    "uid": (_natural, False),
    "gid": (_natural, False),
}
_MOUNT: _Fields = {
    "hostPath": (_text, True),
    "containerPath": (_path, True),
    "options": ((_text,), False),
    "type": (_any_text, False),
}
_HOOK: _Fields = {
    "hookName": (_one_of(*_STAGES), True),
    "path": (_path, True),
    "args": ((_any_text,), False),
    "env": ((_assignment,), False),
    "timeout": (_number, False),
}
_RDT: _Fields = {
    "closID": (_any_text, False),
    "l3CacheSchema": (_any_text, False),
    "memBwSchema": (_any_text, False),
    "schemata": ((_any_text,), False),
    "enableCMT": (_switch, False),
    "enableMBM": (_switch, False),
    "enableMonitoring": (_switch, False),
}
_NET: _Fields = {"hostInterfaceName": (_text, True), "name": (_text, True)}
_EDITS: _Fields = {
    "env": ((_assignment,), False),
    "deviceNodes": ((_NODE,), False),
    "mounts": ((_MOUNT,), False),
    "hooks": ((_HOOK,), False),
    "additionalGids": ((_natural,), False),
    "intelRdt": (_RDT, False),
    "netDevices": ((_NET,), False),
}
_DEVICE: _Fields = {
    "name": (_device_name, True),
    "annotations": (_annotations, False),
    "containerEdits": (_EDITS, True),
}
_SPEC: _Fields = {
    "cdiVersion": (_version, True),
    "kind": (_kind, True),
    "annotations": (_annotations, False),
    "devices": ((_DEVICE,), True),
    "containerEdits": (_EDITS, False),
}


def problems(spec: object) -> list[str]:
    """What is wrong with a spec, a sentence each that begins with the place; none for a valid spec."""
    found = list(_object(spec, _SPEC, ""))
    if found or not isinstance(spec, dict):
        return found
    if not spec["devices"]:
        found.append("devices: the list is empty; expected one device or more")
    seen: set[str] = set()
    for number, device in enumerate(spec["devices"]):
        if device["name"] in seen:
            found.append(f"devices[{number}].name: `{device['name']}` is there twice")
        if not any(device["containerEdits"].values()):
            found.append(f"devices[{number}].containerEdits: `{device['name']}` brings nothing; expected an edit")
        seen.add(device["name"])
    if not found:
        version, reason = lowest_version(spec)
        if VERSIONS.index(version) > VERSIONS.index(spec["cdiVersion"].removeprefix("v")):
            found.append(f"cdiVersion: {spec['cdiVersion']}, but {reason}, which needs {version}")
    return found


def _object(value: object, fields: _Fields, where: str) -> Iterator[str]:
    place = where or "the spec"
    if not isinstance(value, dict):
        yield f"{place}: expected a mapping with {', '.join(fields)}"
        return
    prefix = f"{where}." if where else ""
    for name in value:
        if name not in fields:
            yield f"{prefix}{ascii(str(name))[1:-1]:.80}: no such field; {place} has {', '.join(fields)}"
    for name, (kind, required) in fields.items():
        if name in value:
            yield from _value(value[name], kind, prefix + name)
        elif required:
            yield f"{prefix}{name}: missing"


def _value(value: object, kind: Any, where: str) -> Iterator[str]:
    if isinstance(kind, dict):
        yield from _object(value, kind, where)
    elif isinstance(kind, tuple):
        if not isinstance(value, list):
            yield f"{where}: expected a list"
            return
        for number, item in enumerate(value):
            yield from _value(item, kind[0], f"{where}[{number}]")
    else:
        try:
            kind(value)
        except _Wrong as wrong:
            yield f"{where}: {ascii(value)[:80]}, expected {wrong}"


def untruths(spec: dict[str, Any]) -> list[str]:
    """What a valid spec says of this machine that is not so, a sentence each."""
    parts = [("", spec.get("containerEdits", {}))]
    parts += [(f"device {device['name']}: ", device["containerEdits"]) for device in spec["devices"]]
    found: dict[str, str] = {}
    for name, edits in parts:
        for sentence in _untruths_of(edits):
            found.setdefault(sentence, name)  # devices by several names say the same
    return [name + sentence for sentence, name in found.items()]


def _untruths_of(edits: dict[str, Any]) -> Iterator[str]:
    for node in edits.get("deviceNodes", ()):
        yield from _about_node(node, node.get("hostPath") or node["path"])
    for mount in edits.get("mounts", ()):
        # Other types of mounts, a tmpfs for one, have no file for a source.
        if mount.get("type", "") in ("", "bind", "none") and not os.path.lexists(mount["hostPath"]):
            yield f"{mount['hostPath']} is not there, and is to be mounted at {mount['containerPath']}"
    for hook in edits.get("hooks", ()):
        if hook["hookName"] != "startContainer" and not os.access(hook["path"], os.X_OK):
            yield f"the hook {hook['path']} is no program that can be run"


def _about_node(node: dict[str, Any], path: str) -> Iterator[str]:
    try:
        status = os.lstat(path)
    except OSError as error:
        yield f"the node {path}: {error.strerror}"
        return
    kinds = {"c": stat.S_ISCHR, "u": stat.S_ISCHR, "b": stat.S_ISBLK, "p": stat.S_ISFIFO}
    if "type" in node and not kinds[node["type"]](status.st_mode):
        yield f"{path} is no node of the type `{node['type']}`"
        return
    numbers = os.major(status.st_rdev), os.minor(status.st_rdev)
    said = node.get("major", numbers[0]), node.get("minor", numbers[1])
    if numbers != said:
        yield f"the node {path} is {numbers[0]}:{numbers[1]}, the spec says {said[0]}:{said[1]}"
