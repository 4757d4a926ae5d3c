"""The loader cache: glibc's /etc/ld.so.cache, read, merged and written as bytes. Nothing here opens a file.

Three forms are found in the wild: "new" (a header `glibc-ld.so.cache1.1`; what ldconfig writes since glibc 2.32),
"compat" (an old table, then the new one; its habit before) and "old" (`ld.so-1.7.0` alone). Every ld.so since glibc 2.2
reads the new form, so that is what is written; for a compat file with an extension see `_build`.

    header     48 bytes: magic 17, version 3, u32 entries, u32 bytes of strings, u8 byte order (0 unset, 2 little,
               3 big), 3 unused, u32 offset of the extension (0: none), 12 unused
    entries    24 bytes each: u32 flags, u32 name, u32 path, u32 osversion, u64 hwcap; name and path are offsets
    strings    each ends with NUL; they may share their tails
    extension  u32 magic, u32 sections, then 16 bytes each: u32 tag, u32 flags, u32 offset, u32 size

Offsets of strings count from the new header, those of the extension and its sections from the start of the file.

ld.so finds a name by bisection: entries stand in descending order of its own comparison of names (`_rank`), then
of flags, then of hwcap. An entry in the wrong place is listed by `ldconfig -p` and found by no program.

A cache comes out of an image and may be hostile, so sizes are bounded and every offset is checked before it is used.
"""

from __future__ import annotations

import _struct

from nvct.errors import NvctError
from nvct.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    Addition = tuple[str, str, int]
    Drop = Callable[[str, str], bool] | AbstractSet[tuple[str, str]]
    Rank = tuple[bytes | int, ...]

# The largest caches seen hold some 20,000 entries in 2 MB.
MAX_SIZE = 64 << 20  # bytes of a cache; also of all its names and paths together, which may share bytes
MAX_ENTRIES = 200_000
MAX_NAME = 255  # bytes, as in the kernel's NAME_MAX and PATH_MAX
MAX_PATH = 4095
MAX_SECTIONS = 16
MAX_EXTENSION = 1 << 20  # bytes of all sections together

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

# i386, x86-64 and x32. ld.so compares names as C's `char`, which is signed on these.
_SIGNED_CHAR = (0x0000, 0x0300, 0x0800)

_OLD_MAGIC = b"ld.so-1.7.0"
_OLD_HEADER = 16
_OLD_ENTRY = 12
_MAGIC = b"glibc-ld.so.cache1.1"
_HEADER = 48
_ENTRY = 24
_WORDS = _ENTRY // 4
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
        return len(self.table) // _ENTRY

    @property
    def entries(self) -> Iterator[Entry]:
        """Every entry, in the order of the file. Raises LoaderCacheError at a string without end or too long."""
        for name, path, (flags, _, _, osversion, low, high) in _lines(self):
            yield Entry(name, path, flags, osversion, high << 32 | low)


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
    return frozenset(flags & ARCHITECTURE for flags in frozenset(_column(cache.table, 0)))


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


def merge(
    data: bytes | None,
    add: Sequence[Addition],
    drop: Drop = frozenset(),
    parsed: Cache | None = None,
    beginnings: tuple[str, ...] = ("",),
) -> bytes:
    """A cache that answers as `data` does, save for the added (name, path, flags) and what `drop` names.

    Empty or None is a cache without entries. An added name replaces every entry of that name and architecture, whatever
    processors it is for; names are equal that ld.so holds equal (`lib01.so`, `lib1.so`), and the last of two wins.
    `drop`, a set or a function of (name, path), is asked about the old entries whose names have one of the
    `beginnings`, which end in no digit; one that equals an addition stays. `parsed` is what `parse` makes of `data`,
    where the caller has it.
    Where nothing changes, `data` comes back as it is, so to merge twice is to merge once. Strings of entries that go
    stay in the file as dead bytes, since finding those that nobody shares would mean to read them all.

    Raises LoaderCacheError for a cache that `parse` refuses or that is big-endian, and for an addition that no cache
    can hold. Whether the cache is for the container's architecture is for the caller to ask (`architecture_of`).
    """
    cache = parsed or (parse(data) if data else Cache("new", "little", b"", b"", _HEADER))
    if cache.byteorder != "little":
        raise LoaderCacheError("loader cache: big-endian, so the image is for another kind of machine; leave it alone")
    for addition in add:
        _check_addition(*addition)
    flags = add[0][2] if add else next(iter(_column(cache.table, 0)), 0)
    signed_char = flags & ARCHITECTURE in _SIGNED_CHAR
    merged = _merged(cache, add, drop, beginnings, signed_char)
    if data and merged is cache:
        return data
    if add and not (_in_order(cache, signed_char) and _merged(merged, add, frozenset(), (), signed_char) is merged):
        merged = _merged(_restored(cache, signed_char), add, drop, beginnings, signed_char)
    return _build(merged)


