"""Why a driver cannot be used, as errors: none there, none loaded, no libraries, libraries elsewhere, a mismatch."""

from __future__ import annotations

import os

from nvct.errors import DriverError
from nvct.node import catalog, files, jetson, procfs
from nvct.node.catalog import Architecture
from nvct.node.files import LibrarySearch
from nvct.settings import Settings

_DEAD_LINES_SHOWN = 3


def no_module(settings: Settings, architecture: Architecture) -> DriverError:
    """No kernel module is loaded: is there a driver at all, or is a root not where the settings say?"""
    absent = _absent_roots(settings)
    if absent:
        return absent
    if jetson.is_jetson(settings):
        return jetson.refusal(settings)
    where = procfs.version_path(settings.proc_root)
    installed = files.find_libraries(settings.root, architecture, "", settings.library_search_path).other_versions
    if not installed:
        return DriverError(
            f"no NVIDIA driver: {where} does not exist and {settings.root} has no {catalog.NVML_STEM}.*; "
            "install the driver, or set root and proc_root to where it is"
        )
    return DriverError(
        f"no NVIDIA driver is loaded: {where} does not exist, though its libraries are installed, "
        f"{_versions(installed)}: run `modprobe nvidia`, and see dmesg when that fails"
    )


def _absent_roots(settings: Settings) -> DriverError | None:
    """Nothing can be found below a folder that is not there, and to list all that was not found would hide why."""
    for name, path in (("root", settings.root), ("proc_root", settings.proc_root)):
        if not os.path.isdir(path):
            return DriverError(f"{name} is {path}, and there is no such folder: set {name} to where the driver is")
    return None


def no_nvml(settings: Settings, architecture: Architecture, version: str, search: LibrarySearch) -> DriverError:
    """Module `version` is loaded, and the search has not found its NVML: another version, elsewhere, or nowhere?"""
    absent = _absent_roots(settings)
    if absent:
        return absent
    if jetson.is_jetson(settings):
        return jetson.refusal(settings)
    loaded_from = procfs.version_path(settings.proc_root)
    if search.other_versions:
        return version_mismatch(version, loaded_from, search.other_versions, search.dead)
    name = f"{catalog.NVML_STEM}.{version}"
    elsewhere = files.find_elsewhere(settings.root, architecture, version)
    if elsewhere:
        return DriverError(
            f"the driver's libraries are elsewhere: {', '.join(elsewhere)}; expected {name} below {settings.root} in a "
            f"folder that is searched: {_how_to_reach(settings.root, elsewhere[0])}"
        )
    return DriverError(
        f"kernel module {version} is loaded ({loaded_from}), but its libraries are not below {settings.root}: "
        f"no {name} in the loader cache or in {', '.join(search.searched)}; install the libraries of that version, or "
        f"set root or library_search_path to where they are{_hints(search)}"
    )


def version_mismatch(
    version: str, loaded_from: str, libraries: dict[str, str], dead: tuple[str, ...] = ()
) -> DriverError:
    """The kernel module is `version`, and the libraries are of other ones: version to path on this host."""
    return DriverError(
        f"driver/library version mismatch: the loaded kernel module is {version} (read in {loaded_from}), the "
        f"libraries are {_versions(libraries)}: the driver was upgraded under a loaded module; reboot, or unload and "
        f"load the module nvidia{_stale_cache(dead)}"
    )


def _versions(libraries: dict[str, str]) -> str:
    return ", ".join(f"{version} ({path})" for version, path in sorted(libraries.items()))


def _hints(search: LibrarySearch) -> str:
    return "".join(f"; {note}" for note in search.notes) + _stale_cache(search.dead)


def _stale_cache(dead: tuple[str, ...]) -> str:
    if not dead:
        return ""
    return (
        f"; the loader cache is stale, these of its files are gone: {', '.join(dead[:_DEAD_LINES_SHOWN])}: run ldconfig"
    )


def _how_to_reach(root: str, library: str) -> str:
    folder = os.path.dirname(library)
    inside = root.rstrip("/") + "/"
    if folder.startswith(inside):
        return f"set library_search_path: [/{folder[len(inside) :]}]"
    return f"set root to the folder that holds that driver (it is {root} now)"
