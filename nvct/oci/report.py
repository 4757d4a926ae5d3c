"""What hooks and the runtime have in common as programs: how they begin, what they say, and the exit status of it."""

from __future__ import annotations

import os
from errno import errorcode

from nvct.errors import NvctError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_LOG = "/dev/log"
_ERROR, _WARNING = 27, 28  # syslog(3): facility daemon, severities err and warning


def begin() -> None:
    """A hook's environment is the runtime's or the image's, so it is thrown away first."""
    os.environ.clear()
    fill_standard_descriptors()


def fill_standard_descriptors() -> None:
    """A standard descriptor that is closed would be taken by the next file opened, and complaints written into that."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def say(descriptor: int, text: str) -> None:
    try:  # noqa: SIM105  # contextlib is slow to import
        os.write(descriptor, text.encode(errors="backslashreplace"))
    except OSError:
        pass  # nobody listens; whether the container starts does not depend on that


def carried_out(act: Callable[[Log], tuple[str, ...]], log: Log | None = None) -> int:
    """The exit status of `act`, which returns warnings and raises NvctError; both are told; `log` tells them."""
    log = log or Log()
    try:
        warnings = act(log)
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


class Log:
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
        say(2, f"nvct: {text}\n")
        self._send(_ERROR, text)
        return 1

    def warn(self, text: str) -> None:
        say(2, f"nvct: warning: {text}\n")
        self._warn_system(text)

    def _warn_system(self, text: str) -> None:
        self._send(_WARNING, f"warning: {text}")

    def _send(self, priority: int, text: str) -> None:
        if self._system >= 0:
            say(self._system, f"<{priority}>nvct[{os.getpid()}]: container {self._container}: {text}")
