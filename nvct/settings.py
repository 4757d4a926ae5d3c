"""What the administrator of a node decides: /etc/nvct/config.yaml → Settings.

The hook imports this module on every container start, but takes the settings from the cached inventory (`from_json`);
only `load`, which runs when the file has changed, needs YAML and imports it itself.
"""

from __future__ import annotations

import os
import stat

from nvct.errors import ConfigError, StaleInventory
from nvct.record import as_dict, record
from nvct.trust import is_sticky, why_unsafe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

DEFAULT_PATH = "/etc/nvct/config.yaml"

# The driver capabilities of NVIDIA_DRIVER_CAPABILITIES, in the order in which they are reported.
CAPABILITIES = ("compute", "utility", "video", "compat32", "ngx", "graphics", "display")

# What to do about devices that a container without CAP_SYS_ADMIN asks for by its environment.
ACCEPT = "accept"
IGNORE = "ignore"
REFUSE = "refuse"

# What a container gets besides the driver proper, each with a switch, and what the switch is about.
PARTS = {
    "application_profile": "a file that tells OpenGL programs which GPUs are the container's",
    "drm_nodes": "the GPUs' nodes below /dev/dri",
    "fabricmanager": "the socket of nvidia-fabricmanager",
    "firmware": "the GPUs' firmware",
    "modeset": "/dev/nvidia-modeset",
    "mps": "the folder of the Multi-Process Service",
    "persistenced": "the socket of nvidia-persistenced",
}

# What becomes of the CUDA forward compatibility libraries that an image brings: the loader cache names them before the
# driver's where they fit, or never.
COMPAT_CACHE = "cache"
COMPAT_DISABLED = "disabled"

# What to do about device nodes of the driver: make those that are absent, also put right those with wrong numbers, or
# only print the commands.
CREATE = "create"
REPLACE = "replace"
PRINT = "print"

# How the runtime gives a container its devices: by a plan written into its spec, by the prestart hook, or by the CDI
# specs of this node; AUTO is CDI for a request that names devices of other kinds by their CDI names, else SPEC.
AUTO = "auto"
HOOK = "hook"
SPEC = "spec"
CDI = "cdi"

# When the runtime has a hook do what a spec cannot express: always, or only where a container lacks something without.
ALWAYS = "always"
NEEDED = "needed"

# How the keys of annotations begin in which engines are asked for CDI devices; others may stand before it, `nvidia.`.
CDI_ANNOTATIONS = "cdi.k8s.io/"

# A settings file is a page of text; whatever is longer was not meant to be one.
_MAX_BYTES = 1 << 20


