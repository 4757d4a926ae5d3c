"""What a running container asked for. One that nvct's runtime has started says so no more: its variable is `void`.

So the runtime leaves a link beside the inventory, /run/nvct/bundle-<root folder>-<bundle>, both by device and inode,
from the container's root folder to the bundle: there nvct-changes.json says what config.json was before.
"""

from __future__ import annotations

import os

from nvct.edits import HOOK
from nvct.errors import ConfigError, RequestError
from nvct.node import cache
from nvct.oci.bundle import Bundle
from nvct.oci.state import root_path
from nvct.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvct.inject.rootfs import ConfinedRoot
    from nvct.model import Request

_LINK = "bundle-"
_LOOKED_AT = 8
_VOID = "void"


@record
class Started:
    """`carrier` is a name of explain.CARRIERS. `known`: whether the request can be seen; else it asks for nothing, and
    whatever of the driver is there came by a spec.
    """

    request: Request
    carrier: str
    known: bool = True


def remember(bundle: Bundle) -> None:
    """Leave a link to the bundle of a container that is created now.

    Where none can be left, as by a caller who may not write there, `nvct explain` says that it cannot know.
    """
    try:
        folder = cache.open_folder(cache.own_run_dir(), make=True)
    except (OSError, ConfigError):
        return
    try:
        _forget_removed_bundles(folder)
        root = os.stat(os.path.join(bundle.folder, root_path(bundle.spec)))
        name = f"{_prefix(root)}{_identity(os.stat(bundle.folder))}"
        beside = f"{name}.{os.getpid()}"
        os.symlink(bundle.folder, beside, dir_fd=folder)
        os.rename(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
    except (OSError, ValueError, RequestError):  # also a root that the low-level runtime will refuse
        return
    finally:
        os.close(folder)


def started(pid: int, root: ConfinedRoot, variables: dict[str, str]) -> Started:
    """What the container of process `pid` asked for; `root` is its root folder, `variables` are the process's.

    Raises OSError when the process is gone or may not be looked at, RequestError for what is malformed.
    """
    # Not at the top, which `create` imports: no start needs them.
    from nvct.inject.look import look_as_its_root
    from nvct.inject.running import request_of
    from nvct.request import DEVICES, request_from_spec

    # A process that an engine has started later has the variable as the engine knows it.
    seen = variables.get(DEVICES)
    bundles = [bundle for bundle in _bundles_of(pid) if seen in (_VOID, _variable(bundle.spec, DEVICES))]
    if len(bundles) == 1:
        request = request_from_spec(bundles[0].spec, look_as_its_root(root, pid), with_annotations=True)
        return Started(request, _carrier(bundles[0]))
    request = request_of(pid, root, variables)
    if seen != _VOID:
        return Started(request, "hook")
    return Started(request, "cdi-spec", known=False)


def _bundles_of(pid: int) -> list[Bundle]:
    """The bundles of nvct's runtime whose root folder is that of the process: one, if containers do not share it."""
    root = os.stat(f"/proc/{pid}/root")
    found = {}
    for run_dir in dict.fromkeys((cache.own_run_dir(), cache.RUN_DIR)):
        for path in _linked(run_dir, _prefix(root)):
            bundle = _edited(path, root)
            if bundle:
                found[path] = bundle
    return list(found.values())


def _linked(run_dir: str, prefix: str) -> Iterator[str]:
    try:
        folder = cache.open_folder(run_dir, make=False)
    except (OSError, ConfigError):
        return
    try:
        for name in sorted(os.listdir(folder)):
            if name.startswith(prefix):
                yield os.readlink(name, dir_fd=folder)
    except OSError:
        return  # a start has removed it at this moment
    finally:
        os.close(folder)


def _edited(path: str, root: os.stat_result) -> Bundle | None:
    """The bundle, if its config.json still has the runtime's changes in it and still names that root folder."""
    try:
        bundle = Bundle.of(path, "config.json")
        now = os.stat(os.path.join(path, root_path(bundle.spec)))
    except (OSError, RequestError):
        return None
    return bundle if bundle.changes and _identity(now) == _identity(root) else None


def _carrier(bundle: Bundle) -> str:
    hooks = [hook for change in bundle.changes if change["path"][0] == "hooks" for hook in change["came"]]
    if not hooks:
        return "hook-free-runtime"
    # In the mode `hook` the runtime adds but the prestart hook, which does it all.
    only = len(bundle.changes) == 1 and all(hook["path"].rpartition("/")[2] != HOOK for hook in hooks)
    return "hook" if only else "runtime"


def _variable(spec: dict[str, object], name: str) -> str | None:
    process = spec.get("process")
    env = process.get("env") if isinstance(process, dict) else None
    values = [entry.partition("=")[2] for entry in env or () if entry.startswith(f"{name}=")]
    return values[-1] if values else None


def _forget_removed_bundles(folder: int) -> None:
    """Engines remove a container's bundle with it, and tell nobody. A start makes one link and looks at some others,
    wherever its pid falls, so that there are never many more than there are bundles.
    """
    names = [name for name in os.listdir(folder) if name.startswith(_LINK)]
    first = os.getpid() % len(names) if names else 0
    for name in (names[first:] + names[:first])[:_LOOKED_AT]:
        if not os.path.exists(os.readlink(name, dir_fd=folder)):
            os.unlink(name, dir_fd=folder)


def _prefix(root: os.stat_result) -> str:
    return f"{_LINK}{_identity(root)}-"


def _identity(status: os.stat_result) -> str:
    return f"{status.st_dev:x}:{status.st_ino:x}"
