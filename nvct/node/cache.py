"""The inventory that an earlier start left in /run/nvct, and whether it still describes this node.

Callers that are not the machine's root keep theirs in a folder of their own, and use root's while that is fresh.

On the hook's hot path: whether the inventory is fresh is decided from /proc and stat alone. The file also keeps the
parsed settings, so that a hook with a fresh inventory reads no YAML. Its form:
`{"schema": 1, "stamp": {...}, "settings": {...}, "inventory": {...}}`.
"""

from __future__ import annotations

import os
import stat
import time
from binascii import crc32
from fcntl import LOCK_EX, LOCK_NB, flock

from nvct import fastjson, settings, trust, userns
from nvct.errors import ConfigError, NvctError
from nvct.model import SCHEMA
from nvct.node import procfs, roots
from nvct.node.saved import inventory_from_json, inventory_to_json
from nvct.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

    from nvct.model import Inventory

RUN_DIR = "/run/nvct"

_LOADER_CACHE = "/etc/ld.so.cache"

# What appears without any other trace: nodes that are made when a program first needs them, sockets of daemons. The
# same as in `devices` and `catalog` (a test holds that), whose tables take a millisecond to import.
CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
SOCKETS = (
    "/run/nvidia-persistenced/socket",
    "/var/run/nvidia-persistenced/socket",
    "/run/nvidia-fabricmanager/socket",
    "/var/run/nvidia-fabricmanager/socket",
    "/tmp/nvidia-mps",
)
# The same as in `extras` (a test holds that), below /dev.
_NODE_FOLDERS = ("/dri", "/infiniband", "/nvidia-caps-imex-channels")
_NODE_PREFIXES = ("nvidia-fs", "nvidia-nvswitch", "gdrdrv")
# The driver store of `wsl`, which is as slow to import.
WSL_STORE = "/usr/lib/wsl/drivers"
_OTHERS_CAN_WRITE = 0o022

# The largest inventory seen, 2048 IMEX channels in it, has 200 KiB.
_MOST_BYTES = 8 << 20

# What reading a kept inventory comes to when it is damaged, or of a driver that is just being unloaded.
_UNUSABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, OSError, NvctError)


def own_run_dir() -> str:
    """The folder in which this caller keeps inventories: root in /run/nvct, others where they alone can write.

    The environment has no say in it, since a hook's comes from whoever wrote the image: for the user with the host's
    id U it is nvct in /run/user/U, which is what XDG_RUNTIME_DIR is by convention, or /tmp/nvct-U where nobody has
    logged in as that user.
    """
    uid = userns.outer_uid()
    if uid == 0:
        return RUN_DIR
    runtime_dir = f"/run/user/{uid}"
    try:
        is_ours = os.lstat(runtime_dir).st_uid == os.geteuid()
    except OSError:
        is_ours = False
    return f"{runtime_dir}/nvct" if is_ours else f"/tmp/nvct-{uid}"


def cache_path(config_path: str, run_dir: str = "") -> str:
    """Where the inventory of a settings file is kept: each file has its own, the default file the plain name.

    `run_dir` is the folder, `own_run_dir` by default, here and below.
    """
    return f"{run_dir or own_run_dir()}/{_cache_name(config_path)}"


def _cache_name(config_path: str) -> str:
    if config_path == settings.DEFAULT_PATH:
        return "inventory.json"
    return f"inventory-{crc32(os.fsencode(config_path)):08x}.json"


def load(config_path: str, run_dir: str = "") -> tuple[Settings, Inventory] | None:
    """The kept settings and inventory when they are fresh, else None; the caller's own before root's.

    None too when there is no file, when another version of nvct wrote it, and when anyone but root (or the caller)
    could have written it: the answer decides which devices a container gets.
    """
    folders = (run_dir,) if run_dir else dict.fromkeys((own_run_dir(), RUN_DIR))
    return next(filter(None, (_load_from(folder, config_path) for folder in folders)), None)


