"""`nvct explain`: the plan in sentences, and what of it is there in a running container."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import click

from nvct.cli.output import count, heading, json_option, line, print_json
from nvct.cli.plan import request_of, request_options
from nvct.cli.source import Source
from nvct.errors import RequestError
from nvct.explain import CARRIERS, PROC, UNKNOWN, Asked, Explanation, as_carried, groups, summary, to_json
from nvct.explain import explain as make_explanation
from nvct.inject import running
from nvct.inject.look import look_as_its_root
from nvct.inject.rootfs import ConfinedRoot
from nvct.inject.running import Comparison
from nvct.model import Edits, Inventory, Request
from nvct.node.current import Current
from nvct.oci.started import Started, started
from nvct.record import replace


@click.command()
@request_options
@click.option(
    "--container",
    "pid",
    metavar="PID",
    type=click.IntRange(min=1),
    help="Explain the running container that this process belongs to, and compare it with the plan. --env or --bundle "
    "state what it was asked for, where that cannot be seen in it.",
)
@click.option(
    "--carrier",
    type=click.Choice(tuple(CARRIERS)),
    show_default="hook; of a running container the one that is seen",
    help="Who is to carry the plan out: what it cannot do is told.",
)
@click.option("--files", is_flag=True, help="List every file, link and name of the loader cache.")
@json_option
@click.pass_obj
def explain(
    source: Source,
    env: tuple[str, ...],
    bundle: str | None,
    layout: str | None,
    pid: int | None,
    carrier: str | None,
    files: bool,
    as_json: bool,
) -> None:
    """Say why a container gets what it gets, what it does not get, and why.

    Nothing is touched. A request that would be refused is explained as well; the exit status is 1 then.

    \b
    Examples:
      nvct explain --env NVIDIA_VISIBLE_DEVICES=0:1
      nvct explain --bundle /run/containerd/io.containerd.runtime.v2.task/default/ID --files
      nvct explain --container "$(docker inspect --format '{{.State.Pid}}' NAME)"
      nvct explain --container PID --env NVIDIA_VISIBLE_DEVICES=0:1     a container whose CDI devices the engine chose
    """
    if pid and layout:
        raise click.UsageError("--container has a root file system of its own: leave out --layout")
    stated = request_of(env, bundle, layout) if env or bundle or not pid else None
    current = source.current()
    comparison = None
    if pid:
        explanation, comparison = _looked_at(pid, current, stated, carrier)
    elif stated:
        explanation = make_explanation(current.inventory, stated, current.settings, carrier or "hook")
    if as_json:
        print_json(to_json(explanation) | ({"comparison": _comparison_json(comparison)} if comparison else {}))
    else:
        _print(explanation, current.inventory, files)
        if comparison:
            _print_comparison(comparison, explanation.asks_for != UNKNOWN)
    if explanation.refusal:
        raise explanation.refusal


def _looked_at(
    pid: int, current: Current, stated: Request | None, carrier: str | None
) -> tuple[Explanation, Comparison]:
    try:
        return _running(pid, current, stated, carrier)
    except (FileNotFoundError, ProcessLookupError):
        raise RequestError(
            f"--container {pid}: there is no such process, or it has ended; expected the PID of a container's process, "
            "as `docker inspect --format '{{.State.Pid}}' NAME` prints it"
        ) from None
    except PermissionError as error:
        raise PermissionError(
            error.errno, f"{error.strerror}; it takes root with CAP_SYS_PTRACE to look into a container", error.filename
        ) from None


def _running(pid: int, current: Current, stated: Request | None, carrier: str | None) -> tuple[Explanation, Comparison]:
    variables = running.variables_of(pid)
    if os.stat(f"/proc/{pid}/ns/mnt").st_ino == os.stat("/proc/self/ns/mnt").st_ino:
        raise RequestError(f"--container {pid}: that process is in no container, it sees the files that nvct sees")
    root = ConfinedRoot.of_process(pid, "/")
    try:
        found = started(pid, root, variables)
        if stated:
            look = look_as_its_root(root, pid)
            privileged = stated.privileged or running.is_privileged(pid)
            found = Started(replace(stated, container=look, privileged=privileged), found.carrier)
        carrier = carrier or found.carrier
        explanation = make_explanation(current.inventory, found.request, current.settings, carrier)
        edits = as_carried(explanation, current.inventory, found.request)
        by_hook = carrier == "hook"
        comparison = running.compare(edits, current.inventory, pid, root, variables, by_hook)
    finally:
        root.close()
    if not found.known and comparison.unplanned:
        explanation = replace(explanation, asks_for=UNKNOWN)
    return explanation, comparison


def _comparison_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "present": [{"kind": kind, "what": what} for kind, what in comparison.present],
        "absent": [{"kind": kind, "what": what, "fault": fault} for kind, what, fault in comparison.absent],
        "unplanned": list(comparison.unplanned),
        "unknown": list(comparison.unknown),
    }


def _print(explanation: Explanation, inventory: Inventory, files: bool) -> None:
    _print_asked(explanation)
    edits = explanation.edits
    _paragraph("Device nodes", [f"{edit.path} ({edit.major}:{edit.minor}): {edit.why}" for edit in edits.devices])
    _print_files(edits, inventory, files)
    if edits.proc:
        shown = ", ".join((*edits.proc.gpus, *edits.proc.capabilities)) or "no GPU"
        _paragraph(PROC, [f"shows {shown}: {edits.proc.why}"])
    _paragraph("Written files", [f"{edit.path}: {edit.why}" for edit in edits.files])
    _paragraph("Left out", [f"{each.what}: {each.why}" for each in explanation.left_out])
    told = {each.why for each in explanation.left_out}
    _paragraph("Warnings", [warning for warning in edits.warnings if warning not in told], style="yellow")
    _paragraph(f"What the {explanation.carrier} cannot do", explanation.cannot)


def _print_asked(explanation: Explanation) -> None:
    if explanation.asks_for == UNKNOWN:
        line(
            "What was asked for cannot be seen in this container: its NVIDIA_VISIBLE_DEVICES is `void`, as CDI specs "
            "and runtimes leave it."
        )
        line("To compare, state it: --env NVIDIA_VISIBLE_DEVICES=..., or the container's --bundle.")
    elif explanation.asks_for == "nothing":
        set_aside = "Nothing of the request counts here" if explanation.edits.warnings else "No GPU is asked for"
        line(f"{set_aside}, so nothing changes in the container.")
    else:
        heading("Asked for")
    if explanation.asks_for == "the driver":
        line("  the driver without a GPU")
    for asked in explanation.asked:
        _print_token(asked, str(explanation.refusal or ""))
    if explanation.capabilities:
        source = f"in {explanation.capabilities_source}" if explanation.capabilities_source else "by default"
        line(f"  capabilities {', '.join(explanation.capabilities)}, {source}")
    for ask in explanation.others:
        line(f"  {', '.join(ask.tokens) or 'nothing'}, in {ask.source}")
    if explanation.privileged:
        line("  by a container with CAP_SYS_ADMIN")


def _print_token(asked: Asked, refusal: str) -> None:
    line(f"  {asked.token}, in {asked.source}")
    for meaning in asked.means:
        line(f"    {meaning.what} ({meaning.uuid})")
    if asked.refused:
        line("    refused" if asked.refused == refusal else f"    refused: {asked.refused}", style="red")


def _print_files(edits: Edits, inventory: Inventory, files: bool) -> None:
    found = groups(edits)
    if not found:
        return
    heading("\nFiles")
    for why, group in found.items():
        line(f"  {why}: {_with_names(summary(inventory, group), group)}")
        if files:
            _print_each(group)
    if not files:
        line("  (--files lists them)", style="dim")


def _with_names(counted: str, group: Edits) -> str:
    names = []
    if group.links:
        names.append(count(len(group.links), "link"))
    if group.loader_cache:
        names.append(f"{count(len(group.loader_cache), 'name')} in the loader cache")
    return ", found by ".join(part for part in (counted, " and ".join(names)) if part)


def _print_each(group: Edits) -> None:
    for mount in group.mounts:
        line(f"    {mount.target}" + ("" if mount.source == mount.target else f" from {mount.source}"))
    for link in group.links:
        line(f"    {link.path} -> {link.target}")
    for cached in group.loader_cache:
        line(f"    loader cache: {cached.name} is {cached.path}")


def _print_comparison(comparison: Comparison, planned: bool) -> None:
    heading("\nIn the container")
    if planned:
        line(f"  planned and present: {len(comparison.present)}")
        absent = [f"{what} ({kind}): {fault}" for kind, what, fault in comparison.absent]
        _list("planned and absent", absent, "red")
    _list("present and not planned" if planned else "there of the driver", comparison.unplanned, "yellow")
    _list("not to be seen from here", comparison.unknown, "yellow")


def _list(title: str, items: Sequence[str], style: str) -> None:
    line(f"  {title}: {len(items) or 'nothing'}")
    for item in items:
        line(f"    {item}", style=style)


def _paragraph(title: str, sentences: Iterable[str], style: str = "") -> None:
    told = list(sentences)
    if told:
        heading(f"\n{title}")
        for sentence in told:
            line(f"  {sentence}", style=style)
