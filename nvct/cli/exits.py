"""Exit codes and the line that goes with one: a table, from which both the help and the behaviour come."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO

import click

from nvct.errors import ChoiceError, ConfigError, DriverError, NvctError, StaleInventory

USAGE = 2
# As a shell says it of a program that SIGINT has ended, and SIGPIPE: `nvct list | head -1`.
INTERRUPTED = 130
READER_GONE = 141
STANDARD_OUTPUT = "standard output"

# Raised for a group without a command, with its help; click before 8.2 prints that itself.
_NO_COMMAND: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())

# Code, what it means to whoever calls nvct, and the errors that end in it. The first row that fits an error counts, so
# the codes of single kinds stand before that of all others.
EXITS: tuple[tuple[int, str, tuple[type[Exception], ...]], ...] = (
    (0, "done", ()),
    (USAGE, "the command line is wrong", (click.UsageError, ChoiceError)),
    (4, "a file is wrong: settings, a saved inventory, a node file, a bundle's config.json", (ConfigError,)),
    (
        3,
        "this machine is at fault: its driver, a permission, a full disk",
        (DriverError, StaleInventory, OSError, UnicodeEncodeError),
    ),
    (1, "what was asked for cannot be: the request is refused, or carrying it out failed", (NvctError,)),
)


def exit_code_table() -> str:
    """The table as the last part of `nvct --help`."""
    rows = [f"  {code}  {meaning}" for code, meaning, _ in sorted(EXITS)]
    return "\n".join(["\b", "Exit status:", *rows])


def exit_code(error: Exception) -> int:
    """The code of an error that `ReportingGroup` tells."""
    return next(code for code, _, kinds in EXITS if isinstance(error, kinds))


def one_line(error: Exception) -> str:
    """What is said of an error after `nvct: `, on one line and without a dot at its end."""
    if isinstance(error, click.UsageError):
        return _usage_line(error)
    if isinstance(error, UnicodeEncodeError):
        return f"{ascii(error.object)[:80]} cannot be written in {error.encoding}: set LC_ALL=C.UTF-8, or mend the name"
    if isinstance(error, OSError):
        return _system_line(error)
    return " ".join(str(error).split())


def _usage_line(error: click.UsageError) -> str:
    """click's own words in our form, with the next step."""
    said = " ".join(error.format_message().split()).removesuffix(".").replace(". Did you mean", ", did you mean")
    if said[1:2].islower():
        said = said[0].lower() + said[1:]
    context = error.ctx
    if context is None:
        return said
    if isinstance(error, click.NoSuchOption) and context.parent:
        usage = _global_usage(context, error.option_name)
        if usage:
            return f"{error.option_name} is a global option and stands before the command: {usage}"
    return f"{said}{' See' if said.endswith('?') else '; see'} `{context.command_path} --help`"


def _global_usage(context: click.Context, option: str) -> str:
    """How to write a command with an option of `nvct` itself; "" when it has no such option."""
    root = context.find_root()
    program, _, command = context.command_path.partition(" ")
    for parameter in root.command.params:
        if option in parameter.opts:
            return " ".join(filter(None, (program, option, parameter.metavar, command)))
    return ""


def _system_line(error: OSError) -> str:
    where = error.filename if error.filename is not None or not _output_waits() else STANDARD_OUTPUT
    if where == STANDARD_OUTPUT and error.errno == errno.EBADF:
        return f"{where} is closed"
    said = error.strerror or str(error)
    return f"{where}: {said}" if where is not None else said


def _output_waits() -> bool:
    """Whether something was printed, of click's own for example, that standard output does not take."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


class _ReaderGoneError(Exception):
    """In place of BrokenPipeError, for which click's own `main` ends with 1, the status of a refused request."""


@contextlib.contextmanager
def _watching_the_reader() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise _ReaderGoneError from None


class ReportingGroup(click.Group):
    """The group that gives errors which nvct explains a line and an exit code; others are bugs and keep a traceback."""

    def make_context(self, *arguments: Any, **named: Any) -> click.Context:
        """As click's, which prints help and version in here."""
        with _watching_the_reader():
            return super().make_context(*arguments, **named)

    def invoke(self, ctx: click.Context) -> Any:
        """As click's."""
        with _watching_the_reader():
            return super().invoke(ctx)

    def main(self, *arguments: Any, **named: Any) -> NoReturn:
        """Run a command line and exit, as click's own `main`, which would tell errors in a form of its own."""
        try:
            status = super().main(*arguments, **{**named, "standalone_mode": False})
        except _NO_COMMAND as error:
            error.show()
            status = USAGE
        except click.Abort:
            status = INTERRUPTED
        except _ReaderGoneError:  # nobody is left to tell
            status = READER_GONE
            _drop(sys.stdout)
        except (click.UsageError, NvctError, OSError, UnicodeEncodeError) as error:
            try:
                click.echo(f"nvct: {one_line(error)}", err=True)
            except OSError:  # nobody reads that either: the status tells it
                _drop(sys.stderr)
            status = exit_code(error)
            if _output_waits():
                _drop(sys.stdout)
        sys.exit(status if isinstance(status, int) else 0)


def open_missing_output() -> None:
    """With standard output closed (`nvct list >&-`), Python and click print nothing and call that success.

    Gives such a process a standard output that cannot be written, so that printing fails and files that are opened
    later cannot take its place.
    """
    if sys.stdout is not None:
        return
    descriptor = os.open(os.devnull, os.O_RDONLY)
    if descriptor != 1:
        os.dup2(descriptor, 1)
        os.close(descriptor)
    sys.stdout = open(1, "w", encoding="utf-8")  # noqa: SIM115  # for as long as the process lives


def _drop(stream: TextIO) -> None:
    """What cannot be written must not be tried again when the interpreter ends, which would complain once more."""
    try:
        output = stream.fileno()
    except OSError:  # a stream in memory
        return
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, output)
    os.close(descriptor)
