"""`nvct sim`: make simulated GPU nodes. No logic: it reads options, calls nvct.sim and prints."""

from __future__ import annotations

import re
import shlex
from typing import Any

import click
from click.shell_completion import CompletionItem

from nvct.cli.files import RegularFile
from nvct.cli.output import echo, json_option, print_json, table
from nvct.sim.errors import SimError
from nvct.sim.mig import profile_name
from nvct.sim.node import Made, create, spec_from_profile, spec_from_yaml
from nvct.sim.profiles import CARDS, PROFILES, cuda_of
from nvct.sim.spec import NodeSpec

_INDEX = re.compile("[0-9]{1,4}")


class _MigLayout(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """GPU=DEVICES: an NVML index and the MIG devices to make there, in order (none: MIG mode, no device)."""

    name = "GPU=DEVICES"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, tuple[str, ...]]:
        index, equals, devices = str(value).partition("=")
        if not equals or not _INDEX.fullmatch(index):
            self.fail(f"{value!r} has not the form 0=1g.5gb,1g.5gb (a GPU index, =, MIG devices)", param, ctx)
        return int(index), tuple(device.strip() for device in devices.split(",") if device.strip())


@click.group()
def sim() -> None:
    """Simulated GPU nodes, for work on GPU containers without a GPU.

    A node is a folder with everything that a driver puts on a machine, and a settings file that points nvct at it.

    \b
    Examples:
      nvct sim profiles
      nvct sim create dgx-a100 /var/lib/nvct/node --mig 0=3g.20gb,3g.20gb
      nvct --config /var/lib/nvct/node/config.yaml list
    """


@sim.command()
@json_option
def profiles(as_json: bool) -> None:
    """List the nodes that `nvct sim create` knows by name.

    \b
    Examples:
      nvct sim profiles
      nvct sim profiles --json | jq -r '.[].name'
    """
    rows = [_row(name) for name in PROFILES]
    if as_json:
        print_json(rows)
        return
    columns = ("name", "gpus", "model", "driver", "cuda")
    table(
        ("Profile", "GPUs", "Model", "Driver", "CUDA", "MIG devices"),
        [(*(str(row[column]) for column in columns), _first_to_last(row["mig_profiles"])) for row in rows],
    )


def _first_to_last(mig_profiles: list[str]) -> str:
    return f"{mig_profiles[0]} to {mig_profiles[-1]}" if mig_profiles else "-"


def _row(name: str) -> dict[str, Any]:
    profile = PROFILES[name]
    card = CARDS[profile.card]
    return {
        "name": name,
        "title": profile.title,
        "gpus": len(profile.buses),
        "model": card.model,
        "memory_mib": card.memory_mib,
        "compute_capability": card.compute_capability,
        "driver": profile.driver,
        "cuda": cuda_of(profile.driver),
        "mig_profiles": [profile_name(card, one) for one in card.mig_profiles],
    }


def _profile_names(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the first argument: a profile, or with --from the directory."""
    if context.params.get("node_file"):
        return [CompletionItem(incomplete, type="dir")]
    return [CompletionItem(name, help=PROFILES[name].title) for name in PROFILES if name.startswith(incomplete)]


@sim.command("create")
@click.argument("profile", required=False, shell_complete=_profile_names)
@click.argument("directory", required=False, type=click.Path(file_okay=False))
@click.option("--mig", type=_MigLayout(), multiple=True, help="MIG devices of a GPU, in order. Repeat for more GPUs.")
@click.option("--gpus", type=click.IntRange(min=0), help="Number of GPUs, up to the slots of the profile.")
@click.option("--driver", metavar="VERSION", help="Driver version, as 550.163.01.")
@click.option("--cuda", metavar="VERSION", help="CUDA version, as 12.4; from the driver if left out.")
@click.option("--from", "node_file", type=RegularFile(), metavar="FILE", help="A node stated in YAML.")
def create_node(
    profile: str | None,
    directory: str | None,
    mig: tuple[tuple[int, tuple[str, ...]], ...],
    gpus: int | None,
    driver: str | None,
    cuda: str | None,
    node_file: str | None,
) -> None:
    """Make the node PROFILE in DIRECTORY, or that of --from FILE. A node that is there is replaced.

    A MIG device is named by its profile; 3g.20gb@4 states its first memory slot, 1c.3g.20gb takes one compute slice of
    a GPU instance. As root the node gets real device nodes, else a table that describes them.

    \b
    Examples:
      nvct sim create dgx-a100 /var/lib/nvct/node
      nvct sim create dgx-a100 node --mig 0=1g.5gb,1g.5gb --mig 1=3g.20gb,2g.10gb,1g.5gb
      nvct sim create h100 node --gpus 4 --driver 535.183.06
      nvct sim create node --from node.yaml
    """
    if node_file:
        spec, place = _spec_from_file(node_file, profile, directory, mig, gpus, driver, cuda)
    else:
        spec, place = _spec_from_profile(profile, directory, mig, gpus, driver, cuda)
    if not place:
        raise click.UsageError("the directory has no name: name a folder for the node, as ./node")
    _print_summary(spec, create(spec, place))


def _spec_from_profile(
    profile: str | None,
    directory: str | None,
    mig: tuple[tuple[int, tuple[str, ...]], ...],
    gpus: int | None,
    driver: str | None,
    cuda: str | None,
) -> tuple[NodeSpec, str]:
    if profile is None or directory is None:
        raise click.UsageError("name a profile and a directory, as in: nvct sim create dgx-a100 ./node")
    try:
        return spec_from_profile(profile, gpus, _layouts(mig), driver, cuda), directory
    except SimError as error:
        raise click.UsageError(str(error)) from None


def _layouts(mig: tuple[tuple[int, tuple[str, ...]], ...]) -> dict[int, tuple[str, ...]]:
    indexes = [index for index, _ in mig]
    for index in indexes:
        if indexes.count(index) > 1:
            raise click.UsageError(f"GPU {index} has two --mig: name all its devices in one")
    return dict(mig)


def _spec_from_file(
    node_file: str, directory: str | None, extra: str | None, mig: object, *choices: object
) -> tuple[NodeSpec, str]:
    # With --from the one argument is the directory, which click has taken for the profile.
    if directory is None or extra is not None:
        raise click.UsageError("with --from, name a directory and no profile: nvct sim create ./node --from node.yaml")
    if mig or any(choice is not None for choice in choices):
        raise click.UsageError("--mig, --gpus, --driver and --cuda go with a profile: state them in the node file")
    return spec_from_yaml(node_file), directory


def _print_summary(spec: NodeSpec, made: Made) -> None:
    layouts = {index: gpu.mig for index, gpu in enumerate(spec.gpus) if gpu.mig is not None}
    models = {gpu.card.model: sum(other.card.model == gpu.card.model for other in spec.gpus) for gpu in spec.gpus}
    echo(f"{made.directory}: {spec.name}, driver {spec.driver}, CUDA {spec.cuda}")
    echo(f"  GPUs     {', '.join(f'{count} x {model}' for model, count in models.items()) or 'none'}")
    for index, devices in layouts.items():
        echo(f"  MIG      GPU {index}: {', '.join(devices) or 'on, no devices'}")
    echo(f"  devices  {_devices_line(made)}")
    for note in made.notes:
        echo(f"  note     {note}")
    echo(f"try: nvct --config {shlex.quote(made.config)} list")


def _devices_line(made: Made) -> str:
    return f"described in dev/nodes.json, not made ({made.why_table})" if made.why_table else "real device nodes in dev"
