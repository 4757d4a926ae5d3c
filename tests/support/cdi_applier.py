"""What an engine does with CDI specs, written from the CDI specification for the tests: it shares no code with nvct.

"OCI Edits" of the specification: the edits of a spec once, then those of each device, onto an OCI runtime spec.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


def apply_cdi(config: dict[str, Any], specs: Sequence[Path], names: Sequence[str]) -> None:
    """Give the container of an OCI spec the devices of these qualified names. KeyError for a name that no spec has."""
    loaded = [yaml.safe_load(path.read_text()) for path in specs]
    done: list[dict[str, Any]] = []
    for name in names:
        kind, _, wanted = name.partition("=")
        found = [
            (spec, device)
            for spec in loaded
            if spec["kind"] == kind
            for device in spec["devices"]
            if device["name"] == wanted
        ]
        if len(found) != 1:
            raise KeyError(name)
        spec, device = found[0]
        if not any(spec is other for other in done):
            _apply(config, spec.get("containerEdits", {}))
            done.append(spec)
        _apply(config, device["containerEdits"])


def _apply(config: dict[str, Any], edits: dict[str, Any]) -> None:
    unknown = set(edits) - {"env", "deviceNodes", "mounts", "hooks", "additionalGids"}
    assert not unknown, unknown
    for assignment in edits.get("env", []):
        name = assignment.partition("=")[0]
        env = config["process"].setdefault("env", [])
        env[:] = [other for other in env if other.partition("=")[0] != name] + [assignment]
    for node in edits.get("deviceNodes", []):
        _add_device(config, node)
    for mount in edits.get("mounts", []):
        _add_mount(config, mount)
    for hook in edits.get("hooks", []):
        entry = {key: hook[key] for key in ("path", "args", "env", "timeout") if key in hook}
        config.setdefault("hooks", {}).setdefault(hook["hookName"], []).append(entry)
    gids = config["process"].setdefault("user", {}).setdefault("additionalGids", [])
    gids += [gid for gid in edits.get("additionalGids", []) if gid]


def _add_device(config: dict[str, Any], node: dict[str, Any]) -> None:
    device = {"path": node["path"], **_numbers(node)}
    device |= {key: node[key] for key in ("fileMode", "uid", "gid") if key in node}
    linux = config.setdefault("linux", {})
    devices = linux.setdefault("devices", [])
    devices[:] = [other for other in devices if other["path"] != node["path"]] + [device]
    rule = {"allow": True, "type": device["type"], "major": device["major"], "minor": device["minor"]}
    rule["access"] = node.get("permissions", "rwm")
    rules = linux.setdefault("resources", {}).setdefault("devices", [])
    if rule not in rules:
        rules.append(rule)


def _numbers(node: dict[str, Any]) -> dict[str, Any]:
    """What the spec does not say of a node is that of the host's."""
    if all(key in node for key in ("type", "major", "minor")):
        return {key: node[key] for key in ("type", "major", "minor")}
    status = os.stat(node.get("hostPath", node["path"]))
    kind = "b" if stat.S_ISBLK(status.st_mode) else "c"
    return {"type": kind, "major": os.major(status.st_rdev), "minor": os.minor(status.st_rdev)}


def _add_mount(config: dict[str, Any], mount: dict[str, Any]) -> None:
    entry = {
        "source": mount["hostPath"],
        "destination": mount["containerPath"],
        "type": mount.get("type", "bind"),
        "options": mount.get("options", []),
    }
    mounts = config.setdefault("mounts", [])
    mounts[:] = [other for other in mounts if other["destination"] != entry["destination"]] + [entry]
    mounts.sort(key=lambda other: other["destination"].rstrip("/").count("/"))
