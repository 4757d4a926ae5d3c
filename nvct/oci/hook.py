"""The prestart hook: `docker run --gpus`, and every runtime that calls OCI hooks.

The runtime starts it when the container's namespaces and mounts stand and its program has not been started, with the
OCI state on standard input. It decides nothing itself: it reads the request, finds the inventory, has them planned and
carries the plan out. Its environment is the runtime's or the image's, so it is thrown away first.
"""

from __future__ import annotations

import os
from errno import errorcode

from nvct import __version__
from nvct.errors import NvctError
from nvct.model import ContainerRoot
from nvct.oci.state import read_container
from nvct.request import asks_for_nothing, request_from_spec
from nvct.settings import DEFAULT_PATH

NAME = "nvidia-container-runtime-hook"

USAGE = f"""usage: {NAME} [-config FILE] prestart|createRuntime|poststart|poststop
       {NAME} -version

Gives the container whose OCI state is on standard input the GPUs that its NVIDIA_VISIBLE_DEVICES asks for.
poststart and poststop do nothing. -debug is accepted, as of the hook of this name, and changes nothing.
exit status: 0 done, or no GPU asked for; 1 failed, with the reason on standard error and nothing left behind; 2 usage
"""

_ACTING = ("prestart", "createRuntime")
_IDLE = ("poststart", "poststop")

_LOG = "/dev/log"
_ERROR, _WARNING = 27, 28  # syslog(3): facility daemon, severities err and warning


def main(arguments: list[str]) -> int:
    """Run the hook with the arguments after the program's name; returns the exit status."""
    os.environ.clear()
    _fill_standard_descriptors()
    try:
        config, command = _parse(arguments)
    except ValueError as error:
        _say(2, f"{NAME}: {error}\n{USAGE}")
        return 2
    if command == "help":
        _say(1, USAGE)
    if command == "version":
        _say(1, f"NVIDIA Container Runtime Hook version {__version__} (nvct)\n")
    return _act(config) if command in _ACTING else 0


def _fill_standard_descriptors() -> None:
    """A standard descriptor that is closed would be taken by the next file opened, and complaints written into that."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _say(descriptor: int, text: str) -> None:
    try:  # noqa: SIM105  # contextlib is slow to import
        os.write(descriptor, text.encode(errors="backslashreplace"))
    except OSError:
        pass  # nobody listens; whether the container starts does not depend on that


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
            config = _absolute(value if has_value else rest.pop(0))
        elif option in ("-version", "-help", "-h"):
            return config, "version" if option == "-version" else "help"
        elif option == "-debug":
            continue
        elif option:
            raise ValueError(f"unknown option {word!r}")
        elif command:
            raise ValueError(f"one command at a time, not {command!r} and {word!r}")
        else:
            command = word
    if command not in _ACTING + _IDLE:
        raise ValueError(f"unknown command {command!r}" if command else "no command")
    return config, command


def _absolute(path: str) -> str:
    try:
        return os.path.abspath(path)
    except OSError:
        raise ValueError(f"-config {path!r} is relative to a folder that is gone: give the whole path") from None


def _act(config: str) -> int:
    log = _Log()
    try:
        warnings = give_gpus(config, log)
    except NvctError as error:
        return log.failed(str(error))
    except MemoryError:
        return log.failed("the container's config.json or loader cache needs more memory than the hook has")
    except OSError as error:  # before the injection, which explains its own
        code = errorcode.get(error.errno or 0, str(error.errno))
        where = error.filename or "a system call"
        return log.failed(f"{where}: {error.strerror} ({code}); nothing has been done to the container: try again")
    except Exception as error:  # a fault of nvct; whoever reads this shall see nvct's line, not Python's traceback
        return log.failed(f"this is a fault of nvct, please report it: {type(error).__name__}: {error}")
    for warning in warnings:
        log.warn(warning)
    return 0


def give_gpus(config: str, log: _Log) -> tuple[str, ...]:
    """Do what the hook is for. Returns warnings, raises NvctError."""
    container = read_container(0)
    request = request_from_spec(container.spec, ContainerRoot())
    if asks_for_nothing(request):
        return ()
    # Only now: most containers ask for nothing, and the rest of the code takes longer to import than to run.
    from nvct.oci.give import give

    log.open(container.identity)
    return give(container, request, config)


class _Log:
    """Standard error, which a runtime shows when a hook fails, and the system log, for what is said when all went
    well.
    """

    def __init__(self) -> None:
        self._system = -1
        self._container = ""

    def open(self, container: str) -> None:
        """Now, for later this process is in the container's mount namespace."""
        from nvct.inject.syscalls import connect_to_log

        self._container = container
        try:
            self._system = connect_to_log(_LOG)
        except OSError:
            self._system = -1  # a machine without a system log

    def failed(self, text: str) -> int:
        _say(2, f"nvct: {text}\n")
        self._send(_ERROR, text)
        return 1

    def warn(self, text: str) -> None:
        _say(2, f"nvct: warning: {text}\n")
        self._send(_WARNING, f"warning: {text}")

    def _send(self, priority: int, text: str) -> None:
        if self._system >= 0:
            _say(self._system, f"<{priority}>nvct[{os.getpid()}]: container {self._container}: {text}")
