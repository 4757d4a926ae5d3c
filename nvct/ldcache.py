"""The loader cache: glibc's /etc/ld.so.cache, read and written as bytes. Nothing here opens a file.

Three forms are found in the wild: "new" (a header `glibc-ld.so.cache1.1`; what ldconfig writes since glibc 2.32),
"compat" (an old table, then the new one; its habit before) and "old" (`ld.so-1.7.0` alone). Every ld.so since glibc 2.2
reads the new form, so that is what is written; for a compat file with an extension see `build`.

    header     48 bytes: magic 17, version 3, u32 entries, u32 bytes of strings, u8 byte order (0 unset, 2 little,
               3 big), 3 unused, u32 offset of the extension (0: none), 12 unused
    entries    24 bytes each: u32 flags, u32 name, u32 path, u32 osversion, u64 hwcap; name and path are offsets
    strings    each ends with NUL; they may share their tails
    extension  u32 magic, u32 sections, then 16 bytes each: u32 tag, u32 flags, u32 offset, u32 size

Offsets of strings count from the new header, those of the extension and its sections from the start of the file.

A cache comes out of an image and may be hostile, so sizes are bounded and every offset is checked before it is used.
"""

from __future__ import annotations

import _struct

from nvct.errors import NvctError
from nvct.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# The largest caches seen hold some 20,000 entries in 2 MB.
MAX_SIZE = 64 << 20  # bytes of a cache; also of all its names and paths together, which may share bytes
MAX_ENTRIES = 200_000
MAX_NAME = 255  # bytes, as in the kernel's NAME_MAX and PATH_MAX
MAX_PATH = 4095
MAX_SECTIONS = 16
MAX_EXTENSION = 1 << 20  # bytes of all sections together

ENTRY_SIZE = 24  # bytes

# The bits of an entry's flags that tell its architecture and ABI; the rest tell the C library (3: glibc).
ARCHITECTURE = 0xFF00

# glibc's ldconfig.h. A 64-bit machine has the flags of the 32-bit programs that it runs, too.
_FLAGS = {
    ("x86_64", 64): 0x0303,
    ("x86_64", 32): 0x0003,
    ("i386", 32): 0x0003,
    ("i686", 32): 0x0003,
    ("aarch64", 64): 0x0A03,
    ("aarch64", 32): 0x0903,
    ("armv7l", 32): 0x0903,
    ("ppc64le", 64): 0x0503,
}

_OLD_MAGIC = b"ld.so-1.7.0"
_OLD_HEADER = 16
_OLD_ENTRY = 12
_MAGIC = b"glibc-ld.so.cache1.1"
_HEADER = 48
_WORDS = ENTRY_SIZE // 4
_LITTLE_ENDIAN = 2
_BIG_ENDIAN = 3
_EXTENSION_MAGIC = 0xEAA42174
_HWCAPS_TAG = 1  # its section is an array of u32 string offsets: names of glibc-hwcaps folders

_TOP = 1 << 31

_ORDER_NAMES = {"<": "little", ">": "big"}  # struct's letters

_REMEDY = "rebuild it with ldconfig in the image"


class LoaderCacheError(NvctError):
    """The loader cache is malformed, too large, or another machine's: rebuild it, remove it, or leave it alone."""


@record
class Entry:
    """One line of the cache: programs of the architecture in `flags` that ask for `name` get `path`.

    Bytes that are no UTF-8 are kept as surrogates, as `os.fsdecode` does. An entry whose `hwcap` has bit 62 set is for
    the processors of one glibc-hwcaps folder only.
    """

    name: str
    path: str
    flags: int
    osversion: int = 0
    hwcap: int = 0


@record
class Section:
    """A section of the extension: `tag` 0 names the generator, 1 lists glibc-hwcaps folders, others are kept."""

    tag: int
    flags: int
    payload: bytes


