"""The small hook of specs: it does in the container what a spec cannot express.

OCI and CDI specs that nvct writes name it as a createRuntime hook, and have everything that it does as its argument, so
that it needs neither settings nor inventory: links, the loader cache, small files, the view of /proc/driver/nvidia.
Devices and mounts stand in the spec.
"""

from __future__ import annotations

import os

from nvct import __version__, edits
from nvct.errors import ConfigError, RequestError, StaleInventory
from nvct.fastjson import loads
from nvct.inject.carry import inject
from nvct.inject.look import look_as_its_root
from nvct.oci.report import Log, begin, carried_out, say
from nvct.oci.root import open_root
from nvct.oci.state import read_container
from nvct.plan.remainder import complete

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvct.model import ProcEdit, Remainder

USAGE = f"""usage: {edits.HOOK} {edits.HOOK_STAGE} JSON
       {edits.HOOK} --version

Does in the container whose OCI state is on standard input what JSON says, as specs of nvct's have it.
exit status: 0 done; 1 failed, with the reason on standard error and nothing left behind; 2 usage
"""


def main(arguments: list[str]) -> int:
    """Run the hook with the arguments after the program's name; returns the exit status."""
    begin()
    if arguments == ["--version"]:
        say(1, f"{edits.HOOK} {__version__}\n")
        return 0
    if len(arguments) != 2 or arguments[0] != edits.HOOK_STAGE:
        say(2, USAGE)
        return 2
    return carried_out(lambda log: _finish(arguments[1], log))


def _finish(text: str, log: Log) -> tuple[str, ...]:
    try:
        value = loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the hook's argument is not JSON: {error}") from None
    remainder = edits.from_json(value)
    container = read_container(0)
    log.open(container.identity)
    root = open_root(container)
    nodes = _nodes(container.spec)
    planned = complete(remainder, look_as_its_root(root, container.pid), nodes)
    try:
        return planned.warnings + inject(planned, container.pid, root, remainder.architecture, cgroups=False)
    except StaleInventory as error:
        raise RequestError(f"{error}{_why_gone(remainder, nodes)}; nothing was done to the container") from None


def _why_gone(remainder: Remainder, nodes: set[str]) -> str:
    """Which devices went after the spec was written, and the next step."""
    if remainder.pending is None:  # the runtime's, which plans for each container anew
        return ": the node has changed since this container was made, so make it again"
    mine = [case for case in remainder.pending.cases if all(node in nodes for node in case.nodes)]
    gone = dict.fromkeys(case.device for case in mine if case.edits.proc and _is_gone(case.edits.proc))
    named = ", ".join(f"`{name}`" for name in gone if name not in ("", "all")) or "a device"
    return (
        f": {named} of the CDI spec is no longer on this node; run `nvct cdi refresh`, and ask for what it names then"
    )


def _is_gone(proc: ProcEdit) -> bool:
    names = [f"gpus/{name}" for name in proc.gpus] + [f"capabilities/{name}" for name in proc.capabilities]
    return not all(os.path.exists(f"{proc.source}/{name}") for name in names)


def _nodes(spec: dict[str, object]) -> set[str]:
    """The paths of the container's device nodes; engines without root mount nodes in place of making them."""
    linux, mounts = spec.get("linux"), spec.get("mounts")
    devices = linux.get("devices") if isinstance(linux, dict) else None
    rows = [*_rows(devices, "path"), *_rows(mounts, "destination")]
    return {row for row in rows if isinstance(row, str)}


def _rows(values: object, key: str) -> list[object]:
    return [value.get(key) for value in values if isinstance(value, dict)] if isinstance(values, list) else []
