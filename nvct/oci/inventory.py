"""Settings and inventory for whoever starts a container: the kept ones, and new ones once those prove stale.

Imported only when a container asks for something.
"""

from __future__ import annotations

import os
import sys

from nvct import settings as settings_module
from nvct.errors import ConfigError, DriverError, StaleInventory
from nvct.fastjson import loads
from nvct.node import cache
from nvct.node.recheck import recheck
from nvct.node.saved import inventory_from_json
from nvct.oci.state import read_all
from nvct.plan import plan, resolve
from nvct.trust import why_environment_is_unsafe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from nvct.model import Edits, Inventory, Request
    from nvct.settings import Settings

    Act = Callable[[Settings, Inventory], tuple[str, ...]]

# Bytes. The largest inventory seen, 2048 IMEX channels in it, has 200 KiB, and a large pod's config.json 100 KiB.
_MOST_OUTPUT = 64 << 20


def with_inventory(config: str, act: Act) -> tuple[str, ...]:
    """Do something with settings and inventory, and once more with new ones when it raises StaleInventory.

    `config` is the settings file's path. Returns warnings, those of `act` among them, and raises NvctError.
    """
    kept = cache.load(config)
    if kept:
        try:
            return act(*kept)
        except StaleInventory:
            pass  # its stamp looks right, yet it is wrong
    settings, inventory, warnings = _discovered(config, kept)
    try:
        return warnings + act(settings, inventory)
    except StaleInventory as error:
        raise DriverError(f"{error}; the node has changed since it was discovered a moment ago: try again") from None


def checked_plan(inventory: Inventory, request: Request, settings: Settings) -> Edits:
    """The plan, when what it hands out is on the node at this moment. Raises StaleInventory when it is not, and as
    `plan`.

    Neither devices nor mounts: the node's settings let nothing of the request count.
    """
    edits = plan(inventory, request, settings)
    if edits.devices or edits.mounts:
        recheck(inventory, *resolve(inventory, request, settings))
    return edits


def _discovered(config: str, wrong: tuple[Settings, Inventory] | None) -> tuple[Settings, Inventory, tuple[str, ...]]:
    """Settings and inventory anew, by the first of all starts that want them at this moment; and warnings.

    `wrong` is what was kept when this start began, if it looked fresh: another one, which another start has kept since,
    will do. So none discards what it has not tried.
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


def settings_alone(config: str) -> Settings:
    """The settings, on a node that may have no driver. Raises NvctError."""
    kept = cache.load(config)
    return kept[0] if kept else settings_module.from_json(_ask(config, "settings")["settings"])


def _ask(config: str, which: str) -> dict[str, Any]:
    """Discover in a child with the full interpreter: NVML starts threads, and needs what a hook may not import.

    `which` as in `handover`.
    """
    answer: Any = loads(ask_program("nvct/node/handover.py", (config, which)))
    return dict(answer)


def ask_program(path: str, arguments: tuple[str, ...] = (), text: str = "") -> str:
    """What a program of nvct's, its path below the code, prints on standard output for a text on standard input.

    It has the full interpreter and its packages, and an empty environment. Raises DriverError with its last complaint.
    """
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    interpreter = _interpreter(home)
    output, status, complaint = _run(interpreter, [interpreter, "-I", f"{home}/{path}", *arguments], text)
    if status:
        last = complaint.strip().rpartition("\n")[2].removeprefix("nvct: ")
        raise DriverError(last or f"{path} ended with status {status} and said nothing")
    return output


def _run(program: str, command: list[str], text: str) -> tuple[str, int, str]:
    """Run a program with an empty environment: its standard output, exit status and standard error."""
    out, out_end = os.pipe()
    complaints = os.memfd_create("complaints")  # no pipe: nobody reads it before the end
    told = os.memfd_create("told")
    rest = memoryview(text.encode())
    while rest:
        rest = rest[os.write(told, rest) :]
    os.lseek(told, 0, os.SEEK_SET)
    ends = ((told, 0), (out_end, 1), (complaints, 2))
    child = os.posix_spawn(program, command, {}, file_actions=[(os.POSIX_SPAWN_DUP2, end, at) for end, at in ends])
    os.close(out_end)
    output = read_all(out, _MOST_OUTPUT, f"the output of {command[-1]}").decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    complaint = os.pread(complaints, 1 << 16, 0).decode(errors="replace")
    for descriptor in (out, told, complaints):
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
