"""Whether a saved inventory from somewhere has the shape of one: every field there, and of its kind.

Only for files that people pass. The hook's own file is written by nvct where nobody else can write, and has no time for
this.
"""

from __future__ import annotations

import re
from typing import Any, get_args, get_origin, get_type_hints

from nvct.errors import ConfigError
from nvct.model import (
    BINARY,
    CONFIG,
    FIRMWARE,
    LIBRARY,
    LIBRARY32,
    MODULE,
    NATIVE,
    SOCKET,
    WSL,
    DeviceNode,
    DriverFile,
    Gpu,
    Inventory,
    Roots,
)

_WORDS = {str: "a line of text", int: "a whole number", bool: "true or false"}
_BUS_ID = ("a PCI address such as 00000000:07:00.0", re.compile(r"[0-9A-Fa-f]{4,8}(:[0-9A-Fa-f]{2}){2}\.[0-7]"))
_PATH = ("an absolute path", re.compile(r"/.*"))
_VERSION = ("a version such as 550.54.14", re.compile(r"([0-9]{1,9}(\.[0-9]{1,9})+)?"))  # "" where NVML did not say


def _one_of(*words: str) -> tuple[str, re.Pattern[str]]:
    return f"one of {', '.join(words)}", re.compile("|".join(words))


# Text that has a form of its own, by record and field.
_FORMS: dict[tuple[type, str], tuple[str, re.Pattern[str]]] = {
    (DeviceNode, "path"): _PATH,
    (DriverFile, "kind"): _one_of(LIBRARY, LIBRARY32, BINARY, FIRMWARE, SOCKET, CONFIG, MODULE),
    (DriverFile, "path"): _PATH,
    (Gpu, "bus_id"): _BUS_ID,
    (Inventory, "cuda_version"): _VERSION,
    (Inventory, "driver_version"): _VERSION,
    (Inventory, "kind"): _one_of(NATIVE, WSL),
    (Roots, "root"): _PATH,
    (Roots, "dev_root"): _PATH,
    (Roots, "proc_root"): _PATH,
}


def check_shape(data: object) -> None:
    """Raises ConfigError that names the first field of `data` which `inventory_from_json` could not use."""
    _record(data, Inventory, "")


def _record(value: object, kind: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name in kind._fields}
    unknown = sorted(set(value) - set(hints) - ({"schema"} if kind is Inventory else set()))
    if unknown:
        raise ConfigError(f"{_join(where, unknown[0])} is unknown; expected {', '.join(hints)}")
    for name, hint in hints.items():
        if name not in value:
            raise ConfigError(f"{_join(where, name)} is absent")
        _value(value[name], hint, _join(where, name))
        form = _FORMS.get((kind, name))
        if form and not form[1].fullmatch(value[name]):
            raise _wrong(_join(where, name), value[name], form[0])


def _value(value: object, hint: Any, where: str) -> None:
    origin = get_origin(hint)
    if origin is tuple:
        _rows(value, get_args(hint)[0], where)
    elif origin is dict:
        _mapping(value, get_args(hint)[1], where)
    elif hint in _WORDS:
        _scalar(value, hint, where)
    else:
        _record(value, hint, where)


def _rows(value: object, hint: Any, where: str) -> None:
    if not isinstance(value, list):
        raise _wrong(where, value, "a list")
    for number, row in enumerate(value):
        _value(row, hint, f"{where}[{number}]")


def _mapping(value: object, hint: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    for name, inner in value.items():
        _scalar(name, str, f"a name in {where}")
        _value(inner, hint, _join(where, name))


def _scalar(value: object, kind: type, where: str) -> None:
    good = type(value) is kind  # True is an int for Python, and a mistake here
    if isinstance(value, str):
        good = good and value.isprintable()
    elif type(value) is int:
        good = good and -1 <= value < 1 << 63  # -1 where there is no such number
    if not good:
        raise _wrong(where, value, _WORDS[kind])


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _wrong(where: str, value: object, expected: str) -> ConfigError:
    found = "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else ascii(value)[:80]
    return ConfigError(f"{where or 'the file'} is {found}, expected {expected}")
