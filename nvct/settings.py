"""What the administrator of a node decides: /etc/nvct/config.yaml → Settings.

The hook imports this module on every container start, but takes the settings from the cached inventory (`from_json`);
only `load`, which runs when the file has changed, needs YAML and imports it itself.
"""

from __future__ import annotations

import os
import stat

from nvct.errors import ConfigError, StaleInventory
from nvct.record import as_dict, record
from nvct.trust import why_unsafe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_PATH = "/etc/nvct/config.yaml"

# The driver capabilities of NVIDIA_DRIVER_CAPABILITIES, in the order in which they are reported.
CAPABILITIES = ("compute", "utility", "video", "compat32", "ngx", "graphics", "display")

# A settings file is a page of text; whatever is longer was not meant to be one.
_MAX_BYTES = 1 << 20


@record
class Settings:
    """The settings of a node; each default is what a node with the driver in its usual place needs.

    `root`, `dev_root`, `proc_root` are the roots of model.Roots. `library_search_path`: folders below `root` that are
    searched besides the usual ones. `device_table`: a file that lists device nodes where none can be made, "" for real
    nodes. `nvml_timeout_s`: seconds that NVML may take. `supported_capabilities`: what containers may ask for.
    `cgroups`: whether device rules are written (not where a rootless engine forbids it). `mask_proc`: whether a
    container sees only its own GPUs in /proc/driver/nvidia.
    """

    root: str = "/"
    dev_root: str = "/"
    proc_root: str = "/proc"
    library_search_path: tuple[str, ...] = ()
    device_table: str = ""
    nvml_timeout_s: float = 30.0
    supported_capabilities: tuple[str, ...] = CAPABILITIES
    cgroups: bool = True
    mask_proc: bool = True


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
    try:
        text = _read_trusted(path)
    except FileNotFoundError:
        if path == DEFAULT_PATH:
            return Settings()
        raise ConfigError(f"settings file {path} does not exist; create it, or leave out --config") from None
    return _from_mapping(_parse(text, path), path)


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
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        return  # a file of root's stays where it is in a folder such as /tmp
    reason = why_unsafe(folder, status)
    if reason:
        raise ConfigError(f"the folder of the settings file, {reason}")


def _parse(text: str, path: str) -> dict[object, object]:
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"settings file {path}{line} is not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"settings file {path} is not YAML that nvct reads: {reason}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"settings file {path} holds {_kind(value)}, expected lines of `name: value`")
    return value


def _from_mapping(mapping: dict[object, object], path: str) -> Settings:
    values: dict[str, object] = {}
    for name, value in mapping.items():
        if name not in _CHECKS:
            raise ConfigError(f"settings file {path}: unknown setting {_kind(name)}; {_did_you_mean(name)}")
        try:
            values[str(name)] = _CHECKS[name](value)
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


# The checks below return the value as the field wants it, or raise ValueError that says what was expected.


def _folder(value: object) -> str:
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value or ".." in value.split("/"):
        raise ValueError("an absolute path without `..`")
    return value.rstrip("/") or "/"


def _folders(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("a list of absolute paths")
    return tuple(dict.fromkeys(_folder(item) for item in value))


def _table(value: object) -> str:
    return "" if value == "" else _folder(value)


def _seconds(value: object) -> float:
    # `not 0 < value` also refuses NaN; a day is longer than any container start may wait.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 86400:
        raise ValueError("a number of seconds above 0, at most 86400")
    return float(value)


def _capabilities(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or any(item not in CAPABILITIES for item in value):
        raise ValueError("a list of " + ", ".join(CAPABILITIES))
    return tuple(name for name in CAPABILITIES if name in value)


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


_CHECKS: dict[object, Callable[[object], object]] = {
    "root": _folder,
    "dev_root": _folder,
    "proc_root": _folder,
    "library_search_path": _folders,
    "device_table": _table,
    "nvml_timeout_s": _seconds,
    "supported_capabilities": _capabilities,
    "cgroups": _switch,
    "mask_proc": _switch,
}
