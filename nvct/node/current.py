"""The inventory of this node as it is now: the kept one while it is fresh, else a new one.

The way by which the hook and the commands get at settings and inventory. On the hot path; discovery is imported only
when it is needed.
"""

from __future__ import annotations

from nvct import settings
from nvct.errors import ConfigError, DriverError
from nvct.node import cache
from nvct.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from nvct.model import Inventory
    from nvct.settings import Settings


@record
class Current:
    """The settings and the inventory that hold now. `warnings`: why they could not be kept, when they could not."""

    settings: Settings
    inventory: Inventory
    warnings: tuple[str, ...] = ()


def current(config_path: str, run_dir: str = "") -> Current:
    """The kept inventory when it is fresh, else discovered anew, by one of all who ask at the same time.

    Raises ConfigError for the settings file and DriverError for the driver, as `settings.load` and `discover` do.
    """
    kept = cache.load(config_path, run_dir)
    if kept is not None:
        return Current(*kept)
    with cache.Lock(run_dir):
        kept = cache.load(config_path, run_dir)  # whoever held the lock before has probably just stored it
        return Current(*kept) if kept is not None else _discover(config_path, run_dir)


def refresh(config_path: str, run_dir: str = "") -> Current:
    """A new inventory, however fresh the kept one looks; it is kept in its place. Raises as `current`."""
    with cache.Lock(run_dir):
        return _discover(config_path, run_dir)


def _discover(config_path: str, run_dir: str) -> Current:
    from nvct.node.discover import discover
    from nvct.node.modules import prepare

    settings_identity = cache.identity(config_path)  # from before it is read, so that a change meanwhile is not missed
    chosen = settings.load(config_path)
    notes = prepare(chosen)  # before the stamp: what it makes is part of the node
    taken, reason = _stamp(config_path, chosen)
    try:
        inventory = discover(chosen)
    except DriverError as error:
        raise DriverError("; ".join((str(error), *notes))) from None
    inventory = replace(inventory, missing=notes + inventory.missing)
    if taken is not None:
        reason = _keep(config_path, chosen, inventory, {**taken, "settings": settings_identity}, run_dir)
    warnings = (f"every start asks NVML again, since the inventory cannot be kept: {reason}",) if reason else ()
    return Current(chosen, inventory, warnings)


def _stamp(config_path: str, chosen: Settings) -> tuple[dict[str, Any] | None, str]:
    try:
        return cache.stamp(config_path, chosen), ""
    except OSError as error:  # without a driver discovery says it better
        return None, f"{error.filename}: {error.strerror}"


def _keep(config_path: str, chosen: Settings, inventory: Inventory, taken: dict[str, Any], run_dir: str) -> str:
    """Store, or say why that is impossible."""
    try:
        cache.store(config_path, chosen, inventory, taken, run_dir)
    except OSError as error:
        return f"{cache.cache_path(config_path, run_dir)}: {error.strerror}"
    except ConfigError as error:
        return str(error)
    return ""
