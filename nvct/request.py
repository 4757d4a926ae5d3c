"""What a container asks for: OCI config.json, or a bare environment, → Request.

Only what is written there is read; whether it counts, exists on the node and may be had is decided by `nvct.plan`. The
engine merges the image's variables and the user's before we see them, so the source of both is "env".
"""

from __future__ import annotations

from os.path import normpath

from nvct.errors import RequestError
from nvct.model import Ask, ContainerRoot, Request
from nvct.record import replace
from nvct.settings import CDI_ANNOTATIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

DEVICES = "NVIDIA_VISIBLE_DEVICES"
MOUNT_LIST = "/var/run/nvidia-container-devices"
# Docker swarm gives a task its share of a generic resource in a variable of this prefix and the resource's name.
SWARM_PREFIX = "DOCKER_RESOURCE_"

_CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
_REQUIRE_PREFIX = "NVIDIA_REQUIRE_"
_REQUIRE_CUDA = "NVIDIA_REQUIRE_CUDA"
_REQUIRE_JETPACK = "NVIDIA_REQUIRE_JETPACK"  # names no condition but a set of files, on Jetson boards
_EXTRAS = {"gds": "NVIDIA_GDS", "mofed": "NVIDIA_MOFED", "gdrcopy": "NVIDIA_GDRCOPY", "nvswitch": "NVIDIA_NVSWITCH"}
_TRUE = ("1", "t", "T", "TRUE", "true", "True")
_MOUNTS_SOURCE = f"the mounts below {MOUNT_LIST}"

# Characters. Linux starts no program with a longer variable (execve(2), MAX_ARG_STRLEN): this one never could run.
_LONGEST = 128 << 10


def request_from_spec(spec: object, container: ContainerRoot, with_annotations: bool = False) -> Request:
    """The request in an OCI runtime spec, config.json as `fastjson.loads` returns it.

    `with_annotations`: the annotations count, too. They are the engine's, whose runtime may act on them; a hook may
    not, since by then the engine itself has. Raises RequestError when `spec` is no such spec.
    """
    if not isinstance(spec, dict):
        raise RequestError(f"config.json holds {_json_kind(spec)}; expected the object of an OCI runtime spec")
    for name in ("ociVersion", "process", "root"):
        if not spec.get(name):
            raise RequestError(f"config.json has no `{name}`; expected an OCI runtime spec, as `runc spec` writes it")
    process = spec["process"]
    if not isinstance(process, dict):
        raise RequestError(f"`process` in config.json is {_json_kind(process)}; expected an object")
    env = _list(process.get("env"), "process.env", "a list of NAME=VALUE")
    mounts = _list(spec.get("mounts"), "mounts", "a list of objects")
    request = request_from_env(env, container, _is_privileged(process.get("capabilities")), mounts)
    if not with_annotations:
        return request
    return replace(request, annotations=_cdi_annotations(spec.get("annotations")))


def request_from_env(
    env: dict[str, str] | Iterable[object],
    container: ContainerRoot = ContainerRoot(),  # noqa: B008 - an immutable value
    privileged: bool = False,
    mounts: Iterable[object] = (),
) -> Request:
    """The request in a container's environment, and in its `mounts` as they stand in an OCI spec.

    `env` is a mapping, or NAME=VALUE entries of which the last of a name counts; runtimes take entries without `=`,
    too, and such an entry sets no variable. Raises RequestError for an entry that is no text and for a value that no
    program could be started with.
    """
    variables = _variables(env)
    devices, channels = _listed(mounts)
    return Request(
        devices=_ask(variables, DEVICES),
        swarm={name: _tokens_of(variables, name) for name in variables if name.startswith(SWARM_PREFIX)},
        mount_list=Ask(_MOUNTS_SOURCE, devices) if devices else None,
        imex_mounts=Ask(_MOUNTS_SOURCE, channels) if channels else None,
        capabilities=_ask(variables, _CAPABILITIES),
        legacy_cuda="" if variables.get(_REQUIRE_CUDA) else variables.get("CUDA_VERSION", ""),
        requirements=_requirements(variables),
        requirements_disabled=variables.get("NVIDIA_DISABLE_REQUIRE") in _TRUE,
        mig_config=_ask(variables, "NVIDIA_MIG_CONFIG_DEVICES"),
        mig_monitor=_ask(variables, "NVIDIA_MIG_MONITOR_DEVICES"),
        imex_channels=_ask(variables, "NVIDIA_IMEX_CHANNELS"),
        extras={extra: _tokens_of(variables, name) for extra, name in _EXTRAS.items() if name in variables},
        privileged=privileged,
        container=container,
    )


def asks_for_nothing(request: Request) -> bool:
    """Whether no settings of a node could make this a request for GPUs, so that nobody need look at the node."""
    lists = (request.devices, *request.swarm.values())
    if any(ask is not None and meant(ask.tokens) is not None for ask in lists):
        return False
    return (
        not request.annotations and request.mount_list is None and not (request.devices is None and request.legacy_cuda)
    )