def _load_from(run_dir: str, config_path: str) -> tuple[Settings, Inventory] | None:
    text = _read_trusted(run_dir, _cache_name(config_path))
    if text is None:
        return None
    try:
        kept: Any = fastjson.loads(text)
        if kept["schema"] != SCHEMA:
            return None
        chosen = settings.from_json(kept["settings"])
        if kept["stamp"] != stamp(config_path, chosen):
            return None
        return chosen, inventory_from_json(kept["inventory"])
    except _UNUSABLE:
        return None


def stamp(config_path: str, chosen: Settings) -> dict[str, Any]:
    """What the node looks like from /proc and stat; an inventory is fresh as long as this is the same. JSON values.

    Taken *before* discovery, so that a change during it makes the inventory stale. Raises OSError without a driver.
    """
    return {
        "boot_id": procfs.read_boot_id(chosen.proc_root),
        "driver_version": _driver(chosen),
        "majors": procfs.read_majors(chosen.proc_root),
        "gpus": procfs.read_gpu_times(chosen.proc_root),
        "mig": procfs.read_access_times(chosen.proc_root),
        "nodes": _nodes(chosen),
        "extra_nodes": _extra_nodes(chosen),
        "sockets": [os.path.lexists(roots.on_host(chosen.root, path)) for path in SOCKETS],
        "loader_cache": identity(roots.on_host(chosen.root, _LOADER_CACHE)),
        "settings_path": config_path,
        "settings": identity(config_path),
    }


def _driver(chosen: Settings) -> str | dict[str, Any]:
    """The module's version, or in the Windows Subsystem for Linux the drivers that Windows shows there."""
    try:
        return procfs.read_driver_version(chosen.proc_root)
    except FileNotFoundError:
        store = roots.on_host(chosen.root, WSL_STORE)
        if not os.path.isdir(store):
            raise
        return {
            **{name: identity(f"{store}/{name}/libnvidia-ml.so.1") for name in os.listdir(store)},
            "/dev/dxg": [_device_number(roots.on_host(chosen.dev_root, "/dev/dxg"))],
        }


def _nodes(chosen: Settings) -> list[int | None] | list[list[int] | None]:
    if chosen.device_table:
        return [identity(chosen.device_table)]
    return [_device_number(roots.on_host(chosen.dev_root, path)) for path in CONTROL_NODES]


def _extra_nodes(chosen: Settings) -> dict[str, int | None]:
    """What changes whenever a node of graphics, of storage, of the network or of IMEX appears, goes or is made again.

    Folders that hold nothing else change their time with it; /dev changes for anything, so there names are looked at.
    """
    if chosen.device_table:
        return {}
    dev = roots.on_host(chosen.dev_root, "/dev")
    found: dict[str, int | None] = {}
    for folder in _NODE_FOLDERS:
        try:
            found[folder] = os.stat(dev + folder).st_mtime_ns
        except OSError:
            continue
    try:
        names = os.listdir(dev)
    except OSError:
        return found
    for name in sorted(names):
        if name.startswith(_NODE_PREFIXES):
            found[name] = _device_number(f"{dev}/{name}")
    return found


def _device_number(path: str) -> int | None:
    try:
        return os.lstat(path).st_rdev
    except FileNotFoundError:
        return None


