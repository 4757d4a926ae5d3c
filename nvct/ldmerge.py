"""A loader cache with entries added and dropped, as nvct writes it into a container.

ld.so finds a name by bisection: entries stand in descending order of its own comparison of names (`_rank`), then
of flags, then of hwcap. An entry in the wrong place is listed by `ldconfig -p` and found by no program.
"""

from __future__ import annotations

from nvct.ldcache import (
    ARCHITECTURE,
    EMPTY,
    ENTRY_SIZE,
    MAX_NAME,
    MAX_PATH,
    Cache,
    LoaderCacheError,
    build,
    decode,
    encode,
    pack,
    parse,
)
from nvct.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    Addition = tuple[str, str, int]
    Drop = Callable[[str, str], bool] | AbstractSet[tuple[str, str]]
    Rank = tuple[bytes | int, ...]

# i386, x86-64 and x32. ld.so compares names as C's `char`, which is signed on these.
_SIGNED_CHAR = (0x0000, 0x0300, 0x0800)


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
    cache = parsed or (parse(data) if data else EMPTY)
    if cache.byteorder != "little":
        raise LoaderCacheError("loader cache: big-endian, so the image is for another kind of machine; leave it alone")
    for addition in add:
        _check_addition(*addition)
    flags = add[0][2] if add else (cache.row(0)[0] if cache.count else 0)
    signed_char = flags & ARCHITECTURE in _SIGNED_CHAR
    merged = _merged(cache, add, drop, beginnings, signed_char)
    if data and merged is cache:
        return data
    if add and not (_in_order(cache, signed_char) and _merged(merged, add, frozenset(), (), signed_char) is merged):
        merged = _merged(_restored(cache, signed_char), add, drop, beginnings, signed_char)
    return build(merged)


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
            at = index * ENTRY_SIZE + 4
            offset = int.from_bytes(self._cache.table[at : at + 4], "little")
            rank = self._known[index] = _rank(self._cache.string(offset, MAX_NAME), self._signed_char)
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
        flags, _, _, _, low, high = cache.row(index)
        return ranks.at(index), flags, high << 32 | low

    places = [index * ENTRY_SIZE for index in sorted(range(cache.count), key=place, reverse=True)]
    return replace(cache, table=b"".join(cache.table[at : at + ENTRY_SIZE] for at in places))


# Merging


@record
class _New:
    """An entry that goes in before the one of index `before`."""

    before: int
    name: bytes
    path: bytes
    flags: int


def _check_addition(name: str, path: str, flags: int) -> None:
    fits = 0 < len(encode(name)) <= MAX_NAME and len(encode(path)) <= MAX_PATH
    if not fits or "\0" in name + path or "/" in name or not path.startswith("/") or not 0 <= flags <= 0xFFFFFFFF:
        raise LoaderCacheError(
            f"loader cache: cannot hold {name!r} => {path!r} with flags {flags:#x}; expected a file name of at most "
            f"{MAX_NAME} bytes, an absolute path of at most {MAX_PATH}, and 32 bits of flags"
        )


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
    ranked = [(_rank(encode(name), signed_char), flags, encode(name), encode(path)) for name, path, flags in add]
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
        found = cache.row(index)[0]
        if found & ARCHITECTURE == flags & ARCHITECTURE:
            same.append(index)
        if found > flags:
            before = index + 1
        index += 1
    return before, same


def _is(cache: Cache, index: int, name: bytes, path: bytes, flags: int) -> bool:
    found, name_at, path_at, osversion, low, high = cache.row(index)
    return (
        (found, osversion, low, high) == (flags, 0, 0, 0)
        and cache.string(name_at, MAX_NAME) == name
        and cache.string(path_at, MAX_PATH) == path
    )


def _dropped(cache: Cache, drop: Drop, beginnings: tuple[str, ...], signed_char: bool) -> set[int]:
    if not drop:
        return set()
    asked = drop if callable(drop) else lambda name, path: (name, path) in drop
    candidates = _candidates(cache, beginnings, signed_char)
    return {index for index, name, path in candidates if asked(decode(name), decode(path))}


def _candidates(cache: Cache, beginnings: tuple[str, ...], signed_char: bool) -> Iterator[tuple[int, bytes, bytes]]:
    """Index, name and path of the entries whose names have one of the beginnings, which stand together."""
    if "" in beginnings:
        yield from ((index, *line) for index, line in enumerate(cache.lines()))
        return
    ranks = _Ranks(cache, signed_char)
    for beginning in beginnings:
        *parts, last = _rank(encode(beginning), signed_char)
        stem = bytes(last)[:-1]  # without the end of the name
        index = ranks.first_at_most((*parts, stem + _ABOVE_ALL + _ABOVE_ALL))
        while index < cache.count and ranks.at(index) >= (*parts, stem):
            name, path = cache.line(index)
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
        rows.append((entry.before, pack((entry.flags, name_at, at, 0, 0, 0))))
        at += len(text)
    return b"".join(pieces), rows


def _splice(table: bytes, rows: Iterable[tuple[int, bytes]], gone: Iterable[int]) -> bytes:
    """The table with each row before the entry of its index, in the order given, and without entries that are gone."""
    edits = [(index, index, row) for index, row in rows] + [(index, index + 1, b"") for index in gone]
    edits.sort(key=lambda edit: edit[:2])
    pieces: list[bytes] = []
    at = 0
    for start, end, row in edits:
        pieces += (table[at * ENTRY_SIZE : start * ENTRY_SIZE], row)
        at = end
    return b"".join((*pieces, table[at * ENTRY_SIZE :]))
