"""The prestart hook: `docker run --gpus`, and every runtime that calls OCI hooks.

The runtime starts it when the container's namespaces and mounts stand and its program has not been started, with the
OCI state on standard input. It decides nothing itself: it reads the request, finds the inventory, has them planned
and carries the plan out. Its environment is the runtime's or the image's, so it is thrown away first.
"""

from __future__ import annotations

import os
import sys

from nvct import __version__
from nvct.errors import ConfigError, DriverError, NvctError, RequestError, StaleInventory
from nvct.fastjson import loads
from nvct.inject.carry import inject
from nvct.inject.look import look
from nvct.inject.rootfs import ConfinedRoot
from nvct.model import ContainerRoot
from nvct.node import cache
from nvct.node.recheck import recheck
from nvct.plan import plan, resolve
from nvct.record import replace
from nvct.request import request_from_spec
from nvct.settings import DEFAULT_PATH
from nvct.trust import why_environment_is_unsafe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvct.model import Edits, Inventory, Request
    from nvct.settings import Settings

NAME = "nvidia-container-runtime-hook"

USAGE = f"""usage: {NAME} [-config FILE] prestart|createRuntime|poststart|poststop
       {NAME} -version

Gives the container whose OCI state is on standard input the GPUs that its NVIDIA_VISIBLE_DEVICES asks for.
poststart and poststop do nothing.
exit status: 0 done, or no GPU asked for; 1 failed, with the reason on standard error and nothing left behind; 2 usage
"""

_ACTING = ("prestart", "createRuntime")
_IDLE = ("poststart", "poststop")

# A large Kubernetes pod's config.json has some 100 KiB.
_MOST_SPEC = 16 << 20
_MOST_STATE = 1 << 20


def main(arguments: list[str]) -> int:
    """Run the hook with the arguments after the program's name; returns the exit status."""
    os.environ.clear()
    try:
        config, command = _parse(arguments)
    except ValueError as error:
        sys.stderr.write(f"{NAME}: {error}\n{USAGE}")
        return 2
    if command == "version":
        sys.stdout.write(f"NVIDIA Container Runtime Hook version {__version__} (nvct)\n")
        return 0
    if command in _IDLE:
        return 0
    try:
        warnings = give_gpus(_read_descriptor(0, _MOST_STATE, "the OCI state on standard input"), config)
    except NvctError as error:
        sys.stderr.write(f"nvct: {error}\n")
        return 1
    except MemoryError:
        sys.stderr.write("nvct: the container's config.json or loader cache needs more memory than the hook has\n")
        return 1
    for warning in warnings:
        sys.stderr.write(f"nvct: warning: {warning}\n")
    return 0


def _parse(arguments: list[str]) -> tuple[str, str]:
    """The settings file and the command, which stands last; options with one dash or two, as the field's tools
    take them.
    """
    config, command, rest = DEFAULT_PATH, "", list(arguments)
    while rest:
        word = rest.pop(0)
        option, has_value, value = word.partition("=")
        option = "-" + option.lstrip("-") if option.startswith("-") else ""
        if option == "-config":
            if not has_value and not rest:
                raise ValueError("-config needs a file")
            config = os.path.abspath(value if has_value else rest.pop(0))
        elif option == "-version":
            return config, "version"
        elif option:
            raise ValueError(f"unknown option {word!r}")
        elif command:
            raise ValueError(f"one command at a time, not {command!r} and {word!r}")
        else:
            command = word
    if command not in _ACTING + _IDLE:
        raise ValueError(f"unknown command {command!r}" if command else "no command")
    return config, command


def give_gpus(state_text: bytes, config: str) -> tuple[str, ...]:
    """Do what the hook is for, given the OCI state and the settings file's path. Returns warnings, raises NvctError."""
    pid, bundle, rootfs = _state(state_text)
    spec = _json(_read_file(f"{bundle}/config.json"), f"{bundle}/config.json")
    request = request_from_spec(spec, ContainerRoot())
    if request.devices is None:
        return ()
    root = _open_root(pid, os.path.join(bundle, rootfs or _root_path(spec)))
    request = replace(request, container=look(root))
    settings, inventory, edits = _planned(request, config)
    return edits.warnings + inject(edits, pid, root, inventory.architecture, settings.cgroups)