@record
class Settings:
    """The settings of a node; each default is what a node with the driver in its usual place needs.

    `root`, `dev_root`, `proc_root` are the roots of model.Roots. `sys_root` is a sysfs: the kernel's own like procfs,
    and like it in a place of its own, since neither a driver root nor a device root need have one mounted.
    `library_search_path`: folders below `root` that are searched besides the usual ones. `device_table`: a file that
    lists device nodes where none can be made, "" for real nodes. `nvml_timeout_s`: seconds that NVML may take.
    `supported_capabilities`: what containers may ask for. `cgroups`: whether device rules are written (not where a
    rootless engine forbids it). `mask_proc`: whether a container sees only its own GPUs in /proc/driver/nvidia.
    `parts`: the switches of PARTS, all of them.
    `cuda_compat`: COMPAT_CACHE or COMPAT_DISABLED.
    `unprivileged_env`: ACCEPT, IGNORE or REFUSE. `accept_mount_lists`: whether devices listed as mounts count, which
    is for orchestrators that let nobody else choose a container's mounts. `swarm_resource`: DOCKER_RESOURCE_*
    variables that outweigh NVIDIA_VISIBLE_DEVICES. `disable_require`: whether NVIDIA_REQUIRE_* are passed over.
    `imex_channels`: whether containers may ask for IMEX channels.
    `runtimes`: the low-level runtimes that nvct's may call, by name or path, the first that there is.
    `runtime_mode`: AUTO, HOOK, SPEC or CDI. `runtime_hook`: ALWAYS or NEEDED. `char_links`: the folder where the
    runtime makes links by number to device nodes, since systemd looks for them there; "" for none.
    `cdi_annotation_prefixes`: of the annotations in which the runtime looks for CDI names; `cdi_spec_dirs`: the folders
    of the specs that say what those mean, the last one counts most; `cdi_default_kind`: of names without a kind.
    `load_kernel_modules`: whether modules of the driver that are not loaded are loaded when the node is discovered;
    `modprobe`: the program that does it, "" for the host's own. `device_nodes`: CREATE, REPLACE or PRINT.
    """

    root: str = "/"
    dev_root: str = "/"
    proc_root: str = "/proc"
    sys_root: str = "/sys"
    library_search_path: tuple[str, ...] = ()
    device_table: str = ""
    nvml_timeout_s: float = 30.0
    supported_capabilities: tuple[str, ...] = CAPABILITIES
    cgroups: bool = True
    mask_proc: bool = True
    unprivileged_env: str = ACCEPT
    accept_mount_lists: bool = False
    swarm_resource: tuple[str, ...] = ()
    disable_require: bool = False
    imex_channels: bool = True
    load_kernel_modules: bool = True
    modprobe: str = ""
    device_nodes: str = CREATE
    parts: dict[str, bool] = dict.fromkeys(PARTS, True)
    cuda_compat: str = COMPAT_CACHE
    runtimes: tuple[str, ...] = ("runc", "crun")
    runtime_mode: str = AUTO
    runtime_hook: str = ALWAYS
    char_links: str = "/dev/char"
    cdi_annotation_prefixes: tuple[str, ...] = (CDI_ANNOTATIONS,)
    cdi_spec_dirs: tuple[str, ...] = ("/etc/cdi", "/var/run/cdi")
    cdi_default_kind: str = "nvidia.com/gpu"


_FIELDS = tuple(as_dict(Settings()))


def to_json(settings: Settings) -> dict[str, object]:
    """The settings as a dict for JSON; `from_json` reads it back."""
    values: dict[str, object] = as_dict(settings)
    return values


def from_json(values: object) -> Settings:
    """The settings that `to_json` wrote. Raises StaleInventory when they were saved by another version of nvct."""
    if not isinstance(values, dict) or set(values) != set(_FIELDS):
        raise StaleInventory("the saved settings are not those of this version of nvct; run `nvct refresh`")
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Settings(**fields)  # type: ignore[arg-type]  # `load` has checked what `to_json` wrote


def load(path: str = DEFAULT_PATH) -> Settings:
    """Read and check a settings file. An absent default file means the defaults.

    Raises ConfigError for a file that is absent, a link, writable by others, owned by a stranger, not YAML, or that
    says something that nvct does not understand.
    """
    return from_mapping(_mapping(path), path)


def names_in(path: str = DEFAULT_PATH) -> frozenset[str]:
    """The settings that a file names; the others have their defaults. Raises ConfigError as `load`."""
    mapping = _mapping(path)
    from_mapping(mapping, path)
    return frozenset(map(str, mapping))


def _mapping(path: str) -> dict[object, object]:
    try:
        text = _read_trusted(path)
    except FileNotFoundError:
        if path == DEFAULT_PATH:
            return {}
        raise ConfigError(f"settings file {path} does not exist; create it, or leave out --config") from None
    return _parse(text, path)


def _read_trusted(path: str) -> str:
    """The file's text, from one descriptor: what was checked is what is read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        if os.path.islink(path):
            raise ConfigError(f"settings file {path} is a symbolic link; put the file itself there") from None
        raise ConfigError(f"settings file {path} cannot be opened: {error.strerror}") from None
    try:
        _check_owner(os.fstat(file), path)
        _check_folder(os.path.dirname(path) or ".")
        with open(file, "rb", closefd=False) as stream:
            content = stream.read(_MAX_BYTES + 1)
    finally:
        os.close(file)
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"settings file {path} is longer than {_MAX_BYTES} bytes; expected a short YAML file")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"settings file {path} is not UTF-8 text: byte {error.start} is {error.reason}") from None


def _check_owner(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"settings file {path} is not a regular file; put a YAML file there")
    reason = why_unsafe(path, status)
    if reason:
        raise ConfigError(f"settings file {reason}")


def _check_folder(folder: str) -> None:
    """Whoever can write to the folder can put another file of root's there, such as an older one."""
    status = os.stat(folder)
    if is_sticky(status):
        return
    reason = why_unsafe(folder, status)
    if reason:
        raise ConfigError(f"the folder of the settings file, {reason}")


