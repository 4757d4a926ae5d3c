"""The small hook of specs: it does in the container what a spec cannot express.

OCI and CDI specs that nvct writes name it as a createRuntime hook, and have everything that it does as its argument, so
that it needs neither settings nor inventory: links, the loader cache, small files, the view of /proc/driver/nvidia.
Devices and mounts stand in the spec.
"""

from __future__ import annotations

from nvct import __version__, edits
from nvct.errors import ConfigError
from nvct.fastjson import loads
from nvct.inject.carry import inject
from nvct.inject.look import look_as_its_root
from nvct.oci.report import Log, begin, carried_out, say
from nvct.oci.root import open_root
from nvct.oci.state import read_container
from nvct.plan.remainder import complete

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
    planned = complete(remainder, look_as_its_root(root, container.pid), _nodes(container.spec))
    return planned.warnings + inject(planned, container.pid, root, remainder.architecture, cgroups=False)


def _nodes(spec: dict[str, object]) -> set[str]:
    """The paths of the container's device nodes; engines without root mount nodes in place of making them."""
    linux, mounts = spec.get("linux"), spec.get("mounts")
    devices = linux.get("devices") if isinstance(linux, dict) else None
    rows = [*_rows(devices, "path"), *_rows(mounts, "destination")]
    return {row for row in rows if isinstance(row, str)}


def _rows(values: object, key: str) -> list[object]:
    return [value.get(key) for value in values if isinstance(value, dict)] if isinstance(values, list) else []
