"""The part of a plan that waits for the container: of a spec that serves many, what its hook is to do in this one."""

from __future__ import annotations

from nvct.model import ContainerRoot, Edits, LinkEdit, ProcEdit, Remainder
from nvct.plan.compat import with_compat
from nvct.plan.files import library_folders
from nvct.plan.graphics import profile_of_nodes
from nvct.plan.loader import loader_edits
from nvct.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection


def complete(remainder: Remainder, container: ContainerRoot, nodes: Collection[str]) -> Edits:
    """The edits for a container that has these device nodes (their paths in it)."""
    edits, pending = remainder.edits, remainder.pending
    if pending is None:
        return edits
    cases = [case for case in pending.cases if all(node in nodes for node in case.nodes)]
    objection = next(filter(None, (pending.no_compat, *(case.no_compat for case in cases))), "")
    cache, _ = with_compat(edits.loader_cache, container, pending.driver_version, objection)
    loader = loader_edits(remainder.architecture, container, cache)
    parts = [edits, *(case.edits for case in cases)]
    known = [node for case in cases for node in case.nodes]
    return replace(
        edits,
        links=_links([link for part in parts for link in part.links], remainder.architecture, container),
        loader_cache=loader.cache,
        proc=_together([part.proc for part in parts if part.proc]),
        files=(*edits.files, *profile_of_nodes(known, pending.profile), *loader.files),
        warnings=loader.warnings,
    )


def _links(links: list[LinkEdit], architecture: str, container: ContainerRoot) -> tuple[LinkEdit, ...]:
    """Each link once. What is looked for in a subfolder of the library folder by its place, as drivers of GBM and VDPAU
    are, needs a name there in the other family of images, too: the spec has the files where a Debian has them.
    """
    found = {link.path: link for link in links}
    usual = library_folders(architecture, ContainerRoot())
    for kind, own in library_folders(architecture, container).items():
        for link in links:
            folder, _, place = link.path.partition(f"{usual[kind]}/")
            if own != usual[kind] and not folder and "/" in place:
                found.setdefault(f"{own}/{place}", LinkEdit(f"{own}/{place}", link.path, link.why))
    return tuple(found.values())


def _together(procs: list[ProcEdit]) -> ProcEdit | None:
    """One view for all that the container may see."""
    if not procs:
        return None
    gpus = dict.fromkeys(name for proc in procs for name in proc.gpus)
    capabilities = dict.fromkeys(name for proc in procs for name in proc.capabilities)
    return replace(procs[0], gpus=tuple(gpus), capabilities=tuple(capabilities))