def _parse(text: str, path: str) -> dict[object, object]:
    import yaml

    from nvct.strictyaml import strict_loader

    try:
        value = yaml.load(text, strict_loader(yaml.SafeLoader, f"settings file {path}"))
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"settings file {path}{line} is not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        reason = "its lists and mappings are too deep" if deep else (str(error).splitlines() or ["it is damaged"])[0]
        raise ConfigError(f"settings file {path} is not YAML that nvct reads: {reason}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"settings file {path} holds {_kind(value)}, expected lines of `name: value`")
    return value


def from_mapping(mapping: Mapping[Any, object], path: str) -> Settings:
    """The settings that a mapping of names to YAML's values means. Raises ConfigError that names `path`, its file."""
    values: dict[str, object] = {}
    for name, value in mapping.items():
        if name not in _CHECKS:
            raise ConfigError(f"settings file {path}: unknown setting {_kind(name)}; {_did_you_mean(name)}")
        try:
            values[str(name)] = _CHECKS[name](value)
        except _WrongItem as error:
            raise ConfigError(f"settings file {path}: `{name}` has {_kind(error.item)}, expected {error}") from None
        except ValueError as error:
            raise ConfigError(f"settings file {path}: `{name}` is {_kind(value)}, expected {error}") from None
    values.setdefault("dev_root", values.get("root", "/"))
    return Settings(**values)  # type: ignore[arg-type]  # each value has passed the check of its field


def _did_you_mean(name: object) -> str:
    import difflib

    near = difflib.get_close_matches(str(name)[:80], _FIELDS, n=3)
    if near:
        return "did you mean " + " or ".join(f"`{match}`" for match in near) + "?"
    return "the settings are " + ", ".join(_FIELDS)


def _kind(value: object) -> str:
    """A value for a message: scalars as they stand, the rest by kind, since YAML aliases can make it endless."""
    if isinstance(value, (list, dict, set, tuple)):
        return {list: "a list", dict: "a mapping", set: "a set", tuple: "a sequence"}[type(value)]
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


# The checks below return the value as the field wants it, or raise ValueError that says what was expected; _WrongItem
# for what stands in a list or mapping.


class _WrongItem(ValueError):
    def __init__(self, item: object, expected: str) -> None:
        super().__init__(expected)
        self.item = item


def _items(value: object, fits: Callable[[Any], bool], expected: str) -> list[Any]:
    """A list of which every item fits."""
    if not isinstance(value, list):
        raise ValueError(expected)
    for item in value:
        if not fits(item):
            raise _WrongItem(item, expected)
    return value


def _folder(value: object) -> str:
    if not isinstance(value, str) or not _is_folder(value):
        raise ValueError("an absolute path without `..`")
    return value.rstrip("/") or "/"


def _is_folder(value: object) -> bool:
    return isinstance(value, str) and value.startswith("/") and "\0" not in value and ".." not in value.split("/")


def _folders(value: object) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(_folder, _items(value, _is_folder, "a list of absolute paths without `..`"))))


def _path_or_none(value: object) -> str:
    return "" if value == "" else _folder(value)


def _seconds(value: object) -> float:
    # `not 0 < value` also refuses NaN; a day is longer than any container start may wait.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 86400:
        raise ValueError("a number of seconds above 0, at most 86400")
    return float(value)


def _capabilities(value: object) -> tuple[str, ...]:
    items = _items(value, lambda item: item in CAPABILITIES, "a list of " + ", ".join(CAPABILITIES))
    return tuple(name for name in CAPABILITIES if name in items)


