"""Gives a container what it asks for: plan on the kept inventory, carry out, and once more on a new one if it was
stale.

Imported only when a container asks for something.
"""

from __future__ import annotations

from nvct.inject.carry import inject
from nvct.inject.look import look_as_its_root
from nvct.oci.inventory import checked_plan, with_inventory
from nvct.oci.root import open_root
from nvct.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvct.model import Inventory, Request
    from nvct.oci.state import Container
    from nvct.settings import Settings


def give(container: Container, request: Request, config: str) -> tuple[str, ...]:
    """Plan and carry out. `config` is the settings file's path. Returns warnings, raises NvctError."""
    root = open_root(container)
    request = replace(request, container=look_as_its_root(root, container.pid))

    def carry_out(settings: Settings, inventory: Inventory) -> tuple[str, ...]:
        edits = checked_plan(inventory, request, settings)
        if not edits.devices and not edits.mounts:
            return edits.warnings
        return edits.warnings + inject(edits, container.pid, root, inventory.architecture, settings.cgroups)

    return with_inventory(config, carry_out)
