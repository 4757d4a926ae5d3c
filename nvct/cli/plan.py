"""`nvct plan`: what a container would get, and why, without touching anything."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from nvct.cli.files import read_json
from nvct.cli.output import heading, json_option, line, print_json, table
from nvct.cli.source import Source
from nvct.errors import ConfigError, RequestError
from nvct.inject.look import look
from nvct.inject.rootfs import ConfinedRoot
from nvct.model import Ask, ContainerRoot, Edits, MountEdit, ProcEdit, Request
from nvct.oci.bundle import Bundle
from nvct.plan import plan as make_plan
from nvct.plan.accept import accept
from nvct.record import as_dict, replace
from nvct.request import asks_for_nothing, request_from_env, request_from_spec

_LAYOUTS = {"debian": ContainerRoot(debian=True), "lib64": ContainerRoot(debian=False)}


# The variables by which a container asks, for completion.
_VARIABLES = (
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_REQUIRE_CUDA",
    "NVIDIA_DISABLE_REQUIRE",
    "NVIDIA_MIG_CONFIG_DEVICES",
    "NVIDIA_MIG_MONITOR_DEVICES",
    "NVIDIA_IMEX_CHANNELS",
    "NVIDIA_GDS",
    "NVIDIA_MOFED",
    "NVIDIA_GDRCOPY",
    "NVIDIA_NVSWITCH",
    "CUDA_VERSION",
)


def _variable_names(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(f"{name}=") for name in _VARIABLES if name.startswith(incomplete)]


def _assignments(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if "=" not in value:
            raise click.BadParameter(f"{value!r} is not NAME=VALUE")
    return values


_Command = Callable[..., None]


def request_options(command: _Command) -> _Command:
    """The options that state a request: `env`, `bundle` and `layout`, as `request_of` takes them."""
    options = (
        click.option(
            "--env",
            metavar="K=V",
            multiple=True,
            callback=_assignments,
            shell_complete=_variable_names,
            help="A variable of the container; later ones win.",
        ),
        click.option(
            "--bundle",
            metavar="DIR",
            type=click.Path(exists=True, file_okay=False),
            help="Read the request from the config.json of this OCI bundle, as it was before nvct's runtime changed "
            "it; --env is added to it.",
        ),
        click.option(
            "--layout",
            type=click.Choice(tuple(_LAYOUTS)),
            help="Where the image keeps libraries: /usr/lib/<triplet> as Debian does, or /usr/lib64. Without it the "
            "bundle's root file system tells, and where there is none it is debian.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def request_of(env: Sequence[str], bundle: str | None, layout: str | None) -> Request:
    """The request that `request_options` state."""
    request = _bundle_request(Path(bundle), env) if bundle else request_from_env(env)
    return replace(request, container=_LAYOUTS[layout]) if layout else request


@click.command()
@request_options
@json_option
@click.pass_obj
def plan(source: Source, env: tuple[str, ...], bundle: str | None, layout: str | None, as_json: bool) -> None:
    """Print what would change in a container, and why.

    Nothing is touched and no container need exist.

    \b
    Examples:
      nvct plan --env NVIDIA_VISIBLE_DEVICES=0:1
      nvct plan --env NVIDIA_VISIBLE_DEVICES=all --env NVIDIA_DRIVER_CAPABILITIES=all --layout lib64
      nvct plan --bundle /run/containerd/io.containerd.runtime.v2.task/default/ID --json
      nvct --inventory node.json plan --env NVIDIA_VISIBLE_DEVICES=GPU-5f3a9c01
    """
    request = request_of(env, bundle, layout)
    current = source.current()
    edits = make_plan(current.inventory, request, current.settings)
    if as_json:
        print_json(_edits_json(edits))
    else:
        _print_request(request, accept(request, current.settings).devices)
        _print_edits(edits, current.inventory.roots.root)


def _bundle_request(bundle: Path, env: Sequence[str]) -> Request:
    """The request of a bundle's config.json with `env` added, for a container with that bundle's root file system."""
    path = bundle / "config.json"
    spec = read_json(path, "the config.json of an OCI bundle")
    try:
        request_from_spec(spec, ContainerRoot())  # says what is wrong with it, before it is taken apart
        before = Bundle.of(str(bundle), path.name)
    except RequestError as error:
        raise ConfigError(f"{path}: {error}") from None
    # Only nvct's runtime looks at annotations, and a spec with its changes in it shows that it is the one.
    spec, by_runtime = before.spec, bool(before.changes)
    process = {**spec["process"], "env": [*(spec["process"].get("env") or ()), *env]}
    root = _container(bundle / _root_path(spec["root"], path))
    return request_from_spec({**spec, "process": process}, root, with_annotations=by_runtime)


def _root_path(root: object, path: Path) -> str:
    rootfs = root.get("path") if isinstance(root, dict) else None
    if not isinstance(rootfs, str) or not rootfs or "\0" in rootfs:
        raise ConfigError(f"{path} has no root.path that names a folder: expected an OCI runtime spec")
    return rootfs


def _container(rootfs: Path) -> ContainerRoot:
    try:
        root = ConfinedRoot(os.open(rootfs, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    except FileNotFoundError:  # engines mount a root only while its container runs
        return ContainerRoot()
    except NotADirectoryError:
        raise ConfigError(f"{rootfs}, root.path of the bundle, is not a folder") from None
    try:
        return look(root)
    finally:
        root.close()


def _edits_json(edits: Edits) -> dict[str, Any]:
    return {
        "devices": [_chosen(edit, "path", "major", "minor", "why") for edit in edits.devices],
        "mounts": [_chosen(edit, "source", "target", "options", "why") for edit in edits.mounts],
        "links": as_dict(edits.links),
        "loader_cache": as_dict(edits.loader_cache),
        "proc": as_dict(edits.proc),
        "files": as_dict(edits.files),
        "env": as_dict(edits.env),
        "left_out": as_dict(edits.left_out),
        "warnings": as_dict(edits.warnings),
    }


def _chosen(edit: object, *names: str) -> dict[str, Any]:
    fields = as_dict(edit)
    return {name: fields[name] for name in names}


def _print_request(request: Request, devices: Ask | None) -> None:
    if asks_for_nothing(request):
        line("The container asks for nothing (NVIDIA_VISIBLE_DEVICES is unset, empty or void): nothing changes in it.")
        line("Try: nvct plan --env NVIDIA_VISIBLE_DEVICES=all")
        return
    if devices is None:
        line("The settings of this node let nothing of the request count: nothing changes in the container.")
        return
    line(f"Asked for: {', '.join(devices.tokens) or 'the driver without a GPU'} (from {devices.source})")
    if request.capabilities is not None:
        line(f"Capabilities: {', '.join(request.capabilities.tokens)} (from {request.capabilities.source})")


def _print_edits(edits: Edits, root: str) -> None:
    _section(
        "Devices",
        ("Node", "Number", "Why"),
        ((edit.path, f"{edit.major}:{edit.minor}", edit.why) for edit in edits.devices),
    )
    _section(
        "Mounts",
        ("In the container", f"On the host below {root}", "Options", "Why"),
        ((edit.target, _origin(edit, root), _options(edit), edit.why) for edit in edits.mounts),
    )
    _section("Links", ("Link", "To", "Why"), ((edit.path, edit.target, edit.why) for edit in edits.links))
    _section(
        "Loader cache",
        ("Name", "Path", "Bits", "Why"),
        ((edit.name, edit.path, str(edit.bits), edit.why) for edit in edits.loader_cache),
    )
    if edits.proc:
        _print_proc(edits.proc)
    _section("Written files", ("File", "Why"), ((edit.path, edit.why) for edit in edits.files))
    _section("Environment", ("Variable", "Value"), edits.env.items())
    _section("Left out", ("What", "Why"), ((each.what, each.why) for each in edits.left_out))
    if edits.warnings:
        heading("\nWarnings")
        for warning in edits.warnings:
            line(f"  {warning}", style="yellow")


def _section(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    listed = list(rows)
    if listed:
        heading(f"\n{title} ({len(listed)})")
        table(columns, listed, indent=2)


def _options(mount: MountEdit) -> str:
    return ",".join(mount.options) + ("" if mount.required else " (optional)")


def _origin(mount: MountEdit, root: str) -> str:
    below = "/" + mount.source.removeprefix(root).lstrip("/")
    return "same" if below == mount.target else below


def _print_proc(proc: ProcEdit) -> None:
    heading("\n/proc/driver/nvidia")
    rows = [
        ("From", proc.source),
        ("Files", ", ".join(proc.files) or "none"),
        ("GPUs", ", ".join(proc.gpus) or "none"),
        ("MIG capabilities", ", ".join(proc.capabilities) or "none"),
        ("Why", proc.why),
    ]
    table(("", ""), rows, indent=2)
