"""What a runtime tells its hooks: the OCI state on standard input, and config.json in the bundle that it names."""

from __future__ import annotations

import os
from stat import S_ISREG

from nvct.errors import RequestError
from nvct.fastjson import loads
from nvct.record import record

# A large Kubernetes pod's config.json has some 100 KiB.
MOST_SPEC = 16 << 20
MOST_STATE = 1 << 20

_LAST_PID = 1 << 22  # PID_MAX_LIMIT of linux/threads.h


@record
class Container:
    """A container as its runtime describes it. `rootfs` is an absolute path, as process `pid` sees it."""

    identity: str
    pid: int
    rootfs: str
    spec: dict[str, object]


def read_container(descriptor: int) -> Container:
    """The container whose OCI state is to be read from the descriptor. Raises RequestError."""
    if os.isatty(descriptor):
        raise RequestError("expected the OCI state of a container on standard input; a container runtime calls this")
    where = "the OCI state on standard input"
    state = _json(read_all(descriptor, MOST_STATE, where), where)
    pid, bundle = state.get("pid"), state.get("bundle") or state.get("bundlePath")
    if type(pid) is not int or not 0 < pid <= _LAST_PID or not isinstance(bundle, str) or not bundle.startswith("/"):
        raise RequestError(f"{where} has pid {pid!r:.80} and bundle {bundle!r:.80}; expected a process and a folder")
    spec = read_spec(f"{bundle}/config.json")
    # crun states the root itself, since with some user namespaces the one in config.json is another.
    rootfs = state.get("root") or root_path(spec)
    if not isinstance(rootfs, str):
        raise RequestError(f"{where} has root {rootfs!r:.80}; expected a path")
    return Container(str(state.get("id", "")), pid, os.path.normpath(os.path.join(bundle, rootfs)), spec)


def read_spec(path: str) -> dict[str, object]:
    """The OCI runtime spec in a bundle's config.json. Raises RequestError."""
    return _json(_read_file(path), path)


def root_path(spec: dict[str, object]) -> str:
    """The container's root folder as the spec has it: a path from the bundle. Raises RequestError."""
    root = spec.get("root")
    path = root.get("path") if isinstance(root, dict) else None
    if not isinstance(path, str) or not path:
        raise RequestError("config.json has no root.path; expected an OCI runtime spec")
    return path


def _json(text: bytes, where: str) -> dict[str, object]:
    try:
        value = loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"{where} is not a JSON object")
    return value


def _read_file(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"{path!r}: {reason}; expected the container's OCI runtime spec") from None
    try:
        if not S_ISREG(os.fstat(descriptor).st_mode):
            raise RequestError(f"{path!r} is no file; expected the container's OCI runtime spec")
        return read_all(descriptor, MOST_SPEC, path)
    finally:
        os.close(descriptor)


def read_all(descriptor: int, most: int, what: str) -> bytes:
    """Everything until the end. Raises RequestError past `most` bytes, and when it cannot be read."""
    chunks, size = [], 0
    try:
        while chunk := os.read(descriptor, 1 << 16):
            chunks.append(chunk)
            size += len(chunk)
            if size > most:
                raise RequestError(f"{what} is longer than {most} bytes")
    except OSError as error:
        raise RequestError(f"{what} cannot be read: {error.strerror}") from None
    return b"".join(chunks)
