"""The prestart hook: `docker run --gpus`, and every runtime that calls OCI hooks.

The runtime starts it when the container's namespaces and mounts stand and its program has not been started, with the
OCI state on standard input. It decides nothing itself: it reads the request, finds the inventory, has them planned and
carries the plan out.
"""

from __future__ import annotations

import os

from nvct import __version__
from nvct.model import ContainerRoot
from nvct.oci.report import Log, begin, carried_out, say
from nvct.oci.state import read_container
from nvct.request import asks_for_nothing, request_from_spec
from nvct.settings import DEFAULT_PATH

NAME = "nvidia-container-runtime-hook"

USAGE = f"""usage: {NAME} [-config FILE] prestart|createRuntime|poststart|poststop
       {NAME} -version

Gives the container whose OCI state is on standard input the GPUs that its NVIDIA_VISIBLE_DEVICES asks for.
poststart and poststop do nothing. -debug is accepted, as of the hook of this name, and changes nothing.
exit status: 0 done, or no GPU asked for; 1 failed, with the reason on standard error and nothing left behind; 2 usage
"""

_ACTING = ("prestart", "createRuntime")
_IDLE = ("poststart", "poststop")


def main(arguments: list[str]) -> int:
    """Run the hook with the arguments after the program's name; returns the exit status."""
    begin()
    try:
        config, command = _parse(arguments)
    except ValueError as error:
        say(2, f"{NAME}: {error}\n{USAGE}")
        return 2
    if command == "help":
        say(1, USAGE)
    if command == "version":
        say(1, f"NVIDIA Container Runtime Hook version {__version__} (nvct)\n")
    return carried_out(lambda log: give_gpus(config, log)) if command in _ACTING else 0


def _parse(arguments: list[str]) -> tuple[str, str]:
    """The settings file and the command, which stands last; options with one dash or two, as the field's tools
    take them.
    """
    config, command, rest = DEFAULT_PATH, "", list(arguments)
    while rest:
        word = rest.pop(0)
        option, has_value, value = word.partition("=")
        option = "-" + option.lstrip("-") if option.startswith("-") else ""
        if option == "-config":
            if not has_value and not rest:
                raise ValueError("-config needs a file")
            config = _absolute(value if has_value else rest.pop(0))
        elif option in ("-version", "-help", "-h"):
            return config, "version" if option == "-version" else "help"
        elif option == "-debug":
            continue
        elif option:
            raise ValueError(f"unknown option {word!r}")
        elif command:
            raise ValueError(f"one command at a time, not {command!r} and {word!r}")
        else:
            command = word
    if command not in _ACTING + _IDLE:
        raise ValueError(f"unknown command {command!r}" if command else "no command")
    return config, command


def _absolute(path: str) -> str:
    try:
        return os.path.abspath(path)
    except OSError:
        raise ValueError(f"-config {path!r} is relative to a folder that is gone: give the whole path") from None


def give_gpus(config: str, log: Log) -> tuple[str, ...]:
    """Do what the hook is for. Returns warnings, raises NvctError."""
    container = read_container(0)
    request = request_from_spec(container.spec, ContainerRoot())
    if asks_for_nothing(request):
        return ()
    # Only now: most containers ask for nothing, and the rest of the code takes longer to import than to run.
    from nvct.oci.give import give

    log.open(container.identity)
    return give(container, request, config)