@record
class Cache:
    """A cache with its tables taken apart, in the order of the file. `entries` is what most callers want.

    `form` is "new", "compat" or "old", `byteorder` "little" or "big". `table` has 24 bytes an entry, as a little-endian
    file of the new form has them; its offsets count from `strings_at` bytes before `strings`.
    """

    form: str
    byteorder: str
    table: bytes
    strings: bytes
    strings_at: int
    sections: tuple[Section, ...] = ()

    @property
    def count(self) -> int:
        return len(self.table) // ENTRY_SIZE

    @property
    def entries(self) -> Iterator[Entry]:
        """Every entry, in the order of the file. Raises LoaderCacheError as `lines` does."""
        for index, (name, path) in enumerate(self.lines()):
            flags, _, _, osversion, low, high = self.row(index)
            yield Entry(decode(name), decode(path), flags, osversion, high << 32 | low)

    def lines(self) -> Iterator[tuple[bytes, bytes]]:
        """Name and path of each entry. Raises LoaderCacheError as `line` does, and where all together are too long."""
        total = 0
        for index in range(self.count):
            name, path = self.line(index)
            total += len(name) + len(path)
            if total > MAX_SIZE:
                raise LoaderCacheError(f"loader cache: its names and paths exceed {MAX_SIZE} bytes together; {_REMEDY}")
            yield name, path

    def line(self, index: int) -> tuple[bytes, bytes]:
        """Name and path of an entry. Raises LoaderCacheError at a string without end or too long."""
        _, name, path, *_ = self.row(index)
        return self.string(name, MAX_NAME), self.string(path, MAX_PATH)

    def row(self, index: int) -> tuple[int, ...]:
        """Of an entry flags, name and path (offsets), osversion, low and high half of hwcap."""
        return _struct.unpack_from(f"<{_WORDS}I", self.table, index * ENTRY_SIZE)

    def string(self, offset: int, limit: int) -> bytes:
        """The string at an offset, of at most `limit` bytes. Raises LoaderCacheError."""
        at = offset - self.strings_at
        end = self.strings.find(0, at, at + limit + 1)
        if end < 0:
            raise LoaderCacheError(
                f"loader cache: the string at offset {offset} has no end within {limit} bytes; {_REMEDY}"
            )
        return self.strings[at:end]


EMPTY = Cache("new", "little", b"", b"", _HEADER)


def decode(text: bytes) -> str:
    """A name or path as text; `encode` is the way back."""
    return text.decode("utf-8", "surrogateescape")


def encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def parse(data: bytes) -> Cache:
    """The cache in `data`, the bytes of a whole file. Raises LoaderCacheError; strings are checked when read."""
    if len(data) > MAX_SIZE:
        raise LoaderCacheError(f"loader cache: {len(data)} bytes, more than the {MAX_SIZE} that are read; {_REMEDY}")
    if data.startswith(_MAGIC):
        return _parse_new(data, 0, "new")
    if not data.startswith(_OLD_MAGIC):
        raise LoaderCacheError(
            f"loader cache: begins with {data[:20]!r}, not with {_MAGIC!r} or {_OLD_MAGIC!r}; {_REMEDY}"
        )
    count, order = _old_count(data)
    end = _OLD_HEADER + _OLD_ENTRY * count
    # A new header follows at the alignment of its u64 fields: 8, but 4 in files of i386.
    for start in (end, end + -end % 8):
        if data.startswith(_MAGIC, start):
            return _parse_new(data, start, "compat")
    return _parse_old(data, count, order)


def architecture_of(cache: Cache) -> frozenset[int]:
    """The architectures that the entries are for, as `flags & ARCHITECTURE`: {0x0300, 0x0000} is x86-64 with i386."""
    flags = _column(cache.table, 0)
    if flags.tobytes() == flags[:1].tobytes() * len(flags):  # as in most images; to gather 20,000 takes 0.3 ms
        flags = flags[:1]
    return frozenset(each & ARCHITECTURE for each in frozenset(flags))


def flags_for(architecture: str, bits: int) -> int:
    """The flags of a glibc library for programs of `bits` (64 or 32) on a machine (`uname -m`)."""
    try:
        return _FLAGS[architecture, bits]
    except KeyError:
        known = ", ".join(f"{name} ({width} bits)" for name, width in _FLAGS)
        raise LoaderCacheError(
            f"loader cache: no flags known for {bits}-bit libraries on {architecture}, only for {known}"
        ) from None


def names(data: bytes, architecture: str) -> list[tuple[str, str, int]]:
    """What the cache of a machine lists, in its order: (name, path, bits).

    `bits` is 64 or 32 by the entry's flags, and 0 where these are not this machine's: then only the file itself can
    tell, since caches with wrong or unknown flags exist. Raises LoaderCacheError as `parse` and `entries` do.
    """
    widths = {flags & ARCHITECTURE: bits for (machine, bits), flags in _FLAGS.items() if machine == architecture}
    return [(entry.name, entry.path, widths.get(entry.flags & ARCHITECTURE, 0)) for entry in parse(data).entries]


# Reading


def _column(table: bytes, column: int) -> memoryview:
    """One of the six numbers of every entry. Every machine that nvct knows is little-endian, like the table."""
    return memoryview(memoryview(table).cast("I")[column::_WORDS].tobytes()).cast("I")


def _check_count(count: int, size: int, room: int) -> None:
    if count * size > room:
        raise LoaderCacheError(f"loader cache: claims {count} entries, has room for {max(room, 0) // size}; {_REMEDY}")
    if count > MAX_ENTRIES:
        raise LoaderCacheError(f"loader cache: {count} entries, more than the {MAX_ENTRIES} that are read; {_REMEDY}")


