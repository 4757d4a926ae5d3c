"""The CDI specs of this machine: which devices they name, and which spec a name means.

Of two folders the later one wins; two specs of one folder that name the same device cancel it (CDI specification,
"Resolving conflicts"). A file that cannot be read costs its own devices, and no others.
"""

from __future__ import annotations

import json
import os
import stat

from nvct.cdi import names
from nvct.cdi.check import problems
from nvct.errors import ConfigError, RequestError
from nvct.record import record
from nvct.trust import why_unsafe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

SPEC_DIRS = ("/etc/cdi", "/var/run/cdi")

_EXTENSIONS = (".yaml", ".json")
_LONGEST = 16 << 20  # bytes; a spec of 64 devices has 140 KiB


@record
class SpecFile:
    """A spec and its file. `rank` is the place of its folder: the higher one wins."""

    path: str
    rank: int
    spec: dict[str, Any]


@record
class Named:
    """What a qualified name means: a device (as in its spec's `devices`) and the file that it stands in."""

    name: str
    file: SpecFile
    device: dict[str, Any]


@record
class Registry:
    """`devices` by qualified name. `errors`: path and reason of every file, and every conflict, that costs devices."""

    devices: dict[str, Named]
    errors: tuple[tuple[str, str], ...]


def load(folders: Sequence[str] = SPEC_DIRS) -> Registry:
    """Every spec in the folders, those directly in them. A folder that is not there has none."""
    files: list[SpecFile] = []
    errors: list[tuple[str, str]] = []
    for rank, folder in enumerate(folders):
        for path in _paths(folder, errors):
            try:
                files.append(SpecFile(path, rank, read(path)))
            except ConfigError as error:
                errors.append((path, str(error)))
    devices: dict[str, Named] = {}
    cancelled: dict[str, int] = {}
    for file in files:
        for device in file.spec["devices"]:
            _enter(Named(f"{file.spec['kind']}={device['name']}", file, device), devices, cancelled, errors)
    return Registry(dict(sorted(devices.items())), tuple(errors))


def _paths(folder: str, errors: list[tuple[str, str]]) -> list[str]:
    try:
        found = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        errors.append((folder, f"{folder}: {error.strerror}"))
        return []
    return [f"{folder.rstrip('/')}/{name}" for name in found if name.endswith(_EXTENSIONS)]


def _enter(new: Named, devices: dict[str, Named], cancelled: dict[str, int], errors: list[tuple[str, str]]) -> None:
    """Files come in the order of their folders, so what is there already is of the same one or of one that loses."""
    old = devices.get(new.name)
    if cancelled.get(new.name) == new.file.rank:
        errors.append((new.file.path, f"{new.file.path}: {new.name} is in another spec of the folder, too"))
    elif old and old.file.rank == new.file.rank:
        del devices[new.name]
        cancelled[new.name] = new.file.rank
        for one, other in ((old, new), (new, old)):
            errors.append((one.file.path, f"{one.file.path}: {new.name} is in {other.file.path}, too: remove one"))
    else:
        devices[new.name] = new


def read(path: str) -> dict[str, Any]:
    """The spec in a file. Raises ConfigError for one that others than root can write, since its hooks run as root, and
    for one that is no spec.
    """
    value = load_value(path)
    wrong = problems(value)
    if wrong:
        more = f" (and {len(wrong) - 1} more; see `nvct cdi validate {path}`)" if len(wrong) > 1 else ""
        raise ConfigError(f"{path} is no CDI spec: {wrong[0]}{more}")
    spec: dict[str, Any] = value
    return spec


def load_value(path: str) -> Any:
    """Whatever a file says, by its name in JSON or YAML. Raises ConfigError as `read`, but for what is no spec."""
    text = _text(path)
    try:
        if path.endswith(".json"):
            return json.loads(text)
        return _yaml(text)
    except (ValueError, RecursionError) as error:
        reason = (str(error) or "it is too deep").splitlines()[0]
        raise ConfigError(f"{path} is not {'JSON' if path.endswith('.json') else 'YAML'}: {reason}") from None


def _yaml(text: str) -> object:
    import yaml

    loader: Any = getattr(
        yaml, "CSafeLoader", yaml.SafeLoader
    )  # ten times as fast, where PyYAML has been built with it
    try:
        return yaml.load(text, loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _text(path: str) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is no file")
        reason = why_unsafe(path, status)
        if reason:
            raise ConfigError(reason)
        with open(descriptor, "rb", closefd=False) as stream:
            content = stream.read(_LONGEST + 1)
    finally:
        os.close(descriptor)
    if len(content) > _LONGEST:
        raise ConfigError(f"{path} is longer than {_LONGEST} bytes; expected a CDI spec")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: byte {error.start} is {error.reason}") from None


def resolve(registry: Registry, wanted: Iterable[str]) -> list[Named]:
    """What the qualified names mean, each once. Raises RequestError that names those without a meaning, the valid ones
    of their kind, and the first spec that failed to load.
    """
    asked = list(dict.fromkeys(wanted))
    unknown = [name for name in asked if name not in registry.devices]
    if unknown:
        raise RequestError(f"{', '.join(f'`{name}`' for name in unknown)}: {_why(registry, unknown[0])}")
    return [registry.devices[name] for name in asked]


def _why(registry: Registry, name: str) -> str:
    parts = names.split(name)
    failed = f"; {registry.errors[0][1]}" if registry.errors else ""
    if parts is None:
        return f"no name of a CDI device; expected VENDOR/CLASS=DEVICE, as nvidia.com/gpu=0{failed}"
    same = [other for other in registry.devices if other.startswith(f"{parts[0]}=")]
    if same:
        shown = ", ".join(same[:16]) + (f" and {len(same) - 16} more" if len(same) > 16 else "")
        return f"no spec has this device; valid are {shown}{failed}"
    return f"no spec has devices of the kind {parts[0]}; see `nvct cdi list`, or write one: `nvct cdi generate`{failed}"