# Reading


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")


def _string(cache: Cache, offset: int, limit: int) -> bytes:
    at = offset - cache.strings_at
    end = cache.strings.find(0, at, at + limit + 1)
    if end < 0:
        raise LoaderCacheError(
            f"loader cache: the string at offset {offset} has no end within {limit} bytes; {_REMEDY}"
        )
    return cache.strings[at:end]


def _lines(cache: Cache) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, path and words of each entry."""
    total = 0
    for index in range(cache.count):
        name, path, row = _line(cache, index)
        total += len(name) + len(path)
        if total > MAX_SIZE:
            raise LoaderCacheError(f"loader cache: its names and paths exceed {MAX_SIZE} bytes together; {_REMEDY}")
        yield _decode(name), _decode(path), row


def _line(cache: Cache, index: int) -> tuple[bytes, bytes, tuple[int, ...]]:
    row = _row(cache, index)
    return _string(cache, row[1], MAX_NAME), _string(cache, row[2], MAX_PATH), row


def _row(cache: Cache, index: int) -> tuple[int, ...]:
    """Flags, name, path, osversion, low and high half of hwcap."""
    return _struct.unpack_from(f"<{_WORDS}I", cache.table, index * _ENTRY)


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
    ones = int.from_bytes(b"\1\0\0\0" * (len(offsets) // 4), "little")
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
    return Cache("old", _ORDER_NAMES[order], _table(words), strings, 0)


def _table(words: Sequence[int]) -> bytes:
    return _struct.pack(f"<{len(words)}I", *words)


def _parse_new(data: bytes, start: int, form: str) -> Cache:
    if len(data) < start + _HEADER:
        raise LoaderCacheError(f"loader cache: ends at byte {len(data)}, within its header of {_HEADER}; {_REMEDY}")
    order = _byte_order(data, start)
    count, size = _struct.unpack_from(f"{order}2I", data, start + 20)
    (extension_at,) = _struct.unpack_from(f"{order}I", data, start + 32)
    _check_count(count, _ENTRY, len(data) - start - _HEADER)
    strings_at = _HEADER + _ENTRY * count
    if size > len(data) - start - strings_at:
        room = len(data) - start - strings_at
        raise LoaderCacheError(f"loader cache: claims {size} bytes of strings, has room for {room}; {_REMEDY}")
    table = data[start + _HEADER : start + strings_at]
    if order == ">":
        table = _table(_halves_swapped(_struct.unpack(f">{count * _WORDS}I", table)))
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
    return ">" if swapped * _ENTRY <= room < count * _ENTRY else "<"


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


# The order of entries

_DIGITS = bytes(byte if 48 <= byte <= 57 else 32 for byte in range(256))
_AS_SIGNED = bytes(byte ^ 0x80 for byte in range(256))
_ABOVE_ALL = b"\xff\xff"
_PROBES = 128


class _Ranks:
    """The names of a cache as ld.so compares them, on a machine whose `char` is signed or not."""

    def __init__(self, cache: Cache, signed_char: bool) -> None:
        self._cache = cache
        self._signed_char = signed_char
        self._known: dict[int, Rank] = {}  # bisections begin at the same places

    def at(self, index: int) -> Rank:
        rank = self._known.get(index)
        if rank is None:
            at = index * _ENTRY + 4
            offset = int.from_bytes(self._cache.table[at : at + 4], "little")
            rank = self._known[index] = _rank(_string(self._cache, offset, MAX_NAME), self._signed_char)
        return rank

    def first_at_most(self, rank: Rank) -> int:
        """The first entry whose name ranks no higher."""
        low, high = 0, self._cache.count
        while low < high:
            middle = (low + high) // 2
            if self.at(middle) > rank:
                low = middle + 1
            else:
                high = middle
        return low


def _rank(name: bytes, signed_char: bool) -> Rank:
    """Ranks compare as ld.so compares names: a run of digits as C's int (9 < 10, 01 = 1), above letters."""
    table = _AS_SIGNED if signed_char else None
    parts: list[bytes | int] = []
    rest = name
    for run in name.translate(_DIGITS).split():
        head, _, rest = rest.partition(run)
        parts.append(head.translate(table) + _ABOVE_ALL)
        parts.append(int(run) + (1 << 31) & 0xFFFFFFFF)  # a longer run wraps round
    parts.append((rest + b"\0").translate(table))
    return tuple(parts)


