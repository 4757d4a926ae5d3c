"""Where a command's node and settings come from: this machine, another driver root, or a saved inventory."""

from __future__ import annotations

import json
from pathlib import Path

from nvct import settings as settings_file
from nvct.errors import ConfigError
from nvct.model import Inventory
from nvct.node import current
from nvct.node.current import Current
from nvct.node.discover import discover
from nvct.node.saved import inventory_from_json
from nvct.record import record, replace


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
        if self.root:  # what is kept describes the node as the settings file sees it
            settings = replace(settings_file.load(self.config), root=self.root, dev_root=self.root)
            return Current(settings, discover(settings))
        return current.current(self.config)


def _read_inventory(path: str) -> Inventory:
    try:
        data = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON ({error}): expected a file made by `nvct info --json`") from None
    return inventory_from_json(data)
