"""Where a command's node and settings come from: this machine, another driver root, or a saved inventory."""

from __future__ import annotations

import os

from nvct import settings as settings_file
from nvct.cli.files import read_json
from nvct.errors import ConfigError
from nvct.model import Inventory
from nvct.node import current
from nvct.node.current import Current
from nvct.node.saved import check_schema, inventory_from_json
from nvct.record import record, replace
from nvct.settings import Settings


@record
class Source:
    """The global options. `root` and `inventory_file` are empty when not given."""

    config: str = settings_file.DEFAULT_PATH
    root: str = ""
    inventory_file: str = ""

    def current(self) -> Current:
        """Settings and inventory: the saved one if it was named, that of `--root` if given, else this machine's.

        Raises ConfigError for a file that is no settings file or no inventory, DriverError for what discovery finds.
        """
        if self.inventory_file:
            return Current(settings_file.load(self.config), _read_inventory(self.inventory_file))
        if self.root:
            from nvct.node.discover import discover  # slow, and not needed while what is kept is fresh

            # What is kept describes the node as the settings file sees it.
            settings = _with_root(settings_file.load(self.config), self.root)
            return Current(settings, discover(settings))
        return current.current(self.config)


def _with_root(settings: Settings, root: str) -> Settings:
    """The settings for another driver root, with the procfs and the sysfs in it where it has those of a driver.

    A driver container has them, and so has a simulated node; a folder with the driver's files alone has not.
    """
    places = {"root": root, "dev_root": root}
    below = root.rstrip("/")
    if os.path.exists(f"{below}/proc/driver/nvidia"):
        places["proc_root"] = f"{below}/proc"
        if os.path.exists(f"{below}/sys/bus/pci"):
            places["sys_root"] = f"{below}/sys"
    return replace(settings, **places)


def _read_inventory(path: str) -> Inventory:
    from nvct.node.shape import check_shape

    data = read_json(path, "a file made by `nvct info --json`")
    try:
        check_schema(data)
        check_shape(data)
        return inventory_from_json(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
