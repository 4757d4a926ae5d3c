"""Inventory + Request + Settings → Edits: every rule about what a container gets lives in this package, once.

Pure functions: no file, no system call, no clock, no environment. Hooks, runtimes, CDI specs and Kubernetes carry the
same Edits out.
"""

from __future__ import annotations

from nvct.model import WSL, Edits, Inventory, Request
from nvct.plan.accept import accept
from nvct.plan.capabilities import capabilities_of
from nvct.plan.compat import compat_objection, with_compat
from nvct.plan.devices import choose, resolve
from nvct.plan.extras import extras
from nvct.plan.files import driver_files
from nvct.plan.graphics import graphics
from nvct.plan.loader import loader_edits
from nvct.plan.nodes import device_nodes, proc_edit
from nvct.plan.requirements import check_requirements
from nvct.record import replace
from nvct.settings import Settings

__all__ = ["plan", "plan_each", "resolve"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvct.plan.files import Files

    _Known = dict[tuple[object, ...], Files]

_PRIVILEGED = (
    "the container has CAP_SYS_ADMIN, so nothing can be denied there: it gets what it asks for, "
    "and can reach every other GPU of the node as well"
)
_UNMASKED = "mask_proc is off in the settings: /proc/driver/nvidia shows the container every GPU of the node"


def plan(inventory: Inventory, request: Request, settings: Settings) -> Edits:
    """Everything that must change in the container; nothing when it asks for nothing of ours.

    Raises RequestError for a request that cannot be honoured here, DriverError for a node that cannot honour any.
    """
    return _plan(inventory, request, settings, {})


def plan_each(inventory: Inventory, requests: Sequence[Request], settings: Settings) -> list[Edits]:
    """The plan of every request, for a spec that serves many: driver files take most of the time, and are worked out
    once for requests that differ in devices only. Raises as `plan`.
    """
    known: _Known = {}
    return [_plan(inventory, request, settings, known) for request in requests]


def _plan(inventory: Inventory, request: Request, settings: Settings, known: _Known) -> Edits:
    accepted = accept(request, settings)
    if accepted.devices is None:
        return Edits(warnings=accepted.warnings)
    capabilities = capabilities_of(request, settings)
    choice = choose(inventory, accepted)
    check_requirements(inventory, request, settings, choice)
    if inventory.kind == WSL:
        from nvct.plan.wsl import wsl_edits  # few nodes need it

        edits = wsl_edits(inventory, accepted, capabilities, choice)
        return replace(edits, warnings=edits.warnings + ((_PRIVILEGED,) if request.privileged else ()))
    nodes = device_nodes(inventory, request, capabilities, choice, settings)
    extra = extras(inventory, accepted)
    picture = graphics(inventory, capabilities, choice, settings)
    key = (request.container, capabilities, extra.kinds)
    files = known.get(key) or driver_files(inventory, request.container, capabilities, extra.kinds, settings)
    known[key] = files
    objection = compat_objection(choice, settings)
    cache, no_compat = with_compat(files.loader_cache, request.container, inventory.driver_version, objection)
    loader = loader_edits(inventory.architecture, request.container, cache)
    parts = (accepted, choice, nodes, extra, picture, files, loader)
    warnings = tuple(warning for part in parts for warning in part.warnings)
    if request.privileged:
        warnings += (_PRIVILEGED,)
    if not settings.mask_proc:
        warnings += (_UNMASKED,)
    return Edits(
        devices=nodes.edits + extra.devices + picture.devices,
        mounts=files.mounts,
        links=files.links + picture.links,
        loader_cache=loader.cache,
        files=picture.files + loader.files,
        left_out=nodes.left_out + extra.left_out + picture.left_out + files.left_out + no_compat + loader.left_out,
        proc=proc_edit(inventory, choice, extra.capabilities) if settings.mask_proc else None,
        # Whoever else looks at the container later must not give it devices again. A hook cannot change the
        # environment; specs can.
        env={"NVIDIA_VISIBLE_DEVICES": "void"},
        stale=files.stale,
        warnings=warnings,
    )
