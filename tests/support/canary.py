"""A folder of the host that nobody may touch, and whatever would tell that somebody did."""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path

_ALL_EVENTS = 0xFFF  # inotify(7): IN_ALL_EVENTS, reading and listing included
_FOLDERS = ("folder", "folder/inner", "dev", "dev/nvidia-caps", "etc", "usr/lib64", "usr/bin", "lib/firmware/nvidia")
_FOLDERS += ("usr/lib/firmware", f"usr/lib/{os.uname().machine}-linux-gnu")
_FOLDERS += ("run/nvidia-persistenced", "proc/driver/nvidia")


class Canary:
    """Holds a file, and the folders that an injection would look for; each folder has a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in _FOLDERS:
            (path / name).mkdir(parents=True)
            (path / name / "kept").write_text(f"{name} of the host")
        self.folder = path / "folder"
        self.file = path / "file"
        self.file.write_text("of the host")
        self._picture = self._look()
        self._mounts = _mount_table()
        self._events = _watch([path, *(folder for folder in path.rglob("*") if folder.is_dir())])

    def close(self) -> None:
        os.close(self._events)

    def harm(self) -> list[str]:
        """What has happened to it and to the mounts of this process since it was made. Counts events only once."""
        found = [f"{count} bytes of events" for count in [_events(self._events)] if count]
        now = self._look()
        found += [
            f"{path} changed" for path in now.keys() | self._picture.keys() if now.get(path) != self._picture.get(path)
        ]
        found += [f"mount {line}" for line in set(_mount_table()) ^ set(self._mounts)]
        _events(self._events)  # those of our own looking
        return sorted(found)

    def _look(self) -> dict[str, tuple[object, ...]]:
        found: dict[str, tuple[object, ...]] = {}
        for folder, _, files in os.walk(self.path):
            for path in (folder, *(f"{folder}/{name}" for name in files)):
                status = os.lstat(path)
                content = b"" if path == folder or not os.path.isfile(path) else Path(path).read_bytes()
                times = (status.st_mtime_ns, status.st_ctime_ns)
                found[path] = (
                    status.st_dev,
                    status.st_ino,
                    status.st_mode,
                    status.st_uid,
                    status.st_nlink,
                    *times,
                    content,
                )
        return found


def _mount_table() -> list[str]:
    """All mounts but those that other programs of this machine make below folders of their own in /tmp."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if not _is_of_others(line.split()[4])]


def _is_of_others(point: str) -> bool:
    return point.startswith("/tmp/") and not point.startswith(f"{tempfile.gettempdir()}/pytest-of-")


def _watch(folders: list[Path]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    for folder in folders:
        if descriptor < 0 or libc.inotify_add_watch(descriptor, os.fsencode(folder), _ALL_EVENTS) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    return int(descriptor)


def _events(descriptor: int) -> int:
    try:
        return len(os.read(descriptor, 1 << 20))
    except BlockingIOError:
        return 0