def _planned(request: Request, config: str) -> tuple[Settings, Inventory, Edits]:
    """Plan on the cached inventory, and once more on a new one where the node is found to have changed meanwhile."""
    cached = cache.load(config)
    if cached:
        try:
            return _plan_and_recheck(request, *cached)
        except StaleInventory:
            cache.discard(config)  # its stamp looks right, yet it is wrong
    with cache.Lock(name="hooks"):
        cached = cache.load(config)
        if cached is None:
            _refresh(config)
            cached = cache.load(config)
    if cached is None:
        raise DriverError(
            f"the inventory of this node is not to be had from {cache.cache_path(config)} right after it was written: "
            "the node is changing, or the file system does not keep it; run `nvct refresh` to see which"
        )
    return _plan_and_recheck(request, *cached)


def _plan_and_recheck(request: Request, settings: Settings, inventory: Inventory) -> tuple[Settings, Inventory, Edits]:
    edits = plan(inventory, request, settings)
    recheck(inventory, *resolve(inventory, request))
    return settings, inventory, edits


def _refresh(config: str) -> None:
    """Discover the node in a child with the full interpreter: NVML starts threads, and needs what a hook may not
    import.
    """
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    interpreter = _interpreter(home)
    command = [interpreter, "-I", f"{home}/nvct/__main__.py", "--config", config, "refresh", "--quiet", "--if-stale"]
    reader, writer = os.pipe()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, writer, 2)]
    child = os.posix_spawn(interpreter, command, {}, file_actions=actions)
    os.close(writer)
    os.close(null)
    complaint = _read_descriptor(reader, _MOST_STATE, "the output of nvct refresh").decode(errors="replace").strip()
    os.close(reader)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        last = complaint.rpartition("\n")[2].removeprefix("nvct: ")
        raise DriverError(last or f"nvct refresh ended with status {status} and said nothing")


def _interpreter(home: str) -> str:
    """That of the virtual environment beside the code, which has the packages that discovery needs, or our own."""
    own = f"{home}/.venv/bin/python3"
    if not os.path.exists(own):
        return sys.executable
    reason = why_environment_is_unsafe(f"{home}/.venv")
    if reason:
        raise ConfigError(reason)
    return own


def _state(text: bytes) -> tuple[int, str, str]:
    """The container's process, its bundle, and its root where the runtime states it (crun does)."""
    state = _json(text, "the OCI state on standard input")
    pid = state.get("pid")
    bundle = state.get("bundle") or state.get("bundlePath")
    if type(pid) is not int or pid <= 0 or not isinstance(bundle, str) or not bundle.startswith("/"):
        raise RequestError(
            f"the OCI state on standard input has pid {pid!r} and bundle {bundle!r}; "
            "expected a process and an absolute path"
        )
    rootfs = state.get("root")
    return pid, bundle, rootfs if isinstance(rootfs, str) else ""


def _root_path(spec: dict[str, object]) -> str:
    root = spec["root"]
    path = root.get("path") if isinstance(root, dict) else None
    if not isinstance(path, str) or not path:
        raise RequestError("config.json has no root.path; expected an OCI runtime spec")
    return path


def _open_root(pid: int, rootfs: str) -> ConfinedRoot:
    try:
        return ConfinedRoot.of_process(pid, os.path.normpath(rootfs))
    except OSError as error:
        raise RequestError(f"the container's root {rootfs!r} as process {pid} sees it: {error.strerror}") from None
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise RequestError(f"the container's root {rootfs!r} is no path: {error}") from None


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
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"{path!r}: {reason}; expected the container's OCI runtime spec") from None
    try:
        return _read_descriptor(descriptor, _MOST_SPEC, path)
    finally:
        os.close(descriptor)


def _read_descriptor(descriptor: int, most: int, what: str) -> bytes:
    chunks, size = [], 0
    while chunk := os.read(descriptor, 1 << 16):
        chunks.append(chunk)
        size += len(chunk)
        if size > most:
            raise RequestError(f"{what} is longer than {most} bytes")
    return b"".join(chunks)
