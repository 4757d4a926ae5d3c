"""The driver's files that are neither libraries nor programs of its own: configuration, and modules of an X server."""

from __future__ import annotations

import os
import stat

from nvct.model import CONFIG, LIBRARY, MODULE, DriverFile
from nvct.node import catalog
from nvct.node.files import existing


def find_configs(root: str, machine: str) -> tuple[DriverFile, ...]:
    """The driver's configuration files below `root`, and udev's database for GPUDirect Storage.

    `machine` is of `catalog.ARCHITECTURES`. A file that is found under several names counts once, under the first.
    """
    found: dict[str, DriverFile] = {}
    for config in catalog.configs(machine):
        for _, resolved, status in existing(root, [f"{folder}/{config.name}" for folder in config.folders]):
            if stat.S_ISREG(status.st_mode):
                file = DriverFile(CONFIG, config.capability, resolved, target=f"{config.target}/{config.name}")
                found.setdefault(resolved, file)
                break
    for _, resolved, status in existing(root, [catalog.UDEV_FOLDER]):
        if stat.S_ISDIR(status.st_mode):
            found[resolved] = DriverFile(CONFIG, catalog.GDS, resolved, target=catalog.UDEV_FOLDER)
    return tuple(found.values())


def find_xorg_modules(root: str, version: str, libraries: tuple[DriverFile, ...]) -> tuple[DriverFile, ...]:
    """The modules of driver `version` for an X server. `libraries` are the driver's, whose folders are searched first.

    Their `target` is the path where they were found: xorg.conf.d names the folder, so it is the same in a container.
    """
    parents = dict.fromkeys(os.path.dirname(file.path) for file in libraries if file.kind == LIBRARY)
    folders = catalog.xorg_folders(tuple(parents))
    found = []
    for name, link in catalog.XORG_MODULES:
        file_name = name.format(v=version)
        for path, resolved, status in existing(root, [f"{folder}/{file_name}" for folder in folders]):
            if stat.S_ISREG(status.st_mode):
                links = (link,) if link else ()
                found.append(DriverFile(MODULE, catalog.DISPLAY, resolved, links=links, target=path))
                break
    return tuple(found)
