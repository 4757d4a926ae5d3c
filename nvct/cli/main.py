"""The `nvct` command: its global options, its groups, and what its exit codes mean."""

from __future__ import annotations

import io
import os
import sys

import click

from nvct import __version__
from nvct.cli.exits import ReportingGroup, exit_code_table, open_missing_output
from nvct.cli.files import RegularFile, file_names
from nvct.cli.lazy import LazyCommands
from nvct.cli.source import Source
from nvct.settings import DEFAULT_PATH

_COMMANDS = {
    "cdi": "nvct.cli.cdi:cdi",
    "completion": "nvct.cli.completion:completion",
    "config": "nvct.cli.config:config",
    "explain": "nvct.cli.explain:explain",
    "info": "nvct.cli.node:info",
    "list": "nvct.cli.node:list_gpus",
    "plan": "nvct.cli.plan:plan",
    "refresh": "nvct.cli.node:refresh",
    "sim": "nvct.cli.sim:sim",
}

_EXISTING_FOLDER = click.Path(exists=True, file_okay=False, resolve_path=True)


@click.group(
    cls=ReportingGroup,
    commands=LazyCommands(_COMMANDS),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog=exit_code_table(),
)
@click.option(
    "--config",
    metavar="FILE",
    default=DEFAULT_PATH,
    show_default=True,
    shell_complete=file_names,
    help="The settings file.",
)
@click.option(
    "--root",
    metavar="DIR",
    type=_EXISTING_FOLDER,
    help="Take the driver's files and device nodes from DIR, whatever the settings say; its procfs and sysfs, too, "
    "where DIR has them with a driver in them.",
)
@click.option(
    "--inventory",
    "inventory_file",
    metavar="FILE",
    type=RegularFile(),
    help="Take the node from FILE (made by `nvct info --json`) instead of this machine.",
)
@click.version_option(__version__, prog_name="nvct")
@click.pass_context
def cli(context: click.Context, config: str, root: str | None, inventory_file: str | None) -> None:
    """NVIDIA GPUs for containers: exactly those that were asked for.

    \b
    Examples:
      nvct list                                        the GPUs and MIG devices of this node
      nvct plan --env NVIDIA_VISIBLE_DEVICES=0:1       what a container with this request gets, and why
      nvct explain --env NVIDIA_VISIBLE_DEVICES=0:1    the same in sentences, and what it does not get
      nvct info --json > node.json                     save the node, for a bug report
      nvct --inventory node.json list                  ... and look at it on another machine
    """
    if not config:
        raise click.UsageError("--config names no file")
    if root and inventory_file:
        raise click.UsageError("--root and --inventory exclude each other: a saved inventory has its own roots")
    # Absolute, since each settings file has an inventory of its own, and the hook knows the file by this name.
    context.obj = Source(config=os.path.abspath(config), root=root or "", inventory_file=inventory_file or "")


def main() -> None:
    """The entry point: runs the command line and exits with one of the documented codes."""
    open_missing_output()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error has it: a name is shown, however odd
    cli(prog_name="nvct")
