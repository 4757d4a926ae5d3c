"""`nvct config`: what the settings are and where each comes from; settings of the established toolkit taken over."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import click

from nvct import established
from nvct import settings as settings_file
from nvct.cli.files import file_names
from nvct.cli.output import echo, heading, json_option, line, print_json, table
from nvct.cli.source import Source
from nvct.errors import ConfigError
from nvct.established import Translation


@click.group()
def config() -> None:
    """The settings of this node.

    \b
    Examples:
      nvct config show                                 every setting, and where its value comes from
      nvct config import --dry-run                     what the established toolkit's settings are in nvct's words
      nvct config import                               ... and take them over
    """


@config.command()
@json_option
@click.pass_obj
def show(source: Source, as_json: bool) -> None:
    """Show every setting: its value, where that comes from, and the default.

    A file that does not hold is refused as everywhere, with the line that is wrong.

    \b
    Examples:
      nvct config show
      nvct --config ./config.yaml config show          check a file before it is put in place
      nvct config show --json | jq .settings.root.value
    """
    rows = _settings(source.config)
    if as_json:
        print_json({"file": source.config, "settings": rows})
        return
    table(
        ("Setting", "Value", "From", "Default"),
        [(name, _shown(row["value"]), row["source"], _shown(row["default"])) for name, row in rows.items()],
    )


def _settings(path: str) -> dict[str, dict[str, Any]]:
    values = settings_file.to_json(settings_file.load(path))
    named = settings_file.names_in(path)
    defaults = settings_file.to_json(settings_file.Settings())
    return {
        name: {"value": value, "source": _origin(name, named, path), "default": defaults[name]}
        for name, value in values.items()
    }


def _origin(name: str, named: frozenset[str], path: str) -> str:
    if name in named:
        return path
    return "root, which it follows" if name == "dev_root" and "root" in named else "default"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_shown(inner)}" for name, inner in value.items())
    return str(value) or "-"


@config.command("import")
@click.option(
    "--from",
    "toml_file",
    metavar="FILE",
    default=established.DEFAULT_PATH,
    show_default=True,
    shell_complete=file_names,
    help="The established toolkit's settings.",
)
@click.option(
    "--output",
    metavar="FILE",
    shell_complete=file_names,
    help="Write to FILE instead of the settings file (--config).",
)
@click.option("--dry-run", is_flag=True, help="Print the settings file instead of writing it.")
@click.pass_obj
def import_settings(source: Source, toml_file: str, output: str | None, dry_run: bool) -> None:
    """Translate the settings of the established toolkit, config.toml.

    Each key becomes a setting, or is listed with the reason why nvct needs no such setting. A settings file that is
    there is never overwritten.

    \b
    Examples:
      nvct config import --dry-run
      nvct config import
      nvct config import --from ./config.toml --output ./config.yaml
    """
    translation = established.translate(toml_file)
    text = established.to_yaml(translation, toml_file)
    if dry_run:
        echo(text.rstrip("\n"))
        _print_dropped(translation, err=True)
        return
    place = os.path.abspath(output or source.config)
    _write_new(Path(place), text)
    line(f"{place} written, {len(translation.values)} settings from {toml_file}")
    if translation.values:
        table(("Setting", "Value", "From"), _taken(translation), indent=2)
    _print_dropped(translation, err=False)


def _taken(translation: Translation) -> list[tuple[str, str, str]]:
    return [(name, _shown(value), ", ".join(translation.origins[name])) for name, value in translation.values.items()]


def _print_dropped(translation: Translation, err: bool) -> None:
    """On stderr when stdout is the settings file itself."""
    for title, unknown in (("Not taken over", False), ("Unknown", True)):
        rows = [(drop.key, drop.why) for drop in translation.dropped if drop.unknown == unknown]
        if rows and err:
            click.echo("".join(f"{title}: {key}: {why}\n" for key, why in rows), nl=False, err=True)
        elif rows:
            heading(f"\n{title}")
            table(("", ""), rows, indent=2)


def _write_new(path: Path, text: str) -> None:
    """Write the file whole or not at all, and only where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.") as beside:
        beside.write(text)
        beside.flush()
        os.fchmod(beside.fileno(), 0o644)
        try:
            os.link(beside.name, path)
        except FileExistsError:
            raise ConfigError(
                f"{path} exists, and is not overwritten; name another file with --output, or compare with --dry-run"
            ) from None