def identity(path: str) -> list[int] | None:
    """What changes whenever a file is written or replaced; None when it is absent."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def store(config_path: str, chosen: Settings, inventory: Inventory, taken: dict[str, Any], run_dir: str = "") -> None:
    """Keep an inventory, for everyone to read. `taken` is the `stamp` from before the discovery.

    The file is replaced in one step. The folder is made when absent. Raises OSError when that is not possible, and
    ConfigError when the folder is not safe from others.
    """
    import json  # slow to import, and no start that finds a fresh inventory comes here

    kept = {
        "schema": SCHEMA,
        "stamp": taken,
        "settings": settings.to_json(chosen),
        "inventory": inventory_to_json(inventory),
    }
    content = json.dumps(kept).encode()
    folder = open_folder(run_dir or own_run_dir(), make=True)
    try:
        _replace(folder, _cache_name(config_path), content)
    finally:
        os.close(folder)


def _replace(folder: int, name: str, content: bytes) -> None:
    _remove_abandoned(folder, f".{name}.")
    temporary = f".{name}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            os.fchmod(handle, 0o644)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(temporary, dir_fd=folder)
        raise


def _remove_abandoned(folder: int, prefix: str) -> None:
    """Remove what writers left that were killed; their pids end the names."""
    for name in os.listdir(folder):
        if name.startswith(prefix) and not os.path.exists(f"/proc/{name[len(prefix) :]}"):
            try:  # noqa: SIM105  # contextlib is slow to import
                os.unlink(name, dir_fd=folder)
            except FileNotFoundError:
                pass  # another start has removed it


class Lock:
    """Only one start discovers; the others wait for its inventory, but no longer than `limit_s` seconds.

    The kernel frees the lock of a holder that dies. After the limit the block runs without the lock: a holder that
    hangs in the driver costs everyone these seconds and no more. It runs without the lock, too, where there can be none
    because the folder cannot be written, or locks nothing; `store` then says why.

    Locks of another `name` are others: hooks queue for one of their own, so that only the first of a hundred starts an
    interpreter that discovers, and that one can take the usual lock.
    """

    def __init__(self, run_dir: str = "", limit_s: float = 10.0, name: str = "lock") -> None:
        self._run_dir = run_dir or own_run_dir()
        self._name = name
        self._limit_s = limit_s
        self._handle = -1

    def __enter__(self) -> None:
        try:
            self._handle = _open_lock(self._run_dir, self._name)
            _wait_for_lock(self._handle, self._limit_s)
        except (OSError, ConfigError):
            return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle >= 0:
            os.close(self._handle)


def _open_lock(run_dir: str, name: str) -> int:
    folder = open_folder(run_dir, make=True)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=folder)  # 0600: whoever can open it can hold it
    finally:
        os.close(folder)


def _wait_for_lock(handle: int, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    pause = 0.002
    while True:
        try:
            flock(handle, LOCK_EX | LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


def _read_trusted(run_dir: str, name: str) -> str | None:
    """The text of a file that only root or the caller can have written; None for every other."""
    try:
        folder = open_folder(run_dir, make=False)
    except (OSError, ConfigError):
        return None
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    finally:
        os.close(folder)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or not _is_safe(status, run_dir) or status.st_size > _MOST_BYTES:
            return None
        return os.read(handle, status.st_size).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(handle)


def open_folder(run_dir: str, make: bool) -> int:
    """The folder, opened, so that what is checked is what is used; `make` it where there is none.

    Raises OSError, and ConfigError when others can write there.
    """
    if make:
        _make_folder(run_dir)
    handle = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(handle)
    if _is_safe(status, run_dir):
        return handle
    os.close(handle)
    raise ConfigError(
        f"{run_dir} has mode {stat.S_IMODE(status.st_mode):04o} and owner {status.st_uid}, expected a folder that "
        f"only root or uid {os.geteuid()} can write to: remove it, or chown and chmod 755 it"
    )


def _make_folder(run_dir: str) -> None:
    try:
        os.mkdir(run_dir, 0o700)
    except FileExistsError:
        return
    os.chmod(run_dir, 0o755)  # whatever the umask: ordinary users read the inventory


def _is_safe(status: os.stat_result, run_dir: str) -> bool:
    """Whether nobody but root and the caller can have written it.

    What shows up as the overflow uid is root's in /run, where root alone can put a folder, and anybody's elsewhere.
    """
    owners = trust.trusted_owners() if run_dir == RUN_DIR else {0, os.geteuid()}
    return status.st_uid in owners and not status.st_mode & _OTHERS_CAN_WRITE
