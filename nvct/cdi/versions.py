"""Which version of the CDI specification the content of a spec needs, by its tables of fields."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

VERSIONS = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")

# The fields of containerEdits, and of intelRdt in it, that came later.
_EDITS = {"additionalGids": "0.7.0", "intelRdt": "0.7.0", "netDevices": "1.1.0"}
_RDT = {"schemata": "1.1.0", "enableMonitoring": "1.1.0"}


def lowest_version(spec: dict[str, Any]) -> tuple[str, str]:
    """The lowest version that has everything in the spec, and what needs it. The spec must have the right shape."""
    return max(_needs(spec), key=lambda need: VERSIONS.index(need[0]))


def _needs(spec: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield VERSIONS[0], "nothing is special"
    yield from _needs_of_edits(spec.get("containerEdits", {}))
    if "." in spec["kind"].partition("/")[2]:
        yield "0.6.0", f"the class of {spec['kind']} has a dot"
    if spec.get("annotations"):
        yield "0.6.0", "the spec has annotations"
    for device in spec["devices"]:
        if device["name"][0].isdigit():
            yield "0.5.0", f"the device name `{device['name']}` begins with a digit"
        if device.get("annotations"):
            yield "0.6.0", f"the device `{device['name']}` has annotations"
        yield from _needs_of_edits(device["containerEdits"])


def _needs_of_edits(edits: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for node in edits.get("deviceNodes", ()):
        if node.get("hostPath"):
            yield "0.5.0", f"{node['path']} is {node['hostPath']} on the host"
    for mount in edits.get("mounts", ()):
        if mount.get("type"):
            yield "0.4.0", f"the mount at {mount['containerPath']} has a type"
    for name, version in _EDITS.items():
        if edits.get(name):
            yield version, f"there are {name}"
    for name, version in _RDT.items():
        if edits.get("intelRdt", {}).get(name):
            yield version, f"intelRdt has {name}"
