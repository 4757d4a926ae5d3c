"""Inventory + Request + Settings → Edits: every rule about what a container gets lives in this package, once.

Pure functions: no file, no system call, no clock, no environment. Hooks, runtimes, CDI specs and Kubernetes carry the
same Edits out.
"""

from __future__ import annotations

from nvct.model import Edits, Inventory, Request
from nvct.plan.capabilities import capabilities_of
from nvct.plan.devices import choose, resolve
from nvct.plan.files import driver_files
from nvct.plan.nodes import device_nodes, proc_edit
from nvct.settings import Settings

__all__ = ["plan", "resolve"]

_PRIVILEGED = (
    "the container has CAP_SYS_ADMIN, so nothing can be denied there: it gets what it asks for, "
    "and can reach every other GPU of the node as well"
)
_UNMASKED = "mask_proc is off in the settings: /proc/driver/nvidia shows the container every GPU of the node"


def plan(inventory: Inventory, request: Request, settings: Settings) -> Edits:
    """Everything that must change in the container; nothing when it asks for nothing of ours.

    Raises RequestError for a request that cannot be honoured here, DriverError for a node that cannot honour any.
    """
    if request.devices is None:
        return Edits()
    capabilities = capabilities_of(request, settings)
    choice = choose(inventory, request)
    nodes = device_nodes(inventory, request, capabilities, choice)
    files = driver_files(inventory, request.container, capabilities)
    warnings = choice.warnings + nodes.warnings + files.warnings
    if request.privileged:
        warnings += (_PRIVILEGED,)
    if not settings.mask_proc:
        warnings += (_UNMASKED,)
    return Edits(
        devices=nodes.edits,
        mounts=files.mounts,
        links=files.links,
        loader_cache=files.loader_cache,
        proc=proc_edit(inventory, choice) if settings.mask_proc else None,
        # Whoever else looks at the container later must not give it devices again. A hook cannot change the
        # environment; specs can.
        env={"NVIDIA_VISIBLE_DEVICES": "void"},
        stale=files.stale,
        warnings=warnings,
    )
