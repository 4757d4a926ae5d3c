"""File systems as values, to compare what was with what is."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple


class Entry(NamedTuple):
    """One path of a root file system: `text` is a link's text, or the digest of a file's content."""

    mode: int
    owner: int
    group: int
    size: int
    text: str

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.mode)

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_empty_file(self) -> bool:
        return self.is_file and self.size == 0


def read_tree(root: Path, but: Collection[str] = ()) -> dict[str, Entry]:
    """Every path below the folder, as seen from it; links are not followed. `but`: top folders that are left out."""
    found = {}
    for folder, folders, files in os.walk(root):
        if folder == str(root):
            folders[:] = [name for name in folders if name not in but]
        for name in folders + files:
            path = os.path.join(folder, name)
            found[path.removeprefix(str(root))] = _entry(path)
    return found


def _entry(path: str) -> Entry:
    status = os.lstat(path)
    text, size = "", status.st_size
    if stat.S_ISLNK(status.st_mode):
        text = os.readlink(path)
    elif stat.S_ISREG(status.st_mode):
        text = hashlib.sha1(Path(path).read_bytes()).hexdigest()
    elif stat.S_ISDIR(status.st_mode):
        size = 0  # depends on the file system
    return Entry(status.st_mode, status.st_uid, status.st_gid, size, text)