def _in_order(cache: Cache, signed_char: bool) -> bool:
    """Whether neighbours stand in order, at up to 128 places: comparing all of 20,000 names would take 40 ms.

    Some image builders write caches of their own, in the order of bytes. There ld.so misses most names, and would
    miss what is inserted by bisection.
    """
    ranks = _Ranks(cache, signed_char)
    step = cache.count // _PROBES + 1
    return all(ranks.at(index) >= ranks.at(index + 1) for index in range(0, cache.count - 1, step))


def _restored(cache: Cache, signed_char: bool) -> Cache:
    """The same entries where ld.so finds them."""
    ranks = _Ranks(cache, signed_char)

    def place(index: int) -> tuple[Rank, int, int]:
        flags, _, _, _, low, high = _row(cache, index)
        return ranks.at(index), flags, high << 32 | low

    places = [index * _ENTRY for index in sorted(range(cache.count), key=place, reverse=True)]
    return replace(cache, table=b"".join(cache.table[at : at + _ENTRY] for at in places))


# Merging


@record
class _New:
    """An entry that goes in before the one of index `before`."""

    before: int
    name: bytes
    path: bytes
    flags: int


def _check_addition(name: str, path: str, flags: int) -> None:
    fits = 0 < len(_encode(name)) <= MAX_NAME and len(_encode(path)) <= MAX_PATH
    if not fits or "\0" in name + path or "/" in name or not path.startswith("/") or not 0 <= flags <= 0xFFFFFFFF:
        raise LoaderCacheError(
            f"loader cache: cannot hold {name!r} => {path!r} with flags {flags:#x}; expected a file name of at most "
            f"{MAX_NAME} bytes, an absolute path of at most {MAX_PATH}, and 32 bits of flags"
        )


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _merged(cache: Cache, add: Sequence[Addition], drop: Drop, beginnings: tuple[str, ...], signed_char: bool) -> Cache:
    """The cache with additions and without dropped entries; the same object when it is so already."""
    new, replaced, kept = _place(cache, add, signed_char)
    gone = (replaced | _dropped(cache, drop, beginnings, signed_char)) - kept
    if not new and not gone:
        return cache
    strings, rows = _append_strings(cache, new)
    return replace(cache, table=_splice(cache.table, rows, gone), strings=strings)


def _place(cache: Cache, add: Sequence[Addition], signed_char: bool) -> tuple[list[_New], set[int], set[int]]:
    """What is new, in ld.so's order; the indices of entries that it replaces; those of entries that are right."""
    ranks = _Ranks(cache, signed_char)
    ranked = [(_rank(_encode(name), signed_char), flags, _encode(name), _encode(path)) for name, path, flags in add]
    wanted = {(addition[0], addition[1] & ARCHITECTURE): addition for addition in ranked}
    new: list[_New] = []
    replaced: set[int] = set()
    kept: set[int] = set()
    for rank, flags, name, path in sorted(wanted.values(), reverse=True):
        before, same = _same_name(cache, rank, flags, ranks)
        if len(same) == 1 and _is(cache, same[0], name, path, flags):
            kept.add(same[0])
        else:
            replaced.update(same)
            new.append(_New(before, name, path, flags))
    return new, replaced, kept


