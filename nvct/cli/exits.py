"""Exit codes: one table, from which both the help and the behaviour come."""

from __future__ import annotations

from typing import Any

import click

from nvct.errors import ConfigError, DriverError, NvctError, StaleInventory

# Code, what it means to whoever calls nvct, and the errors that end in it. The first row that fits an error counts.
EXITS: tuple[tuple[int, str, tuple[type[Exception], ...]], ...] = (
    (0, "done", ()),
    (2, "the command line is wrong", ()),
    (3, "the driver or the node is at fault, or does not let us read it", (DriverError, StaleInventory, OSError)),
    (4, "a settings file or a saved inventory is wrong", (ConfigError,)),
    (1, "anything else: the request cannot be met, the injection failed", (NvctError,)),
)


def exit_code_table() -> str:
    """The table as the last part of `nvct --help`."""
    rows = [f"  {code}  {meaning}" for code, meaning, _ in sorted(EXITS, key=lambda row: row[0])]
    return "\n".join(["\b", "Exit status:", *rows])


class Failure(click.ClickException):
    """An error that is told in one line on stderr and ends in its exit code."""

    def __init__(self, error: Exception) -> None:
        super().__init__(_message(error))
        self.exit_code = next(code for code, _, kinds in EXITS if isinstance(error, kinds))  # type: ignore[misc]  # click's own way

    def show(self, file: Any = None) -> None:
        click.echo(f"nvct: {self.message}", file=file, err=True)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


class ReportingGroup(click.Group):
    """The group that gives errors which nvct explains a line and an exit code; others are bugs and keep a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of our output has gone (`nvct list | head -1`): click ends quietly
            raise
        except (NvctError, OSError) as error:
            raise Failure(error) from error
