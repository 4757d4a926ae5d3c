"""`nvct cdi`: specs of the Container Device Interface, made, listed, checked and kept true."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import click

from nvct.cdi.devices import GPU, INDEX, MODES, NAMINGS, UUID
from nvct.cdi.generate import Choices, generate
from nvct.cdi.text import FORMATS, JSON, YAML, to_text
from nvct.cdi.versions import VERSIONS
from nvct.cli.exits import exit_code, one_line
from nvct.cli.files import file_names
from nvct.cli.output import count, echo, json_option, line, print_json, table
from nvct.cli.source import Source
from nvct.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvct.cdi.refresh import Outcome
    from nvct.cdi.registry import Registry

_EXTENSIONS = {".yaml": YAML, ".json": JSON}


@click.group()
def cdi() -> None:
    """CDI specs, by which engines give GPUs.

    podman, containerd and CRI-O read them, and docker from version 25 on.

    \b
    Examples:
      nvct cdi generate --output /etc/cdi/nvidia.yaml
      nvct cdi list                                    the devices that engines find
      podman run --device nvidia.com/gpu=0:1 IMAGE     ... and what to do with one
      nvct cdi refresh --watch                         keep the spec true, MIG devices included
    """


class _Namings(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """Ways to name devices, with commas between them."""

    name = "WAY[,WAY]"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        ways = tuple(dict.fromkeys(way.strip() for way in str(value).split(",")))
        for way in ways:
            if way not in NAMINGS:
                self.fail(f"{way!r} is no way to name devices; expected of {', '.join(NAMINGS)}", param, ctx)
        return ways


_Command = Callable[..., None]


def _choice_options(command: _Command) -> _Command:
    """The options that say what a spec is to be; `_choices` takes them."""
    options = (
        click.option(
            "--format",
            "form",
            type=click.Choice(FORMATS),
            help="The form of the spec: by default what the name of the file says, or yaml.",
        ),
        click.option(
            "--name",
            "namings",
            type=_Namings(),
            help=f"How GPUs and MIG devices are named: {', '.join(NAMINGS)} (0:1, MIG-…, mig0:1), with commas.  "
            f"[{INDEX},{UUID}]",
        ),
        click.option("--vendor", metavar="VENDOR", help="The vendor of the devices' kind.  [nvidia.com]"),
        click.option("--class", "class_", metavar="CLASS", help="The class of the devices' kind.  [gpu]"),
        click.option(
            "--mode",
            type=click.Choice(MODES),
            default=GPU,
            show_default=True,
            help="What it is about: GPUs, one device with all of the driver's nodes, or nodes of another kind.",
        ),
        click.option(
            "--device",
            "tokens",
            metavar="DEVICE",
            multiple=True,
            help="Only this GPU or MIG device, by a name from `nvct list`. Repeat for more, or with commas.",
        ),
        click.option(
            "--no-hooks", is_flag=True, help="A spec with which nothing of nvct's runs at a container's start."
        ),
        click.option("--hook", metavar="FILE", shell_complete=file_names, help="Where nvct-cdi-hook is."),
        click.option(
            "--cdi-version",
            type=click.Choice(VERSIONS),
            default=None,
            help="The version that the spec says it is of: by default the lowest that has all that is in it.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _choices(options: dict[str, Any], source: Source) -> Choices:
    """Raises UsageError and ChoiceError for what can be on no node, before anything is looked at or written."""
    for name, option in (("vendor", "--vendor"), ("class_", "--class"), ("hook", "--hook")):
        if options[name] == "":
            raise click.UsageError(f"{option} is empty; name one, or leave it out")
    if options["no_hooks"] and options["hook"]:
        raise click.UsageError("--no-hooks and --hook exclude each other")
    if options["namings"] and options["mode"] != GPU:
        raise click.UsageError(f"--name is about mode {GPU}: devices of mode {options['mode']} have names of their own")
    choices = Choices(
        mode=options["mode"],
        namings=options["namings"] or (INDEX, UUID),
        tokens=_tokens(options["tokens"]),
        vendor=options["vendor"] or "",
        class_=options["class_"] or "",
        hooks=not options["no_hooks"],
        hook=_hook(options["hook"], source),
        version=options["cdi_version"] or "",
    )
    choices.check()
    return choices


def _tokens(said: tuple[str, ...]) -> tuple[str, ...]:
    tokens = tuple(token.strip() for text in said for token in text.split(","))
    if not all(tokens):
        raise click.UsageError("--device names no device: expected a name from `nvct list`, several with commas")
    return tokens or ("all",)


def _hook(named: str | None, source: Source) -> str:
    """Where the hook is, "" for the usual place. On a node that is looked at from outside it cannot be checked."""
    path = os.path.abspath(named) if named else ""
    here = not source.root and not source.inventory_file
    if path and here and not (os.path.isfile(path) and os.access(path, os.X_OK)):
        raise click.UsageError(f"--hook {path} is no program that can be run: expected nvct-cdi-hook")
    return path


def _form(output: str, form: str | None) -> str:
    """The form of a file: engines read it by its name, and no file of another name."""
    if not output:
        raise click.UsageError("--output names no file")
    named = _EXTENSIONS.get(os.path.splitext(output)[1])
    if named is None:
        raise click.UsageError(f"{output} would be passed over: engines read files named *.yaml and *.json")
    if named == JSON and form == YAML:
        raise click.UsageError(f"{output} is read as JSON, by its name: name it *.yaml, or leave out --format")
    return form or named


@cdi.command("generate")
@click.option("--output", metavar="FILE", shell_complete=file_names, help="Write to FILE, as a whole.")
@_choice_options
@click.pass_obj
def generate_spec(source: Source, /, output: str | None, form: str | None, **options: Any) -> None:
    """Write a spec of this node's devices.

    Every device is there by its index and its UUID, with `all` and `none`. A container gets all that the driver can do.
    With --output its nodes get links in /dev/char, by which systemd finds them. A file that is no spec of the same kind
    is left alone.

    \b
    Examples:
      nvct cdi generate --output /etc/cdi/nvidia.yaml
      nvct cdi generate --no-hooks --format json       for engines that ignore hooks
      nvct cdi generate --device 0:1 --name uuid       one MIG device, by its UUID
      nvct cdi generate --mode imex                    IMEX channels
      nvct --inventory node.json cdi generate          another machine's spec
    """
    form = (form or YAML) if output is None else _form(output, form)
    choices = _choices(options, source)
    now = source.current()
    made = generate(now.inventory, now.settings, choices)
    _warn((*now.warnings, *made.warnings))
    text = to_text(made.spec, form)
    if output is None:
        echo(text.rstrip("\n"))
        return
    from nvct.cdi.place import write
    from nvct.node.charlinks import link_by_number

    changed = write(os.path.abspath(output), text, choices.kind)
    if not source.inventory_file:
        _warn(link_by_number(made.nodes, now.settings.char_links))
    echo(f"{output}: {_summary(made.spec)}{'' if changed else ', as before'}")


def _summary(spec: dict[str, Any]) -> str:
    return f"{count(len(spec['devices']), 'device name')} of the kind {spec['kind']}, CDI {spec['cdiVersion']}"


def _warn(warnings: Sequence[str]) -> None:
    for warning in dict.fromkeys(warnings):
        click.echo(f"nvct: warning: {warning}", err=True)


_folders_option = click.option(
    "--spec-dir",
    "folders",
    metavar="DIR",
    multiple=True,
    type=click.Path(file_okay=False),
    help="A folder of specs; repeat for more, of which the later ones win.  [/etc/cdi, /var/run/cdi]",
)


def _registry(folders: tuple[str, ...]) -> Registry:
    from nvct.cdi import registry

    return registry.load(folders or registry.SPEC_DIRS)


@cdi.command("list")
@_folders_option
@json_option
def list_devices(folders: tuple[str, ...], as_json: bool) -> None:
    """List the devices of all specs on this machine, by their qualified names, and the spec that counts for each.

    A spec that cannot be read costs its own devices only, and a warning.

    \b
    Examples:
      nvct cdi list
      nvct cdi list --json | jq -r '.devices[].name'
      nvct cdi list --spec-dir ./specs
    """
    found = _registry(folders)
    if as_json:
        devices = [{"name": named.name, "spec": named.file.path} for named in found.devices.values()]
        print_json({"devices": devices, "errors": [{"spec": path, "why": why} for path, why in found.errors]})
        return
    _warn([why for _, why in found.errors])
    if found.devices:
        table(("Device", "Spec"), [(named.name, named.file.path) for named in found.devices.values()])
    else:
        line("No CDI device.")


@cdi.command()
@click.argument("files", metavar="[FILE]...", nargs=-1, shell_complete=file_names)
@_folders_option
@click.option("--host", is_flag=True, help="Also compare what the specs say with this machine.")
def validate(files: tuple[str, ...], folders: tuple[str, ...], host: bool) -> None:
    """Check specs against the CDI specification: FILEs, or all of this machine.

    \b
    Examples:
      nvct cdi validate
      nvct cdi validate ./nvidia.yaml
      nvct cdi validate --host /var/run/cdi/nvidia.yaml        are its nodes, files and hooks there?
    """
    if files and folders:
        raise click.UsageError("--spec-dir is about whole folders: leave it out, or the FILEs")
    paths, faults = (files, {}) if files else _whole(folders)
    places = list(dict.fromkeys((*faults, *paths)))
    wrong = [path for path in places if _wrong(path, host, faults.get(path, []), path in paths)]
    if wrong:
        raise ConfigError(f"{count(len(wrong), 'spec')} of {len(places)} wrong: {', '.join(wrong)}")
    if not places:
        line("No CDI spec.")


def _whole(folders: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """Every spec of the folders; by path of a spec or folder, what keeps its devices from being found."""
    found = _registry(folders)
    faults: dict[str, list[str]] = {}
    for path, why in found.errors:
        faults.setdefault(path, []).append(why)
    return found.paths, faults


def _wrong(path: str, host: bool, faults: list[str], is_spec: bool) -> bool:
    """Whether something is wrong with a spec, or with a folder that is not read, which is told."""
    value, found = _checked(path, host) if is_spec else ({}, [])
    found = found or faults
    for sentence in found:
        echo(sentence)
    if not found:
        echo(f"{path}: {_summary(value)}")
    return bool(found)


def _checked(path: str, host: bool) -> tuple[dict[str, Any], list[str]]:
    """The value of a file, and what is wrong with it in sentences that begin with its path."""
    from nvct.cdi import check, registry

    try:
        value = registry.load_value(path)
    except ConfigError as error:
        return {}, [one_line(error)]
    found = check.problems(value) or (check.untruths(value) if host else [])
    return value, [f"{path}: {sentence}" for sentence in found]


@cdi.command()
@click.option(
    "--output",
    metavar="FILE",
    shell_complete=file_names,
    help="The spec to keep true.  [/var/run/cdi/nvidia.yaml; of another kind /var/run/cdi/VENDOR-CLASS.yaml]",
)
@click.option("--watch", is_flag=True, help="Go on, and write it again whenever the node or the file changes.")
@click.option("--quiet", is_flag=True, help="Print nothing but warnings and errors.")
@_choice_options
@click.pass_obj
def refresh(source: Source, /, output: str | None, watch: bool, quiet: bool, form: str | None, **options: Any) -> None:
    """Write the spec again if the node has changed, and remove it where there is no driver to tell of.

    With --watch it follows the driver, hot-plugged GPUs and MIG devices within seconds. A file that is no spec of the
    same kind is left alone, and so is the spec when what is wrong is the command line or the settings file.

    \b
    Examples:
      nvct cdi refresh                                 at boot, and after a change
      nvct cdi refresh --watch                         for a service: runtime-configs/systemd/nvct-cdi-watch.service
      nvct cdi refresh --output /etc/cdi/nvidia.yaml --no-hooks
    """
    from nvct.cdi import refresh as keeping

    if source.root or source.inventory_file:
        raise click.UsageError("refresh tells of what the settings file describes: leave out --root and --inventory")
    choices = _choices(options, source)
    output = keeping.default_output(choices.kind) if output is None else output
    form, path = _form(output, form), os.path.abspath(output)
    if watch:
        keeping.watch(source.config, path, form, choices, lambda outcome: _tell(outcome, path, quiet))
    outcome = keeping.refresh(source.config, path, form, choices)
    _tell(outcome, path, quiet)
    if outcome.error:
        click.get_current_context().exit(exit_code(outcome.error))


def _tell(outcome: Outcome, path: str, quiet: bool) -> None:
    _warn(outcome.warnings)
    if outcome.error:
        click.echo(f"nvct: {one_line(outcome.error)}; {path} {outcome.what}", err=True)
    elif not quiet:
        echo(f"{path} {outcome.what}")
