"""The settings of the established toolkit, /etc/nvidia-container-runtime/config.toml, in the words of nvct.

Every key of that file has a rule here: a setting that it becomes, or the reason why nothing is left for it to say. The
keys are those of NVIDIA's container toolkit 1.20.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from nvct import settings
from nvct.errors import ConfigError
from nvct.record import record
from nvct.settings import (
    ACCEPT,
    AUTO,
    CAPABILITIES,
    CDI,
    CDI_ANNOTATIONS,
    COMPAT_CACHE,
    COMPAT_DISABLED,
    CREATE,
    HOOK,
    IGNORE,
    PRINT,
    SPEC,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_PATH = "/etc/nvidia-container-runtime/config.toml"

_NO_CSV = "csv is for Jetson boards, which nvct does not serve"

_CLI = "nvidia-container-cli"
_RUNTIME = "nvidia-container-runtime"


@record
class Dropped:
    """A key that becomes no setting, and why. `unknown`: the toolkit does not have it either."""

    key: str
    why: str
    unknown: bool = False


@record
class Translation:
    """`values`: names and values of nvct's settings. `origins`: by setting, the keys that it comes from."""

    values: dict[str, Any]
    origins: dict[str, tuple[str, ...]]
    dropped: tuple[Dropped, ...]


def translate(path: str) -> Translation:
    """Read a config.toml. Raises ConfigError for what is no such file, and for a value of the wrong kind."""
    values: dict[str, Any] = {}
    origins: dict[str, tuple[str, ...]] = {}
    dropped: list[Dropped] = []
    for key, value in _flat(_read(path)):
        taken, left = _rule(key, value, path)
        dropped += left
        for name, meaning in taken.items():
            # A file that says the same thing twice means the stricter of the two: only cuda_compat has two keys.
            if values.get(name) != COMPAT_DISABLED:
                values[name] = meaning
            origins[name] = (*origins.get(name, ()), key)
    settings.from_mapping(values, path)
    return Translation(values, origins, tuple(dropped))


def _read(path: str) -> dict[str, Any]:
    if os.path.exists(path) and not os.path.isfile(path):  # a named pipe would have us wait for whoever writes to it
        raise ConfigError(f"{path} is not a regular file; name the toolkit's config.toml with --from")
    try:
        with open(path, "rb") as stream:
            table: dict[str, Any] = tomllib.load(stream)
            return table
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name the toolkit's config.toml with --from") from None
    except RecursionError:
        raise ConfigError(f"{path} is not TOML that nvct reads: its arrays are too deep") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}; expected the established toolkit's config.toml") from None


