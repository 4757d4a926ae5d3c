"""A CDI spec as text. YAML is written here, since PyYAML takes longer for a spec than all that leads to it."""

from __future__ import annotations

import json
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

JSON = "json"
YAML = "yaml"
FORMATS = (YAML, JSON)

# What YAML 1.1 and 1.2 both take for a string when it stands without quotes: none that could be a number, a time, a
# boolean or null in either.
_PLAIN = re.compile(r"(?:/|[A-Za-z]+[/_.-])[A-Za-z0-9_./+-]*", re.ASCII)


def to_text(spec: dict[str, Any], form: str) -> str:
    """The spec in one of FORMATS, with a line's end at its end."""
    if form == JSON:
        return json.dumps(spec, indent=2) + "\n"
    return "\n".join(_mapping(spec, "")) + "\n"


def _mapping(value: dict[str, Any], indent: str) -> Iterator[str]:
    for name, part in value.items():
        if isinstance(part, dict):
            yield f"{indent}{_scalar(name)}:"
            yield from _mapping(part, indent + "  ")
        elif isinstance(part, list):
            yield f"{indent}{_scalar(name)}:"
            yield from _list(part, indent)
        else:
            yield f"{indent}{_scalar(name)}: {_scalar(part)}"


def _list(value: list[Any], indent: str) -> Iterator[str]:
    for item in value:
        if isinstance(item, dict):
            first, *rest = _mapping(item, indent + "  ")
            yield f"{indent}- {first.lstrip()}"
            yield from rest
        else:
            yield f"{indent}- {_scalar(item)}"


def _scalar(value: object) -> str:
    """A string of JSON is one of YAML, too, but for characters beyond 16 bits, which JSON writes as two."""
    if not isinstance(value, str):
        return json.dumps(value)
    if value.isalpha() and value.isascii() and value.lower() not in _WORDS or _PLAIN.fullmatch(value):
        return value
    return '"' + "".join(map(_escaped, value)) + '"' if max(value, default="") > "\uffff" else json.dumps(value)


def _escaped(character: str) -> str:
    return f"\\U{ord(character):08x}" if character > "\uffff" else json.dumps(character)[1:-1]


# Words that YAML 1.1 takes for booleans or null.
_WORDS = frozenset(("y", "n", "yes", "no", "true", "false", "on", "off", "null"))
