"""Parts of an OCI runtime spec, which comes from an engine and may have any shape: as copies, to be changed.

The shape that they are to have is that of the OCI runtime specification 1.0.2, config.md and config-linux.md.
"""

from __future__ import annotations

from nvct.errors import RequestError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Spec = dict[str, Any]


def object_of(parent: Spec, name: str) -> Spec:
    """A copy of a part of the spec that is an object; {} where there is none. Raises RequestError for anything else."""
    value: Spec = _part(parent, name, dict, "an object")
    return value


def list_of(parent: Spec, name: str) -> list[Any]:
    """The same of a part that is a list."""
    value: list[Any] = _part(parent, name, list, "a list")
    return value


def _part(parent: Spec, name: str, kind: Callable[..., Any], words: str) -> Any:
    value = parent.get(name)
    if value is None:
        return kind()
    if type(value) is not kind:
        raise RequestError(f"`{name}` in config.json is {value!r:.80}; expected {words}, as `runc spec` writes it")
    return kind(value)