def _flat(table: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """The keys of nested tables with dots between them; a table without keys says nothing."""
    pairs: list[tuple[str, Any]] = []
    for name, value in table.items():
        pairs += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return pairs


def _rule(key: str, value: Any, path: str) -> tuple[dict[str, Any], list[Dropped]]:
    """The settings that a key becomes, and what of it becomes none."""
    if key in _REASONS:
        return {}, [Dropped(key, _REASONS[key])]
    if key not in _RULES:
        return {}, [Dropped(key, _unknown(key), unknown=True)]
    try:
        result = _RULES[key](key, value)
    except ValueError as error:
        raise ConfigError(f"{path}: `{key}` is {value!r}, expected {error}; mend it and import again") from None
    if isinstance(result, tuple):
        return result
    return ({}, [result]) if isinstance(result, Dropped) else (result, [])


def _unknown(key: str) -> str:
    import difflib

    near = difflib.get_close_matches(key, [*_RULES, *_REASONS], n=1)
    hint = f"; did it mean {near[0]}?" if near else ""
    return f"the established toolkit has no such key, and ignores it{hint}"


# The rules below turn a value into settings, or into the reason why it becomes none; of lists each item into either.
# ValueError says what was expected.

Rule = Callable[[str, Any], "dict[str, Any] | Dropped | tuple[dict[str, Any], list[Dropped]]"]


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a text")
    return value


def _list(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("a list of texts")
    return value


def _words(value: Any) -> list[str]:
    return [word.strip() for word in _text(value).split(",") if word.strip()]


def _disable_require(key: str, value: Any) -> dict[str, Any]:
    return {"disable_require": _switch(value)}


def _fitting(
    key: str, setting: str, items: list[str], fits: Callable[[str], bool], rule: str
) -> tuple[dict[str, Any], list[Dropped]]:
    """The setting with those items that it can have; the others are dropped each by itself, for the `rule`."""
    kept = [item for item in items if fits(item)]
    dropped = [Dropped(key, f"{rule}, unlike {item!r}") for item in items if not fits(item)]
    return ({} if dropped and not kept else {setting: kept}), dropped


def _swarm_resource(key: str, value: Any) -> tuple[dict[str, Any], list[Dropped]]:
    return _fitting(
        key,
        "swarm_resource",
        _words(value),
        lambda name: name.startswith("DOCKER_RESOURCE_"),
        "docker swarm names its variables DOCKER_RESOURCE_<NAME>",
    )


def _unprivileged_env(key: str, value: Any) -> dict[str, Any]:
    return {"unprivileged_env": ACCEPT if _switch(value) else IGNORE}


def _accept_mount_lists(key: str, value: Any) -> dict[str, Any]:
    return {"accept_mount_lists": _switch(value)}


def _supported_capabilities(key: str, value: Any) -> dict[str, Any]:
    words = _words(value)
    if any(word not in (*CAPABILITIES, "all") for word in words):
        raise ValueError(f"names of {', '.join(CAPABILITIES)} with commas, or all")
    return {"supported_capabilities": [name for name in CAPABILITIES if name in words or "all" in words]}


def _root(key: str, value: Any) -> dict[str, Any]:
    return {"root": _text(value) or "/"}


def _kernel_modules(key: str, value: Any) -> dict[str, Any]:
    load = _switch(value)
    return {"load_kernel_modules": load, "device_nodes": CREATE if load else PRINT}


def _cgroups(key: str, value: Any) -> dict[str, Any]:
    return {"cgroups": not _switch(value)}


def _ldcache(key: str, value: Any) -> dict[str, Any] | Dropped:
    if _text(value) in ("", "/etc/ld.so.cache"):
        return Dropped(key, "nvct reads that cache, below the driver root, without being told")
    return Dropped(
        key,
        "nvct reads /etc/ld.so.cache below the driver root and searches folders: set root or library_search_path where "
        "that does not find the driver",
    )


def _mode(key: str, value: Any) -> dict[str, Any] | Dropped:
    modes = {"auto": AUTO, "legacy": HOOK, "cdi": CDI, "jit-cdi": SPEC}
    if value == "csv":
        return Dropped(key, _NO_CSV)
    if value not in tuple(modes):
        raise ValueError(f"one of {', '.join(modes)}, csv")
    return {"runtime_mode": modes[value]}


def _runtimes(key: str, value: Any) -> dict[str, Any]:
    return {"runtimes": _list(value)}


def _spec_dirs(key: str, value: Any) -> dict[str, Any]:
    return {"cdi_spec_dirs": _list(value)}


def _default_kind(key: str, value: Any) -> dict[str, Any]:
    return {"cdi_default_kind": _text(value)}


def _annotation_prefixes(key: str, value: Any) -> tuple[dict[str, Any], list[Dropped]]:
    return _fitting(
        key,
        "cdi_annotation_prefixes",
        _list(value),
        lambda prefix: prefix.endswith(CDI_ANNOTATIONS),
        f"prefixes of annotations that name CDI devices end in {CDI_ANNOTATIONS}",
    )


def _cuda_compat_mode(key: str, value: Any) -> dict[str, Any]:
    modes = {"ldconfig": COMPAT_CACHE, "mount": COMPAT_CACHE, "hook": COMPAT_CACHE, "disabled": COMPAT_DISABLED}
    if value not in tuple(modes):
        raise ValueError(f"one of {', '.join(modes)}")
    return {"cuda_compat": modes[value]}


def _no_compat_hook(key: str, value: Any) -> dict[str, Any] | Dropped:
    if _switch(value):
        return {"cuda_compat": COMPAT_DISABLED}
    return Dropped(key, "false is what nvct does without it")


def _no_imex_channels(key: str, value: Any) -> dict[str, Any]:
    return {"imex_channels": not _switch(value)}


_RULES: dict[str, Rule] = {
    "disable-require": _disable_require,
    "swarm-resource": _swarm_resource,
    "accept-nvidia-visible-devices-envvar-when-unprivileged": _unprivileged_env,
    "accept-nvidia-visible-devices-as-volume-mounts": _accept_mount_lists,
    "supported-driver-capabilities": _supported_capabilities,
    f"{_CLI}.root": _root,
    f"{_CLI}.ldcache": _ldcache,
    f"{_CLI}.load-kmods": _kernel_modules,
    f"{_CLI}.no-cgroups": _cgroups,
    f"{_RUNTIME}.mode": _mode,
    f"{_RUNTIME}.runtimes": _runtimes,
    f"{_RUNTIME}.modes.cdi.spec-dirs": _spec_dirs,
    f"{_RUNTIME}.modes.cdi.default-kind": _default_kind,
    f"{_RUNTIME}.modes.cdi.annotation-prefixes": _annotation_prefixes,
    f"{_RUNTIME}.modes.legacy.cuda-compat-mode": _cuda_compat_mode,
    "features.disable-cuda-compat-lib-hook": _no_compat_hook,
    "features.ignore-imex-channel-requests": _no_imex_channels,
}

_NO_PROGRAM = "nvct does that work itself and calls no such program"
_NO_LDCONFIG = "nvct writes the container's loader cache itself and runs no ldconfig, the image's least of all"
_NO_LOG = "nvct keeps no log file: the hook's warnings and errors go to the engine, which logs them"
_NO_GROUPS = "nvct adds no groups to a container's process"

_REASONS = {
    f"{_CLI}.path": _NO_PROGRAM,
    f"{_CLI}.environment": _NO_PROGRAM,
    f"{_CLI}.debug": _NO_LOG,
    f"{_CLI}.no-pivot": "nvct enters the container's mount namespace by descriptors, and changes no root",
    f"{_CLI}.user": "NVML is asked in a child process that ends before the container is touched",
    f"{_CLI}.ldconfig": _NO_LDCONFIG,
    f"{_RUNTIME}.debug": _NO_LOG,
    f"{_RUNTIME}.log-level": _NO_LOG,
    f"{_RUNTIME}.modes.csv.mount-spec-path": _NO_CSV,
    f"{_RUNTIME}.modes.csv.compat-container-root": _NO_CSV,
    f"{_RUNTIME}.modes.jit-cdi.nvcdi-feature-flags": "nvct plans for each container what its capabilities bring",
    f"{_RUNTIME}.modes.jit-cdi.nvcdi-disable-hooks": "nvct has one hook, and runtime_hook says when it is needed",
    f"{_RUNTIME}-hook.path": _NO_PROGRAM,
    f"{_RUNTIME}-hook.skip-mode-detection": "nvct's hook has no modes, those of the runtime do not concern it",
    "nvidia-ctk.path": _NO_PROGRAM,
    "features.allow-cuda-compat-libs-from-container": (
        "nvct never mounts what an image brings; its compatibility libraries are used where they lie (cuda_compat)"
    ),
    "features.allow-ldconfig-from-container": _NO_LDCONFIG,
    "features.allow-unknown-oci-spec-fields": "nvct takes from config.json what it knows, and leaves the rest alone",
    "features.disable-imex-channel-creation": "nvct makes no IMEX channels, it gives those that exist",
    "features.no-additional-gids-for-device-nodes": _NO_GROUPS,
}


def to_yaml(translation: Translation, source: str) -> str:
    """The text of a settings file with these values, and which keys they come from."""
    import yaml

    lines = [f"# From {os.path.abspath(source)}, by `nvct config import`."]
    for name, value in translation.values.items():
        keys = ", ".join(translation.origins[name])
        lines += [f"# {keys}", yaml.safe_dump({name: value}, width=1000).rstrip("\n")]
    return "\n".join(lines) + "\n"