def _check_offsets(offsets: Sequence[int], first: int, last: int) -> None:
    """The string table is at offsets first to last; `last` itself is beyond it."""
    if offsets and not (first <= min(offsets) and max(offsets) < last):
        raise LoaderCacheError(
            f"loader cache: string offsets {min(offsets)} to {max(offsets)}, expected {first} to {last - 1}; {_REMEDY}"
        )


def _all_between(offsets: bytes, first: int, last: int) -> bool:
    """Whether each of the little-endian u32 is at least `first` and below `last`; both are at most MAX_SIZE.

    All are added to at once, as one long number, and the top bits looked at: min() and max() of 40,000 numbers take a
    millisecond more. Nothing is carried into the next one, since no top bit is set before.
    """
    ones = _ones(len(offsets) // 4)
    top, every = ones << 31, int.from_bytes(offsets, "little")
    if every & top:
        return False
    return every + ones * (_TOP - first) & top == top and not every + ones * (_TOP - last) & top


def _old_count(data: bytes) -> tuple[int, str]:
    """The number of old entries, and the byte order: an old header tells none, so that in which they fit the file."""
    if len(data) < _OLD_HEADER:
        raise LoaderCacheError(f"loader cache: {len(data)} bytes, shorter than its header of {_OLD_HEADER}; {_REMEDY}")
    little, big = int.from_bytes(data[12:16], "little"), int.from_bytes(data[12:16], "big")
    room = len(data) - _OLD_HEADER
    count, order = (big, ">") if big * _OLD_ENTRY <= room < little * _OLD_ENTRY else (little, "<")
    _check_count(count, _OLD_ENTRY, room)
    return count, order


def _parse_old(data: bytes, count: int, order: str) -> Cache:
    """Old entries are flags, name and path; their offsets count from the first string."""
    old = _struct.unpack_from(f"{order}{count * 3}I", data, _OLD_HEADER)
    words = [0] * (count * _WORDS)
    for column in range(3):
        words[column::_WORDS] = old[column::3]
    strings = data[_OLD_HEADER + _OLD_ENTRY * count :]
    _check_offsets(old[1::3] + old[2::3], 0, len(strings))
    return Cache("old", _ORDER_NAMES[order], pack(words), strings, 0)


def pack(words: Sequence[int]) -> bytes:
    """Numbers of a table as bytes."""
    return _struct.pack(f"<{len(words)}I", *words)


def _parse_new(data: bytes, start: int, form: str) -> Cache:
    if len(data) < start + _HEADER:
        raise LoaderCacheError(f"loader cache: ends at byte {len(data)}, within its header of {_HEADER}; {_REMEDY}")
    order = _byte_order(data, start)
    count, size = _struct.unpack_from(f"{order}2I", data, start + 20)
    (extension_at,) = _struct.unpack_from(f"{order}I", data, start + 32)
    _check_count(count, ENTRY_SIZE, len(data) - start - _HEADER)
    strings_at = _HEADER + ENTRY_SIZE * count
    if size > len(data) - start - strings_at:
        room = len(data) - start - strings_at
        raise LoaderCacheError(f"loader cache: claims {size} bytes of strings, has room for {room}; {_REMEDY}")
    table = data[start + _HEADER : start + strings_at]
    if order == ">":
        table = pack(_halves_swapped(_struct.unpack(f">{count * _WORDS}I", table)))
    for column in (1, 2):
        offsets = _column(table, column)
        if not _all_between(offsets.tobytes(), strings_at, strings_at + size):
            _check_offsets(offsets, strings_at, strings_at + size)
    strings = data[start + strings_at : start + strings_at + size]
    sections = _parse_extension(data, extension_at, order) if extension_at else ()
    for section in sections:
        if section.tag == _HWCAPS_TAG:
            _check_offsets(_hwcap_offsets(section, order), strings_at, strings_at + size)
    return Cache(form, _ORDER_NAMES[order], table, strings, strings_at, sections)


def _byte_order(data: bytes, start: int) -> str:
    mark = data[start + 28] & 3
    if mark == _LITTLE_ENDIAN:
        return "<"
    if mark == _BIG_ENDIAN:
        return ">"
    if mark:
        raise LoaderCacheError(f"loader cache: byte order {mark} in its header, expected 0, 2 or 3; {_REMEDY}")
    # Before glibc 2.33 there was no mark; a count read in the wrong order does not fit the file.
    count = int.from_bytes(data[start + 20 : start + 24], "little")
    swapped = int.from_bytes(data[start + 20 : start + 24], "big")
    room = len(data) - start - _HEADER
    return ">" if swapped * ENTRY_SIZE <= room < count * ENTRY_SIZE else "<"


def _halves_swapped(words: tuple[int, ...]) -> tuple[int, ...]:
    """The first half of a u64 is its high one in a big-endian file."""
    swapped = list(words)
    swapped[4::_WORDS], swapped[5::_WORDS] = words[5::_WORDS], words[4::_WORDS]
    return tuple(swapped)


def _parse_extension(data: bytes, at: int, order: str) -> tuple[Section, ...]:
    if at + 8 > len(data):
        raise LoaderCacheError(f"loader cache: extension at byte {at} of {len(data)}; {_REMEDY}")
    magic, count = _struct.unpack_from(f"{order}2I", data, at)
    if magic != _EXTENSION_MAGIC:
        raise LoaderCacheError(f"loader cache: extension begins with {magic:#x}, not {_EXTENSION_MAGIC:#x}; {_REMEDY}")
    if count > MAX_SECTIONS or at + 8 + 16 * count > len(data):
        raise LoaderCacheError(
            f"loader cache: {count} extension sections, expected at most {MAX_SECTIONS} before the end; {_REMEDY}"
        )
    headers = [_struct.unpack_from(f"{order}4I", data, at + 8 + 16 * i) for i in range(count)]
    total = 0
    for tag, _, offset, size in headers:
        total += size
        if offset + size > len(data) or total > MAX_EXTENSION or (tag == _HWCAPS_TAG and size % 4):
            raise LoaderCacheError(
                f"loader cache: extension section {tag} is {size} bytes at {offset}, expected to lie in the file's "
                f"{len(data)}, below {MAX_EXTENSION} with the others; {_REMEDY}"
            )
    return tuple(Section(tag, flags, data[offset : offset + size]) for tag, flags, offset, size in headers)


def _hwcap_offsets(section: Section, order: str) -> tuple[int, ...]:
    return _struct.unpack(f"{order}{len(section.payload) // 4}I", section.payload)


# Writing


def build(cache: Cache) -> bytes:
    """The file of a little-endian cache, in the new form. Raises LoaderCacheError when it would be too large.

    A compat file with an extension keeps an old table, an empty one. ldconfig counts the offsets of glibc-hwcaps names
    from the new header and ld.so (2.36) from the start of the file, so that it passes over such entries wherever an old
    table comes first. In the new form they would come to life, and names resolve to other files than before.
    """
    before = _OLD_MAGIC.ljust(_OLD_HEADER, b"\0") if cache.form == "compat" and cache.sections else b""
    strings_at = _HEADER + ENTRY_SIZE * cache.count
    shift = strings_at - cache.strings_at
    end = len(before) + strings_at + len(cache.strings)
    padding = b"\0" * (-end % 4)
    extension_at = end + len(padding) if cache.sections else 0
    extension = _build_extension(cache.sections, shift, extension_at) if cache.sections else b""
    size = end + len(padding) + len(extension)
    if size > MAX_SIZE or cache.count > MAX_ENTRIES:
        raise LoaderCacheError(
            f"loader cache: would have {cache.count} entries and {size} bytes, more than {MAX_ENTRIES} and {MAX_SIZE}; "
            + _REMEDY
        )
    numbers = _struct.pack("<2IB3xI12x", cache.count, len(cache.strings), _LITTLE_ENDIAN, extension_at)
    return b"".join((before, _MAGIC, numbers, _shifted(cache, shift), cache.strings, padding, extension))


def _shifted(cache: Cache, shift: int) -> bytes:
    """The table with `shift` added to the offsets of names and paths.

    A column is added to as one long number, since to add 40,000 times takes 5 ms more. Nothing is carried from one
    place to the next: the offsets before and after are of bytes in a file of at most MAX_SIZE.
    """
    table = bytearray(cache.table)
    words = memoryview(table).cast("I")
    step = _ones(cache.count) * abs(shift)
    for column in (1, 2):
        old = int.from_bytes(_column(cache.table, column).tobytes(), "little")
        new = old + step if shift > 0 else old - step
        words[column::_WORDS] = memoryview(new.to_bytes(4 * cache.count, "little")).cast("I")
    return bytes(table)


def _ones(count: int) -> int:
    """As many 32-bit numbers in one, each of them 1."""
    return int.from_bytes(b"\1\0\0\0" * count, "little")


def _build_extension(sections: tuple[Section, ...], shift: int, at: int) -> bytes:
    """The extension for byte `at` of the file, its names of glibc-hwcaps folders moved with the strings."""
    directory = _struct.pack("<2I", _EXTENSION_MAGIC, len(sections))
    at += len(directory) + 16 * len(sections)
    payloads = b""
    for section in sections:
        payload = section.payload
        if section.tag == _HWCAPS_TAG:
            offsets = [offset + shift for offset in _hwcap_offsets(section, "<")]
            payload = _struct.pack(f"<{len(offsets)}I", *offsets)
        directory += _struct.pack("<4I", section.tag, section.flags, at + len(payloads), len(payload))
        payloads += payload + b"\0" * (-len(payload) % 4)  # ld.so reads arrays in place, and wants them aligned
    return directory + payloads
