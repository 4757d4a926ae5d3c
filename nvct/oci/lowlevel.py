"""The low-level runtime that nvct's calls: found by the front without Python, and by the settings here.

One container must have one low-level runtime for all commands, so the front (hooks/nvct-runtime) decides, by the file
that `nvct refresh` writes beside the settings, else by search; here it is seen whether the settings say the same.
"""

from __future__ import annotations

import os

from nvct.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvct.settings import Settings

# What the front looks for and where (a test holds that): no PATH, since the environment decides nothing.
NAMES = ("runc", "crun")
FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")

_FRONT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + "/hooks/nvct-runtime"


def choice_path(config: str) -> str:
    """The file in which the front reads its low-level runtime, one line; `config` is the settings file's path."""
    return f"{os.path.dirname(config)}/low-level-runtime"


def find(runtimes: tuple[str, ...]) -> str:
    """The path of the first that there is; "" for none."""
    for name in runtimes:
        for path in (name,) if name.startswith("/") else tuple(f"{folder}/{name}" for folder in FOLDERS):
            if os.path.isfile(path) and os.access(path, os.X_OK) and not os.path.samefile(path, _FRONT):
                return path
    return ""


def check(used: str, config: str, settings: Settings) -> None:
    """Raise ConfigError when the front uses another low-level runtime than the settings name."""
    wanted = find(settings.runtimes)
    if wanted != used:
        named = ", ".join(settings.runtimes)
        found = f"of which {wanted} is the first that there is" if wanted else "none of which is on this machine"
        raise ConfigError(
            f"the settings (runtimes) name {named}, {found}, but nvct-runtime calls {used} for every command: "
            f"run `nvct refresh`, which writes {choice_path(config)}, when no container is running"
        )


def write_choice(config: str, settings: Settings) -> None:
    """Tell the front which low-level runtime the settings name; nothing where it finds that by itself.

    Raises ConfigError when there is none, or the file cannot be written.
    """
    path = choice_path(config)
    try:
        if settings.runtimes == NAMES:
            if os.path.lexists(path):
                os.unlink(path)
            return
        _put(path, _found(settings.runtimes))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; it tells nvct-runtime which runtime the settings name") from None


def _found(runtimes: tuple[str, ...]) -> str:
    path = find(runtimes)
    if not path:
        raise ConfigError(f"the settings (runtimes) name {', '.join(runtimes)}, none of which is on this machine")
    return path


def _put(path: str, text: str) -> None:
    beside = f"{path}.{os.getpid()}"
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, f"{text}\n".encode())
        os.rename(beside, path)
    except OSError:
        os.unlink(beside)
        raise
    finally:
        os.close(descriptor)
