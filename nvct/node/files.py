"""The driver's files below a driver root: libraries, programs, firmware, sockets; `configs` finds the others.

Libraries are looked for through the root's loader cache *and* in folders: a cache built before the driver was installed
lists none of it, and a driver in a folder of its own is listed nowhere else. What a file is, its ELF header decides,
never the folder or the cache's flags.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator

from nvct import ldcache
from nvct.model import BINARY, FIRMWARE, LIBRARY, LIBRARY32, SOCKET, DriverFile
from nvct.node import catalog
from nvct.node.catalog import Architecture, Library
from nvct.node.elf import Elf, read_elf
from nvct.node.procfs import is_version
from nvct.node.roots import on_host, resolve
from nvct.record import record

_LOADER_CACHE = "/etc/ld.so.cache"
# Digits of a driver's branch; the libraries that have versions of their own count from 1.
_DRIVER_BRANCH = 3
_BY_STEM = {library.stem: library for library in catalog.LIBRARIES}


@record
class LibrarySearch:
    """What a search for libraries found.

    `files` are those of the wanted version. `other_versions` are NVML libraries of other versions, version to path on
    the host. `dead` are lines of the loader cache whose file is gone. `searched` are the folders, below the root.
    `notes` are sentences about files that had to be left out.
    """

    files: tuple[DriverFile, ...]
    other_versions: dict[str, str]
    dead: tuple[str, ...]
    searched: tuple[str, ...]
    notes: tuple[str, ...]


def find_libraries(root: str, architecture: Architecture, version: str, extra: tuple[str, ...]) -> LibrarySearch:
    """The libraries of driver `version` below `root`. `extra` are folders below it that are searched first.

    Where the same library is found twice, the place that comes first wins: `extra`, the loader cache, then the folders
    of `catalog.library_folders`. Nothing is raised for what is absent or damaged: it is in the answer.
    """
    return _Search(root, architecture, version).run(extra)


class _Search:
    """One search: gathers the files by their resolved paths, then looks into each."""

    def __init__(self, root: str, architecture: Architecture, version: str) -> None:
        self.root = root
        self.architecture = architecture
        self.version = version
        self.names: dict[str, set[str]] = {}  # resolved path: the names under which it was found
        self.other_versions: dict[str, str] = {}
        self.dead: list[str] = []
        self.notes: list[str] = []
        self.unknown: list[str] = []

    def run(self, extra: tuple[str, ...]) -> LibrarySearch:
        cached = self._cached_paths()
        # Beside the NVML that the loader knows lies the rest of its driver, listed or not.
        beside = [
            os.path.dirname(path) for path in cached if catalog.stem_of(os.path.basename(path)) == catalog.NVML_STEM
        ]
        folders = list(dict.fromkeys([*beside, *catalog.library_folders(self.architecture)]))
        self._add_folders(extra)
        for path in cached:
            self._add(path, from_cache=True)
        self._add_folders(folders)
        chosen: dict[tuple[str, str], DriverFile] = {}
        for path in self.names:
            file = self._examine(path)
            if file is not None:
                chosen.setdefault((catalog.stem_of(os.path.basename(path)), file.kind), file)
        if self.unknown:
            self.notes.append(
                f"left out, since this nvct does not know what they are for: {', '.join(sorted(set(self.unknown)))}"
            )
        return LibrarySearch(
            files=_in_catalog_order(chosen),
            other_versions=self.other_versions,
            dead=tuple(self.dead),
            searched=tuple(dict.fromkeys([*extra, *folders])),
            notes=tuple(dict.fromkeys(self.notes)),
        )

    def _cached_paths(self) -> list[str]:
        where = on_host(self.root, _LOADER_CACHE)
        try:
            where = on_host(self.root, resolve(self.root, _LOADER_CACHE))
            with open(where, "rb") as stream:
                paths = [entry.path for entry in ldcache.parse(stream.read()).entries]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.notes.append(f"{unreadable(where, error)}; only folders were searched for libraries")
            return []
        except ldcache.LoaderCacheError as error:
            self.notes.append(f"{where} is damaged ({error}): run ldconfig; only folders were searched for libraries")
            return []
        return list(dict.fromkeys(path for path in paths if _is_of_interest(os.path.basename(path))))

    def _add_folders(self, folders: tuple[str, ...] | list[str]) -> None:
        for folder in folders:
            for place in (folder, f"{folder}/vdpau"):
                for name in self._listing(place):
                    self._add(f"{place}/{name}", from_cache=False)

    def _listing(self, folder: str) -> list[str]:
        where = on_host(self.root, folder)
        try:
            where = on_host(self.root, resolve(self.root, folder))
            return sorted(name for name in os.listdir(where) if _is_of_interest(name))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.notes.append(f"{unreadable(where, error)}; its libraries are left out")
            return []

    def _add(self, path: str, from_cache: bool) -> None:
        try:
            resolved = resolve(self.root, path)
        except PermissionError as error:
            self.notes.append(f"{unreadable(str(error.filename), error)}; {path} is left out")
            return
        except OSError:
            if from_cache:
                self.dead.append(path)
            return
        names = self.names.setdefault(resolved, set())
        names.add(os.path.basename(path))

    def _examine(self, path: str) -> DriverFile | None:
        name = os.path.basename(path)
        stem = catalog.stem_of(name)
        library = _BY_STEM.get(stem)
        suffix = name[len(stem) + 1 :]
        if library is None:
            if stem and name.startswith("libnvidia-") and stem not in catalog.LEFT_OUT and not self._is_older(suffix):
                self.unknown.append(name)
            return None
        if not library.versioned or suffix == self.version:
            return self._driver_file(library, path)
        if stem == catalog.NVML_STEM and is_version(suffix):
            self.other_versions.setdefault(suffix, on_host(self.root, path))
        return None

    def _is_older(self, suffix: str) -> bool:
        """Whether this is the version of another driver, whose files an upgrade left behind."""
        return suffix != self.version and is_version(suffix) and len(suffix.partition(".")[0]) >= _DRIVER_BRANCH

    def _driver_file(self, library: Library, path: str) -> DriverFile | None:
        where = on_host(self.root, path)
        try:
            elf = read_elf(where)
        except OSError as error:
            self.notes.append(f"{unreadable(where, error)}; it is left out")
            return None
        except ValueError as error:
            self.notes.append(f"{where} is no sound ELF file ({error}): install the driver again; it is left out")
            return None
        kind = _kind(elf, self.architecture)
        if not kind:
            self.notes.append(f"{where} is for {elf.machine} ({elf.bits} bits), not for this machine; it is left out")
            return None
        links = (library.stem,) if library.stem in self.names[path] else ()
        return DriverFile(kind, library.capability, path, elf.soname, links)


def _is_of_interest(name: str) -> bool:
    return name.startswith("libnvidia-") or catalog.stem_of(name) in _BY_STEM


def _kind(elf: Elf, architecture: Architecture) -> str:
    if (elf.machine, elf.bits) == (architecture.machine, 64):
        return LIBRARY
    if (elf.machine, elf.bits) == (architecture.machine32, 32):
        return LIBRARY32
    return ""


def _in_catalog_order(chosen: dict[tuple[str, str], DriverFile]) -> tuple[DriverFile, ...]:
    keys = [(library.stem, kind) for kind in (LIBRARY, LIBRARY32) for library in catalog.LIBRARIES]
    return tuple(chosen[key] for key in keys if key in chosen)


def find_programs(root: str) -> tuple[DriverFile, ...]:
    """The driver's programs below `root`: of each the first that is an executable file, in `catalog.PROGRAM_FOLDERS`.

    The folders are a fixed list: an environment's PATH decides nothing.
    """
    found = []
    for program in catalog.PROGRAMS:
        paths = [f"{folder}/{program.name}" for folder in catalog.PROGRAM_FOLDERS]
        for _, resolved, status in existing(root, paths):
            if stat.S_ISREG(status.st_mode) and status.st_mode & 0o111:
                found.append(DriverFile(BINARY, program.capability, resolved))
                break
    return tuple(found)


def find_firmware(root: str, version: str, custom: str = "") -> tuple[DriverFile, ...]:
    """The GPUs' firmware for driver `version` below `root`: gsp*.bin of the first folder that has any.

    `custom` is the folder that the kernel has been told to look in first, "" for none.
    """
    for folder in catalog.firmware_folders(version, os.uname().release, custom):
        try:
            names = sorted(os.listdir(on_host(root, resolve(root, folder))))
        except OSError:
            continue
        paths = [f"{folder}/{name}" for name in names if name.startswith("gsp") and name.endswith(".bin")]
        files = [resolved for _, resolved, status in existing(root, paths) if stat.S_ISREG(status.st_mode)]
        if files:
            return tuple(DriverFile(FIRMWARE, catalog.FIRMWARE_CAPABILITY, file) for file in files)
    return ()


def firmware_setting(sys_root: str) -> str:
    """The folder that the kernel has been told to look for firmware in first; "" when it has not."""
    try:
        with open(f"{sys_root}/module/firmware_class/parameters/path", encoding="utf-8", errors="replace") as stream:
            folder = stream.read().strip()
    except OSError:
        return ""
    return folder.rstrip("/") if folder.startswith("/") else ""


def find_sockets(root: str) -> tuple[DriverFile, ...]:
    """The sockets of the driver's daemons below `root`, as far as the daemons run.

    Nothing counts to which a link leads, and a folder only when root owns it: /tmp is everyone's, and whoever made
    /tmp/nvidia-mps a link to /etc would have /etc mounted into containers, writable. Where /var/run is a link, the
    same sockets are found below /run.
    """
    found = []
    for socket in catalog.SOCKETS:
        for path, resolved, status in existing(root, socket.paths):
            own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == 0
            if resolved == path and (stat.S_ISSOCK(status.st_mode) or own_folder):
                found.append(DriverFile(SOCKET, socket.capability, resolved))
                break
    return tuple(found)


def find_elsewhere(root: str, architecture: Architecture, version: str) -> tuple[str, ...]:
    """NVML libraries of driver `version` outside the folders that are searched: their paths on this host.

    They are in other folders of the root, or in the host's own folders when the root is another.
    """
    name = f"{catalog.NVML_STEM}.{version}"
    places = [on_host(root, folder) for folder in catalog.other_folders(architecture)]
    if root != "/":
        places += [*catalog.library_folders(architecture), *catalog.other_folders(architecture)]
    paths = [f"{place}/{name}" for place in places]
    return tuple(dict.fromkeys(os.path.realpath(path) for path in paths if os.path.isfile(path)))


def unreadable(path: str, error: OSError) -> str:
    """A sentence about a file or folder that exists but cannot be read: its mode and owner, and who tried."""
    try:
        status = os.lstat(path)
        whose = f" (mode {stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid}:{status.st_gid})"
    except OSError:
        whose = ""
    return f"{path}{whose} cannot be read by user {os.geteuid()}: {error.strerror}"


def existing(root: str, paths: Iterable[str]) -> Iterator[tuple[str, str, os.stat_result]]:
    """Of those `paths` below `root` that exist: the path, the path with links resolved, and what is there."""
    for path in paths:
        try:
            resolved = resolve(root, path)
            yield path, resolved, os.lstat(on_host(root, resolved))
        except OSError:
            continue