def _same_name(cache: Cache, rank: Rank, flags: int, ranks: _Ranks) -> tuple[int, list[int]]:
    """The index before which an entry of this name and these flags belongs, and those of its architecture there now."""
    index = before = ranks.first_at_most(rank)
    same: list[int] = []
    while index < cache.count and ranks.at(index) == rank:
        found = _row(cache, index)[0]
        if found & ARCHITECTURE == flags & ARCHITECTURE:
            same.append(index)
        if found > flags:
            before = index + 1
        index += 1
    return before, same


def _is(cache: Cache, index: int, name: bytes, path: bytes, flags: int) -> bool:
    found, name_at, path_at, osversion, low, high = _row(cache, index)
    return (
        (found, osversion, low, high) == (flags, 0, 0, 0)
        and _string(cache, name_at, MAX_NAME) == name
        and _string(cache, path_at, MAX_PATH) == path
    )


def _dropped(cache: Cache, drop: Drop, beginnings: tuple[str, ...], signed_char: bool) -> set[int]:
    if not drop:
        return set()
    asked = drop if callable(drop) else lambda name, path: (name, path) in drop
    candidates = _candidates(cache, beginnings, signed_char)
    return {index for index, name, path in candidates if asked(_decode(name), _decode(path))}


def _candidates(cache: Cache, beginnings: tuple[str, ...], signed_char: bool) -> Iterator[tuple[int, bytes, bytes]]:
    """Index, name and path of the entries whose names have one of the beginnings, which stand together."""
    if "" in beginnings:
        yield from ((index, _encode(name), _encode(path)) for index, (name, path, _) in enumerate(_lines(cache)))
        return
    ranks = _Ranks(cache, signed_char)
    for beginning in beginnings:
        *parts, last = _rank(_encode(beginning), signed_char)
        stem = bytes(last)[:-1]  # without the end of the name
        index = ranks.first_at_most((*parts, stem + _ABOVE_ALL + _ABOVE_ALL))
        while index < cache.count and ranks.at(index) >= (*parts, stem):
            name, path, _ = _line(cache, index)
            yield index, name, path
            index += 1


def _append_strings(cache: Cache, new: Sequence[_New]) -> tuple[bytes, list[tuple[int, bytes]]]:
    """The string table with the new names and paths; for each new entry its index and its bytes in the table."""
    pieces = [cache.strings]
    at = cache.strings_at + len(cache.strings)
    rows: list[tuple[int, bytes]] = []
    for entry in new:
        shared = entry.path.endswith(entry.name)
        text = entry.path + b"\0" if shared else entry.path + b"\0" + entry.name + b"\0"
        pieces.append(text)
        name_at = at + len(text) - len(entry.name) - 1
        rows.append((entry.before, _table((entry.flags, name_at, at, 0, 0, 0))))
        at += len(text)
    return b"".join(pieces), rows


def _splice(table: bytes, rows: Iterable[tuple[int, bytes]], gone: Iterable[int]) -> bytes:
    """The table with each row before the entry of its index, in the order given, and without entries that are gone."""
    edits = [(index, index, row) for index, row in rows] + [(index, index + 1, b"") for index in gone]
    edits.sort(key=lambda edit: edit[:2])
    pieces: list[bytes] = []
    at = 0
    for start, end, row in edits:
        pieces += (table[at * _ENTRY : start * _ENTRY], row)
        at = end
    return b"".join((*pieces, table[at * _ENTRY :]))


# Writing


def _build(cache: Cache) -> bytes:
    """The file, in the new form.

    A compat file with an extension keeps an old table, an empty one. ldconfig counts the offsets of glibc-hwcaps names
    from the new header and ld.so (2.36) from the start of the file, so that it passes over such entries wherever an old
    table comes first. In the new form they would come to life, and names resolve to other files than before.
    """
    before = _OLD_MAGIC.ljust(_OLD_HEADER, b"\0") if cache.form == "compat" and cache.sections else b""
    strings_at = _HEADER + _ENTRY * cache.count
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

    One addition of two long numbers, since to add 40,000 times takes 5 ms more. Nothing is carried from one place to
    the next: the offsets before and after are of bytes in a file of at most MAX_SIZE.
    """
    row = _table((0, abs(shift), abs(shift), 0, 0, 0))
    old, step = int.from_bytes(cache.table, "little"), int.from_bytes(row * cache.count, "little")
    return (old + step if shift > 0 else old - step).to_bytes(len(cache.table), "little")


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
