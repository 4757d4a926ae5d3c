"""Keeping a spec true: it is written when the node has changed, and removed when there is nothing to tell.

A spec that names a MIG device which is no more, or a driver that is being replaced, hands out what was not asked for;
one that is absent only makes an engine say that it knows no such device.
"""

from __future__ import annotations

import os
import select
import time

from nvct import settings as settings_file
from nvct.cdi.generate import Choices, generate
from nvct.cdi.text import to_text
from nvct.errors import NvctError
from nvct.node import cache, current
from nvct.node.charlinks import link_by_number
from nvct.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# Where the established toolkit has its spec: two of one kind in one folder would cancel each other, so nvct's takes its
# place.
DEFAULT_OUTPUT = "/var/run/cdi/nvidia.yaml"

# How often the node is looked at where no event tells of a change: the driver sends none for MIG devices. A look takes
# some milliseconds of /proc and stat.
INTERVAL_S = 2.0
# A driver that does not answer may do so later, although nothing of the node changes.
_RETRY_S = 30.0
# Events come in flocks while a driver loads.
_SETTLE_S = 0.2


@record
class Outcome:
    """`what` is one of the words below; `error` says why there is no spec now, for the last two."""

    what: str
    warnings: tuple[str, ...] = ()
    error: NvctError | None = None


WRITTEN = "written"
UNCHANGED = "unchanged"
REMOVED = "removed"
ABSENT = "absent"


def refresh(config: str, output: str, form: str, choices: Choices) -> Outcome:
    """Make the file say what the node has now, in one step; remove it when that cannot be told. The nodes get the links
    by which systemd finds them.

    Raises OSError when the file can neither be written nor removed.
    """
    try:
        now = current.current(config)
        made = generate(now.inventory, now.settings, choices)
    except NvctError as error:
        return Outcome(REMOVED if _remove(output) else ABSENT, error=error)
    warnings = now.warnings + made.warnings + link_by_number(made.nodes, now.settings.char_links)
    changed = write(output, to_text(made.spec, form))
    return Outcome(WRITTEN if changed else UNCHANGED, warnings)


def write(path: str, text: str) -> bool:
    """Put a file with the text there in one step, for everybody to read; False when it was there with just that text.

    Its folder is made when absent. Readers take files by their extension, so that they pass over the one in the making.
    """
    if _content(path) == text:
        return False
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    making = f"{path}.{os.getpid()}.new"
    try:
        descriptor = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fchmod(descriptor, 0o644)
            os.fsync(descriptor)
        os.rename(making, path)
    except BaseException:
        _remove(making)
        raise
    return True


def _content(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except (OSError, UnicodeDecodeError):
        return None


def _remove(path: str) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def watch(config: str, output: str, form: str, choices: Choices, told: Callable[[Outcome], None]) -> None:
    """Refresh now, and whenever the node or its settings change, for ever. `told` hears of each refresh."""
    events = _Events()
    while True:
        seen = _look(config)
        outcome = refresh(config, output, form, choices)
        told(outcome)
        retry = time.monotonic() + _RETRY_S
        # Discovery itself can change the node, by making nodes that were missing: then it is looked at once more.
        while _look(config) == seen and not (outcome.error and time.monotonic() > retry):
            events.wait(INTERVAL_S)


def _look(config: str) -> object:
    """What changes with the node; without a driver or with settings that are wrong, that they are so."""
    try:
        return cache.stamp(config, settings_file.load(config))
    except (NvctError, OSError) as error:
        return f"{type(error).__name__}: {error}"


class _Events:
    """The kernel's events (hot-plug, modules that come and go), where this machine lets us have them."""

    def __init__(self) -> None:
        from pyroute2.netlink.uevent import UeventSocket

        self._poll = select.poll()
        try:
            self._socket = UeventSocket()
            self._socket.bind()
        except OSError:
            return  # looking every now and then is enough, and slower
        self._poll.register(self._socket.fileno(), select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Until an event has come, and no longer than `seconds`; whether one has."""
        if not self._poll.poll(seconds * 1000):
            return False
        time.sleep(_SETTLE_S)
        while self._poll.poll(0):
            self._socket.get()
        return True
