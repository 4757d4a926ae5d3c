"""Edits → an OCI runtime spec: config.json as a value, with devices, rules, mounts, env and hooks of ours in it.

Pure functions without policy. Specs come and go as `fastjson` has them; they are never changed in place, and whatever
they hold besides stays. Facts: the OCI runtime specification 1.0.2, config.md and config-linux.md.
"""

from __future__ import annotations

from nvct.edits import HOOK_ENV, HOOK_STAGE
from nvct.errors import RequestError
from nvct.record import record
from nvct.specparts import list_of, object_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from nvct.model import DeviceEdit, MountEdit

    Spec = dict[str, Any]

# By these names engines call a program that gives a container GPUs: the established one's, or nvct's own.
_GPU_HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit")

_ENV = ("process", "env")
_MOUNTS = ("mounts",)
_NODES = ("linux", "devices")
_RULES = ("linux", "resources", "devices")
# What changes are about, besides the stages of hooks: lists, and objects, which count as lists of [key, value].
_LISTS = (_ENV, ("process", "user", "additionalGids"), _MOUNTS, _NODES, _RULES)
_OBJECTS = (("linux", "netDevices"), ("linux", "intelRdt"))

# Lists of objects that are looked into, besides.
_OF_OBJECTS = (_MOUNTS, _NODES, _RULES, *(("linux", name) for name in ("namespaces", "uidMappings", "gidMappings")))

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
    linux = new["linux"] = object_of(spec, "linux")
    resources = linux["resources"] = object_of(linux, "resources")
    process = new["process"] = object_of(spec, "process")
    _add(linux, "devices", [_device(node) for node in _absent(linux, change.nodes)])
    _add(resources, "devices", [_rule(device) for device in change.rules])
    _add(new, "mounts", [_mount(mount) for mount in change.mounts])
    set_env(process, change.env)
    if change.hook:
        hooks = new["hooks"] = object_of(spec, "hooks")
        path, *arguments = change.hook
        _add(hooks, HOOK_STAGE, [{"path": path, "args": arguments, "env": list(HOOK_ENV)}])
    return new


def difference(old: Spec, new: Spec) -> list[Spec]:
    """What makes `new` of `old`: for each of the places that changes are about its path, what came and what went."""
    stages = dict.fromkeys((*object_of(old, "hooks"), *object_of(new, "hooks")))
    found = []
    for path in (*_LISTS, *_OBJECTS, *(("hooks", stage) for stage in stages)):
        before, after = _entries(old, path), _entries(new, path)
        came = [entry for entry in after if entry not in before]
        went = [entry for entry in before if entry not in after]
        if came or went:
            found.append({"path": list(path), "came": came, "went": went})
    return found


def is_place(path: list[Any]) -> bool:
    """Whether that is the path of a place that changes are about."""
    place = tuple(path)
    return place in _LISTS or place in _OBJECTS or (len(place) == 2 and place[0] == "hooks" and type(place[1]) is str)


def still_there(spec: Spec, changes: list[Spec]) -> list[Spec]:
    """What of the differences is in the spec and has to be undone. None where an engine has written it anew since.

    What came and is there is to go, whatever else was edited by hand since. What went is to come back, but for what is
    the user's by now: whose successor (see `_name`) was edited or removed. Of differences that say the same the first
    one counts. A variable alone proves nothing where other things came with it: an engine may write `void` by itself.
    """
    rest: dict[tuple[str, ...], list[Any]] = {}
    back: dict[tuple[str, ...], list[Any]] = {}
    found = []
    for change in changes:
        path = tuple(change["path"])
        entries = rest.get(path, _entries(spec, path))
        came = [entry for entry in change["came"] if entry in entries]
        rest[path] = [entry for entry in entries if entry not in came]
        edited = _names(path, [entry for entry in change["came"] if entry not in came])
        said = back.setdefault(path, [])
        went = [entry for entry in change["went"] if _name(path, entry) not in edited and entry not in said]
        said += went
        if came or went:
            found.append({"path": list(path), "came": came, "went": went})
    others = [change for change in changes if change["came"] and tuple(change["path"]) != _ENV]
    proof = [change for change in found if change["came"] and (tuple(change["path"]) != _ENV or not others)]
    return found if proof else []


