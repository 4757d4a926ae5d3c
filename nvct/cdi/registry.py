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
from nvct.strictyaml import shortened, strict_loader
from nvct.trust import is_sticky, why_unsafe

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
    """`devices` by qualified name. `errors`: path and reason of every folder, file and conflict that costs devices.

    `paths`: every file that is named as specs are, also one of which no device counts.
    """

    devices: dict[str, Named]
    errors: tuple[tuple[str, str], ...]
    paths: tuple[str, ...] = ()


def load(folders: Sequence[str] = SPEC_DIRS) -> Registry:
    """Every spec in the folders, those directly in them. A folder that is not there has none."""
    files: list[SpecFile] = []
    errors: list[tuple[str, str]] = []
    paths: list[str] = []
    for rank, folder in enumerate(folders):
        for path in _paths(folder, errors):
            paths.append(path)
            try:
                files.append(SpecFile(path, rank, read(path)))
            except ConfigError as error:
                errors.append((path, str(error)))
    devices: dict[str, Named] = {}
    conflicts: dict[str, list[SpecFile]] = {}
    for file in files:
        for device in file.spec["devices"]:
            _enter(Named(f"{file.spec['kind']}={device['name']}", file, device), devices, conflicts)
    for name, rivals in conflicts.items():
        errors += [(file.path, _why_cancelled(name, file, rivals)) for file in rivals]
    return Registry(dict(sorted(devices.items())), tuple(errors), tuple(dict.fromkeys(paths)))


def _paths(folder: str, errors: list[tuple[str, str]]) -> list[str]:
    """The specs in a folder, none where others can put some: a spec's hooks run as root."""
    try:
        status = os.stat(folder)
        found = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        errors.append((folder, f"{folder}: {error.strerror}"))
        return []
    reason = "" if is_sticky(status) else why_unsafe(folder, status)
    if reason:
        errors.append((folder, f"no spec in it is read: {reason}"))
        return []
    return [f"{folder.rstrip('/')}/{name}" for name in found if name.endswith(_EXTENSIONS)]


def _enter(new: Named, devices: dict[str, Named], conflicts: dict[str, list[SpecFile]]) -> None:
    """Files come in the order of their folders, so what is there already is of the same one or of one that loses.

    `conflicts`: by name, the files of one folder that cancel a device.
    """
    old = devices.get(new.name)
    rivals = conflicts.get(new.name, [])
    if rivals and rivals[0].rank == new.file.rank:
        rivals.append(new.file)
    elif old and old.file.rank == new.file.rank:
        del devices[new.name]
        conflicts[new.name] = [old.file, new.file]
    else:
        devices[new.name] = new
        conflicts.pop(new.name, None)


def _why_cancelled(name: str, file: SpecFile, rivals: list[SpecFile]) -> str:
    others = ", ".join(other.path for other in rivals if other is not file)
    return f"{file.path}: {name} is in {others}, too, so that neither counts: remove one"


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
    return parse(path, _text(path))


def parse(path: str, text: bytes) -> Any:
    """The value of a file's content. Raises ConfigError for what is neither, or states a name twice."""
    try:
        if path.endswith(".json"):
            return json.loads(text.decode(), object_pairs_hook=lambda pairs: _once(path, pairs))
        return _yaml(path, text.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: byte {error.start} is {error.reason}") from None
    except (ValueError, RecursionError) as error:
        reason = (str(error) or "it is too deep").splitlines()[0]
        raise ConfigError(f"{path} is not {'JSON' if path.endswith('.json') else 'YAML'}: {reason}") from None


def _once(path: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ConfigError(f"{path}: `{shortened(name)}` is stated twice in one object; keep one of the two")
        found[name] = value
    return found


def _yaml(path: str, text: str) -> object:
    import yaml

    # Ten times as fast, where PyYAML has been built with it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.load(text, strict_loader(loader, path))
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _text(path: str) -> bytes:
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
    return content


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
    own = parts[0].partition("/")[0] in names.OWN_VENDORS
    step = "or write one: `nvct cdi generate`" if own else "and have the software of these devices write its spec"
    return f"no spec has devices of the kind {parts[0]}; see `nvct cdi list`, {step}{failed}"
