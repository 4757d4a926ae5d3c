"""The low-level runtime that nvct's calls: found by the front without Python, and by the settings here.

One container must have one low-level runtime for all commands, so the front (hooks/nvct-runtime) decides, by the link
that `nvct refresh` makes beside the settings, else by search; here it is seen whether the settings say the same.
"""

from __future__ import annotations

import os

from nvct.errors import ConfigError
from nvct.trust import is_sticky, trusted_owners, why_unsafe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvct.settings import Settings

# What the front looks for and where (a test holds that): no PATH, since the environment decides nothing.
NAMES = ("runc", "crun")
FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")

_FRONT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + "/hooks/nvct-runtime"


_CHOICE = "low-level-runtime"


def choice_path(config: str) -> str:
    """The link by which the front finds its low-level runtime; `config` is the settings file's absolute path."""
    return f"{os.path.dirname(config)}/{_CHOICE}"


def find(runtimes: tuple[str, ...]) -> str:
    """The path of the first that there is; "" for none."""
    for name in runtimes:
        for path in (name,) if name.startswith("/") else tuple(f"{folder}/{name}" for folder in FOLDERS):
            if os.path.isfile(path) and os.access(path, os.X_OK) and not os.path.samefile(path, _FRONT):
                return path
    return ""


def check(used: str, config: str, settings: Settings) -> None:
    """Raise ConfigError when the front uses another low-level runtime than the settings name, or a stranger's link."""
    if os.path.islink(used) and os.path.basename(used) == _CHOICE:
        reason = _why_unsafe_link(used)
        if reason:
            raise ConfigError(reason)
        used = os.readlink(used)
    wanted = find(settings.runtimes)
    if wanted != used:
        named = ", ".join(settings.runtimes)
        found = f"of which {wanted} is the first that there is" if wanted else "none of which is on this machine"
        raise ConfigError(
            f"the settings (runtimes) name {named}, {found}, but nvct-runtime calls {used} for every command: "
            f"run `nvct refresh`, which makes {choice_path(config)}, when no container is running"
        )


def _why_unsafe_link(path: str) -> str:
    """Why a stranger can have made the link, and what to do about it; "" when none can."""
    owner = os.lstat(path).st_uid
    if owner not in trusted_owners():
        return f"{path} belongs to uid {owner}, expected root or uid {os.geteuid()}; remove it, and run `nvct refresh`"
    folder = os.path.dirname(path) or "."
    return why_unsafe(folder, os.stat(folder))


def write_choice(config: str, settings: Settings) -> None:
    """Tell the front which low-level runtime the settings name; nothing where it finds that by itself.

    Raises ConfigError when there is none, when a link does not stand for it, and when none can be made.
    """
    path = choice_path(config)
    try:
        if settings.runtimes == NAMES:
            if os.path.lexists(path):
                os.unlink(path)
            return
        if is_sticky(os.stat(os.path.dirname(path))):
            raise ConfigError(
                f"the settings (runtimes) need the link {path}, which others could make in that folder, too: move the "
                "settings file into a folder of its own"
            )
        _put(path, _found(settings.runtimes))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; it tells nvct-runtime which runtime the settings name") from None


def _found(runtimes: tuple[str, ...]) -> str:
    path = find(runtimes)
    if not path:
        raise ConfigError(f"the settings (runtimes) name {', '.join(runtimes)}, none of which is on this machine")
    real = os.path.realpath(path)
    # krun is a link to crun, which goes by the name that it is called by, and would be called by that of our link.
    if os.path.basename(real) != os.path.basename(path):
        raise ConfigError(
            f"the settings (runtimes) name {path}, which is {real} by another name, and nvct-runtime cannot call it by "
            f"that: name {real}, or a script that calls {path}"
        )
    return path


def _put(link: str, path: str) -> None:
    beside = f"{link}.{os.getpid()}"
    os.symlink(path, beside)
    try:
        os.rename(beside, link)
    except OSError:
        os.unlink(beside)
        raise
