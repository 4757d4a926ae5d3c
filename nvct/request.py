"""What a container asks for: OCI config.json, or a bare environment, → Request.

Only what is written there is read; whether it exists on the node and may be had is decided by `nvct.plan`. The engine
merges the image's variables and the user's before we see them, so the source of both is "env".
"""

from __future__ import annotations

from nvct.errors import RequestError
from nvct.model import ContainerRoot, Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

DEVICES = "NVIDIA_VISIBLE_DEVICES"
CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"

# Characters. Linux starts no program with a longer variable (execve(2), MAX_ARG_STRLEN): this one never could run.
_LONGEST = 128 << 10


def request_from_spec(spec: object, container: ContainerRoot) -> Request:
    """The request in an OCI runtime spec, config.json as `fastjson.loads` returns it.

    Raises RequestError when `spec` is no such spec, or one of its env entries is not NAME=VALUE.
    """
    if not isinstance(spec, dict):
        raise RequestError(f"config.json holds a {_json_kind(spec)}; expected the object of an OCI runtime spec")
    for name in ("ociVersion", "process", "root"):
        if not spec.get(name):
            raise RequestError(f"config.json has no `{name}`; expected an OCI runtime spec, as `runc spec` writes it")
    process = spec["process"]
    if not isinstance(process, dict):
        raise RequestError(f"`process` in config.json is a {_json_kind(process)}; expected an object")
    env = process.get("env") or []
    if not isinstance(env, list):
        raise RequestError(f"`process.env` in config.json is a {_json_kind(env)}; expected a list of NAME=VALUE")
    return request_from_env(env, container, privileged=_is_privileged(process.get("capabilities")))


def request_from_env(
    env: dict[str, str] | Iterable[object],
    container: ContainerRoot = ContainerRoot(),  # noqa: B008 - an immutable value
    privileged: bool = False,
) -> Request:
    """The request in a container's environment: a mapping, or NAME=VALUE entries of which the last of a name counts.

    Raises RequestError for an entry that is not NAME=VALUE.
    """
    variables = _variables(env)
    for name in (DEVICES, CAPABILITIES):
        _check_length(name, variables.get(name, ""))
    return Request(
        devices=_devices(variables.get(DEVICES, "")),
        devices_source=f"env {DEVICES}" if DEVICES in variables else "",
        capabilities=_tokens(variables[CAPABILITIES]) if CAPABILITIES in variables else None,
        capabilities_source=f"env {CAPABILITIES}" if CAPABILITIES in variables else "",
        privileged=privileged,
        container=container,
    )


def _variables(env: dict[str, str] | Iterable[object]) -> dict[str, str]:
    if isinstance(env, dict):
        return env
    variables = {}
    for number, entry in enumerate(env):
        if not isinstance(entry, str) or "=" not in entry:
            # The value stays out of the message: it can be a secret.
            raise RequestError(f"entry {number} of the container's env is not NAME=VALUE; remove or complete it")
        name, value = entry.split("=", 1)
        variables[name] = value
    return variables


def _check_length(name: str, value: str) -> None:
    if len(value) > _LONGEST:
        raise RequestError(f"{name} has {len(value)} characters, expected at most {_LONGEST}; ask for less")


def _tokens(value: str) -> tuple[str, ...]:
    return tuple(token for token in map(str.strip, value.split(",")) if token)


def _devices(value: str) -> tuple[str, ...] | None:
    """`void` anywhere outweighs all; of `all` and `none` the first one outweighs the rest, as in the field."""
    tokens = _tokens(value)
    if not tokens or "void" in tokens:
        return None
    for token in tokens:
        if token == "all":
            return ("all",)
        if token == "none":
            return ()
    return tokens


def _is_privileged(capabilities: object) -> bool:
    """Whether CAP_SYS_ADMIN is in the bounding set, which also tells for a user without effective capabilities.

    OCI 1.0.0-rc1 to rc4 had one flat list in place of five; the shape says which it is.
    """
    bounding = capabilities.get("bounding") if isinstance(capabilities, dict) else capabilities
    return isinstance(bounding, list) and "CAP_SYS_ADMIN" in bounding


def _json_kind(value: object) -> str:
    if isinstance(value, dict):
        return "object"
    if isinstance(value, list):
        return "list"
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool):
        return "boolean"
    return "null" if value is None else "number"
