"""Gives a container what it asks for: plan on the kept inventory, carry out, and once more on a new one if it was
stale.

Imported only when a container asks for something.
"""

from __future__ import annotations

import os
import sys

from nvct import settings as settings_module
from nvct.errors import ConfigError, DriverError, StaleInventory
from nvct.fastjson import loads
from nvct.inject.carry import inject
from nvct.inject.look import look_as_its_root
from nvct.node import cache
from nvct.node.recheck import recheck
from nvct.node.saved import inventory_from_json
from nvct.oci.root import open_root
from nvct.oci.state import read_all
from nvct.plan import plan, resolve
from nvct.record import replace
from nvct.trust import why_environment_is_unsafe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from nvct.inject.rootfs import ConfinedRoot
    from nvct.model import Inventory, Request
    from nvct.oci.state import Container
    from nvct.settings import Settings

# The largest inventory seen, 2048 IMEX channels in it, has 200 KiB.
_MOST_INVENTORY = 64 << 20


def give(container: Container, request: Request, config: str) -> tuple[str, ...]:
    """Plan and carry out. `config` is the settings file's path. Returns warnings, raises NvctError."""
    root = open_root(container)
    request = replace(request, container=look_as_its_root(root, container.pid))
    kept = cache.load(config)
    if kept:
        try:
            return _carry_out(container, request, root, *kept)
        except StaleInventory:
            pass  # its stamp looks right, yet it is wrong
    settings, inventory, warnings = _discovered(config, kept)
    try:
        return warnings + _carry_out(container, request, root, settings, inventory)
    except StaleInventory as error:
        raise DriverError(f"{error}; the node has changed since it was discovered a moment ago: try again") from None


def _carry_out(
    container: Container, request: Request, root: ConfinedRoot, settings: Settings, inventory: Inventory
) -> tuple[str, ...]:
    edits = plan(inventory, request, settings)
    if not edits.devices and not edits.mounts:  # the node's settings let nothing of the request count
        return edits.warnings
    recheck(inventory, *resolve(inventory, request, settings))
    return edits.warnings + inject(edits, container.pid, root, inventory.architecture, settings.cgroups)


def _discovered(config: str, wrong: tuple[Settings, Inventory] | None) -> tuple[Settings, Inventory, tuple[str, ...]]:
    """Settings and inventory anew, by the first of all hooks that want them at this moment; and warnings.

    `wrong` is what was kept when this hook began, if it looked fresh: another one, which another start has kept since,
    will do. So a hook never discards what it has not tried.
    """
    with cache.Lock(name="hooks"):
        kept = cache.load(config)
        if kept and kept != wrong:
            return (*kept, ())
        answer = _ask(config, "new" if kept else "any")
    return (
        settings_module.from_json(answer["settings"]),
        inventory_from_json(answer["inventory"]),
        tuple(answer["warnings"]),
    )


def _ask(config: str, which: str) -> dict[str, Any]:
    """Discover in a child with the full interpreter: NVML starts threads, and needs what a hook may not import.

    `which` as in `handover`.
    """
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    interpreter = _interpreter(home)
    command = [interpreter, "-I", f"{home}/nvct/node/handover.py", config, which]
    output, status, complaint = _run(interpreter, command)
    if status:
        last = complaint.strip().rpartition("\n")[2].removeprefix("nvct: ")
        raise DriverError(last or f"the discovery of this node ended with status {status} and said nothing")
    answer: Any = loads(output)
    return dict(answer)


def _run(program: str, command: list[str]) -> tuple[str, int, str]:
    """Run a program with an empty environment: its standard output, exit status and standard error."""
    out, out_end = os.pipe()
    complaints = os.memfd_create("complaints")  # no pipe: nobody reads it before the end
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    ends = ((null, 0), (out_end, 1), (complaints, 2))
    child = os.posix_spawn(program, command, {}, file_actions=[(os.POSIX_SPAWN_DUP2, end, at) for end, at in ends])
    os.close(out_end)
    output = read_all(out, _MOST_INVENTORY, "the inventory").decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    complaint = os.pread(complaints, 1 << 16, 0).decode(errors="replace")
    for descriptor in (out, null, complaints):
        os.close(descriptor)
    return output, status, complaint


def _interpreter(home: str) -> str:
    """That of the virtual environment beside the code, which has the packages that discovery needs, or our own."""
    own = f"{home}/.venv/bin/python3"
    if not os.path.exists(own):
        return sys.executable
    reason = why_environment_is_unsafe(f"{home}/.venv")
    if reason:
        raise ConfigError(reason)
    return own