def without(spec: Spec, changes: list[Spec]) -> Spec:
    """The spec with differences that are `still_there` undone; what went comes back after what has stayed, unless
    something else is there under its name.
    """
    new = dict(spec)
    for change in changes:
        path = tuple(change["path"])
        stayed = [entry for entry in _entries(new, path) if entry not in change["came"]]
        names = _names(path, stayed)
        _put(new, path, stayed + [entry for entry in change["went"] if _name(path, entry) not in names])
    return new


def _name(path: tuple[str, ...], entry: Any) -> object:
    """What two entries have in common of which one takes the other's place: by default all."""
    if path == _ENV:
        return str(entry).partition("=")[0]
    if path in _OBJECTS:
        return entry[0] if isinstance(entry, list) and entry else entry
    key = "destination" if path == _MOUNTS else "path" if path == _NODES else ""
    return entry.get(key) if key and isinstance(entry, dict) else entry


def _names(path: tuple[str, ...], entries: list[Any]) -> list[object]:
    return [_name(path, entry) for entry in entries]


def _entries(spec: Spec, path: Sequence[str]) -> list[Any]:
    """What is at one of the places that changes are about."""
    for parent in path[:-1]:
        spec = object_of(spec, parent)
    if tuple(path) in _OBJECTS:
        return [[key, value] for key, value in object_of(spec, path[-1]).items()]
    return list_of(spec, path[-1])


def _put(spec: Spec, path: Sequence[str], entries: list[Any]) -> None:
    """The opposite of `_entries`, with copies of the spec's inner objects. An object without a key goes, since an empty
    `intelRdt` asks for a group of its own.
    """
    *parents, name = path
    for parent in parents:
        spec[parent] = spec = object_of(spec, parent)
    if tuple(path) not in _OBJECTS:
        spec[name] = entries
    elif entries:
        spec[name] = dict(entries)
    else:
        spec.pop(name, None)


def check_shape(spec: Spec) -> None:
    """Raise RequestError where a part of the spec that is looked into has another shape than the OCI runtime
    specification gives it.
    """
    for path in (*_LISTS, *_OBJECTS):
        _entries(spec, path)
    stages = [("hooks", stage) for stage in object_of(spec, "hooks")]
    for place in (*_OF_OBJECTS, *stages):
        for entry in _entries(spec, place):
            if not isinstance(entry, dict):
                raise RequestError(
                    f"`{'.'.join(place)}` in config.json has {entry!r:.80}; expected objects, as in `runc spec`"
                )
    for mount in list_of(spec, "mounts"):
        _texts(mount, "mounts", ("destination", "source", "type"), list_of(mount, "options"))
    for node in _entries(spec, _NODES):
        _texts(node, "linux.devices", ("path", "type"))


def _texts(entry: Spec, where: str, keys: Sequence[str], more: Sequence[object] = ()) -> None:
    for value in (*(entry.get(key, "") for key in keys), *more):
        if not isinstance(value, str):
            raise RequestError(
                f"an entry of `{where}` in config.json has {value!r:.80}; expected text, as `runc spec` writes it"
            )


def without_gpu_hooks(spec: Spec) -> Spec:
    """The spec without the hooks by which engines have a container given GPUs: it gets them by the spec itself."""
    hooks = object_of(spec, "hooks")
    kept = {stage: [hook for hook in list_of(hooks, stage) if not _gives_gpus(hook)] for stage in hooks}
    return {**spec, "hooks": kept} if kept != hooks else spec


def _gives_gpus(hook: object) -> bool:
    path = hook.get("path") if isinstance(hook, dict) else None
    return isinstance(path, str) and path.rpartition("/")[2] in _GPU_HOOKS


def _absent(linux: Spec, nodes: Sequence[Node]) -> list[Node]:
    """The nodes that the spec does not have. Raises RequestError where it has another device under a node's path."""
    there = {entry.get("path"): entry for entry in list_of(linux, "devices") if isinstance(entry, dict)}
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
    old = list_of(place, name)
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
        kept = [entry for entry in list_of(process, "env") if str(entry).partition("=")[0] != name]
        process["env"] = [*kept, f"{name}={value}"]
