"""The CUDA forward compatibility libraries that an image brings: which there are, and for which drivers they say to be.

Facts for the plan and nothing else: no file of the image is mounted or run, and what is read of one is a few KiB.
"""

from __future__ import annotations

import os
from stat import S_ISREG

from nvct.model import CompatFolder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvct.inject.rootfs import ConfinedRoot

# Where NVIDIA's images and packages (cuda-compat-*) have them, often through a link.
FOLDER = "/usr/local/cuda/compat"

_SECTION = b".note.cuda.fwd_compatibility"
_MOST_NAMES = 64
_MOST_TABLE = 1 << 16  # bytes of section headers, and of their names
_MOST_NOTE = 1 << 12


def find_compat(root: ConfinedRoot) -> CompatFolder | None:
    """The compatibility libraries of the container; None where it has no folder of them, which costs one call."""
    try:
        folder = root.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        candidates = sorted(name for name in os.listdir(folder) if _is_library(name))[:_MOST_NAMES]
    finally:
        os.close(folder)
    notes = {name: note for name in candidates if (note := _note_of(root, f"{FOLDER}/{name}")) is not None}
    said = [note for name, note in notes.items() if name.startswith("libcuda.so.") and note]
    return CompatFolder(FOLDER, tuple(notes), said[0] if said else "")


def _is_library(name: str) -> bool:
    head, so, tail = name.partition(".so")
    return head.startswith("lib") and bool(so) and tail[:1] in ("", ".") and name.isascii() and name.isprintable()


def _note_of(root: ConfinedRoot, path: str) -> str | None:
    """What the library says about drivers, "" for nothing; None when it is no library that a loader could load."""
    try:
        anchor = root.open(path)
    except OSError:
        return None
    try:
        if not S_ISREG(os.fstat(anchor).st_mode):
            return None
        file = root.reopen(anchor, os.O_RDONLY)
    except OSError:
        return None
    finally:
        os.close(anchor)
    try:
        return _note(file)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)


def _note(file: int) -> str:
    """The text in the note section of a 64-bit little-endian ELF file. Raises ValueError for another file."""
    header = _read(file, 0, 64)
    if header[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit ELF file")
    start, size, count, names = (
        _number(header, 0x28, 8),
        _number(header, 0x3A, 2),
        _number(header, 0x3C, 2),
        _number(header, 0x3E, 2),
    )
    if not count or not start:  # stripped of its sections, which a loader does not need
        return ""
    if size < 64 or names >= count:
        raise ValueError("section headers are damaged")
    table = _read(file, start, size * count)
    sections = [table[at : at + size] for at in range(0, len(table), size)]
    strings = _content(file, sections[names], _MOST_TABLE)
    for section in sections:
        at = _number(section, 0, 4)
        if strings[at : at + len(_SECTION) + 1] == _SECTION + b"\0":
            return _description(_content(file, section, _MOST_NOTE))
    return ""


def _content(file: int, section: bytes, most: int) -> bytes:
    size = _number(section, 0x20, 8)
    if size > most:
        raise ValueError("a section is longer than it can be")
    return _read(file, _number(section, 0x18, 8), size)


def _description(note: bytes) -> str:
    """The text of one note: three words (length of the owner, of the text, kind), then both, each padded to 4 bytes."""
    owner, text = _number(note, 0, 4), _number(note, 4, 4)
    start = 12 + (owner + 3) // 4 * 4
    if start + text > len(note):
        raise ValueError("the note is longer than its section")
    return note[start : start + text].rstrip(b"\0").decode("utf-8", "replace")


def _read(file: int, offset: int, size: int) -> bytes:
    if size > _MOST_TABLE or offset >= 1 << 62:
        raise ValueError("a part of the file is longer, or farther away, than it can be")
    data = os.pread(file, size, offset)
    if len(data) != size:
        raise ValueError("the file is shorter than it says")
    return data


def _number(data: bytes, at: int, size: int) -> int:
    if len(data) < at + size:
        raise ValueError("the file is shorter than it says")
    return int.from_bytes(data[at : at + size], "little")