def meant(tokens: tuple[str, ...]) -> tuple[str, ...] | None:
    """What the words of a variable leave of its tokens: None for nothing, () for the driver without a device.

    `void` anywhere outweighs all; of `all` and `none` the first one outweighs the rest, as in the field.
    """
    if not tokens or "void" in tokens:
        return None
    for token in tokens:
        if token == "all":
            return ("all",)
        if token == "none":
            return ()
    return tokens


def _cdi_annotations(annotations: object) -> dict[str, Ask]:
    """Those that name devices, by their keys in order; of any prefix that the settings may allow."""
    if annotations is None:
        return {}
    if not isinstance(annotations, dict):
        raise RequestError(f"`annotations` in config.json is {_json_kind(annotations)}; expected an object")
    asks = {}
    for key in sorted(annotations):
        value = annotations[key]
        if CDI_ANNOTATIONS in key and isinstance(value, str):
            asks[key] = Ask(f"annotation {key if key.isprintable() else ascii(key)[1:-1]}", _tokens(value))
    return {key: ask for key, ask in asks.items() if ask.tokens}


def _variables(env: dict[str, str] | Iterable[object]) -> dict[str, str]:
    if isinstance(env, dict):
        return env
    variables = {}
    for number, entry in enumerate(env):
        if not isinstance(entry, str):
            raise RequestError(f"entry {number} of the container's env is {_json_kind(entry)}; expected NAME=VALUE")
        name, equals, value = entry.partition("=")
        if equals:
            variables[name] = value
    return variables


def _ask(variables: dict[str, str], name: str) -> Ask | None:
    return _tokens_of(variables, name) if name in variables else None


def _tokens_of(variables: dict[str, str], name: str) -> Ask:
    return Ask(_source(name), _tokens(_value(variables, name)))


def _tokens(value: str) -> tuple[str, ...]:
    parts = map(str.strip, value.split(","))
    return tuple(part for part in parts if part)


def _value(variables: dict[str, str], name: str) -> str:
    value = variables[name]
    if len(value) > _LONGEST:
        raise RequestError(f"{_source(name)} has {len(value)} characters, expected at most {_LONGEST}; ask for less")
    return value


def _source(name: str) -> str:
    """A variable for messages, which are lines of text, though an environment can hold any name."""
    return f"env {name if name.isprintable() else ascii(name)[1:-1]}"


def _requirements(variables: dict[str, str]) -> tuple[Ask, ...]:
    """By name, since the order of an environment means nothing, and messages should not depend on it."""
    names = [name for name in variables if name.startswith(_REQUIRE_PREFIX) and not name.startswith(_REQUIRE_JETPACK)]
    return tuple(Ask(_source(name), (_value(variables, name),)) for name in sorted(names))


def _listed(mounts: Iterable[object]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Devices and IMEX channels that are listed as mounts of /dev/null, each once."""
    names = [name for name in map(_listed_name, mounts) if name]
    channels = [name[len("imex/") :] for name in names if name.startswith("imex/")]
    devices = [_cdi_name(name) for name in names if not name.startswith("imex/")]
    return tuple(dict.fromkeys(devices)), tuple(dict.fromkeys(channels))


def _listed_name(mount: object) -> str:
    """What stands after the list's folder in the target of a mount of /dev/null; "" for any other mount."""
    if not isinstance(mount, dict):
        return ""
    source, target = mount.get("source"), mount.get("destination")
    if not isinstance(source, str) or not isinstance(target, str) or _clean(source) != "/dev/null":
        return ""
    folder, name = MOUNT_LIST + "/", _clean(target)
    return name[len(folder) :] if name.startswith(folder) else ""


def _clean(path: str) -> str:
    return normpath("/" + path.lstrip("/")) if path.startswith("/") else normpath(path)


def _cdi_name(name: str) -> str:
    """`cdi/<vendor>/<class>/<name>` as the CDI name that it stands for; it may also be written out after `cdi/`.

    Anything else stays as it is, also what is malformed: it is refused under the name that the mount has.
    """
    parts = name.split("/", 3)
    if parts[0] != "cdi" or len(parts) < 3:
        return name
    if "=" in parts[2]:
        return name[len("cdi/") :]
    return f"{parts[1]}/{parts[2]}={parts[3]}" if len(parts) == 4 else name


def _is_privileged(capabilities: object) -> bool:
    """Whether CAP_SYS_ADMIN is in the bounding set, which also tells for a user without effective capabilities.

    OCI 1.0.0-rc1 to rc4 had one flat list in place of five; the shape says which it is.
    """
    bounding = capabilities.get("bounding") if isinstance(capabilities, dict) else capabilities
    return isinstance(bounding, list) and "CAP_SYS_ADMIN" in bounding


def _list(value: object, name: str, expected: str) -> list[object]:
    """A part of the spec that may be absent."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestError(f"`{name}` in config.json is {_json_kind(value)}; expected {expected}")
    return value


def _json_kind(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, bool):
        return "a boolean"
    return "null" if value is None else "a number"
