"""The OCI runtime that stands before runc or crun: `create` and `run` edit the container's config.json first.

The front, hooks/nvct-runtime, starts this for these two commands only. Afterwards this process becomes the low-level
runtime, with the arguments, environment, descriptors and signals that the engine gave it.
"""

from __future__ import annotations

import os
import time
from _signal import SIG_DFL, SIGPIPE, SIGXFSZ, signal  # type: ignore[import-not-found]  # `signal` takes 3 ms to import

from nvct import fastjson
from nvct.errors import RequestError
from nvct.model import ContainerRoot
from nvct.oci.bundle import Bundle
from nvct.oci.report import Log, carried_out, fill_standard_descriptors, say
from nvct.record import record
from nvct.request import asks_for_nothing, request_from_spec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

EDITING = ("create", "run")

# Options of runc 1.1 to 1.3 and crun 1.8 to 1.21 that are followed by a value, before the command and after it. The
# front knows the same ones (a test holds that).
GLOBAL_VALUES = ("log", "log-format", "log-level", "root", "rootless", "criu", "cgroup-manager")
VALUES = ("bundle", "b", "config", "f", "console-socket", "pid-file", "pidfd-socket", "preserve-fds")
_HELP = ("help", "h", "usage", "?", "version", "v", "V")

# Targets of crun's --log that are no files, and what may stand before one that is.
_NO_FILES = ("journald:", "syslog:")
_FILE = "file:"


@record
class Call:
    """A command line of an OCI runtime, as far as nvct must understand it. Paths are as they were given.

    `command` is "" where there is none, or where only help or the version is asked for.
    """

    command: str = ""
    bundle: str = "."
    config: str = "config.json"
    log: str = ""
    log_format: str = ""
    container: str = ""


def parse(arguments: Sequence[str], as_crun: bool = False) -> Call:
    """The command line as runc reads it, or crun. Unknown options are taken for switches, as they are in the commands
    that matter here. Raises RequestError where an option may be another one to the low-level runtime than to nvct.
    """
    found: dict[str, str] = {}
    words: list[str] = []
    rest = list(arguments)
    read = _as_crun if as_crun else _as_runc
    while rest:
        word = rest.pop(0)
        if word == "--":
            words += rest
            break
        if not word.startswith("-") or word == "-":
            words.append(word)
            continue
        if words and words[0] not in EDITING:
            continue  # options of another command, or of a program that is to be run
        name, value = read(word, VALUES if words else GLOBAL_VALUES)
        if name in _HELP:
            return Call()
        if name in (VALUES if words else GLOBAL_VALUES):
            if value is None:
                value = rest.pop(0) if rest else ""
            found["config" if name == "f" else "bundle" if name == "b" else name] = value
    return Call(
        command=words[0] if words else "",
        bundle=found.get("bundle") or ".",
        config=found.get("config") or "config.json",
        log=_log_file(found.get("log", "")),
        log_format=found.get("log-format", ""),
        container=words[1] if len(words) > 1 else "",
    )


def _as_runc(word: str, values: Sequence[str]) -> tuple[str, str | None]:
    """An option's name and the value joined to it, as Go's `flag` reads it, which takes one dash for two.

    runc refuses what is crun's alone; but a crun of another file name would take it for a bundle that is not looked at.
    """
    name, equals, value = word.lstrip("-").partition("=")
    if name not in values:
        joined = "b" in values and not word.startswith("--") and name.lstrip("d")[:1] in ("b", "f")
        if joined or (word.startswith("--") and any(option.startswith(name) for option in values)):
            raise RequestError(
                f"{word!r:.80} is no option of runc's; write options out, and values apart (--bundle FOLDER); if the "
                "low-level runtime is crun, let its file name begin so"
            )
    return name, value if equals else None


def _as_crun(word: str, values: Sequence[str]) -> tuple[str, str | None]:
    """The same as glibc's argp reads it: letters together after one dash, names cut short after two."""
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        return _completed(name, values), value if equals else None
    for position, letter in enumerate(word[1:], 2):
        if letter in values or letter in _HELP:
            return letter, word[position:] or None
    return word, None


