"""The loader cache: against ldconfig, which writes it, against ld.so, which searches it, and against hostile bytes."""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvct import ldcache, ldmerge
from nvct.ldcache import Entry, LoaderCacheError, flags_for, parse
from nvct.ldmerge import merge

NATIVE = flags_for(platform.machine(), 64)
FORMS = ("old", "compat", "new")
DLOPEN_ALL = Path(__file__).parents[1] / "programs" / "dlopen_all.c"

# Names on whose order byte-wise sorting and ld.so disagree, and ordinary ones around them.
OLD_NAMES = [
    *(f"libdigits.so.{number}" for number in (1, 2, 9, 10, 11, 99, 100, 20230101)),
    *(f"libdigits{number}.so" for number in (3, 7, 10, 27)),
    *(f"lib{letter}{tail}.so.1" for letter in "abcdklmnopqxyz" for tail in ("", "-x", "_x", "+", "4", "40")),
    *("libA.so", "libB.so.2", "lib1.so", "lib.so", "libcudart.so.12", "libcudart.so.11.0", "libcu.so.1"),
]
NEW_NAMES = [
    *("libcuda.so", "libcuda.so.1", "libcuda.so.550.163.01", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1"),
    *("libdigits.so.8", "libdigits.so.12", "liba0.so", "libzz.so.1", "libA0.so.1"),
]


# ld.so as the judge


def compile_c(*arguments: str | Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    subprocess.run([compiler, *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared object without SONAME or needs, to be linked under many names."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "empty.c").write_text("int nothing;\n")
    compile_c("-shared", "-nostdlib", "-o", folder / "empty.so", folder / "empty.c")
    return folder / "empty.so"


@pytest.fixture(scope="module")
def glibc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system with this machine's loader and C library, and dlopen_all."""
    root = tmp_path_factory.mktemp("glibc")
    compile_c("-O1", "-o", root / "dlopen_all", DLOPEN_ALL, "-ldl")
    listed = subprocess.run(["ldd", root / "dlopen_all"], check=True, capture_output=True, text=True).stdout
    for path in re.findall(r"/\S+\.so\S*", listed):
        (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / path[1:])
    (root / "etc").mkdir()
    return root


class Container:
    """A copy of the glibc root with libraries in folders that only the cache leads to."""

    def __init__(self, root: Path, library: Path) -> None:
        self.root = root
        self.library = library

    def put(self, folder: str, names: list[str]) -> None:
        (self.root / folder[1:]).mkdir(parents=True, exist_ok=True)
        for name in names:
            os.link(self.library, self.root / folder[1:] / name)

    def ldconfig(self, form: str, *folders: str) -> bytes:
        """What ldconfig writes for these folders."""
        (self.root / "etc/ld.so.conf").write_text("\n".join(folders) + "\n")
        command = [program("ldconfig"), "-r", str(self.root), "-X", "-i", "-c", form, "-C", "/etc/ld.so.cache"]
        subprocess.run(command, check=True, capture_output=True)
        return (self.root / "etc/ld.so.cache").read_bytes()

    def loads(self, cache: bytes, names: list[str]) -> dict[str, str]:
        """What the loader answers with this cache: name to path, for the names that it finds."""
        (self.root / "etc/ld.so.cache").write_bytes(cache)
        command = [*chroot_command(), str(self.root), "/dlopen_all", *names]
        done = subprocess.run(command, capture_output=True, text=True, env={})
        lines = [line.split("\t") for line in done.stdout.splitlines()]
        assert [line[0] for line in lines] == names, done.stderr
        return {line[0]: line[1] for line in lines if line[1] != "!"}


@pytest.fixture
def container(tmp_path: Path, glibc: Path, library: Path) -> Container:
    root = tmp_path / "root"
    shutil.copytree(glibc, root, symlinks=True)
    shutil.copy(library, tmp_path / "library.so")  # so that links stay within one file system
    return Container(root, tmp_path / "library.so")


def program(name: str) -> str:
    path = shutil.which(name, path="/sbin:/usr/sbin:/bin:/usr/bin")
    if path is None:
        pytest.skip(f"no {name}")
    return path


@functools.cache
def chroot_command() -> tuple[str, ...]:
    chroot = program("chroot")
    command = (chroot,) if os.geteuid() == 0 else (program("unshare"), "-r", chroot)
    if subprocess.run([*command, "/", "/bin/true"], capture_output=True).returncode:
        pytest.skip("chroot is not permitted: neither as root nor in a user namespace")
    return command


def additions(names: list[str], folder: str = "/gpu") -> list[tuple[str, str, int]]:
    return [(name, f"{folder}/{name}", NATIVE) for name in names]


def listing(data: bytes) -> list[tuple[str, str]]:
    return [(entry.name, entry.path) for entry in parse(data).entries]


def printed(path: Path) -> list[tuple[str, str]]:
    """What `ldconfig -p` lists."""
    done = subprocess.run([program("ldconfig"), "-p", "-C", str(path)], check=True, capture_output=True, text=True)
    return re.findall(r"^\t(\S+) \(.*\) => (.+)$", done.stdout, re.MULTILINE)


# Reading what ldconfig writes


@pytest.mark.parametrize("form", FORMS)
def test_reads_what_ldconfig_writes(container: Container, form: str) -> None:
    container.put("/opt/libs", OLD_NAMES)
    data = container.ldconfig(form, "/opt/libs")
    cache = parse(data)
    assert (cache.form, cache.byteorder) == (form, "little")
    assert listing(data) == printed(container.root / "etc/ld.so.cache")
    assert {("libdigits.so.10", "/opt/libs/libdigits.so.10"), ("lib1.so", "/opt/libs/lib1.so")} <= set(listing(data))
    assert ldcache.architecture_of(cache) == {NATIVE & ldcache.ARCHITECTURE}


@pytest.mark.parametrize("form", FORMS)
def test_the_order_is_ldconfigs(container: Container, form: str) -> None:
    container.put("/opt/libs", OLD_NAMES)
    by_ldconfig = container.ldconfig(form, "/opt/libs")
    ours = merge(None, [(name, path, NATIVE) for name, path in reversed(listing(by_ldconfig))])
    assert listing(ours) == listing(by_ldconfig)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_to_do_is_nothing_done(container: Container, form: str) -> None:
    container.put("/opt/libs", OLD_NAMES)
    data = container.ldconfig(form, "/opt/libs")
    there = [(entry.name, entry.path, entry.flags) for entry in list(parse(data).entries)[:50]]
    assert merge(data, []) is data
    assert merge(data, there, {("libnone.so", "/none")}) is data
    assert merge(data, there, lambda name, path: (name, path) == there[3][:2]) is data


# What the loader finds after a merge


@pytest.mark.parametrize("form", FORMS)
def test_every_old_and_new_name_loads_after_a_merge(container: Container, form: str) -> None:
    container.put("/opt/libs", OLD_NAMES)
    container.put("/gpu", NEW_NAMES)
    before = container.ldconfig(form, "/opt/libs")
    merged = merge(before, additions(NEW_NAMES))
    unchanged = [line for line in listing(before) if line[0] not in OLD_NAMES]  # the C library itself
    expected = {name: f"/opt/libs/{name}" for name in OLD_NAMES} | {name: f"/gpu/{name}" for name in NEW_NAMES}
    assert container.loads(before, OLD_NAMES + NEW_NAMES) == {name: f"/opt/libs/{name}" for name in OLD_NAMES}
    assert container.loads(merged, OLD_NAMES + NEW_NAMES) == expected
    assert dict(printed(container.root / "etc/ld.so.cache")) == expected | dict(unchanged)
    assert merge(merged, additions(NEW_NAMES)) is merged


@pytest.mark.parametrize("nothing", [None, b""])
def test_every_new_name_loads_from_a_fresh_cache(container: Container, nothing: bytes | None) -> None:
    container.put("/gpu", NEW_NAMES)
    merged = merge(nothing, additions(NEW_NAMES))
    assert container.loads(merged, NEW_NAMES) == {name: f"/gpu/{name}" for name in NEW_NAMES}
    assert merge(merged, additions(NEW_NAMES)) is merged


@pytest.mark.parametrize("form", FORMS)
def test_a_merge_into_a_cache_of_no_libraries(container: Container, form: str) -> None:
    container.put("/gpu", NEW_NAMES)
    (container.root / "opt/none").mkdir(parents=True)
    before = container.ldconfig(form, "/opt/none")
    merged = merge(before, additions(NEW_NAMES))
    assert container.loads(merged, NEW_NAMES) == {name: f"/gpu/{name}" for name in NEW_NAMES}


@pytest.mark.parametrize("form", FORMS)
def test_added_names_replace_old_ones(container: Container, form: str) -> None:
    replaced = [*OLD_NAMES[::3], "libcuda.so.1"]
    container.put("/opt/libs", [*OLD_NAMES, "libcuda.so.1"])
    container.put("/gpu", replaced)
    merged = merge(container.ldconfig(form, "/opt/libs"), additions(replaced))
    found = container.loads(merged, [*OLD_NAMES, "libcuda.so.1"])
    assert found == {name: f"/opt/libs/{name}" for name in OLD_NAMES} | {name: f"/gpu/{name}" for name in replaced}
    assert sorted(name for name, _ in listing(merged)).count("libcuda.so.1") == 1


@pytest.mark.parametrize("form", FORMS)
def test_dropped_entries_vanish_and_all_others_load(container: Container, form: str) -> None:
    container.put("/opt/libs", OLD_NAMES)
    container.put("/gpu", NEW_NAMES)
    gone = {(name, f"/opt/libs/{name}") for name in OLD_NAMES[::4]}
    before = container.ldconfig(form, "/opt/libs")
    merged = merge(before, additions(NEW_NAMES), gone)
    found = container.loads(merged, OLD_NAMES + NEW_NAMES)
    stay = [name for name in OLD_NAMES if (name, f"/opt/libs/{name}") not in gone]
    assert found == {name: f"/opt/libs/{name}" for name in stay} | {name: f"/gpu/{name}" for name in NEW_NAMES}
    assert merge(before, additions(NEW_NAMES), lambda name, path: (name, path) in gone) == merged
    assert merge(merged, additions(NEW_NAMES), gone) is merged


def test_another_driver_version_leaves_nothing_of_the_first(container: Container) -> None:
    container.put("/opt/libs", OLD_NAMES)
    container.put("/gpu", ["libcuda.so.1", "libcuda.so.535.54", "libcuda.so.550.90"])
    before = container.ldconfig("new", "/opt/libs")
    first = merge(before, additions(["libcuda.so.1", "libcuda.so.535.54"]))
    second = merge(
        first, additions(["libcuda.so.1", "libcuda.so.550.90"]), lambda name, path: path == "/gpu/libcuda.so.535.54"
    )
    assert ("libcuda.so.535.54", "/gpu/libcuda.so.535.54") in listing(first)
    found = container.loads(second, [*OLD_NAMES, "libcuda.so.1", "libcuda.so.535.54", "libcuda.so.550.90"])
    assert "libcuda.so.535.54" not in found
    assert len(found) == len(OLD_NAMES) + 2


def hwcap_levels() -> list[str]:
    """The glibc-hwcaps folders that the loader searches here, the best first."""
    loader = Path("/lib64/ld-linux-x86-64.so.2")
    if not loader.exists():
        pytest.skip("glibc-hwcaps folders are tested with those of x86-64")
    shown = subprocess.run([loader, "--help"], capture_output=True, text=True).stdout
    levels = re.findall(r"^  (x86-64-v\d) \(supported, searched\)", shown, re.MULTILINE)
    if len(levels) < 2:
        pytest.skip("the processor or glibc has fewer than two glibc-hwcaps folders")
    return levels


def hwcap_names(data: bytes) -> list[str]:
    """The glibc-hwcaps folders that the extension names."""
    cache = parse(data)
    payload = cache.sections[1].payload
    offsets = struct.unpack(f"<{len(payload) // 4}I", payload)
    return [cache.strings[offset - cache.strings_at :].split(b"\0")[0].decode() for offset in offsets]


@pytest.mark.parametrize("form", ["compat", "new"])
def test_entries_for_processors_are_kept(container: Container, form: str) -> None:
    levels = hwcap_levels()
    names = ["libh1.so.1", "libh2.so.9", "libh2.so.10", "libcuda.so.1"]
    container.put("/opt/libs", [*OLD_NAMES, *names])
    for level in levels:
        container.put(f"/opt/libs/glibc-hwcaps/{level}", names)
    container.put("/gpu", NEW_NAMES)
    before = container.ldconfig(form, "/opt/libs")
    merged = merge(before, additions(NEW_NAMES))
    # ld.so passes over the entries for processors in a compat file; they must not come to life by a merge.
    folder = f"/opt/libs/glibc-hwcaps/{levels[0]}" if form == "new" else "/opt/libs"
    best = {name: f"{folder}/{name}" for name in names}
    expected = {name: f"/opt/libs/{name}" for name in OLD_NAMES} | best | {name: f"/gpu/{name}" for name in NEW_NAMES}
    assert container.loads(before, names) == best
    assert container.loads(merged, OLD_NAMES + names + NEW_NAMES) == expected  # libcuda.so.1 is in both
    for_processors = [entry for entry in parse(before).entries if entry.hwcap and entry.name != "libcuda.so.1"]
    assert len(for_processors) == 3 * len(levels)
    assert [entry for entry in parse(merged).entries if entry.hwcap] == for_processors
    assert [section.tag for section in parse(merged).sections] == [0, 1]
    assert parse(merged).sections[0] == parse(before).sections[0]
    assert hwcap_names(merged) == hwcap_names(before) == sorted(levels)
    twice = merge(merge(merged, additions(["libq0.so"])), (), {("libq0.so", "/gpu/libq0.so")})
    assert container.loads(twice, OLD_NAMES + names + NEW_NAMES) == expected
    assert hwcap_names(twice) == sorted(levels)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs libraries of x86-64 and i386")
def test_libraries_of_another_width_stay(container: Container, tmp_path: Path) -> None:
    (tmp_path / "empty.c").write_text("int nothing;\n")
    for folder in ("/opt/libs", "/opt/libs32"):
        container.put(folder, ["libboth.so.1", "libmore.so.2"])
    try:
        compile_c("-m32", "-shared", "-nostdlib", "-o", tmp_path / "narrow.so", tmp_path / "empty.c")
    except subprocess.CalledProcessError:
        pytest.skip("the C compiler makes no 32-bit libraries")
    container.library = tmp_path / "narrow.so"
    for name in ("libboth.so.1", "libmore.so.2"):
        (container.root / "opt/libs32" / name).unlink()
    container.put("/opt/libs32", ["libboth.so.1", "libmore.so.2"])
    container.library = tmp_path / "library.so"
    container.put("/gpu", ["libboth.so.1"])
    before = container.ldconfig("new", "/opt/libs", "/opt/libs32")
    assert ldcache.architecture_of(parse(before)) == {0x0300, 0x0000}
    merged = merge(before, additions(["libboth.so.1"]))
    assert ("libboth.so.1", "/opt/libs32/libboth.so.1") in listing(merged)
    assert ("libboth.so.1", "/opt/libs/libboth.so.1") not in listing(merged)
    both = container.loads(merged, ["libboth.so.1", "libmore.so.2"])
    assert both == {"libboth.so.1": "/gpu/libboth.so.1", "libmore.so.2": "/opt/libs/libmore.so.2"}
    narrow = merge(merged, [("libboth.so.1", "/gpu32/libboth.so.1", 0x0003)])
    assert ("libboth.so.1", "/opt/libs32/libboth.so.1") not in listing(narrow)
    assert container.loads(narrow, ["libboth.so.1"]) == {"libboth.so.1": "/gpu/libboth.so.1"}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_flags_descend_within_a_name(order: tuple[int, ...]) -> None:
    lines = [("libx.so", f"/{flags:x}", flags) for flags in (0x0A03, 0x0303, 0x0003)]
    data = merge(None, [("liby.so", "/y", NATIVE), ("liba.so", "/a", NATIVE)])
    for index in order:
        data = merge(data, [lines[index]])
    assert listing(data) == [("liby.so", "/y"), *(line[:2] for line in lines), ("liba.so", "/a")]


def test_names_beyond_ascii_load(container: Container) -> None:
    names = ["lib\u00e9.so.1", "libc\u00fcda.so.1", "libcuda\u00e9.so", "libcud\u00e9.so"]
    container.put("/opt/libs", OLD_NAMES + names)
    container.put("/gpu", NEW_NAMES)
    merged = merge(container.ldconfig("new", "/opt/libs"), additions(NEW_NAMES))
    found = container.loads(merged, OLD_NAMES + names + NEW_NAMES)
    assert found == {name: f"/opt/libs/{name}" for name in OLD_NAMES + names} | {
        name: f"/gpu/{name}" for name in NEW_NAMES
    }


def test_a_cache_in_the_order_of_bytes_is_mended(container: Container) -> None:
    """Some image builders sort as bytes, ascending: ld.so finds next to nothing there, and would miss what we add."""
    container.put("/opt/libs", OLD_NAMES)
    container.put("/gpu", NEW_NAMES)
    rows = [(name, f"/opt/libs/{name}", NATIVE, 0, 0) for name in sorted(OLD_NAMES)]
    before = new_form(rows)
    assert len(container.loads(before, OLD_NAMES)) < len(OLD_NAMES)
    merged = merge(before, additions(NEW_NAMES))
    expected = {name: f"/opt/libs/{name}" for name in OLD_NAMES} | {name: f"/gpu/{name}" for name in NEW_NAMES}
    assert container.loads(merged, OLD_NAMES + NEW_NAMES) == expected
    assert merge(merged, additions(NEW_NAMES)) is merged


# A model of the loader, for random caches


def libcmp(one: bytes, other: bytes, signed: bool) -> int:
    """ld.so's comparison of names, a character at a time."""
    i = j = 0
    while i < len(one):
        a, b = one[i], other[j] if j < len(other) else 0
        digits = (48 <= a <= 57, 48 <= b <= 57)
        if digits == (True, True):
            x = y = 0
            while i < len(one) and 48 <= one[i] <= 57:
                x, i = x * 10 + one[i] - 48, i + 1
            while j < len(other) and 48 <= other[j] <= 57:
                y, j = y * 10 + other[j] - 48, j + 1
            if x != y:
                return x - y
        elif digits[0] or digits[1]:
            return 1 if digits[0] else -1
        elif a != b:
            return as_char(a, signed) - as_char(b, signed)
        else:
            i, j = i + 1, j + 1
    return 0 - as_char(other[j], signed) if j < len(other) else 0


def as_char(byte: int, signed: bool) -> int:
    return byte - 256 if signed and byte > 127 else byte


def looked_up(data: bytes, name: str, flags: int) -> str | None:
    """What ld.so answers: bisection, then the first entry of this name with these flags."""
    entries = list(parse(data).entries)
    key = os.fsencode(name)
    low, high = 0, len(entries) - 1
    while low <= high:
        middle = (low + high) // 2
        order = libcmp(key, os.fsencode(entries[middle].name), signed=True)
        if order == 0:
            while middle and libcmp(key, os.fsencode(entries[middle - 1].name), signed=True) == 0:
                middle -= 1
            for entry in entries[middle:]:
                if libcmp(key, os.fsencode(entry.name), signed=True):
                    return None
                if entry.flags == flags:
                    return entry.path
            return None
        if order < 0:
            low = middle + 1
        else:
            high = middle - 1
    return None


NAMES = st.text(alphabet="ab.-_+0129Z\u00e9", min_size=1, max_size=6).map(lambda text: f"lib{text}.so")
FLAGS = st.sampled_from([0x0303, 0x0003])
ADDITIONS = st.lists(st.tuples(NAMES, st.sampled_from(["/a/x", "/b/y.so"]), FLAGS), max_size=12)


@given(NAMES.map(os.fsencode), NAMES.map(os.fsencode), st.booleans())
def test_ranks_compare_as_the_loader_compares(one: bytes, other: bytes, signed: bool) -> None:
    rank = functools.partial(ldmerge._rank, signed_char=signed)
    by_rank = (rank(one) > rank(other)) - (rank(one) < rank(other))
    by_loader = libcmp(one, other, signed)
    assert by_rank == (by_loader > 0) - (by_loader < 0)


def test_long_numbers_wrap_as_in_c() -> None:
    rank = functools.partial(ldmerge._rank, signed_char=True)
    assert rank(b"lib4294967297.so") == rank(b"lib1.so")
    assert rank(b"lib2147483648.so") < rank(b"lib1.so")
    assert rank(b"lib" + b"9" * 252) != rank(b"lib1.so")


def resolved(additions: list[tuple[str, str, int]]) -> dict[tuple[object, int], str]:
    """What a cache of these lines answers, for names as ld.so tells them apart."""
    rank = functools.partial(ldmerge._rank, signed_char=True)
    return {(rank(os.fsencode(name)), flags): path for name, path, flags in additions}


@settings(max_examples=150, deadline=None)
@given(ADDITIONS, ADDITIONS, st.sets(st.tuples(NAMES, st.sampled_from(["/a/x", "/b/y.so"])), max_size=4), st.data())
def test_a_merge_answers_as_its_model(
    old: list[tuple[str, str, int]],
    new: list[tuple[str, str, int]],
    gone: set[tuple[str, str]],
    data: st.DataObject,
) -> None:
    before = merge(None, old)
    if old:
        gone |= {(name, path) for name, path, _ in data.draw(st.lists(st.sampled_from(old), max_size=3))}
    merged = merge(before, new, gone)
    kept = [(entry.name, entry.path, entry.flags) for entry in parse(before).entries]
    model = resolved([line for line in kept if line[:2] not in gone]) | resolved(new)
    for name, _, flags in old + new:
        key = (ldmerge._rank(os.fsencode(name), True), flags)
        assert looked_up(merged, name, flags) == model.get(key)
    assert len(listing(merged)) == len(model)
    assert merge(merged, new, gone) is merged
    assert listing(merge(merged, [])) == listing(merged)


# Other writers, other machines


def new_form(rows: list[tuple[str, str, int, int, int]], order: str = "<", mark: int = 0) -> bytes:
    """A cache in the new form, entries in the order given: (name, path, flags, osversion, hwcap)."""
    strings = bytearray()
    table = bytearray()
    at = 48 + 24 * len(rows)
    for name, path, flags, osversion, hwcap in rows:
        value = at + len(strings)
        strings += os.fsencode(path) + b"\0"
        key = at + len(strings)
        strings += os.fsencode(name) + b"\0"
        table += struct.pack(f"{order}4IQ", flags, key, value, osversion, hwcap)
    header = b"glibc-ld.so.cache1.1" + struct.pack(f"{order}2IB19x", len(rows), len(strings), mark)
    return bytes(header + table + strings)


ROWS = [("libb.so.1", "/l/libb.so.1", 0x0A03, 7, 1 << 62 | 3), ("liba.so.1", "/l/liba.so.1", 0x0903, 0, 5)]


@pytest.mark.parametrize("mark", [0, 2])
def test_little_endian_with_and_without_its_mark(mark: int) -> None:
    cache = parse(new_form(ROWS, "<", mark))
    assert cache.byteorder == "little"
    assert list(cache.entries) == [Entry(*row) for row in ROWS]
    assert ldcache.architecture_of(cache) == {0x0A00, 0x0900}


@pytest.mark.parametrize("mark", [0, 3])
def test_big_endian_is_read_and_never_merged(mark: int) -> None:
    data = new_form(ROWS, ">", mark)
    assert parse(data).byteorder == "big"
    assert list(parse(data).entries) == [Entry(*row) for row in ROWS]
    with pytest.raises(LoaderCacheError, match="big-endian"):
        merge(data, additions(["libcuda.so.1"]))


def test_an_invalid_byte_order_is_refused() -> None:
    with pytest.raises(LoaderCacheError, match="byte order 1"):
        parse(new_form(ROWS, "<", 1))


@pytest.mark.parametrize("padding", [0, 4])
def test_a_new_table_after_an_odd_number_of_old_entries(padding: int) -> None:
    """i386 aligns the new header to 4, other machines to 8."""
    old = b"ld.so-1.7.0\0" + struct.pack("<I3I", 1, 3, 0, 0)
    cache = parse(old + bytes(padding) + new_form(ROWS))
    assert cache.form == "compat"
    assert list(cache.entries) == [Entry(*row) for row in ROWS]


def test_an_old_table_alone() -> None:
    data = b"ld.so-1.7.0\0" + struct.pack("<I3I", 1, 0x0303, 0, 10) + b"liba.so.1\0/l/liba.so.1\0"
    assert parse(data).form == "old"
    assert list(parse(data).entries) == [Entry("liba.so.1", "/l/liba.so.1", 0x0303)]


def test_names_tell_the_width_where_flags_do() -> None:
    rows = [("libx.so", f"/l/{flags:x}", flags, 0, 0) for flags in (0x0303, 0x0A03, 0x0903, 0x0003, 0x7703)]
    data = new_form(rows)
    widths = {
        machine: [bits for _, _, bits in ldcache.names(data, machine)] for machine in ("x86_64", "aarch64", "mips")
    }
    assert widths == {"x86_64": [64, 0, 0, 32, 0], "aarch64": [0, 64, 32, 0, 0], "mips": [0] * 5}
    assert ldcache.names(data, "x86_64")[1] == ("libx.so", "/l/a03", 0)


def test_flags_for_machines() -> None:
    assert [flags_for(*machine) for machine in (("x86_64", 64), ("x86_64", 32), ("aarch64", 64), ("aarch64", 32))] == [
        0x0303,
        0x0003,
        0x0A03,
        0x0903,
    ]
    with pytest.raises(LoaderCacheError, match="32-bit libraries on ppc64le, only for x86_64"):
        flags_for("ppc64le", 32)


def test_unknown_sections_and_fields_are_carried_along() -> None:
    base = new_form([("libm.so.6", "/l/libm.so.6", 0x0303, 0x30201, 1 << 62 | 1)], mark=2)
    base += bytes(-len(base) % 4)
    directory = struct.pack("<2I4I", 0xEAA42174, 1, 9, 77, len(base) + 24, 5) + b"abcde"
    data = base[:32] + struct.pack("<I", len(base)) + base[36:] + directory
    merged = merge(data, additions(["libcuda.so.1"]))
    assert parse(merged).sections == (ldcache.Section(9, 77, b"abcde"),)
    assert Entry("libm.so.6", "/l/libm.so.6", 0x0303, 0x30201, 1 << 62 | 1) in list(parse(merged).entries)


@pytest.mark.parametrize(
    "addition",
    [
        ("", "/a", 3),
        ("a/b", "/a", 3),
        ("a\0b", "/a", 3),
        ("a", "relative", 3),
        ("a", "/a\0", 3),
        ("a" * 256, "/a", 3),
        ("a", "/" * 4096, 3),
        ("a", "/a", 1 << 32),
        ("a", "/a", -1),
    ],
)
def test_additions_that_no_cache_can_hold(addition: tuple[str, str, int]) -> None:
    with pytest.raises(LoaderCacheError, match="cannot hold"):
        merge(None, [addition])


# Hostile bytes


def outcome(data: bytes) -> list[Entry] | None:
    """The entries, or None when they are refused; anything but LoaderCacheError fails the test."""
    try:
        merge(data, additions(["libcuda.so.1"]), lambda name, path: False)
        return list(parse(data).entries)
    except LoaderCacheError as error:
        assert "\n" not in str(error)
        return None


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory, glibc: Path, library: Path) -> dict[str, bytes]:
    """Small caches of each form, by ldconfig."""
    root = tmp_path_factory.mktemp("samples") / "root"
    (root / "etc").mkdir(parents=True)
    shutil.copy(library, root.parent / "library.so")
    small = Container(root, root.parent / "library.so")
    small.put("/opt/libs", ["liba.so.1", "libb.so.9", "libb.so.10"])
    small.put("/opt/libs/glibc-hwcaps/x86-64-v2", ["liba.so.1"])
    return {form: small.ldconfig(form, "/opt/libs") for form in FORMS}


@pytest.mark.parametrize("form", FORMS)
def test_cut_off_at_each_byte(samples: dict[str, bytes], form: str) -> None:
    whole = samples[form]
    entries = outcome(whole)
    assert entries is not None and len(entries) >= 3
    for end in range(1, len(whole)):
        cut = outcome(whole[:end])
        assert cut is None or form != "new", f"cut at {end}"
        # A compat file may end as a valid old one, whose strings are then cut.
        assert cut is None or form == "old" or parse(whole[:end]).form == "old", f"cut at {end}"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_changed_bytes(samples: dict[str, bytes], data: st.DataObject) -> None:
    sample = bytearray(samples[data.draw(st.sampled_from(FORMS))])
    for _ in range(data.draw(st.integers(1, 4))):
        sample[data.draw(st.integers(0, len(sample) - 1))] = data.draw(st.sampled_from([0, 1, 3, 127, 128, 255]))
    outcome(bytes(sample))


@given(st.binary(max_size=200), st.sampled_from([b"", b"ld.so-1.7.0\0", b"glibc-ld.so.cache1.1"]))
def test_garbage(tail: bytes, magic: bytes) -> None:
    outcome(magic + tail)


@pytest.mark.parametrize("size", [0, 1, 47])
def test_short_files(size: int) -> None:
    with pytest.raises(LoaderCacheError):
        parse(new_form([])[:size])


def refused(data: bytes, reason: str) -> None:
    """Refused at once, without memory for what the header claims."""
    tracemalloc.start()
    begin = time.perf_counter()
    try:
        with pytest.raises(LoaderCacheError, match=reason):
            list(parse(data).entries)
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - begin < 5


def test_claims_beyond_the_file() -> None:
    refused(b"glibc-ld.so.cache1.1" + b"\xff" * 8 + bytes(20), "claims 4294967295 entries, has room for 0")
    refused(b"ld.so-1.7.0\0" + b"\xff" * 4, "claims 4294967295 entries, has room for 0")
    refused(b"glibc-ld.so.cache1.1" + struct.pack("<2I20x", 0, 0xFFFFFFFF), "claims 4294967295 bytes of strings")


def test_limits() -> None:
    refused(bytes(ldcache.MAX_SIZE + 1), "more than the 67108864")
    count = ldcache.MAX_ENTRIES + 1
    refused(b"glibc-ld.so.cache1.1" + struct.pack("<2I20x", count, 1) + bytes(24 * count + 1), "200001 entries")
    refused(new_form([("l" * 256, "/l", 3, 0, 0)]), "no end within 255 bytes")
    refused(new_form([("l", "/" * 4096, 3, 0, 0)]), "no end within 4095 bytes")


def test_strings_that_share_bytes_cannot_fill_memory() -> None:
    count = 100_000
    at = 48 + 24 * count
    strings = b"/" * 4000 + b"\0l\0"
    row = struct.pack("<4IQ", 0x0303, at + 4001, at, 0, 0)
    data = b"glibc-ld.so.cache1.1" + struct.pack("<2I20x", count, len(strings)) + row * count + strings
    refused(data, "exceed 67108864 bytes together")


@pytest.mark.parametrize("offset", [0, 47, 48 + 24, 48 + 23, 48 + 24 + 9, 0xFFFFFFFF])
@pytest.mark.parametrize("column", [1, 2])
def test_offsets_outside_the_strings(offset: int, column: int) -> None:
    words = [0x0303, 48 + 24, 48 + 24, 0, 0, 0]
    words[column] = offset
    data = b"glibc-ld.so.cache1.1" + struct.pack("<2I20x6I", 1, 9, *words) + b"libc.so.6"[:8] + b"\0"
    if offset == 48 + 24:
        assert [entry.name for entry in parse(data).entries] == ["libc.so."]
    else:
        refused(data, "string offsets")


@pytest.mark.parametrize(
    ("extension", "reason"),
    [
        (struct.pack("<2I", 0xEAA42175, 0), "extension begins with 0xeaa42175"),
        (struct.pack("<2I", 0xEAA42174, 1), "1 extension sections"),
        (struct.pack("<2I", 0xEAA42174, 17) + bytes(16 * 17), "17 extension sections"),
        (struct.pack("<2I4I", 0xEAA42174, 1, 0, 0, 0, 0xFFFFFFFF), "section 0 is 4294967295 bytes at 0"),
        (struct.pack("<2I4I", 0xEAA42174, 1, 1, 0, 48, 7), "section 1 is 7 bytes at 48"),
        (struct.pack("<2I5I", 0xEAA42174, 1, 1, 0, 72, 4, 0xFFFFFFFF), "string offsets 4294967295"),
        (b"", "extension at byte 48 of 48"),
    ],
)
def test_extensions_that_lie(extension: bytes, reason: str) -> None:
    header = b"glibc-ld.so.cache1.1" + struct.pack("<4I12x", 0, 0, 2, 48)
    refused(header + extension, reason)


def test_sections_that_share_bytes_cannot_fill_memory() -> None:
    size = (1 << 20) // 4
    directory = struct.pack("<2I", 0xEAA42174, 5) + struct.pack("<4I", 7, 0, 48, size) * 5
    header = b"glibc-ld.so.cache1.1" + struct.pack("<4I12x", 0, 0, 2, 48)
    refused(header + directory + bytes(size), "below 1048576 with the others")


def test_a_hundred_thousand_entries_are_merged_in_bounded_time() -> None:
    many = [(f"libm{number}.so", f"/l/libm{number}.so", 0x0303, 0, 0) for number in reversed(range(100_000))]
    data = new_form(many)
    begin = time.perf_counter()
    merged = merge(data, additions(NEW_NAMES))
    assert time.perf_counter() - begin < 2
    assert parse(merged).count == 100_000 + len(NEW_NAMES)
    assert merge(merged, additions(NEW_NAMES)) is merged


def test_a_hundred_thousand_entries_of_one_name_are_merged_in_bounded_time() -> None:
    row = ("libcuda.so.1", "/l/libcuda.so.1", NATIVE, 0, 0)
    begin = time.perf_counter()
    merged = merge(new_form([row] * 100_000), additions(NEW_NAMES))
    assert time.perf_counter() - begin < 5
    assert len(listing(merged)) == len(NEW_NAMES)


def test_the_hook_may_import_it() -> None:
    banned = "click yaml pynvml pyroute2 psutil dataclasses typing pathlib subprocess logging argparse re json ctypes"
    banned += " struct functools collections contextlib enum tempfile shutil"
    script = f"import sys; sys.path.insert(0, {str(Path(ldcache.__file__).parents[1])!r}); import nvct.ldmerge"
    script += f"; print(*sorted(set({banned.split()!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""


@given(ADDITIONS, ADDITIONS, st.lists(st.sampled_from(["lib", "liba", "lib0a", "lib12.", "libé", "b"]), max_size=3))
def test_only_names_with_the_beginnings_are_asked_about(
    old: list[tuple[str, str, int]], more: list[tuple[str, str, int]], beginnings: list[str]
) -> None:
    data = merge(merge(None, old), more)
    asked: list[tuple[str, str]] = []
    merge(data, [], lambda name, path: asked.append((name, path)) is not None, beginnings=tuple(beginnings))
    expected = {(entry.name, entry.path) for entry in parse(data).entries if entry.name.startswith(tuple(beginnings))}
    assert set(asked) == expected


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=5), st.integers(0, 1 << 26), st.integers(0, 1 << 26))
def test_offsets_are_compared_all_at_once(offsets: list[int], first: int, last: int) -> None:
    near = [first, last, max(first - 1, 0), max(last - 1, 0), *offsets]
    for numbers in ([], offsets, near[:1], near[3:4], near):
        packed = struct.pack(f"<{len(numbers)}I", *numbers)
        assert ldcache._all_between(packed, first, last) == all(first <= number < last for number in numbers)
