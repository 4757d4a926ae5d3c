"""Edits → an OCI runtime spec: config.json as a value, with devices, rules, mounts, env and hooks of ours in it.

Pure functions without policy. Specs come and go as `fastjson` has them; they are never changed in place, and whatever
they hold besides stays. Facts: the OCI runtime specification 1.0.2, config.md and config-linux.md.
"""

from __future__ import annotations

from nvct.edits import HOOK_ENV, HOOK_STAGE
from nvct.errors import RequestError
from nvct.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from nvct.model import DeviceEdit, MountEdit

    Spec = dict[str, Any]

# By these names engines call a program that gives a container GPUs: the established one's, or nvct's own.
_GPU_HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit")

# The lists of a spec that changes are about, besides the stages of hooks.
_LISTS = (
    ("process", "env"),
    ("process", "user", "additionalGids"),
    ("mounts",),
    ("linux", "devices"),
    ("linux", "resources", "devices"),
)

# What a container's programs do with a device; making nodes (m) is no part of it.
_ACCESS = "rw"


@record
class Node:
    """A device node that the runtime is to make: as on the host, `mode` (permission bits), `uid` and `gid` included."""

    edit: DeviceEdit
    mode: int
    uid: int
    gid: int


@record
class Change:
    """What is to be added to a spec.

    `rules` are the devices that the container may read and write, `hook` is a hook's path and arguments, the first of
    them its name.
    """

    nodes: tuple[Node, ...] = ()
    rules: tuple[DeviceEdit, ...] = ()
    mounts: tuple[MountEdit, ...] = ()
    env: dict[str, str] = {}
    hook: tuple[str, ...] = ()


def with_change(spec: Spec, change: Change) -> Spec:
    """The spec with the change in it; what is there already is not added again.

    Raises RequestError where the spec has another device in a node's place, or another shape than the OCI runtime
    specification gives it.
    """
    new = dict(spec)
    linux = new["linux"] = _object(spec, "linux")
    resources = linux["resources"] = _object(linux, "resources")
    process = new["process"] = _object(spec, "process")
    _add(linux, "devices", [_device(node) for node in _absent(linux, change.nodes)])
    _add(resources, "devices", [_rule(device) for device in change.rules])
    _add(new, "mounts", [_mount(mount) for mount in change.mounts])
    set_env(process, change.env)
    if change.hook:
        hooks = new["hooks"] = _object(spec, "hooks")
        path, *arguments = change.hook
        _add(hooks, HOOK_STAGE, [{"path": path, "args": arguments, "env": list(HOOK_ENV)}])
    return new


def difference(old: Spec, new: Spec) -> list[Spec]:
    """What of the lists that changes are about makes `new` of `old`: for each, where it stands, what came and went."""
    stages = dict.fromkeys((*_object(old, "hooks"), *_object(new, "hooks")))
    found = []
    for path in (*_LISTS, *(("hooks", stage) for stage in stages)):
        before, after = _at(old, path), _at(new, path)
        came = [entry for entry in after if entry not in before]
        went = [entry for entry in before if entry not in after]
        if came or went:
            found.append({"path": list(path), "came": came, "went": went})
    return found


def has(spec: Spec, changes: list[Spec]) -> bool:
    """Whether the spec is one with these differences in it, and not one that an engine has written anew since."""
    return all(entry in _at(spec, change["path"]) for change in changes for entry in change["came"])


def without(spec: Spec, changes: list[Spec]) -> Spec:
    """The spec as it was before; what went comes back, after what has stayed."""
    new = dict(spec)
    for change in changes:
        place = new
        *parents, name = change["path"]
        for parent in parents:
            place[parent] = place = _object(place, parent)
        place[name] = [entry for entry in _list(place, name) if entry not in change["came"]] + change["went"]
    return new


def without_gpu_hooks(spec: Spec) -> Spec:
    """The spec without the hooks by which engines have a container given GPUs: it gets them by the spec itself."""
    hooks = _object(spec, "hooks")
    kept = {stage: [hook for hook in _list(hooks, stage) if not _gives_gpus(hook)] for stage in hooks}
    return {**spec, "hooks": kept} if kept != hooks else spec


def _gives_gpus(hook: object) -> bool:
    path = hook.get("path") if isinstance(hook, dict) else None
    return isinstance(path, str) and path.rpartition("/")[2] in _GPU_HOOKS


def _absent(linux: Spec, nodes: Sequence[Node]) -> list[Node]:
    """The nodes that the spec does not have. Raises RequestError where it has another device under a node's path."""
    there = {entry.get("path"): entry for entry in _list(linux, "devices") if isinstance(entry, dict)}
    absent = []
    for node in nodes:
        found = there.get(node.edit.path)
        if found is None:
            absent.append(node)
            continue
        numbers = found.get("major"), found.get("minor")
        if found.get("type") not in ("c", "u") or numbers != (node.edit.major, node.edit.minor):
            raise RequestError(
                f"{node.edit.path} is the device {numbers[0]}:{numbers[1]} in config.json, {node.edit.source} is "
                f"{node.edit.major}:{node.edit.minor}: remove it from the container's device list"
            )
    return absent


def _device(node: Node) -> Spec:
    edit = node.edit
    return {
        "path": edit.path,
        "type": "c",
        "major": edit.major,
        "minor": edit.minor,
        "fileMode": node.mode,
        "uid": node.uid,
        "gid": node.gid,
    }


def _rule(device: DeviceEdit) -> Spec:
    return {"allow": True, "type": "c", "major": device.major, "minor": device.minor, "access": _ACCESS}


def _mount(mount: MountEdit) -> Spec:
    # Private, so that what the host mounts there later does not appear in the container.
    return {
        "destination": mount.target,
        "type": "bind",
        "source": mount.source,
        "options": ["bind", "private", *mount.options],
    }


def _add(place: Spec, name: str, entries: list[Spec]) -> None:
    """Append the entries that are not there to a list of the spec. Ours come last, where they outweigh the others."""
    old = _list(place, name)
    new = [entry for entry in entries if not any(_is_same(entry, other) for other in old)]
    if new:
        place[name] = old + new


def _is_same(entry: Spec, other: object) -> bool:
    """Whether both say the same. Mounts are the same by what is mounted where: an engine has its own options."""
    if not isinstance(other, dict):
        return False
    if "destination" in entry:
        return (entry["source"], entry["destination"]) == (other.get("source"), other.get("destination"))
    return entry == other


def set_env(process: Spec, env: dict[str, str]) -> None:
    """Give variables of a spec's `process` their values, each once."""
    for name, value in env.items():
        kept = [entry for entry in _list(process, "env") if str(entry).partition("=")[0] != name]
        process["env"] = [*kept, f"{name}={value}"]


def _at(spec: Spec, path: Sequence[str]) -> list[Any]:
    for parent in path[:-1]:
        spec = _object(spec, parent)
    return _list(spec, path[-1])


def _object(parent: Spec, name: str) -> Spec:
    value: Spec = _part(parent, name, dict, "an object")
    return value


def _list(parent: Spec, name: str) -> list[Any]:
    value: list[Any] = _part(parent, name, list, "a list")
    return value


def _part(parent: Spec, name: str, kind: Callable[..., Any], words: str) -> Any:
    """A copy of a part of the spec, which may be absent."""
    value = parent.get(name)
    if value is None:
        return kind()
    if type(value) is not kind:
        raise RequestError(f"`{name}` in config.json is {value!r:.80}; expected {words}, as `runc spec` writes it")
    return kind(value)
