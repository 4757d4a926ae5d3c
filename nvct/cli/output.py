"""How commands print: tables for people, JSON for programs.

A row of a table is one line, as wide as it needs to be: a terminal that is too narrow wraps it, and what is copied from
there is whole. In a pipe there is no colour.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import click

from nvct.cli.exits import STANDARD_OUTPUT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rich.padding import Padding
    from rich.text import Text

# rich is imported where something is shown to a person: it takes as long as all else that a command does.

# More than any row has: rich must not fold.
_WIDTH = 10_000

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


def echo(text: str, color: bool | None = None) -> None:
    """Print a line as it stands. An error says that it is of standard output, which Python's own does not."""
    try:
        click.echo(text, color=color)
    except OSError as error:
        error.filename = STANDARD_OUTPUT
        raise


def print_json(value: object) -> None:
    echo(json.dumps(value, indent=2))


def heading(text: str) -> None:
    from rich.text import Text

    _print(Text(text, style="bold"))


def line(text: str, style: str = "") -> None:
    from rich.text import Text

    _print(Text(text, style=style))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], indent: int = 0) -> None:
    """Rows under their columns' names; columns all named `""` make a table without a head."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(columns), header_style="")
    for name in columns:
        grid.add_column(Text(name, style="bold"), no_wrap=True)
    for row in rows:
        grid.add_row(*map(Text, row))
    _print(Padding(grid, (0, 0, 0, indent), expand=False))


def gib(mib: int) -> str:
    """An amount of memory in MiB, as people say it."""
    return f"{mib / 1024:.1f} GiB"


def count(number: int, noun: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _print(what: Text | Padding) -> None:
    from rich.console import Console

    console = Console(highlight=False, width=_WIDTH)
    with console.capture() as captured:
        console.print(what)
    for printed in captured.get().splitlines():  # rich fills every line up to the width of its columns
        echo(printed.rstrip(), color=console.is_terminal)