def _completed(name: str, values: Sequence[str]) -> str:
    known = [option for option in (*values, *_HELP) if len(option) > 1]
    fitting = [option for option in known if option.startswith(name)]
    if name in fitting or not fitting:
        return name
    if len(fitting) > 1:
        raise RequestError(f"--{name} may be any of --{', --'.join(fitting)}: write the option out")
    return fitting[0]


def _log_file(target: str) -> str:
    return "" if target.startswith(_NO_FILES) else target.removeprefix(_FILE)


def main(arguments: list[str]) -> NoReturn:
    """Run with the settings file's path, the low-level runtime's, and that one's arguments."""
    config, low_level, *rest = arguments
    fill_standard_descriptors()
    try:
        call = parse(rest, os.path.basename(os.path.realpath(low_level)).startswith("crun"))
    except RequestError as error:
        os._exit(Log().failed(str(error)))
    if call.command in EDITING:
        log = _RuntimeLog(call.log, call.log_format)
        status = carried_out(lambda log: _edit(call, config, low_level, log), log)
        if status:
            os._exit(status)
    _become(low_level, rest)


def _edit(call: Call, config: str, low_level: str, log: Log) -> tuple[str, ...]:
    bundle = Bundle.of(call.bundle, call.config)
    request = request_from_spec(bundle.spec, ContainerRoot(), with_annotations=True)
    if asks_for_nothing(request):
        bundle.forget_changes()
        return ()
    # Only now: most containers ask for nothing, and the rest of the code takes longer to import than to run.
    from nvct.oci.create import edit_bundle

    log.open(call.container)
    return edit_bundle(bundle, request, config, low_level)


def _become(low_level: str, arguments: list[str]) -> NoReturn:
    # Python ignores these from its start on, and what is ignored stays so in whatever this process becomes.
    signal(SIGPIPE, SIG_DFL)
    signal(SIGXFSZ, SIG_DFL)
    try:
        os.execve(low_level, [low_level, *arguments], _environment())
    except OSError as error:
        say(2, f"nvct: {low_level}: {error.strerror}; expected the low-level runtime\n")
        os._exit(1)


def _environment() -> dict[bytes, bytes]:
    """The environment as it came: os.environ has what Python puts in for its locale (PEP 538)."""
    descriptor = os.open("/proc/self/environ", os.O_RDONLY | os.O_CLOEXEC)
    chunks = []
    while chunk := os.read(descriptor, 1 << 16):
        chunks.append(chunk)
    os.close(descriptor)
    entries = [entry.partition(b"=") for entry in b"".join(chunks).split(b"\0")]
    return {name: value for name, equals, value in entries if equals and name}


class _RuntimeLog(Log):
    """Tells also the file that the engine has named with --log, in which it looks for the reason of a failure.

    With such a file warnings do not go to standard error, which becomes the container's own.
    """

    def __init__(self, path: str, form: str) -> None:
        super().__init__()
        self._path = path
        self._form = form

    def failed(self, text: str) -> int:
        self._write("error", f"nvct: {text}")
        return super().failed(text)

    def warn(self, text: str) -> None:
        if self._write("warning", f"nvct: {text}"):
            self._warn_system(text)
        else:
            super().warn(text)

    def _write(self, level: str, text: str) -> bool:
        """Append a line as the low-level runtimes do, in JSON or as logrus writes text. Whether there is a file."""
        if self._path in ("", "/dev/stderr"):
            return False
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o644)
        except OSError:
            return False  # the low-level runtime says that its log cannot be opened
        say(descriptor, log_line(level, text, self._form, time.time()))
        os.close(descriptor)
        return True


def log_line(level: str, text: str, form: str, now: float) -> str:
    """A line of the low-level runtime's log; `form` is json or text, `now` seconds since 1970."""
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    if form == "json":
        return fastjson.dumps({"level": level, "msg": text, "time": moment}) + "\n"
    return f"time={fastjson.dumps(moment)} level={level} msg={fastjson.dumps(text)}\n"
