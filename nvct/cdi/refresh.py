"""Keeping a spec true: it is written when the node has changed, and removed when what it says is so no longer.

A spec that names a MIG device which is no more, or a driver that is being replaced, hands out what was not asked for;
one that is absent only makes an engine say that it knows no such device.
"""

from __future__ import annotations

import select
import time

from nvct import settings as settings_file
from nvct.cdi import place
from nvct.cdi.check import problems, untruths
from nvct.cdi.devices import NAMINGS
from nvct.cdi.generate import Choices, generate
from nvct.cdi.text import to_text
from nvct.errors import ConfigError, DriverError, NvctError, StaleInventory
from nvct.node import cache, current
from nvct.node.charlinks import link_by_number
from nvct.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from nvct.node.current import Current

_FOLDER = "/var/run/cdi"

# How often the node is looked at where no event tells of a change: the driver sends none for MIG devices. A look takes
# some milliseconds of /proc and stat.
INTERVAL_S = 2.0
# A driver that does not answer may do so later, although nothing of the node changes.
_RETRY_S = 30.0
# Events come in flocks while a driver loads.
_SETTLE_S = 0.2


@record
class Outcome:
    """`what` is one of the words below; `error` says why no spec was made, for the last three. `text` is that of the
    spec which was made, else what stands in its place.
    """

    what: str
    warnings: tuple[str, ...] = ()
    error: NvctError | None = None
    text: str | None = None


WRITTEN = "written"
UNCHANGED = "unchanged"
REMOVED = "removed"
ABSENT = "absent"
KEPT = "left as it was"


def default_output(kind: str) -> str:
    """The spec of each kind has a file of its own. That of the established toolkit gives way to nvct's: two of one kind
    in one folder would cancel each other.
    """
    return f"{_FOLDER}/nvidia.yaml" if kind == Choices().kind else f"{_FOLDER}/{kind.replace('/', '-')}.yaml"


def refresh(config: str, output: str, form: str, choices: Choices) -> Outcome:
    """Make the file say what the node has now, in one step; remove it when what it says is not so any more. The nodes
    get the links by which systemd finds them.

    Raises OSError when the file can neither be written nor removed.
    """
    now = None
    try:
        now = current.current(config)
        made = generate(now.inventory, now.settings, choices)
    except NvctError as error:
        return _without_new(output, error, now, choices)
    text = to_text(made.spec, form)
    warnings = now.warnings + made.warnings
    try:
        changed = place.write(output, text, choices.kind)
    except ConfigError as error:
        return Outcome(KEPT, warnings, error, place.text_of(output))
    warnings += link_by_number(made.nodes, now.settings.char_links)
    return Outcome(WRITTEN if changed else UNCHANGED, warnings, text=text)


def _without_new(output: str, error: NvctError, now: Current | None, choices: Choices) -> Outcome:
    """What becomes of the old spec when no new one can be made; what is somebody else's stays."""
    try:
        old = place.replaceable(output, choices.kind)
    except ConfigError:
        return Outcome(KEPT, error=error, text=place.text_of(output))
    if old is None or _holds(old, error, now, choices):
        return Outcome(KEPT if old else ABSENT, error=error, text=place.text_of(output))
    place.remove(output)
    return Outcome(REMOVED, error=error)


def _holds(old: dict[str, Any], error: NvctError, now: Current | None, choices: Choices) -> bool:
    """Whether the old spec still tells of the node as it is, though a new one could not be made: what a command line or
    settings file says wrong, changes no node.
    """
    if isinstance(error, (DriverError, StaleInventory)):
        return False
    if problems(old):
        return True  # engines pass it over
    if now is None or isinstance(error, ConfigError):
        return not untruths(old)  # without settings the node cannot be asked
    every = replace(choices, tokens=("all",), namings=NAMINGS, version="", hooks=False)
    try:
        return gives_no_more(old, generate(now.inventory, now.settings, every).spec)
    except NvctError:
        return False


def gives_no_more(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether every device of one spec is in another, and has no node there that it has not here."""
    known = {device["name"]: _nodes(new, device) for device in new["devices"]}
    return all(
        path in known.get(device["name"], {}) and said in (known[device["name"]][path], _UNSAID)
        for device in old["devices"]
        for path, said in _nodes(old, device).items()
    )


_UNSAID = (None, None)


def _nodes(spec: dict[str, Any], device: dict[str, Any]) -> dict[str, tuple[int | None, int | None]]:
    """Major and minor of each node that a container with the device gets, by path; a spec need not say them."""
    nodes = [*spec.get("containerEdits", {}).get("deviceNodes", ()), *device["containerEdits"].get("deviceNodes", ())]
    return {node["path"]: (node.get("major"), node.get("minor")) for node in nodes}


def watch(config: str, output: str, form: str, choices: Choices, told: Callable[[Outcome], None]) -> None:
    """Refresh now, and whenever the node, its settings or the file change, for ever. `told` hears of each refresh."""
    events = _Events()
    while True:
        seen = _look(config)
        outcome = refresh(config, output, form, choices)
        told(outcome)
        retry = time.monotonic() + _RETRY_S
        # Discovery itself can change the node, by making nodes that were missing: then it is looked at once more.
        events.wait(INTERVAL_S)
        while (
            _look(config) == seen
            and place.text_of(output) == outcome.text
            and not (outcome.error and time.monotonic() > retry)
        ):
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
