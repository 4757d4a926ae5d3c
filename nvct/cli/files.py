"""Files that someone names on the command line, read with care: anything may stand under such a name."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

import click
from click.shell_completion import CompletionItem

from nvct.errors import ConfigError

# An inventory with 64 GPUs, or the config.json of a large pod, has some 100 KiB.
_MOST_BYTES = 16 << 20


def file_names(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the name of a file, for options whose value nvct itself checks."""
    return [CompletionItem(incomplete, type="file")]


class RegularFile(click.Path):
    """The name of a regular file that is there: reading a named pipe or a device could take for ever."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if not os.path.isfile(path):
            self.fail(f"{value} is not a regular file", param, ctx)
        return path


def read_json(path: str | os.PathLike[str], expected: str) -> Any:
    """The JSON value in a file. `expected` says in messages what should stand there.

    Raises ConfigError for what is absent, no regular file, longer than 16 MiB or no JSON, OSError for what cannot be
    read.
    """
    text = _read(os.fspath(path), expected)
    try:
        return json.loads(text)
    except RecursionError:
        raise ConfigError(f"{path} is no JSON that nvct reads (too deep): expected {expected}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON ({error}): expected {expected}") from None


def _read(path: str, expected: str) -> bytes:
    try:
        # Not blocking, or a named pipe would have us wait for whoever writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path} does not exist: expected {expected}") from None
    with open(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{path} is not a regular file: expected {expected}")
        text = stream.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{path} is longer than {_MOST_BYTES >> 20} MiB: expected {expected}")
    return text