def _device_nodes(value: object) -> str:
    return _one_of((CREATE, REPLACE, PRINT), value)


def _unprivileged_env(value: object) -> str:
    return _one_of((ACCEPT, IGNORE, REFUSE), value)


def _one_of(choices: tuple[str, ...], value: object) -> str:
    if value not in choices:
        raise ValueError("one of " + ", ".join(choices))
    return str(value)


def _swarm_variables(value: object) -> tuple[str, ...]:
    # Docker names these variables; because of their prefix a container without them is known to ask for nothing
    # before any settings are read.
    def fits(item: object) -> bool:
        return isinstance(item, str) and item.startswith("DOCKER_RESOURCE_") and "=" not in item

    expected = "a list of DOCKER_RESOURCE_<NAME>, where NAME is that of the node's generic resource"
    return tuple(dict.fromkeys(_items(value, fits, expected)))


def _parts(value: object) -> dict[str, bool]:
    """All switches; those that the file does not name are on."""
    expected = "a mapping of switches: " + ", ".join(PARTS)
    if not isinstance(value, dict):
        raise ValueError(expected)
    for name, switch in value.items():
        if name not in PARTS:
            raise _WrongItem(name, expected)
        if not isinstance(switch, bool):
            raise _WrongItem(switch, f"true or false for the switch {name}")
    return {name: value.get(name, True) for name in PARTS}


def _cuda_compat(value: object) -> str:
    if value not in (COMPAT_CACHE, COMPAT_DISABLED):
        raise ValueError(f"{COMPAT_CACHE} or {COMPAT_DISABLED}")
    return str(value)


def _runtimes(value: object) -> tuple[str, ...]:
    expected = "a list of names, such as runc, or absolute paths without `..`"
    if not value:
        raise ValueError(expected)
    return tuple(dict.fromkeys(_items(value, _is_program, expected)))


def _is_program(value: object) -> bool:
    if not isinstance(value, str) or not value.isprintable() or ".." in value.split("/"):
        return False
    return value.startswith("/") or (value != "" and "/" not in value)


def _runtime_mode(value: object) -> str:
    return _one_of((AUTO, HOOK, SPEC, CDI), value)


def _runtime_hook(value: object) -> str:
    return _one_of((ALWAYS, NEEDED), value)


def _annotation_prefixes(value: object) -> tuple[str, ...]:
    # Because of this ending a container without such annotations is known to ask for nothing before any settings are
    # read.
    def fits(item: object) -> bool:
        return isinstance(item, str) and item.endswith(CDI_ANNOTATIONS)

    return tuple(dict.fromkeys(_items(value, fits, f"a list of prefixes that end in {CDI_ANNOTATIONS}")))


def _cdi_kind(value: object) -> str:
    parts = value.split("/") if isinstance(value, str) else []
    if len(parts) != 2 or not all(part and part.isascii() and part.isprintable() for part in parts) or "=" in parts[1]:
        raise ValueError("a vendor and a class of CDI devices, as nvidia.com/gpu")
    return "/".join(parts)


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


_CHECKS: dict[object, Callable[[object], object]] = {
    "root": _folder,
    "dev_root": _folder,
    "proc_root": _folder,
    "sys_root": _folder,
    "library_search_path": _folders,
    "device_table": _path_or_none,
    "nvml_timeout_s": _seconds,
    "supported_capabilities": _capabilities,
    "cgroups": _switch,
    "mask_proc": _switch,
    "unprivileged_env": _unprivileged_env,
    "accept_mount_lists": _switch,
    "swarm_resource": _swarm_variables,
    "disable_require": _switch,
    "imex_channels": _switch,
    "load_kernel_modules": _switch,
    "modprobe": _path_or_none,
    "device_nodes": _device_nodes,
    "parts": _parts,
    "cuda_compat": _cuda_compat,
    "runtimes": _runtimes,
    "runtime_mode": _runtime_mode,
    "runtime_hook": _runtime_hook,
    "char_links": _path_or_none,
    "cdi_annotation_prefixes": _annotation_prefixes,
    "cdi_spec_dirs": _folders,
    "cdi_default_kind": _cdi_kind,
}
